"""Batches without ids or examples: each kind of lookup, on one device and on hosts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from tests.support.no_ids import SHAPES, difference
from tests.support.pairs import diagonal

PLACES: dict[str, dict[str, Any]] = {"one device": {}, "hosts": {"strategy": ("ps", "hosts")}}


@pytest.mark.parametrize(("shape", "options"), diagonal(SHAPES, PLACES))
def test_no_ids(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    assert difference(shape, **options) < 1e-6


@pytest.mark.parametrize("options", PLACES.values(), ids=PLACES)
def test_products_of_no_rows_with_some(options: dict[str, Any]) -> None:
    def step(table: jax.Array, batch: dict[str, Any]) -> Any:
        def loss_of(table: jax.Array) -> jax.Array:
            none, some = table[batch["none"]], table[batch["some"]]
            return jnp.sum(jax.nn.logsumexp(none @ some.T, axis=1)) + jnp.mean(some**2)

        loss, grads = jax.value_and_grad(loss_of)(table)
        return table - 0.1 * grads, loss

    table = jnp.asarray(np.random.default_rng(0).normal(size=(40, 3)), jnp.float32)
    batch = {"none": np.zeros(0, np.int32), "some": np.array([1, 2, 1, 39], np.int32)}
    new, loss = autopar.parallelize(step, donate=False, **options)(table, batch)
    wanted, wanted_loss = jax.jit(step)(table, batch)
    np.testing.assert_allclose(np.asarray(autopar.materialize(new)), wanted, rtol=1e-6)
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-6)


@pytest.mark.parametrize("options", PLACES.values(), ids=PLACES)
def test_no_ids_beside_an_update_that_looks_rows_up(options: dict[str, Any]) -> None:
    def step(state: Any, ids: jax.Array) -> Any:
        params, sums = state
        rows = lambda p: jnp.sum(p["table"][ids.reshape(-1)] @ p["w"] + p["b"])  # noqa: E731
        loss, grads = jax.value_and_grad(rows)(params)
        new, sums = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), sums + grads["table"]
        moved = jnp.where(grads["table"] != 0, -sums, params["table"])
        return (new | {"table": jnp.take(moved, jnp.array([2, 0, 1]), axis=0)}, sums), loss

    params = {"table": jnp.arange(9.0).reshape(3, 3), "w": jnp.ones((3, 3)), "b": jnp.ones(3)}
    state, ids = (params, jnp.zeros((3, 3))), np.zeros((4, 0), np.int32)
    found = autopar.materialize(autopar.parallelize(step, donate=False, **options)(state, ids))
    jax.tree.map(np.testing.assert_array_equal, found, jax.jit(step)(state, ids))
