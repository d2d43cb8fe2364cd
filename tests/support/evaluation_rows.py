"""A state whose rows wait, and what evaluations may read of it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from autopar.backends.global_arrays import local

ROWS, OTHER = 60, 40
TX = optax.adamw(0.05, weight_decay=0.1)


def train_step(state: Any, ids: jax.Array) -> tuple[Any, jax.Array]:
    def loss_fn(params: Any) -> jax.Array:
        return ((params["emb"][ids] - 1) ** 2).sum() + ((params["other"][:, ids % OTHER].T @ params["w"]) ** 2).sum()

    loss, gradients = jax.value_and_grad(loss_fn)(state["params"])
    updates, opt = TX.update(gradients, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss


def make_state() -> Any:
    a, b, c = jax.random.split(jax.random.key(0), 3)
    params = {
        "emb": jax.random.normal(a, (ROWS, 3)),
        "other": jax.random.normal(b, (2, OTHER)),
        "w": jax.random.normal(c, (2,)),
    }
    return {"params": params, "opt": TX.init(params)}


def rows_alone(state: Any, ids: jax.Array) -> Any:
    """With numbers out of range, negative ones, and some twice; the rows of one table run along its second axis."""
    moved = state["params"]["emb"][ids - 5] * state["params"]["w"].sum()
    return moved, jnp.take(state["params"]["other"], ids, axis=1), state["opt"][0].mu["emb"][ids % 7]


def whole(state: Any, ids: jax.Array) -> Any:
    return state["params"]["emb"][ids], jnp.linalg.norm(state["params"]["emb"]), state["params"]["other"].sum()


def by_a_table(state: Any, ids: jax.Array) -> Any:
    """The numbers of rows follow from rows that wait, too."""
    return state["params"]["emb"][(10 * jnp.abs(state["params"]["other"][0, ids % OTHER])).astype(jnp.int32)]


def by_a_column(state: Any, ids: jax.Array) -> Any:
    """The numbers of rows are floating-point numbers, but nothing is computed with them."""
    columns = jnp.stack([ids, ids + 1], 1).astype(jnp.float32)
    return state["params"]["emb"][columns[:, 0].astype(jnp.int32)]


def by_rounded_numbers(state: Any, ids: jax.Array) -> Any:
    """Another program may round them otherwise."""
    return state["params"]["emb"][(ids * state["params"]["w"].sum()).astype(jnp.int32)]


def looped(state: Any, ids: jax.Array) -> Any:
    _, found = jax.lax.scan(lambda total, i: (total, state["params"]["emb"][i % ROWS]), 0.0, ids)
    return found, jax.lax.cond(ids[0] > 20, lambda t: t[0], lambda t: t[1], state["params"]["other"])


def returned(state: Any, ids: jax.Array) -> Any:
    return state["params"]["emb"][ids], state["params"]["emb"]


def assert_same(found: Any, wanted: Any) -> None:
    """All ranks do it together."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(local(a)), b, rtol=2e-5, atol=1e-6)


#: Whether an evaluation needs all rows.
EVALUATIONS = (
    (rows_alone, False),
    (by_a_column, False),
    (whole, True),
    (by_a_table, True),
    (by_rounded_numbers, True),
    (looped, True),
    (returned, True),
)
