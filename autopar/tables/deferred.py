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
import numpy as np

from autopar.analysis.rules import resized
from autopar.backends.across import local
from autopar.backends.background import Compilation, beside
from autopar.backends.devices import Devices
from autopar.backends.emit import deferred_of
from autopar.backends.segments import Entries
from autopar.errors import DonatedStateError, note_lost_rows
from autopar.interrupts import uninterrupted
from autopar.ir.layout import RowLayout
from autopar.ir.printer import format_block
from autopar.ir.program import ArrayType, Equation
from autopar.tables.leaf import StandingLeaf
from autopar.tables.sharded import Table


class UpdateLogSpec:
    """What a planned step knows of a family's update logs: how to begin one, and what is done with it between steps."""

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
            leaves, (stamps, *entries) = operands[:m], operands[m:]
            return deferred.flush(leaves, stamps, Entries.of(replay, entries))

        def begin(*leaves: Any) -> tuple[Any, ...]:
            stamps = devices.local(lambda *some: deferred.stamps(some), operand_axes[:n], axes[0], *leaves)
            records = (jnp.zeros((replay.length, *t.shape), t.dtype) for t in replay.records)
            segments = (jnp.zeros(t.shape, t.dtype) for t in replay.segments)
            return stamps, jnp.full((), replay.part, jnp.int32), jnp.zeros((), jnp.int32), *records, *segments

        def turn(*operands: Any) -> tuple[Any, ...]:
            return deferred.turn(operands[0], Entries.of(replay, operands[1:]))

        def some(*operands: Any) -> tuple[Any, ...]:
            leaves, (stamps, segment, which, *rest) = operands[:m], operands[m:]
            segments, older = rest[: len(replay.segments)], rest[len(replay.segments) :]
            return deferred.catch_up_some(leaves, stamps, segment, segments, older, which, self.times)

        spread = 1 if layout is None else devices.count
        self.times = deferred.times(max(leaf.type.size for leaf in flush.inputs[:n]) // spread)
        whole = devices.sharding(None)
        places = tuple(map(devices.sharding, returned))
        self._whole = whole
        self._compilation: Compilation[None] | None = None
        self.flush = jax.jit(
            lambda *operands: devices.local(run, operand_axes, returned, *operands),
            out_shardings=places,
            donate_argnums=(*range(n), m, m + 1, m + 2),
        )
        self._begin = jax.jit(begin, out_shardings=self.shardings)
        self.turn = jax.jit(turn, out_shardings=(whole, *self.shardings, *[whole] * len(replay.records)))
        some_axes = (*operand_axes[: m + 1], *[None] * (2 + len(replay.segments) + len(replay.records)))
        self.catch_up_some = jax.jit(
            lambda *operands: devices.local(some, some_axes, returned[: n + 1], *operands),
            out_shardings=places[: n + 1],
            donate_argnums=(*range(n), m),
        )

        def catch_up(*operands: Any) -> tuple[Any, ...]:
            leaves, (stamps, *entries, ids) = operands[:m], operands[m:]
            if layout is not None:
                ids = jnp.where(ids < layout.extent, layout.place(ids), layout.stored) - devices.position() * len(
                    stamps
                )
                ids = jnp.where(ids < 0, len(stamps), ids)  # others have them
            return deferred.catch_up_in_place(leaves, stamps, Entries.of(replay, entries), ids)

        self.catch_up = jax.jit(
            lambda *operands: devices.local(catch_up, (*operand_axes, None), returned[: n + 1], *operands),
            out_shardings=places[: n + 1],
            donate_argnums=(*range(n), m),
        )

    def begin(self, leaves: Sequence[jax.Array]) -> list[jax.Array]:
        """An empty update log for leaves that are up to date: stamps and entries."""
        return list(self._begin(*leaves[: self.replay.changed]))

    def prepare(self, leaves: Sequence[jax.Array], entries: Sequence[jax.Array]) -> None:
        """Compile, beside the steps, what they need once the newer part is full."""
        if self._compilation is not None:
            return
        rows, (stamps, *rest) = list(map(_shape, leaves)), map(_shape, entries)
        segments = rest[2 + len(self.replay.records) :]
        types = [ArrayType((self.replay.part, *t.shape), t.dtype) for t in self.replay.records]
        older = [jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=self._whole) for t in types]

        def compile_all() -> None:
            self.turn.lower(stamps, *rest).compile()
            self.catch_up_some.lower(*rows, stamps, rest[1], np.int32(0), *segments, *older).compile()

        self._compilation = beside("what a full update log needs", compile_all)

    def wait(self) -> None:
        """Wait for what `prepare` began."""
        if self._compilation is not None:
            self._compilation.wait()

    def continues(self, other: UpdateLogSpec) -> bool:
        """Whether an update log of another plan is one of this one's, too."""
        return self is other or self._signature == other._signature


