"""A step on one table, its states and its batches, for several devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

WIDTH = 3
TX = optax.chain(optax.clip_by_global_norm(0.1), optax.adagrad(0.1))


def make_state(rows: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    params = {"emb": jnp.asarray(rng.normal(size=(rows, WIDTH)), jnp.float32), "w": jnp.eye(WIDTH)}
    return {"params": params, "opt": TX.init(params)}


def step(state: Any, batch: Any) -> Any:
    loss, g = jax.value_and_grad(lambda p: jnp.mean(jnp.tanh(p["emb"][batch["ids"]] @ p["w"]) ** 2))(state["params"])
    updates, opt = TX.update(g, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss, "g": g["emb"]}


def same(mine: Any, theirs: Any) -> None:
    def check(a: Any, b: Any) -> None:
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=1e-6)

    jax.tree.map(check, mine, theirs)


def ids_in(low: int, high: int, seed: int = 0, length: int = 5) -> dict[str, Any]:
    return {"ids": np.random.default_rng(seed).integers(low, high, (8, length), np.int32)}
