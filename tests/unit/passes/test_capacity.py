"""Static bounds of rows that travel."""

from __future__ import annotations

import numpy as np
import pytest

from autopar.ir.layout import RowLayout
from autopar.ir.program_plan import Bounds
from autopar.passes.choosing.capacity import (
    bounds_layout,
    device_ids,
    imbalance,
    limited,
    owner_loads,
    tightened,
    with_layout,
)

V, N = 1000, 4


def family(*, cyclic: bool = False) -> Bounds:
    layout = RowLayout(V, N, cyclic)
    return Bounds(N * (layout.shard_rows + 1), 400, 100, layout)


def test_each_device_asks_for_its_distinct_rows() -> None:
    ids = np.array([5, 5, 7, V, 1, 2, 2, 3], np.int32)
    each = device_ids([ids], [True], 2, V)
    assert [rows.tolist() for rows in each] == [[5, 7], [1, 2, 3]], "V means no row"
    assert [rows.tolist() for rows in device_ids([ids], [False], 2, V)] == [[1, 2, 3, 5, 7]] * 2


def test_rows_that_lie_together_are_distributed_cyclically() -> None:
    together = [np.arange(k, k + 100, dtype=np.int32) for k in range(4)]
    assert imbalance(together, RowLayout(V, N, False)) == pytest.approx(4)
    found = with_layout(family(), together)
    assert found.layout is not None and found.layout.cyclic
    assert imbalance(together, found.layout) == pytest.approx(1)
    apart = [np.arange(k, V, 10, dtype=np.int32) for k in range(4)]
    assert with_layout(family(), apart) == family()


def test_a_measured_capacity_has_headroom_in_steps_of_8() -> None:
    requested = [np.arange(0, V, 25, dtype=np.int32)] * N  # 10 of each owner
    found = tightened(family(), requested, 1.25)
    assert (found.capacity, found.tight, found.rows) == (16, True, N * (N * 16 + 1))
    assert owner_loads(requested, bounds_layout(family())).tolist() == [40] * N


def test_a_capacity_is_no_more_than_what_no_batch_exceeds() -> None:
    assert limited(family(), 99.5) == family()
    assert limited(family(), 95.5).capacity == 96
