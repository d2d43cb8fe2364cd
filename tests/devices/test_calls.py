"""Calling a step on several devices: placing, donation, meshes, nesting."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import autopar
from autopar.run.devices import _Arguments
from tests.support.explained import explained
from tests.support.meshes import mesh_of
from tests.support.row_steps import ids_in, make_state, same, step

BATCH = {"x": np.ones((8, 3), np.float32), "n": np.ones(8, np.int32)}


def expected(rows: int = 40, **batch: Any) -> Any:
    return jax.jit(step)(make_state(rows), batch or ids_in(0, rows))


@pytest.mark.parametrize("rows", [40, 41])
def test_a_state_that_comes_back_is_updated_in_place(rows: int) -> None:
    planned = autopar.parallelize(step, strategy="ps", mesh=mesh_of(4))
    mine = make_state(rows)
    first, _ = planned(mine, ids_in(0, rows))
    assert not mine["params"]["emb"].is_deleted(), "the first call copies the user's arrays"
    planned(first, ids_in(0, rows))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first))
    with pytest.raises(autopar.DonatedStateError, match="state that was given before"):
        planned(first, ids_in(0, rows))


def test_an_array_in_two_leaves_is_copied() -> None:
    def with_average(state: Any, batch: Any) -> Any:
        new, metrics = step(state["s"], batch)
        return {"s": new, "average": 0.9 * state["average"] + 0.1 * new["params"]["w"]}, metrics

    planned = autopar.parallelize(with_average, mesh=mesh_of(4))
    state, _ = planned({"s": make_state(40), "average": jnp.zeros((3, 3))}, ids_in(0, 40))
    shared = {"s": state["s"], "average": state["s"]["params"]["w"]}
    plain = jax.tree.map(np.asarray, shared)
    same(planned(shared, ids_in(0, 40)), jax.jit(with_average)(plain, ids_in(0, 40)))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_mesh_of_ones_own(kind: AxisType) -> None:
    """Two axes, of which one is for data."""
    mesh = jax.make_mesh((2, 3), ("model", "batch"), axis_types=(kind, kind), devices=jax.devices()[:6])
    planned = autopar.parallelize(step, strategy="ps", mesh=mesh, data_axis="batch")
    batch = {"ids": ids_in(0, 40)["ids"][:6]}
    same(planned(make_state(40), batch), expected(**batch))
    assert planned.plan is not None and planned.plan.devices == 3


def test_all_devices_by_default() -> None:
    planned = autopar.parallelize(step)
    planned(make_state(40), ids_in(0, 40))
    assert planned.plan is not None and planned.plan.devices == 8
    assert "8 devices" in explained(planned)


def test_a_data_axis_that_the_mesh_does_not_have() -> None:
    with pytest.raises(autopar.ArgumentsError, match="data_axis='x' is no axis"):
        autopar.parallelize(step, mesh=mesh_of(2), data_axis="x")


def test_arrays_that_live_elsewhere_are_moved() -> None:
    planned = autopar.parallelize(step, strategy="ps", mesh=mesh_of(4))
    state, batch = jax.device_put((make_state(40), ids_in(0, 40)), jax.devices()[7])
    same(planned(state, batch), expected())


def test_keywords_statics_and_scalars() -> None:
    def scaled(state: Any, rate: float, kind: str, *, batch: Any, way: str) -> Any:
        assert (kind, way) == ("sgd", "plain")
        emb = state["emb"]
        g = jax.grad(lambda e: jnp.sum(e[batch["ids"]] ** 2))(emb)
        return {"emb": emb - rate * g}, jnp.sum(g)

    static: dict[str, Any] = {"static_argnums": 2, "static_argnames": "way"}
    planned = autopar.parallelize(scaled, strategy="ps", mesh=mesh_of(4), **static)
    state = {"emb": make_state(41)["params"]["emb"]}
    plain = jax.jit(scaled, **static)
    mine = theirs = state
    for _ in range(2):
        (mine, a), (theirs, b) = (
            planned(mine, 0.1, "sgd", batch=ids_in(0, 41), way="plain"),
            plain(theirs, 0.1, "sgd", batch=ids_in(0, 41), way="plain"),
        )
        same((mine, a), (theirs, b))


@pytest.mark.parametrize("rows", [40, 41])
def test_inside_another_jit(rows: int) -> None:
    planned = autopar.parallelize(step, strategy="ps", mesh=mesh_of(4), donate=False)
    both = jax.jit(lambda s, b: planned(planned(s, b)[0], b))
    once = jax.jit(step)
    batch = ids_in(0, rows)
    same(both(make_state(rows), batch), once(once(make_state(rows), batch)[0], batch))


def test_inside_another_jit_with_a_batch_that_is_there() -> None:
    """The example's ids are measured while something else is traced."""
    planned = autopar.parallelize(step, strategy="ps", mesh=mesh_of(4), donate=False)
    batch = ids_in(0, 41, length=20)
    batch = {"ids": jnp.asarray(batch["ids"])}
    same(jax.jit(lambda s: planned(s, batch))(make_state(41)), jax.jit(step)(make_state(41), batch))
    assert "the busiest message is" in planned.plan.tables[0].reason


