"""Places values: sharded dense parameters are gathered where a whole one is used, after their casts.

Elementwise equations on shards stay on shards, and spread their other operands (the gradient), so that the gradient is
reduced to its owner rather than to all. A lookup takes the owner's rows, and needs no gathered table.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from autopar.analysis.rules import ALIGNED
from autopar.ir.program import Atom, Block, Equation, Program, Var
from autopar.ir.program_plan import ProgramPlan
from autopar.ir.slicing import eliminate_dead
from autopar.ir.writer import Writer


def place(program: Program, bound: ProgramPlan) -> tuple[Program, str]:
    """Returns the program with `replicate` and `spread` where shards are used (`Plan.shards`)."""
    if not bound.shards:
        return program, "no dense parameter is spread"
    placing = _Placing({program.block.inputs[k]: axis for k, axis in bound.shards.items()})
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


@dataclass(eq=False)
class _Placing(Writer):
    """The block being written."""

    shards: dict[Atom, int]  #: Spread value -> its axis.
    gathered: dict[Atom, Var] = field(default_factory=dict)  #: Spread value -> the gathered one.

    def add(self, equation: Equation) -> None:
        axis = next((self.shards[a] for a in equation.inputs if a in self.shards), None)
        if axis is None:
            self.append(equation)
        elif equation.op == "gather" and equation.inputs[0] in self.shards:
            rest = [self.whole(a) for a in equation.inputs[1:]]
            self.append(replace(equation, inputs=(equation.inputs[0], *rest)))
        elif equation.op in ALIGNED and equation.op not in ("concatenate", "sort"):
            shape = next(a for a in equation.inputs if a in self.shards).shape
            inputs = tuple(self._shard(a, axis) if a.shape == shape else a for a in equation.inputs)
            self.append(replace(equation, inputs=inputs))
            self.shards.update((v, axis) for v in equation.outputs if v.shape == shape)
        elif equation.op.startswith(("reduce_", "arg")):
            self.append(equation)
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
        return self.emit("ap.spread", (atom,), atom.type, {"axis": axis})
