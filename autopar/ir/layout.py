"""Lays out a table's rows where a plain array can't be spread equally: padded, and distributed cyclically.

A stored table has N shards of ceil(V/N) rows, shard k on device k. Rows are either distributed like cards (`cyclic`:
row r is on device r mod N), because frequent words have neighbouring ids and would all have one owner, or stay in
order. Spare rows at the ends of the shards are copies of the last row, and never read. Or all rows are on one device
(`owner`), and the others have a spare one each: their shards are that much shorter than storage indices say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.jax_types import Array


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The order in which `extent` rows (V) are stored in the shards of `devices` (N) devices.

    A row's storage index is its owner's index times `shard_rows`, plus the row's index in that shard.
    """

    extent: int
    devices: int
    cyclic: bool
    owner: int | None = None  #: The device that has all rows; None: they are spread over all devices.

    @property
    def shard_rows(self) -> int:
        """Rows of each device, spare ones included."""
        return -(-self.extent // self.devices) if self.owner is None else self.extent

    def held_on(self, device: int) -> int:
        """Returns the number of rows of a device's shard in memory, spare ones included."""
        return self.shard_rows if self.owner in (None, device) else 1

    @property
    def spread(self) -> RowLayout:
        """The layout of the same rows over all devices."""
        return self if self.owner is None else replace(self, owner=None)

    @property
    def stored(self) -> int:
        """Rows of all devices, spare ones included."""
        return self.shard_rows * self.devices

    @property
    def is_plain(self) -> bool:
        """The stored table equals the table."""
        return self.stored == self.extent and (not self.cyclic or self.devices == 1)

    def storage_index(self, row: Array) -> Array:
        if self.owner is not None:
            return row + self.owner * self.extent
        return row % self.devices * self.shard_rows + row // self.devices if self.cyclic else row

    def row(self, index: Array) -> Array:
        """Returns the row with a storage index; `extent` or more for a spare one."""
        if self.owner is not None:
            row = index - self.owner * self.extent
            return row + (row < 0) * self.stored
        return index % self.shard_rows * self.devices + index // self.shard_rows if self.cyclic else index

    def rows_on(self, device: Array) -> Array:
        """Returns the number of rows of a device's shard that aren't spare; `device` is an array of integers."""
        if self.owner is not None:
            return (device == self.owner) * self.extent
        if self.cyclic:
            return (self.extent - device + self.devices - 1) // self.devices
        return (self.extent - device * self.shard_rows).clip(0, self.shard_rows)


def even_axis(shape: Sequence[int], axis: int, count: int) -> int | None:
    """Returns the axis along which an array is spread: its rows if possible, else the first that `count` divides."""
    order = (axis, *(d for d in range(len(shape)) if d != axis)) if shape else ()
    return next((d for d in order if shape[d] and shape[d] % count == 0), None)
