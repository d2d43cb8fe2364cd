"""Lookups by ids of other examples, with tables on hosts, in a program of all ranks; run with `host_cases.py`."""

from __future__ import annotations

from typing import Any

import autopar  # first: it makes the ranks JAX's processes

# isort: split
import jax
import jax.numpy as jnp
import numpy as np

from tests.support.host_reads import HOSTS

ROWS, IDS = 11, 8


def check_ids_of_other_examples() -> None:
    """Every rank looks up the ids of all examples, some of them out of range: in several batches."""

    def step(params: Any, batch: Any) -> Any:
        ids = jnp.pad(batch["ids"][:-1], (1, 0))

        def loss(params: Any) -> jax.Array:
            rows = params["t"].at[ids].get(mode="fill", fill_value=0.5)
            return jnp.mean((rows @ params["w"] - batch["y"]) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    rng = np.random.default_rng(0)
    params = {"t": jnp.asarray(rng.normal(size=(ROWS, 3))), "w": jnp.asarray(rng.normal(size=(3, 2)))}
    planned, plain, mine = autopar.parallelize(step, strategy={"t": HOSTS}, donate=False), jax.jit(step), params
    for _ in range(4):
        batch = {"ids": rng.integers(-ROWS, ROWS + 4, IDS), "y": rng.normal(size=(IDS, 2))}
        (mine, value), (params, wanted) = planned(mine, batch), plain(params, batch)
        np.testing.assert_allclose(value, wanted, rtol=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a), b, rtol=1e-5, atol=1e-6), mine, params)
    assert planned.plan is not None and planned.plan.reduction_backend == "xla"


def check_a_branch_between_two_steps() -> None:
    """It returns rows, which are their owners', and weights, which meet the examples of the second step."""

    def train(state: Any, batch: Any) -> Any:
        params, count = state

        def loss(params: Any) -> jax.Array:
            return jnp.mean((params["t"][batch["ids"]] @ params["w"] - batch["y"]) ** 2)

        grads = jax.grad(loss)(params)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        kept = jax.lax.cond(count % 3 < 2, lambda: new, lambda: params)
        return (kept, count + 1), sum(jnp.sum(g * g) for g in jax.tree.leaves(grads))

    def step(state: Any, batch: Any) -> Any:
        state, first = train(state, batch)
        state, second = train(state, batch)
        return state, (first, second)

    rng = np.random.default_rng(0)
    params = {"t": jnp.asarray(rng.normal(size=(ROWS, 3))), "w": jnp.asarray(rng.normal(size=(3, 2)))}
    planned, plain = autopar.parallelize(step, strategy={"0/t": HOSTS}, donate=False), jax.jit(step)
    mine = theirs = (params, jnp.int32(0))
    for _ in range(3):
        batch = {"ids": rng.integers(0, ROWS, IDS), "y": rng.normal(size=(IDS, 2))}
        (mine, norms), (theirs, wanted) = planned(mine, batch), plain(theirs, batch)
        np.testing.assert_allclose(norms, wanted, rtol=1e-4)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a), b, rtol=1e-5, atol=1e-6), mine, theirs)
