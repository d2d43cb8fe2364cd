"""Primitives that move or make axes (broadcast, reshape, transpose, slices), products, cumsum, sort."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autopar.analysis.batch_rules import place_axes
from autopar.analysis.rules.elementwise import is_zero, off_of
from autopar.analysis.rules.table import ALIGNED, RESIZE, RULES, Analysis, Mixes, resized, row_operand
from autopar.analysis.unfollowed import LOST
from autopar.ir.program import Equation
from autopar.ir.rowspace import UNKNOWN, Const, Free, Off, Row, Value


def constant_or_unknown(off: Off) -> Off:
    """What is left of `off` when elements move within their rows: a row that was the leaf's is so no longer."""
    return off if isinstance(off, Const) else UNKNOWN


def broadcast_in_dim(equation: Equation, values: Sequence[Value], analysis: Analysis) -> Sequence[Value]:
    shape, dims = equation.params["shape"], equation.params["broadcast_dimensions"]
    value, operand = values[0], equation.inputs[0]
    if isinstance(value, Row):
        axis = place_axes(equation, 0, value.axis)
        if axis is None:
            raise Mixes("broadcasts a table of one row")
        return [Row(axis, value.family, constant_or_unknown(value.off))]
    new = {d for d in range(len(shape)) if d not in dims}
    new |= {d for k, d in enumerate(dims) if operand.shape[k] == 1 and shape[d] != 1}
    index_axis = None
    if isinstance(value, Free):
        new |= {dims[a] for a in value.axes if operand.shape[a] == shape[dims[a]]}
        index_axis = dims[value.index_axis] if value.index_axis is not None else None
    off = constant_or_unknown(off_of(operand, value, 0)) if operand.shape == () or isinstance(value, Free) else UNKNOWN
    return [Free(frozenset(new), off, index_axis)] if new else [None]


def reshape(equation: Equation, values: Sequence[Value], analysis: Analysis) -> Sequence[Value]:
    value, old, new = values[0], equation.inputs[0].shape, equation.params["new_sizes"]
    if isinstance(value, Free):
        if isinstance(value.off, Const) and len(value.axes) == len(old):
            return [Free(frozenset(range(len(new))), value.off)]
        return [None]
    if not isinstance(value, Row):
        return [None]
    before = math.prod(old[: value.axis])
    for axis, size in enumerate(new):
        if size == old[value.axis] and math.prod(new[:axis]) == before:
            return [Row(axis, value.family, constant_or_unknown(value.off))]
    raise Mixes(*LOST["reshape"], kind="lost")


#: What to do in place of one table made of several.
_APART_ROWS = (
    "where rows of zeros follow, for ids of padding, look up t.at[ids].get(mode='fill', fill_value=0); else look up "
    "rows of each by itself, and select: jnp.where((ids < len(a))[..., None], a[jnp.minimum(ids, len(a) - 1)], "
    "b[jnp.maximum(ids - len(a), 0)])"
)
#: Why rows aren't followed along their own axis.
_REFUSED = {
    "squeeze": "squeezes away the row axis",
    "split": "splits the table by rows",
    "unstack": "takes the table apart by rows",
}


def move(equation: Equation, values: Sequence[Value], analysis: Analysis) -> Sequence[Value]:
    """One operand's axes go where they go."""
    value, count = values[0], len(equation.outputs)
    if isinstance(value, Row):
        axis = place_axes(equation, 0, value.axis)
        if axis is None:
            raise Mixes(_REFUSED[equation.op])
        return [Row(axis, value.family, constant_or_unknown(value.off))] * count
    if not isinstance(value, Free) or equation.op in ("split", "unstack"):
        return [None] * count
    index_axis = None if value.index_axis is None else place_axes(equation, 0, value.index_axis)
    if value.index_axis is not None and index_axis is None:
        return [None]
    moved = (place_axes(equation, 0, axis) for axis in value.axes)
    return [Free(frozenset(axis for axis in moved if axis is not None), value.off, index_axis)]


def iota(equation: Equation, values: Sequence[Value], analysis: Analysis) -> Sequence[Value]:
    if values:  # a dynamic shape
        return [None]
    rank = len(equation.params["shape"])
    return [Free(frozenset(range(rank)), UNKNOWN, equation.params["dimension"])]


def concatenate(equation: Equation, values: Sequence[Value], analysis: Analysis) -> Sequence[Value]:
    rows = [v for v in values if isinstance(v, Row)]
    if not rows:
        return [None]
    axis = rows[0].axis
    if axis == equation.params["dimension"] or any(r.axis != axis for r in rows):
        raise Mixes("concatenates rows", _APART_ROWS, kind="lost")
    offs = [off_of(a, v, axis) for a, v in zip(equation.inputs, values, strict=True)]
    same = all(isinstance(o, Const) and o == offs[0] for o in offs)
    return [Row(axis, analysis.unite(rows), offs[0] if same else UNKNOWN)]


