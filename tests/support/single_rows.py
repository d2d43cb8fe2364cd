"""A step in which arrays with axes of size 1 meet rows: JAX broadcasts them without saying so."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

WIDTH, BATCH = 3, 8


def state_of(rows: int, width: int = WIDTH) -> dict[str, Any]:
    """Beside the table: rates for each column, for all, for each row; slots by rows and by columns."""
    rng = np.random.default_rng(0)
    shapes = {"t": (rows, width), "rate": (1, width), "scale": (1, 1), "by_row": (rows, 1), "by_column": (1, width)}
    return {k: jnp.float32(rng.uniform(0.1, 1.0, shape)) for k, shape in shapes.items()}


def batch_of(rows: int, seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, rows, BATCH)


def train(state: dict[str, Any], ids: Any) -> tuple[dict[str, Any], jax.Array]:
    loss, g = jax.value_and_grad(lambda t: jnp.mean(jnp.square(t[ids])))(state["t"])
    rate, scale = state["rate"], state["scale"]
    by_row = state["by_row"] + jnp.sum(g * g, 1, keepdims=True)
    by_column = state["by_column"] + jnp.sum(g * g, 0, keepdims=True)
    move = jnp.where(rate > 0.5, rate * g, scale * g) / jnp.sqrt(jnp.minimum(by_row, scale) * by_column)
    move = jnp.concatenate([jnp.clip(move, -rate, 2 * rate), g * rate], 1)[:, : g.shape[1]]

    def body(carry: Any, rate: Any) -> tuple[Any, None]:
        return carry - rate * move, None

    new, _ = jax.lax.scan(body, state["t"], jnp.stack([rate, rate * scale]))
    return {**state, "t": new, "by_row": by_row, "by_column": by_column}, loss


def with_momentum(state: dict[str, Any], ids: Any) -> tuple[dict[str, Any], jax.Array]:
    """The rows that the step doesn't touch move, too."""
    loss, g = jax.value_and_grad(lambda t: jnp.mean(jnp.square(t[ids])))(state["t"])
    momentum = 0.9 * state["momentum"] + state["scale"] * g
    return {**state, "t": state["t"] - state["rate"] * momentum, "momentum": momentum}, loss
