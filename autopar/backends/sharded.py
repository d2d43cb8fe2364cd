"""Row space with the rows of a table and its slots spread over the devices, a parameter server made of devices (`ps`).

Each device owns a shard of the stored rows (`ir.layout`). There are three exchanges (all_to_all) a step, each of at
most `capacity` rows from one device to one other: ids to the owners, rows to the devices that asked, gradients (summed
on each device first) to the owners. Everything else happens at the owners: an array "at the routed rows" is spread over
the devices along its row axis. Source: Parallax, sections 3.2 and 4.3 (PS with local aggregation).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from autopar.backends import bags
from autopar.backends.devices import OwnPart, reduce_over
from autopar.backends.indices import (
    along,
    as_bits,
    find,
    find_own,
    gather_rows,
    local_index,
    pull_rows,
    scatter_rows,
    set_at,
    sorted_unique,
    spread_last_row,
    untouched,
)
from autopar.backends.row_backend import Others, RowBackend, reduce_routed, reduce_some
from autopar.ir.layout import RowLayout
from autopar.ir.operations import split
from autopar.jax_types import Array, Params


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Route:
    """A device's own arrays."""

    rows: Array  #: int32[Uo], numbers of the owner's rows in its own shard of the table; the shard's size for padding.
    spare: Array  #: int32[1], an untouched row of the owner's shard, which its last padding row reads.
    load: Array  #: int32[], the most rows that any device asks an owner for, even above C; the same on all devices.
    #: int32[F], sorted storage indices of the rows that the device asks for; one past the last for padding.
    requested: Array
    slot: Array  #: int32[F], the position of each requested row in what the device sends; N C for padding.
    back: Array  #: int32[N C], for each id that the owner was asked for its position among `rows`; Uo for none.


