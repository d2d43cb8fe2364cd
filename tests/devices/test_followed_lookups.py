"""Tables whose ids depend on their own rows, or that are looked up behind reshapes, on several devices."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import autopar
from tests.support.followed_lookups import STEPS, batch_of, state_of
from tests.support.meshes import mesh_of


@pytest.mark.parametrize("emit", ["pjit", "pmap"])
@pytest.mark.parametrize("name", STEPS)
def test_they_are_followed(name: str, emit: Any) -> None:
    with jax.enable_x64(True):
        step: Any = autopar.parallelize(STEPS[name], strategy="ps", state_argnums=0, emit=emit, mesh=mesh_of(4))
        plain = jax.jit(STEPS[name])
        state, wanted = state_of(), state_of()
        for seed in range(3):
            state, loss = step(state, batch_of(seed))
            wanted, other = plain(wanted, batch_of(seed))
            np.testing.assert_allclose(loss, other, rtol=1e-10)
        found = autopar.materialize(state)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a), b, rtol=1e-10), found, wanted)
    assert step.plan.table("table").lifted, step.plan.table("table").reason
