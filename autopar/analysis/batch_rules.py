"""Follows an axis of an operand (of examples, of rows) into an equation's results, primitive by primitive.

`place_axes` says where it goes; `partners` says which axes of the other operands run along with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from autopar.analysis.primitives import CUMULATIVE, ELEMENTWISE, PRIMITIVES, Primitive
from autopar.ir.program import Equation
from autopar.ir.reductions import REDUCTION_PRIMITIVES

#: The place of an axis that is reduced or contracted away.
SUMMED = -1
_WORKS_ALONG = frozenset({"concatenate", "sort"})
#: Functions of each key of an array; its axes lead those of the result, and words come last.
_OF_KEYS = frozenset("random_seed random_wrap random_unwrap random_clone random_split random_bits".split())
#: Elementwise operations on keys and numbers, and one that iterates until all elements converge (rounding may differ).
_BY_ELEMENT = ELEMENTWISE | {"random_fold_in", "regularized_incomplete_beta"}
#: Operations whose operands of equal rank lie along each other.
_ALONGSIDE = _BY_ELEMENT | _WORKS_ALONG | {"dynamic_update_slice", "select_and_gather_add", "select_and_scatter_add"}


def place_axes(equation: Equation, k: int, axis: int, devices: int = 1) -> int | None:
    """Returns where an axis of operand k is in the results: an axis, SUMMED, or None if it can't be followed.

    `devices`: number of devices over which it is to be spread.
    """
    if equation.op == "reshape":
        return _reshape(equation, axis, devices)
    if equation.op in _BY_ELEMENT:
        same = len(equation.inputs[k].shape) == len(equation.outputs[0].shape)
        return axis if same and equation.inputs[k].shape[axis] == equation.outputs[0].shape[axis] else None
    rule = _PLACES.get(equation.op, _stacked)
    return rule(equation, k, axis)


def partners(equation: Equation, k: int, axis: int) -> Sequence[tuple[int, int]]:
    """Lists the other operands' axes that run along with an axis of operand k, as (operand, axis)."""
    if equation.op in _ALONGSIDE:
        rank = len(equation.inputs[k].shape)
        return [(j, axis) for j, a in enumerate(equation.inputs) if j != k and len(a.shape) == rank]
    if equation.op == "stack" or _is_stack(equation, axis):
        return [(j, axis) for j in range(len(equation.inputs)) if j != k]
    if equation.op.startswith("scatter"):
        pair = _scattered(equation, k, axis)
        return [] if pair is None else [(j, along) for j, along in pair[1].items() if j != k]
    pairs = _PAIRED.get(equation.op)
    return [] if pairs is None else [(1 - k, dims[1 - k]) for dims in pairs(equation) if k < 2 and dims[k] == axis]


def _is_stack(equation: Equation, axis: int) -> bool:
    core = PRIMITIVES.get(equation.op, Primitive()).core
    return core is not None and axis < len(equation.inputs[0].shape) - core


def _stacked(equation: Equation, k: int, axis: int) -> int | None:
    return axis if _is_stack(equation, axis) else None


def _solve(equation: Equation, k: int, axis: int) -> int | None:
    side = len(equation.inputs[k].shape) - (1 if equation.params["left_side"] else 2)
    return axis if (k == 1 and axis == side) else _stacked(equation, k, axis)


def _broadcast(equation: Equation, k: int, axis: int) -> int | None:
    to = equation.params["broadcast_dimensions"][axis]
    return to if equation.outputs[0].shape[to] == equation.inputs[0].shape[axis] else None


def _reshape(equation: Equation, axis: int, devices: int) -> int | None:
    """Follows an axis through a reshape; equal shards stay equal where it leads a merge or a split.

    Of a batch that is split into fewer parts than devices (microbatches) each part is spread: its examples move.
    """
    old, new = equation.inputs[0].shape, equation.outputs[0].shape
    before = math.prod(old[:axis])
    dim = next((d for d in range(len(new)) if math.prod(new[:d]) == before and new[d] > 1), None)
    if dim is None or new[dim] % devices == 0 or old[axis] % devices or dim + 1 == len(new):
        return dim
    is_split = old[axis] % (new[dim] * new[dim + 1]) == 0
    return dim + 1 if is_split and new[dim + 1] % devices == 0 else dim


