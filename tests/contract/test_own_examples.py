"""What is computed of each example by itself runs in microbatches: no primitive of JAX stands in the way."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import autopar
from tests.support.own_examples import EACH, given, step_of


@pytest.fixture(autouse=True)
def _float64() -> Any:
    with jax.enable_x64(True):
        yield


def test_microbatches() -> None:
    step = step_of(EACH)
    planned = autopar.parallelize(step, microbatches=2, donate=False)
    ours, theirs = planned(*given()), jax.jit(step)(*given())
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)
