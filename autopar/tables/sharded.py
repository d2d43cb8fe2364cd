"""`Table`: a leaf of the state whose rows are spread over devices, where an ordinary array can't be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.analysis.rules import resized
from autopar.backends.across import is_global, place_array
from autopar.backends.devices import Devices
from autopar.backends.layouts import on_host, ordinary
from autopar.errors import donated
from autopar.ir.layout import RowLayout
from autopar.jax_types import Dtype, Index, Leaf
from autopar.tables.leaf import Described, Home, PlacedLeaf, Shards, Source, copied


@dataclass(frozen=True)
class RowsHome(Home):
    """Rows spread over devices, in a layout."""

    layout: RowLayout
    axis: int
    sharding: Any

    def made(self, source: Source, leaf: Described) -> Table:
        layout, axis = self.layout, self.axis

        def shard(index: Index) -> np.ndarray:
            indices = np.arange(layout.stored)[index[axis]]
            rows = source.rows(np.minimum(layout.row(indices), layout.extent - 1), axis)
            return np.moveaxis(rows, 0, axis)

        stored = jax.make_array_from_callback(resized(leaf.shape, axis, layout.stored), self.sharding, shard)
        return Table(stored, layout, axis)


@dataclass(frozen=True, eq=False, repr=False)
class Table(PlacedLeaf):
    """Rows that are spread over devices, padded or in an order of their own.

    A leaf of the state like an array: `jax.tree` maps over it, and a step made by `parallelize` takes and returns it.
    Reading it (`np.asarray`, functions of JAX, indexing) gives the true rows. `autopar.materialize(state)` makes
    ordinary arrays.

    Where its devices are of several processes, all of them have to read it together, and each gets what is read.

    Attributes:
      stored: The rows as they are stored, [..., N ceil(V/N), ...].
      layout: Which row is stored where.
      axis: The row axis.
    """

    stored: jax.Array
    layout: RowLayout
    axis: int

    @property
    def shape(self) -> tuple[int, ...]:
        return resized(self.stored.shape, self.axis, self.layout.extent)

    @property
    def dtype(self) -> Dtype:
        return self.stored.dtype

    @property
    def stored_as(self) -> tuple[RowLayout, int]:
        return self.layout, self.axis

    @property
    def home(self) -> RowsHome:
        return RowsHome(self.layout, self.axis, self.stored.sharding)

    @property
    def shards(self) -> Shards:
        return shards_of(self.stored, self.layout, self.axis)

    @property
    def is_whole_here(self) -> bool:
        return not is_global(self.stored)

    def duplicate(self) -> Table:
        return Table(copied(self._live()), self.layout, self.axis)

    def is_deleted(self) -> bool:
        return self.stored.is_deleted()

    def _live(self) -> jax.Array:
        if self.is_deleted():
            raise donated(f"this table, {self.dtype}{list(self.shape)},")
        return self.stored

    def block_until_ready(self) -> Table:
        """Waits for the step that returned it."""
        self.stored.block_until_ready()
        return self

    def materialize(self) -> jax.Array:
        """Returns the table as an ordinary array, [..., V, ...], on the same devices.

        It is spread along its rows if their number allows, else along the first axis that does; if none does, every
        device has all of it.
        """
        return ordinary(self._live(), self.layout, self.axis, Devices.of_array(self.stored, self.axis))

    def _on_host(self) -> np.ndarray:
        return on_host(self._live(), self.layout, self.axis)

    def __getitem__(self, index: Index) -> jax.Array:
        """Indexes it as an array. Rows picked by numbers, or by a short slice, are read by themselves.

        Raises:
          IndexError: a number (not one of an array) that is no row.
          DonatedStateError: the table was given to a step.
        """
        self._live()
        rows, *others = index if isinstance(index, tuple) else (index,)
        simple = all(x is None or x is ... or isinstance(x, (int, slice)) for x in others)
        indices = self._indices(rows, simple)
        if indices is None:
            return self._readable(self.materialize()[index])
        if isinstance(indices, int) and simple:  # XLA gathers rows where they are, but slices a table that it brought
            return self._readable(self.stored[(np.array([indices]), *others)])[0]
        return self._readable(self.stored[(indices, *others)])

    def _readable(self, read: jax.Array) -> jax.Array:
        if not is_global(read) or read.is_fully_replicated:
            return read
        return place_array(read, Devices.of_array(self.stored, self.axis).sharding(None))

    def _indices(self, rows: Leaf, simple: bool) -> Leaf:
        """Returns where picked rows are stored; None if they are to be picked from the whole table."""
        extent = self.layout.extent
        if self.axis or isinstance(rows, (bool, np.bool_)):
            return None
        if isinstance(rows, (int, np.integer)):
            if not -extent <= rows < extent:
                raise IndexError(f"row {rows} of a table with {extent} rows")
            return self.layout.storage_index(int(rows) % extent)
        if isinstance(rows, slice) and simple:
            rows = np.arange(*rows.indices(extent))
            if rows.size > self.layout.shard_rows:
                return None
        if not isinstance(rows, (np.ndarray, jax.Array)) or not jnp.issubdtype(rows.dtype, np.integer):
            return None
        xp = jnp if isinstance(rows, jax.Array) else np
        rows = rows.astype(np.int32)  # V may be more than a small integer holds
        return self.layout.storage_index(xp.clip(xp.where(rows < 0, rows + extent, rows), 0, extent - 1))

    @property
    def _where(self) -> str:
        return f" spread over {self.layout.devices} devices"


def shards_of(stored: jax.Array, layout: RowLayout, axis: int) -> Shards:
    """Returns the parts of an array that is spread over devices along one axis; the first replica of each is saved."""

    def own() -> Iterator[tuple[int, np.ndarray]]:
        for shard in stored.addressable_shards:
            if shard.replica_id == 0:
                first = shard.index[axis].start or 0
                rows = np.moveaxis(np.asarray(shard.data), axis, 0)
                for start in range(0, rows.shape[0], layout.shard_rows):  # a device may hold several shards
                    yield (first + start) // layout.shard_rows, rows[start : start + layout.shard_rows]

    return Shards(layout, axis, own)
