"""`DeferredTable`: a leaf of the state whose untouched rows wait for steps to be replayed (`ir.deferred`).

The leaves of a family (a table, its optimizer slots) share a `DeviceUpdateLog`, with those of other families of which
steps write down the same: what that is, and the leaves as they are stored, some rows lagging behind. Reading any of
them brings all rows up to date first, once, and an evaluation that looks rows up those alone: a stale row can't be
read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar import jax_compat
from autopar.analysis.rules import resized
from autopar.backends.across import is_global, local, place_array
from autopar.backends.background import Compilation, beside
from autopar.backends.deferred_tables import NEVER
from autopar.backends.devices import Devices
from autopar.backends.emit import deferred_of
from autopar.backends.segments import Entries
from autopar.backends.update_log import UpdateLog, UpdateLogSpec
from autopar.backends.watched import jit_on
from autopar.errors import DonatedStateError, note_lost_rows
from autopar.interrupts import uninterrupted
from autopar.ir.deferred import Replay
from autopar.ir.layout import RowLayout
from autopar.ir.program import Equation
from autopar.jax_types import Leaf
from autopar.tables.leaf import StandingLeaf
from autopar.tables.sharded import Table


class DeviceUpdateLogSpec(UpdateLogSpec):
    """Begins update logs of a planned step, and has the programs that run on them between steps.

    Attributes:
      tables: Of each table that shares it the replay.
      layouts: Of each how its rows are stored; None where each device has all of them.
      shardings: Those of stamps and entries.
      everywhere: The sharding of what every device has, such as numbers of rows.
      times: How many times `catch_up_some` is called until it has seen all rows.
    """

    def __init__(
        self,
        flushes: Sequence[Equation],
        layouts: Sequence[RowLayout | None],
        ids: Sequence[int],
        devices: Devices,
    ) -> None:
        """Takes the planned step's flushes, one for each table, and how many ids a step looks up in each."""
        deferred = deferred_of(flushes[0])
        replay = deferred.replay
        self.tables: list[Replay] = [e.params["replay"] for e in flushes]
        super().__init__(deferred, (self.tables, layouts, devices))
        self.layouts = layouts
        n, m, count = replay.changed, len(replay.leaves), len(flushes)
        k = count * m  # leaves, then stamps
        spread = [layout is not None for layout in layouts]
        operand_axes, returned = deferred.spread(spread)
        axes = operand_axes[k:]
        self.shardings = tuple(map(devices.sharding, axes))

        def run(*operands: Leaf) -> tuple[Leaf, ...]:
            return deferred.flush(operands[:k], operands[k : k + count], Entries.of(replay, operands[k + count :]))

        def stamps_of(*changed: Leaf) -> tuple[Leaf, ...]:
            return tuple(deferred.stamps(changed[t * n : (t + 1) * n]) for t in range(count))

        def begin(*changed: Leaf) -> tuple[Leaf, ...]:
            stamps = devices.local(stamps_of, returned[: count * n], tuple(axes[:count]), *changed)
            records = (jnp.zeros((replay.length, *t.shape), t.dtype) for t in replay.records)
            segments = (jnp.zeros(t.shape, t.dtype) for t in replay.segments)
            return *stamps, jnp.full((), replay.part, jnp.int32), jnp.zeros((), jnp.int32), *records, *segments

        def turn(*operands: Leaf) -> tuple[Leaf, ...]:
            return deferred.turn(operands[:count], Entries.of(replay, operands[count:]))

        def here(ids: Leaf, layout: RowLayout | None, extent: int) -> Leaf:
            if layout is None:
                return ids
            ids = jnp.where(ids < layout.extent, layout.place(ids), layout.stored) - devices.position() * extent
            return jnp.where(ids < 0, extent, ids)  # others have them

        def some(*operands: Leaf) -> Sequence[Leaf]:
            leaves, stamps, (*flat, which) = operands[:k], operands[k : k + count], operands[k + count : -count]
            triples = zip(operands[-count:], layouts, stamps, strict=True)
            ids = [here(rows, layout, len(stamped)) for rows, layout, stamped in triples]
            return deferred.catch_up_some(leaves, stamps, Entries.of(replay, flat), which, ids, self.times)

        sizes = [max(leaf.type.size for leaf in e.inputs[:n]) for e in flushes]
        pairs = zip(sizes, spread, strict=True)
        self.times = deferred.times(sum(size // devices.count if is_spread else size for size, is_spread in pairs))
        whole = self.everywhere = devices.sharding(None)
        places = tuple(map(devices.sharding, returned))
        self.blocks = tuple(1 << max(0, many - 1).bit_length() for many in ids)
        self._some_compilation: Compilation[Any] | None = None
        self._turn_compilation: Compilation[Any] | None = None
        #: Which operands of a program are updated: changed leaves, and stamps.
        kept = self.kept = (*(t * m + j for t in range(count) for j in range(n)), *range(k, k + count))
        self.flush = jit_on(
            devices.mesh,
            lambda *operands: devices.local(run, operand_axes, returned, *operands),
            out_shardings=places,
            donate_argnums=(*kept, k + count, k + count + 1),
        )
        self._begin = jit_on(devices.mesh, begin, out_shardings=self.shardings)
        self.turn = jit_on(devices.mesh, turn, out_shardings=(whole, *self._without_records(self.shardings)))
        some_axes = (*operand_axes, None, *[None] * count)
        self.catch_up_some = jit_on(
            devices.mesh,
            lambda *operands: devices.local(some, some_axes, tuple(returned[:-2]), *operands),
            out_shardings=places[:-2],
            donate_argnums=kept,
        )

    @property
    def leaves(self) -> list[int]:
        """The inputs of the program that the leaves of its tables are."""
        return [k for table in self.tables for k in table.leaves]

    def stored_as(self, place: int) -> tuple[RowLayout | None, int]:
        """Returns how rows of a leaf are stored (None: as they are), and its row axis."""
        table, leaf = divmod(place, len(self.replay.leaves))
        layout = self.layouts[table]
        return None if layout is None or layout.is_plain else layout, self.replay.axes[leaf]

    @functools.cached_property
    def no_rows(self) -> list[jax.Array]:
        """Has, for each table, numbers of no rows, for a program that takes others."""
        none = [np.full(size, NEVER, np.int32) for size in self.blocks]
        return [place_array(x, self.everywhere, own=True) for x in none]

    def _without_records(self, entries: Sequence[Leaf]) -> list[Leaf]:
        first = len(self.tables) + 2
        return [*entries[:first], *entries[first + len(self.replay.records) :]]

    def some(self, *operands: Leaf) -> Sequence[jax.Array]:
        """Runs `catch_up_some`; the first time it waits for what `prepare` began."""
        if self._some_compilation is not None:
            self._some_compilation.finish()
        return self.catch_up_some(*operands)

    def turned(self, entries: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]] | None:
        """Makes the newer part the older one: the entries, and those of the older part (now, records); None if a flush
        has to do it."""
        if self._turn_compilation is not None:
            self._turn_compilation.finish()
        takes_all, *rest = self.turn(*entries)
        if bool(local(takes_all)):
            return None
        first, part = len(self.tables) + 2, self.replay.part
        records = [np.asarray(local(x))[part:] for x in entries[first : first + len(self.replay.records)]]

        def moved(x: np.ndarray) -> jax.Array:  # what is newer isn't read
            return place_array(np.concatenate([x, x]), self.everywhere, own=True)

        now = place_array(np.full((), part, np.int32), self.everywhere, own=True)
        return [*rest[:first], *map(moved, records), *rest[first:]], [now, *map(moved, records)]

    def begin(self, leaves: Sequence[jax.Array]) -> list[jax.Array]:
        """Begins an empty update log for leaves that are up to date: returns stamps and entries."""
        leaves_ = len(self.replay.leaves)
        return list(self._begin(*(x for k, x in enumerate(leaves) if k % leaves_ < self.replay.changed)))

    def prepare(self, leaves: Sequence[jax.Array], entries: Sequence[jax.Array]) -> None:
        """Compiles, beside the steps, what brings rows up to date.

        That is what evaluations need, some rows between steps, and a full log. They are begun before the programs that
        take longest (`run.devices.LateFallback`), behind which the step that fills the log would wait.
        """
        if self._some_compilation is None:
            some = *map(_shape, (*leaves, *entries)), np.int32(0), *map(_shape, self.no_rows)
            what = "what brings rows up to date that wait"
            self._some_compilation = beside(what, lambda: self.catch_up_some.lower(*some).compile())
            turn = list(map(_shape, entries))
            self._turn_compilation = beside("what a full update log needs", lambda: self.turn.lower(*turn).compile())


def _shape(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


@dataclass(eq=False)
class DeviceUpdateLog(UpdateLog[DeviceUpdateLogSpec]):
    """The leaves of tables on devices, and what they missed.

    Attributes:
      leaves: Of each table changed ones, then those that are only read.
      entries: Stamps of each table, now, segment, records, segments.
      now: As in the entries, or more if some steps were done again.
    """

    spec: DeviceUpdateLogSpec
    leaves: list[jax.Array]
    entries: list[jax.Array]
    now: int
    older: list[Any] | None = None
    seen: int = 0
    is_up_to_date: bool = False

    @staticmethod
    def after(
        before: DeviceUpdateLog | None, spec: DeviceUpdateLogSpec, leaves: list[jax.Array], entries: list[jax.Array]
    ) -> DeviceUpdateLog:
        """Returns the update log after a step: one that began with it, or `before` with one step more.

        That keeps its programs, which are compiled, also where the step was planned again.
        """
        if before is None:
            return DeviceUpdateLog(spec, leaves, entries, spec.replay.part + 1)
        return DeviceUpdateLog(before.spec, leaves, entries, before.now + 1, before.older, before.seen)

    @property
    def steps(self) -> Sequence[Leaf]:
        return self.entries[len(self.spec.tables) :]

    @uninterrupted
    @jax_compat.outside_traces()
    def catch_up(self, ids: Mapping[int, jax.Array]) -> None:
        """Brings some rows up to date. As many as `spec.blocks` of each table take no program of their own.

        `ids`: of some tables int32[], sorted and distinct, on every device; out of range is no row.
        """
        if ids:
            some = [ids.get(t, none) for t, none in enumerate(self.spec.no_rows)]
            self._run(self.spec.some, *self.steps, np.int32(-1), *some)

    def _position(self) -> int:
        if self.now >= self.spec.replay.length:
            self.now = int(local(self.steps[0]))
        return self.now

    def _turned(self) -> list[Leaf] | None:
        turned = self.spec.turned(self.entries)
        if turned is None:
            return None
        self.entries, older = turned
        self.now = self.spec.replay.part
        return older

    def _prepare(self, position: int) -> None:
        if position >= self.spec.replay.part + self.spec.replay.prepared:
            self.spec.prepare(self.leaves, self.entries)

    def _catch_up_some(self, steps: Sequence[Any], which: int) -> None:
        self._run(self.spec.some, *steps, np.int32(which), *self.spec.no_rows)

    @uninterrupted
    def _flush(self) -> None:
        if self.is_deleted():
            raise DonatedStateError(
                "the rows were given to a later step, which updated them in place: read the state that it returned, or "
                "keep old states with parallelize(step, donate=False)"
            )
        count = len(self.spec.tables)
        self.entries[count : count + 2] = self._run(self.spec.flush, *self.steps)
        self.now, self.older = self.spec.replay.part, None

    def _run(self, program: Callable[..., Sequence[jax.Array]], *operands: Leaf) -> Sequence[jax.Array]:
        """Runs a program that updates leaves and stamps of all tables in place; returns what else it returns."""
        count = len(self.spec.tables)
        try:
            results = program(*self.leaves, *self.entries[:count], *operands)
        except BaseException as error:
            if self.is_deleted():
                note_lost_rows(error)
            raise
        kept = self.spec.kept
        for k, x in zip(kept, results, strict=False):
            if k < len(self.leaves):
                self.leaves[k] = x
            else:
                self.entries[k - len(self.leaves)] = x
        return results[len(kept) :]

    def is_deleted(self) -> bool:
        """Tells whether a step got them, and updated them in place."""
        return self.leaves[0].is_deleted()


class DeferredTable(StandingLeaf[DeviceUpdateLog]):
    """Rows that move in every step, of which those that no batch touched are moved when they are read.

    A leaf of the state like an array: `jax.tree` maps over it, and a step made by `parallelize` takes and returns it.
    Reading it (`np.asarray`, functions of JAX, indexing) gives the true rows. `autopar.materialize(state)` makes
    ordinary arrays.

    Attributes:
      layout: How rows are stored, None where as they are.
      axis: The row axis.
    """

    def __init__(self, log: DeviceUpdateLog, place: int) -> None:
        """Takes the log that the table and its slots share; `place`: the number of the leaf there."""
        self.layout, self.axis = log.spec.stored_as(place)
        stored = log.leaves[place]
        shape = stored.shape if self.layout is None else resized(stored.shape, self.axis, self.layout.extent)
        super().__init__(log, place, jax.ShapeDtypeStruct(shape, stored.dtype))

    @property
    def table(self) -> int:
        """The number, among the log's tables, of the one it belongs to."""
        return self.place // len(self.pending.spec.replay.leaves)

    @property
    def is_whole_here(self) -> bool:
        return not is_global(self.pending.leaves[self.place])

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
        stored = self.pending.leaves[self.place]
        return stored if self.layout is None else Table(stored, self.layout, self.axis)

    @property
    def stored_as(self) -> tuple[RowLayout, int] | None:
        layout = self.pending.spec.layouts[self.table]
        return None if layout is None else (layout, self.axis)

    @property
    def _where(self) -> str:
        return ", rows brought up to date when they are read"


def common_log(leaves: Sequence[Leaf], spec: DeviceUpdateLogSpec) -> DeviceUpdateLog | None:
    """Returns the update log that a step can go on with: its leaves are these, and it is kept in the same way."""
    first = leaves[0]
    if not isinstance(first, DeferredTable) or first.is_deleted() or not spec.continues(first.pending.spec):
        return None
    log = first.pending
    mine = (isinstance(x, DeferredTable) and x.pending is log and x.place == k for k, x in enumerate(leaves))
    return log if all(mine) else None
