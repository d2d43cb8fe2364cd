"""Conds over the gradients of several tables whose results are needed for all rows as well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar

ROWS = {"a": 48, "b": 20, "c": 33}


def clipped(grads: Any) -> Any:
    norm = optax.tree.norm(grads)
    return jax.tree.map(lambda g: g * (0.1 / norm).astype(g.dtype), grads)


def clip(grads: Any) -> Any:
    return jax.lax.cond(optax.tree.norm(grads) > 0.1, clipped, lambda g: g, grads)


def nested(grads: Any) -> Any:
    branch = lambda g: jax.lax.cond(optax.tree.norm(g) > 1.0, clipped, lambda h: h, g)  # noqa: E731
    return jax.lax.cond(optax.tree.norm(grads) > 0.1, branch, lambda g: g, grads)


def told(grads: Any) -> Any:
    """A branch that prints: it is run once."""

    def branch(g: Any) -> Any:
        jax.debug.callback(CALLS.append, optax.tree.norm(g))
        return clipped(g)

    return jax.lax.cond(optax.tree.norm(grads) > 0.0, branch, lambda g: g, grads)


CALLS: list[Any] = []


def step_of(change: Callable[[Any], Any], tx: optax.GradientTransformation) -> Callable[[Any, Any], Any]:
    def loss_of(p: Any, batch: Any) -> jax.Array:
        return jnp.mean(jnp.square(sum(p[k][batch["ids"] % n] for k, n in ROWS.items()) @ p["w"] - batch["y"]))

    def train(state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(state["params"], batch)
        updates, opt = tx.update(change(grads), state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    return train


@pytest.mark.parametrize(("change", "x64"), [(clip, True), (nested, False), (told, False)])
def test_conds_over_all_gradients(change: Callable[[Any], Any], x64: bool) -> None:
    tx = optax.adafactor(0.1, min_dim_size_to_factor=2)
    with jax.enable_x64(x64):
        rng = np.random.default_rng(0)
        params = {k: jnp.asarray(rng.normal(size=(n, 4))) for k, n in {**ROWS, "w": 4}.items()}
        state = wanted = {"params": params, "opt": tx.init(params)}
        batch = {"ids": rng.integers(0, 48, 8), "y": rng.normal(size=(8, 4))}
        batch["y"] = batch["y"].astype(params["a"].dtype)
        step, plain = autopar.parallelize(step_of(change, tx), strategy="ps", donate=False), step_of(change, tx)
        CALLS.clear()
        for _ in range(2):
            state, _ = step(state, batch)
        jax.effects_barrier()
        assert len(CALLS) == (2 if change is told else 0)
        for _ in range(2):
            wanted, _ = jax.jit(plain)(wanted, batch)
        tolerance = 1e-9 if x64 else 1e-4
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(np.asarray(a), b, rtol=tolerance, atol=tolerance / 10),
            autopar.materialize(state),
            wanted,
        )
