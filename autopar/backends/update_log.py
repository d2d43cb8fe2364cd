"""Decides when deferred rows are brought up to date (`ir.deferred`).

The programs that do it run on rows on devices (`DeviceLogPrograms`), or in host memory (`backends/host/update_log.py`).
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from autopar import jax_compat
from autopar.backends.background import Compilation, beside
from autopar.backends.deferred import NEVER, Deferred
from autopar.backends.devices import Devices
from autopar.backends.emit import deferred_of
from autopar.backends.global_arrays import jit_on, local, place_array
from autopar.backends.segments import Entries
from autopar.errors import DonatedStateError, note_lost_rows
from autopar.interrupts import uninterrupted
from autopar.ir.deferred import Replay
from autopar.ir.layout import RowLayout
from autopar.ir.printer import block_text
from autopar.ir.program import Equation
from autopar.jax_types import Leaf


class LogPrograms(abc.ABC):
    """The programs that a planned step runs on its update logs between steps."""

    calls: int  #: Number of calls of `catch_up_some` that bring all rows up to date.

    def __init__(self, deferred: Deferred, tables: Any) -> None:
        """Keeps the programs of a deferred update; the text of `tables` identifies the tables."""
        self._deferred = deferred
        self.replay: Replay = deferred.replay  #: The replayed steps.
        self._signature = [str(tables), *block_text(deferred.body)]

    def continues(self, other: LogPrograms) -> bool:
        """Returns whether an update log of another plan's programs can go on with these."""
        return self is other or self._signature == other._signature

    @abc.abstractmethod
    def flush(self, log: AnyLog) -> Sequence[Leaf]:
        """Brings all rows up to date, in place; returns now and segment of an empty log."""

    @abc.abstractmethod
    def rotate(self, log: AnyLog) -> list[Leaf] | None:
        """Makes the newer part the older one and returns its (now, records); None if a flush is needed instead."""

    @abc.abstractmethod
    def prepare(self, log: AnyLog) -> None:
        """Compiles, beside the steps, the programs for a full log."""

    @abc.abstractmethod
    def catch_up(self, log: AnyLog, rows: Leaf) -> None:
        """Brings these rows up to date, in place."""

    @abc.abstractmethod
    def catch_up_some(self, log: AnyLog, closed: Sequence[Leaf], which: int) -> None:
        """Brings some rows, in place, up to the end of the older part.

        `closed`: the log when that part was closed. `which`: the number of the call, of `calls`.
        """


Programs = TypeVar("Programs", bound=LogPrograms)
#: An update log, wherever its rows are.
AnyLog: TypeAlias = "UpdateLog[Any]"


