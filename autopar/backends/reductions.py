"""Reductions over all rows of a table from its routed rows: the others all are what the padding row, the last, is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar import jax_compat

Array = Any

#: The untouched rows folded in: (reduction of the routed rows, of the padding row, count of untouched rows).
_FINISH: Mapping[str, Callable[[Array, Array, Array], Array]] = {
    "reduce_max": lambda part, other, count: jnp.maximum(part, other),
    "reduce_min": lambda part, other, count: jnp.minimum(part, other),
    "reduce_and": lambda part, other, count: part & other,
    "reduce_or": lambda part, other, count: part | other,
    # The count may overflow a small float, and zeros need none.
    "reduce_sum": lambda part, other, count: part + jnp.where(other == 0, other, other * count.astype(part.dtype)),
    "reduce_prod": lambda part, other, count: part * other ** count.astype(part.dtype),
}

#: Two results joined.
_JOIN: Mapping[str, Callable[[Array, Array], Array]] = {
    "reduce_max": jnp.maximum,
    "reduce_min": jnp.minimum,
    "reduce_and": lambda a, b: a & b,
    "reduce_or": lambda a, b: a | b,
    "reduce_sum": lambda a, b: a + b,
    "reduce_prod": lambda a, b: a * b,
}

_REDUCE: Mapping[str, Callable[[Array, Any], Array]] = {
    "reduce_sum": lambda x, axes: jnp.sum(x, axes, dtype=x.dtype),
    "reduce_prod": lambda x, axes: jnp.prod(x, axes, dtype=x.dtype),
    "reduce_max": jnp.max,
    "reduce_min": jnp.min,
    "reduce_and": jax.lax.reduce_and,
    "reduce_or": jax.lax.reduce_or,
}

_ACROSS: Mapping[str, Callable[[Array, Any], Array]] = {
    "reduce_sum": jax.lax.psum,
    "reduce_max": jax.lax.pmax,
    "reduce_min": jax.lax.pmin,
}


@dataclass(frozen=True)
class Others:
    """Rows that the step doesn't touch, where they may differ from the padding row.

    Attributes:
      needed: Whether they do.
      rows: Route to some rows -> what is reduced, of these, as if none were touched.
      block: How many are taken at a time.
    """

    needed: Array
    rows: Callable[[Any], Array]
    block: int


def join_blocks(op: str, part: Array, others: Others, blocks: int, reduced: Callable[[Array], Array]) -> Array:
    """A reduction of the routed rows joined with that of all others, block by block; itself if they aren't needed.

    Args:
      op: Which reduction.
      part: That of the routed rows; of all rows if the others aren't needed.
      others: The others.
      blocks: How many there are.
      reduced: Number of a block -> the reduction of those of its rows that are others.
    """

    def step(k: Array, total: Array) -> Array:
        return _JOIN[op](total, reduced(k).astype(total.dtype))

    return jax.lax.fori_loop(0, jnp.where(others.needed, blocks, 0), step, part)


def reduce_some(params: Mapping[str, Any], rows: Array, which: Array) -> Array:
    """A reduction of some rows. `params`: `op`, `axes`, `axis`; `which`: bool[number of rows]."""
    op, axis = params["op"], params["axis"]
    shape = [1] * rows.ndim
    shape[axis] = rows.shape[axis]
    neutral = jnp.asarray(_neutral(op, rows.dtype), rows.dtype)
    return _REDUCE[op](jnp.where(which.reshape(shape), rows, neutral), params["axes"])


def reduce_routed(
    params: Mapping[str, Any], rows: Array, is_row: Array, extent: Array | int, alone: Array | bool = False
) -> Array:
    """A reduction over all `extent` rows.

    Args:
      params: `op`, `axes` that are reduced, `axis` of the rows.
      rows: The routed rows, padding included.
      is_row: bool[U], False for padding.
      extent: Rows that the routed ones are of.
      alone: Whether the others are left out.
    """
    op, axes, axis = params["op"], params["axes"], params["axis"]
    reduce = _REDUCE[op]
    part = reduce_some(params, rows, is_row)
    padding = jax.lax.slice_in_dim(rows, rows.shape[axis] - 1, rows.shape[axis], axis=axis)
    untouched = jnp.where(alone, 0, extent - jnp.sum(is_row, dtype=jnp.int32))
    return jnp.where(untouched > 0, _FINISH[op](part, reduce(padding, axes), untouched), part)


def reduce_across(op: str, part: Array, name: str | tuple[str, ...]) -> Array:
    """The devices' results reduced over axes of the mesh, in `shard_map`."""
    if op in _ACROSS and part.dtype != jnp.bool_:
        found = _ACROSS[op](part, name)
        if op == "reduce_sum" or not jax_compat.is_float(part.dtype):
            return found
        is_nan = jax.lax.pmax(jnp.isnan(part).astype(jnp.int32), name)  # the collectives may lose a NaN
        return jnp.where(is_nan > 0, jnp.asarray(jnp.nan, part.dtype), found)
    return _REDUCE[op](jax.lax.all_gather(part, name), (0,))


def _neutral(op: str, dtype: Any) -> Any:
    if np.dtype(dtype) == np.bool_:
        return op in ("reduce_and", "reduce_min")
    if op in ("reduce_sum", "reduce_or"):
        return 0
    if op in ("reduce_prod", "reduce_and"):
        return 1 if op == "reduce_prod" else -1
    limits = jnp.finfo(dtype) if jax_compat.is_float(dtype) else jnp.iinfo(dtype)
    if jax_compat.is_float(dtype):
        return -jnp.inf if op == "reduce_max" else jnp.inf
    return limits.min if op == "reduce_max" else limits.max
