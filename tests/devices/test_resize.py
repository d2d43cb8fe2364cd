"""`resize` on several devices: rows stay in their layout, and the numbers are those of plain JAX."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import autopar
from tests.support.meshes import mesh_of
from tests.support.pairs import long
from tests.support.resized import Training, alike, batch_in, plainly_resized, restore_resized, train_resized


@pytest.mark.parametrize(
    ("strategy", "optimizer", "sizes"),
    [
        ("ps", "adamw", (41, 46, 39)),
        long("ps", "adagrad", (40, 41, 44)),
        ("ps", "momentum", (44, 60, 21)),
        ("allgather", "adagrad", (41, 60, 20)),
    ],
)
def test_a_training_goes_on_with_the_numbers_of_plain_jax(strategy: str, optimizer: str, sizes: Any) -> None:
    """From tables in a layout to such, to arrays in even shards, and back; smaller and larger."""

    def planned_for(step: Any) -> Any:
        return autopar.parallelize(step, strategy=strategy, mesh=mesh_of(4))

    state = train_resized(optimizer, planned_for, sizes)
    table = state["params"]["item"]
    if strategy == "ps":
        deferred = optimizer != "adagrad"
        spread = autopar.Table if sizes[-1] % 4 else jax.Array
        assert isinstance(table, autopar.DeferredTable if deferred else spread)


@pytest.mark.parametrize(("saved", "rows"), [(41, 46), (44, 21)])
def test_a_checkpoint_is_restored_into_another_size(saved: int, rows: int, tmp_path: Path) -> None:
    """Onto the devices of the fresh state."""

    def planned_for(step: Any) -> Any:
        return autopar.parallelize(step, strategy="ps", mesh=mesh_of(4))

    restore_resized(tmp_path / "it", planned_for, saved, rows)


def test_from_one_device_to_several() -> None:
    """And to fewer of them, with arrays that lie elsewhere."""
    training, key = Training("adagrad"), jax.random.key(0)
    state = training.make_state(key, 37)
    for devices, rows in ((4, 41), (2, 44), (3, 20)):
        planned = autopar.parallelize(training.step, strategy="ps", mesh=mesh_of(devices))
        fresh = autopar.init(training.fresh(rows), key, step=planned, batch=batch_in(rows, 0))
        truth = jax.tree.map(plainly_resized, autopar.materialize(state), training.make_state(key, rows))
        state = autopar.resize(state, fresh)
        jax.tree.map(alike, state, truth)
        state, _ = planned(state, batch_in(rows, 0))
        truth, _ = jax.jit(training.step)(truth, batch_in(rows, 0))
        jax.tree.map(alike, state, truth)


def test_products_divided_over_devices() -> None:
    """A weight that is spread along the axis that grows, over a tensor axis."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    spread = NamedSharding(mesh, PartitionSpec(None, "model"))
    state = jax.device_put(jnp.arange(12.0).reshape(2, 6), spread)
    found = autopar.resize({"w": state}, {"w": jax.device_put(jnp.zeros((2, 8)), spread)})["w"]
    np.testing.assert_array_equal(found, np.pad(np.arange(12.0).reshape(2, 6), ((0, 0), (0, 2))))
    assert found.sharding.is_equivalent_to(spread, 2)


def test_a_table_at_a_stage_of_a_pipeline() -> None:
    pipeline = autopar.Pipeline([["params/item"], ["params/w"]], microbatches=2)
    train_resized("adamw", lambda step: autopar.parallelize(step, pipeline=pipeline, mesh=mesh_of(2)), (41, 50, 30))