def test_new_shapes_are_planned_again() -> None:
    planned = autopar.parallelize(step, strategy="ps", mesh=mesh_of(4))
    state, _ = planned(make_state(40), ids_in(0, 40))
    with pytest.warns(autopar.RecompileWarning, match=r"ids was i32\[8,5\] and is i32\[8,7\]"):
        planned(state, ids_in(0, 40, length=7))


def test_verify_and_explain_take_tables() -> None:
    planned = autopar.parallelize(step, strategy="ps", mesh=mesh_of(4))
    state, _ = planned(make_state(41), ids_in(0, 41))
    assert autopar.verify(planned, state, ids_in(0, 41, 3)).ok
    text = explained(planned, state, ids_in(0, 41, 3))
    assert "sparse, ps" in text and "> ps" in text
    assert "distributed cyclically over the devices; a device asks another one for" in text


def test_what_a_step_returned_is_placed_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is a batch of NumPy's looked at leaf by leaf, nor are rows read for leaves that share buffers."""
    planned = autopar.parallelize(_with_key, mesh=mesh_of(4))
    state, _ = planned({"w": jnp.ones((3, 3)), "b": jnp.ones(3)}, BATCH)
    looked_at = []
    monkeypatch.setattr(_Arguments, "_placed", lambda self, k, leaf: looked_at.append(k) or leaf)
    monkeypatch.setattr("autopar.run.devices.with_own_buffers", lambda *_: pytest.fail("nothing was moved"))
    for _ in range(3):
        state, _ = planned(state, BATCH)
    assert not looked_at
    copies = jax.tree.map(jnp.copy, state)
    del looked_at[:], state
    planned(copies, BATCH)
    assert not looked_at, "an equal sharding is as good"


def test_a_deleted_leaf_of_several_is_named() -> None:
    """A guard: the others are in their place."""
    planned = autopar.parallelize(_with_key, mesh=mesh_of(4))
    state, _ = planned({"w": jnp.ones((3, 3)), "b": jnp.ones(3)}, BATCH)
    state["b"].delete()
    with pytest.raises(autopar.DonatedStateError, match=r"\(argument 0, b\)"):
        planned(state, BATCH)


@pytest.mark.parametrize("devices", [1, 4])
def test_a_state_with_a_random_key_is_known_again(devices: int) -> None:
    planned: Any = autopar.parallelize(_with_key, mesh=mesh_of(devices) if devices > 1 else None)
    state = {"w": jnp.ones((3, 3)), "b": jnp.ones(3), "key": jax.random.key(0)}
    for _ in range(2):
        state, _ = planned(state, BATCH)
    planned._prepare = lambda *_: pytest.fail("the call is the one before's like")
    planned(state, BATCH)


def _with_key(state: Any, batch: Any) -> tuple[Any, jax.Array]:
    def loss(w: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.mean((batch["x"] @ w + b) ** 2)

    value, (w, b) = jax.value_and_grad(loss, (0, 1))(state["w"], state["b"])
    return state | {"w": state["w"] - 0.1 * w, "b": state["b"] - 0.1 * b}, value
