"""Lookups of rows of arrays that are spread over devices and aren't lifted: each device looks up those that it has."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from tests.support.meshes import mesh_of

LOOKUPS = {
    "rows": lambda v, i: v[i],
    "columns": lambda v, i: v[i, :2],
    "along axis 1": lambda v, i: v.T[:, i].T,
    "filled": lambda v, i: v.at[2 * i].get(mode="fill", fill_value=7),
    "filled with NaN": lambda v, i: jnp.nan_to_num(v.at[2 * i].get(mode="fill"), nan=3.0),
    "dropped below": lambda v, i: v.at[i - 90].get(mode="fill", fill_value=7, wrap_negative_indices=False),
    "columns from a place": lambda v, i: jax.vmap(lambda k: jax.lax.dynamic_slice(v, (k, k % 5), (1, 2))[0])(i),
    "clipped": lambda v, i: v.at[2 * i].get(mode="clip"),
    "bags": lambda v, i: v[i[:, None] + jnp.arange(3)].sum(1),
    "small numbers": lambda v, i: v[(i % 100).astype(jnp.int16)],
    "unsigned": lambda v, i: v[i.astype(jnp.uint32)],
    "integers": lambda v, i: v.astype(jnp.int32)[i] + 0.0,
    "in a loop": lambda v, i: jax.lax.scan(lambda c, k: (c + v[i + k], None), jnp.zeros((8, 4)), jnp.arange(3))[0],
}


@pytest.mark.parametrize("rows", [200, 203])
@pytest.mark.parametrize("name", LOOKUPS)
def test_rows_of_an_argument(name: str, rows: int) -> None:
    """It has as many rows as would be examples; nobody said that it has none."""

    def step(w: jax.Array, vectors: jax.Array, ids: jax.Array) -> Any:
        def loss(w: jax.Array) -> Any:
            each = jnp.tanh(LOOKUPS[name](vectors, ids) @ w[: LOOKUPS[name](vectors, ids).shape[1]])
            return each.mean(), each

        (value, each), slope = jax.value_and_grad(loss, has_aux=True)(w)
        return w - 0.1 * slope, value, each

    rng = np.random.default_rng(0)
    vectors, w = jnp.asarray(rng.normal(size=(rows, 4)), jnp.float32), jnp.ones((4, 2))
    ids = rng.integers(0, 197, 8).astype(np.int32)
    planned = autopar.parallelize(step, mesh=mesh_of(4), donate=False, state_argnums=0)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        planned(w, vectors, ids),
        jax.jit(step)(w, vectors, ids),
    )
    assert bool(autopar.check(planned, w, vectors, ids))
    text = planned.lower(w, vectors, ids).compile().as_text()
    assert f"f32[{rows},4]" not in text or rows % 4, "no device has all"
