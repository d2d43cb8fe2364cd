"""Exit of a rank: together with all others, or as a fault.

A rank at its end, by the last line of its script or by SystemExit, waits for all others to come to theirs. JAX's exit
handler and MPI_Finalize would do so anyway; here it is done first, knowing what the others do. A rank that leaves with
a code other than 0 while others stay has failed, and ends the job. With code 0 that is a fault as soon as another rank
waits for it in a later step (`heartbeat.detect`); otherwise the others may have last work of their own, an evaluation
or a checkpoint, and are waited for.

Python tells its exit code to no hook. From Python 3.12 on `sys.monitoring` shows the SystemExit as it leaves the
script. On 3.11 `sys.exit` is wrapped instead; a SystemExit that was raised by hand has an unknown code, which counts as
0.
"""

from __future__ import annotations

import dis
import os
import sys
import threading
import time
from collections.abc import Callable
from types import CodeType, FrameType
from typing import NoReturn

from autopar.launch.faults import INTERRUPTED, abort, exit_code, name_rank, report_fault
from autopar.launch.heartbeat import Heartbeat
from autopar.launch.progress import LEFT, PROGRESS
from autopar.mpi.service import stop_service
from autopar.mpi.world import World

#: Seconds that a rank with an exit code other than 0 waits for others that may be leaving, too.
SHUTDOWN_S = 3.0

#: Seconds after which a rank reports that the job goes on without it.
NOTICE_S = 20.0


class Script:
    """The main script of the process, watched for the SystemExit that ends it."""

    def __init__(self) -> None:
        self._frame = _outermost_frame()
        self._error: SystemExit | None = None

    def watch(self) -> None:
        if sys.version_info >= (3, 12):
            self._monitor()
        else:
            sys.exit = self._noting(sys.exit)

    def exit_code(self) -> int | None:
        """Returns the exit code of a script that has ended by a known SystemExit; None if it ended otherwise."""
        if self._error is None:
            return None
        if sys.version_info < (3, 12) and self._returned():
            return None  # It was caught, and the script went on to its end.
        return exit_code(self._error)

    def _returned(self) -> bool:
        """Says whether the script ended by its last line, by the line at which its frame stopped."""
        frame = self._frame
        return frame is None or dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")

    def _monitor(self) -> None:
        monitoring = getattr(sys, "monitoring")  # noqa: B009 (3.11's type stubs don't know it)
        tool = next((number for number in (4, 3) if monitoring.get_tool(number) is None), None)
        if tool is None or self._frame is None:
            return
        script = self._frame.f_code

        def unwound(code: CodeType, offset: int, error: BaseException) -> None:
            if code is script and isinstance(error, SystemExit):
                self._error = error

        monitoring.use_tool_id(tool, "autopar")
        monitoring.register_callback(tool, monitoring.events.PY_UNWIND, unwound)
        monitoring.set_events(tool, monitoring.events.PY_UNWIND)

    def _noting(self, leave: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
        def exit(status: object = None, /) -> NoReturn:
            try:
                leave(status)
            except SystemExit as error:
                if threading.current_thread() is threading.main_thread():
                    self._error = error
                raise

        exit.__doc__ = leave.__doc__
        return exit


#: Functions to call when this rank comes to its end, while others may go on. Global, as a process ends once.
_last_words: list[Callable[[], None]] = []


def at_leaving(call: Callable[[], None]) -> None:
    """Registers a function to be called when this rank comes to its end."""
    if call not in _last_words:
        _last_words.append(call)


def leave(world: World, heartbeat: Heartbeat, script: Script) -> None:
    """Waits for all ranks to leave. An exit handler, to run before JAX's own."""
    from mpi4py import MPI

    if os.getpid() != heartbeat.pid or MPI.Is_finalized():
        return
    code = script.exit_code()
    try:
        if not code:  # its own programs may be under way yet, which others wait for
            PROGRESS.settle()
        heartbeat.leave(code)
        for call in _last_words:
            call()
        _await_others(world, heartbeat, code)
        stop_service()
        heartbeat.stop()
    except KeyboardInterrupt:
        abort(world, f"{name_rank(world)} was interrupted, at its exit, last {PROGRESS.last}.", INTERRUPTED)
    PROGRESS.flag(LEFT)


def _await_others(world: World, heartbeat: Heartbeat, code: int | None) -> None:
    start_s, noticed = time.monotonic(), False
    all_leave = heartbeat.comm.Ibarrier()
    while not all_leave.Test():
        waited_s = time.monotonic() - start_s
        others = ", ".join(map(str, heartbeat.staying))
        if code and waited_s > SHUTDOWN_S:
            message = f"{name_rank(world)} left with exit code {code}, last {PROGRESS.last}; all ranks end."
            abort(world, message, code)
        if not noticed and waited_s > NOTICE_S and others:
            noticed = True
            report_fault(
                f"{name_rank(world)} has come to its end, last {PROGRESS.last}; it waits for those that go on: "
                f"rank {others}."
            )
        time.sleep(min(0.05, 0.001 + waited_s / 20))


def _outermost_frame() -> FrameType | None:
    """Returns the main thread's first frame: as a rule the main script's module."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    return frame
