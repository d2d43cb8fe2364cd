"""`TablePart`: a leaf of the state whose rows a step keeps behind those of other tables (`passes.stack_tables`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar import jax_compat
from autopar.backends.across import jit_on
from autopar.backends.devices import Devices
from autopar.errors import donated
from autopar.ir.layout import RowLayout
from autopar.ir.stacked import StackIndex
from autopar.jax_types import Array, Index, Leaf
from autopar.tables.deferred import DeferredTable
from autopar.tables.leaf import ArrayHome, Home, Shards, StandingLeaf, TableLeaf, current
from autopar.tables.sharded import RowsHome, Table, shards_of


class TablePart(StandingLeaf[Leaf]):
    """Rows of one table among those of several, which a step exchanges and updates as one.

    A leaf of the state like an array: `jax.tree` maps over it, and a step made by `parallelize` takes and returns it.
    Reading it (`np.asarray`, functions of JAX, indexing) gives the true rows. `autopar.materialize(state)` makes
    ordinary arrays.

    Attributes:
      pending: The rows of all tables: an array, a `Table`, or a `DeferredTable` of it.
      where: Its index among them.
    """

    def __init__(self, stack: Leaf, where: StackIndex, aval: Leaf) -> None:
        """Takes the rows of all tables, its own index, and what has its shape and dtype."""
        super().__init__(stack, where.table, aval)
        self.where = where

    @property
    def is_whole_here(self) -> bool:
        return self.pending.is_whole_here if isinstance(self.pending, TableLeaf) else True

    def is_deleted(self) -> bool:
        return self.pending.is_deleted()

    def block_until_ready(self) -> TablePart:
        """Waits for the step that returned it."""
        self.pending.block_until_ready()
        return self

    @jax_compat.outside_traces()
    def current(self) -> jax.Array | Table:
        """Returns a copy of its rows, up to date: an array, or, of rows that are spread over devices, a `Table`."""
        layout, start = self.where.shape.layout_of(self.index), self.where.shape.starts[self.index]
        rows = self._rows()
        stored, devices = stored_rows(rows), Devices.of_array(rows.stored, 0) if isinstance(rows, Table) else None
        part = _cut(layout.shard_rows, devices)(stored, np.int32(start // layout.devices))
        return part if devices is None else Table(part, layout, 0)

    @property
    def home(self) -> Home:
        """The home of its rows by themselves, out of the stack."""
        stack = self.pending.lagging() if isinstance(self.pending, DeferredTable) else self.pending
        if isinstance(stack, Table):
            return RowsHome(self.where.shape.layout_of(self.index), 0, stack.stored.sharding)
        return ArrayHome(stack.sharding if stack.committed else None)

    @property
    def shards(self) -> Shards:
        """The shards that it is saved in; they aren't copied out of the stack."""
        layout, first = self.where.shape.layout_of(self.index), self.where.shape.starts[self.index]
        whole = shards_of(stored_rows(self._rows()), self.where.shape.layout, 0)
        first //= layout.devices

        def own() -> Iterator[tuple[int, np.ndarray]]:
            return ((number, rows[first : first + layout.shard_rows]) for number, rows in whole.own())

        return Shards(layout, 0, own)

    def _rows(self) -> jax.Array | Table:
        """Returns the rows of all tables, up to date."""
        if self.is_deleted():
            raise donated(f"this table, {self.dtype}{list(self.shape)},")
        return current(self.pending)

    def __getitem__(self, index: Index) -> Leaf:
        """Indexes it as an array. Rows picked by numbers are read by themselves.

        Raises:
          IndexError: a number (not one of an array) that is no row.
          DonatedStateError: the table was given to a step.
        """
        rows, *others = index if isinstance(index, tuple) else (index,)
        extent, start = self.shape[0], self.where.shape.starts[self.index]
        if isinstance(rows, (int, np.integer)) and not isinstance(rows, bool):
            if not -extent <= rows < extent:
                raise IndexError(f"row {rows} of a table with {extent} rows")
            return self._rows()[(start + int(rows) % extent, *others)]
        if not isinstance(rows, (np.ndarray, jax.Array)) or not jnp.issubdtype(rows.dtype, np.integer):
            return super().__getitem__(index)
        xp = jnp if isinstance(rows, jax.Array) else np
        rows = rows.astype(np.int32)  # as many as the stack has may be more than a small integer holds
        return self._rows()[(start + xp.clip(xp.where(rows < 0, rows + extent, rows), 0, extent - 1), *others)]

    @property
    def stored_as(self) -> tuple[RowLayout, int] | None:
        return (self.where.shape.layout_of(self.index), 0) if self.where.shape.devices > 1 else None

    @property
    def _where(self) -> str:
        spread = f" spread over {self.where.shape.devices} devices" if self.where.shape.devices > 1 else ""
        return f"{spread}, one of {len(self.where.shape.extents)} tables that are kept together"


def stored_rows(rows: jax.Array | Table) -> jax.Array:
    """Returns the array in which rows are."""
    return rows.stored if isinstance(rows, Table) else rows


@functools.cache
def _cut(rows: int, devices: Devices | None) -> Callable[[Array, Any], jax.Array]:
    """Compiles a program that copies `rows` rows, from a number on, of an array, or of each device's part of it."""

    def run(stored: Array, first: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(stored, first, rows, 0)

    if devices is None:
        return jax.jit(run)
    spread = functools.partial(devices.local, run, (0, None), 0)
    return jit_on(devices.mesh, spread, out_shardings=devices.sharding(0))
