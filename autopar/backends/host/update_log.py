"""Deferred rows in host memory: what the steps wrote down, and flushing it (`ir.deferred`).

Each rank flushes its own shard, block by block; nothing travels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from autopar.backends.deferred import Entries
from autopar.backends.emit import deferred_of
from autopar.backends.host.storage import HostRows, rows_back, rows_first
from autopar.errors import note_lost_rows
from autopar.interrupts import uninterrupted
from autopar.ir.layout import RowLayout
from autopar.ir.printer import format_block
from autopar.ir.program import Equation

#: Elements of the widest leaf that are brought up to date at a time.
_BLOCK_ELEMENTS = 1 << 19


class HostUpdateLogSpec:
    """How a family's rows are brought up to date.

    Args:
      flush: The equation of the planned step that flushes the family's update log.
      device: A device of this process that shares the host's memory; None: the default one.
    """

    def __init__(self, flush: Equation, device: Any) -> None:
        deferred = deferred_of(flush)
        self.replay = deferred.replay
        self.signature = [str(deferred.replay), *format_block(deferred.body)]
        self._device = device
        m = len(self.replay.leaves)

        def run(*operands: Any) -> tuple[Any, ...]:
            rows, stamps, segment = operands[:m], operands[m], operands[m + 1]
            new = deferred.catch_up(rows, stamps, Entries.of(self.replay, operands[m + 2 :]))
            return *new, deferred.stamps(new, segment)

        def close(*flat: Any) -> tuple[Any, ...]:
            takes_all, segment, segments = deferred.close(Entries.of(self.replay, flat))
            return takes_all, segment, *segments

        self._run = jax.jit(run)
        self._close = jax.jit(close)
        self._stamps = jax.jit(lambda *changed: deferred.stamps(changed))

    def begin(self, leaves: Sequence[HostRows], layout: RowLayout, rank: int) -> HostUpdateLog:
        """An empty update log for leaves whose rows are up to date."""
        stamps = HostRows.empty((layout.extent,), np.dtype(np.int32), 0, layout, rank, "stamps of deferred rows")
        changed = leaves[: self.replay.changed]
        for start in range(0, layout.shard_rows, self._rows(leaves)):
            some = slice(start, start + self._rows(leaves))
            with jax.default_device(self._device):
                new_stamps = self._stamps(*(rows_back(leaf.rows[some], leaf.axis) for leaf in changed))
            stamps.rows[some] = np.asarray(new_stamps)
        records = [np.zeros((self.replay.length, *t.shape), t.dtype) for t in self.replay.records]
        segments = [np.zeros(t.shape, t.dtype) for t in self.replay.segments]
        none = np.zeros((), np.int32)
        return HostUpdateLog(self, list(leaves), stamps, [none, none, *records, *segments])

    def flush(self, leaves: Sequence[HostRows], stamps: HostRows, entries: Sequence[Any], *, full: bool) -> list[Any]:
        """Bring rows (scale-only ones, too, if `full`) up to date, in place; now, segment and segments after it.

        `entries`: now, segment, records, segments.
        """
        with jax.default_device(self._device):
            takes_all, segment, *segments = map(np.asarray, self._close(*entries))
        if full or bool(takes_all):
            taken, segment = np.arange(len(stamps.rows)), np.zeros((), np.int32)
        else:
            taken = np.flatnonzero(stamps.rows >= 0)
        taken = taken[np.argsort(stamps.rows[taken], kind="stable")]
        count = self._rows(leaves)
        has_begun = False
        try:
            for start in range(0, taken.size, count):
                some = taken[start : start + count]
                padded = np.concatenate([some, np.repeat(some[-1:], count - some.size)])  # one program for all
                rows = [rows_back(leaf.rows[padded], leaf.axis) for leaf in leaves]
                with jax.default_device(self._device):
                    *new, ends = map(np.asarray, self._run(*rows, stamps.rows[padded], segment, *entries))
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
        return [np.zeros((), np.int32), segment, *segments]

    def _rows(self, leaves: Sequence[HostRows]) -> int:
        """Rows that are brought up to date at a time."""
        widest = max(leaf.rows[:1].size for leaf in leaves)
        return min(len(leaves[0].rows), max(1, _BLOCK_ELEMENTS // max(1, widest)))


@dataclass(eq=False, repr=False)
class HostUpdateLog:
    """A family's shards, some rows lagging behind, and what they missed.

    Attributes:
      leaves: Changed ones, then those that are only read.
      stamps: By row the step up to which it has moved.
      entries: now, segment, records, segments.
    """

    spec: HostUpdateLogSpec
    leaves: Sequence[HostRows]
    stamps: HostRows
    entries: list[Any]
    _is_up_to_date: bool = True

    def __post_init__(self) -> None:
        # Those that are only read as well: nobody is to change them before the update was replayed.
        for leaf in self.leaves:
            leaf.log = self

    @uninterrupted
    def bring_up_to_date(self) -> None:
        """Bring all rows up to date."""
        if not self._is_up_to_date:
            now, segment, *_ = self.spec.flush(self.leaves, self.stamps, self.entries, full=True)
            self.entries[:2] = [now, segment]  # there are no segments then
            self._is_up_to_date = True

    def wrote(self, entries: Sequence[Any]) -> None:
        """A step was written down."""
        self.entries = list(map(np.asarray, entries))
        self._is_up_to_date = False

    def belongs_to(self, spec: HostUpdateLogSpec, leaves: Sequence[HostRows]) -> bool:
        """Whether a step can go on with it: these are its leaves, and it is kept in the same way."""
        if self.spec is not spec and self.spec.signature != spec.signature:
            return False
        return len(leaves) == len(self.leaves) and all(a is b for a, b in zip(leaves, self.leaves, strict=True))


def common_host_log(leaves: Sequence[HostRows], spec: HostUpdateLogSpec) -> HostUpdateLog | None:
    """The update log that a step on these leaves can go on with. Others are brought up to date, and given up."""
    first = leaves[0].log
    if isinstance(first, HostUpdateLog) and first.belongs_to(spec, leaves):
        return first
    for leaf in leaves:
        leaf.bring_up_to_date()
        leaf.log = None
    return None
