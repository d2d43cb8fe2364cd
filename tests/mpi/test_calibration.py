"""`python -m autopar calibrate` under the launcher."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.support.mpi.jobs import run_job


def calibrated(folder: Path, name: str, seconds: str) -> str:
    """What the first rank prints, in the time that it is given."""
    (folder / name).mkdir()
    launch = (sys.executable, "-m", "autopar", "launch", "-n", "2", "-m", "autopar", "calibrate", "--seconds", seconds)
    job = run_job(launch, folder / name, timeout_s=200, XDG_CACHE_HOME=str(folder))
    assert job.code == 0 and not job.left, job.output
    return job.output


def test_ranks_calibrate_ahead(tmp_path: Path) -> None:
    """What is measured the next processes read, and go on from there."""
    first = calibrated(tmp_path, "first", "4")
    assert "measuring what exchanges cost on 2 devices" in first and "no time for: " in first
    (file,) = (tmp_path / "autopar").glob("rates-*.json")
    figures = json.loads(file.read_text())
    assert figures["product"]["512"] > 0
    again = calibrated(tmp_path, "again", "0")
    assert json.loads(file.read_text()) == figures
    rows = [line for line in first.splitlines() if line.startswith("  ")]
    assert rows and all(row in again.splitlines() for row in rows)
