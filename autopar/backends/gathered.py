"""Row space on several devices that all hold the table; gradients travel by AllGather (`allgather`).

Each device sums its own gradients row by row, sends the rows that it has touched to all others, and adds what it gets
to the routed rows. Source: Parallax, section 3.2 (Horovod's way with sparse gradients), here with local aggregation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from autopar.backends.devices import Devices
from autopar.backends.indices import find, flat_ids, local_index, scatter_rows, sorted_unique
from autopar.backends.single import Route, SingleDevice

Array = Any


class GatheredRows(SingleDevice):
    """Implements `protocol.RowBackend`: as on one device, but for the push of what each device has."""

    def __init__(self, devices: Devices) -> None:
        self._devices = devices

    def push(
        self, primitive: Any, params: Mapping[str, Any], base: Array, route: Route, index: Array, updates: Array
    ) -> Array:
        batch = params["batch"]
        if batch is None or params["op"] != "scatter-add":  # the order of the others matters
            return super().push(primitive, params, base, route, index, updates)
        axis, extent, devices = params["axis"], params["extent"], self._devices

        def exchange(base: Array, routed: Array, index: Array, updates: Array) -> Array:
            ids = flat_ids({**params, "count": 1}, index)
            mine = sorted_unique(ids, min(extent, ids.shape[0]), extent)
            shape = (*base.shape[:axis], mine.shape[0], *base.shape[axis + 1 :])
            zeros = jnp.zeros(shape, base.dtype)
            sums = scatter_rows(primitive, params, zeros, local_index(params, mine, index), updates)
            theirs = jax.lax.all_gather(mine, devices.axis, tiled=True)
            rows = jax.lax.all_gather(jnp.moveaxis(sums, axis, 0), devices.axis, tiled=True)
            total = jnp.moveaxis(base, axis, 0).at[find(routed, theirs, extent)].add(rows, mode="drop")
            return jnp.moveaxis(total, 0, axis)

        given = (None, None, batch, params["spread"])
        return devices.local(exchange, given, None, base, route.rows, index, updates)