class ShardedRows(RowBackend):
    """The view of one of N devices, each of which has a shard. `capacity`: C, the most rows that one asks another
    for."""

    is_spread = True

    def __init__(self, devices: OwnPart, layout: RowLayout, capacity: int) -> None:
        self._devices = devices
        self._layout = layout
        self._shard_rows = layout.shard_rows
        self._capacity = capacity

    def _storage_indices(self, ids: Array) -> Array:
        """Returns rows' storage indices; one past the last index for no row."""
        return jnp.where(ids < self._layout.extent, self._layout.storage_index(ids), self._layout.stored).astype(
            jnp.int32
        )

    def _local(self, params: Params, indices: Array, index: Array, *, own: bool = False) -> Array:
        return local_index(params, indices, index, stored_ids=self._storage_indices, own=own)

    def _first(self) -> Array:
        return self._devices.position() * self._shard_rows

    def _exchange(self, parts: Array) -> Array:
        """Exchanges [N C, ...]: the k-th C rows go to device k; the result is ordered by sender."""
        split = parts.reshape(self._devices.count, self._capacity, *parts.shape[1:])
        received = as_bits(lambda sent: jax.lax.all_to_all(sent, self._devices.axis, 0, 0), split)
        return received.reshape(parts.shape)

    def route(self, params: Params, *ids: Array) -> Route:
        """Sends ids to their owners. What pads a message tells the sender's load, so that every device learns all.

        A message without padding tells a load of C; one of a device that exceeds C leaves its last id out.
        """
        count, end, capacity, shard_rows = self._devices.count, self._layout.stored, self._capacity, self._shard_rows
        requested_rows, owned_rows = params["requested"] // count, params["rows"] // count
        requested = sorted_unique(self._storage_indices(jnp.concatenate(ids)), requested_rows, end)
        starts = jnp.searchsorted(requested, jnp.arange(count, dtype=jnp.int32) * shard_rows).astype(jnp.int32)
        owner = jnp.minimum(requested // shard_rows, count - 1)
        position = jnp.arange(requested_rows, dtype=jnp.int32) - starts[owner]
        own_load = jnp.max(jnp.where(requested < end, position + 1, 0))
        if "bag_ids" in params:
            looked_up = self._storage_indices(jnp.concatenate(ids)) // shard_rows
            own_load = jnp.maximum(own_load, bags.load_of_ids(looked_up, count, params["bag_ids"], capacity))
        fits = (requested < end) & (position < jnp.where(own_load > capacity, capacity - 1, capacity))
        slot = jnp.where(fits, owner * capacity + position, count * capacity)
        request = jnp.full((count * capacity,), -1 - own_load).at[slot].set(requested, mode="drop")
        received = self._exchange(request)
        last = received.reshape(count, capacity)[:, -1]
        load = jnp.max(jnp.where(last < 0, -1 - last, capacity))
        wanted = jnp.where(received < 0, end, received)
        owned = sorted_unique(wanted, owned_rows, end)
        rows = jnp.where(owned < end, owned - self._first(), shard_rows)
        return Route(rows, untouched(rows)[None], load, requested, slot, find(owned, wanted, end))

    def pull(self, params: Params, leaf: Array, route: Route) -> Array:
        return pull_rows(leaf, route.rows, route.spare[0], params["axis"], params["state"])

    def fetch(self, params: Params, rows: Array, route: Route) -> Array:
        axis = params["axis"]
        sent = jnp.moveaxis(rows, axis, 0).at[route.back].get(mode="clip")
        return jnp.moveaxis(self._exchange(sent).at[route.slot].get(mode="clip"), 0, axis)

    def lookup(self, params: Params, fetched: Array, route: Route, index: Array) -> Array:
        return gather_rows(params, fetched, self._local(params, route.requested, index))

    def lookup_ids(self, params: Params, fetched: Array, route: Route, ids: Array) -> Array:
        indices = find(route.requested, self._storage_indices(ids), self._layout.stored)
        return fetched.at[along(params["axis"], indices)].get(mode="clip")

    def aggregate(self, params: Params, base: Array, route: Route, index: Array, updates: Array) -> Array:
        return scatter_rows(params, base, self._local(params, route.requested, index), updates)

    def deliver(self, params: Params, sums: Array, route: Route, base: Array | None = None) -> Array:
        axis, owned = params["axis"], route.rows.shape[0]
        sums = jnp.moveaxis(sums, axis, 0)
        sent = jnp.zeros((route.back.shape[0], *sums.shape[1:]), sums.dtype).at[route.slot].set(sums, mode="drop")
        start = jnp.zeros((owned, *sums.shape[1:]), sums.dtype) if base is None else jnp.moveaxis(base, axis, 0)
        return jnp.moveaxis(start.at[route.back].add(self._exchange(sent), mode="drop"), 0, axis)

    def push(self, params: Params, base: Array, route: Route, index: Array, updates: Array) -> Array:
        """Scatters updates that every device has; each owner takes those of its rows."""
        assert params["batch"] is None or params["op"] != "scatter-add", "what each device has by itself is aggregated"
        axis, local = params["axis"], self._local(params, self._owned(route.rows), index, own=True)
        if not params["clip"]:
            return scatter_rows(params, base, local, updates)
        # Nothing is dropped here, so other owners' updates go to an additional row.
        more = [(0, int(d == axis)) for d in range(base.ndim)]
        wider = scatter_rows(params, jnp.pad(base, more), local, updates)
        return jax.lax.slice_in_dim(wider, 0, base.shape[axis], axis=axis)

    def ask_bags(self, params: Params, route: Route, *operands: Array) -> tuple[Array, ...]:
        stored = self._storage_indices(bags.bag_ids(params, (route, *operands)))
        return bags.ask(params, (route, *operands), stored, route.rows, self._shard_rows, self._devices.axis)

    def pool(self, params: Params, rows: Array, route: Route, *entries: Array) -> tuple[Array, ...]:
        return bags.add_up(params["sets"], rows, entries, self._devices.axis)

    def push_pool(self, params: Params, route: Route, *operands: Array) -> Array:
        named, rows = split("ap.push_pool", params, (route, *operands)), route.rows.shape[0]
        return bags.to_rows(params["sets"], named["cotangents"], named["bags"], rows, self._devices.axis)

    def _owned(self, rows: Array) -> Array:
        return jnp.where(rows < self._shard_rows, rows + self._first(), self._layout.stored)

    def push_ids(self, params: Params, base: Array, route: Route, ids: Array, updates: Array) -> Array:
        return set_at(base, params["axis"], find_own(self._owned(route.rows), self._storage_indices(ids)), updates)

    def row_numbers(self, route: Route, extent: int) -> Array:
        indices = self._first() + jnp.where(route.rows < self._shard_rows, route.rows, route.spare[0])
        return jnp.minimum(self._layout.row(indices), extent - 1).astype(jnp.int32)

    def reduce_rows(
        self, params: Params, rows: Array, route: Route, *alone: Array, others: Others | None = None, part: bool = False
    ) -> Array:
        mine = self._layout.rows_on(self._devices.position())

        def of_all(own_result: Array) -> Array:
            return own_result if part else reduce_over(params["op"], own_result, self._devices.axis)

        def reduced(rows: Array, some: Route) -> Array:
            which = (some.rows < mine) & (find_own(route.rows, some.rows) == route.rows.shape[0])
            return of_all(reduce_some(params, rows, which))

        result = of_all(reduce_routed(params, rows, route.rows < self._shard_rows, mine, *alone))
        return self.join_others(params, result, others, reduced)

    def load(self, params: Params, route: Route) -> Array:
        return route.load

    def densify(self, params: Params, rows: Array, route: Route) -> Array:
        return spread_last_row(rows, route.rows, axis=params["axis"], extent=self._shard_rows)

    def blocks(self, rows: int, extent: int) -> int:
        return -(-self._shard_rows // (rows // self._devices.count))

    def block(self, k: Array, rows: int, extent: int) -> Route:
        size = rows // self._devices.count
        numbers = jnp.minimum(k * size + jnp.arange(size, dtype=jnp.int32), self._shard_rows)
        spare = jnp.minimum(numbers[-1:], self._shard_rows - 1)
        return Route(numbers, spare, *[jnp.zeros((0,), jnp.int32)] * 4)
