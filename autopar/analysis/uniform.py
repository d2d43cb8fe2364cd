"""Along which axes a value is constant: broadcasts, literals, and what is computed of such elementwise.

Random bits count as constant along all their axes: no axis of theirs means anything before they meet something else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.analysis.batch_rules import SUMMED, place
from autopar.analysis.rules import ALIGNED
from autopar.ir.program import Atom, Block, Equation, Literal, Var
from autopar.ir.reductions import PRIMITIVES

_ELEMENTWISE = frozenset(ALIGNED - {"concatenate", "sort"})
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
    """Variable -> the axes along which it is constant, as bits; those without any are missing."""
    found: dict[Var, int] = {}
    _follow(block.equations, found)
    return found


def _follow(equations: Sequence[Equation], found: dict[Var, int]) -> None:
    for equation in equations:
        if equation.bodies:
            bits = _nested(equation, found)
        else:
            bits = [_plain(equation, found)] * len(equation.outputs)
        for var, some in zip(equation.outputs, bits, strict=True):
            found[var] = some


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
    if op in _ELEMENTWISE:
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


def _nested(equation: Equation, found: dict[Var, int]) -> list[int]:
    given = [_read(found, a) for a in equation.inputs]
    if equation.op in ("remat", "cond"):
        given = given[len(given) - len(equation.bodies[0].inputs) :]
        returned = [_body(body, given, found) for body in equation.bodies]
        return [_common(bits) for bits in zip(*returned, strict=True)]
    if equation.op != "scan":
        return [0] * len(equation.outputs)
    consts, carry = equation.params["num_consts"], equation.params["num_carry"]
    carries, sequences = given[consts : consts + carry], [bits >> 1 for bits in given[consts + carry :]]
    while True:
        results = _body(equation.bodies[0], [*given[:consts], *carries, *sequences], found)
        kept = [a & b for a, b in zip(carries, results, strict=False)]
        if kept == carries:
            return [*carries, *(bits << 1 for bits in results[carry:])]
        carries = kept


def _body(body: Block, given: Sequence[int], found: dict[Var, int]) -> list[int]:
    found.update(zip(body.inputs, given, strict=True))
    _follow(body.equations, found)
    return [_read(found, a) for a in body.outputs]


def _common(bits: Sequence[int]) -> int:
    total = bits[0]
    for some in bits:
        total &= some
    return total
