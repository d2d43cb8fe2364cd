"""How compiled programs see the rows of tables on hosts: their own rank's, with routes that the runtime made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.backends.devices import Devices, OwnPart
from autopar.backends.protocol import Params, RowBackend
from autopar.backends.sharded import ShardedRows
from autopar.ir.bound_plan import BoundPlan

Array = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RouteView:
    """What a compiled program is given of a route.

    Attributes:
      rows: int32[U], the owner's rows in its shard; the shard's size for padding.
      spare: int32[1], a row of the share that the step doesn't touch.
      requested: int32[F], sorted places of the rows that this rank asked for; one past the last for padding.
    """

    rows: Array
    spare: Array
    requested: Array


@dataclass(frozen=True)
class RankView(OwnPart):
    """One rank among `ranks`, in a program of its own: nothing is exchanged within."""

    rank: int = 0
    ranks: int = 1

    @property
    def count(self) -> int:
        return self.ranks

    @property
    def examples(self) -> tuple[str, ...]:
        return self.mesh.axis_names

    def position(self) -> Array:
        return jnp.int32(self.rank)

    def reduce(self, value: Array, op: str) -> Array:
        assert self.ranks == 1, "values are reduced between programs"
        return value

    def gathered(self, value: Array, along: int) -> Array:
        raise AssertionError("what is gathered from other ranks comes from outside")


class AllRanks(Devices):
    """The devices of all ranks, in a program of all: rows are spread over the ranks, examples over the devices."""

    @property
    def examples(self) -> tuple[str, ...]:
        return self.mesh.axis_names


class RankRows(ShardedRows):
    """The rows of one rank of `ranks`; what a single rank exchanges with itself it has."""

    def fetch(self, params: Params, rows: Array, route: Any) -> Array:
        assert self._devices.count == 1, "rows are fetched between programs"
        return _resized(rows, route.requested.shape[0], params["axis"])

    def deliver(self, params: Params, sums: Array, route: Any, base: Array | None = None) -> Array:
        assert self._devices.count == 1, "sums are delivered between programs"
        delivered = _resized(sums, route.rows.shape[0], params["axis"])
        return delivered if base is None else base + delivered


def _resized(rows: Array, count: int, axis: int) -> Array:
    """The first rows, or zeros after them: either size may be the larger one, and the rows that there are fit both."""
    widths = [(0, 0, 0)] * rows.ndim
    widths[axis] = (0, count - rows.shape[axis], 0)
    return jax.lax.pad(rows, jnp.zeros((), rows.dtype), widths)


def host_backends(bound: BoundPlan, view: Devices) -> Mapping[int, RowBackend]:
    """Family on hosts -> its operations within a program."""
    return {f.family: RankRows(view, f.layout, 0) for f in bound.families if f.on_hosts and f.layout is not None}


def padded(values: np.ndarray, size: int, fill: int) -> np.ndarray:
    """int32[size]."""
    filled = np.full((size,), fill, np.int32)
    filled[: values.size] = values
    return filled
