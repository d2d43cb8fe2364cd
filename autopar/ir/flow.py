"""Which inputs an output carries on: reaches it through elementwise equations.

This tells a new state from a value that merely looks like it, such as a gradient of the same structure. A state is
mostly carried on by sums (`new = old + update`); `scaled` ones (`decay * old + ...`) are less certain.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.program import Atom, Block, Equation, Var
from autopar.ir.rules import ALIGNED

_KEEP = frozenset(
    "add add_any sub select_n convert_element_type copy copy_p max min clamp optimization_barrier reshape transpose "
    "dynamic_update_slice".split()
)


def carried(block: Block, *, scaled: bool) -> list[int]:
    """For each output, the set of inputs that it carries on, as the bits of an integer.

    Args:
      block: Any block.
      scaled: Whether any elementwise equation carries a value on, or sums, selections and row writes only.
    """
    bits: dict[Atom, int] = {var: 1 << k for k, var in enumerate(block.inputs)}
    for equation in block.equations:
        sources = [bits.get(a, 0) if isinstance(a, Var) else 0 for a in equation.inputs]
        if any(sources):
            bits.update(zip(equation.outputs, _through(equation, sources, scaled), strict=True))
    return [bits.get(a, 0) if isinstance(a, Var) else 0 for a in block.outputs]


def _through(equation: Equation, sources: Sequence[int], scaled: bool) -> list[int]:
    if equation.op in ("scan", "remat"):
        inner = carried(equation.bodies[0], scaled=scaled)
        return [_union([s for k, s in enumerate(sources) if found >> k & 1]) for found in inner]
    if equation.op in ("cond", "while"):  # either may pass a value on
        return [_union(sources)] * len(equation.outputs)
    if equation.op in _KEEP or equation.op.startswith("scatter") or (scaled and equation.op in ALIGNED):
        return [_union(sources)] * len(equation.outputs)
    return [0] * len(equation.outputs)


def _union(sources: Sequence[int]) -> int:
    total = 0
    for source in sources:
        total |= source
    return total