def stack(equation: Equation, values: Sequence[Value], analysis: Analysis) -> Sequence[Value]:
    rows = [v for v in values if isinstance(v, Row)]
    if not rows:
        return [None]
    if len(rows) != len(values) or len({r.axis for r in rows}) > 1:
        raise Mixes("stacks rows of a table with something else")
    axis = place_axes(equation, 0, rows[0].axis)
    assert axis is not None, "stacked axes stay"
    same = all(isinstance(r.off, Const) and r.off == rows[0].off for r in rows)
    return [Row(axis, analysis.unite(rows), rows[0].off if same else UNKNOWN)]


def along_other_axis(parameter: str, keeps: Callable[[Const], bool] = lambda constant: True) -> Any:
    """A rule for scans and sorts along one axis: rows stay rows unless that axis is theirs.

    `keeps`: whether the op leaves a row of equal elements as it is.
    """

    def rule(equation: Equation, values: Sequence[Value], analysis: Analysis) -> Sequence[Value]:
        rows = [v for v in values if isinstance(v, Row)]
        if not rows:
            return [None] * len(equation.outputs)
        along = equation.params[parameter]
        along = along if isinstance(along, tuple) else (along,)
        if any(not isinstance(v, Row) for v in values) or any(r.axis in along or r.axis != rows[0].axis for r in rows):
            raise Mixes(f"{equation.op} along the rows", kind="lost")
        family = analysis.unite(rows)
        offs = [r.off if isinstance(r.off, Const) and keeps(r.off) else UNKNOWN for r in rows]
        offs = offs if len(offs) == len(equation.outputs) else [UNKNOWN] * len(equation.outputs)
        return [Row(rows[0].axis, family, off) for off in offs]

    return rule


def dot_general(equation: Equation, values: Sequence[Value], analysis: Analysis) -> Sequence[Value]:
    """Rows times a dense matrix stay rows: `table @ w`. A contraction over the rows mixes them, unless one side is
    zero on the untouched ones (the gradient of w)."""
    contract, batch = equation.params["dimension_numbers"]
    rows = [v for v in values if isinstance(v, Row)]
    if not rows:
        return [None]
    if len(rows) == 2:
        positions = [c.index(v.axis) if v.axis in c else None for v, c in zip(rows, contract, strict=True)]
        if positions[0] is None or positions[0] != positions[1] or not any(is_zero(v.off) for v in rows):
            raise Mixes("a product of two tables' rows", kind="product")
        analysis.unite(rows)
        analysis.role(equation, "contract")
        return [None]
    side, row = row_operand(values)
    if row.axis in contract[side]:
        raise Mixes("a matrix product sums over all rows of the table", kind="sum")
    if row.axis in batch[side]:
        raise Mixes("a matrix product is batched over the rows", kind="product")
    axis = place_axes(equation, side, row.axis)
    assert axis is not None, "axes of a matrix product go somewhere"
    return [Row(axis, row.family, row.off if is_zero(row.off) else UNKNOWN)]


def pad_other_axis(equation: Equation, values: Sequence[Value]) -> Sequence[Value]:
    """A pad of axes other than the rows' (a pad along the rows enters row space: `indexing.pad`)."""
    _, row = row_operand(values)
    if tuple(equation.params["padding_config"][row.axis]) != (0, 0, 0):
        raise Mixes(*LOST["pad"], kind="lost")
    filled = off_of(equation.inputs[1], values[1], 0)
    same = isinstance(row.off, Const) and filled == row.off
    return [Row(row.axis, row.family, row.off if same else UNKNOWN)]


RULES |= {
    "broadcast_in_dim": broadcast_in_dim,
    "reshape": reshape,
    **dict.fromkeys(("transpose", "squeeze", "split", "unstack"), move),
    "iota": iota,
    "concatenate": concatenate,
    "optimization_barrier": lambda equation, values, analysis: list(values),
    "dot_general": dot_general,
    "cumsum": along_other_axis("axis", lambda constant: constant.is_zero),
    "cumprod": along_other_axis("axis", lambda constant: constant.is_zero or constant.is_one),
    "cummax": along_other_axis("axis"),
    "cummin": along_other_axis("axis"),
    "cumlogsumexp": along_other_axis("axis", lambda constant: False),
    "sort": along_other_axis("dimension"),
    "top_k": along_other_axis("axis", lambda constant: False),
    "stack": stack,
    "rev": along_other_axis("dimensions"),
}
ALIGNED |= {"concatenate", "sort"}


def _resize_shape(name: str) -> Any:
    def resize(equation: Equation, axis: int, rows: int) -> Mapping[str, Any]:
        return {**equation.params, name: resized(equation.params[name], axis, rows)}

    return resize


def _resize_convolution(equation: Equation, axis: int, size: int) -> Mapping[str, Any]:
    """Of fewer output features there are fewer groups; fewer examples change nothing."""
    p, numbers, features = equation.params, equation.params["dimension_numbers"], equation.outputs[0].shape
    if axis != numbers.out_spec[1]:
        return p
    kind = "feature_group_count" if p["feature_group_count"] > 1 else "batch_group_count"
    return {**p, kind: p[kind] * size // features[axis]}


RESIZE |= {
    "conv_general_dilated": _resize_convolution,
    "broadcast_in_dim": _resize_shape("shape"),
    "reshape": _resize_shape("new_sizes"),
    "iota": _resize_shape("shape"),
    "slice": _resize_shape("limit_indices"),
    "dynamic_slice": _resize_shape("slice_sizes"),
}
