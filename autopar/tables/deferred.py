"""`DeferredTable`: a leaf of the state whose untouched rows wait for steps to be replayed (`ir.deferred`).

The leaves of a family (a table, its optimizer slots) share a `UpdateLog`: what steps wrote down, and the leaves as they
are stored, some rows lagging behind. Reading any of them brings all rows up to date first, once, and an evaluation that
looks rows up those alone: a stale row can't be read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from autopar.analysis.rules import resized
from autopar.backends.across import local
from autopar.backends.deferred import Entries
from autopar.backends.devices import Devices
from autopar.backends.emit import deferred_of
from autopar.errors import DonatedStateError, note_lost_rows
from autopar.interrupts import uninterrupted
from autopar.ir.layout import RowLayout
from autopar.ir.printer import format_block
from autopar.ir.program import Equation
from autopar.tables.leaf import StandingLeaf
from autopar.tables.sharded import Table


class UpdateLogSpec:
    """What a planned step knows of a family's update logs: how to begin one, and how to flush it early."""

    def __init__(self, flush: Equation, layout: RowLayout | None, devices: Devices) -> None:
        """`flush`: the equation of the planned step that does it. `layout`: None where each device has all rows."""
        deferred = deferred_of(flush)
        replay = self.replay = deferred.replay
        self.layout = layout
        self._signature = [str((replay, layout, devices)), *format_block(deferred.body)]
        n, m = replay.changed, len(replay.leaves)
        operand_axes, returned = deferred.spread(layout is not None)
        axes = operand_axes[m:]
        self.shardings = tuple(map(devices.sharding, axes))

        def run(*operands: Any) -> tuple[Any, ...]:
            leaves, (stamps, *entries, full) = operands[:m], operands[m:]
            return deferred.flush(leaves, stamps, Entries.of(replay, entries), full=full)

        def begin(*leaves: Any) -> tuple[Any, ...]:
            stamps = devices.local(lambda *some: deferred.stamps(some), operand_axes[:n], axes[0], *leaves)
            records = (jnp.zeros((replay.length, *t.shape), t.dtype) for t in replay.records)
            segments = (jnp.zeros(t.shape, t.dtype) for t in replay.segments)
            return stamps, jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32), *records, *segments

        places = tuple(map(devices.sharding, returned))
        self.flush = jax.jit(
            lambda *operands: devices.local(run, (*operand_axes, None), returned, *operands),
            out_shardings=places,
            donate_argnums=(*range(n), m, m + 1, m + 2),
        )
        self._begin = jax.jit(begin, out_shardings=self.shardings)

        def catch_up(*operands: Any) -> tuple[Any, ...]:
            leaves, (stamps, *entries, ids) = operands[:m], operands[m:]
            return deferred.catch_up_in_place(leaves, stamps, Entries.of(replay, entries), ids)

        self.catch_up = jax.jit(catch_up, donate_argnums=(*range(n), m))

    def begin(self, leaves: Sequence[jax.Array]) -> list[jax.Array]:
        """An empty update log for leaves that are up to date: stamps and entries."""
        return list(self._begin(*leaves[: self.replay.changed]))

    def continues(self, other: UpdateLogSpec) -> bool:
        """Whether an update log of another plan is one of this one's, too."""
        return self is other or self._signature == other._signature


