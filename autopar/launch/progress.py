"""`mark`: where this process is in its work, for the messages and the watchdog that need to know.

The step's runner marks each step, and each wait for other ranks before it begins. A mark is a store and a copy of a
few bytes (half a microsecond); it is read by the hooks that report a fault, by the watchdog's thread, and, from a
page of memory that outlives a killed process, by its supervisor (`supervise.py`).

A program with collectives runs on while Python does other things, or waits for its result inside JAX, unmarked. So the
runner also leaves one of the program's results here (`dispatched`): as long as it isn't ready, the process waits.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

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

#: Results up to this size are kept until the next step's; larger ones are only looked at while somebody has them.
KEPT_BYTES = 1 << 16

#: Longer texts are cut.
TEXT_BYTES = 64


@dataclass(frozen=True)
class Mark:
    """One mark: the step (-1 before the first one), what is done, which kind of work that is, and since when, by
    `time.monotonic()`."""

    step: int
    what: str
    kind: MarkKind
    time_s: float

    def __str__(self) -> str:
        return describe_mark(self.step, self.what)


def describe_mark(step: int, what: str) -> str:
    """Where a rank is, in words: "in step 17 (row exchange)", "before the first step"."""
    return f"in step {step} ({what})" if step >= 0 else what


class Progress:
    """The last mark of this process.

    One a process: marks are made by whoever works, and read by hooks, which belong to the process.
    """

    def __init__(self) -> None:
        self._last: tuple[int, str, MarkKind, float] = (-1, "before the first step", "computes", time.monotonic())
        self._page: mmap.mmap | None = None
        self._flags = 0
        self._result: Callable[[], Any] | None = None
        #: Whether there is a watchdog, which asks what is `seen`.
        self.watched = False

    def mark(self, step: int, what: str, kind: MarkKind = "computes") -> None:
        """Say where this process is.

        Args:
          step: The number of the step, from 0.
          what: A few words, from a small number of texts: "row exchange".
          kind: "waits" before a wait for other ranks (who only waits is not blamed for standing still), "compiles"
            before a compilation, else "computes".
        """
        self._last = (step, what, kind, time.monotonic())
        if self._page is not None:
            text = what.encode()[:TEXT_BYTES]
            PAGE.pack_into(self._page, 0, self._flags, step, len(text))
            self._page[PAGE.size : PAGE.size + len(text)] = text

    @contextlib.contextmanager
    def during(self, what: str, kind: MarkKind = "computes") -> Iterator[None]:
        """A mark for as long as a block runs, in the same step: `with PROGRESS.during("row exchange", "waits"):`. In
        profiles it has its name.

        At its end that of before is made again; not after an exception, which is told where it was raised.
        """
        from jax.profiler import TraceAnnotation  # supervisors import this module, and no JAX

        step, what_before, kind_before, _ = self._last
        self.mark(step, what, kind)
        with TraceAnnotation(f"autopar: {what}"):
            yield
        self.mark(step, what_before, kind_before)

    @property
    def last(self) -> Mark:
        return Mark(*self._last)

    def dispatched(self, result: Any) -> None:
        """Say that a program is under way that needs all ranks; `result`: a `jax.Array` that it makes, a small one."""
        if self.watched:
            self._result = (lambda: result) if result.nbytes <= KEPT_BYTES else weakref.ref(result)

    @property
    def seen(self) -> Mark:
        """The last mark; a wait, as long as a dispatched program is under way."""
        last = self.last
        if last.kind != "computes" or self._result is None or _is_ready(self._result()):
            return last
        return replace(last, what=f"{last.what}, on the devices", kind="waits")

    def settle(self) -> None:
        """Wait until the program that was dispatched last has ended, if this process knows its result."""
        while self._result is not None and not _is_ready(self._result()):
            time.sleep(0.02)

    def share(self, descriptor: int) -> None:
        """Write marks to a supervisor's page from now on, too."""
        os.set_inheritable(descriptor, False)
        self._page = mmap.mmap(descriptor, PAGE_BYTES)
        self.flag(STARTED)
        step, what, kind, _ = self._last
        self.mark(step, what, kind)

    def flag(self, flag: int) -> None:
        """Tell the supervisor something, if there is one."""
        self._flags |= flag
        if self._page is not None:
            PAGE.pack_into(self._page, 0, self._flags, *PAGE.unpack_from(self._page, 0)[1:])


def _is_ready(result: Any) -> bool:
    """Whether an array is there. One that is gone counts: a later program has taken it."""
    try:
        return result is None or result.is_ready()
    except RuntimeError:
        return True


#: The progress of this process.
PROGRESS = Progress()
mark = PROGRESS.mark
