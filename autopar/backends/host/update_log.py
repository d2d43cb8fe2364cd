"""Deferred rows in host memory: what the steps wrote down, and flushing it (`ir.deferred`).

Each rank flushes its own shard, block by block; nothing travels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from autopar import jax_compat
from autopar.backends.background import Compilation, beside
from autopar.backends.emit import deferred_of
from autopar.backends.host.storage import HostRows, rows_back, rows_first
from autopar.backends.segments import Entries, close
from autopar.backends.update_log import UpdateLog, UpdateLogSpec
from autopar.errors import note_lost_rows
from autopar.interrupts import uninterrupted
from autopar.ir.layout import RowLayout
from autopar.ir.program import Equation
from autopar.jax_types import Leaf

#: Elements of the widest leaf that are brought up to date at a time, by a flush and between steps.
_BLOCK_ELEMENTS, _SOME_ELEMENTS = 1 << 19, 1 << 15


class HostUpdateLogSpec(UpdateLogSpec):
    """Brings a family's rows in host memory up to date.

    Args:
      flush: The equation of the planned step that flushes the family's update log.
      device: A device of this process that shares the host's memory; None: the default one.
    """

    def __init__(self, flush: Equation, device: Any) -> None:
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
        self.times = deferred.times(elements)
        self._up_to_date = jax.jit(up_to_date)
        self._caught_up = jax.jit(caught_up)
        self._close = jax.jit(lambda *entries: close(self.replay, Entries.of(self.replay, entries)))
        self._stamps = jax.jit(lambda *changed: deferred.stamps(changed))
        self._compilation: Compilation[None] | None = None

    def begin(self, leaves: Sequence[HostRows], layout: RowLayout, rank: int) -> HostUpdateLog:
        """Begins an empty update log for leaves whose rows are up to date."""
        stamps = HostRows.empty((layout.extent,), np.dtype(np.int32), 0, layout, rank, "stamps of deferred rows")
        changed = leaves[: self.replay.changed]
        for start in range(0, layout.shard_rows, self._rows(leaves, _BLOCK_ELEMENTS)):
            some = slice(start, start + self._rows(leaves, _BLOCK_ELEMENTS))
            with jax.default_device(self._device):
                new_stamps = self._stamps(*(rows_back(leaf.rows[some], leaf.axis) for leaf in changed))
            stamps.rows[some] = np.asarray(new_stamps)
        records = [np.zeros((self.replay.length, *t.shape), t.dtype) for t in self.replay.records]
        segments = [np.zeros(t.shape, t.dtype) for t in self.replay.segments]
        now, segment = np.full((), self.replay.part, np.int32), np.zeros((), np.int32)
        return HostUpdateLog(self, list(leaves), stamps, [now, segment, *records, *segments])

    def prepare(self, leaves: Sequence[HostRows], entries: Sequence[np.ndarray]) -> None:
        """Compiles, beside the steps, what they need once the newer part is full."""
        if self._compilation is not None:
            return
        rows = self._rows(leaves, _SOME_ELEMENTS)
        some = [rows_back(np.broadcast_to(leaf.rows[:1], (rows, *leaf.rows.shape[1:])), leaf.axis) for leaf in leaves]
        operands = [*some, np.zeros(rows, np.int32), *entries]
        closing, caught_up = ([jax.ShapeDtypeStruct(x.shape, x.dtype) for x in xs] for xs in (entries, operands))

        def compile_all() -> None:
            self._close.lower(*closing).compile()
            self._caught_up.lower(*caught_up).compile()

        with jax.default_device(self._device):
            self._compilation = beside("what a full update log on hosts needs", compile_all)

    def flush(self, leaves: Sequence[HostRows], stamps: HostRows, entries: Sequence[Leaf]) -> None:
        """Brings all rows up to date, in place. `entries`: now, segment, records, segments."""
        rows = self._rows(leaves, _BLOCK_ELEMENTS)
        self._replace(leaves, stamps, np.arange(len(stamps.rows)), rows, self._up_to_date, *entries)

    def catch_up(self, leaves: Sequence[HostRows], stamps: HostRows, entries: Sequence[Leaf], rows: np.ndarray) -> None:
        """Brings these rows up to date, in place."""
        lagging = rows[stamps.rows[rows] < entries[0]]
        self._replace(leaves, stamps, lagging, self._rows(leaves, _SOME_ELEMENTS), self._caught_up, *entries)

    def catch_up_some(self, leaves: Sequence[HostRows], stamps: HostRows, closed: Sequence[Any], which: int) -> None:
        """Brings some rows, in place, up to the end of the older part; arguments as in `Deferred.catch_up_some`."""
        numbers = np.arange(which, len(stamps.rows), self.times)
        lagging = numbers[self._deferred.lags(stamps.rows[numbers], closed[1])]
        self._replace(leaves, stamps, lagging, self._rows(leaves, _SOME_ELEMENTS), self._caught_up, *closed)

    def _replace(
        self,
        leaves: Sequence[HostRows],
        stamps: HostRows,
        taken: np.ndarray,
        count: int,
        program: Callable[..., Sequence[Any]],
        *operands: Leaf,
    ) -> None:
        """Replaces rows and their stamps, `count` at a time, by what a program makes of them."""
        taken = taken[np.argsort(stamps.rows[taken], kind="stable")]
        has_begun = False
        try:
            for start in range(0, taken.size, count):
                some = taken[start : start + count]
                padded = np.concatenate([some, np.repeat(some[-1:], count - some.size)])  # one program for all
                rows = [rows_back(leaf.rows[padded], leaf.axis) for leaf in leaves]
                with jax.default_device(self._device):
                    *new, ends = map(np.asarray, program(*rows, stamps.rows[padded], *operands))
                has_begun = True
                for leaf, x in zip(leaves, new, strict=False):
                    leaf.rows[some] = rows_first(x, leaf.axis)[: some.size]
                stamps.rows[some] = ends[: some.size]
        except BaseException as error:
            if has_begun:  # the update log's steps would be replayed a second time on these rows
                for leaf in leaves:
                    leaf.generation += 1
                note_lost_rows(error)
            raise

    def turn(self, stamps: HostRows, entries: Sequence[Leaf]) -> tuple[list[Leaf], list[np.ndarray]] | None:
        """Makes the newer part the older one, stamps in place: the entries, and those of the older part (now, records);
        None if a flush has to do it (`Deferred.turn`)."""
        if self._compilation is not None:
            self._compilation.finish()
        with jax.default_device(self._device):
            takes_all, dropped, segment, segments = jax.tree.map(np.asarray, self._close(*entries))
        if takes_all:
            return None
        part, count = self.replay.part, len(self.replay.records)
        records = [np.concatenate([x[part:], x[part:]]) for x in entries[2 : 2 + count]]  # what is newer isn't read
        stamps.rows += np.where(stamps.rows < 0, dropped, -np.int32(part))
        now = np.full((), part, np.int32)
        return [now, segment, *records, *segments], [now, *map(np.copy, records)]

    def _rows(self, leaves: Sequence[HostRows], elements: int) -> int:
        """Returns the number of rows of which no leaf has more than so many elements."""
        widest = max(leaf.rows[:1].size for leaf in leaves)
        return min(len(leaves[0].rows), max(1, elements // max(1, widest)))


@dataclass(eq=False, repr=False)
class HostUpdateLog(UpdateLog[HostUpdateLogSpec]):
    """A family's shards in host memory, and what they missed.

    Attributes:
      leaves: Changed ones, then those that are only read.
      stamps: By row the step up to which it has moved.
      entries: now, segment, records, segments.
    """

    spec: HostUpdateLogSpec
    leaves: Sequence[HostRows]
    stamps: HostRows
    entries: list[Leaf]
    older: list[Any] | None = None
    seen: int = 0
    is_up_to_date: bool = True

    def __post_init__(self) -> None:
        # Those that are only read as well: nobody is to change them before the update was replayed.
        for leaf in self.leaves:
            leaf.log = self

    @property
    def steps(self) -> Sequence[Leaf]:
        return self.entries

    def _position(self) -> int:
        return int(self.entries[0])

    @uninterrupted
    def _flush(self) -> None:
        self.spec.flush(self.leaves, self.stamps, self.entries)
        part = np.full((), self.spec.replay.part, np.int32)
        self.entries[:2], self.older = [part, np.zeros((), np.int32)], None  # there are no segments then

    def _turned(self) -> list[Leaf] | None:
        turned = self.spec.turn(self.stamps, self.entries)
        if turned is None:
            return None
        self.entries, older = turned
        return older

    def _prepare(self, position: int) -> None:
        if position >= self.spec.replay.part + self.spec.replay.prepared:
            self.spec.prepare(self.leaves, self.entries)

    def _catch_up_some(self, steps: Sequence[Any], which: int) -> None:
        self.spec.catch_up_some(self.leaves, self.stamps, steps, which)

    def end(self) -> None:
        """Brings all rows up to date, and lets the leaves go: a next step begins another update log."""
        self.bring_up_to_date()
        for leaf in self.leaves:
            leaf.log = None

    @uninterrupted
    @jax_compat.outside_traces()
    def catch_up(self, rows: np.ndarray) -> None:
        """Brings some rows of this rank's shard up to date."""
        if not self.is_up_to_date:
            self.spec.catch_up(self.leaves, self.stamps, self.entries, rows)

    def wrote(self, entries: Sequence[Leaf]) -> None:
        """Takes the entries of a step that was written down."""
        self.entries = list(map(np.asarray, entries))
        self.is_up_to_date = False

    def belongs_to(self, spec: HostUpdateLogSpec, leaves: Sequence[HostRows]) -> bool:
        """Tells whether a step can go on with it: these are its leaves, and it is kept in the same way."""
        return (
            spec.continues(self.spec)
            and len(leaves) == len(self.leaves)
            and all(a is b for a, b in zip(leaves, self.leaves, strict=True))
        )


def common_host_log(leaves: Sequence[HostRows], spec: HostUpdateLogSpec) -> HostUpdateLog | None:
    """Returns the update log that a step on these leaves can go on with; others are brought up to date, and given
    up."""
    first = leaves[0].log
    if isinstance(first, HostUpdateLog) and first.belongs_to(spec, leaves):
        return first
    for leaf in leaves:
        leaf.bring_up_to_date()
        leaf.log = None
    return None
