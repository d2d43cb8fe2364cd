"""Row space on one device: the table is whole, so a route is the sorted unique ids and nothing travels.

Out-of-range ids map to V before they are made unique; the padding entries of a route are V. A commit gives padding
the numbers V, V+1, ...: the indices are then unique and sorted, and what is out of range is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autopar import jax_compat

Array = Any


class SingleDevice:
    """Implements `protocol.RowBackend`; a route is int32[U]."""

    def route(self, ids: Sequence[Array], extent: int, rows: int) -> Array:
        flat = jnp.concatenate([i.astype(jnp.int32) for i in ids]) if ids else jnp.zeros((0,), jnp.int32)
        if flat.shape[0] == 0:
            return jnp.full((rows,), extent, jnp.int32)
        ordered = jax.lax.sort(flat)
        first = jnp.concatenate([jnp.ones((1,), bool), ordered[1:] != ordered[:-1]])
        place = jnp.cumsum(first, dtype=jnp.int32) - 1
        empty = jnp.full((rows,), extent, jnp.int32)
        return empty.at[place].set(ordered, mode="drop", indices_are_sorted=True)

    def pull(self, leaf: Array, route: Array, axis: int, state: bool) -> Array:
        index = (slice(None),) * axis + (route,)
        rows = leaf.at[index].get(mode="clip", indices_are_sorted=True)
        if not state or not jax_compat.is_float(rows.dtype):
            return rows
        last = (slice(None),) * axis + (slice(-1, None),)
        real = jnp.isfinite(rows[last]) | (route[-1] < leaf.shape[axis])
        return rows.at[last].set(jnp.where(real, rows[last], jnp.ones((), rows.dtype)))

    def row_numbers(self, route: Array) -> Array:
        return route

    def positions(self, route: Array, ids: Array, extent: int) -> Array:
        found = jnp.searchsorted(route, ids, side="left", method="scan_unrolled").astype(jnp.int32)
        return jnp.where(ids < extent, found, route.shape[0])

    def is_row(self, route: Array, extent: int) -> Array:
        return route < extent

    def commit(self, leaf: Array, rows: Array, route: Array, axis: int) -> Array:
        extent = leaf.shape[axis]
        numbers = jnp.where(route >= extent, extent + jax.lax.iota(jnp.int32, route.shape[0]), route)
        return _set_rows(leaf, (slice(None),) * axis + (numbers,), rows)

    def densify(self, rows: Array, route: Array, axis: int, extent: int) -> Array:
        last = jax.lax.slice_in_dim(rows, rows.shape[axis] - 1, rows.shape[axis], axis=axis)
        shape = (*rows.shape[:axis], extent, *rows.shape[axis + 1 :])
        return self.commit(jnp.broadcast_to(last, shape), rows, route, axis)

    def sweep(
        self,
        update: Callable[[Array, Sequence[Array]], Sequence[Array]],
        leaves: Sequence[Array],
        needed: Array,
        params: Mapping[str, Any],
    ) -> Sequence[Array]:
        extent, size = params["extent"], params["rows"]
        numbers = jax.lax.iota(jnp.int32, size)

        def block(k: Array, leaves: Sequence[Array]) -> Sequence[Array]:
            route = jnp.minimum(k * size + numbers, extent)
            rows = update(route, leaves)
            new = zip(leaves, rows, params["axes"], strict=True)
            return tuple(self.commit(leaf, value, route, axis) for leaf, value, axis in new)

        blocks = jnp.where(needed, -(-extent // size), 0)
        return jax.lax.fori_loop(0, blocks, block, tuple(leaves))


def _set_rows(leaf: Array, index: tuple[Any, ...], rows: Array) -> Array:
    """Unique sorted rows of a leaf replaced, in place.

    On CPUs jax 0.10 widens a bfloat16 table to float32 and back for a scatter. There the bits are written as integers:
    still a copy of the table, but six times faster.
    """
    options = {"mode": "drop", "unique_indices": True, "indices_are_sorted": True}
    if leaf.dtype == jnp.bfloat16 and jax_compat.widens_bfloat16():
        bits, new = (jax.lax.bitcast_convert_type(x, jnp.uint16) for x in (leaf, rows))
        return jax.lax.bitcast_convert_type(bits.at[index].set(new, **options), jnp.bfloat16)
    return leaf.at[index].set(rows, **options)
