"""Faults that reviews found."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from tests.support.meshes import mesh_of
from tests.support.row_steps import ids_in, same


def table(rows: int, width: int = 3, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(rows, width)), jnp.float32)


@pytest.mark.filterwarnings("ignore::autopar.CapacityWarning")
@pytest.mark.parametrize("donate", [True, False])
def test_a_copy_of_a_table_that_was_just_committed(donate: bool) -> None:
    """Where a capacity is exceeded, the copy's old value is its own, not the table's."""

    def step(state: Any, batch: Any) -> Any:
        emb, target = state["emb"], state["target"]

        def loss_fn(emb: jax.Array) -> jax.Array:
            return 10 * jnp.mean((jnp.tanh(emb[batch["ids"]]) - target[batch["ids"]]) ** 2)

        loss, g = jax.value_and_grad(loss_fn)(emb)
        new = emb - 0.1 * g
        return {"emb": new, "target": new}, loss

    planned = autopar.parallelize(step, strategy="ps", mesh=mesh_of(4), donate=donate)
    for first, batch in ((0, ids_in(0, 400, length=20)), (1, ids_in(0, 90, 1, length=20))):
        state = {"emb": table(400, seed=first), "target": table(400, seed=first + 9)}
        expected = jax.jit(step)(state, batch)
        same(planned(state, batch), expected)
    assert planned.plan.tables[0].tight


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("method", ["ps", "allreduce"])
def test_an_array_that_is_state_and_argument(method: str, devices: int) -> None:
    def step(state: Any, ids: Any, ref: Any) -> Any:
        loss, g = jax.value_and_grad(lambda p: jnp.mean(jnp.tanh(p["emb"][ids]) @ p["w"] @ ref))(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, g), loss

    planned = autopar.parallelize(
        step, strategy=method, mesh=mesh_of(devices), state_argnums=0, batch_axis={"ids": 0, "**": None}
    )
    mine, theirs = ({"emb": table(41), "w": table(3)} for _ in range(2))
    ids = ids_in(0, 41)["ids"]
    for _ in range(3):
        (mine, a), (theirs, b) = planned(mine, ids, mine["w"]), jax.jit(step)(theirs, ids, theirs["w"])
        same((mine, a), (theirs, b))


def test_a_table_that_is_state_and_argument() -> None:
    def step(state: Any, ids: Any, ref: Any) -> Any:
        loss, g = jax.value_and_grad(lambda e: jnp.mean(jnp.tanh(e[ids]) * ref[ids]))(state["emb"])
        return {"emb": state["emb"] - 0.1 * g}, loss

    planned = autopar.parallelize(step, strategy="ps", mesh=mesh_of(2), state_argnums=0)
    mine, theirs = ({"emb": table(41)} for _ in range(2))
    ids = ids_in(0, 41)["ids"]
    for _ in range(3):
        (mine, a), (theirs, b) = planned(mine, ids, mine["emb"]), jax.jit(step)(theirs, ids, theirs["emb"])
        same((mine, a), (theirs, b))


def test_weak_types_stay_weak() -> None:
    def step(state: Any, ids: Any) -> Any:
        g = jax.grad(lambda emb: jnp.mean(emb[ids] ** 2))(state["emb"])
        return {"emb": state["emb"] - 0.1 * g, "weak": state["weak"] * 1.5}, state["weak"]

    planned = autopar.parallelize(step, strategy="ps", mesh=mesh_of(4))
    state = {"emb": table(401), "weak": jnp.asarray(1.0)}
    ids = ids_in(0, 401, length=20)["ids"]
    expected = jax.jit(step)(state, ids)
    found = planned(state, ids)
    assert planned.plan.tables[0].tight
    assert [x.weak_type for x in (found[0]["weak"], found[1])] == [
        x.weak_type for x in (expected[0]["weak"], expected[1])
    ]
    assert found[1].weak_type


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.int32])
def test_tables_are_indexed_by_small_integers(dtype: Any) -> None:
    planned = autopar.parallelize(
        lambda s, ids: ({"emb": s["emb"] - 0.1 * jax.grad(lambda e: jnp.sum(e[ids] ** 2))(s["emb"])}, 0),
        strategy="ps",
        mesh=mesh_of(2),
    )
    new, _ = planned({"emb": table(401)}, ids_in(0, 401)["ids"])
    whole = np.asarray(new["emb"])
    rows = [1, 100] if dtype == np.uint8 else [1, -1]
    for index in (np.array(rows, dtype), jnp.array(rows, dtype)):
        np.testing.assert_array_equal(new["emb"][index], whole[rows])


@pytest.mark.parametrize("start", [3, 10])
def test_a_share_of_a_slice_that_starts_out_of_range(start: int) -> None:
    """XLA makes one slice of two, and forgets that the first one's start is clamped."""

    def step(state: Any, ids: Any) -> Any:
        def loss_of(t: jax.Array) -> jax.Array:
            rows = jnp.tanh(t)
            hot = jax.nn.one_hot(ids, 11) @ rows
            return jnp.sum((hot + jax.lax.dynamic_slice_in_dim(rows, ids[1], 4)) ** 2)

        loss, g = jax.value_and_grad(loss_of)(state["emb"])
        return {"emb": state["emb"] - 0.1 * g}, loss

    state, ids = {"emb": table(11)}, np.array([1, start, 4, 4], np.int32)
    planned = autopar.parallelize(step, strategy="allreduce", mesh=mesh_of(4), donate=False, batch_axis={"ids": 0})
    same(planned(state, ids), jax.jit(step)(state, ids))


def test_a_sweep_over_a_table_is_no_loop() -> None:
    """A result that reads all rows is computed by a sweep, an operation with a body, after the lookups are lifted."""

    def step(state: Any, ids: jax.Array) -> Any:
        new = state - 0.1 * jax.grad(lambda t: jnp.sum(jnp.tanh(t[ids])))(state)
        return new, jax.nn.softmax(new.sum(1))

    planned = autopar.parallelize(step, strategy="ps", mesh=mesh_of(4), donate=False)
    same(planned(table(40), ids_in(0, 40, length=8)["ids"]), jax.jit(step)(table(40), ids_in(0, 40, length=8)["ids"]))
