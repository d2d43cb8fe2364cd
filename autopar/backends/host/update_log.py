"""Deferred rows in host memory: what the steps wrote down, and flushing it (`ir.deferred`).

Each rank flushes its own shard, block by block; nothing travels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np

from autopar.backends.background import Compilation, beside
from autopar.backends.deferred import NEVER
from autopar.backends.emit import deferred_of
from autopar.backends.host.storage import HostRows, rows_back
from autopar.backends.segments import Entries, close
from autopar.backends.update_log import AnyLog, LogPrograms, UpdateLog
from autopar.errors import note_lost_rows
from autopar.ir.program import Equation
from autopar.jax_types import Array, Device, Leaf

#: Elements of the widest leaf that are brought up to date at a time, by a flush and between steps.
_BLOCK_ELEMENTS, _SOME_ELEMENTS = 1 << 19, 1 << 15
#: Stamps in a line of the processor's cache.
_LINE = 16


class HostLogPrograms(LogPrograms):
    """Brings a family's rows in host memory up to date, as `flush` does in the planned step, on a device that shares
    the host's memory (None: the default one)."""

    def __init__(self, flush: Equation, device: Device) -> None:
        deferred = deferred_of(flush)
        super().__init__(deferred, deferred.replay)
        self._device = device
        m = len(self.replay.leaves)

        def up_to_date(*operands: Leaf) -> tuple[Leaf, ...]:
            new = deferred.catch_up(operands[:m], operands[m], Entries.of(self.replay, operands[m + 1 :]))
            return *new, deferred.stamps(new)

        def caught_up(*operands: Leaf) -> tuple[Leaf, ...]:
            return deferred.caught_up(operands[:m], operands[m], Entries.of(self.replay, operands[m + 1 :]))

        elements = max(leaf.type.size for leaf in flush.inputs[: self.replay.changed])
        self.calls = deferred.calls(elements)
        self._up_to_date = jax.jit(up_to_date)
        self._caught_up = jax.jit(caught_up)
        self._close = jax.jit(lambda *entries: close(self.replay, Entries.of(self.replay, entries)))
        self._stamps = jax.jit(lambda *changed: deferred.stamps(changed))
        self._compilation: Compilation[None] | None = None

    def begin(self, leaves: list[HostRows]) -> UpdateLog[HostLogPrograms]:
        """Begins an empty update log for leaves whose rows are up to date."""
        layout, rank = leaves[0].layout, leaves[0].rank
        stamps = HostRows.empty((layout.extent,), np.dtype(np.int32), 0, layout, rank, "stamps of deferred rows")
        changed = leaves[: self.replay.changed]
        for start in range(0, layout.held_on(rank), self._rows(leaves, _BLOCK_ELEMENTS)):
            some = slice(start, start + self._rows(leaves, _BLOCK_ELEMENTS))
            with jax.default_device(self._device):
                new_stamps = self._stamps(*(rows_back(leaf.rows[some], leaf.axis) for leaf in changed))
            stamps.rows[some] = np.asarray(new_stamps)
        records = [np.zeros((self.replay.length, *t.shape), t.dtype) for t in self.replay.records]
        segments = [np.zeros(t.shape, t.dtype) for t in self.replay.segments]
        now, segment = np.full((), self.replay.part, np.int32), np.zeros((), np.int32)
        log: UpdateLog[HostLogPrograms] = UpdateLog(
            self, leaves, [stamps], [now, segment, *records, *segments], self.replay.part
        )
        # Those that are only read as well: nobody is to change them before the update was replayed.
        for leaf in leaves:
            leaf.log = log
        return log

    def prepare(self, log: AnyLog) -> None:
        if self._compilation is not None:
            return
        rows = self._rows(log.leaves, _SOME_ELEMENTS)
        some = [np.broadcast_to(leaf.rows[:1], (rows, *leaf.rows.shape[1:])) for leaf in log.leaves]
        operands = [*map(rows_back, some, (leaf.axis for leaf in log.leaves)), np.zeros(rows, np.int32), *log.steps]
        closing, caught_up = ([jax.ShapeDtypeStruct(x.shape, x.dtype) for x in xs] for xs in (log.steps, operands))

        def compile_all() -> None:
            self._close.lower(*closing).compile()
            self._caught_up.lower(*caught_up).compile()

        with jax.default_device(self._device):
            self._compilation = beside("what a full update log on hosts needs", compile_all)

    def flush(self, log: AnyLog) -> Sequence[Leaf]:
        rows = np.arange(len(log.stamps[0].rows))
        self._replace(log, rows, _BLOCK_ELEMENTS, self._up_to_date, log.steps)
        return np.full((), self.replay.part, np.int32), np.zeros((), np.int32)  # there are no segments then

    def catch_up(self, log: AnyLog, rows: np.ndarray) -> None:
        lagging = rows[log.stamps[0].rows[rows] < log.steps[0]]
        self._replace(log, lagging, _SOME_ELEMENTS, self._caught_up, log.steps)

    def catch_up_some(self, log: AnyLog, closed: Sequence[Leaf], which: int) -> None:
        lagging = rows_of_call(log.stamps[0].rows, which, self.calls, lambda some: self._deferred.lags(some, closed[1]))
        self._replace(log, lagging, _SOME_ELEMENTS, self._caught_up, closed)

    def _replace(
        self,
        log: AnyLog,
        taken: np.ndarray,
        elements: int,
        program: Callable[..., Sequence[Array]],
        steps: Sequence[Leaf],
    ) -> None:
        """Replaces rows and their stamps, so many elements of the widest leaf at a time, by what a program makes of
        them."""
        leaves, (stamps,), count = log.leaves, log.stamps, self._rows(log.leaves, elements)
        taken = taken[np.argsort(stamps.rows[taken], kind="stable")]
        has_begun = False
        try:
            for start in range(0, taken.size, count):
                some = taken[start : start + count]
                padded = np.concatenate([some, np.repeat(some[-1:], count - some.size)])  # one program for all
                rows = [rows_back(leaf.rows[padded], leaf.axis) for leaf in leaves]
                begin = np.concatenate([stamps.rows[some], np.full(count - some.size, NEVER, np.int32)])
                with jax.default_device(self._device):
                    *new, ends = map(np.asarray, program(*rows, begin, *steps))
                has_begun = True
                for leaf, x in zip(leaves, new, strict=False):
                    leaf.commit(some, some.size, x)
                stamps.commit(some, some.size, ends)
        except BaseException as error:
            if has_begun:  # the update log's steps would be replayed a second time on these rows
                for leaf in leaves:
                    leaf.generation += 1
                note_lost_rows(error)
            raise

    def rotate(self, log: AnyLog) -> list[Leaf] | None:
        if self._compilation is not None:
            self._compilation.finish()
        with jax.default_device(self._device):
            needs_flush, dropped, segment, segments = jax.tree.map(np.asarray, self._close(*log.steps))
        if needs_flush:
            return None
        (stamps,), part, count = log.stamps, self.replay.part, len(self.replay.records)
        records = [np.concatenate([x[part:], x[part:]]) for x in log.steps[2 : 2 + count]]  # what is newer isn't read
        stamps.rows += np.where(stamps.rows < 0, dropped, -np.int32(part))
        stamps.has_written()
        now = np.full((), part, np.int32)
        log.steps = [now, segment, *records, *segments]
        return [now, *map(np.copy, records)]

    def _rows(self, leaves: Sequence[HostRows], elements: int) -> int:
        """Returns the number of rows of which no leaf has more than so many elements."""
        widest = max(leaf.rows[:1].size for leaf in leaves)
        return min(len(leaves[0].rows), max(1, elements // max(1, widest)))


def rows_of_call(stamps: np.ndarray, which: int, calls: int, lags: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Returns the rows that lag of those that one of some calls looks at; together these look at each row once.

    `stamps`: int32[rows]. Calls take turns at lines of the processor's cache, and at single rows of what is left.
    """
    together = _LINE * calls
    whole = len(stamps) // together * together
    there = np.flatnonzero(lags(stamps[:whole].reshape(-1, calls, _LINE)[:, which]))
    left = np.arange(whole + which, len(stamps), calls)
    return np.concatenate([there // _LINE * together + which * _LINE + there % _LINE, left[lags(stamps[left])]])


def common_host_log(leaves: list[HostRows], programs: HostLogPrograms) -> UpdateLog[HostLogPrograms]:
    """Returns the update log that a step on these leaves goes on with; others are brought up to date, and given up,
    and one begins."""
    log = leaves[0].log
    if log is not None and programs.continues(log.programs) and leaves == log.leaves:
        return log
    for leaf in leaves:
        leaf.without_log()
    return programs.begin(leaves)
