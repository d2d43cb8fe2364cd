"""Finds the rows that index arrays mean, in the table and in a sorted list of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from autopar import jax_compat
from autopar.analysis.rules import resized
from autopar.jax_types import Array, Index, Leaf, Params


def in_range(ids: Array, extent: int, clip: bool) -> Array:
    """Returns int32 ids; those out of range clipped, or mapped to `extent`. Compares before narrowing."""
    low, high = np.asarray(0, ids.dtype), np.asarray(min(extent - 1, np.iinfo(ids.dtype).max), ids.dtype)
    if clip:
        return jnp.clip(ids, low, high).astype(jnp.int32)
    inside = (ids >= low) & (ids <= high)
    return jnp.where(inside, ids.astype(jnp.int32), extent)


def flat_ids(params: Params, index: Array) -> Array:
    """Returns the rows that an access's index operand means, flat int32, `extent` for no row.

    With a batch axis examples lead, so that equal shards of the flat ids belong to equal shards of the batch; `more`
    examples without rows pad it.
    """
    extent, count = params["extent"], params["count"]
    index = jnp.asarray(index)
    if params["position"] is None:
        start = in_range(index.reshape(-1), extent - count + 1, True)
        return (start[:, None] + jax.lax.iota(jnp.int32, count)).reshape(-1)
    ids = in_range(index[..., params["position"]], extent, params["clip"])
    if params.get("batch") is None:
        return ids.reshape(-1)
    return lengthened(jnp.moveaxis(ids, params["batch"], 0), 0, params.get("more", 0), extent).reshape(-1)


def lengthened(value: Array, axis: int, more: int, fill: Leaf = 0) -> Array:
    if not more:
        return value
    widths = [(0, more if d == axis else 0) for d in range(value.ndim)]
    # The barrier: XLA's partitioner gives two pads of one array the same value.
    return jnp.pad(jax.lax.optimization_barrier(value), widths, constant_values=fill)


def cut(value: Array, axis: int, size: int) -> Array:
    return value if value.shape[axis] == size else jax.lax.slice_in_dim(value, 0, size, axis=axis)


def with_size(value: Array, axis: int, size: int) -> Array:
    """Cuts an axis, or pads it with zeros."""
    widths = [(0, (size - value.shape[axis]) * (d == axis), 0) for d in range(value.ndim)]
    return jax.lax.pad(value, jnp.zeros((), value.dtype), widths)


def sorted_unique(ids: Array, size: int, fill: int) -> Array:
    """Returns the distinct ids in order, padded with `fill` (which is above all ids)."""
    if ids.shape[0] == 0:
        return jnp.full((size,), fill, jnp.int32)
    ordered = jax.lax.sort(ids)
    first = jnp.concatenate([jnp.ones((1,), bool), ordered[1:] != ordered[:-1]])
    position = jnp.cumsum(first, dtype=jnp.int32) - 1
    return jnp.full((size,), fill, jnp.int32).at[position].set(ordered, mode="drop", indices_are_sorted=True)


def _positions(rows: Array, ids: Array) -> Array:
    """Finds the positions of ids in a sorted list.

    A loop is as fast on CPUs and compiles sooner; on other devices each of its turns is several kernels.
    """
    method = "scan" if jax.default_backend() == "cpu" else "scan_unrolled"
    return jnp.searchsorted(rows, ids, side="left", method=method).astype(jnp.int32)


def find(rows: Array, ids: Array, extent: int) -> Array:
    """Finds ids in a sorted list of rows that holds them; the list's length for `extent` and above."""
    positions = _positions(rows, ids)
    return jnp.where(ids < extent, positions, rows.shape[0])


def find_own(rows: Array, ids: Array) -> Array:
    """Finds ids in a sorted list of rows that may lack some; the list's length for those."""
    positions = _positions(rows, ids)
    return jnp.where(rows.at[positions].get(mode="clip") == ids, positions, rows.shape[0])


