"""Exchanges between ranks against NumPy: `exchange_ranks.py`, in processes started once for each number of ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.mpi.exchange_ranks import BY_LEADERS, DIRECT, REDUCED
from tests.support.mpi.leader_cases import MACHINES
from tests.support.mpi.ranks import ROOT, run_ranks
from tests.support.pairs import long

MODULE = "tests.support.mpi.exchange_ranks"


@pytest.mark.parametrize("ranks", [long(1), long(2), 3, long(4)])
def test_exchanges_are_exact(ranks: int, tmp_path: Path) -> None:
    text = run_ranks(ranks, MODULE, output=tmp_path / "output")
    ways = dict.fromkeys(("blocking", "polling"), DIRECT) | {
        f"machines {m}": BY_LEADERS for m in MACHINES.get(ranks, ())
    }
    ways |= {f"rings, {way}": REDUCED for way in ways}
    assert all(f"{way}: {len(cases)} cases passed" in text for way, cases in ways.items()), text


def test_one_rank_needs_no_mpi() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", MODULE, "alone"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and f"{len(DIRECT)} cases passed" in done.stdout, done.stdout + done.stderr