def _reduce(equation: Equation, k: int, axis: int) -> int | None:
    gone = equation.params["axes"]
    return SUMMED if axis in gone else _without(gone, axis)


def _without(gone: Sequence[int], axis: int) -> int | None:
    return None if axis in gone else axis - sum(d < axis for d in gone)


def _kept(equation: Equation, k: int, axis: int) -> int | None:
    """Follows an axis through operations along other axes: slices, pads, sorts, scans."""
    p, rank = equation.params, len(equation.inputs[k].shape)
    if equation.op == "pad" and tuple(p["padding_config"][axis]) != (0, 0, 0):  # (1, -1) keeps the size, and shifts
        return None
    name = "reduction_dimension" if equation.op == "approx_top_k" else PRIMITIVES.get(equation.op, Primitive()).along
    along = p[name] if name else ()
    if axis in (d % rank for d in (along if isinstance(along, tuple) else (along,))):
        return None
    same = equation.inputs[k].shape[axis] == equation.outputs[0].shape[axis]
    return axis if same or equation.op == "concatenate" else None


def _gather(equation: Equation, k: int, axis: int) -> int | None:
    """Follows an axis of the ids into the result, or one of the operand that the windows hold whole."""
    numbers = equation.params["dimension_numbers"]
    if k == 1:
        examples = [d for d in range(len(equation.outputs[0].shape)) if d not in numbers.offset_dims]
        return examples[axis] if axis < len(examples) else None
    if axis in numbers.operand_batching_dims:
        paired = numbers.start_indices_batching_dims[numbers.operand_batching_dims.index(axis)]
        return _gather(equation, 1, paired)
    shape = equation.inputs[0].shape
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    if axis in gone or equation.params["slice_sizes"][axis] != shape[axis]:
        return None
    return numbers.offset_dims[[d for d in range(len(shape)) if d not in gone].index(axis)]


def _lookup(equation: Equation, k: int, axis: int) -> int | None:
    return equation.params["spread"] if k == 2 and axis == equation.params["batch"] else None


def _scattered(equation: Equation, k: int, axis: int) -> tuple[int, Mapping[int, int]] | None:
    """Returns where an axis of a scatter's operand, indices or updates goes, and each one's axis that runs along it.

    That is a batching dimension, or one that a window of updates has whole, or examples' updates that are summed.
    """
    numbers, (operand, indices, updates) = equation.params["dimension_numbers"], equation.inputs
    examples = [d for d in range(len(updates.shape)) if d not in numbers.update_window_dims]
    for d, index in zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True):
        batched = {0: d, 1: index, 2: examples[index]}
        if batched[k] == axis:
            return d, batched
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    window = [d for d in range(len(operand.shape)) if d not in gone]
    for d, at in zip(window, numbers.update_window_dims, strict=True):
        if {0: d, 2: at}.get(k) == axis:
            return (d, {0: d, 2: at}) if operand.shape[d] == updates.shape[at] else None
    if k == 0 or equation.op != "scatter-add" or (k == 1 and axis == len(indices.shape) - 1):
        return None
    index = axis if k == 1 else examples.index(axis)
    return SUMMED, {1: index, 2: examples[index]}


def _scatter(equation: Equation, k: int, axis: int) -> int | None:
    found = _scattered(equation, k, axis)
    return None if found is None else found[0]


def _gather_pairs(equation: Equation) -> Sequence[tuple[int, int]]:
    numbers = equation.params["dimension_numbers"]
    return list(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))


