"""Which inputs an output carries on: reaches it through elementwise equations, a sum or a write of rows among them.

This tells a new state (`new = old + update`) from a value that merely looks like it, such as a gradient of the same
structure, or a batch that is masked and handed back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from autopar.ir import program
from autopar.ir.program import Atom, Block, Equation, Var

_SUMS = frozenset({"add", "add_any", "sub", "dynamic_update_slice"})
_KEEP = frozenset(
    "select_n convert_element_type copy copy_p max min clamp optimization_barrier reshape transpose".split()
)
_SCALE = frozenset({"mul", "div", "neg"})


#: By what a value may be scaled on its way: nothing, a constant that leaves more than half of it, or anything.
Scaled = Literal["never", "little", "ever"]


def carried(block: Block, *, scaled: Scaled) -> list[int]:
    """For each output, the set of inputs that it carries on, as the bits of an integer.

    Args:
      block: Any block.
      scaled: Whether a value is carried on by being scaled as well (`decay * old + update`). That is less certain: so
        is a gradient with weight decay, though not by a constant that leaves more than half of it.
    """
    return [added for _, added in _carried(block, scaled)]


def _carried(block: Block, scaled: Scaled) -> list[tuple[int, int]]:
    """For each output: inputs that reach it elementwise; those of them that have been added to."""
    bits: dict[Atom, tuple[int, int]] = {var: (1 << k, 0) for k, var in enumerate(block.inputs)}
    for equation in block.equations:
        sources = [bits.get(a, (0, 0)) if isinstance(a, Var) else (0, 0) for a in equation.inputs]
        if any(reach for reach, _ in sources):
            bits.update(zip(equation.outputs, _through(equation, sources, scaled), strict=True))
    return [bits.get(a, (0, 0)) if isinstance(a, Var) else (0, 0) for a in block.outputs]


def _through(equation: Equation, sources: Sequence[tuple[int, int]], scaled: Scaled) -> list[tuple[int, int]]:
    reach, added = _union([r for r, _ in sources]), _union([a for _, a in sources])
    if equation.op in ("scan", "remat", "cond"):
        operands = sources[len(sources) - len(equation.bodies[0].inputs) :]
        bodies = [_carried(body, scaled) for body in equation.bodies]
        return [_outside(found, operands) for found in zip(*bodies, strict=True)]
    if equation.op == "while":  # it may add, it may not
        return [(reach, reach)] * len(equation.outputs)
    if equation.op in _SUMS or equation.op.startswith("scatter"):
        return [(reach, reach)] * len(equation.outputs)
    kept = equation.op in _KEEP or _is_scaled(equation, scaled)
    return [(reach, added) if kept else (0, 0)] * len(equation.outputs)


def _is_scaled(equation: Equation, scaled: Scaled) -> bool:
    if scaled != "little":
        return scaled == "ever" and equation.op in _SCALE
    constants = [a.value for a in equation.inputs if isinstance(a, program.Literal) and a.shape == ()]
    return equation.op == "mul" and any(abs(value - 0.75) < 0.25 for value in constants)


def _outside(found: Sequence[tuple[int, int]], operands: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """What a body's output carries on, in terms of what its operands do."""
    reach = _union([r for r, _ in found])
    inner = _union([a for _, a in found])
    through = [(k, r, a) for k, (r, a) in enumerate(operands) if reach >> k & 1]
    return _union([r for _, r, _ in through]), _union([r if inner >> k & 1 else a for k, r, a in through])


def _union(sources: Sequence[int]) -> int:
    total = 0
    for source in sources:
        total |= source
    return total
