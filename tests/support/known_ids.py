"""Steps whose ids depend on rows of the table that they look up, though which rows may be meant is known before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROWS, WIDTH, BATCH, CANDIDATES = 640, 6, 16, 24


def state_of() -> Any:
    rng = np.random.default_rng(1)
    return {name: jnp.asarray(rng.normal(size=(ROWS, WIDTH))) for name in ("table", "users")}


def batch_of(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    batch = {name: rng.integers(-3, ROWS, BATCH) for name in ("ids", "next", "users")}
    batch |= {"candidates": rng.integers(-3, ROWS, (BATCH, CANDIDATES)), "shared": rng.integers(-3, ROWS, CANDIDATES)}
    return {**batch, "reward": rng.normal(size=BATCH), "pick": rng.integers(-9, 2 * CANDIDATES, BATCH)}


def _moved(state: Any, table: Any, loss: Any) -> Any:
    return {**state, "table": table}, loss


def q_learning(state: Any, batch: Any) -> Any:
    """The best action in the next state: its column follows from the row."""
    q = state["table"]
    actions = jnp.argmax(q[batch["ids"]] + batch["reward"][:, None], -1)
    target = batch["reward"] + 0.9 * q[batch["next"], jnp.argmax(q[batch["next"]], -1)]
    error = target - q[batch["ids"], actions]
    return _moved(state, q.at[batch["ids"], actions].add(0.1 * error), jnp.square(error).mean())


def double_q(state: Any, batch: Any) -> Any:
    """Actions that one table prefers, valued by another."""
    q, target = state["table"], state["users"]
    best = jnp.argmax(q[batch["next"]], -1)

    def loss_fn(q: Any) -> Any:
        error = batch["reward"] + 0.9 * target[batch["next"], best] - q[batch["ids"], best]
        return jnp.square(error).mean()

    loss, gradient = jax.value_and_grad(loss_fn)(q)
    return {"table": q - 0.1 * gradient, "users": target.at[batch["users"], best].add(0.1)}, loss


def _hard_negatives(state: Any, batch: Any, candidates: Any, **mode: Any) -> Any:
    def loss_fn(state: Any) -> Any:
        table, users = state["table"], state["users"][batch["users"]]
        among = table.at[candidates].get(**mode)
        scores = jnp.einsum("bd,...cd->bc" if candidates.ndim == 1 else "bd,bcd->bc", users, among)
        hardest = jax.lax.top_k(jax.lax.stop_gradient(scores), 3)[1]
        ids = candidates[hardest] if candidates.ndim == 1 else jnp.take_along_axis(candidates, hardest, 1)
        wrong = jnp.einsum("bd,bkd->bk", users, table.at[ids].get(**mode))
        return jax.nn.softplus(wrong).mean() - (users * table[batch["ids"]]).sum(-1).mean()

    loss, gradient = jax.value_and_grad(loss_fn)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradient), loss


def shared_candidates(state: Any, batch: Any) -> Any:
    return _hard_negatives(state, batch, batch["shared"])


def own_candidates(state: Any, batch: Any) -> Any:
    return _hard_negatives(state, batch, batch["candidates"])


def clipped_candidates(state: Any, batch: Any) -> Any:
    return _hard_negatives(state, batch, batch["shared"] * 2, mode="clip")


def _picked(mode: str) -> Any:
    """Picks that may be out of range, as no row that is known: of a scatter, of what follows from a pick."""

    def step(state: Any, batch: Any) -> Any:
        table = state["table"]
        pick = batch["pick"] + (table[batch["ids"]].sum(-1) > 0)
        ids = (batch["shared"].at[pick].get(mode=mode) + 1) % (ROWS + 2)
        table = table.at[ids].add(0.5 * table.at[ids].get(mode=mode), mode="drop")
        return _moved(state, table, table[batch["ids"]].sum())

    return step


STEPS: Mapping[str, Any] = {
    "Q-learning": q_learning,
    "double Q-learning": double_q,
    "shared candidates": shared_candidates,
    "candidates of each example": own_candidates,
    "candidates, clipped": clipped_candidates,
    **{f"picks, {mode}": _picked(mode) for mode in ("fill", "clip", "promise_in_bounds")},
}
