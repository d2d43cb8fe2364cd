"""What a user is told of a state that isn't recognised, or of which a part isn't returned."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from tests.unit.test_messages import IDS, loss_of, make_table

USERS, ITEMS = 6, 7


def factors(x: Any, u: Any, v: Any) -> Any:
    grads = jax.grad(lambda u, v: ((u[x[:, 0]] * v[x[:, 1]]).sum(1) ** 2).sum(), (0, 1))(u, v)
    return u - 0.1 * grads[0], v - 0.1 * grads[1]


def factors_by_hand(x: Any, u: Any, v: Any) -> Any:
    wrong = jnp.zeros((USERS, ITEMS)).at[x[:, 0], x[:, 1]].add(1.0) - u @ v.T
    return u + 0.1 * wrong @ v, v + 0.1 * wrong.T @ u


def after_the_batch(ids: Any, table: Any) -> Any:
    return table - 0.1 * jax.grad(loss_of)(table, ids), 0.0


def shrunk(state: Any, ids: Any) -> Any:
    return jax.tree.map(lambda t: 0.9 * t - 0.1 * jax.grad(loss_of)(t, ids), state), 0.0


def autoencoder(params: Any, x: Any) -> Any:
    return jnp.tanh(x @ params["w"]), 0.0


def residual(params: Any, x: Any) -> Any:
    return x + jnp.tanh(x @ params["w"]), ((x - 1) ** 2).sum()


def gradients(params: Any, x: Any) -> Any:
    return jax.value_and_grad(lambda p: jnp.tanh(x @ p["w"]).sum())(params)


def normalized(statistics: Any, x: Any) -> Any:
    return (x - statistics["mean"]) / statistics["std"]


def centred(x: Any) -> Any:
    return x - x.mean(0)


PAIRS = jnp.array([[0, 1], [5, 6]])
FACTORS = (PAIRS, jnp.ones((USERS, 2)), jnp.ones((ITEMS, 2)))
LAYER, INPUT = {"w": jnp.eye(3)}, jnp.ones((4, 3))


@pytest.mark.parametrize(
    ("step", "arguments", "told"),
    [
        (factors, FACTORS, r"returns 'u' and 'v' in.*state_argnums=\(1, 2\)"),
        (factors_by_hand, FACTORS, r"returns 'u' and 'v' in.*state_argnums=\(1, 2\)"),
        (after_the_batch, (IDS, make_table()), r"returns 'table' in.*state_argnums=\(1,\)"),
        (shrunk, (make_table(), IDS), r"returns 'state' in.*state_argnums=\(0,\)"),
        (shrunk, ({"t": make_table()}, IDS), r"returns 'state' in.*state_argnums=\(0,\)"),
        (autoencoder, (LAYER, INPUT), ""),
        (residual, (LAYER, INPUT), ""),
        (gradients, (LAYER, INPUT), ""),
        (normalized, ({"mean": jnp.ones(3), "std": jnp.ones(3)}, INPUT), ""),
        (centred, (INPUT,), ""),
    ],
)
def test_a_state_that_is_not_recognised_is_told_of(step: Any, arguments: Any, told: str) -> None:
    """And nothing is told of evaluation functions, whatever the form of what they return (warnings are errors here)."""
    planned = autopar.parallelize(step)
    if told:
        with pytest.warns(autopar.StateWarning, match=told) as warned:
            planned(*arguments)
        assert warned[0].filename == __file__, "the line that called the step"
        named = re.search(r"\((.*)\)", told.replace("\\", ""))
        assert named is not None
        places = tuple(int(k) for k in named[1].split(",") if k)
        quiet = autopar.parallelize(step, state_argnums=places, donate=False)
        expected = jax.jit(step)(*arguments)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), quiet(*arguments), expected)
        assert quiet.latest is not None and set(quiet.latest.states.outputs) == set(places)
        autopar.parallelize(step, state_argnums=())(*arguments)
    planned(*jax.tree.map(jnp.copy, arguments))


def momentum(table: Any, slots: Any, ids: Any) -> Any:
    gradient = jax.grad(lambda t: (t[ids] ** 2).sum())(table)
    trace = 0.9 * slots["trace"] + gradient
    return table - 0.1 * trace, {"trace": trace, "count": slots["count"] + 1}


def without_slots(table: Any, slots: Any, ids: Any) -> Any:
    return momentum(table, slots, ids)[0], ids.sum()


def without_slots_of_one(state: Any, ids: Any) -> Any:
    return {"table": momentum(state["table"], state["slots"], ids)[0], "count": ids.sum()}


def parameters_of_one(state: Any, ids: Any) -> Any:
    return {"table": momentum(state["table"], state["slots"], ids)[0]}, ids.sum()


def grown(state: Any, ids: Any) -> Any:
    table, slots, count = momentum(state["table"], state["slots"], ids)[0], state["slots"], ids.sum()
    return {"table": table, "slots": slots, "count": count}, count


def adagrad_without_slots(params: Any, slots: Any, ids: Any) -> Any:
    gradients = jax.grad(lambda p: (p["t"][ids] ** 2).sum())(params)
    sums = jax.tree.map(lambda s, g: s + g**2, slots["sums"], gradients)
    return jax.tree.map(lambda p, g, s: p - g / jnp.sqrt(s), params, gradients, sums), ids.sum()


SLOTS = {"trace": make_table(), "count": jnp.int32(0)}


@pytest.mark.parametrize(
    ("step", "arguments", "told", "remedy"),
    [
        (without_slots, (make_table(), SLOTS, IDS), "a new value of 'slots' and doesn't", {"batch_argnums": 1}),
        (
            adagrad_without_slots,
            ({"t": make_table()}, {"sums": {"t": make_table()}}, IDS),
            "a new value of 'slots' and doesn't",
            {"batch_argnums": 1},
        ),
        (
            without_slots_of_one,
            ({"table": make_table(), "slots": SLOTS}, IDS),
            r"under jax\.jit, .* a part of 'state', table\. .* return all of it",
            {"state_argnums": ()},
        ),
        (
            parameters_of_one,
            ({"table": make_table(), "slots": SLOTS}, IDS),
            r"under jax\.jit, .* a part of 'state', table\. .* return all of it",
            {"state_argnums": ()},
        ),
    ],
)
def test_a_part_of_the_state_that_is_not_returned_is_told_of(
    step: Any, arguments: Any, told: str, remedy: dict[str, Any]
) -> None:
    with pytest.warns(autopar.StateWarning, match=told):
        autopar.parallelize(step, donate=False)(*arguments)
    autopar.parallelize(step, donate=False, **remedy)(*arguments)


def test_nothing_is_told_of_a_state_that_comes_back_with_more() -> None:
    autopar.parallelize(grown)({"table": make_table(), "slots": SLOTS}, IDS)
