"""`shard` across real processes: all cases of `shard_cases.py`, once per shape of the world."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.mpi.ranks import run_cases
from tests.support.pairs import long


@pytest.mark.parametrize(("ranks", "devices"), [long(2, 1), (2, 2), (3, 1)])
def test_shard(ranks: int, devices: int, tmp_path: Path) -> None:
    run_cases("shard_cases", ranks, devices, (), tmp_path)
