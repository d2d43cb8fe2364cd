"""Faults of ranks: a rank that fails says who it is, where it was and why, and ends the job.

By itself an exception on one rank hangs the job: Python ends that process through its exit handlers, where JAX waits
for the other processes, which wait for this one. So the interpreter's hooks for uncaught exceptions, of the main
thread and of others, report and then abort all ranks at once. (`python -m mpi4py.run` comes too late: after JAX's
exit handler.) For a rank that is killed its supervisor speaks (`supervise.py`), for one that hangs the watchdog
(`heartbeat.py`); `shutdown.py` has how a rank leaves in good order.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import IO, Any, NoReturn

from autopar.interrupts import INTERRUPTS, Handler
from autopar.launch.progress import PROGRESS, REPORTED
from autopar.mpi.world import World

#: Seconds between a report and the end of the job: other ranks' reports, and the launcher's copying, need a moment.
SPEAKING_S = 0.3

#: Seconds that a rank whose peer is gone waits before it reports that: the one that failed is to be heard first.
COURTESY_S = 3.0

#: The exit code of an interrupted job, as shells have it.
INTERRUPTED = 130


def abort(world: World, message: str, code: int = 1) -> NoReturn:
    """Prints a message (`report_fault`) and ends all ranks with this exit code. Doesn't return."""
    report_fault(message)
    PROGRESS.flag(REPORTED)
    time.sleep(SPEAKING_S)
    try:
        from mpi4py import MPI

        MPI.COMM_WORLD.Abort(code or 1)
    finally:
        # Abort may return while the launcher is already killing this process, or fail in a broken MPI.
        os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a process survived its own SIGKILL")


def report_fault(message: str) -> None:
    """Prints a message in one piece, after everything that was printed before."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
    with contextlib.suppress(OSError):
        os.write(2, f"autopar: {message}\n".encode(errors="replace"))


def name_rank(world: World) -> str:
    """Returns this process's name in messages."""
    role = "a server, " if world.is_server else ""
    return f"rank {world.rank} ({role}process {os.getpid()} on {socket.gethostname()})"


class Hooks:
    """The interpreter's hooks of one rank. In forked children the hooks before are called."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.pid = os.getpid()
        self._exception_hook = sys.excepthook
        self._thread_hook = threading.excepthook
        self._interrupt_hook: Any = None
        self._answered_s = float("-inf")

    def install(self) -> None:
        sys.excepthook = self._on_exception
        threading.excepthook = self._on_thread_exception
        if not faulthandler.is_enabled() and _has_descriptor(sys.stderr):
            faulthandler.enable()  # The traceback of a segmentation fault.
        if threading.current_thread() is threading.main_thread():
            self._interrupt_hook = signal.getsignal(signal.SIGINT)
            if self._interrupt_hook is signal.default_int_handler:
                signal.signal(signal.SIGINT, self._on_interrupt)

    def answers_interrupts(self) -> bool:
        """Says whether these hooks, and no handler of the user's, answer an interrupt."""
        handler = signal.getsignal(signal.SIGINT)
        return (handler.previous if isinstance(handler, Handler) else handler) == self._on_interrupt

    @property
    def answered_s(self) -> float:
        """Time (`time.monotonic()`) at which Python last handled an interrupt, if only to hold it back until a step
        ends."""
        return max(self._answered_s, INTERRUPTS.received_s)

    @staticmethod
    def have_set(handler: Any) -> bool:
        """Says whether a handler is a rank's."""
        return getattr(handler, "__func__", None) is Hooks._on_interrupt

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        self._answered_s = time.monotonic()
        self._interrupt_hook(number, frame)

    def _on_exception(self, kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        show = functools.partial(self._exception_hook, kind, error, tb)
        if os.getpid() != self.pid:
            show()
            return
        own = self._exception_hook is sys.__excepthook__
        self._fail(kind, error, tb, "", None if own else show)

    def _on_thread_exception(self, args: threading.ExceptHookArgs) -> None:
        silent = issubclass(args.exc_type, SystemExit) and not exit_code(args.exc_value)
        show = functools.partial(self._thread_hook, args)
        if os.getpid() != self.pid or silent:
            show()
            return
        error = args.exc_value or args.exc_type()
        name = args.thread.name if args.thread is not None else "?"
        own = self._thread_hook is threading.__excepthook__
        self._fail(args.exc_type, error, args.exc_traceback, f" in its thread {name!r}", None if own else show)

    def _fail(
        self,
        kind: type[BaseException],
        error: BaseException,
        tb: TracebackType | None,
        thread: str,
        show: Callable[[], object] | None,
    ) -> None:
        """Reports an exception, by `show` if there was another hook before, and ends the job."""
        name, where = name_rank(self._world), PROGRESS.last
        if issubclass(kind, KeyboardInterrupt):
            abort(self._world, f"{name} was interrupted, {where}.", INTERRUPTED)
        if _is_lost_peer(error):
            time.sleep(COURTESY_S)
        if show is not None:
            show()
            abort(self._world, f"{name} failed{thread}, {where}: {kind.__name__}; all ranks end.")
        lines = "".join(traceback.format_exception(kind, error, tb)).rstrip()
        message = f"{name} failed{thread}, {where}; all ranks end.\n{lines}"
        abort(self._world, message, exit_code(error) or 1)


def exit_code(error: BaseException | None) -> int:
    """Returns the exit code of a process that this exception ends."""
    if not isinstance(error, SystemExit):
        return 1
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1


def _is_lost_peer(error: BaseException) -> bool:
    """Says whether an exception means that another process is gone, rather than that this one failed."""
    if type(error).__module__.startswith("mpi4py"):
        return True
    text = str(error)
    return any(sign in text for sign in ("Gloo", "Connection reset by peer", "Connection closed by peer"))


def _has_descriptor(stream: IO[str]) -> bool:
    try:
        return stream.fileno() >= 0
    except (AttributeError, OSError, ValueError):
        return False
