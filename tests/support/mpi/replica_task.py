"""A task for replicas: a small model with a table, its minibatches, and how states of ranks are compared."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import autopar
from autopar.launch.group import everyone

FOLDER = Path(os.environ.get("XDG_CACHE_HOME", tempfile.gettempdir())).parent
RANK, RANKS = jax.process_index(), jax.process_count()
ROWS, WIDTH = 701, 4


def some(*cases: Any) -> Any:
    """All of them where there are more than two devices, in `make test-all`; else the last one."""
    return cases if jax.device_count() > 2 else cases[-1:]


def minibatch(client: int, k: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng((client, k))
    ids = rng.integers(0, ROWS, (6, 3)).astype(np.int32)
    return {"ids": ids, "y": rng.normal(size=(6, WIDTH)).astype(np.float32)}


def step_of(tx: optax.GradientTransformation) -> Callable[..., Any]:
    def step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            h = jnp.tanh(params["emb"][batch["ids"]].sum(1) @ params["w"] + params["b"])
            return jnp.mean((h - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt, "key": state["key"]}, loss

    return step


def make_state(tx: optax.GradientTransformation) -> Any:
    a, b, key = jax.random.split(jax.random.key(0), 3)
    params = {
        "b": jnp.zeros(WIDTH),
        "emb": jax.random.normal(a, (ROWS, WIDTH)),
        "w": jax.random.normal(b, (WIDTH, WIDTH)) / 2,
    }
    return {"params": params, "opt": tx.init(params), "key": key}


def trained(step: Any, state: Any, steps: Sequence[int], client: int = RANK) -> Any:
    for k in steps:
        state, _ = step(state, minibatch(client, k))
    return state


def near(a: Any, b: Any, rtol: float = 1e-5) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol, 1e-6)


def same(a: Any, b: Any) -> None:
    leaves = (jax.tree.leaves(autopar.materialize(tree)) for tree in (a, b))
    for x, y in zip(*leaves, strict=True):
        x, y = (jax.random.key_data(v) if jnp.issubdtype(v.dtype, jax.dtypes.prng_key) else v for v in (x, y))
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), strict=True)


def alike(values: Any) -> bool:
    """Whether this is the same on all processes."""
    seen = everyone().values([np.asarray(x).tolist() for x in jax.tree.leaves(values)], "comparing")
    return all(value == seen[0] for value in seen)
