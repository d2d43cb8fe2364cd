"""Where rows and weights meet with tables on hosts; run with `host_cases.py`."""

from __future__ import annotations

from typing import Any

import autopar  # first: it makes the ranks JAX's processes

# isort: split
import jax
import jax.numpy as jnp
import numpy as np

from tests.support.host_reads import HOSTS

ROWS, IDS = 11, 8


def _agrees(step: Any, wrap: Any, steps: int, first: int = 0) -> Any:
    """The planned step, whose results were the plain one's.

    Args:
      step: (State, batch) -> new state, results.
      wrap: A table `t` and weights `w` and `b` -> the state.
      steps: How many.
      first: The lowest id.
    """
    rng = np.random.default_rng(0)
    shapes = {"t": (ROWS, 3), "w": (3, 2), "b": (3,)}
    theirs = mine = wrap({name: jnp.asarray(rng.normal(size=shape)) for name, shape in shapes.items()})
    planned, plain = autopar.parallelize(step, strategy={"**t": HOSTS}, donate=False), jax.jit(step)
    for _ in range(steps):
        batch = {"ids": rng.integers(first, ROWS - first // 3, IDS), "y": rng.normal(size=(IDS, 2))}
        (mine, told), (theirs, wanted) = planned(mine, batch), plain(theirs, batch)
        for a, b in zip(jax.tree.leaves((mine, told)), jax.tree.leaves((theirs, wanted)), strict=True):
            np.testing.assert_allclose(np.asarray(a), b, rtol=1e-4, atol=1e-6)
    return planned


def _loss(params: Any, rows: jax.Array, batch: Any) -> jax.Array:
    return jnp.mean(((rows + params["b"]) @ params["w"] - batch["y"]) ** 2)


def check_ids_of_other_examples() -> None:
    """Every rank looks up the ids of all examples, some of them out of range: in several batches."""

    def step(params: Any, batch: Any) -> Any:
        ids = jnp.pad(batch["ids"][:-1], (1, 0))

        def loss(params: Any) -> jax.Array:
            return _loss(params, params["t"].at[ids].get(mode="fill", fill_value=0.5), batch)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    planned = _agrees(step, lambda params: params, steps=4, first=-ROWS)
    assert planned.plan is not None and planned.plan.reduction_backend == ("xla" if jax.process_count() > 1 else "")


def check_a_branch_between_two_steps() -> None:
    """It returns rows, which are their owners', and weights, which meet the examples of the second step."""

    def train(state: Any, batch: Any) -> Any:
        params, count = state
        grads = jax.grad(lambda params: _loss(params, params["t"][batch["ids"]], batch))(params)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        kept = jax.lax.cond(count % 3 < 2, lambda: new, lambda: params)
        return (kept, count + 1), sum(jnp.sum(g * g) for g in jax.tree.leaves(grads))

    def step(state: Any, batch: Any) -> Any:
        state, first = train(state, batch)
        state, second = train(state, batch)
        return state, (first, second)

    _agrees(step, lambda params: (params, jnp.int32(0)), steps=3)


def check_a_sum_over_examples_times_rows() -> None:
    """Of whose gradients each rank has other numbers: what is broadcast to them is summed over the ranks before."""

    def step(params: Any, batch: Any) -> Any:
        grads = jax.grad(lambda params: _loss(params, params["t"][batch["ids"]], batch))(params)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return {**new, "t": new["t"] - grads["t"] * grads["b"]}, grads["b"]

    _agrees(step, lambda params: params, steps=4)