def local_index(
    params: Params,
    rows: Array,
    index: Array,
    *,
    stored_ids: Callable[[Array], Array] = lambda ids: ids,
    own: bool = False,
) -> Array:
    """Maps index vectors of the table to index vectors of a sorted list of its rows.

    The list may lack some rows if they are a device's `own`. `params`: `position`, `extent` and `clip`; `stored_ids`:
    where the row with an id is stored.
    """
    position, extent, index = params["position"], params["extent"], jnp.asarray(index)
    ids = in_range(index[..., position], extent, params["clip"])
    positions = find_own(rows, stored_ids(ids)) if own else find(rows, stored_ids(ids), jnp.iinfo(jnp.int32).max)
    local = jnp.where(ids < extent, positions, rows.shape[0])
    if index.shape[-1] == 1:
        return local[..., None]
    return index.astype(jnp.int32).at[..., position].set(local)


#: Parameters of a lookup or push that are autopar's own; the others are the gather's or scatter's.
_OURS = frozenset({"primitive", "extent", "position", "clip", "count", "op", "axis", "batch", "spread", "owners"})


def gather_rows(params: Params, rows: Array, local: Array) -> Array:
    options = {k: v for k, v in params.items() if k not in _OURS}
    options["indices_are_sorted"] = False
    if params["clip"] and local.shape[-1] == 1:  # every id is one of the rows
        options["mode"] = jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS
    return jax_compat.bind(jax.lax.gather_p, [rows, local], options)[0]


def scatter_rows(params: Params, base: Array, local: Array, updates: Array) -> Array:
    primitive = params["primitive"]
    options = {k: v for k, v in params.items() if k not in _OURS}
    mode = jax.lax.GatherScatterMode.CLIP if params["clip"] else jax.lax.GatherScatterMode.FILL_OR_DROP
    options |= {"mode": mode, "indices_are_sorted": False, "unique_indices": False}

    def scatter(updates: Array, local: Array) -> Array:
        return jax_compat.bind(primitive, [base, local, updates], options)[0]

    if params["clip"] or local.size != local.shape[-1]:
        return scatter(updates, local)
    rows, position = base.shape[params["axis"]], params["position"]
    inside = local[..., position].reshape(()) < rows  # see `set_at` for a single index
    local = local.at[..., position].min(rows - 1)
    if params["op"] == "scatter-add":  # in place
        added = jnp.where(inside, updates, jnp.zeros_like(updates))
        return scatter(added, local)
    return jnp.where(inside, scatter(updates, local), base)


def set_at(rows: Array, axis: int, numbers: Array, updates: Array) -> Array:
    """Replaces rows; numbers from their extent on are dropped.

    A single number is kept in range: XLA turns a scatter of one index into slices, and an out-of-range index into a
    slice of a slice then reads another element than the last one (openxla/xla#49121).
    """
    if numbers.shape[0] != 1:
        return rows.at[along(axis, numbers)].set(updates, mode="drop")
    number = jnp.minimum(numbers.reshape(()), rows.shape[axis] - 1)
    old = jax.lax.dynamic_slice_in_dim(rows, number, 1, axis)
    new = jnp.where(numbers.reshape(()) < rows.shape[axis], updates, old)
    return jax.lax.dynamic_update_slice_in_dim(rows, new, number, axis)


def along(axis: int, index: Index) -> tuple[Index, ...]:
    """Returns an index along one axis, with full slices along those before it."""
    return (slice(None),) * axis + (index,)


def untouched(rows: Array) -> Array:
    """Returns the first row that is not among sorted ones; some row if all of them are."""
    return jnp.argmin(rows == jax.lax.iota(jnp.int32, rows.shape[0])).astype(jnp.int32)


def pull_rows(leaf: Array, rows: Array, spare: Array, axis: int, state: bool) -> Array:
    """Returns rows of a leaf by number; the last one, if it is padding, stands for the untouched rows.

    It is a real row (`spare`), because plain JAX computes its new value, too. In a state it is made finite, because a
    row that is not finite by itself must not be taken for all rows.
    """
    leaf, is_row = jnp.asarray(leaf), rows[-1] < leaf.shape[axis]
    numbers = rows.at[-1].set(jnp.where(is_row, rows[-1], spare))
    # The barrier: on GPUs XLA would read the rows again when they are written, and copy the leaf for that.
    pulled = jax.lax.optimization_barrier(leaf.at[along(axis, numbers)].get(mode="clip"))
    if not state or not jnp.issubdtype(pulled.dtype, np.inexact):
        return pulled
    last = along(axis, slice(-1, None))
    return pulled.at[last].set(jnp.where(jnp.isfinite(pulled[last]) | is_row, pulled[last], jnp.ones((), pulled.dtype)))


