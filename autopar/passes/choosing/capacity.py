"""Bounds sharded rows statically, by a limit that no batch exceeds or by a measured batch.

A device may want all of its F rows from one owner, so the safe capacity of each of its N messages is F: N times the
average need. A measured capacity needs a check and a fallback (`backends.on_devices`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autopar.ir.layout import RowLayout
from autopar.ir.program_plan import Bounds
from autopar.ir.rowspace import RowIds, RowSpace

#: Contiguous shards are kept if the busiest message is at most this many times as long as with cyclic rows.
_IMBALANCE = 1.25
#: Capacities are multiples of this.
_STEP = 8


def device_bounds(space: RowSpace, ids: RowIds, method: str, devices: int, owner: int | None = None) -> Bounds:
    """Returns bounds that no batch exceeds: rows touched, and sharded rows requested and owned. `owner`: of
    `Bounds`."""
    requested = max(1, min(space.extent, ids.count_on(devices)))
    if method != "ps" or devices == 1:
        travels = devices > 1 and method == "allgather" and any(ids.batched)
        return Bounds(min(space.extent, ids.count) + 1, devices * requested if travels else None)
    layout = RowLayout(space.extent, devices, cyclic=space.extent % devices != 0)
    bounds = Bounds(0, devices * requested, 0, layout, owner=owner)
    return _with_capacity(bounds, min(requested, asked_layout(bounds).shard_rows), tight=False)


def host_bounds(space: RowSpace, ids: RowIds, ranks: int, owner: int | None = None) -> Bounds:
    """Returns the bounds of a family on hosts, without a capacity since messages are only as long as they must be.

    `owner`: the rank that has all rows, if it is one.
    """
    requested = max(1, min(space.extent, ids.count_on(ranks)))
    layout = RowLayout(space.extent, ranks, cyclic=ranks > 1, owner=owner)
    owned = min(layout.shard_rows, ranks * requested) + 1
    return Bounds(ranks * owned, ranks * requested, layout=layout)


def bounds_layout(bounds: Bounds) -> RowLayout:
    assert bounds.layout is not None, "sharded rows have a layout"
    return bounds.layout


def asked_layout(bounds: Bounds) -> RowLayout:
    """Returns the layout by which devices ask owners for rows."""
    layout = bounds_layout(bounds)
    return layout if bounds.owner is None else replace(layout, cyclic=True, owner=bounds.owner)


def _with_capacity(bounds: Bounds, capacity: int, *, tight: bool) -> Bounds:
    layout = bounds_layout(bounds)
    owned = min(layout.shard_rows, layout.devices * capacity) + 1
    return replace(bounds, rows=layout.devices * owned, capacity=capacity, tight=tight)


def device_ids(
    flat: Sequence[np.ndarray], batched: Sequence[bool], devices: int, extent: int, *, distinct: bool = True
) -> list[np.ndarray]:
    """Returns the distinct rows that each of N devices asks for in an example batch, or all that it looks up. `flat`:
    flat ids, V (`extent`) for no row. `batched`: which of them are spread over the devices; every device has the
    others."""
    ids_of_devices = []
    for k in range(devices):
        parts = [np.split(ids, devices)[k] if b else ids for ids, b in zip(flat, batched, strict=True)]
        looked_up = np.concatenate(parts) if parts else np.zeros((0,), np.int32)
        looked_up = np.unique(looked_up) if distinct else looked_up
        ids_of_devices.append(looked_up[looked_up < extent])
    return ids_of_devices


def longest_message(requested: Sequence[np.ndarray], layout: RowLayout) -> int:
    """Returns the most rows that a device asks one owner for."""
    loads = [
        np.bincount(layout.storage_index(rows) // layout.shard_rows, minlength=1).max()
        for rows in requested
        if rows.size
    ]
    return int(max(loads, default=0))


def needed_share(capacity: int, load: int) -> float:
    """Returns a load as a fraction of a measured capacity before that was rounded."""
    return load / (capacity - _STEP / 2)


def owner_loads(requested: Sequence[np.ndarray], layout: RowLayout) -> np.ndarray:
    """Returns the rows that all devices together ask each owner for."""
    return np.bincount(layout.storage_index(np.concatenate(requested)) // layout.shard_rows, minlength=layout.devices)


def imbalance(requested: Sequence[np.ndarray], layout: RowLayout) -> float:
    """Returns rows in the longest message over those in the average one; 1 if there are none."""
    average = sum(rows.size for rows in requested) / layout.devices**2
    return longest_message(requested, layout) / average if average else 1.0


def with_layout(bounds: Bounds, requested: Sequence[np.ndarray]) -> Bounds:
    """Returns the bounds with cyclic rows, if the owners' loads would be too unequal otherwise."""
    layout = bounds_layout(bounds)
    cyclic = replace(layout, cyclic=True)
    if layout.cyclic or longest_message(requested, layout) <= _IMBALANCE * max(
        longest_message(requested, cyclic), _STEP
    ):
        return bounds
    return replace(bounds, layout=cyclic)


def tightened(bounds: Bounds, requested: Sequence[np.ndarray], headroom: float) -> Bounds:
    """Returns the bounds with the example's load and some headroom as the capacity, if that saves anything."""
    return limited(bounds, headroom * longest_message(requested, asked_layout(bounds)))


def with_safe_capacity(bounds: Bounds) -> Bounds:
    """Returns bounds on hosts with the capacity that no batch would exceed on devices."""
    layout = bounds_layout(bounds)
    return replace(bounds, capacity=min((bounds.requested or 0) // layout.devices, layout.shard_rows))


def limited(bounds: Bounds, rows: float) -> Bounds:
    """Returns the bounds with `rows` as the capacity, rounded up, if that is less than the safe one."""
    safe = bounds.capacity
    assert safe is not None, "only sharded rows have a capacity"
    capacity = rounded(rows)
    return _with_capacity(bounds, capacity, tight=True) if capacity < safe else bounds


def rounded(rows: float) -> int:
    """Rounds up to a capacity."""
    return -(-int(np.ceil(max(1.0, rows))) // _STEP) * _STEP


def joined(
    members: Sequence[Bounds], owners: Sequence[int | None], space: RowSpace, ids: RowIds, devices: int
) -> Bounds:
    """Returns the bounds of a table on devices that has the rows of several: what these are asked for together.
    `owners`: the device that has all rows of each, if it is one."""
    if members[0].layout is None:
        return device_bounds(space, ids, "ps", devices)
    layout = RowLayout(space.extent, devices, cyclic=True)
    each = [b.bag_ids for b in members if b.bag_ids is not None]
    # Without limits, rows of some travel.
    bag_ids = of_busiest(each, owners, devices) if len(each) == len(members) else None
    bounds = Bounds(0, sum(b.requested or 0 for b in members), 0, layout, bag_ids=bag_ids)
    capacity = of_busiest([b.capacity or 0 for b in members], owners, devices)
    return _with_capacity(bounds, capacity, tight=any(b.tight for b in members))


def of_busiest(counts: Sequence[int], owners: Sequence[int | None], devices: int) -> int:
    """Returns the sum of what tables ask a device for, of the one that is asked for most. `counts`: of each table, of
    the device that has all of it, or of any."""
    pairs = [*zip(counts, owners, strict=True)]
    return max(sum(count for count, owner in pairs if owner in (None, device)) for device in range(devices))
