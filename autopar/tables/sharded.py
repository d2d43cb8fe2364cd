"""Leaves of the state whose rows lie on devices as those of an ordinary array can't.

`Table`: rows spread over devices. `DeferredTable`: untouched rows wait for steps to be replayed. `TablePart`: rows that
a step keeps behind those of other tables (`passes.stack_tables`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from autopar import jax_compat
from autopar.analysis.rules import resized
from autopar.backends.devices import Devices
from autopar.backends.global_arrays import is_global, jit_on, place_array
from autopar.backends.layouts import on_host, ordinary
from autopar.backends.update_log import DeviceLogPrograms, UpdateLog
from autopar.errors import donated
from autopar.ir.layout import RowLayout
from autopar.ir.stacked import StackIndex
from autopar.jax_types import Array, Dtype, Index, Leaf, Sharding
from autopar.tables.leaf import (
    ArrayHome,
    Described,
    Home,
    PlacedLeaf,
    Shards,
    Source,
    StandingLeaf,
    TableLeaf,
    copied,
    current,
)


@dataclass(frozen=True)
class RowsHome(Home):
    """Rows spread over devices, in a layout."""

    layout: RowLayout
    axis: int
    sharding: Sharding

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
        if isinstance(rows, slice) and simple:
            numbers = np.arange(*rows.indices(self.layout.extent))
            rows = numbers if numbers.size <= self.layout.shard_rows else rows
        picked = None if self.axis else _picked(rows, self.layout.extent)
        return None if picked is None else self.layout.storage_index(picked)

    @property
    def _where(self) -> str:
        return f" spread over {self.layout.devices} devices"


def _picked(rows: Leaf, extent: int) -> Leaf:
    """Returns the rows that a number picks, or an array of numbers (the nearest ones), counted from the first row; None
    for any other index. Raises IndexError for a number that is no row."""
    if isinstance(rows, (int, np.integer)) and not isinstance(rows, bool):
        if not -extent <= rows < extent:
            raise IndexError(f"row {rows} of a table with {extent} rows")
        return int(rows) % extent
    if not isinstance(rows, (np.ndarray, jax.Array)) or not jnp.issubdtype(rows.dtype, np.integer):
        return None
    xp = jnp if isinstance(rows, jax.Array) else np
    rows = rows.astype(np.int32)  # V may be more than a small integer holds
    return xp.clip(xp.where(rows < 0, rows + extent, rows), 0, extent - 1)


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


# --- tables whose untouched rows wait for steps to be replayed (`ir.deferred`) ---
#
# The leaves of a family (a table, its optimizer slots) share an `UpdateLog`, with those of other families of which
# steps write down the same: what that is, and the leaves as they are stored, some rows lagging behind. Reading any of
# them brings all rows up to date first, once, and an evaluation that looks rows up those alone: a stale row can't be
# read.


class DeferredTable(StandingLeaf[UpdateLog[DeviceLogPrograms]]):
    """Rows that move in every step, of which those that no batch touched are moved when they are read.

    A leaf of the state like an array: `jax.tree` maps over it, and a step made by `parallelize` takes and returns it.
    Reading it (`np.asarray`, functions of JAX, indexing) gives the true rows. `autopar.materialize(state)` makes
    ordinary arrays.

    Attributes:
      layout: How rows are stored, None where as they are.
      axis: The row axis.
    """

    def __init__(self, log: UpdateLog[DeviceLogPrograms], index: int) -> None:
        """Takes the log that the table and its slots share; `index`: that of the leaf there."""
        self.layout, self.axis = log.programs.stored_as(index)
        stored = log.leaves[index]
        shape = stored.shape if self.layout is None else resized(stored.shape, self.axis, self.layout.extent)
        super().__init__(log, index, jax.ShapeDtypeStruct(shape, stored.dtype))

    @property
    def table(self) -> int:
        """The number, among the log's tables, of the one it belongs to."""
        return self.index // len(self.pending.programs.replay.leaves)

    @property
    def is_whole_here(self) -> bool:
        return not is_global(self.pending.leaves[self.index])

    def is_deleted(self) -> bool:
        return self.pending.is_deleted()

    def block_until_ready(self) -> DeferredTable:
        """Waits for the step that returned it; rows that lag behind stay so."""
        jax.block_until_ready((self.pending.leaves, self.pending.entries))
        return self

    def current(self) -> jax.Array | Table:
        """Returns the table with all rows up to date: the log's own array, or a `Table` of it. The next step takes
        it."""
        self.pending.bring_up_to_date()
        return self.lagging()

    def lagging(self) -> jax.Array | Table:
        """Returns the table as it is, some rows lagging behind."""
        stored = self.pending.leaves[self.index]
        return stored if self.layout is None else Table(stored, self.layout, self.axis)

    @property
    def stored_as(self) -> tuple[RowLayout, int] | None:
        layout = self.pending.programs.layouts[self.table]
        return None if layout is None else (layout, self.axis)

    @property
    def _where(self) -> str:
        return ", rows brought up to date when they are read"