def _dot(equation: Equation, k: int, axis: int) -> int | None:
    contract, batch = equation.params["dimension_numbers"]
    if axis in contract[k]:
        return SUMMED
    if axis in batch[k]:
        return batch[k].index(axis)
    free = [d for d in range(len(equation.inputs[k].shape)) if d not in contract[k] and d not in batch[k]]
    left = len(equation.inputs[0].shape) - len(contract[0]) - len(batch[0]) if k == 1 else 0
    return len(batch[k]) + left + free.index(axis)


def _dot_pairs(equation: Equation) -> Sequence[tuple[int, int]]:
    return [pair for dims in equation.params["dimension_numbers"] for pair in zip(*dims, strict=True)]


def _convolve(equation: Equation, k: int, axis: int) -> int | None:
    numbers = equation.params["dimension_numbers"]
    if any(dims[k] == axis for dims in _group_pairs(equation)):
        return numbers.out_spec[1]
    return numbers.out_spec[0] if k == 0 and axis == numbers.lhs_spec[0] else None


def _group_pairs(equation: Equation) -> Sequence[tuple[int, int]]:
    p, numbers = equation.params, equation.params["dimension_numbers"]
    by_feature, by_batch = (p[f"{kind}_group_count"] > 1 for kind in ("feature", "batch"))
    return [(numbers.lhs_spec[0 if by_batch else 1], numbers.rhs_spec[0])] if by_feature or by_batch else []


#: Operations that read an array in windows; the second operand of some has the windows' own axes.
_WINDOWED = frozenset(
    "reduce_window_sum reduce_window_max reduce_window_min select_and_gather_add select_and_scatter_add".split()
)


def _windowed(equation: Equation, k: int, axis: int) -> int | None:
    p, names = equation.params, ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    sizes = (p[name][axis] for name in names if name in p)
    return axis if all(size == 1 for size in sizes) and tuple(p["padding"][axis]) == (0, 0) else None


_PLACES: Mapping[str, Callable[[Equation, int, int], int | None]] = {
    "broadcast_in_dim": _broadcast,
    "tile": lambda e, k, axis: axis if e.params["reps"][axis] == 1 else None,
    "transpose": lambda e, k, axis: list(e.params["permutation"]).index(axis),
    "squeeze": lambda e, k, axis: _without([d % len(e.inputs[0].shape) for d in e.params["dimensions"]], axis),
    "gather": _gather,
    **dict.fromkeys(("scatter", *(f"scatter-{f}" for f in ("add", "sub", "mul", "min", "max"))), _scatter),
    "ap.lookup": _lookup,
    "dot_general": _dot,
    "conv_general_dilated": _convolve,
    "stack": lambda e, k, axis: axis + (e.params["axis"] <= axis),
    "unstack": lambda e, k, axis: _without([e.params["axis"]], axis),
    **{op: _windowed for op in _WINDOWED},
    "fft": lambda e, k, axis: axis if axis < len(e.inputs[0].shape) - len(e.params["fft_lengths"]) else None,
    **dict.fromkeys(REDUCTION_PRIMITIVES, _reduce),
    **{op: _reduce for op in ("argmax", "argmin", "reduce_xor")},
    "reduce": lambda e, k, axis: _without(e.params["dimensions"], axis),
    "triangular_solve": _solve,
    **dict.fromkeys(_OF_KEYS, lambda e, k, axis: axis if axis < len(e.outputs[0].shape) else None),
    **{op: _kept for op in (*CUMULATIVE, "rev", "split", "top_k", "approx_top_k")},
    **{op: _kept for op in ("slice", "dynamic_slice", "dynamic_update_slice", "pad", *_WORKS_ALONG)},
}
#: Pairs of axes along which the first two operands are matched.
_PAIRED: Mapping[str, Callable[[Equation], Sequence[tuple[int, int]]]] = {
    "dot_general": _dot_pairs,
    "gather": _gather_pairs,
    "conv_general_dilated": _group_pairs,
}
