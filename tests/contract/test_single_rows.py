"""Arrays whose row axis has size 1 meet rows: they are broadcast, and are no rows themselves."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import autopar
from autopar.analysis.primitives import ELEMENTWISE
from tests.support.single_rows import batch_of, state_of, train, with_momentum

HOSTS = ("ps", "hosts")


@pytest.mark.parametrize(("width", "strategy"), [(3, "ps"), (1, "ps"), (3, HOSTS)])
def test_single_rows_meet_rows(width: int, strategy: Any) -> None:
    step, plain = autopar.parallelize(train, strategy={"t": strategy}), jax.jit(train)
    state, wanted = state_of(11, width), state_of(11, width)
    for seed in range(2):
        state, loss = step(state, batch_of(11, seed))
        wanted, other = plain(wanted, batch_of(11, seed))
        np.testing.assert_allclose(loss, other, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a), b, rtol=1e-5), dict(state), wanted)
    assert step.latest is not None
    (table,) = step.latest.compiled.plan.parameters
    assert table.lifted


def test_rows_with_momentum_are_deferred() -> None:
    state = {**state_of(11), "momentum": np.zeros((11, 3), np.float32)}
    plan = autopar.parallelize(with_momentum, strategy={"t": "ps"}).planned_for(state, batch_of(11, 0)).compiled.plan
    assert plan.defers, plan.parameters[0].reason


def test_operands_have_the_shape_of_the_result() -> None:
    """Whoever follows an axis through an elementwise equation finds it in every operand, in loops too."""
    compiled = autopar.parallelize(train).planned_for(state_of(11), batch_of(11, 0)).compiled
    found = [e for e in compiled.analysed.block.walk() if e.op in ELEMENTWISE]
    assert len(found) > 10
    assert all(a.shape in ((), e.outputs[0].shape) for e in found for a in e.inputs)
