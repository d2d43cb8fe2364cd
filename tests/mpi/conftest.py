"""Tests with real ranks. `run_ranks` starts them under mpiexec, `launch` under `python -m autopar launch`."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.mpi.jobs import MPIEXEC, WARNINGS, Job, Run, run_job


@pytest.fixture
def run_ranks(tmp_path: Path) -> Iterator[Run]:
    """`run_ranks(count, script_text, devices=1, timeout_s=120, interrupt=False, **environment) -> Job`.

    The script runs once a rank, under mpiexec itself, with warnings as errors. No process may be left behind.
    """
    jobs = []

    def run(
        count: int, script: str, devices: int = 1, timeout_s: float = 120, interrupt: bool = False, **env: str
    ) -> Job:
        folder = tmp_path / f"job{len(jobs)}"
        folder.mkdir()
        (folder / "train.py").write_text(textwrap.dedent(script))
        files = ["-outfile-pattern", "out.%r", "-errfile-pattern", "err.%r"]
        command = [str(MPIEXEC), *files, "-n", str(count), sys.executable, *WARNINGS, "train.py"]
        env = {"JAX_NUM_CPU_DEVICES": str(devices), **env}
        jobs.append(run_job(command, folder, count=count, timeout_s=timeout_s, interrupt=interrupt, **env))
        return jobs[-1]

    yield run
    for job in jobs:
        assert not job.left, f"left behind: {job.left}\n{job.output}"


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Run]:
    """`launch(flags, script_text, timeout_s=120, interrupt=False, **environment) -> Job`: as `run_ranks`."""
    jobs = []

    def run(flags: list[str], script: str, timeout_s: float = 120, interrupt: bool = False, **env: str) -> Job:
        folder = tmp_path / f"launch{len(jobs)}"
        folder.mkdir()
        (folder / "train.py").write_text(textwrap.dedent(script))
        command = [sys.executable, "-m", "autopar", "launch", *flags, "train.py"]
        jobs.append(run_job(command, folder, timeout_s=timeout_s, interrupt=interrupt, **env))
        return jobs[-1]

    yield run
    for job in jobs:
        assert not job.left, f"left behind: {job.left}\n{job.output}"