def common_log(leaves: Sequence[Leaf], programs: DeviceLogPrograms) -> UpdateLog[DeviceLogPrograms] | None:
    """Returns the update log that a step can go on with: its leaves are these, and it is kept in the same way."""
    first = leaves[0]
    if not isinstance(first, DeferredTable) or first.is_deleted() or not programs.continues(first.pending.programs):
        return None
    log = first.pending
    mine = (isinstance(x, DeferredTable) and x.pending is log and x.index == k for k, x in enumerate(leaves))
    return log if all(mine) else None


# --- tables that are parts of a stack ---


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
        part = _cut(layout, devices)(stored, np.int32(start // layout.devices))
        return part if devices is None else Table(part, layout.spread, 0)

    @property
    def home(self) -> Home:
        """The home of its rows by themselves, out of the stack."""
        stack = self.pending.lagging() if isinstance(self.pending, DeferredTable) else self.pending
        if isinstance(stack, Table):
            return RowsHome(self.where.shape.layout_of(self.index).spread, 0, stack.stored.sharding)
        return ArrayHome(stack.sharding if stack.committed else None)

    @property
    def shards(self) -> Shards:
        """The shards that it is saved in; they aren't copied out of the stack."""
        layout, first = self.where.shape.layout_of(self.index), self.where.shape.starts[self.index]
        whole = shards_of(stored_rows(self._rows()), self.where.shape.layout, 0)
        first //= layout.devices

        def own() -> Iterator[tuple[int, np.ndarray]]:
            return ((number, rows[first : first + layout.held_on(number)]) for number, rows in whole.own())

        return Shards(layout, 0, own)

    def _rows(self) -> jax.Array | Table:
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
        picked, shape = _picked(rows, self.shape[0]), self.where.shape
        if picked is None:
            return super().__getitem__(index)
        return self._rows()[(shape.starts[self.index] + picked * shape.stride(self.index), *others)]

    @property
    def stored_as(self) -> tuple[RowLayout, int] | None:
        return (self.where.shape.layout_of(self.index).spread, 0) if self.where.shape.devices > 1 else None

    @property
    def _where(self) -> str:
        spread = f" spread over {self.where.shape.devices} devices" if self.where.shape.devices > 1 else ""
        return f"{spread}, one of {len(self.where.shape.extents)} tables that are kept together"


def stored_rows(rows: jax.Array | Table) -> jax.Array:
    return rows.stored if isinstance(rows, Table) else rows


@functools.cache
def _cut(layout: RowLayout, devices: Devices | None) -> Callable[[Array, Array], jax.Array]:
    """Compiles a program that copies a shard's rows, from a number on, of an array, or of each device's part of it;
    those that one device has it sends to the devices that have them in `layout.spread`."""

    def run(stored: Array, first: Array) -> Array:
        rows = jax.lax.dynamic_slice_in_dim(stored, first, layout.shard_rows, 0)
        if layout.owner is None or devices is None:
            return rows
        to = jnp.arange(layout.spread.stored, dtype=jnp.int32).reshape(layout.devices, -1)
        sent = rows.at[layout.spread.row(to)].get(mode="clip")
        return jax.lax.all_to_all(sent, devices.axis, 0, 0)[layout.owner]

    if devices is None:
        return jax.jit(run)
    spread = functools.partial(devices.local, run, (0, None), 0)
    return jit_on(devices.mesh, spread, out_shardings=devices.sharding(0))