def _shape(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


@dataclass(eq=False)
class UpdateLog:
    """A family's leaves, some rows lagging behind, and what they missed.

    Attributes:
      leaves: Changed ones, then those that are only read.
      entries: Stamps, now, segment, records, segments.
      now: As in the entries, or more if some steps were done again.
      older: Records of the older part when it was closed; none: no row needs them.
      seen: How many times some rows were brought up to its end.
    """

    spec: UpdateLogSpec
    leaves: list[jax.Array]
    entries: list[jax.Array]
    now: int
    older: list[jax.Array] | None = None
    seen: int = 0
    is_up_to_date: bool = False

    @staticmethod
    def after(
        before: UpdateLog | None, spec: UpdateLogSpec, leaves: list[jax.Array], entries: list[jax.Array]
    ) -> UpdateLog:
        """The update log after a step: one that began with it, or `before` with one step more. That keeps its programs,
        which are compiled, also where the step was planned again."""
        if before is None:
            return UpdateLog(spec, leaves, entries, spec.replay.part + 1)
        return UpdateLog(before.spec, leaves, entries, before.now + 1, before.older, before.seen)

    def bring_up_to_date(self) -> None:
        """Bring all rows up to date. The update log is empty then, and goes on with the next step."""
        if not self.is_up_to_date or self.is_deleted():
            self._flush()
            self.is_up_to_date = True

    @uninterrupted
    def catch_up(self, ids: Sequence[jax.Array]) -> None:
        """Bring some rows up to date. `ids`: flat int32, out of range is no row."""
        if ids:
            self._run(self.spec.catch_up, *self.entries, jnp.concatenate(ids))

    @uninterrupted
    def make_room(self) -> None:
        """Make room for a step, and bring some rows up to the end of the older part, so that it can be left in time."""
        length, part = self.spec.replay.length, self.spec.replay.part
        if self.now >= length:
            self.now = int(local(self.entries[1]))
        if self.now >= length:
            self._turn()
        if self.now >= part + self.spec.replay.prepared:
            self.spec.prepare(self.leaves, self.entries)
        if self.older is None:
            return
        segments = self.entries[3 + len(self.spec.replay.records) :]
        due = self.spec.times * (self.now + 1 - part) // part
        for which in range(self.seen, due):
            rest = self.entries[2], np.int32(which), *segments, *self.older
            self._run(self.spec.catch_up_some, self.entries[0], *rest)
            self.seen = which + 1
        if self.seen == self.spec.times:
            self.older = None

    def _turn(self) -> None:
        self.spec.wait()
        takes_all, *entries = self.spec.turn(*self.entries)
        if bool(local(takes_all)):
            self._flush()
        else:
            count = len(self.entries)
            self.entries, self.older, self.seen = entries[:count], entries[count:], 0
            self.now = self.spec.replay.part

    @uninterrupted
    def _flush(self) -> None:
        if self.is_deleted():
            raise DonatedStateError(
                "the rows were given to a later step, which updated them in place: read the state that it returned, or "
                "keep old states with parallelize(step, donate=False)"
            )
        self.entries[1:3] = self._run(self.spec.flush, *self.entries)
        self.now, self.older = self.spec.replay.part, None

    def _run(self, program: Callable[..., Sequence[jax.Array]], *operands: Any) -> Sequence[jax.Array]:
        """Run a program that updates leaves and stamps in place; what else it returns."""
        changed = self.spec.replay.changed
        try:
            results = program(*self.leaves, *operands)
        except BaseException as error:
            if self.is_deleted():
                note_lost_rows(error)
            raise
        self.leaves[:changed], self.entries[0] = results[:changed], results[changed]
        return results[changed + 1 :]

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
        self.log.bring_up_to_date()
        return self.lagging()

    def lagging(self) -> jax.Array | Table:
        """The table as it is, some rows lagging behind."""
        stored = self.log.leaves[self.place]
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
