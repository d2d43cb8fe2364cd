"""Runs a job's mpirun, and starts the job again if it fails: `python -m autopar launch --max-restarts N`.

MPI ends a job that has lost a rank. So all ranks are started again, as torchrun does, and the script goes on from its
last checkpoint. The job before is over by then: mpirun has ended its ranks, and if one lived on where it can't be
reached, it couldn't save: a checkpoint needs all ranks of its job.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType, TracebackType

from autopar.errors import LaunchError
from autopar.mpi.world import RANK_PID_VARIABLE

#: How long ranks may take to end after a second signal, and mpirun after that.
ENDING_S, KILLING_S = 10.0, 5.0

#: How long hydra's process on a machine may live on behind mpirun.
_PROXY_S = 1.0

#: Signals that end a job, and others that ranks may wait for.
_ENDING, _TOLD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP), (signal.SIGUSR1, signal.SIGUSR2)
#: Begin names of variables by which MPI tells a process that it is a rank; the launcher may be one of another job.
_RANKS_ENVIRONMENT = (
    *("PMI_", "PMI2_", "PMIX_RANK", "PMIX_NAMESPACE", "PMIX_SERVER", "PALS_RANKID"),
    *("OMPI_COMM_WORLD_", "MV2_COMM_WORLD_", RANK_PID_VARIABLE),
)

#: Has the kernel kill mpirun if the launcher is killed, and then becomes mpirun.
_DIE_WITH_PARENT = (
    "import ctypes, os, signal, sys; "
    "sys.platform == 'linux' and ctypes.CDLL(None).prctl(1, signal.SIGKILL); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)


def run_job(command: Sequence[str], restarts: int, plan_again: Callable[[], Sequence[str]]) -> int:
    """Runs mpirun until it ends well, was interrupted, or has failed once more often than `restarts`.

    Args:
      command: The line of the first run.
      restarts: How often the job is started again.
      plan_again: Gives the line of another run, for the hosts that are there by then.

    Returns:
      The exit code of the last run; 128 + the signal's number if mpirun was killed.
    """
    with _Runner() as runner:
        code = runner.run(command)
        for restart in range(1, restarts + 1):
            if code == 0 or runner.interrupted:
                break
            say(f"the job ended with exit code {code}; restart {restart} of {restarts}")
            try:
                command = plan_again()
            except LaunchError as error:
                say(f"it can't be started again: {error}")
                break
            if runner.interrupted:
                break
            print(shlex.join(command), flush=True)
            code = runner.run(command)
    return code


def say(text: str) -> None:
    """Prints a line of the launcher's own on stderr."""
    print(f"autopar launch: {text}", file=sys.stderr, flush=True)


def remove_topologies(since_s: float, folder: Path = Path("/tmp"), processes: Path = Path("/proc")) -> None:
    """Removes files with the machine's topology, which hydra leaves where its job fails.

    Nothing says whose they are: where another job of hydra's runs, all stay.

    Args:
      since_s: When the job began, by `time.time()`.
      folder: Where hydra writes them.
      processes: Where the kernel lists processes.
    """
    end_s = time.monotonic() + _PROXY_S
    while is_there := any(_text(process / "comm") == "hydra_pmi_proxy" for process in processes.glob("[0-9]*")):
        if time.monotonic() > end_s:
            break
        time.sleep(0.05)
    for path in () if is_there else folder.glob("hydra_hwloc_xmlfile_*"):
        with contextlib.suppress(OSError):
            found = path.stat()
            if found.st_uid == os.getuid() and found.st_mtime >= since_s:
                path.unlink()


def _text(file: Path) -> str:
    with contextlib.suppress(OSError):
        return file.read_text().strip()
    return ""


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(_RANKS_ENVIRONMENT)}


class _Runner:
    """Runs mpirun in a session of its own. Within its context signals go to all ranks, but for a SIGHUP under nohup.
    The first one that ends a program may have them save a checkpoint, which takes its time; ranks that stay after a
    second one are killed.

    Attributes:
      interrupted: Whether there was a signal: the job isn't to be started again.
    """

    def __init__(self) -> None:
        self.interrupted = False
        self._process: subprocess.Popen[bytes] | None = None
        self._early: list[int] = []
        self._ending = [signal.SIGTERM]

    def __enter__(self) -> _Runner:
        numbers = [*_ENDING, *_TOLD]
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
            numbers.remove(signal.SIGHUP)
        handlers = {number: self._pass_on for number in numbers} | {signal.SIGALRM: self._end}
        self._before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def run(self, command: Sequence[str]) -> int:
        """Runs mpirun; returns its exit code."""
        guard = [sys.executable, "-S", "-c", _DIE_WITH_PARENT, *command]
        begun_s = time.time()
        self._process = subprocess.Popen(guard, stdin=subprocess.DEVNULL, env=_environment(), start_new_session=True)
        while self._early:
            self._process.send_signal(self._early.pop())
        code = None
        while code is None:  # a wait without end hears of no signal that came just before it, or to another thread
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(timeout=0.5)
        self._process = None
        if code:
            remove_topologies(begun_s)
        return 128 - code if code < 0 else code

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        passed_on = signal.SIGTERM if number == signal.SIGHUP else number  # mpirun would die of it, and tell no rank
        if self._process is not None:
            self._process.send_signal(passed_on)
        elif number in _ENDING:  # while mpirun is started
            self._early.append(passed_on)
        if number in _TOLD:
            return
        if self.interrupted:
            signal.setitimer(signal.ITIMER_REAL, ENDING_S, KILLING_S)
        self.interrupted = True

    def _end(self, number: int, frame: FrameType | None) -> None:
        if self._process is not None:
            self._process.send_signal(self._ending.pop(0) if self._ending else signal.SIGKILL)
