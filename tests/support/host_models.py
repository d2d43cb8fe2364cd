"""Losses of tables on hosts in which examples meet, or rows are looked up several times, and their step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

HOSTED = ("ps", "hosts")


def _normed(p: Any, batch: Any) -> jax.Array:
    """Batch norm of two lookups in one table."""
    x = (p["t"][batch["ids"]].mean(1) + 2 * p["t"][batch["ids"][:, 0]]) @ p["w"]
    x = (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-3)
    return jnp.mean((x - batch["y"]) ** 2)


def _in_batch(p: Any, batch: Any) -> jax.Array:
    """Softmax over the batch's own items."""
    scores = (p["t"][batch["ids"]].mean(1) @ p["w"]) @ (p["u"][batch["k"]] @ p["w"]).T
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(scores)))


def _looped(p: Any, batch: Any) -> jax.Array:
    """Lookups at each turn of a loop that is computed again, and beside it."""
    turn = jax.checkpoint(lambda h, ids: (jnp.tanh(h / 2 + p["t"][ids] @ p["w"]), None))
    h, _ = jax.lax.scan(turn, jnp.zeros_like(batch["y"]), batch["ids"].T)
    return jnp.mean((h + p["t"][batch["ids"][:, 0]] @ p["w"] - batch["y"]) ** 2)


LOSSES: Mapping[str, Callable[[Any, Any], jax.Array]] = {"normed": _normed, "in_batch": _in_batch, "looped": _looped}


def start() -> dict[str, jax.Array]:
    """Two tables and weights."""
    rng = np.random.default_rng(0)
    shapes = {"t": (50, 4), "u": (40, 4), "w": (4, 6)}
    return {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}


def batch_of(seed: int, examples: int) -> dict[str, np.ndarray]:
    """So many examples of three ids, one id, and six numbers each."""
    rng = np.random.default_rng(seed)
    ids = {"ids": rng.integers(0, 50, (examples, 3)), "k": rng.integers(0, 40, (examples,))}
    return {**ids, "y": rng.normal(size=(examples, 6)).astype(np.float32)}


def step_of(loss: Callable[[Any, Any], jax.Array]) -> Callable[..., Any]:
    """Gradient descent, whose results are the loss, the gradient's norm and a number for each example."""

    def step(params: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), (
            value,
            norm,
            params["t"][batch["ids"]].sum((1, 2)),
        )

    return step
