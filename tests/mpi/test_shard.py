"""`shard` across real processes: all cases of `shard_cases.py`, once per shape of the world."""

from __future__ import annotations

import pytest

from .global_ranks import run_ranks


@pytest.mark.parametrize(("ranks", "devices"), [(2, 1), (2, 2), (3, 1)])
def test_shard(ranks: int, devices: int) -> None:
    run_ranks(ranks, ["tests/mpi/worker.py", "tests.mpi.shard_cases", str(devices)])
