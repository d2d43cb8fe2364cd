"""A recommender of 2, 8 or 26 tables, of mixed widths, dtypes and optimizers, beside the plain step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

COUNTS = (2, 8, 26)
EXAMPLES = 12


def _name(k: int) -> str:
    return f"t{k:02}"  # JAX sorts them


def _rows(k: int) -> int:
    return 5 + 7 * k


def _mixed(count: int) -> optax.GradientTransformation:
    """Every third table by another optimizer than the rest."""
    labels = {"tables": {_name(k): "some" if k % 3 == 0 else "rest" for k in range(count)}, "w": "rest"}
    return optax.multi_transform({"some": optax.sgd(0.2, momentum=0.9), "rest": optax.adagrad(0.2)}, labels)


OPTIMIZERS: Mapping[str, Callable[[int], optax.GradientTransformation]] = {
    "clipped Adagrad": lambda count: optax.chain(optax.clip_by_global_norm(0.5), optax.adagrad(0.2)),
    "AdamW": lambda count: optax.adamw(0.05),
    "mixed": _mixed,
}


def start(count: int, tx: optax.GradientTransformation) -> Any:
    """Makes a state: tables of two widths, every fourth one of 16 bits."""
    random = np.random.default_rng(0)

    def table(k: int) -> jax.Array:
        values = random.normal(size=(_rows(k), 4 + 2 * (k % 2)))
        return jnp.asarray(values, jnp.bfloat16 if k % 4 == 3 else jnp.float32)

    tables = {_name(k): table(k) for k in range(count)}
    width = sum(t.shape[1] for t in tables.values())
    params = {"tables": tables, "w": jnp.asarray(random.normal(size=(width, 1)) * 0.3, jnp.float32)}
    return {"params": params, "opt": tx.init(params)}


def batch(count: int, k: int) -> dict[str, np.ndarray]:
    """Makes the k-th batch."""
    random = np.random.default_rng(k)
    ids = np.stack([random.integers(0, _rows(t), EXAMPLES) for t in range(count)], 1)
    return {"ids": ids.astype(np.int32), "y": random.normal(size=EXAMPLES).astype(np.float32)}


def step_of(tx: optax.GradientTransformation) -> Callable[..., Any]:
    """Makes a train step."""

    def loss(params: Any, batch: Any) -> jax.Array:
        pairs = enumerate(params["tables"].values())
        rows = [table[batch["ids"][:, k]].astype(jnp.float32) for k, table in pairs]
        return jnp.mean(((jnp.tanh(jnp.concatenate(rows, 1)) @ params["w"])[:, 0] - batch["y"]) ** 2)

    def train_step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    return train_step


def check(count: int, name: str, planned: Callable[[Any], Any], steps: int = 4) -> Any:
    """Trains as `planned` runs a step, and as JAX does; compares all leaves. Returns the planned step."""
    tx = OPTIMIZERS[name](count)
    step, plain = planned(step_of(tx)), jax.jit(step_of(tx))
    mine, theirs = start(count, tx), start(count, tx)
    for k in range(steps):
        (mine, loss), (theirs, wanted) = step(mine, batch(count, k)), plain(theirs, batch(count, k))
        np.testing.assert_allclose(loss, wanted, rtol=1e-3, err_msg=f"{count} {name}")
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(theirs), jax.tree.leaves(mine), strict=True):
        coarse = 4e-2 if a.dtype == jnp.bfloat16 else 1e-3
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        np.testing.assert_allclose(b, a, rtol=coarse, atol=coarse, err_msg=f"{count} {name} {path}")
    return step


def alike(count: int) -> tuple[Callable[..., Any], Any, dict[str, np.ndarray]]:
    """Makes a train step of tables of one width, a state and a batch."""
    tx = optax.adagrad(0.2)
    params = {"tables": {_name(k): jnp.full((20_000 + 100 * k, 4), 0.1) for k in range(count)}}
    params["w"] = jnp.full((4 * count, 1), 0.1)
    return step_of(tx), {"params": params, "opt": tx.init(params)}, batch(count, 0)