@dataclass(eq=False, repr=False)
class UpdateLog(Generic[Programs]):
    """The leaves of tables with deferred rows, and the steps that these missed."""

    programs: Programs  #: Bring rows up to date. They are compiled, and stay the same if a step is planned again.
    leaves: list[Leaf]  #: For each table its changed leaves, then those that are only read.
    stamps: list[Leaf]  #: For each table, by row, the step up to which it has moved.
    steps: list[Leaf]  #: The records of steps (now, segment, records, segments).
    now: int  #: As in `steps`, or more if some steps were done again.
    is_up_to_date: bool = True  #: No row lags behind.
    older: list[Leaf] | None = None  #: (now, records) of the older part when it was closed; None: no row needs it.
    seen: int = 0  #: Number of calls that have brought rows up to its end.

    @property
    def entries(self) -> list[Leaf]:
        """The stamps and steps, which a step takes and returns anew."""
        return [*self.stamps, *self.steps]

    def after(self, leaves: list[Leaf], entries: list[Leaf]) -> UpdateLog[Programs]:
        """Returns the update log after a step that took this one's leaves and entries, and returned these."""
        count = len(self.stamps)
        log = UpdateLog(self.programs, leaves, entries[:count], [], self.now, False, self.older, self.seen)
        log.wrote(entries[count:])
        return log

    def wrote(self, steps: list[Leaf]) -> None:
        """Takes the records of a step that updated leaves and stamps in place."""
        self.steps, self.is_up_to_date = steps, False
        self.now += 1

    def is_deleted(self) -> bool:
        """Returns whether a step was given the rows and updated them in place."""
        return isinstance(self.leaves[0], jax.Array) and self.leaves[0].is_deleted()

    @jax_compat.outside_traces()
    def bring_up_to_date(self) -> None:
        """Brings all rows up to date, which empties the update log."""
        if not self.is_up_to_date or self.is_deleted():
            self._flush()

    @uninterrupted
    def _flush(self) -> None:
        if self.is_deleted():
            raise DonatedStateError(
                "the rows were given to a later step, which updated them in place: read the state that it returned, or "
                "keep old states with parallelize(step, donate=False)"
            )
        self.steps[:2] = self.programs.flush(self)
        self.now, self.older, self.is_up_to_date = self.programs.replay.part, None, True

    @uninterrupted
    @jax_compat.outside_traces()
    def catch_up(self, rows: Leaf) -> None:
        """Brings some rows up to date (`DeviceLogPrograms.catch_up`; on hosts rows of this rank's shard)."""
        if not self.is_up_to_date:
            self.programs.catch_up(self, rows)

    @uninterrupted
    @jax_compat.outside_traces()
    def make_room(self) -> None:
        """Makes room for a step."""
        replay = self.programs.replay
        if self.now >= replay.length:
            self.now = int(local(self.steps[0]))
        if self.now >= replay.length:
            older = self.programs.rotate(self)
            if older is None:
                self._flush()
            else:
                self.now, self.older, self.seen = replay.part, older, 0
        if self.now >= replay.part + replay.prepared:
            self.programs.prepare(self)

    @uninterrupted
    @jax_compat.outside_traces()
    def catch_up_some(self) -> None:
        """Brings some rows up to the end of the older part, so that it is free in time: once each step."""
        if self.older is None:
            return
        replay, calls = self.programs.replay, self.programs.calls
        now, *records = self.older
        _, segment, *rest = self.steps
        closed = [now, segment, *records, *rest[len(records) :]]
        # Evenly over the newer part's steps: all rows are brought up when it is full.
        for which in range(self.seen, calls * (self.now + 1 - replay.part) // replay.part):
            self.programs.catch_up_some(self, closed, which)
            self.seen = which + 1
        if self.seen == calls:
            self.older = None


class DeviceLogPrograms(LogPrograms):
    """Brings rows on devices up to date."""

    def __init__(
        self, flushes: Sequence[Equation], layouts: Sequence[RowLayout | None], ids: Sequence[int], devices: Devices
    ) -> None:
        """Makes programs of the planned step's flushes, one for each table. `ids`: ids that a step looks up there."""
        deferred = deferred_of(flushes[0])
        tables: list[Replay] = [e.params["replay"] for e in flushes]
        super().__init__(deferred, (tables, layouts, devices))
        replay, count, spread = self.replay, len(flushes), [layout is not None for layout in layouts]
        n, m = replay.changed, len(replay.leaves)
        k = count * m  # leaves, then stamps
        operand_axes, returned = deferred.flush_axes(spread)
        #: Inputs of the planned step, the leaves of its tables.
        self.leaves = [leaf for table in tables for leaf in table.leaves]
        self.layouts = layouts  #: The layout of each table's rows; None if each device has all of them.
        self.shardings = tuple(map(devices.sharding, operand_axes[k:]))  #: Shardings of stamps and steps.
        self.everywhere = devices.sharding(None)  #: The replicated sharding, of numbers of rows, say.
        #: For each table the number of rows that `catch_up` takes without a program of their own.
        self.blocks = tuple(1 << max(0, many - 1).bit_length() for many in ids)
        sizes = [max(leaf.type.size for leaf in e.inputs[:n]) for e in flushes]
        pairs = zip(sizes, spread, strict=True)
        self.calls = deferred.calls(sum(size // devices.count if is_spread else size for size, is_spread in pairs))
        self._changed = [t * m + j for t in range(count) for j in range(n)]
        self._some_compilation: Compilation[Any] | None = None
        self._rotate_compilation: Compilation[Any] | None = None

        def flush(*operands: Leaf) -> tuple[Leaf, ...]:
            return deferred.flush(operands[:k], operands[k : k + count], Entries.of(replay, operands[k + count :]))

        def stamps_of(*changed: Leaf) -> tuple[Leaf, ...]:
            return tuple(deferred.stamps(changed[t * n : (t + 1) * n]) for t in range(count))

        def begin(*changed: Leaf) -> tuple[Leaf, ...]:
            stamps = devices.local(stamps_of, returned[: count * n], returned[count * n : -2], *changed)
            records = (jnp.zeros((replay.length, *t.shape), t.dtype) for t in replay.records)
            segments = (jnp.zeros(t.shape, t.dtype) for t in replay.segments)
            return *stamps, jnp.full((), replay.part, jnp.int32), jnp.zeros((), jnp.int32), *records, *segments

        def rotate(*operands: Leaf) -> tuple[Leaf, ...]:
            return deferred.rotate(operands[:count], Entries.of(replay, operands[count:]))

        def here(ids: Leaf, layout: RowLayout | None, extent: int) -> Leaf:
            if layout is None:
                return ids
            ids = jnp.where(ids < layout.extent, layout.storage_index(ids), layout.stored) - devices.position() * extent
            return jnp.where(ids < 0, extent, ids)  # other devices have them

        def some(*operands: Leaf) -> Sequence[Leaf]:
            leaves, stamps, (*flat, which) = operands[:k], operands[k : k + count], operands[k + count : -count]
            triples = zip(operands[-count:], layouts, stamps, strict=True)
            ids = [here(rows, layout, len(stamped)) for rows, layout, stamped in triples]
            return deferred.catch_up_some(leaves, stamps, Entries.of(replay, flat), which, ids, self.calls)

        shardings = tuple(map(devices.sharding, returned))
        kept = (*self._changed, *range(k, k + count))  # changed leaves, and stamps, are updated in place
        self._flush = jit_on(
            devices.mesh,
            lambda *operands: devices.local(flush, operand_axes, returned, *operands),
            out_shardings=shardings,
            donate_argnums=(*kept, k + count, k + count + 1),
        )
        some_axes = (*operand_axes, None, *[None] * count)
        self._some = jit_on(
            devices.mesh,
            lambda *operands: devices.local(some, some_axes, returned[:-2], *operands),
            out_shardings=shardings[:-2],
            donate_argnums=kept,
        )
        self._begin = jit_on(devices.mesh, begin, out_shardings=self.shardings)
        rotated = *self.shardings[: count + 2], *self.shardings[count + 2 + len(replay.records) :]
        self._rotate = jit_on(devices.mesh, rotate, out_shardings=(self.everywhere, *rotated))

    def stored_as(self, index: int) -> tuple[RowLayout | None, int]:
        """Returns the layout of a leaf's rows (None: a plain array), and its row axis."""
        table, leaf = divmod(index, len(self.replay.leaves))
        layout = self.layouts[table]
        return None if layout is None or layout.is_plain else layout, self.replay.axes[leaf]

    @functools.cached_property
    def _no_rows(self) -> list[jax.Array]:
        none = [np.full(size, NEVER, np.int32) for size in self.blocks]
        return [place_array(x, self.everywhere, own=True) for x in none]

    def begin(self, leaves: list[jax.Array]) -> UpdateLog[DeviceLogPrograms]:
        """Returns an empty update log for leaves that are up to date."""
        entries, count = list(self._begin(*(leaves[k] for k in self._changed))), len(self.layouts)
        return UpdateLog(self, leaves, entries[:count], entries[count:], self.replay.part)

    def flush(self, log: AnyLog) -> Sequence[jax.Array]:
        return self._run(log, self._flush, *log.steps)

    def rotate(self, log: AnyLog) -> list[Leaf] | None:
        if self._rotate_compilation is not None:
            self._rotate_compilation.finish()
        needs_flush, *rest = self._rotate(*log.entries)
        if bool(local(needs_flush)):
            return None
        count, part = len(log.stamps), self.replay.part
        records = [np.asarray(local(x))[part:] for x in log.steps[2 : 2 + len(self.replay.records)]]

        def moved(x: np.ndarray) -> jax.Array:  # the newer half isn't read
            return place_array(np.concatenate([x, x]), self.everywhere, own=True)

        log.stamps, (now, segment, *segments) = rest[:count], rest[count:]
        log.steps = [now, segment, *map(moved, records), *segments]
        return [place_array(np.full((), part, np.int32), self.everywhere, own=True), *map(moved, records)]

    def prepare(self, log: AnyLog) -> None:
        """Compiles programs for evaluations, for some rows between steps, and for a full log.

        They begin before the programs that take longest (`run.devices.LateFallback`), for which the step that fills the
        log would otherwise wait.
        """
        if self._some_compilation is None:
            entries = list(map(_shape, log.entries))
            some = *map(_shape, log.leaves), *entries, np.int32(0), *map(_shape, self._no_rows)
            what = "what brings rows up to date that wait"
            self._some_compilation = beside(what, lambda: self._some.lower(*some).compile())
            self._rotate_compilation = beside(
                "what a full update log needs", lambda: self._rotate.lower(*entries).compile()
            )

    def catch_up(self, log: AnyLog, rows: Mapping[int, jax.Array]) -> None:
        """Brings some rows up to date; up to `blocks` rows of each table need no program of their own.

        `rows`: for some tables int32[], sorted and distinct, on every device; out of range is no row.
        """
        if rows:
            self._run_some(log, *log.steps, np.int32(-1), *(rows.get(t, none) for t, none in enumerate(self._no_rows)))

    def catch_up_some(self, log: AnyLog, closed: Sequence[Leaf], which: int) -> None:
        self._run_some(log, *closed, np.int32(which), *self._no_rows)

    def _run_some(self, log: AnyLog, *operands: Leaf) -> None:
        """Runs `Deferred.catch_up_some`; the first time it waits for the compilation that `prepare` began."""
        if self._some_compilation is not None:
            self._some_compilation.finish()
        self._run(log, self._some, *operands)

    def _run(self, log: AnyLog, program: Callable[..., Sequence[jax.Array]], *operands: Leaf) -> Sequence[jax.Array]:
        """Runs a program that updates leaves and stamps of all tables in place; returns its other results."""
        try:
            results = program(*log.leaves, *log.stamps, *operands)
        except BaseException as error:
            if log.is_deleted():
                note_lost_rows(error)
            raise
        for k, x in zip(self._changed, results, strict=False):
            log.leaves[k] = x
        changed, stamps = len(self._changed), len(log.stamps)
        log.stamps = list(results[changed : changed + stamps])
        return results[changed + stamps :]


def _shape(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
