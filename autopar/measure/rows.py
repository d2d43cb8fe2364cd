"""Times what devices do with the rows of tables: route ids, look rows up, add to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from autopar.backends.devices import Devices
from autopar.backends.indices import find, sorted_unique
from autopar.measure.figures import ROWS
from autopar.measure.loops import loop_seconds

Array = Any
#: The table that is gathered from, in bytes on one device: larger than a cache.
_TABLE = 1 << 24


@dataclass(frozen=True, slots=True)
class RowLoops:
    """The loops that are timed, on these devices."""

    devices: Devices

    def route_s(self, ids: int) -> float:
        """Seconds in which a device makes so many ids unique, and finds each among the unique ones."""
        return loop_seconds(self.devices, _route, self._ids(ids, 1 << 20))

    def gather_s(self, width: int) -> float:
        """Seconds in which it looks up `ROWS` rows of so many bytes."""
        rows = _TABLE // width
        table = jnp.ones((self.devices.count * rows, width // 4), jnp.float32)
        return loop_seconds(self.devices, _gather, self._ids(ROWS, rows), table)

    def scatter_s(self, width: int) -> float:
        """Seconds in which it adds to as many."""
        values = jnp.ones((self.devices.count * ROWS, width // 4), jnp.float32)
        return loop_seconds(self.devices, _scatter, values, self._ids(ROWS, ROWS))

    def _ids(self, each: int, extent: int) -> Array:
        return jnp.asarray(np.random.default_rng(0).integers(0, extent, self.devices.count * each), jnp.int32)


def _route(ids: Array) -> Array:
    mixed = (ids * 1103515245 + 12345) & 0xFFFFF
    rows = sorted_unique(mixed, mixed.shape[0], 1 << 30)
    return find(rows, mixed, 1 << 30) * 31 + mixed


def _gather(index: Array, table: Array) -> Array:
    rows = table.at[index].get(mode="clip")
    return (index + rows.sum(1).astype(jnp.int32)) % table.shape[0]


def _scatter(values: Array, index: Array) -> Array:
    return jnp.zeros_like(values).at[index].add(values) * 0.5
