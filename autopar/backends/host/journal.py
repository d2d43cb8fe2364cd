"""Deferred rows in host memory: what the steps wrote down, and flushing it (`ir.deferred`).

Each rank flushes its own share, block by block; nothing travels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from autopar.backends.emit import deferred_of
from autopar.backends.host.storage import HostRows, rows_back, rows_first
from autopar.ir.layout import RowLayout
from autopar.ir.printer import format_block
from autopar.ir.program import Equation

#: Elements of the widest leaf that are brought up to date at a time.
_BLOCK_ELEMENTS = 1 << 19


class HostJournaling:
    """How a family's rows are brought up to date.

    Args:
      flush: The equation of the planned step that flushes the family's journal.
      device: A device of this process that shares the host's memory; None: the default one.
    """

    def __init__(self, flush: Equation, device: Any) -> None:
        deferred = deferred_of(flush)
        self.replay = deferred.replay
        self.signature = [str(deferred.replay), *format_block(deferred.body)]
        self._device = device
        m = len(self.replay.leaves)

        def run(*operands: Any) -> tuple[Any, ...]:
            rows, (stamps, now, *records) = operands[:m], operands[m:]
            new = deferred.catch_up(rows, stamps, now, records)
            return *new, deferred.stamps(new)

        self._run = jax.jit(run)
        self._stamps = jax.jit(lambda *changed: deferred.stamps(changed))

    def begin(self, leaves: Sequence[HostRows], layout: RowLayout, rank: int) -> HostJournal:
        """An empty journal for leaves whose rows are up to date."""
        stamps = HostRows.empty((layout.extent,), np.dtype(np.int32), 0, layout, rank, "stamps of deferred rows")
        changed = leaves[: self.replay.changed]
        for start, end in self._blocks(leaves):
            with jax.default_device(self._device):
                found = self._stamps(*(rows_back(leaf.rows[start:end], leaf.axis) for leaf in changed))
            stamps.rows[start:end] = np.asarray(found)
        records = [np.zeros((self.replay.length, *t.shape), t.dtype) for t in self.replay.records]
        return HostJournal(self, list(leaves), stamps, np.zeros((), np.int32), records)

    def flush(self, leaves: Sequence[HostRows], stamps: HostRows, now: Any, records: Sequence[Any]) -> None:
        """Bring all rows up to date, in place."""
        rows = self._rows(leaves)
        for start, end in self._blocks(leaves):
            some = [_padded(leaf.rows[start:end], rows) for leaf in leaves]
            stamped = stamps.rows[start:end]
            waiting = np.concatenate([stamped, np.full((rows - stamped.size,), now, np.int32)])
            shaped = [rows_back(x, leaf.axis) for x, leaf in zip(some, leaves, strict=True)]
            with jax.default_device(self._device):
                *new, ends = self._run(*shaped, waiting, np.int32(now), *records)
            for leaf, x in zip(leaves, new, strict=False):
                leaf.rows[start:end] = rows_first(np.asarray(x), leaf.axis)[: end - start]
            stamps.rows[start:end] = np.asarray(ends)[: end - start]

    def _rows(self, leaves: Sequence[HostRows]) -> int:
        """Rows of a block."""
        widest = max(leaf.rows[:1].size for leaf in leaves)
        return min(len(leaves[0].rows), max(1, _BLOCK_ELEMENTS // max(1, widest)))

    def _blocks(self, leaves: Sequence[HostRows]) -> list[tuple[int, int]]:
        share, rows = len(leaves[0].rows), self._rows(leaves)
        return [(start, min(start + rows, share)) for start in range(0, share, rows)]


class HostJournal:
    """A family's shares, some rows lagging behind, and what they missed.

    Attributes:
      leaves: Changed ones, then those that are only read.
      stamps: By row the step up to which it has moved.
      now: How many steps are written down.
      records: What they wrote.
    """

    def __init__(
        self, journaling: HostJournaling, leaves: list[HostRows], stamps: HostRows, now: Any, records: list[Any]
    ) -> None:
        self.journaling = journaling
        self.leaves = leaves
        self.stamps = stamps
        self.now = now
        self.records = records
        for leaf in leaves[: journaling.replay.changed]:
            leaf.journal = self

    def settle(self) -> None:
        """Bring all rows up to date."""
        if int(self.now):
            self.journaling.flush(self.leaves, self.stamps, int(self.now), self.records)
            self.now = np.zeros((), np.int32)

    def wrote(self, now: Any, records: Sequence[Any]) -> None:
        """A step was written down."""
        self.now, self.records = np.asarray(now), list(map(np.asarray, records))

    def belongs_to(self, journaling: HostJournaling, leaves: Sequence[HostRows]) -> bool:
        """Whether a step can go on with it: these are its leaves, and it is kept in the same way."""
        if self.journaling is not journaling and self.journaling.signature != journaling.signature:
            return False
        return len(leaves) == len(self.leaves) and all(a is b for a, b in zip(leaves, self.leaves, strict=True))


def common_journal(leaves: Sequence[HostRows], journaling: HostJournaling) -> HostJournal | None:
    """The journal that a step on these leaves can go on with. Others are settled, and given up."""
    first = leaves[0].journal
    if first is not None and first.belongs_to(journaling, leaves):
        return first
    for leaf in leaves:
        leaf.settle()
        leaf.journal = None
    return None


def _padded(rows: np.ndarray, count: int) -> np.ndarray:
    """Rows, and copies of the last one up to a number."""
    if len(rows) == count:
        return rows
    return np.concatenate([rows, np.repeat(rows[-1:], count - len(rows), axis=0)])
