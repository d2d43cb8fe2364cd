"""Row space with the rows of a table and its slots spread over the devices: a parameter server made of devices (`ps`).

Each device owns a share of the stored rows (`ir.layout`). Three exchanges (all_to_all) a step, each of at most
`capacity` rows from one device to one other: ids to the owners, rows to who asked, gradients (summed on each device
first) to the owners. Everything else happens where the rows are: an array "at the routed rows" is spread over the
devices along its row axis, each owner's rows in its share of it. Source: Parallax, sections 3.2 and 4.3 (PS with local
aggregation).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from autopar.backends.devices import Devices
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
from autopar.backends.reductions import Others, join_blocks, reduce_across, reduce_routed, reduce_some
from autopar.ir.layout import RowLayout

Array = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Route:
    """Global arrays, each device's share after the other's.

    Attributes:
      rows: int32[N Uo], numbers of the owner's rows in its own share of the table; the share's size for padding.
      asked: int32[N F], sorted places of the rows that a device asks for; one past the last for padding.
      spare: int32[N], a row of each owner's share that the step doesn't touch: what its last padding row is.
      exceeded: bool[N], whether a device asks an owner for more than C rows.
      slot: int32[N F], where each of them is in what the device sends; N C for padding.
      back: int32[N N C], for each id that an owner was asked for its place among `rows`; Uo for none.
    """

    rows: Array
    spare: Array
    exceeded: Array
    asked: Array
    slot: Array
    back: Array


class ShardedRows:
    """Implements `protocol.RowBackend`.

    Args:
      devices: N devices.
      layout: Which row is stored where.
      capacity: C, the most rows that one device asks another one for.
    """

    is_spread = True

    def __init__(self, devices: Devices, layout: RowLayout, capacity: int) -> None:
        self._devices = devices
        self._layout = layout
        self._share = layout.share
        self._capacity = capacity

    def _places(self, ids: Array) -> Array:
        """Where rows are stored; one past the last place for no row."""
        return jnp.where(ids < self._layout.extent, self._layout.place(ids), self._layout.stored).astype(jnp.int32)

    def _local(self, params: Mapping[str, Any], places: Array, index: Array, *, own: bool = False) -> Array:
        return local_index(params, places, index, places_of=self._places, own=own)

    def _first(self) -> Array:
        """The place of this device's first row."""
        return self._devices.position() * self._share

    def _exchange(self, parts: Array) -> Array:
        """[N C, ...]: the k-th C go to device k; what comes back is ordered by sender."""
        split = parts.reshape(self._devices.count, self._capacity, *parts.shape[1:])
        return jax.lax.all_to_all(split, self._devices.axis, 0, 0).reshape(parts.shape)

    def route(self, ids: Sequence[Array], params: Mapping[str, Any]) -> Route:
        count, end, capacity, share = self._devices.count, self._layout.stored, self._capacity, self._share
        asked_rows, owned_rows = params["asked"] // count, params["rows"] // count

        def plan(*ids: Array) -> tuple[Array, ...]:
            asked = sorted_unique(self._places(jnp.concatenate(ids)), asked_rows, end)
            starts = jnp.searchsorted(asked, jnp.arange(count, dtype=jnp.int32) * share).astype(jnp.int32)
            owner = jnp.minimum(asked // share, count - 1)
            place = jnp.arange(asked_rows, dtype=jnp.int32) - starts[owner]
            fits = (asked < end) & (place < capacity)
            slot = jnp.where(fits, owner * capacity + place, count * capacity)
            request = jnp.full((count * capacity,), end, jnp.int32).at[slot].set(asked, mode="drop")
            wanted = self._exchange(request)
            owned = sorted_unique(wanted, owned_rows, end)
            rows = jnp.where(owned < end, owned - self._first(), share)
            exceeded = jnp.any((asked < end) & (place >= capacity))[None]
            return rows, untouched(rows)[None], exceeded, asked, slot, find(owned, wanted, end)

        batched = params["batched"] or [False] * len(ids)
        given = [0 if b else None for b in batched]
        return Route(*self._devices.local(plan, given, (0,) * 6, *ids))

    def pull(self, leaf: Array, route: Route, axis: int, state: bool) -> Array:
        def pull(leaf: Array, rows: Array, spare: Array) -> Array:
            return pull_rows(leaf, rows, spare[0], axis, state)

        return self._devices.local(pull, (axis, 0, 0), axis, leaf, route.rows, route.spare)

    def fetch(self, rows: Array, route: Route, axis: int) -> Array:
        def fetch(rows: Array, back: Array, slot: Array) -> Array:
            sent = jnp.moveaxis(rows, axis, 0).at[back].get(mode="clip")
            return jnp.moveaxis(self._exchange(sent).at[slot].get(mode="clip"), 0, axis)

        return self._devices.local(fetch, (axis, 0, 0), axis, rows, route.back, route.slot)

    def lookup(self, params: Mapping[str, Any], fetched: Array, route: Route, index: Array) -> Array:
        def lookup(fetched: Array, asked: Array, index: Array) -> Array:
            return gather_rows(params, fetched, self._local(params, asked, index))

        given = (params["axis"], 0, params["batch"])
        return self._devices.local(lookup, given, params["spread"], fetched, route.asked, index)

    def lookup_ids(self, fetched: Array, route: Route, ids: Array, axis: int) -> Array:
        def lookup(fetched: Array, asked: Array, ids: Array) -> Array:
            return fetched.at[along(axis, find(asked, self._places(ids), self._layout.stored))].get(mode="clip")

        return self._devices.local(lookup, (axis, 0, None), None, fetched, route.asked, ids)

    def aggregate(
        self, primitive: Any, params: Mapping[str, Any], base: Array, route: Route, index: Array, updates: Array
    ) -> Array:
        def add(base: Array, asked: Array, index: Array, updates: Array) -> Array:
            return scatter_rows(primitive, params, base, self._local(params, asked, index), updates)

        axis = params["axis"]
        given = (axis, 0, params["batch"], params["spread"])
        return self._devices.local(add, given, axis, base, route.asked, index, updates)

    def deliver(self, sums: Array, route: Route, axis: int, base: Array | None) -> Array:
        owned = route.rows.shape[0] // self._devices.parts

        def exchange(sums: Array, slot: Array, back: Array, *base: Array) -> Array:
            sums = jnp.moveaxis(sums, axis, 0)
            sent = jnp.zeros((back.shape[0], *sums.shape[1:]), sums.dtype).at[slot].set(sums, mode="drop")
            start = jnp.moveaxis(base[0], axis, 0) if base else jnp.zeros((owned, *sums.shape[1:]), sums.dtype)
            return jnp.moveaxis(start.at[back].add(self._exchange(sent), mode="drop"), 0, axis)

        more = () if base is None else (base,)
        given = (axis, 0, 0, *(axis for _ in more))
        return self._devices.local(exchange, given, axis, sums, route.slot, route.back, *more)

    def push(
        self, primitive: Any, params: Mapping[str, Any], base: Array, route: Route, index: Array, updates: Array
    ) -> Array:
        assert params["batch"] is None or params["op"] != "scatter-add", "what each device has by itself is aggregated"
        own = self._push_own(primitive, params)
        return self._devices.local(
            own, (params["axis"], 0, None, None), params["axis"], base, route.rows, index, updates
        )

    def _push_own(self, primitive: Any, params: Mapping[str, Any]) -> Callable[..., Array]:
        """Updates that every device has: each owner takes those of its rows."""
        axis = params["axis"]

        def push(base: Array, rows: Array, index: Array, updates: Array) -> Array:
            local = self._local(params, self._owned(rows), index, own=True)
            if not params["clip"]:
                return scatter_rows(primitive, params, base, local, updates)
            # What belongs to other owners goes to one more row, for here nothing is dropped.
            more = [(0, int(d == axis)) for d in range(base.ndim)]
            wider = scatter_rows(primitive, params, jnp.pad(base, more), local, updates)
            return jax.lax.slice_in_dim(wider, 0, base.shape[axis], axis=axis)

        return push

    def _owned(self, rows: Array) -> Array:
        """The places of an owner's rows, in `shard_map`."""
        return jnp.where(rows < self._share, rows + self._first(), self._layout.stored)

    def push_ids(self, base: Array, route: Route, ids: Array, updates: Array, axis: int) -> Array:
        def push(base: Array, rows: Array, ids: Array, updates: Array) -> Array:
            return set_at(base, axis, find_own(self._owned(rows), self._places(ids)), updates)

        return self._devices.local(push, (axis, 0, None, None), axis, base, route.rows, ids, updates)

    def row_numbers(self, route: Route, extent: int) -> Array:
        def numbers(rows: Array, spare: Array) -> Array:
            places = self._first() + jnp.where(rows < self._share, rows, spare[0])
            return jnp.minimum(self._layout.row(places), extent - 1).astype(jnp.int32)

        return self._devices.local(numbers, (0, 0), 0, route.rows, route.spare)

    def reduce_rows(self, params: Mapping[str, Any], rows: Array, route: Route, others: Others | None = None) -> Array:
        def across(part: Array) -> Array:
            return reduce_across(params["op"], part, self._devices.axis)

        return self._reduce(params, rows, route, others, _needed(others), across)

    def reduce_part(
        self, params: Mapping[str, Any], rows: Array, route: Route, others: Others | None, alone: Array | None
    ) -> Array:
        assert self._devices.parts == 1, "an owner's part is the owner's"
        only = _needed(others) if alone is None else (alone,)
        return self._reduce(params, rows, route, others, only, lambda part: part)

    def _reduce(
        self,
        params: Mapping[str, Any],
        rows: Array,
        route: Route,
        others: Others | None,
        alone: Sequence[Array],
        across: Callable[[Array], Array],
    ) -> Array:
        """A reduction over an owner's rows, those of `others` included; `across` makes it that over all owners'."""
        axis = params["axis"]

        def routed(rows: Array, numbers: Array, *alone: Array) -> Array:
            mine = self._layout.rows_on(self._devices.position())
            return across(reduce_routed(params, rows, numbers < self._share, mine, *alone))

        part = self._devices.local(routed, (axis, 0, *(None for _ in alone)), None, rows, route.rows, *alone)
        if others is None:
            return part
        size = others.block // self._devices.count

        def untouched(rows: Array, some: Array, touched: Array) -> Array:
            mine = self._layout.rows_on(self._devices.position())
            which = (some < mine) & (find_own(touched, some) == touched.shape[0])
            return across(reduce_some(params, rows, which))

        def reduced(k: Array) -> Array:
            some = k * size + self._numbers(size)
            rows = others.rows(self._some(jnp.minimum(some, self._share), size))
            return self._devices.local(untouched, (axis, 0, 0), None, rows, some, route.rows)

        return join_blocks(params["op"], part, others, -(-self._share // size), reduced)

    def _numbers(self, size: int) -> Array:
        """0 to `size` on each device."""
        return self._devices.constrain(jnp.arange(self._devices.parts * size, dtype=jnp.int32) % size, 0)

    def _some(self, numbers: Array, size: int) -> Route:
        """A route to some of each owner's rows, whether the step touches them or not."""
        nothing = jnp.zeros((0,), jnp.int32)
        spare = jnp.minimum(numbers[size - 1 :: size], self._share - 1)
        return Route(numbers, spare, nothing, nothing, nothing, nothing)

    def padding(self, rows: Array, axis: int) -> Array:
        return self._devices.local(lambda rows: rows[along(axis, slice(-1, None))], (axis,), axis, rows)

    def commit(self, leaf: Array, rows: Array, route: Route, axis: int, guard: Array | None = None) -> Array:
        def commit(leaf: Array, rows: Array, numbers: Array) -> Array:
            return set_rows(leaf, rows, numbers, axis)

        numbers = route.rows if guard is None else jnp.where(guard, self._share, route.rows)
        return self._devices.local(commit, (axis, axis, 0), axis, leaf, rows, numbers)

    def exceeded(self, route: Route) -> Array:
        return jnp.any(route.exceeded)

    def densify(self, rows: Array, route: Route, axis: int, extent: int) -> Array:
        def densify(rows: Array, numbers: Array) -> Array:
            return spread_last_row(rows, numbers, axis, self._share)

        return self._devices.local(densify, (axis, 0), axis, rows, route.rows)

    def fill(self, leaf: Array, rows: Array, axis: int) -> Array:
        def fill(leaf: Array, rows: Array) -> Array:
            return jnp.broadcast_to(rows[along(axis, slice(-1, None))], leaf.shape)

        return self._devices.local(fill, (axis, axis), axis, leaf, rows)

    def sweep(
        self,
        update: Callable[[Route, Sequence[Array]], Sequence[Array]],
        leaves: Sequence[Array],
        needed: Array,
        params: Mapping[str, Any],
    ) -> Sequence[Array]:
        size = params["rows"] // self._devices.count
        numbers = self._numbers(size)

        def block(k: Array, leaves: Sequence[Array]) -> Sequence[Array]:
            route = self._some(jnp.minimum(k * size + numbers, self._share), size)
            new = zip(leaves, update(route, leaves), params["axes"], strict=True)
            return tuple(self.commit(leaf, value, route, axis) for leaf, value, axis in new)

        blocks = jnp.where(needed, -(-self._share // size), 0)
        return jax.lax.fori_loop(0, blocks, block, tuple(leaves))


def _needed(others: Others | None) -> Sequence[Array]:
    """Whether the routed rows are reduced alone; nothing if that is never so."""
    return () if others is None else (others.needed,)
