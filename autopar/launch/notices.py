"""`noticing`: says on stderr what takes longer than a second: tracing, planning, compiling, measuring.

On a terminal and in a notebook it is one line that counts the seconds and disappears when the work is done. Elsewhere
each phase is a record of the logger "autopar", at level INFO, and a line on stderr, unless the user gives that logger a
handler. `logging.getLogger("autopar").setLevel(logging.WARNING)` silences both. Only the first process of a job says
it.

A daemon thread waits for the second to pass. It ends with the block, and writes nothing after it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator

import jax

from autopar.garbage import returned_memory
from autopar.mpi.world import world

#: Seconds of work before it is said.
AFTER_S = 1.0
#: Seconds between updates of a terminal's line.
_EVERY_S = 0.5
#: Characters of a bar.
_BAR = 20


class _ToStderr(logging.Handler):
    """Writes records to stderr once, whoever has configured the root logger (`basicConfig`, absl). The root's handlers
    get them as well, except those that write to the console. If the logger has another handler, that one and all of the
    root's get them instead."""

    def emit(self, record: logging.LogRecord) -> None:
        of_root = logging.getLogger().handlers
        writes = all(handler is self or handler in of_root for handler in LOG.handlers)
        if writes and sys.stderr is not None:
            sys.stderr.write(f"{self.format(record)}\n")  # in one piece: others write there, too
            sys.stderr.flush()
        for handler in of_root:
            is_told = handler in LOG.handlers or (writes and _is_console(handler))
            if record.levelno >= handler.level and not is_told:
                handler.handle(record)


def _is_console(handler: logging.Handler) -> bool:
    writer = getattr(handler, "python_handler", handler)
    stream = getattr(writer, "stream", None) or getattr(getattr(writer, "console", None), "file", None)
    return stream is not None and stream in (sys.stderr, sys.stdout, sys.__stderr__, sys.__stdout__)


LOG = logging.getLogger("autopar")
if not LOG.handlers:
    LOG.addHandler(_handler := _ToStderr())
    _handler.setFormatter(logging.Formatter("autopar: %(message)s"))
    LOG.propagate = False  # `_ToStderr` does it
if LOG.level == logging.NOTSET:
    LOG.setLevel(logging.INFO)

#: Notices of blocks that run now, the newest one last.
_open: list[Notice] = []


class Notice:
    """Shows the line on a block of work (`noticing`). `logs`: whether phases are lines of a log if there is no
    terminal."""

    def __init__(self, what: str, parts: int, *, logs: bool) -> None:
        self._what, self._parts, self._done, self.logs = what, parts, 0, logs
        self._phase = self._said = ""
        self._start = time.monotonic()
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._written = 0

    def tell(self, phase: str, *, parts: int | None = None, done: int = 0) -> None:
        """Sets the phase in a few words, such as "compiling", with its number of parts (None: as before), and those
        done."""
        self._phase, self._done = phase, done
        self._parts = self._parts if parts is None else parts

    def show(self) -> None:
        with self._lock:
            if self._ended.is_set() or _open[-1:] != [self] or not LOG.isEnabledFor(logging.INFO):
                return
            if _is_live():
                self._write(self._line())
            elif self.logs and self._phase != self._said:
                LOG.info("%s: %s", self._what, self._phase)
            self._said = self._phase

    def end(self) -> None:
        """Writes nothing more, and clears the terminal's line."""
        self._ended.set()
        with self._lock:
            if self._written:
                self._write("")
                sys.stderr.write("\r")
                sys.stderr.flush()

    def wait(self, first_s: float) -> None:
        """Writes the line after `first_s` seconds, and again while the block runs."""
        seconds = first_s
        while not self._ended.wait(seconds):
            try:
                self.show()
            except (OSError, ValueError):  # stderr is closed
                return
            seconds = _EVERY_S

    def _line(self) -> str:
        """Returns the line for a terminal. It must not wrap, or it couldn't be cleared."""
        width = max(1, shutil.get_terminal_size().columns - 1)
        what, time_s = f"autopar: {self._what}: {self._phase}", time.monotonic() - self._start
        bar = count = ""
        if self._parts:
            filled = _BAR * self._done // self._parts
            bar, count = f" [{'#' * filled}{'.' * (_BAR - filled)}]", f" {self._done} of {self._parts}"
        lines = (f"{what}{shown}{count}, {time_s:.0f} s" for shown in (bar, ""))
        return next((line for line in lines if len(line) <= width), what[:width])

    def _write(self, line: str) -> None:
        sys.stderr.write("\r" + line.ljust(self._written))
        sys.stderr.flush()
        self._written = len(line)


@contextlib.contextmanager
def noticing(
    what: str, phase: str = "", *, parts: int = 0, at_once: str = "", shown: bool | None = None
) -> Iterator[Notice]:
    """Shows a line on stderr about a block of work that takes longer than a second.

    `what`: whose work it is, the step's name. `parts`: their number; 0: unknown. `at_once`: a line to write before work
    that is known to take its time; a log has this line only, also for what that work consists of. `shown`: whether this
    process says it; None: the first one of the job does.
    """
    notice = Notice(what, parts, logs=not at_once and all(outer.logs for outer in _open))
    notice.tell(phase)
    if not (world().rank == 0 and jax.process_index() == 0 if shown is None else shown):
        yield notice
        return
    if at_once:
        LOG.info("%s", at_once)
    thread = threading.Thread(target=notice.wait, args=(AFTER_S,), name="autopar notice", daemon=True)
    try:  # Ctrl-C may come at any line
        _open.append(notice)
        with contextlib.suppress(RuntimeError):  # no thread can be started: nothing is said, and the work is done
            thread.start()
        yield notice
    finally:
        notice.end()
        if notice in _open:
            _open.remove(notice)


@contextlib.contextmanager
def compiling(what: str) -> Iterator[None]:
    """Shows that a step is compiled, and returns the memory that this took."""
    with noticing(what, "compiling"), returned_memory():
        yield


def tell(phase: str, *, parts: int | None = None, done: int = 0) -> None:
    """Sets the phase of the innermost block, as `Notice.tell` does; does nothing outside of blocks."""
    if _open:
        _open[-1].tell(phase, parts=parts, done=done)


def _is_live() -> bool:
    stream = sys.stderr
    if stream is None or type(stream).__module__ == "ipykernel.iostream":
        return stream is not None
    return stream.isatty() and os.environ.get("TERM") != "dumb"
