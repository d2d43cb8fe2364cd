"""Saving and restoring with Orbax: a training goes on with the same numbers on other devices than before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import autopar
from tests.support.meshes import mesh_of
from tests.support.object_store import object_store
from tests.support.row_steps import TX, ids_in, same, step

WIDTH = 3  # on 3 devices a table whose rows can't be spread equally is spread by columns


def planned_on(devices: int) -> Any:
    return autopar.parallelize(step, strategy="ps", mesh=mesh_of(devices))


def fresh_on(devices: int, rows: int) -> Any:
    """A state on these devices, and the step that takes it."""

    def make(key: Any) -> Any:
        params = {"emb": jax.random.normal(key, (rows, WIDTH)), "w": jnp.eye(WIDTH)}
        return {"params": params, "opt": TX.init(params)}

    planned = planned_on(devices)
    return autopar.init(make, jax.random.key(0), step=planned, batch=ids_in(0, rows)), planned


def trained(planned: Any, state: Any, rows: int, steps: range) -> tuple[Any, list[float]]:
    losses = []
    for k in steps:
        state, metrics = planned(state, ids_in(0, rows, k))
        losses.append(float(metrics["loss"]))
    return state, losses


@pytest.mark.parametrize("rows", [40, 41])
def test_a_training_goes_on_on_other_devices(rows: int, tmp_path: Path) -> None:
    state, planned = fresh_on(4, rows)
    state, _ = trained(planned, state, rows, range(3))
    expected_at_save = jax.tree.map(np.asarray, state)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "three", autopar.materialize(state))
        checkpointer.wait_until_finished()
        expected = trained(planned, state, rows, range(3, 6))
        for devices in (2, 3, 1):
            fresh, planned = fresh_on(devices, rows)
            restored = checkpointer.restore(tmp_path / "three", autopar.materialize(fresh))
            jax.tree.map(np.testing.assert_array_equal, restored, expected_at_save)
            same(trained(planned, restored, rows, range(3, 6)), expected)


def test_what_is_saved_is_spread_over_the_devices(tmp_path: Path) -> None:
    """And what is restored: each device reads its part."""
    state, planned = fresh_on(3, 41)
    state, _ = trained(planned, state, 41, range(1))
    ordinary = autopar.materialize(state)["params"]["emb"]
    assert [s.data.shape for s in ordinary.addressable_shards] == [(41, 1)] * 3
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "one", autopar.materialize(state))
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "one", autopar.materialize(fresh_on(3, 41)[0]))
    emb = restored["params"]["emb"]
    assert [s.data.shape for s in emb.addressable_shards] == [(41, 1)] * 3
    np.testing.assert_array_equal(emb, ordinary)


@pytest.mark.parametrize("rows", [40, 41])
def test_autopar_saves_tables_share_by_share(rows: int, tmp_path: Path) -> None:
    """And restores them onto other devices, or as ordinary arrays; a training goes on with the same numbers."""
    state, planned = fresh_on(4, rows)
    state, _ = trained(planned, state, rows, range(3))
    assert isinstance(state["params"]["emb"], autopar.Table) == (rows == 41)
    expected_at_save = jax.tree.map(np.asarray, state)
    autopar.save(tmp_path / "three", state)
    if rows == 41:  # one by each device; 40 rows are an ordinary array, of which Orbax saves the shards
        assert len(list((tmp_path / "three").glob("version-*/rows/*params_emb*"))) == 4
    expected = trained(planned, state, rows, range(3, 6))
    ordinary = autopar.restore(tmp_path / "three", jax.eval_shape(lambda: expected_at_save)).state
    jax.tree.map(np.testing.assert_array_equal, ordinary, expected_at_save)
    for devices in {40: (2,), 41: (3, 1)}[rows]:
        fresh, planned = fresh_on(devices, rows)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), fresh)
        for how in ({"like": fresh}, {"like": shapes, "step": planned, "batch": ids_in(0, rows)}):
            restored = autopar.restore(tmp_path / "three", **how).state
            for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(fresh), strict=True):
                assert type(a) is type(b)
                assert (
                    devices == 1
                    or (a.stored if isinstance(a, autopar.Table) else a).sharding
                    == (b.stored if isinstance(b, autopar.Table) else b).sharding
                )
            jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, restored), expected_at_save)
        same(trained(planned, restored, rows, range(3, 6)), expected)


@pytest.mark.parametrize("place", ["", "s3://bucket/run"])
def test_ordinary_arrays_are_restored_with_their_shardings(
    place: str, tmp_path: Path, environment: Callable[..., None]
) -> None:
    mesh = mesh_of(4)
    axis = mesh.axis_names[0]
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(axis))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    state = {
        "rows": jax.device_put(jnp.arange(24.0).reshape(8, 3), rows),
        "all": jax.device_put(jnp.asarray(0.5), everywhere),
        "key": jax.device_put(jax.random.key(3), everywhere),
        "one": jnp.arange(3),
    }
    with object_store() as store:
        environment(**store.environment)
        autopar.save(place or tmp_path, state)
        restored = autopar.restore(place or tmp_path, state).state
    for name, leaf in state.items():
        assert restored[name].sharding == leaf.sharding and restored[name].dtype == leaf.dtype
        assert jax.typeof(restored[name]).weak_type == jax.typeof(leaf).weak_type
    np.testing.assert_array_equal(jax.random.key_data(restored.pop("key")), jax.random.key_data(state.pop("key")))
    jax.tree.map(np.testing.assert_array_equal, restored, state)
