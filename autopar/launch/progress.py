"""`mark`: where this process is in its work, for messages and the watchdog.

A step's runner marks each step, and each wait for other ranks before it begins. A mark stores a few bytes (half a
microsecond). It is read by the hooks that report a fault, by the watchdog's thread, and by the process's supervisor
(`supervise.py`), from a page of memory that outlives a killed process.

A program with collectives runs on, unmarked, while Python does other things. Whoever dispatches one
(`backends/global_arrays.py`) also leaves a result of it here: until that is ready, the process waits.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from autopar.jax_types import Leaf, Request

#: What a process does. "computes": also the user's code. "waits": for other ranks. "pulls": waits for servers, which
#: answer as long as their process lives. "compiles": takes no foreseeable time. "serves": a dedicated server, which has
#: nothing to do until somebody asks.
MarkKind = Literal["computes", "waits", "pulls", "compiles", "serves"]
KINDS: tuple[MarkKind, ...] = ("computes", "waits", "pulls", "compiles", "serves")

#: The number of the file descriptor of the page that is shared with the supervisor.
PAGE_VARIABLE = "AUTOPAR_PROGRESS_FD"

#: The page: flags, step, length of the text; then the text. `supervise.py` reads it.
PAGE = struct.Struct("<qqq")
PAGE_BYTES = 4096
#: Flags: autopar was imported; the rank itself reported the fault; all ranks left in good order; the rank is a server.
STARTED, REPORTED, LEFT, SERVES = 1, 2, 4, 8

#: The ranks that a wait needs by default.
ANYBODY = range(1 << 31)

#: Longer texts are cut.
TEXT_BYTES = 64


@dataclass(frozen=True)
class Mark:
    """One mark: the step (-1 before the first), what is done and which kind of work that is, since when
    (`time.monotonic()`), and the ranks that a wait is for."""

    step: int
    what: str
    kind: MarkKind
    time_s: float
    needs: range = ANYBODY

    def __str__(self) -> str:
        return describe_mark(self.step, self.what)


def describe_mark(step: int, what: str) -> str:
    """Returns where a rank is: "in step 17 (row exchange)", "before the first step"."""
    return f"in step {step} ({what})" if step >= 0 else what


class Progress:
    """The last mark of this process. Hooks read it, which belong to the process, so there is one a process."""

    def __init__(self) -> None:
        self.last = Mark(-1, "before the first step", "computes", time.monotonic())
        self._page: mmap.mmap | None = None
        self._flags = 0
        #: A result of each dispatched program that may be under way, and the ranks that it needs.
        self._under_way: tuple[tuple[Request, range], ...] = ()
        #: Whether a watchdog reads `seen`.
        self.watched = False

    def mark(self, step: int, what: str, kind: MarkKind = "computes", needs: range = ANYBODY) -> None:
        """Marks where this process is.

        Args:
          step: The number of the step, from 0.
          what: A few words, from a small number of texts: "row exchange".
          kind: "waits" before a wait for other ranks (waiting ranks aren't blamed for standing still), "compiles"
            before a compilation, else "computes".
          needs: The ranks that a wait is for.
        """
        self.last = Mark(step, what, kind, time.monotonic(), needs)
        if self._page is not None:
            text = what.encode()[:TEXT_BYTES]
            PAGE.pack_into(self._page, 0, self._flags, step, len(text))
            self._page[PAGE.size : PAGE.size + len(text)] = text

    @contextlib.contextmanager
    def during(self, what: str, kind: MarkKind = "computes", needs: range = ANYBODY) -> Iterator[None]:
        """Marks a block in the same step, here and in profiles.

        At its end the mark before is restored; not after an exception, which is reported where it was raised.
        """
        from jax.profiler import TraceAnnotation  # supervisors import this module, and no JAX

        before = self.last
        self.mark(before.step, what, kind, needs)
        with TraceAnnotation(f"autopar: {what}"):
            yield
        self.mark(before.step, before.what, before.kind, before.needs)

    def dispatched(self, result: Leaf, needs: range = ANYBODY) -> None:
        """Notes that a program is under way. `result`: a small `jax.Array` that it makes, and that nobody else
        holds."""
        if self.watched:
            self._under_way = (*self._unfinished(), (result, needs))

    def _unfinished(self) -> list[tuple[Leaf, range]]:
        return [(result, needs) for result, needs in self._under_way if not _is_ready(result)]

    @property
    def seen(self) -> Mark:
        """The last mark; a wait while a dispatched program is under way."""
        last = self.last
        if last.kind != "computes" or not (found := [needs for _, needs in self._unfinished()]):
            return last
        needs = range(min(some.start for some in found), max(some.stop for some in found))
        return replace(last, what=f"{last.what}, on the devices", kind="waits", needs=needs)

    def settle(self) -> None:
        """Waits for all dispatched programs."""
        while self._unfinished():
            time.sleep(0.02)

    def share(self, descriptor: int) -> None:
        """Writes marks to a supervisor's page from now on, too."""
        os.set_inheritable(descriptor, False)
        self._page = mmap.mmap(descriptor, PAGE_BYTES)
        self.flag(STARTED)
        self.mark(self.last.step, self.last.what, self.last.kind)

    def flag(self, flag: int) -> None:
        self._flags |= flag
        if self._page is not None:
            PAGE.pack_into(self._page, 0, self._flags, *PAGE.unpack_from(self._page, 0)[1:])


def _is_ready(result: Leaf) -> bool:
    """Says whether an array is there. One that is gone counts: so is its backend."""
    try:
        return result.is_ready()
    except RuntimeError:
        return True


#: The progress of this process.
PROGRESS = Progress()
mark = PROGRESS.mark