@dataclass(eq=False)
class UpdateLog:
    """A family's leaves, some rows lagging behind, and what they missed.

    Attributes:
      leaves: Changed ones, then those that are only read.
      entries: Stamps, now, segment, records, segments.
      steps: How many it holds at most.
    """

    spec: UpdateLogSpec
    leaves: list[jax.Array]
    entries: list[jax.Array]
    steps: int
    is_up_to_date: bool = False

    def up_to_date(self, k: int) -> jax.Array:
        """A leaf with all rows up to date. The update log is empty then, and goes on with the next step."""
        if not self.is_up_to_date or self.is_deleted():
            self._flush(full=True)
            self.is_up_to_date = True
        return self.leaves[k]

    @uninterrupted
    def catch_up(self, ids: Sequence[jax.Array]) -> None:
        """Bring some rows up to date, on the one device that has all. `ids`: flat int32, out of range is no row."""
        if not ids:
            return
        changed = self.spec.replay.changed
        results = self._run(self.spec.catch_up, jnp.concatenate(ids))
        self.leaves[:changed], self.entries[0] = results[:changed], results[changed]

    def make_room(self) -> None:
        """Flush the update log where no step has room in it, but for rows that may wait."""
        if self.steps >= self.spec.replay.length:
            self.steps = int(local(self.entries[1]))  # it holds fewer if some steps were done again
            if self.steps >= self.spec.replay.length:
                self._flush(full=False)

    @uninterrupted
    def _flush(self, *, full: bool) -> None:
        if self.is_deleted():
            raise DonatedStateError(
                "the rows were given to a later step, which updated them in place: read the state that it returned, or "
                "keep old states with parallelize(step, donate=False)"
            )
        changed, segments = self.spec.replay.changed, len(self.spec.replay.segments)
        results = self._run(self.spec.flush, full)
        self.leaves[:changed] = results[:changed]
        self.entries[:3] = results[changed : changed + 3]
        self.entries[len(self.entries) - segments :] = results[changed + 3 :]
        self.steps = 0

    def _run(self, program: Callable[..., Sequence[jax.Array]], more: Any) -> Sequence[jax.Array]:
        """Run a program that updates leaves in place, with one more operand."""
        try:
            return program(*self.leaves, *self.entries, more)
        except BaseException as error:
            if self.is_deleted():
                note_lost_rows(error)
            raise

    def is_deleted(self) -> bool:
        """Whether a step got them, and updated them in place."""
        return self.leaves[0].is_deleted()


@dataclass(frozen=True, eq=False, repr=False)
class DeferredTable(StandingLeaf):
    """Rows that move in every step, of which those that no batch touched are moved when they are read.

    A leaf of the state like an array: `jax.tree` maps over it, and a step made by `parallelize` takes and returns it.
    Reading it (`np.asarray`, `jnp.asarray`, indexing) gives the true rows. Other JAX functions refuse it:
    `autopar.materialize(state)` makes ordinary arrays.

    Attributes:
      log: Shared by the table and its slots.
      place: Which of the update log's leaves it is.
      layout: How rows are stored, None where as they are.
      axis: The row axis.
    """

    log: UpdateLog
    place: int
    layout: RowLayout | None
    axis: int

    @property
    def shape(self) -> tuple[int, ...]:
        stored = self.log.leaves[self.place].shape
        return stored if self.layout is None else resized(stored, self.axis, self.layout.extent)

    @property
    def dtype(self) -> Any:
        return self.log.leaves[self.place].dtype

    def is_deleted(self) -> bool:
        return self.log.is_deleted()

    def block_until_ready(self) -> DeferredTable:
        """Wait for the step that returned it; rows that lag behind stay so."""
        jax.block_until_ready((self.log.leaves, self.log.entries))
        return self

    def current(self) -> jax.Array | Table:
        """The table with all rows up to date: the log's own array, or a `Table` of it. The next step takes it."""
        stored = self.log.up_to_date(self.place)
        return stored if self.layout is None else Table(stored, self.layout, self.axis)

    @property
    def stored_as(self) -> tuple[RowLayout, int] | None:
        return None if self.layout is None else (self.layout, self.axis)

    @property
    def _where(self) -> str:
        return ", rows brought up to date when they are read"


def common_log(leaves: Sequence[Any], spec: UpdateLogSpec) -> UpdateLog | None:
    """The update log that a step can go on with: its leaves are these, and it is kept in the same way."""
    first = leaves[0]
    if not isinstance(first, DeferredTable) or first.is_deleted() or not spec.continues(first.log.spec):
        return None
    log = first.log
    mine = (isinstance(x, DeferredTable) and x.log is log and x.place == k for k, x in enumerate(leaves))
    return log if all(mine) else None
