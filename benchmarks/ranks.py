"""Ranks that stay alive and wait: several systems of processes take turns in one run, and don't disturb each other.

Systems can't share processes (each has collectives of its own), and started anew for each turn they would spend it
on starting. So each system's ranks are started once, by mpiexec, and ask their parent over a socket what to do. A rank
that isn't asked sleeps in a read: it takes no core from the others.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
#: Of this process, if mpiexec started it.
RANK, SIZE = int(os.environ.get("PMI_RANK", "0")), int(os.environ.get("PMI_SIZE", "1"))


class RankError(RuntimeError):
    """A rank failed; the message holds what it said."""


class Ranks:
    """The ranks of one system."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], output: Path) -> None:
        self.name = name
        self._process = process
        self._output = output
        self._links: list[Connection] = []

    def accept(self, listener: socket.socket, count: int, within_s: float) -> None:
        """Waits until all ranks are there."""
        links: dict[int, Connection] = {}
        end = time.monotonic() + within_s
        listener.settimeout(0.2)
        while len(links) < count:
            try:
                link = Connection(listener.accept()[0].detach())
            except TimeoutError:
                if self._process.poll() is not None or time.monotonic() > end:
                    raise RankError(f"{self.name}: {len(links)} of {count} ranks came\n{self.told()}") from None
                continue
            links[self._read(link)] = link
        self._links = [links[rank] for rank in range(count)]

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank."""
        return self("pid")

    def __call__(self, command: str, **options: Any) -> list[Any]:
        """Asks all ranks, and returns their answers, by rank.

        Raises:
          RankError: a rank raised an exception, or died.
        """
        self.tell(command, **options)
        return self.answers()

    def tell(self, command: str, **options: Any) -> None:
        """Asks all ranks, and doesn't wait."""
        for link in self._links:
            link.send((command, options))

    def answers(self) -> list[Any]:
        """Returns the answers of all ranks to what they were told."""
        return [self._read(link) for link in self._links]

    def _read(self, link: Connection) -> Any:
        try:
            good, answer = link.recv()
        except (EOFError, OSError) as error:
            raise RankError(f"{self.name}: a rank died\n{self.told()}") from error
        if not good:
            raise RankError(f"{self.name}: {answer}\n{self.told()}")
        return answer

    def told(self) -> str:
        """Returns the end of what the ranks printed."""
        return self._output.read_text(errors="replace")[-4000:]

    def close(self) -> None:
        """Ends the ranks, those that hang too."""
        for link in self._links:
            with contextlib.suppress(OSError):
                link.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            pass
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextlib.contextmanager
def started(
    name: str,
    count: int,
    module: str,
    *arguments: str,
    flags: Sequence[str] = (),
    wrapper: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    python: str = sys.executable,
    within_s: float = 300,
) -> Iterator[Ranks]:
    """Starts `count` ranks of `python -m module ADDRESS arguments`, which must call `serve(ADDRESS, ...)`.

    Args:
      flags: Of mpiexec.
      wrapper: What comes before each rank's command.
      python: The ranks' interpreter.

    Raises:
      RankError: they don't start within `within_s` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="autopar-") as folder, socket.socket(socket.AF_UNIX) as listener:
        address = str(Path(folder, "ranks"))
        listener.bind(address)
        listener.listen(count)
        output = Path(folder, "output")
        # mpiexec can't bear a pipe that closes, so ranks print to a file.
        with output.open("wb") as file:
            process = subprocess.Popen(
                [mpiexec(), *flags, "-n", str(count), *wrapper, python, "-m", module, address, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
                start_new_session=True,
            )
        ranks = Ranks(name, process, output)
        try:
            ranks.accept(listener, count, within_s)
            yield ranks
        finally:
            ranks.close()


def mpiexec() -> str:
    """Finds the launcher of this environment's MPI, else the one on the PATH."""
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if not found:
        raise RankError("there is no mpiexec: pip install 'autopar[mpi]' brings one")
    return found


def serve(address: str, rank: int, commands: Mapping[str, Callable[..., Any]]) -> None:
    """Answers commands in a rank until the parent closes the socket, or dies; then ends the process."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(address)
        link = Connection(sock.detach())
    link.send((True, rank))
    with contextlib.suppress(EOFError, OSError):
        while True:
            command, options = link.recv()
            try:
                answer = os.getpid() if command == "pid" else commands[command](**options)
                link.send((True, answer))
            except Exception:
                link.send((False, f"rank {rank}, {command}: {traceback.format_exc()}"))
    # Barriers at exit (JAX's, MPI's) would wait for ranks that were killed.
    sys.stdout.flush()
    os._exit(0)


def bind() -> None:
    """Binds a rank to a core of its own, before anything starts threads."""
    os.sched_setaffinity(0, {RANK % (os.cpu_count() or 1)})
