"""`mark`: where this process is in its work, for the messages and the watchdog that need to know.

The step's runner marks each step, and each wait for other ranks before it begins. A mark is a store and a copy of a
few bytes (half a microsecond); it is read by the hooks that report a fault, by the watchdog's thread, and, from a
page of memory that outlives a killed process, by its supervisor (`supervise.py`).

A program with collectives runs on while Python does other things, or waits for its result inside JAX, unmarked. So
whoever dispatches one (`backends/watched.py`) also leaves a result of it here: as long as that isn't ready, the process
waits.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from autopar.jax_types import Leaf, Request

#: What a process does: it computes (or runs the user's code), it waits for other ranks, for servers, which answer as
#: long as their process is there, it compiles a program, for which no time can be foreseen, or, a dedicated server, it
#: serves: it has nothing to do until somebody asks.
MarkKind = Literal["computes", "waits", "pulls", "compiles", "serves"]
KINDS: tuple[MarkKind, ...] = ("computes", "waits", "pulls", "compiles", "serves")

#: The number of the file descriptor of the page that is shared with the supervisor.
PAGE_VARIABLE = "AUTOPAR_PROGRESS_FD"

#: The page: flags, step, length of the text; then the text. `supervise.py` reads it.
PAGE = struct.Struct("<qqq")
PAGE_BYTES = 4096
#: Flags: autopar was imported; the fault was reported by the rank itself; all ranks have left in good order; the rank
#: is a dedicated server.
STARTED, REPORTED, LEFT, SERVES = 1, 2, 4, 8

#: Whom a wait needs where that isn't said: any rank.
ANYBODY = range(1 << 31)

#: Longer texts are cut.
TEXT_BYTES = 64


@dataclass(frozen=True)
class Mark:
    """One mark: the step (-1 before the first one), what is done, which kind of work that is, since when, by
    `time.monotonic()`, and of a wait for which ranks."""

    step: int
    what: str
    kind: MarkKind
    time_s: float
    needs: range = ANYBODY

    def __str__(self) -> str:
        return describe_mark(self.step, self.what)


def describe_mark(step: int, what: str) -> str:
    """Says where a rank is: "in step 17 (row exchange)", "before the first step"."""
    return f"in step {step} ({what})" if step >= 0 else what


class Progress:
    """The last mark of this process.

    One a process: marks are made by whoever works, and read by hooks, which belong to the process.
    """

    def __init__(self) -> None:
        self._last = Mark(-1, "before the first step", "computes", time.monotonic())
        self._page: mmap.mmap | None = None
        self._flags = 0
        #: Of programs that were dispatched and may be under way: a result, and the ranks that they need.
        self._under_way: tuple[tuple[Request, range], ...] = ()
        #: Whether there is a watchdog, which asks what is `seen`.
        self.watched = False

    def mark(self, step: int, what: str, kind: MarkKind = "computes", needs: range = ANYBODY) -> None:
        """Says where this process is.

        Args:
          step: The number of the step, from 0.
          what: A few words, from a small number of texts: "row exchange".
          kind: "waits" before a wait for other ranks (who only waits is not blamed for standing still), "compiles"
            before a compilation, else "computes".
          needs: The ranks that a wait is for.
        """
        self._last = Mark(step, what, kind, time.monotonic(), needs)
        if self._page is not None:
            text = what.encode()[:TEXT_BYTES]
            PAGE.pack_into(self._page, 0, self._flags, step, len(text))
            self._page[PAGE.size : PAGE.size + len(text)] = text

    @contextlib.contextmanager
    def during(self, what: str, kind: MarkKind = "computes", needs: range = ANYBODY) -> Iterator[None]:
        """Marks what a block does for as long as it runs, in the same step and in profiles.

        At its end that of before is made again; not after an exception, which is told where it was raised.
        """
        from jax.profiler import TraceAnnotation  # supervisors import this module, and no JAX

        before = self._last
        self.mark(before.step, what, kind, needs)
        with TraceAnnotation(f"autopar: {what}"):
            yield
        self.mark(before.step, before.what, before.kind, before.needs)

    @property
    def last(self) -> Mark:
        return self._last

    def dispatched(self, result: Leaf, needs: range = ANYBODY) -> None:
        """Says that a program is under way. `result`: a `jax.Array` that it makes, and nobody else has: a small one."""
        if self.watched:
            self._under_way = (*self._unfinished(), (result, needs))

    def _unfinished(self) -> list[tuple[Any, range]]:
        return [(result, needs) for result, needs in self._under_way if not _is_ready(result)]

    @property
    def seen(self) -> Mark:
        """The last mark; a wait, as long as a dispatched program is under way."""
        last = self.last
        if last.kind != "computes" or not (found := [needs for _, needs in self._unfinished()]):
            return last
        needs = range(min(some.start for some in found), max(some.stop for some in found))
        return replace(last, what=f"{last.what}, on the devices", kind="waits", needs=needs)

    def settle(self) -> None:
        """Waits until all programs that were dispatched have ended."""
        while self._unfinished():
            time.sleep(0.02)

    def share(self, descriptor: int) -> None:
        """Writes marks to a supervisor's page from now on, too."""
        os.set_inheritable(descriptor, False)
        self._page = mmap.mmap(descriptor, PAGE_BYTES)
        self.flag(STARTED)
        self.mark(self._last.step, self._last.what, self._last.kind)

    def flag(self, flag: int) -> None:
        """Tells the supervisor something, if there is one."""
        self._flags |= flag
        if self._page is not None:
            PAGE.pack_into(self._page, 0, self._flags, *PAGE.unpack_from(self._page, 0)[1:])


def _is_ready(result: Leaf) -> bool:
    """Returns whether an array is there. One that is gone counts: its backend is."""
    try:
        return result.is_ready()
    except RuntimeError:
        return True


#: The progress of this process.
PROGRESS = Progress()
mark = PROGRESS.mark
