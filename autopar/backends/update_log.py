"""`UpdateLog`: what rows that wait have missed, and when they are brought up to date (`ir.deferred`).

A subclass has the rows, on devices (`tables/deferred.py`) or in host memory (`backends/host/update_log.py`), and runs
programs on them. When it does so is decided here.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from autopar import jax_compat
from autopar.backends.deferred import Deferred
from autopar.interrupts import uninterrupted
from autopar.ir.deferred import Replay
from autopar.ir.printer import block_text
from autopar.jax_types import Leaf


class UpdateLogSpec:
    """Says how the rows of some tables are brought up to date: what a planned step knows of its update logs.

    Attributes:
      replay: What steps write down.
      times: How many times some rows are brought up to date until all were.
    """

    times: int

    def __init__(self, deferred: Deferred, tables: Any) -> None:
        """Takes the update that rows wait for; `tables` tells these tables from others, by its text."""
        self._deferred = deferred
        self.replay: Replay = deferred.replay
        self._signature = [str(tables), *block_text(deferred.body)]

    def continues(self, other: UpdateLogSpec) -> bool:
        """Tells whether an update log of another plan is one of this one's, too."""
        return self is other or self._signature == other._signature


Spec = TypeVar("Spec", bound=UpdateLogSpec)


class UpdateLog(abc.ABC, Generic[Spec]):
    """Leaves of tables, some rows lagging behind, and what they missed.

    Attributes:
      older: The older part when it was closed: now, records; None: no row needs it.
      seen: How many times some rows were brought up to its end.
    """

    spec: Spec
    older: list[Any] | None
    seen: int
    is_up_to_date: bool

    @property
    @abc.abstractmethod
    def steps(self) -> Sequence[Leaf]:
        """Returns what steps wrote down: now, segment, records, segments."""

    @abc.abstractmethod
    def _position(self) -> int:
        """Returns where the next step is written, or a later place if steps were done again."""

    @abc.abstractmethod
    def _flush(self) -> None:
        """Brings all rows up to date, in place; the log is empty then."""

    @abc.abstractmethod
    def _turned(self) -> list[Leaf] | None:
        """Makes the newer part the older one. Returns that: now, records; None if a flush has to do it."""

    @abc.abstractmethod
    def _prepare(self, position: int) -> None:
        """Compiles, beside the steps, what is needed once the log is full."""

    @abc.abstractmethod
    def _catch_up_some(self, steps: Sequence[Any], which: int) -> None:
        """Brings some rows up to date with `steps`; `which`: of `spec.times`."""

    def is_deleted(self) -> bool:
        """Tells whether a step got the rows, and updated them in place."""
        return False

    @jax_compat.outside_traces()
    def bring_up_to_date(self) -> None:
        """Brings all rows up to date. The update log is empty then, and goes on with the next step."""
        if not self.is_up_to_date or self.is_deleted():
            self._flush()
            self.is_up_to_date = True

    @uninterrupted
    @jax_compat.outside_traces()
    def make_room(self) -> None:
        """Makes room for a step, and brings some rows up to the end of the older part, so that it can be left in
        time."""
        times, part = self.spec.times, self.spec.replay.part
        if self._position() >= self.spec.replay.length:
            older = self._turned()
            if older is None:
                self._flush()
                self.is_up_to_date = True
            else:
                self.older, self.seen = older, 0
        position = self._position()
        self._prepare(position)
        if self.older is None:
            return
        now, *records = self.older
        _, segment, *rest = self.steps
        closed = [now, segment, *records, *rest[len(records) :]]
        # Evenly over the newer part's steps: all rows are brought up when it is full.
        for which in range(self.seen, times * (position + 1 - part) // part):
            self._catch_up_some(closed, which)
            self.seen = which + 1
        if self.seen == times:
            self.older = None
