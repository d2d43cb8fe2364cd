"""The state in place: donation, shared buffers, and what a second use of a donated state says."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar

State = dict[str, Any]


def step(state: State, batch: jax.Array) -> tuple[State, jax.Array]:
    loss, grad = jax.value_and_grad(lambda t: jnp.mean(t[batch] ** 2))(state["table"])
    return {**state, "table": state["table"] - 0.5 * grad}, loss


def table() -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=(60, 3)), jnp.float32)


IDS = jnp.array([1, 5, 5])


def test_state_is_donated_and_updated_in_place() -> None:
    planned = autopar.parallelize(step, strategy="ps")
    state = {"table": table()}
    where = state["table"].unsafe_buffer_pointer()
    new, _ = planned(state, IDS)
    assert state["table"].is_deleted()
    assert new["table"].unsafe_buffer_pointer() == where


def test_second_use_of_a_donated_state() -> None:
    planned = autopar.parallelize(step)
    state = {"table": table()}
    planned(state, IDS)
    with pytest.raises(autopar.DonatedStateError, match=r"table.*state that the step returned.*donate=False"):
        planned(state, IDS)


def test_other_uses_of_a_donated_state() -> None:
    """Plain arrays that are gone are named by whatever takes them, not by JAX's bare error alone."""
    planned = autopar.parallelize(step)
    state = {"table": table()}
    planned(state, IDS)
    told = r"given before \(argument 0, table\).*donate=False"
    with pytest.raises(autopar.DonatedStateError, match="step got a state that was " + told):
        autopar.verify(planned, state, IDS)
    with pytest.raises(autopar.DonatedStateError, match="make got a state that was " + told):

        def make(old: State) -> State:
            return jax.tree.map(jnp.zeros_like, old) | {"table": old["table"] + 1}

        autopar.init(make, state, step=planned, batch=IDS)
    with pytest.raises(autopar.DonatedStateError, match="read got a state that was " + told):

        def read(state: State, batch: jax.Array) -> jax.Array:
            return state["table"][batch].sum()

        autopar.parallelize(read)(state, IDS)


def test_donate_false_keeps_the_state() -> None:
    planned = autopar.parallelize(step, donate=False)
    state = {"table": table()}
    first, _ = planned(state, IDS)
    second, _ = planned(state, IDS)
    np.testing.assert_array_equal(first["table"], second["table"])


def test_leaves_that_share_a_buffer_are_copied() -> None:
    planned = autopar.parallelize(step, strategy="ps")
    shared = table()
    old = np.array(shared)
    new, _ = planned({"table": shared, "average": shared}, IDS)
    np.testing.assert_array_equal(new["average"], old)
    assert not np.array_equal(new["table"], old)
    newer, _ = planned(new, IDS)
    # A later state may share buffers as well.
    mixed, _ = planned({"table": newer["table"], "average": newer["table"]}, IDS)
    assert mixed["table"].shape == (60, 3)


def test_a_batch_that_is_part_of_the_state_survives() -> None:
    planned = autopar.parallelize(lambda s, b: ({"table": s["table"] + b["table"].sum()}, b["ids"]))
    shared = table()
    planned({"table": shared}, {"table": shared, "ids": IDS})
    assert not shared.is_deleted()


def test_numpy_state_is_placed_once() -> None:
    planned = autopar.parallelize(step, strategy="ps")
    host = np.array(table())
    kept = host.copy()
    state, _ = planned({"table": host}, IDS)
    assert isinstance(state["table"], jax.Array)
    planned(state, IDS)
    np.testing.assert_array_equal(host, kept)
