"""Which inputs an output carries on: reaches it through elementwise equations (`new = old + update`).

This tells a new state from a value that merely looks like it, such as a gradient of the same structure.
"""

from __future__ import annotations

from autopar.ir.program import Atom, Block, Equation, Var
from autopar.ir.rules import ALIGNED

_ALSO = frozenset({"scatter", "scatter-add", "dynamic_update_slice", "optimization_barrier", "reshape", "transpose"})


def carried(block: Block) -> list[int]:
    """For each output, the set of inputs that it carries on, as the bits of an integer."""
    bits: dict[Atom, int] = {var: 1 << k for k, var in enumerate(block.inputs)}
    for equation in block.equations:
        sources = [bits.get(a, 0) if isinstance(a, Var) else 0 for a in equation.inputs]
        if any(sources):
            bits.update(zip(equation.outputs, _through(equation, sources), strict=True))
    return [bits.get(a, 0) if isinstance(a, Var) else 0 for a in block.outputs]


def _through(equation: Equation, sources: list[int]) -> list[int]:
    if equation.op in ("scan", "remat"):
        inner = carried(equation.bodies[0])
        return [_translate(found, sources) for found in inner]
    if equation.op in ("cond", "while"):  # either may pass a value on
        return [_union(sources)] * len(equation.outputs)
    if equation.op in ALIGNED or equation.op in _ALSO:
        return [_union(sources)] * len(equation.outputs)
    return [0] * len(equation.outputs)


def _translate(found: int, sources: list[int]) -> int:
    """Bits of a body's inputs as bits of the operands behind them."""
    return _union([source for k, source in enumerate(sources) if found >> k & 1])


def _union(sources: list[int]) -> int:
    total = 0
    for source in sources:
        total |= source
    return total
