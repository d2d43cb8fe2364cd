"""`DeferredTable`: a leaf of the state whose untouched rows wait for steps to be replayed (`ir.deferred`).

The leaves of a family (a table, its optimizer slots) share an `UpdateLog`, with those of other families of which
steps write down the same: what that is, and the leaves as they are stored, some rows lagging behind. Reading any of
them brings all rows up to date first, once, and an evaluation that looks rows up those alone: a stale row can't be
read.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax

from autopar.analysis.rules import resized
from autopar.backends.across import is_global
from autopar.backends.update_log import DeviceLogPrograms, UpdateLog
from autopar.ir.layout import RowLayout
from autopar.jax_types import Leaf
from autopar.tables.leaf import StandingLeaf
from autopar.tables.sharded import Table


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
