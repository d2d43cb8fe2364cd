"""Row space on several devices that all hold the table; gradients travel by AllGather (`allgather`).

Each device sums its own gradients by row, sends the rows that it has touched to all others, and adds what it receives
to the routed rows. Source: Parallax, section 3.2 (Horovod's way with sparse gradients), here with local aggregation.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from autopar.backends import single
from autopar.backends.devices import OwnPart
from autopar.backends.indices import as_bits, find, local_index, scatter_rows, sorted_unique, untouched
from autopar.backends.single import SingleDevice
from autopar.jax_types import Array, Params


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Route(single.Route):
    """The rows that a step touches, known to all devices."""

    requested: Array  #: int32[F], the sorted rows that the device touches itself; V for padding.
    back: Array  #: int32[N F], where these are among `rows`; U for none.


class GatheredRows(SingleDevice):
    """The backend of one device, except for gradients of what each device has by itself."""

    def __init__(self, devices: OwnPart) -> None:
        self._devices = devices

    def route(self, params: Params, *ids: Array) -> single.Route:
        if params["requested"] is None:  # nothing is spread
            return super().route(params, *ids)
        count, extent = self._devices.count, params["extent"]
        requested = sorted_unique(jnp.concatenate(ids).astype(jnp.int32), params["requested"] // count, extent)
        theirs = jax.lax.all_gather(requested, self._devices.axis, tiled=True)
        rows = sorted_unique(theirs, params["rows"], extent)
        return Route(rows, untouched(rows), requested, find(rows, theirs, extent))

    def aggregate(self, params: Params, base: Array, route: single.Route, index: Array, updates: Array) -> Array:
        assert isinstance(route, Route), "gradients of this device alone are aggregated"
        return scatter_rows(params, base, local_index(params, route.requested, index), updates)

    def deliver(self, params: Params, sums: Array, route: single.Route, base: Array | None = None) -> Array:
        assert isinstance(route, Route), "gradients of this device alone are delivered"
        axis, touched = params["axis"], route.rows.shape[0]
        gather = functools.partial(jax.lax.all_gather, axis_name=self._devices.axis, tiled=True)
        rows = as_bits(gather, jnp.moveaxis(sums, axis, 0))
        start = jnp.zeros((touched, *rows.shape[1:]), rows.dtype) if base is None else jnp.moveaxis(base, axis, 0)
        return jnp.moveaxis(start.at[route.back].add(rows, mode="drop"), 0, axis)


class ReplicatedRows(SingleDevice):
    """Row space that every device has whole, in the program of one device (`allreduce_rows`).

    Every device scatters its gradients into zeros of the routed rows, which are then reduced like any other value.
    """

    def __init__(self, devices: OwnPart) -> None:
        self._devices = devices

    def route(self, params: Params, *ids: Array) -> single.Route:
        batched = params["batched"] or [False] * len(ids)
        pairs = zip(ids, batched, strict=True)
        return super().route(params, *(self._devices.gathered(i, 0) if b else i for i, b in pairs))
