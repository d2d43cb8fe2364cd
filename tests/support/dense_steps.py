"""A step whose dense parameters can be in shards."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

WIDTH, HIDDEN, ROWS = 16, 64, 400
TX = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.01))


def make_state() -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "emb": jax.random.normal(keys[0], (ROWS, WIDTH)),
        "w": jax.random.normal(keys[1], (WIDTH, HIDDEN)),
        "v": jax.random.normal(keys[2], (HIDDEN, 3)),
        "odd": jnp.ones(3),
    }
    return {"params": params, "opt": TX.init(params)}


def step(state: Any, ids: Any) -> Any:
    def loss_fn(p: Any) -> jax.Array:
        hidden = jnp.tanh(p["emb"][ids] @ p["w"].astype(jnp.bfloat16).astype(jnp.float32))
        return jnp.mean((hidden @ p["v"] + p["odd"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    updates, opt = TX.update(grads, state["opt"], state["params"])
    new = {"params": optax.apply_updates(state["params"], updates), "opt": opt}
    return new, {"loss": loss, "norm": optax.tree.norm(state["params"]), "w": 2.0 * new["params"]["w"]}
