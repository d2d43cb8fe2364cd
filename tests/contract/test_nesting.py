"""A planned step inside other JAX transformations: inlined where that is exact."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar

IDS = jnp.array([[1, 4, 9], [7, 4, 2], [0, 0, 1]], jnp.int32)


def step(state: Any, ids: jax.Array) -> tuple[Any, jax.Array]:
    loss, grad = jax.value_and_grad(lambda t: jnp.mean(jnp.tanh(t[ids]) ** 2))(state["table"])
    return {"table": state["table"] - 0.3 * grad}, loss


def start() -> Any:
    return {"table": jnp.asarray(np.random.default_rng(0).normal(size=(30, 2)), jnp.float32)}


def close(a: Any, b: Any) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), a, b)


def test_under_jit() -> None:
    planned = autopar.parallelize(step, strategy="ps")
    state = start()
    close(jax.jit(lambda s, i: planned(planned(s, i[0])[0], i[1]))(state, IDS), step(step(state, IDS[0])[0], IDS[1]))
    assert not state["table"].is_deleted()
    assert planned.plan is not None and planned.plan.lifts


def test_under_scan() -> None:
    planned = autopar.parallelize(step, strategy="ps")
    close(jax.lax.scan(planned, start(), IDS), jax.lax.scan(step, start(), IDS))


def test_under_vmap() -> None:
    planned = autopar.parallelize(step, strategy="ps")
    states = jax.tree.map(lambda x: jnp.stack([x, 2 * x, -x]), start())
    expected = jax.vmap(step)(states, IDS)
    close(jax.vmap(planned)(states, IDS), expected)  # donates, as a vmap of a jit with donation does


def test_called_inside_and_outside() -> None:
    planned = autopar.parallelize(step, strategy="ps", donate=False)
    inside = jax.jit(planned)(start(), IDS[0])
    close(inside, planned(start(), IDS[0]))
