"""`autopar.top_k` against `jax.lax.top_k` of all scores."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from tests.support.pairs import named, paired


@paired(
    {
        "queries": named([(), (5,), (2, 3)]),
        "sizes": named([(1, 1), (3, 4), (5, 4), (7, 100)]),
        "items": named([7, 12, 13, 40]),
    }
)
def test_the_items_and_their_order(queries: tuple[int, ...], sizes: tuple[int, int], items: int) -> None:
    """Scores are small whole numbers, so that many are equal. `sizes`: how many are wanted, and of a block."""
    k, block = sizes
    rng = np.random.default_rng(items)
    q = jnp.asarray(rng.integers(-2, 3, (*queries, 3)).astype(np.float32))
    table = jnp.asarray(rng.integers(-2, 3, (items, 3)).astype(np.float32))
    values, numbers = jax.jit(lambda q, t: autopar.top_k(q, t, k, block=block))(q, table)
    wanted = jax.lax.top_k(q @ table.T, k)
    np.testing.assert_array_equal(values, wanted[0])
    np.testing.assert_array_equal(numbers, wanted[1])
    assert numbers.dtype == jnp.int32


def test_values_that_are_not_finite() -> None:
    """NaN counts as the largest, as in `lax.top_k`; items of -inf are items."""
    table = jnp.asarray([-jnp.inf, 1.0, jnp.nan, -jnp.inf, jnp.inf, -jnp.inf, 0.0])[:, None]
    for k in (2, 7):
        found = autopar.top_k(jnp.ones((2, 1)), table, k, block=2)
        for mine, theirs in zip(found, jax.lax.top_k(jnp.ones((2, 1)) @ table.T, k), strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_no_k_items() -> None:
    for k in (0, 4):
        with pytest.raises(autopar.ArgumentsError, match=f"k={k}, and there are 3 items"):
            autopar.top_k(jnp.ones((2, 1)), jnp.ones((3, 1)), k)
