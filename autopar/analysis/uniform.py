"""Along which axes a value is constant: broadcasts, literals, and what is computed of such elementwise.

Random bits count as constant along all their axes: no axis of theirs means anything before they meet something else.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence

from autopar.analysis.batch_rules import SUMMED, place_axes
from autopar.analysis.interpreter import Interpreter, union
from autopar.analysis.primitives import ELEMENTWISE
from autopar.ir.program import Atom, Block, Equation, Literal, Var
from autopar.ir.reductions import REDUCTION_PRIMITIVES

#: Of one operand, constant along what is constant in it.
_SHAPED = frozenset({"transpose", "squeeze", "reshape", "slice", "dynamic_slice", "split", "unstack"})


def is_uniform(uniform: Mapping[Var, int], atom: Atom, axis: int) -> bool:
    """Whether a value is constant along an axis. One that the step closes over is a constant, and says nothing of its
    axes."""
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

    def plain(self, equation: Equation, operands: Sequence[int]) -> Sequence[int]:
        return [_axes(equation, operands)] * len(equation.outputs)


def _all(atom: Atom) -> int:
    return (1 << len(atom.shape)) - 1


def _axes(equation: Equation, operands: Sequence[int]) -> int:
    """Those of the results, from those of the operands."""
    if not equation.outputs:
        return 0
    out, op = equation.outputs[0], equation.op
    if op == "random_bits":
        return _all(out)
    if op == "iota":
        return _all(out) & ~(1 << equation.params["dimension"])
    if op in ("broadcast_in_dim", "tile"):
        operand = equation.inputs[0]
        constant = operands[0] | union(1 << axis for axis, size in enumerate(operand.shape) if size == 1)
        if op == "tile":
            return constant
        dims = enumerate(equation.params["broadcast_dimensions"])
        return _all(out) & ~union(1 << to for axis, to in dims if not constant >> axis & 1)
    if op in ELEMENTWISE:
        bits = (bits for atom, bits in zip(equation.inputs, operands, strict=True) if atom.shape == out.shape)
        return functools.reduce(operator.and_, bits, _all(out))
    if op == "dot_general":
        return _placed(equation, operands, 0) | _placed(equation, operands, 1)
    if op == "reshape" and operands[0] == _all(equation.inputs[0]):
        return _all(out)
    return _placed(equation, operands, 0) if op in _SHAPED or op in REDUCTION_PRIMITIVES else 0


def _placed(equation: Equation, operands: Sequence[int], k: int) -> int:
    """Where an operand's axes go that keep their size."""
    operand, out = equation.inputs[k], equation.outputs[0]
    axes = [axis for axis in range(len(operand.shape)) if operands[k] >> axis & 1]
    places = [(place_axes(equation, k, axis), operand.shape[axis]) for axis in axes]
    return union(1 << at for at, size in places if at is not None and at != SUMMED and out.shape[at] == size)
