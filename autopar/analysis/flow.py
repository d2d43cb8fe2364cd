"""Follows dependences: which inputs reach an output through elementwise equations, sums or writes of rows.

That tells a new state (`new = old + update`) from a value that merely looks like it, such as a gradient of the
same structure, or a batch that is masked and returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from autopar.analysis.interpreter import Interpreter, union
from autopar.analysis.primitives import IDENTITIES
from autopar.ir import program
from autopar.ir.program import Atom, Block, Equation, Var

_SUMS = frozenset({"add", "add_any", "sub", "dynamic_update_slice"})
_KEEP = IDENTITIES | frozenset(
    "select_n convert_element_type max min clamp optimization_barrier reshape transpose".split()
)
_SCALE = frozenset({"mul", "div", "neg"})


#: Allowed scaling of a carried value: none, by a constant that leaves more than half of it, or any.
Scaled = Literal["never", "little", "ever"]


def dependent(
    equations: Iterable[Equation], starts: Iterable[Var], begins: Callable[[Equation], bool] = lambda equation: False
) -> set[Var]:
    """Returns values that depend on any of `starts`, these included, or on an equation for which `begins` holds."""
    reached = set(starts)
    for equation in equations:
        if begins(equation) or not reached.isdisjoint(equation.inputs):
            reached.update(equation.outputs)
    return reached


def carried(block: Block, *, scaled: Scaled) -> list[int]:
    """Returns for each output the set of inputs that it carries on, as the bits of an integer.

    `scaled`: whether `decay * old + update` carries `old` on, which is less certain: so does a gradient with weight
    decay, though not with a constant that leaves more than half of it.
    """
    walk = _Carried(block, scaled)
    return [walk.value(a)[1] for a in block.outputs]


def updated(block: Block) -> int:
    """Returns, as bits, the inputs of which the block makes a new value of their type, returned or not.

    A new value carries the input on in a sum, scaled little.
    """
    walk = _Carried(block, "little")
    made = {(v.shape, v.dtype): 0 for v in block.inputs}
    for var, (_, added) in walk.values.items():
        if added and (key := (var.shape, var.dtype)) in made:
            made[key] |= added
    return union(made[v.shape, v.dtype] & 1 << k for k, v in enumerate(block.inputs))


class _Carried(Interpreter[tuple[int, int]]):
    """Values are (inputs that reach them elementwise, those of them that were added to), as bits."""

    def __init__(self, block: Block, scaled: Scaled) -> None:
        super().__init__()
        self.scaled: Scaled = scaled
        self.values.update((var, (1 << k, 0)) for k, var in enumerate(block.inputs))
        self.run(block.equations)

    def unknown(self, atom: Atom) -> tuple[int, int]:
        return (0, 0)

    def equation(self, equation: Equation, operands: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
        for reach, _ in operands:
            if reach:
                return super().equation(equation, operands)
        return [(0, 0)] * len(equation.outputs)

    def join(self, values: Sequence[tuple[int, int]], atoms: Sequence[Atom]) -> tuple[int, int]:
        return union(r for r, _ in values), union(a for _, a in values)

    def end(self, carry: tuple[int, int], result: tuple[int, int]) -> tuple[int, int]:
        return result

    def while_loop(self, equation: Equation, operands: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
        reach, _ = self.join(operands, ())  # it may add, it may not
        return [(reach, reach)] * len(equation.outputs)

    def plain(self, equation: Equation, operands: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
        reach, added = self.join(operands, ())
        if equation.op in _SUMS or equation.op.startswith("scatter"):
            return [(reach, reach)] * len(equation.outputs)
        kept = equation.op in _KEEP or _is_scaled(equation, self.scaled)
        return [(reach, added) if kept else (0, 0)] * len(equation.outputs)


def _is_scaled(equation: Equation, scaled: Scaled) -> bool:
    if scaled != "little":
        return scaled == "ever" and equation.op in _SCALE
    constants = [a.value for a in equation.inputs if isinstance(a, program.Literal) and a.shape == ()]
    return equation.op == "mul" and any(abs(value - 0.75) < 0.25 for value in constants)
