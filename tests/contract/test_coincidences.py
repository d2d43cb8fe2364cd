"""Sizes that are equal by chance: what could be lifted alone is lifted with those beside it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from tests.support.coincidences import OPTIMIZERS, SIZES, TABLES, Sizes, batch_of, state_of, step_of


def lifted(step: Any, *arguments: Any) -> dict[str, str]:
    """Tables that are lifted, and of the others why they aren't."""
    plan = step.planned_for(*arguments).compiled.plan
    return {p.path.split("/")[-1]: "" if p.lifted else f"{p.reason} ({p.line})" for p in plan.parameters}


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_tables_lift_whatever_the_sizes(optimizer: str, sizes: str) -> None:
    tx = OPTIMIZERS[optimizer]
    step = autopar.parallelize(step_of(tx), strategy="ps")
    found = lifted(step, state_of(SIZES[sizes], tx), batch_of(SIZES[sizes]))
    assert {k: why for k, why in found.items() if k in TABLES} == dict.fromkeys(TABLES, "")
    assert "over all rows" in found["kernel"]


@pytest.mark.parametrize(("optimizer", "strategy"), [("adagrad", "ps"), ("adagrad", ("ps", "hosts"))])
def test_numbers_with_equal_sizes(optimizer: str, strategy: Any) -> None:
    """Of tables that are lifted."""
    tx, sizes = OPTIMIZERS[optimizer], SIZES["everything"]
    step = autopar.parallelize(step_of(tx), strategy={"params/tok": strategy, "params/pos": strategy})
    plain = jax.jit(step_of(tx))
    state, wanted = state_of(sizes, tx), state_of(sizes, tx)
    for seed in range(3):
        state, loss = step(state, batch_of(sizes, seed))
        wanted, other = plain(wanted, batch_of(sizes, seed))
        np.testing.assert_allclose(loss, other, rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(np.asarray(a), b, rtol=1e-4, atol=1e-6),
        autopar.materialize(state),
        wanted,
    )
    assert step.plan is not None
    assert {p.path for p in step.plan.parameters if p.lifted} >= {"params/tok", "params/pos"}


def test_a_reason_is_the_tables_own() -> None:
    """An average that moves on every row belongs to one table; another one's noise is another one's reason."""
    tx = OPTIMIZERS["sgd"]

    def train(state: Any, batch: Any) -> Any:
        new, loss = step_of(tx)(state, batch)
        params = dict(new["params"])
        params["seg"] = params["seg"] + 0.01 * jax.random.normal(jax.random.key(0), params["seg"].shape)
        average = 0.9 * state["average"] + 0.1 * params["tok"]
        return {**new, "params": params, "average": average}, loss

    sizes = Sizes()
    state = state_of(sizes, tx)
    state["average"] = jnp.copy(state["params"]["tok"])
    found = lifted(autopar.parallelize(train, strategy="ps", sparse="exact"), state, batch_of(sizes))
    assert "mixes its rows with an array of all rows" in found["seg"]
    assert found["pos"] == ""


def test_of_tables_that_stand_in_each_others_way_one_lifts() -> None:
    """Each can be lifted by itself; together their gradients' rows meet along different axes."""

    def train(state: Any, batch: Any) -> Any:
        def loss_of(p: Any) -> jax.Array:
            return jnp.mean(jnp.square(p["a"][batch["ids"], 0] - p["b"][batch["ids"], 0]))

        loss, grads = jax.value_and_grad(loss_of)(state)
        step = grads["a"] * grads["b"].T
        return {"a": state["a"] - step, "b": state["b"] - step.T}, loss

    state = {"a": jnp.ones((32, 64)), "b": jnp.ones((64, 32))}
    found = lifted(autopar.parallelize(train, strategy="ps"), state, {"ids": np.arange(4)})
    assert sorted(map(bool, found.values())) == [False, True]
