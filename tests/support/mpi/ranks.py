"""Starts the ranks of a test as processes of their own, and ends them all when they take too long."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.mpi.jobs import UNBOUND, WARNINGS

ROOT = Path(__file__).resolve().parents[3]


def run_ranks(count: int, module: str, *arguments: str, output: Path, timeout_s: float = 120, servers: int = 0) -> str:
    """What `count` ranks of `python -m module arguments` print; an AssertionError if they fail or aren't done in time.

    Args:
      count: How many ranks.
      module: A module of this repository with a main part.
      arguments: For it.
      output: A file for what is printed: mpiexec can't bear a pipe that closes.
      timeout_s: Seconds until they are killed.
      servers: How many of them, the last ones, are dedicated servers.
    """
    beside = Path(sys.executable).with_name("mpiexec")
    launcher = str(beside) if beside.exists() else shutil.which("mpiexec")
    assert launcher, "no mpiexec: pip install mpich"
    command = [launcher, "-n", str(count), sys.executable, *WARNINGS, "-m", "mpi4py.run", "-m", module, *arguments]
    environment = {**os.environ, **UNBOUND, "PYTHONPATH": str(ROOT), "AUTOPAR_SERVERS": str(servers)}
    environment["STACKS_S"] = str(timeout_s - 10)
    with output.open("wb") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment, start_new_session=True
        )
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = f"none, after {timeout_s} s"
    text = output.read_text(errors="replace")
    assert code == 0, f"{count} ranks of {module}: exit code {code}\n{text}"
    return text


def run_cases(
    cases: Mapping[str, Sequence[str]],
    ranks: int,
    devices: int,
    folder: Path,
    timeout_s: float = 120,
    servers: int = 0,
) -> None:
    """Run functions that are called `check_...` on every rank, in one job.

    Args:
      cases: A module of this folder, by its name -> those that are run, in order; all where none are named.
      ranks, devices: How many, and those of each rank.
      folder: For what is printed and kept.
      timeout_s, servers: As in `run_ranks`.
    """
    named = [":".join((f"tests.support.mpi.{module}", *names)) for module, names in cases.items()]
    arguments = [str(devices), str(folder), *named]
    output, module = folder / "output", "tests.support.mpi.worker"
    text = run_ranks(ranks, module, *arguments, output=output, timeout_s=timeout_s, servers=servers)
    done = len(re.findall(r"check_\w+: [\d.]+ s", text))  # anywhere in a line: gloo prints in pieces
    assert done >= sum(max(len(names), 1) for names in cases.values()), text
