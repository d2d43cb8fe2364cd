"""Exchanges between ranks against NumPy: `exchange_cases.py`, in processes started once for each number of ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.mpi.exchange_cases import CASES
from tests.mpi.ranks import ROOT, run_ranks

MODULE = "tests.mpi.exchange_cases"


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_exchanges_are_exact(ranks: int, tmp_path: Path) -> None:
    assert f"{len(CASES)} cases passed" in run_ranks(ranks, MODULE, output=tmp_path / "output")


def test_one_rank_needs_no_mpi() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", MODULE, "alone"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and f"{len(CASES)} cases passed" in done.stdout, done.stdout + done.stderr
