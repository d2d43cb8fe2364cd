"""Places values: sharded dense parameters are gathered where a whole one is used, after their casts.

Elementwise equations on shards stay on shards, and spread their other operands (the gradient), so that the gradient is
reduced to its owner rather than to all. So do equations before them (its square), and reductions of what is spread
anyway (its norm). A lookup takes the owner's rows, and needs no gathered table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autopar.analysis.rules import ALIGNED
from autopar.ir.program import Atom, Block, Equation, Program, Var, known
from autopar.ir.program_plan import ProgramPlan
from autopar.ir.slicing import eliminate_dead
from autopar.ir.writer import Writer


def place(program: Program, bound: ProgramPlan) -> tuple[Program, str]:
    """Returns the program with `replicate` and `spread` where shards are used (`Plan.shards`)."""
    if not bound.shards:
        return program, "no dense parameter is spread"
    shards: dict[Atom, int] = {program.block.inputs[k]: axis for k, axis in bound.shards.items()}
    placing = _Placing(shards, _wanted(program.block, shards))
    for equation in program.block.equations:
        placing.add(equation)
    outputs = program.block.outputs
    # New states keep their place; every device gets any other result.
    returned = tuple(
        atom if out.state is not None else placing.whole(atom)
        for atom, out in zip(outputs, program.outputs, strict=True)
    )
    block, _ = eliminate_dead(Block(program.block.inputs, tuple(placing.equations), returned))
    gathered = sum(e.op == "ap.replicate" for e in block.equations)
    note = f"{len(bound.shards)} leaves in shards, {gathered} gathered for use"
    return replace(program, block=block), note


def _stays_spread(equation: Equation) -> bool:
    return equation.op in ALIGNED and equation.op not in ("concatenate", "sort")


def _is_reduction(equation: Equation) -> bool:
    return equation.op.startswith(("reduce_", "arg"))


def _wanted(block: Block, shards: Mapping[Atom, int]) -> dict[Atom, int]:
    """Returns values that are read in shards, and otherwise only to be reduced, each with its axis."""
    axes = dict(shards)
    for equation in block.equations:
        axis = next((axes[a] for a in equation.inputs if a in axes), None)
        if axis is not None and _stays_spread(equation):
            shape = next(a for a in equation.inputs if a in axes).shape
            axes.update((v, axis) for v in equation.outputs if v.shape == shape)
    uses: dict[Atom, set[int | None]] = {a: {None} for a in block.outputs if a not in axes}
    wanted = dict[Atom, int]()
    for equation in reversed(block.equations):
        for var in equation.outputs:
            if var not in axes and len(uses.get(var, ())) == 1 and None not in uses[var]:
                (axis,) = uses[var]
                wanted[var] = known(axis)
        if _is_reduction(equation):
            continue
        is_free = _stays_spread(equation) and not any(v in axes or uses.get(v) for v in equation.outputs)
        found = {axes.get(v, wanted.get(v)) for v in equation.outputs}
        axis = found.pop() if _stays_spread(equation) and len(found) == 1 else None
        for atom in equation.inputs:
            is_like = atom.shape == equation.outputs[0].shape if equation.outputs else False
            if not (is_free and is_like):
                uses.setdefault(atom, set()).add(axis if is_like else None)
    return wanted


@dataclass(eq=False)
class _Placing(Writer):
    """The block being written."""

    shards: dict[Atom, int]  #: Spread value -> its axis.
    wanted: Mapping[Atom, int]  #: Value that is spread where it is read -> its axis.
    gathered: dict[Atom, Var] = field(default_factory=dict)  #: Spread value -> the gathered one.
    spread: dict[tuple[Atom, int], Var] = field(default_factory=dict)  #: Value and axis -> its shards.

    def add(self, equation: Equation) -> None:
        axis = next((self.shards[a] for a in equation.inputs if a in self.shards), None)
        if axis is None:
            axis = next((self.wanted[a] for a in equation.inputs if a in self.wanted), None)
        if axis is None:
            self.append(equation)
        elif equation.op == "gather" and equation.inputs[0] in self.shards:
            rest = [self.whole(a) for a in equation.inputs[1:]]
            self.append(replace(equation, inputs=(equation.inputs[0], *rest)))
        elif _stays_spread(equation):
            shape = next(a for a in equation.inputs if a in self.shards or a in self.wanted).shape
            inputs = tuple(self._shard(a, axis) if a.shape == shape else a for a in equation.inputs)
            self.append(replace(equation, inputs=inputs))
            self.shards.update((v, axis) for v in equation.outputs if v.shape == shape)
        elif _is_reduction(equation):
            inputs = tuple(self._shard(a, self.wanted[a]) if a in self.wanted else a for a in equation.inputs)
            self.append(replace(equation, inputs=inputs))
        else:
            self.append(replace(equation, inputs=tuple(map(self.whole, equation.inputs))))

    def whole(self, atom: Atom) -> Atom:
        if atom not in self.shards:
            return atom
        if atom not in self.gathered:
            self.gathered[atom] = self.emit("ap.replicate", (atom,), atom.type, {"axis": self.shards[atom]})
        return self.gathered[atom]

    def _shard(self, atom: Atom, axis: int) -> Atom:
        if not isinstance(atom, Var) or self.shards.get(atom) == axis:
            return atom
        if (atom, axis) not in self.spread:
            self.spread[atom, axis] = self.emit("ap.spread", (atom,), atom.type, {"axis": axis})
        return self.spread[atom, axis]
