"""Where 0 * x = 0 doesn't hold, over devices: what isn't finite in plain JAX isn't here, by every method."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from tests.support.meshes import mesh_of
from tests.support.nested_reductions import NESTINGS, check
from tests.support.pairs import diagonal

V, D = 11, 3
METHODS = ["ps", "allgather", "allreduce_rows"]


def step(state: Any, batch: Any) -> Any:
    """Gradients that some rows hide, in what only each row knows; a one-hot product, and rows that are looked up."""

    def loss(t: jax.Array) -> jax.Array:
        hot = jax.nn.one_hot(batch["ids"], V) @ t if batch["hot"].shape else t[batch["ids"]]
        return jnp.sum(jnp.tanh(hot + t[batch["ids"]]) * batch["weights"])

    g = jax.grad(loss)(state["t"])
    hidden = (jnp.arange(V) % 2 == 0)[:, None] | (state["t"] < -0.5)
    g = jnp.where(hidden, g, g * batch["factor"])
    norm = jnp.sqrt(jnp.sum(g * g))
    new = {"t": state["t"] - g * jnp.minimum(1.0, 0.1 / norm), "last": jnp.where(state["last"] > 0, 2 * g, g)}
    return new, {"norm": norm, "max": jnp.max(g), "nans": jnp.sum(jnp.isnan(g)), "columns": jnp.sum(g, 0)}


def batch_of(hot: bool, factor: float, weight: float) -> Any:
    weights = np.ones((8, D), np.float32)
    weights[[2, 4], 1] = weight  # of two rows: of a single one the product has an infinity
    ids = np.array([1, 2, 1, 4, 4, 4, 4, 1], np.int32)
    return {"ids": ids, "weights": weights, "factor": np.float32(factor), "hot": np.zeros((1,) if hot else ())}


@pytest.mark.parametrize("method", METHODS)
def test_what_is_not_finite(method: str) -> None:
    hot = method == "allgather"
    axes = {"batch/ids": 0, "batch/weights": 0, "**": None}
    planned = autopar.parallelize(step, strategy=method, mesh=mesh_of(4), donate=False, batch_axis=axes)
    table = np.random.default_rng(1).normal(size=(V, D)).astype(np.float32)
    state = {"t": table, "last": np.zeros((V, D), np.float32)}
    for factor, weight in ((1.0, 1.0), (np.inf, 1.0), (1.0, np.inf)):
        batch = batch_of(hot, factor, weight)
        mine, theirs = autopar.materialize(planned(state, batch)), jax.jit(step)(state, batch)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), mine, theirs)
    assert planned.plan is not None and planned.plan.lifts


@pytest.mark.parametrize("op", ["max", "min"])
def test_a_maximum_over_devices_keeps_a_nan(op: str) -> None:
    """XLA's own AllReduce of a maximum loses it on CPUs."""

    def metric(state: Any, batch: Any) -> Any:
        g = jax.grad(lambda t: jnp.sum(t[batch["ids"]] * batch["weights"]))(state)
        seen = state[batch["ids"]] * batch["weights"]
        return state - g, tuple(getattr(jnp, op)(x) for x in (batch["weights"], g, seen))

    planned = autopar.parallelize(metric, strategy="ps", mesh=mesh_of(4), donate=False)
    batch = batch_of(False, 1.0, np.nan)
    batch = {"ids": batch["ids"], "weights": batch["weights"]}
    _, mine = planned(np.ones((V, D), np.float32), batch)
    assert np.isnan(mine).tolist() == [True, True, True]


@pytest.mark.parametrize(("method", "op"), [*((method, "max") for method in METHODS), ("allgather", "min")])
def test_a_maximum_written_to_rows_keeps_a_nan(method: str, op: str) -> None:
    """A row with a NaN, one that gets a NaN, and both at once; found by random programs."""

    def write(state: Any, batch: Any) -> Any:
        new = state - jax.grad(lambda t: jnp.sum(jnp.sin(t[batch["ids"]]) * batch["weights"]))(state)
        return getattr(new.at[batch["other"]], op)(batch["values"])

    planned = autopar.parallelize(write, strategy=method, mesh=mesh_of(4), state_argnums=(0,), donate=False)
    batch = {"ids": np.array([1, 2, 1, 4, 4, 4, 4, 1], np.int32), "weights": np.ones((8, D), np.float32)}
    batch |= {"other": np.array([2, 9, 3, 3, 0, 5, 2, 9], np.int32), "values": np.ones((8, D), np.float32)}
    batch["weights"][1], batch["values"][[2, 6]] = np.nan, np.nan
    state = np.random.default_rng(1).normal(size=(50, D)).astype(np.float32)
    np.testing.assert_allclose(autopar.materialize(planned(state, batch)), jax.jit(write)(state, batch), rtol=1e-6)
    assert planned.plan is not None and planned.plan.lifts


@pytest.mark.parametrize(("method", "name"), diagonal(METHODS, ["branch in a loop", "loop in a checkpoint"]))
def test_reductions_in_nestings(name: str, method: str) -> None:
    """Partial sums that meet an infinity in a loop are summed first, too."""
    options: dict[str, Any] = {"batch_axis": {"batch/ids": 0, "**": None}, "mesh": mesh_of(4)}
    assert check(NESTINGS[name], strategy=method, **options).plan.lifts
