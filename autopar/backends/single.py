"""Row space on one device, or on several that all hold the table: a route is the sorted unique ids, nothing travels.

Out-of-range ids map to V before they are made unique; the padding entries of a route are V. A commit gives padding
the numbers V, V+1, ...: the indices are then unique and sorted, and what is out of range is dropped.

Under XLA's partitioner the very same operations are the method `allreduce_rows`: each device scatters the gradients of
its part of the batch into zeros of the routed rows, and the partitioner sums them with an AllReduce.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from autopar.backends.indices import (
    along,
    find,
    find_own,
    gather_rows,
    local_index,
    pull_rows,
    scatter_rows,
    set_at,
    set_rows,
    sorted_unique,
    spread_last_row,
    untouched,
)
from autopar.backends.reductions import Others, join_blocks, reduce_routed, reduce_some

Array = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Route:
    """Which rows a step touches.

    Attributes:
      rows: int32[U], sorted unique row numbers; V for padding.
      spare: int32[], a row that the step doesn't touch: what the last padding row is.
    """

    rows: Array
    spare: Array


class SingleDevice:
    """Implements `protocol.RowBackend`."""

    is_spread = False

    def route(self, ids: Sequence[Array], params: Mapping[str, Any]) -> Route:
        flat = jnp.concatenate([i.astype(jnp.int32) for i in ids]) if ids else jnp.zeros((0,), jnp.int32)
        rows = sorted_unique(flat, params["rows"], params["extent"])
        return Route(rows, untouched(rows))

    def pull(self, leaf: Array, route: Route, axis: int, state: bool) -> Array:
        return pull_rows(leaf, route.rows, route.spare, axis, state)

    def fetch(self, rows: Array, route: Route, axis: int) -> Array:
        return rows

    def lookup(self, params: Mapping[str, Any], fetched: Array, route: Route, index: Array) -> Array:
        return gather_rows(params, fetched, local_index(params, route.rows, index))

    def lookup_ids(self, fetched: Array, route: Route, ids: Array, axis: int) -> Array:
        return fetched.at[along(axis, find(route.rows, ids, jnp.iinfo(jnp.int32).max))].get(mode="clip")

    def push(
        self, primitive: Any, params: Mapping[str, Any], base: Array, route: Route, index: Array, updates: Array
    ) -> Array:
        return scatter_rows(primitive, params, base, local_index(params, route.rows, index), updates)

    def aggregate(
        self, primitive: Any, params: Mapping[str, Any], base: Array, route: Route, index: Array, updates: Array
    ) -> Array:
        raise AssertionError("nothing travels by itself: there are pushes only")

    def deliver(self, sums: Array, route: Route, axis: int, base: Array | None) -> Array:
        raise AssertionError("nothing travels by itself: there are pushes only")

    def push_ids(self, base: Array, route: Route, ids: Array, updates: Array, axis: int) -> Array:
        return set_at(base, axis, find(route.rows, ids, jnp.iinfo(jnp.int32).max), updates)

    def row_numbers(self, route: Route, extent: int) -> Array:
        return jnp.where(route.rows < extent, route.rows, route.spare)

    def reduce_rows(self, params: Mapping[str, Any], rows: Array, route: Route, others: Others | None = None) -> Array:
        extent, is_row = params["extent"], route.rows < params["extent"]
        if others is None:
            return reduce_routed(params, rows, is_row, extent)

        def reduced(k: Array) -> Array:
            some = k * others.block + jax.lax.iota(jnp.int32, others.block)
            inside = jnp.minimum(some, extent)
            which = (some < extent) & (find_own(route.rows, some) == route.rows.shape[0])
            return reduce_some(params, others.rows(Route(inside, jnp.minimum(inside[-1], extent - 1))), which)

        part = reduce_routed(params, rows, is_row, extent, others.needed)
        return join_blocks(params["op"], part, others, -(-extent // others.block), reduced)

    def reduce_part(
        self, params: Mapping[str, Any], rows: Array, route: Route, others: Others | None, alone: Array | None
    ) -> Array:
        raise AssertionError("every device has all rows")

    def padding(self, rows: Array, axis: int) -> Array:
        return rows[along(axis, slice(-1, None))]

    def commit(self, leaf: Array, rows: Array, route: Route, axis: int, guard: Array | None = None) -> Array:
        numbers = route.rows if guard is None else jnp.where(guard, leaf.shape[axis], route.rows)
        return set_rows(leaf, rows, numbers, axis)

    def exceeded(self, route: Route) -> Array:
        return jnp.zeros((), bool)

    def densify(self, rows: Array, route: Route, axis: int, extent: int) -> Array:
        return spread_last_row(rows, route.rows, axis, extent)

    def fill(self, leaf: Array, rows: Array, axis: int) -> Array:
        return jnp.broadcast_to(self.padding(rows, axis), leaf.shape)

    def sweep(
        self,
        update: Callable[[Route, Sequence[Array]], Sequence[Array]],
        leaves: Sequence[Array],
        needed: Array,
        params: Mapping[str, Any],
    ) -> Sequence[Array]:
        extent, size = params["extent"], params["rows"]
        numbers = jax.lax.iota(jnp.int32, size)

        def block(k: Array, leaves: Sequence[Array]) -> Sequence[Array]:
            some = jnp.minimum(k * size + numbers, extent)
            route = Route(some, jnp.minimum(some[-1], extent - 1))
            rows = update(route, leaves)
            new = zip(leaves, rows, params["axes"], strict=True)
            return tuple(self.commit(leaf, value, route, axis) for leaf, value, axis in new)

        blocks = jnp.where(needed, -(-extent // size), 0)
        return jax.lax.fori_loop(0, blocks, block, tuple(leaves))
