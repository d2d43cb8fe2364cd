"""`resize` on one device and in host memory: the numbers of plain JAX, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import autopar
from autopar.tables.host import HostTable
from tests.support.pairs import diagonal, long
from tests.support.resized import OPTIMIZERS, Training, batch_in, plainly_resized, restore_resized, train_resized

HOSTS = ("ps", "hosts")


@pytest.mark.parametrize(("strategy", "optimizer"), diagonal(["ps", HOSTS, "auto"], list(OPTIMIZERS)))
def test_a_training_goes_on_with_the_numbers_of_plain_jax(strategy: Any, optimizer: str) -> None:
    train_resized(optimizer, lambda step: autopar.parallelize(step, strategy=strategy), (37, 50, 20))


@pytest.mark.parametrize(("strategy", "rows"), [("ps", 50), (HOSTS, 20), long(HOSTS, 50)])
def test_a_checkpoint_is_restored_into_another_size(strategy: Any, rows: int, tmp_path: Path) -> None:
    restore_resized(tmp_path / "it", lambda step: autopar.parallelize(step, strategy=strategy), 37, rows)


@pytest.mark.parametrize(("first", "then"), [("ps", HOSTS), (HOSTS, "ps")])
def test_tables_go_where_the_fresh_ones_are(first: Any, then: Any) -> None:
    training, key = Training("adagrad"), jax.random.key(0)
    steps = [autopar.parallelize(training.step, strategy=strategy) for strategy in (first, then)]
    made = [
        autopar.init(training.fresh(rows), key, step=step, batch=batch_in(rows, 0))
        for rows, step in zip((37, 50), steps, strict=True)
    ]
    expected = jax.tree.map(plainly_resized, autopar.materialize(made[0]), autopar.materialize(made[1]))
    found = autopar.resize(*made)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert isinstance(found["params"]["item"], HostTable) == (then == HOSTS)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(made[0])), "the old state stays"
    steps[1](found, batch_in(50, 0))


def test_static_parts_are_those_of_the_fresh_state() -> None:
    """A Flax module checks its number of rows."""

    def make(rows: int) -> TrainState:
        model = nn.Embed(rows, 3)
        params = model.init(jax.random.key(rows), jnp.zeros(1, jnp.int32))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(0.1))

    @autopar.parallelize(strategy="ps")
    def step(state: TrainState, ids: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: (state.apply_fn({"params": p}, ids) ** 2).mean())(state.params)
        return state.apply_gradients(grads=grads), loss

    state, _ = step(make(10), jnp.array([1, 9]))
    old = np.asarray(state.params["embedding"])
    state = autopar.resize(state, make(20))
    np.testing.assert_array_equal(state.params["embedding"][:10], old)
    with pytest.warns(autopar.RecompileWarning, match="another structure"):
        state, _ = step(state, jnp.array([1, 19]))
    assert int(state.step) == 2 and state.params["embedding"].shape == (20, 3)


def test_leaves_that_share_an_array() -> None:
    """One array may be two leaves, as of an average that begins with the weights; other leaves stay as they are."""
    fresh = jnp.arange(5.0)
    state = {"w": jnp.ones(3), "average": jnp.full(3, 2.0), "count": jnp.int32(7), "number": 4}
    found = autopar.resize(state, {"w": fresh, "average": fresh, "count": jnp.int32(0), "number": 0})
    np.testing.assert_array_equal(found["w"], [1, 1, 1, 3, 4])
    np.testing.assert_array_equal(found["average"], [2, 2, 2, 3, 4])
    assert found["count"] is state["count"] and found["number"] == 4


def test_numpy_arrays_and_other_axes() -> None:
    state = {"n": np.ones(3, np.int64), "columns": jnp.ones((2, 3)), "bf": jnp.ones((3, 2), jnp.bfloat16)}
    fresh = {"n": np.zeros(5, np.int64), "columns": jnp.zeros((2, 2)), "bf": jnp.zeros((4, 2), jnp.bfloat16)}
    found = autopar.resize(state, fresh)
    np.testing.assert_array_equal(found["n"], [1, 1, 1, 0, 0])
    np.testing.assert_array_equal(found["columns"], np.ones((2, 2)))
    np.testing.assert_array_equal(found["bf"].astype(np.float32), [[1, 1]] * 3 + [[0, 0]])
    assert isinstance(found["n"], np.ndarray) and found["bf"].dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("state", "fresh", "told"),
    [
        ({"t": jnp.ones((3, 2))}, {"t": jnp.ones((5, 4))}, r"t has the shape \[3, 2\] in state and \[5, 4\] in fresh"),
        ({"t": jnp.ones(3)}, {"t": jnp.ones((3, 1))}, r"t has the shape \[3\] in state and \[3, 1\] in fresh"),
        ({"t": jnp.ones(3)}, {"u": jnp.ones(4)}, "state has a leaf t, which fresh has not"),
        ({"t": jnp.ones(3)}, {"t": jnp.ones(4), "u": 1}, "fresh has a leaf u, which state has not"),
        ({"a/b": 1, "a": {"b": 2}}, {"a/b": 1, "a": {"b": 2}}, "state has several leaves with one path"),
        (
            {"t": jnp.ones((5, 8)), "rows": jnp.ones(5), "columns": jnp.ones(8)},
            {"t": jnp.ones((12, 8)), "rows": jnp.ones(8), "columns": jnp.ones(12)},
            "rows and columns exchange their meaning, .* a table of 5 rows and 8 columns gets 12 rows",
        ),
        ({"t": jnp.ones(3)}, {"t": jnp.ones(4, jnp.int32)}, "t is of float32 in state, and of int32 in fresh"),
        (
            {"t": jnp.ones(3)},
            {"t": jax.ShapeDtypeStruct((4,), jnp.float32)},
            "t of fresh is a ShapeDtypeStruct.*no rows",
        ),
    ],
)
def test_what_does_not_fit_is_named(state: Any, fresh: Any, told: str) -> None:
    with pytest.raises(autopar.StateError, match=told):
        autopar.resize(state, fresh)


@pytest.mark.parametrize("strategy", ["ps", HOSTS])
def test_a_fresh_state_that_has_been_through_steps(strategy: Any) -> None:
    """Its update log says of its own rows what they wait for."""
    training = Training("adamw")
    planned, plain = autopar.parallelize(training.step, strategy=strategy), jax.jit(training.step)

    def trained(state: Any, rows: int, of: range) -> Any:
        theirs = autopar.materialize(state)
        for k in of:
            state, _ = planned(state, batch_in(rows, k))
            theirs, _ = plain(theirs, batch_in(rows, k))
        return state, theirs

    mine, theirs = trained(training.make_state(jax.random.key(0), 37), 37, range(4))
    with pytest.warns(autopar.RecompileWarning):
        fresh, plain_fresh = trained(training.make_state(jax.random.key(1), 50), 50, range(1))
    mine, theirs = autopar.resize(mine, fresh), jax.tree.map(plainly_resized, theirs, plain_fresh)
    for k in range(8):
        mine, _ = planned(mine, batch_in(50, 10 + k))
        theirs, _ = plain(theirs, batch_in(50, 10 + k))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), autopar.materialize(mine), theirs)


def test_random_keys_of_rows() -> None:
    old, fresh = jax.random.split(jax.random.key(0), 3), jax.random.split(jax.random.key(1), 5)
    expected = jnp.concatenate([old, fresh[3:]])
    found = autopar.resize({"keys": old}, {"keys": fresh})["keys"]
    np.testing.assert_array_equal(jax.random.key_data(found), jax.random.key_data(expected))


def test_a_state_that_was_given_away() -> None:
    table = jnp.ones(3)
    table.delete()
    with pytest.raises(autopar.DonatedStateError, match="t was given to a step"):
        autopar.resize({"t": table}, {"t": jnp.ones(4)})


def test_a_restore_says_how_tables_are_resized(tmp_path: Path) -> None:
    autopar.save(tmp_path, {"t": jnp.ones((3, 2))})
    with pytest.raises(autopar.CheckpointError, match=r"another number of rows: restore\(..., resize=True\)"):
        autopar.restore(tmp_path, {"t": jnp.ones((4, 2))})
    with pytest.raises(autopar.CheckpointError, match=r"has \[4, 3\] in the template$"):
        autopar.restore(tmp_path, {"t": jnp.ones((4, 3))}, resize=True)
    with pytest.raises(autopar.ArgumentsError, match="takes like="):
        autopar.restore(tmp_path, resize=True)
    found, _ = autopar.restore(tmp_path, {"t": np.zeros((4, 2), np.float32)}, resize=True)
    np.testing.assert_array_equal(found["t"], [[1, 1]] * 3 + [[0, 0]])
