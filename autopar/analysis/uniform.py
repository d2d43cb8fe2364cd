"""Along which axes a value is constant: broadcasts, literals, and what is computed of such elementwise.

Random bits count as constant along all their axes: no axis of theirs means anything before they meet something else.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence

from autopar.analysis.batch_rules import SUMMED, place
from autopar.analysis.interpreter import Interpreter
from autopar.analysis.primitives import ELEMENTWISE
from autopar.ir.program import Atom, Block, Equation, Literal, Var
from autopar.ir.reductions import PRIMITIVES

#: Of one operand, constant along what is constant in it.
_SHAPED = frozenset({"transpose", "squeeze", "reshape", "slice", "dynamic_slice", "split", "unstack"})


def is_uniform(uniform: Mapping[Var, int], atom: Atom, axis: int) -> bool:
    """Whether a value is constant along an axis.

    Args:
      uniform: Of `uniform_axes`.
      atom: Any value. One that the step closes over is a constant, and says nothing of its axes.
      axis: One of its axes.
    """
    return isinstance(atom, Literal) or atom.shape[axis] == 1 or bool(uniform.get(atom, 0) >> axis & 1)


def uniform_axes(block: Block) -> dict[Var, int]:
    """Variable -> the axes along which it is constant, as bits; inputs of the block are missing."""
    walk = _Uniform()
    walk.run(block.equations)
    return walk.values


class _Uniform(Interpreter[int]):
    """Values are axes, as bits."""

    def unknown(self, atom: Atom) -> int:
        return _all(atom) if isinstance(atom, Literal) else 0

    def join(self, values: Sequence[int], atoms: Sequence[Atom]) -> int:
        return functools.reduce(operator.and_, values)

    def inside(self, value: int) -> int:
        return value >> 1

    def outside(self, value: int) -> int:
        return value << 1

    def plain(self, equation: Equation, given: Sequence[int]) -> Sequence[int]:
        return [_plain(equation, self.values)] * len(equation.outputs)


def _read(found: Mapping[Var, int], atom: Atom) -> int:
    return _all(atom) if isinstance(atom, Literal) else found.get(atom, 0)


def _all(atom: Atom) -> int:
    return (1 << len(atom.shape)) - 1


def _plain(equation: Equation, found: Mapping[Var, int]) -> int:
    if not equation.outputs:
        return 0
    out, op = equation.outputs[0], equation.op
    if op == "random_bits":
        return _all(out)
    if op == "iota":
        return _all(out) & ~(1 << equation.params["dimension"])
    if op == "broadcast_in_dim":
        return _broadcast(equation, found)
    if op == "tile":
        return _tile(equation, found)
    if op in ELEMENTWISE:
        bits = _all(out)
        for atom in equation.inputs:
            bits &= _read(found, atom) if atom.shape == out.shape else bits
        return bits
    if op == "dot_general":
        return _placed(equation, found, 0) | _placed(equation, found, 1)
    if op == "reshape" and _read(found, equation.inputs[0]) == _all(equation.inputs[0]):
        return _all(out)
    return _placed(equation, found, 0) if op in _SHAPED or op in PRIMITIVES else 0


def _broadcast(equation: Equation, found: Mapping[Var, int]) -> int:
    operand = equation.inputs[0]
    bits = _all(equation.outputs[0])
    for axis, to in enumerate(equation.params["broadcast_dimensions"]):
        if not is_uniform(found, operand, axis):
            bits &= ~(1 << to)
    return bits


def _tile(equation: Equation, found: Mapping[Var, int]) -> int:
    operand = equation.inputs[0]
    return sum(1 << d for d in range(len(operand.shape)) if is_uniform(found, operand, d))


def _placed(equation: Equation, found: Mapping[Var, int], k: int) -> int:
    operand, bits = equation.inputs[k], 0
    known = _read(found, operand)
    for axis in range(len(operand.shape)):
        if known >> axis & 1:
            at = place(equation, k, axis)
            if at is not None and at != SUMMED and equation.outputs[0].shape[at] == operand.shape[axis]:
                bits |= 1 << at
    return bits