def set_rows(leaf: Array, rows: Array, numbers: Array, axis: int) -> Array:
    """Replaces rows of a leaf, in place, by sorted unique numbers; from the leaf's extent on they are dropped.

    On CPUs jax 0.10 widens a bfloat16 table to float32 and back for a scatter, so its bits are written as integers:
    still a copy of the table, but six times faster.
    """
    extent, index = leaf.shape[axis], numbers
    index = jnp.where(index >= extent, extent + jax.lax.iota(jnp.int32, index.shape[0]), index)
    options = {"mode": "drop", "unique_indices": True, "indices_are_sorted": True}
    if leaf.dtype == jnp.bfloat16 and jax_compat.widens_bfloat16():
        bits, new = (jax.lax.bitcast_convert_type(x, jnp.uint16) for x in (leaf, rows))
        return jax.lax.bitcast_convert_type(bits.at[along(axis, index)].set(new, **options), jnp.bfloat16)
    return leaf.at[along(axis, index)].set(rows, **options)


def as_bits(move: Callable[[Array], Array], value: Array) -> Array:
    """Runs a collective that only moves elements; small floats travel as bits.

    On CPUs XLA would widen them to float32, and send twice as many bytes.
    """
    dtype = value.dtype
    size = jnp.finfo(dtype).bits if jax_compat.is_float(dtype) else 0
    if size not in (8, 16):
        return move(value)
    bits = jax.lax.bitcast_convert_type(value, jnp.dtype(f"uint{size}"))
    return jax.lax.bitcast_convert_type(move(bits), dtype)


def spread_last_row(rows: Array, numbers: Array, axis: int, extent: int) -> Array:
    """Returns all rows of a table: the given ones, and the last one everywhere else."""
    last = jax.lax.slice_in_dim(rows, rows.shape[axis] - 1, rows.shape[axis], axis=axis)
    return set_rows(jnp.broadcast_to(last, resized(rows.shape, axis, extent)), rows, numbers, axis)


# --- operations of ours that need only their parameters and operands ---


def numbered(p: Params, numbers: Array) -> Array:
    """Returns rows' numbers along an axis, as an iota."""
    shape = [1] * len(p["shape"])
    shape[p["axis"]] = numbers.shape[0]
    return jnp.broadcast_to(numbers.reshape(shape), p["shape"]).astype(p["dtype"])


def _only_rows(p: Params, value: Array, numbers: Array) -> Array:
    """Puts `fill` where there is no row (its number is -1). `factor` elements along the axis belong to one row."""
    shape = [1] * value.ndim
    shape[p["axis"]] = value.shape[p["axis"]]
    there = jnp.repeat(numbers >= 0, p["factor"], total_repeat_length=value.shape[p["axis"]]).reshape(shape)
    return jnp.where(there, value, jnp.asarray(p["fill"], value.dtype))


#: Operation -> the function that runs it, from the equation's parameters and operands to its result.
ROW_OPS: Mapping[str, Callable[..., Array]] = {
    "ap.row_ids": flat_ids,
    "ap.row_range": lambda p: jnp.arange(p["start"], p["stop"], p["stride"], dtype=jnp.int32),
    "ap.plus": lambda p, a, b: a + b,
    "ap.exceeded": lambda p, load: load > p["capacity"],
    "ap.any": lambda p, *flags: jnp.any(jnp.stack(flags)),
    "ap.next": lambda p, count: count + 1,
    "ap.select": lambda p, which, new, old: jnp.where(which, old, new),
    "ap.numbered": numbered,
    "ap.only_rows": _only_rows,
    "ap.full": lambda p, value: jnp.full(p["shape"], value, p["dtype"]),
}
