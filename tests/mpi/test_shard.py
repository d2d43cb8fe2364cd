"""`shard` across real processes: all cases of `shard_cases.py`, once per shape of the world."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpi.ranks import run_ranks


@pytest.mark.parametrize(("ranks", "devices"), [(2, 1), (2, 2), (3, 1)])
def test_shard(ranks: int, devices: int, tmp_path: Path) -> None:
    arguments = ["tests.mpi.shard_cases", str(devices), str(tmp_path)]
    assert "check_positions" in run_ranks(ranks, "tests.mpi.worker", *arguments, output=tmp_path / "output")
