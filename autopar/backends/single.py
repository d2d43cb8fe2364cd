"""Row space on one device, or on several that all hold the table: a route is the sorted unique ids, nothing travels.

Out-of-range ids map to V before they are made unique; the padding entries of a route are V. A commit gives padding the
numbers V, V+1, ..., so that indices are unique and sorted; those out of range are dropped.

Under XLA's partitioner the same operations are the method `allreduce_rows`: each device scatters the gradients of its
part of the batch into zeros of the routed rows, and the partitioner sums them with an AllReduce.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from autopar.backends import indices
from autopar.backends.devices import OwnPart
from autopar.backends.row_backend import Others, RowBackend, reduce_routed, reduce_some
from autopar.ir.program import RouteType
from autopar.jax_types import Array, Params


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Route:
    """The rows that a step touches."""

    rows: Array  #: int32[U], sorted unique row numbers; V for padding.
    spare: Array  #: int32[], an untouched row, which the last padding row reads.


def route_types(type_: RouteType) -> Route:
    return Route(jax.ShapeDtypeStruct((type_.rows,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32))


class SingleDevice(RowBackend):
    """One device, which has all rows."""

    def route(self, params: Params, *ids: Array) -> Route:
        flat = jnp.concatenate([i.astype(jnp.int32) for i in ids]) if ids else jnp.zeros((0,), jnp.int32)
        rows = indices.sorted_unique(flat, params["rows"], params["extent"])
        return Route(rows, indices.untouched(rows))

    def pull(self, params: Params, leaf: Array, route: Route) -> Array:
        return indices.pull_rows(leaf, route.rows, route.spare, params["axis"], params["state"])

    def fetch(self, params: Params, rows: Array, route: Route) -> Array:
        return rows

    def lookup(self, params: Params, fetched: Array, route: Route, index: Array) -> Array:
        return indices.gather_rows(params, fetched, indices.local_index(params, route.rows, index))

    def lookup_ids(self, params: Params, fetched: Array, route: Route, ids: Array) -> Array:
        number = indices.find(route.rows, ids, jnp.iinfo(jnp.int32).max)
        return fetched.at[indices.along(params["axis"], number)].get(mode="clip")

    def push(self, params: Params, base: Array, route: Route, index: Array, updates: Array) -> Array:
        return indices.scatter_rows(params, base, indices.local_index(params, route.rows, index), updates)

    def push_ids(self, params: Params, base: Array, route: Route, ids: Array, updates: Array) -> Array:
        return indices.set_at(base, params["axis"], indices.find(route.rows, ids, jnp.iinfo(jnp.int32).max), updates)

    def row_numbers(self, route: Route, extent: int) -> Array:
        return jnp.where(route.rows < extent, route.rows, route.spare)

    def reduce_rows(
        self, params: Params, rows: Array, route: Route, *alone: Array, others: Others | None = None, part: bool = False
    ) -> Array:
        assert not part, "every device has all rows"
        extent = params["extent"]

        def reduced(rows: Array, some: Route) -> Array:
            which = (some.rows < extent) & (indices.find_own(route.rows, some.rows) == route.rows.shape[0])
            return reduce_some(params, rows, which)

        routed = reduce_routed(params, rows, route.rows < extent, extent, *alone)
        return self.join_others(params, routed, others, reduced)

    def densify(self, params: Params, rows: Array, route: Route) -> Array:
        return indices.spread_last_row(rows, route.rows, params["axis"], params["extent"])

    def blocks(self, rows: int, extent: int) -> int:
        return -(-extent // rows)

    def block(self, k: Array, rows: int, extent: int) -> Route:
        numbers = jnp.minimum(k * rows + jax.lax.iota(jnp.int32, rows), extent)
        return Route(numbers, jnp.minimum(numbers[-1], extent - 1))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GatheredRoute(Route):
    """The rows that a step touches, known to all devices."""

    requested: Array  #: int32[F], the sorted rows that the device touches itself; V for padding.
    back: Array  #: int32[N F], where these are among `rows`; U for none.


class GatheredRows(SingleDevice):
    """Rows that all devices hold; gradients travel by AllGather (`allgather`).

    Each device sums its own gradients by row, sends the rows that it has touched to all others, and adds what it
    receives to the routed rows. Source: Parallax, section 3.2 (Horovod's way with sparse gradients), here with local
    aggregation.
    """

    def __init__(self, devices: OwnPart) -> None:
        self._devices = devices

    def route(self, params: Params, *ids: Array) -> Route:
        if params["requested"] is None:  # nothing is spread
            return super().route(params, *ids)
        count, extent = self._devices.count, params["extent"]
        requested = indices.sorted_unique(jnp.concatenate(ids).astype(jnp.int32), params["requested"] // count, extent)
        theirs = jax.lax.all_gather(requested, self._devices.axis, tiled=True)
        rows = indices.sorted_unique(theirs, params["rows"], extent)
        return GatheredRoute(rows, indices.untouched(rows), requested, indices.find(rows, theirs, extent))

    def aggregate(self, params: Params, base: Array, route: Route, index: Array, updates: Array) -> Array:
        assert isinstance(route, GatheredRoute), "gradients of this device alone are aggregated"
        return indices.scatter_rows(params, base, indices.local_index(params, route.requested, index), updates)

    def deliver(self, params: Params, sums: Array, route: Route, base: Array | None = None) -> Array:
        assert isinstance(route, GatheredRoute), "gradients of this device alone are delivered"
        axis, touched = params["axis"], route.rows.shape[0]
        gather = functools.partial(jax.lax.all_gather, axis_name=self._devices.axis, tiled=True)
        rows = indices.as_bits(gather, jnp.moveaxis(sums, axis, 0))
        start = jnp.zeros((touched, *rows.shape[1:]), rows.dtype) if base is None else jnp.moveaxis(base, axis, 0)
        return jnp.moveaxis(start.at[route.back].add(rows, mode="drop"), 0, axis)


class ReplicatedRows(SingleDevice):
    """Row space that every device has whole, in the program of one device (`allreduce_rows`).

    Every device scatters its gradients into zeros of the routed rows, which are then reduced like any other value.
    """

    def __init__(self, devices: OwnPart) -> None:
        self._devices = devices

    def route(self, params: Params, *ids: Array) -> Route:
        batched = params["batched"] or [False] * len(ids)
        pairs = zip(ids, batched, strict=True)
        return super().route(params, *(self._devices.gathered(i, 0) if b else i for i, b in pairs))
