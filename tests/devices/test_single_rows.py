"""Arrays whose row axis has size 1 meet rows that are spread over four devices."""

from __future__ import annotations

import jax
import pytest

import autopar
from tests.support.meshes import mesh_of
from tests.support.row_steps import same
from tests.support.single_rows import batch_of, state_of, train


@pytest.mark.parametrize("rows", [16, 11])
def test_single_rows_meet_spread_rows(rows: int) -> None:
    step, plain = autopar.parallelize(train, strategy={"t": "ps"}, mesh=mesh_of(4)), jax.jit(train)
    state, wanted = state_of(rows), state_of(rows)
    for seed in range(2):
        state, loss = step(state, batch_of(rows, seed))
        wanted, other = plain(wanted, batch_of(rows, seed))
        same((autopar.materialize(state), loss), (wanted, other))
    assert step.latest is not None
    assert all(p.lifted for p in step.latest.compiled.plan.parameters)
