"""Reduces over all rows of a table from its routed rows; all others equal the last one, the padding row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from autopar import jax_compat
from autopar.ir.reductions import REDUCERS, neutral
from autopar.jax_types import Array, Leaf, Params


@dataclass(frozen=True)
class Others:
    """Untouched rows, where they may differ from the padding row."""

    needed: Array  #: They do differ.
    rows: Callable[[Leaf], Array]  #: Returns what is reduced of the rows of a route, as if none were touched.
    block: int  #: Number of rows that are taken at a time.


def reduce_some(params: Params, rows: Array, which: Array) -> Array:
    """Reduces some rows. `params`: `op`, `axes`, `axis`; `which`: bool[number of rows]."""
    op, axis = params["op"], params["axis"]
    shape = [1] * rows.ndim
    shape[axis] = rows.shape[axis]
    return REDUCERS[op].reduce(jnp.where(which.reshape(shape), rows, neutral(op, rows.dtype)), params["axes"])


def reduce_routed(
    params: Params, rows: Array, is_row: Array, extent: Array | int, alone: Array | bool = False
) -> Array:
    """Reduces all `extent` rows, or the routed ones `alone`. `is_row`: bool[U], False for padding."""
    kind, axes, axis = REDUCERS[params["op"]], params["axes"], params["axis"]
    part = reduce_some(params, rows, is_row)
    padding = jax.lax.slice_in_dim(rows, rows.shape[axis] - 1, rows.shape[axis], axis=axis)
    untouched = jnp.where(alone, 0, extent - jnp.sum(is_row, dtype=jnp.int32))
    others = kind.repeated(kind.reduce(padding, axes), untouched)
    return jnp.where(untouched > 0, kind.join(part, others), part)


def reduce_across(op: str, part: Array, name: str | tuple[str, ...]) -> Array:
    """Reduces the devices' results over axes of the mesh, in `shard_map`."""
    kind = REDUCERS[op]
    if kind.across is not None and part.dtype != jnp.bool_:
        result = kind.across(part, name)
        if op == "sum" or not jax_compat.is_float(part.dtype):
            return result
        is_nan = jax.lax.pmax(jnp.isnan(part).astype(jnp.int32), name)  # the collectives may lose a NaN
        return jnp.where(is_nan > 0, jnp.asarray(jnp.nan, part.dtype), result)
    return kind.reduce(jax.lax.all_gather(part, name), (0,))
