"""Which axis of a value runs over the examples of the batch, as far as it can be followed.

This says how values are best spread over devices: a device that holds an equal share of each input along its batch
axis holds the same share of these values along theirs. It is never more than advice: whatever is laid out otherwise
is moved by XLA, at a cost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence

import numpy as np

from autopar.ir.program import Block, Equation, Var
from autopar.ir.rules import ALIGNED

#: Variable -> its batch axis; variables without one are missing.
BatchAxes = MutableMapping[Var, int]


def follow_batch(equations: Sequence[Equation], axes: BatchAxes) -> None:
    """Add what the equations define, those of their bodies included."""
    for equation in equations:
        for var, axis in zip(equation.outputs, _results(equation, axes), strict=True):
            if axis is not None:
                axes[var] = axis


def _results(equation: Equation, axes: BatchAxes) -> Sequence[int | None]:
    given = [axes.get(a) if isinstance(a, Var) else None for a in equation.inputs]
    if equation.op == "scan":
        return _scan(equation, given, axes)
    if equation.op in ("remat", "cond"):
        operands = given[len(given) - len(equation.bodies[0].inputs) :]
        returned = [_body(body, operands, axes) for body in equation.bodies]
        return [found[0] if all(a == found[0] for a in found) else None for found in zip(*returned, strict=True)]
    if all(a is None for a in given) or equation.bodies:
        return [None] * len(equation.outputs)
    if equation.op in ALIGNED or equation.op == "optimization_barrier":
        return _aligned(equation, given)
    rule = _RULES.get(equation.op)
    found = None if rule is None else rule(equation, given)
    return [found] * len(equation.outputs)


def _body(body: Block, given: Sequence[int | None], axes: BatchAxes) -> list[int | None]:
    for var, axis in zip(body.inputs, given, strict=True):
        if axis is None:
            axes.pop(var, None)
        else:
            axes[var] = axis
    follow_batch(body.equations, axes)
    return [axes.get(a) if isinstance(a, Var) else None for a in body.outputs]


def _scan(equation: Equation, given: Sequence[int | None], axes: BatchAxes) -> list[int | None]:
    """A carry keeps its axis if each iteration returns it there; sequences have one axis more outside."""
    consts, carry = equation.params["num_consts"], equation.params["num_carry"]
    sequences = [a - 1 if a else None for a in given[consts + carry :]]
    carries = list(given[consts : consts + carry])
    while True:
        returned = _body(equation.bodies[0], [*given[:consts], *carries, *sequences], axes)
        kept = [a if a == b else None for a, b in zip(carries, returned, strict=False)]
        if kept == carries:
            return [*carries, *(None if a is None else a + 1 for a in returned[carry:])]
        carries = kept


def _aligned(equation: Equation, given: Sequence[int | None]) -> list[int | None]:
    """Elementwise: the axis of an operand of the result's shape."""
    if equation.op == "optimization_barrier":
        return list(given)
    if equation.op == "concatenate":
        found = next(a for a in given if a is not None)
        return [None if found == equation.params["dimension"] else found]
    if equation.op == "sort":
        return [None if a == equation.params["dimension"] else a for a in given]
    shape = equation.outputs[0].shape
    pairs = zip(equation.inputs, given, strict=True)
    return [next((a for x, a in pairs if a is not None and x.shape == shape), None)] * len(equation.outputs)


def _broadcast(equation: Equation, given: Sequence[int | None]) -> int | None:
    axis = given[0]
    if axis is None:
        return None
    to = equation.params["broadcast_dimensions"][axis]
    return to if equation.outputs[0].shape[to] == equation.inputs[0].shape[axis] else None


def _reshape(equation: Equation, given: Sequence[int | None]) -> int | None:
    """Equal shares stay equal shares where the axis leads what it is merged with or split into."""
    axis, old, new = given[0], equation.inputs[0].shape, equation.outputs[0].shape
    if axis is None:
        return None
    before = _size(old[:axis])
    return next((d for d in range(len(new)) if _size(new[:d]) == before and new[d] > 1), None)


def _size(shape: Sequence[int]) -> int:
    return int(np.prod(shape, dtype=np.int64))


def _transpose(equation: Equation, given: Sequence[int | None]) -> int | None:
    return None if given[0] is None else list(equation.params["permutation"]).index(given[0])


def _without(gone: Sequence[int], axis: int | None) -> int | None:
    return None if axis is None or axis in gone else axis - sum(d < axis for d in gone)


def _squeeze(equation: Equation, given: Sequence[int | None]) -> int | None:
    rank = len(equation.inputs[0].shape)
    return _without([d % rank for d in equation.params["dimensions"]], given[0])


def _reduce(equation: Equation, given: Sequence[int | None]) -> int | None:
    return _without(equation.params["axes"], given[0])


def _kept(equation: Equation, given: Sequence[int | None]) -> int | None:
    """Slices, pads and scans along other axes."""
    axis = given[0]
    if axis is None or equation.outputs[0].shape[axis] != equation.inputs[0].shape[axis]:
        return None
    along = equation.params.get("axis", equation.params.get("dimensions", ()))
    return None if axis in (along if isinstance(along, tuple) else (along,)) else axis


def _gather(equation: Equation, given: Sequence[int | None]) -> int | None:
    """Along with the examples' ids, or with the window of an operand."""
    numbers = equation.params["dimension_numbers"]
    rank = len(equation.outputs[0].shape)
    operand, index = given[0], given[1]
    if index is not None and index < len(equation.inputs[1].shape) - 1:
        return [d for d in range(rank) if d not in numbers.offset_dims][index]
    if operand is None or equation.params["slice_sizes"][operand] != equation.inputs[0].shape[operand]:
        return None
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    if operand in gone:
        return None
    window = [d for d in range(len(equation.inputs[0].shape)) if d not in gone]
    return numbers.offset_dims[window.index(operand)]


def _dot(equation: Equation, given: Sequence[int | None]) -> int | None:
    contract, batch = equation.params["dimension_numbers"]
    for k in (0, 1):
        axis = given[k]
        if axis is None or axis in contract[k]:
            continue
        if axis in batch[k]:
            return batch[k].index(axis)
        rank = len(equation.inputs[k].shape)
        free = [d for d in range(rank) if d not in contract[k] and d not in batch[k]]
        left = len(equation.inputs[0].shape) - len(contract[0]) - len(batch[0]) if k == 1 else 0
        return len(batch[k]) + left + free.index(axis)
    return None


_RULES: Mapping[str, Callable[[Equation, Sequence[int | None]], int | None]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "gather": _gather,
    "dot_general": _dot,
}
_RULES = {
    **_RULES,
    **{f"reduce_{op}": _reduce for op in ("sum", "max", "min", "prod", "and", "or")},
    **{op: _reduce for op in ("argmax", "argmin")},
    **{op: _kept for op in ("slice", "dynamic_slice", "pad", "rev", "cumsum", "cumprod", "cummax", "cummin")},
}
