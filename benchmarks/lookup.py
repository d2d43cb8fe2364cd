"""The step that every comparison is made on: V rows of D floats, an MLP, 640 Zipf ids, clip and Adagrad.

Plain JAX (an ordinary Optax step), and the best that one can write by hand for it: sorted unique ids, differentiation
with respect to the pulled rows, in-place writes with unique sorted indices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

D, HIDDEN, IDS = 256, 512, (32, 20)
RATE, CLIP, EPS = 0.1, 1.0, 1e-7


def transformation() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(CLIP), optax.adagrad(RATE, eps=EPS))


def make_state(rows: int, dim: int = D, hidden: int = HIDDEN) -> dict[str, Any]:
    key = jax.random.key(0)
    params = {
        "emb": jax.random.normal(key, (rows, dim)) * 0.01,
        "w1": jax.random.normal(jax.random.fold_in(key, 1), (dim, hidden)) * 0.05,
        "w2": jax.random.normal(jax.random.fold_in(key, 2), (hidden, dim)) * 0.05,
    }
    return {"params": params, "opt": transformation().init(params)}


def zipf_ids(rows: int, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """int32 ids: few rows are most of them."""
    return (np.random.default_rng(seed).zipf(1.3, size=shape).clip(max=rows) - 1).astype(np.int32)


def zipf_batches(rows: int, shape: tuple[int, ...] = IDS) -> Callable[[int], dict[str, Any]]:
    def batch(k: int) -> dict[str, Any]:
        return {"ids": jnp.asarray(zipf_ids(rows, shape, k))}

    return batch


def loss_of(rows: jax.Array, w1: jax.Array, w2: jax.Array) -> jax.Array:
    hidden = jax.nn.relu(rows @ w1) @ w2
    return jnp.mean((hidden - rows) ** 2) + jnp.mean(hidden**2)


def plain_step(
    state: dict[str, Any], batch: dict[str, Any], tx: Callable[[], Any] = transformation
) -> tuple[dict[str, Any], jax.Array]:
    """What a user writes."""

    def loss_fn(params: dict[str, Any]) -> jax.Array:
        return loss_of(params["emb"][batch["ids"]], params["w1"], params["w2"])

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    updates, opt = tx().update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss


def bare_step(state: dict[str, Any], batch: dict[str, Any]) -> tuple[dict[str, Any], jax.Array]:
    """A lookup and its update, and next to nothing else."""
    loss, grads = jax.value_and_grad(lambda p: jnp.sum(p["emb"][batch["ids"]] ** 2))(state["params"])
    updates, opt = transformation().update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss


def hand_step(state: dict[str, Any], batch: dict[str, Any]) -> tuple[dict[str, Any], jax.Array]:
    """The same function by hand, on the touched rows."""
    ids, params = batch["ids"], state["params"]
    slots = jax.tree.leaves(state["opt"])
    emb, extent = params["emb"], params["emb"].shape[0]
    unique, inverse = jnp.unique(ids.ravel(), return_inverse=True, size=min(extent, ids.size), fill_value=extent)
    rows = emb.at[unique].get(mode="fill", fill_value=0, indices_are_sorted=True)
    acc = slots[0].at[unique].get(mode="fill", fill_value=1, indices_are_sorted=True)

    def loss_fn(rows: jax.Array, w1: jax.Array, w2: jax.Array) -> jax.Array:
        return loss_of(rows[inverse.reshape(ids.shape)], w1, w2)

    dense = {"w1": params["w1"], "w2": params["w2"]}
    loss, grads = jax.value_and_grad(loss_fn, (0, 1, 2))(rows, *dense.values())
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in grads))
    scale = jnp.where(norm < CLIP, 1.0, CLIP / norm)

    def adagrad(p: jax.Array, a: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
        g = g * scale
        a = a + g * g
        return p - RATE * g * jnp.where(a > 0, jax.lax.rsqrt(a + EPS), 0.0), a

    pairs = zip((rows, *dense.values()), (acc, *slots[1:]), grads, strict=True)
    (rows, acc), *rest = (adagrad(*x) for x in pairs)
    at = jnp.where(unique < extent, unique, extent + jnp.arange(unique.size, dtype=unique.dtype))
    options = {"mode": "drop", "unique_indices": True, "indices_are_sorted": True}
    new = {"emb": emb.at[at].set(rows, **options)} | {k: p for k, (p, _) in zip(dense, rest, strict=True)}
    opt = jax.tree.unflatten(
        jax.tree.structure(state["opt"]), [slots[0].at[at].set(acc, **options), *(a for _, a in rest)]
    )
    return {"params": new, "opt": opt}, loss
