"""Runs a script as the ranks of a job, in real processes, and tells how it went."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
MPIEXEC = Path(sys.executable).with_name("mpiexec")
#: Python's options for ranks. What another process is writing to JAX's cache is compiled once more.
WARNINGS = ("-W", "error", "-W", "ignore:Error reading persistent compilation cache:UserWarning")
#: What ranks have in their environment: several jobs at a time share the cores, so none is bound to one.
UNBOUND = {"AUTOPAR_BIND": "none"}

#: Processes of a job are known by this variable in their environment.
_MARK = "AUTOPAR_TEST_JOB"


@contextlib.contextmanager
def coordinator() -> Iterator[str]:
    """Yields the address of a port of this machine that nobody gets but a coordinator of JAX's: gRPC may share it."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


@dataclass(frozen=True)
class Job:
    """How a job went.

    Attributes:
      code: mpiexec's exit code, or the launcher's; None: it was killed at its time limit.
      seconds: From its start to its end.
      ended_s: Seconds from the line "fault" that a rank printed to the end; None without one.
      output: What all ranks and mpiexec printed.
      ranks: What each rank printed, where mpiexec was called directly (stdout, then stderr).
      left: Command lines of processes that were left behind; they are ended.
    """

    code: int | None
    seconds: float
    ended_s: float | None
    output: str
    ranks: tuple[str, ...]
    left: tuple[str, ...]


#: `run_ranks` and `launch` of tests/mpi/conftest.py.
Run = Callable[..., Job]


def run_job(
    command: Sequence[str], folder: Path, *, count: int = 0, timeout_s: float = 60, interrupt: bool = False, **env: str
) -> Job:
    """Run mpiexec, or something that does, in a session of its own, and kill what is left of it.

    Args:
      command: With absolute paths.
      folder: Where it runs, and its output goes: mpiexec can't bear a pipe that closes.
      count: Ranks whose output is in files out.0, err.0, ...
      interrupt: Send Ctrl-C as soon as there is the line "fault" in the output.
    """
    mark = uuid.uuid4().hex
    fixed = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1", _MARK: mark}
    given = {**os.environ, **UNBOUND, **fixed, **env}
    start_s, fault_s = time.monotonic(), None
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            [*command],
            cwd=folder,
            env=given,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        code = None
        while code is None and time.monotonic() - start_s < timeout_s:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(0.05)
            if fault_s is None and "fault\n" in _printed(folder, count)[0]:
                fault_s = time.monotonic()
                if interrupt:
                    process.send_signal(signal.SIGINT)
        end_s = time.monotonic()
        if code is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    time.sleep(0.3)
    left = _end_all(mark)
    printed, ranks = _printed(folder, count)
    return Job(code, end_s - start_s, fault_s and end_s - fault_s, printed, ranks, left)


def _printed(folder: Path, count: int) -> tuple[str, tuple[str, ...]]:
    def read(*names: str) -> str:
        return "".join((folder / n).read_text(errors="replace") for n in names if (folder / n).exists())

    ranks = tuple(read(f"out.{rank}", f"err.{rank}") for rank in range(count))
    return read("output") + "".join(ranks), ranks


def _end_all(mark: str) -> tuple[str, ...]:
    """Kill what a job has left behind, and tell what it was. A zombie, which has no environment, is not counted."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{_MARK}={mark}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
                os.kill(int(process.name), signal.SIGKILL)
    return tuple(found)
