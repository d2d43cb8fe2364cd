"""A recommender of many tables on hosts, most of them alike, and steps of it with what may keep tables apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

#: Rows of the tables: no number of ranks divides all. The last one is wider.
ROWS = (7, 40, 11, 64, 23, 9)
WIDTHS = (8, 8, 8, 8, 8, 12)
EXAMPLES = 12

OPTIMIZERS: Mapping[str, optax.GradientTransformation] = {
    "clipped Adagrad": optax.chain(optax.clip_by_global_norm(0.05), optax.adagrad(0.3)),
    "AdamW": optax.adamw(0.05),
    "momentum": optax.sgd(0.3, momentum=0.9),
}

Lookup = Callable[[jax.Array, jax.Array], jax.Array]
#: Lookups, of ids that may be out of range.
LOOKUPS: Mapping[str, Lookup] = {
    "by index": lambda table, ids: table[ids],
    "clip": lambda table, ids: jnp.take(table, ids, axis=0, mode="clip"),
    "fill": lambda table, ids: jnp.nan_to_num(jnp.take(table, ids, axis=0, mode="fill"), nan=0.5),
    "fill with 2": lambda table, ids: jnp.take(table, ids, axis=0, mode="fill", fill_value=2.0),
    "twice": lambda table, ids: table[ids] * table[ids[::-1] // 2],
    "in bags": lambda table, ids: table[jnp.stack([ids, ids // 2, ids // 3], 1)].mean(1),
}


def start(tx: optax.GradientTransformation, dtype: Any = jnp.float32) -> Any:
    """Makes a state."""
    random = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(random.normal(size=shape), dtype)

    tables = {f"t{k}": normal(n, d) for k, (n, d) in enumerate(zip(ROWS, WIDTHS, strict=True))}
    params = {"tables": tables, "w": normal(sum(WIDTHS), 1)}
    return {"params": params, "opt": tx.init(params)}


def batch(k: int, *, out_of_range: bool = False) -> dict[str, np.ndarray]:
    """Makes the k-th batch; if asked for some ids are no row's."""
    random = np.random.default_rng(k)
    most = [n + 3 if out_of_range else n for n in ROWS]
    least = -3 if out_of_range else 0
    ids = np.stack([random.integers(least, n, EXAMPLES) for n in most], 1).astype(np.int32)
    return {"ids": ids, "y": random.normal(size=EXAMPLES).astype(np.float32)}


def step_of(tx: optax.GradientTransformation, lookup: Lookup = LOOKUPS["by index"]) -> Callable[..., Any]:
    """Makes a train step."""

    def loss(params: Any, batch: Any) -> jax.Array:
        pairs = enumerate(params["tables"].values())
        rows = jnp.concatenate([lookup(table, batch["ids"][:, k]) for k, table in pairs], 1)
        return jnp.mean(((rows @ params["w"])[:, 0].astype(jnp.float32) - batch["y"]) ** 2)

    def train_step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    return train_step


def stacks(step: Any) -> list[int]:
    """Returns how many tables each stack has of the last plan."""
    stacked = step.latest.compiled.stacked
    if stacked is None:
        return []
    tables = {k for k, _ in stacked.program.tables}
    return [len(of.inputs) for k, of in enumerate(stacked.inputs) if not isinstance(of, int) and k in tables]


def assert_same(mine: Any, theirs: Any, rtol: float = 2e-5, atol: float = 2e-6) -> None:
    """Compares all leaves."""
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(theirs), jax.tree.leaves(mine), strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        np.testing.assert_allclose(b, a, rtol=rtol, atol=atol, err_msg=str(path))


def trained(step: Any, state: Any, steps: int, **options: Any) -> Any:
    """Takes some steps; `options`: of `batch`."""
    for k in range(steps):
        state, _ = step(state, batch(k, **options))
    return state
