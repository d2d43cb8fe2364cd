"""Row space with the rows of a table and its slots spread over the devices: a parameter server made of devices (`ps`).

Each device owns a shard of the stored rows (`ir.layout`). Three exchanges (all_to_all) a step, each of at most
`capacity` rows from one device to one other: ids to the owners, rows to who asked, gradients (summed on each device
first) to the owners. Everything else happens where the rows are: an array "at the routed rows" is spread over the
devices along its row axis, each owner's rows in its shard of it. Source: Parallax, sections 3.2 and 4.3 (PS with local
aggregation).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from autopar.backends.devices import Devices
from autopar.backends.indices import (
    along,
    as_bits,
    cut,
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
from autopar.backends.protocol import Params, RowBackend
from autopar.backends.reductions import Others, reduce_across, reduce_routed, reduce_some
from autopar.ir.layout import RowLayout

Array = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Route:
    """Global arrays, each device's shard after the other's.

    Attributes:
      rows: int32[N Uo], numbers of the owner's rows in its own shard of the table; the shard's size for padding.
      requested: int32[N F], sorted places of the rows that a device asks for; one past the last for padding.
      spare: int32[N], a row of each owner's share that the step doesn't touch: what its last padding row is.
      load: int32[N], the most rows that a device asks an owner for, be they more than C.
      slot: int32[N F], where each of them is in what the device sends; N C for padding.
      back: int32[N N C], for each id that an owner was asked for its place among `rows`; Uo for none.
    """

    rows: Array
    spare: Array
    load: Array
    requested: Array
    slot: Array
    back: Array


class ShardedRows(RowBackend):
    """Each of N devices has a shard of the rows. `capacity`: C, the most rows that one requests from another one."""

    is_spread = True

    def __init__(self, devices: Devices, layout: RowLayout, capacity: int) -> None:
        self._devices = devices
        self._layout = layout
        self._shard_rows = layout.shard_rows
        self._capacity = capacity

    def _places(self, ids: Array) -> Array:
        """Where rows are stored; one past the last place for no row."""
        return jnp.where(ids < self._layout.extent, self._layout.place(ids), self._layout.stored).astype(jnp.int32)

    def _local(self, params: Params, places: Array, index: Array, *, own: bool = False) -> Array:
        return local_index(params, places, index, places_of=self._places, own=own)

    def _first(self) -> Array:
        """The place of this device's first row."""
        return self._devices.position() * self._shard_rows

    def _exchange(self, parts: Array) -> Array:
        """[N C, ...]: the k-th C go to device k; what comes back is ordered by sender."""
        split = parts.reshape(self._devices.count, self._capacity, *parts.shape[1:])
        received = as_bits(lambda sent: jax.lax.all_to_all(sent, self._devices.axis, 0, 0), split)
        return received.reshape(parts.shape)

    def route(self, params: Params, *ids: Array) -> Route:
        count, end, capacity, shard_rows = self._devices.count, self._layout.stored, self._capacity, self._shard_rows
        requested_rows, owned_rows = params["requested"] // count, params["rows"] // count

        def plan(*ids: Array) -> tuple[Array, ...]:
            requested = sorted_unique(self._places(jnp.concatenate(ids)), requested_rows, end)
            starts = jnp.searchsorted(requested, jnp.arange(count, dtype=jnp.int32) * shard_rows).astype(jnp.int32)
            owner = jnp.minimum(requested // shard_rows, count - 1)
            place = jnp.arange(requested_rows, dtype=jnp.int32) - starts[owner]
            fits = (requested < end) & (place < capacity)
            slot = jnp.where(fits, owner * capacity + place, count * capacity)
            request = jnp.full((count * capacity,), end, jnp.int32).at[slot].set(requested, mode="drop")
            wanted = self._exchange(request)
            owned = sorted_unique(wanted, owned_rows, end)
            rows = jnp.where(owned < end, owned - self._first(), shard_rows)
            load = jnp.max(jnp.where(requested < end, place + 1, 0))[None]
            return rows, untouched(rows)[None], load, requested, slot, find(owned, wanted, end)

        batched = params["batched"] or [False] * len(ids)
        operand_axes = [0 if b else None for b in batched]
        return Route(*self._devices.local(plan, operand_axes, (0,) * 6, *ids))

    def pull(self, params: Params, leaf: Array, route: Route) -> Array:
        axis = params["axis"]

        def pull(leaf: Array, rows: Array, spare: Array) -> Array:
            return pull_rows(leaf, rows, spare[0], axis, params["state"])

        return self._devices.local(pull, (axis, 0, 0), axis, leaf, route.rows, route.spare)

    def fetch(self, params: Params, rows: Array, route: Route) -> Array:
        axis = params["axis"]

        def fetch(rows: Array, back: Array, slot: Array) -> Array:
            sent = jnp.moveaxis(rows, axis, 0).at[back].get(mode="clip")
            return jnp.moveaxis(self._exchange(sent).at[slot].get(mode="clip"), 0, axis)

        return self._devices.local(fetch, (axis, 0, 0), axis, rows, route.back, route.slot)

    def lookup(self, params: Params, fetched: Array, route: Route, index: Array) -> Array:
        def lookup(fetched: Array, requested: Array, index: Array) -> Array:
            return gather_rows(params, fetched, self._local(params, requested, index))

        operand_axes = (params["axis"], 0, params["batch"])
        found = self._devices.local(lookup, operand_axes, params["spread"], fetched, route.requested, index)
        return found if params["batch"] is None else cut(found, params["spread"], index.shape[params["batch"]])

    def lookup_ids(self, params: Params, fetched: Array, route: Route, ids: Array) -> Array:
        axis = params["axis"]

        def lookup(fetched: Array, requested: Array, ids: Array) -> Array:
            return fetched.at[along(axis, find(requested, self._places(ids), self._layout.stored))].get(mode="clip")

        return self._devices.local(lookup, (axis, 0, None), None, fetched, route.requested, ids)

    def aggregate(self, params: Params, base: Array, route: Route, index: Array, updates: Array) -> Array:
        def add(base: Array, requested: Array, index: Array, updates: Array) -> Array:
            return scatter_rows(params, base, self._local(params, requested, index), updates)

        axis = params["axis"]
        operand_axes = (axis, 0, params["batch"], params["spread"])
        return self._devices.local(add, operand_axes, axis, base, route.requested, index, updates)

    def deliver(self, params: Params, sums: Array, route: Route, base: Array | None = None) -> Array:
        axis, owned = params["axis"], route.rows.shape[0] // self._devices.parts

        def exchange(sums: Array, slot: Array, back: Array, *base: Array) -> Array:
            sums = jnp.moveaxis(sums, axis, 0)
            sent = jnp.zeros((back.shape[0], *sums.shape[1:]), sums.dtype).at[slot].set(sums, mode="drop")
            start = jnp.moveaxis(base[0], axis, 0) if base else jnp.zeros((owned, *sums.shape[1:]), sums.dtype)
            return jnp.moveaxis(start.at[back].add(self._exchange(sent), mode="drop"), 0, axis)

        more = () if base is None else (base,)
        operand_axes = (axis, 0, 0, *(axis for _ in more))
        return self._devices.local(exchange, operand_axes, axis, sums, route.slot, route.back, *more)

    def push(self, params: Params, base: Array, route: Route, index: Array, updates: Array) -> Array:
        """Updates that every device has: each owner takes those of its rows."""
        assert params["batch"] is None or params["op"] != "scatter-add", "what each device has by itself is aggregated"
        axis = params["axis"]

        def push(base: Array, rows: Array, index: Array, updates: Array) -> Array:
            local = self._local(params, self._owned(rows), index, own=True)
            if not params["clip"]:
                return scatter_rows(params, base, local, updates)
            # What belongs to other owners goes to one more row, for here nothing is dropped.
            more = [(0, int(d == axis)) for d in range(base.ndim)]
            wider = scatter_rows(params, jnp.pad(base, more), local, updates)
            return jax.lax.slice_in_dim(wider, 0, base.shape[axis], axis=axis)

        return self._devices.local(push, (axis, 0, None, None), axis, base, route.rows, index, updates)

    def _owned(self, rows: Array) -> Array:
        """The places of an owner's rows, in `shard_map`."""
        return jnp.where(rows < self._shard_rows, rows + self._first(), self._layout.stored)

    def push_ids(self, params: Params, base: Array, route: Route, ids: Array, updates: Array) -> Array:
        axis = params["axis"]

        def push(base: Array, rows: Array, ids: Array, updates: Array) -> Array:
            return set_at(base, axis, find_own(self._owned(rows), self._places(ids)), updates)

        return self._devices.local(push, (axis, 0, None, None), axis, base, route.rows, ids, updates)

    def row_numbers(self, route: Route, extent: int) -> Array:
        def numbers(rows: Array, spare: Array) -> Array:
            places = self._first() + jnp.where(rows < self._shard_rows, rows, spare[0])
            return jnp.minimum(self._layout.row(places), extent - 1).astype(jnp.int32)

        return self._devices.local(numbers, (0, 0), 0, route.rows, route.spare)

    def reduce_rows(
        self, params: Params, rows: Array, route: Route, *alone: Array, others: Others | None = None, part: bool = False
    ) -> Array:
        assert not part or self._devices.parts == 1, "an owner's part is the owner's"
        axis = params["axis"]

        def across(own_result: Array) -> Array:
            return own_result if part else reduce_across(params["op"], own_result, self._devices.axis)

        def routed(rows: Array, numbers: Array, *alone: Array) -> Array:
            mine = self._layout.rows_on(self._devices.position())
            return across(reduce_routed(params, rows, numbers < self._shard_rows, mine, *alone))

        def untouched(rows: Array, some: Array, touched: Array) -> Array:
            mine = self._layout.rows_on(self._devices.position())
            which = (some < mine) & (find_own(touched, some) == touched.shape[0])
            return across(reduce_some(params, rows, which))

        def reduced(rows: Array, some: Route) -> Array:
            return self._devices.local(untouched, (axis, 0, 0), None, rows, some.rows, route.rows)

        result = self._devices.local(routed, (axis, 0, *(None for _ in alone)), None, rows, route.rows, *alone)
        return self.join_others(params, result, others, reduced)

    def last_rows(self, rows: Array, axis: int) -> Array:
        return self._devices.local(lambda rows: rows[along(axis, slice(-1, None))], (axis,), axis, rows)

    def replace(self, leaf: Array, rows: Array, route: Route, axis: int, guard: Array | None = None) -> Array:
        numbers = route.rows if guard is None else jnp.where(guard, self._shard_rows, route.rows)
        return self._devices.local(partial(set_rows, axis=axis), (axis, axis, 0), axis, leaf, rows, numbers)

    def load(self, params: Params, route: Route) -> Array:
        return jnp.max(route.load)

    def densify(self, params: Params, rows: Array, route: Route) -> Array:
        axis = params["axis"]
        densify = partial(spread_last_row, axis=axis, extent=self._shard_rows)
        return self._devices.local(densify, (axis, 0), axis, rows, route.rows)

    def filled(self, leaf: Array, rows: Array, axis: int) -> Array:
        def fill(leaf: Array, rows: Array) -> Array:
            return jnp.broadcast_to(rows[along(axis, slice(-1, None))], leaf.shape)

        return self._devices.local(fill, (axis, axis), axis, leaf, rows)

    def blocks(self, rows: int, extent: int) -> int:
        return -(-self._shard_rows // (rows // self._devices.count))

    def block(self, k: Array, rows: int, extent: int) -> Route:
        size = rows // self._devices.count
        own = self._devices.constrain(jnp.arange(self._devices.parts * size, dtype=jnp.int32) % size, 0)
        numbers = jnp.minimum(k * size + own, self._shard_rows)
        spare = jnp.minimum(numbers[size - 1 :: size], self._shard_rows - 1)
        return Route(numbers, spare, *[jnp.zeros((0,), jnp.int32)] * 4)
