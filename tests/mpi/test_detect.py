"""`Cluster.detect` and `calibrate` across real processes: the cases of `detect_cases.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.mpi.ranks import run_cases
from tests.support.pairs import long


@pytest.mark.parametrize(("ranks", "devices"), [long(2, 1), (2, 2)])
def test_detect(ranks: int, devices: int, tmp_path: Path) -> None:
    run_cases("detect_cases", ranks, devices, (), tmp_path)
