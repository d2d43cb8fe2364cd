"""`noticing`: says on stderr what takes longer than a second: what is traced, planned, compiled or measured.

On a terminal and in a notebook it is one line that counts the seconds and goes when the work is done. Elsewhere each
phase is a record of the logger "autopar", at level INFO, and a line on stderr, unless the user gives that logger a
handler. `logging.getLogger("autopar").setLevel(logging.WARNING)` silences both. Of a job's processes the first one says
it.

A thread waits for the second to pass. It is a daemon, ends with the block, and writes nothing after it.
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

from autopar.mpi.world import world

#: What takes less than this isn't said.
AFTER_S = 1.0
#: How often a line on a terminal is written anew.
_EVERY_S = 0.5
#: Characters of a bar.
_BAR = 20


class _ToStderr(logging.Handler):
    """Writes records to stderr once, and alike whoever has configured the root logger (`basicConfig`, absl): the root's
    handlers get them as well, but for those that write to the console. Where the logger has another handler, that one
    and all of the root's get them instead."""

    def emit(self, record: logging.LogRecord) -> None:
        of_root = logging.getLogger().handlers
        writes = all(handler is self or handler in of_root for handler in LOG.handlers)
        if writes and sys.stderr is not None:
            print(self.format(record), file=sys.stderr, flush=True)
        for handler in of_root:
            is_told = handler in LOG.handlers or (writes and _is_console(handler))
            if record.levelno >= handler.level and not is_told:
                handler.handle(record)


def _is_console(handler: logging.Handler) -> bool:
    """Returns whether a handler writes to stderr or stdout: one of `logging`, of absl, or of rich."""
    writer = getattr(handler, "python_handler", handler)
    stream = getattr(writer, "stream", None) or getattr(getattr(writer, "console", None), "file", None)
    return stream is not None and stream in (sys.stderr, sys.stdout, sys.__stderr__, sys.__stdout__)


LOG = logging.getLogger("autopar")
if not LOG.handlers:
    LOG.addHandler(_handler := _ToStderr())
    _handler.setFormatter(logging.Formatter("autopar: %(message)s"))
    LOG.propagate = False  # the handler does it
if LOG.level == logging.NOTSET:
    LOG.setLevel(logging.INFO)

#: Notices of blocks that run now, the newest one last.
_open: list[Notice] = []


class Notice:
    """Says what a block of work does. `tell` says which part of it begins; the rest is `noticing`'s.

    Args:
      what: Whose work it is: the step's name.
      parts: How many parts it has, 0 if that isn't known.
      logs: Whether phases are lines of a log, where there is no terminal.
    """

    def __init__(self, what: str, parts: int, *, logs: bool) -> None:
        self._what, self._parts, self._done, self.logs = what, parts, 0, logs
        self._phase = self._said = ""
        self._start = time.monotonic()
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._written = 0

    def tell(self, phase: str, *, parts: int | None = None, done: int = 0) -> None:
        """Says what is done from now on.

        Args:
          phase: A few words, such as "compiling".
          parts: How many parts that has, None for as many as before.
          done: How many of them are done.
        """
        self._phase, self._done = phase, done
        self._parts = self._parts if parts is None else parts

    def show(self) -> None:
        """Writes the line."""
        with self._lock:
            if self._ended.is_set() or _open[-1:] != [self] or not LOG.isEnabledFor(logging.INFO):
                return
            if _is_live():
                self._write(self._line())
            elif self.logs and self._phase != self._said:
                LOG.info("%s: %s", self._what, self._phase)
            self._said = self._phase

    def end(self) -> None:
        """Writes nothing more, and takes away what is on a terminal."""
        self._ended.set()
        with self._lock:
            if self._written:
                self._write("")
                sys.stderr.write("\r")
                sys.stderr.flush()

    def wait(self, first_s: float) -> None:
        """Writes the line after some time, and again as long as the block runs."""
        seconds = first_s
        while not self._ended.wait(seconds):
            try:
                self.show()
            except (OSError, ValueError):  # stderr is closed
                return
            seconds = _EVERY_S

    def _line(self) -> str:
        """Returns the line for a terminal, which must not wrap: it couldn't be taken back."""
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

    Args:
      what: Whose work it is.
      phase: What is done first.
      parts: How many parts the work has, 0 if that isn't known.
      at_once: For work that is known to take its time, a line that is said before. In a log it is the only one, of
        what that work consists of, too.
      shown: Whether this process says it; None: the first one of the job does.
    """
    notice = Notice(what, parts, logs=not at_once and all(outer.logs for outer in _open))
    notice.tell(phase)
    if not (_is_first() if shown is None else shown):
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


def tell(phase: str, *, parts: int | None = None, done: int = 0) -> None:
    """Says what the innermost block does from now on, as `Notice.tell` does; nothing outside of blocks."""
    if _open:
        _open[-1].tell(phase, parts=parts, done=done)


def _is_first() -> bool:
    return world().rank == 0 and jax.process_index() == 0


def _is_live() -> bool:
    """Returns whether what is written can be taken back: on a terminal, or in a notebook."""
    stream = sys.stderr
    if stream is None or type(stream).__module__ == "ipykernel.iostream":
        return stream is not None
    return stream.isatty() and os.environ.get("TERM") != "dumb"
