"""`HostTable`: a leaf of the state whose rows are in the memory of the hosts, each rank owning a shard of them."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np

from autopar.backends.host.storage import HostRows
from autopar.errors import donated
from autopar.interrupts import uninterrupted
from autopar.ir.layout import RowLayout
from autopar.jax_types import Index
from autopar.launch.progress import PROGRESS, MarkKind
from autopar.mpi.machines import exchange
from autopar.tables.leaf import Described, Home, PlacedLeaf, Shards, Source, is_traced

#: Rows that are read at a time, so that reading a table needs little memory beside the result.
_BLOCK_ROWS = 1 << 16


@dataclass(frozen=True)
class HostHome(Home):
    """Rows distributed over the ranks, in host memory. `rank`: this process's."""

    layout: RowLayout
    axis: int
    rank: int

    def made(self, source: Source, leaf: Described) -> HostTable:
        storage = HostRows.empty(leaf.shape, leaf.numpy_dtype, self.axis, self.layout, self.rank, leaf.path)
        storage.fill(lambda numbers: source.rows(numbers, self.axis))
        return HostTable(storage)


class HostTable(PlacedLeaf):
    """Rows in host memory, distributed cyclically over the ranks.

    A leaf of the state like an array: `jax.tree` maps over it, and a step made by `parallelize` takes and returns it.
    Reading it (`np.asarray`, functions of JAX, indexing by rows) gives the true rows; with several ranks that is
    collective: every rank must read, and gets the same. `autopar.materialize(state)` makes ordinary arrays.
    """

    def __init__(self, storage: HostRows) -> None:
        others = storage.rows.shape[1:]
        shape = (*others[: storage.axis], storage.layout.extent, *others[storage.axis :])
        super().__init__(jax.ShapeDtypeStruct(shape, storage.rows.dtype))
        self._storage = storage
        self._handed = storage.handed

    @property
    def storage(self) -> HostRows:
        """This rank's shard, all rows up to date; a DonatedStateError if it was given to a step."""
        shard = self.waiting
        shard.bring_up_to_date()
        return shard

    @property
    def waiting(self) -> HostRows:
        """This rank's shard as it is; some rows may lag behind, where they are deferred. Errors as of `storage`."""
        if self.is_deleted():
            raise donated(self._storage.path or "this table")
        return self._storage

    @property
    def layout(self) -> RowLayout:
        """The layout of rows over ranks."""
        return self._storage.layout

    @property
    def axis(self) -> int:
        return self._storage.axis

    @property
    def stored_as(self) -> tuple[RowLayout, int]:
        return self.layout, self.axis

    @property
    def home(self) -> HostHome:
        return HostHome(self.layout, self.axis, self._storage.rank)

    @property
    def shards(self) -> Shards:
        storage = self.storage  # up to date before threads that write files ask for it: leaves share an update log
        return Shards(self.layout, self.axis, lambda: iter([(storage.rank, storage.rows)]))

    @property
    def is_whole_here(self) -> bool:
        return self.layout.devices == 1

    def duplicate(self) -> HostTable:
        return HostTable(self.waiting.copy())

    def is_deleted(self) -> bool:
        return self._handed != self._storage.handed

    def handed_on(self) -> HostTable:
        """Returns the rows under a new handle; this one is deleted."""
        storage = self.waiting
        storage.generation += 1
        return HostTable(storage)

    @uninterrupted  # the others wait for this rank
    def read_rows(self, rows: np.ndarray) -> np.ndarray:
        """Returns [n, ...]: rows by number, first axis first. Collective."""
        storage, ranks = self.storage, exchange()
        indices, back = np.unique(self.layout.storage_index(rows.astype(np.int64)), return_inverse=True)
        waits: MarkKind = "waits" if ranks.size > 1 else "computes"
        what = f"reading rows of {storage.path or 'a table'} in host memory"
        with ranks.purpose(what), PROGRESS.during(what, waits):
            requested = ranks.ask(indices, self.layout.shard_rows)
            return ranks.fetch(requested, storage.rows[requested.rows])[back]

    def _written(self) -> np.ndarray:
        return self._on_host()  # a device may have no room for it

    @uninterrupted
    def _on_host(self) -> np.ndarray:
        table = np.empty((self.layout.extent, *self._storage.rows.shape[1:]), self.dtype)
        for start in range(0, self.layout.extent, _BLOCK_ROWS):
            numbers = np.arange(start, min(start + _BLOCK_ROWS, self.layout.extent))
            table[numbers] = self.read_rows(numbers)
        return np.moveaxis(table, 0, self.axis)

    def __getitem__(self, index: Index) -> np.ndarray | jax.Array:
        """Indexes it as an array. Rows picked by numbers are read by themselves. Collective."""
        if is_traced(index):
            return jax.numpy.asarray(self)[index]
        numbers = index[0] if isinstance(index, tuple) else index
        picks = isinstance(numbers, (int, np.integer)) or (
            isinstance(numbers, (np.ndarray, jax.Array)) and np.issubdtype(numbers.dtype, np.integer)
        )
        if self.axis or not picks or isinstance(numbers, bool):
            return self._on_host()[index]
        wanted = np.asarray(numbers, np.int64)
        extent = self.layout.extent
        if wanted.size and (wanted.min() < -extent or wanted.max() >= extent):
            raise IndexError(f"row {wanted.flat[0]} of a table with {extent} rows")
        rows = self.read_rows(wanted.reshape(-1) % extent).reshape((*wanted.shape, *self.shape[1:]))
        rest = index[1:] if isinstance(index, tuple) else ()
        return rows[(*(slice(None),) * wanted.ndim, *rest)]

    @property
    def _where(self) -> str:
        ranks = f"{self.layout.devices} ranks" if self.layout.devices > 1 else "this process"
        return f" in the memory of {ranks}"
