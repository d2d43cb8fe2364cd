"""Steps of which much depends on single rows only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

V, D, H, EXAMPLES, TOKENS = 23, 6, 7, 24, 5
Params = dict[str, jax.Array]
Loss = Callable[[Params, dict[str, jax.Array]], Any]


def make_state(dtype: Any = np.float64) -> Params:
    rng = np.random.default_rng(0)
    shapes = {"emb": (V, D), "other": (V, D), "w1": (D, H), "w2": (H, D), "b": (H,), "pos": (TOKENS, D)}
    return {k: jnp.asarray(rng.normal(size=s), dtype) for k, s in shapes.items()}


def batch_of(k: int, dtype: Any = np.float64, examples: int = EXAMPLES) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(100 + k)
    return {
        "ids": rng.integers(0, V, (examples, TOKENS)).astype(np.int32),
        "more": rng.integers(0, V, (examples, TOKENS)).astype(np.int32),
        "x": rng.normal(size=(examples, TOKENS)).astype(dtype),
        "key": np.array([0, k], np.uint32),
    }


def step_of(loss: Loss) -> Callable[..., Any]:
    def step(state: Params, batch: dict[str, jax.Array]) -> tuple[Params, Any]:
        value, grads = jax.value_and_grad(loss)(state, batch)
        return {k: (v - 0.1 * grads[k]).astype(v.dtype) for k, v in state.items()}, value

    return step


def perceptron(p: Params, rows: jax.Array) -> jax.Array:
    return jax.nn.relu(rows @ p["w1"] + p["b"]) @ p["w2"]


def whole(p: Params, batch: Any) -> jax.Array:
    rows = p["emb"][batch["ids"]]
    made = perceptron(p, rows)
    return jnp.mean((made - rows) ** 2) + jnp.mean(made**2)


def tower(p: Params, batch: Any) -> jax.Array:
    """Examples meet what is their own after the products: sums of their gradients go back through those."""
    return jnp.mean((perceptron(p, p["emb"][batch["ids"]]).sum(-1) - batch["x"]) ** 2)


def bags(p: Params, batch: Any) -> jax.Array:
    """Rows of an example are added up before the last product, which isn't one of rows."""
    hidden = jax.nn.relu(p["emb"][batch["ids"]] @ p["w1"])
    return jnp.mean((hidden.mean(1) @ p["w2"]) ** 3)


def filled(p: Params, batch: Any) -> jax.Array:
    return jnp.mean(perceptron(p, jnp.take(p["emb"], batch["ids"], axis=0)) ** 2)
