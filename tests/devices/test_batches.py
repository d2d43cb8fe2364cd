"""Batches whose examples lie along other axes than the first, and state that is carried along with each example."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar

from .meshes import mesh_of
from .test_rows import same

ROWS, WIDTH, LENGTH, BATCH = 41, 3, 5, 8
TX = optax.chain(optax.clip_by_global_norm(0.1), optax.adagrad(0.1))


def make_state() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shapes = {"emb": (ROWS, WIDTH), "inner": (ROWS, WIDTH), "w": (WIDTH, WIDTH), "u": (WIDTH, WIDTH)}
    params = {k: jnp.asarray(rng.normal(size=shape), jnp.float32) for k, shape in shapes.items()}
    return {"params": params, "opt": TX.init(params)}


def time_major(seed: int = 0) -> dict[str, Any]:
    """ids [T, B]; weights [B]; noise of all examples [K, 2]."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, ROWS, (LENGTH, BATCH), np.int32)
    negatives = rng.integers(0, ROWS, (4, 2), np.int32)
    return {"ids": ids, "weights": rng.random(BATCH, np.float32), "negatives": negatives}


def recurrent(state: Any, batch: Any) -> Any:
    """One table is looked up before the loop over time, another one inside of it."""

    def loss_fn(p: Any) -> jax.Array:
        def cell(h: jax.Array, xs: Any) -> Any:
            x, ids = xs
            h = jnp.tanh(x @ p["w"] + h @ p["u"] + p["inner"][ids])
            return h, jnp.sum(h**2, -1)

        start = jnp.zeros((batch["ids"].shape[1], WIDTH))
        _, losses = jax.lax.scan(cell, start, (p["emb"][batch["ids"]], batch["ids"]))
        return jnp.mean(losses * batch["weights"]) + 0.1 * jnp.mean(p["emb"][batch["negatives"]] ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    updates, opt = TX.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss, "g": grads["emb"]}


def batch_placements(planned: Any) -> dict[str, int | None]:
    """Path of an input that is no state -> the axis along which it is spread."""
    entry = planned.latest
    pairs = zip(entry.compiled.analysed.inputs, entry.compiled.plan.placements, strict=True)
    return {given.path: axis for given, axis in pairs if given.role == "batch"}


@pytest.mark.parametrize("axis", [1, {"batch/ids": -1, "**/negatives": None}], ids=["int", "mapping"])
@pytest.mark.parametrize("method", ["ps", "allgather", "allreduce_rows"])
def test_time_major_batches(method: str, axis: Any) -> None:
    planned = autopar.parallelize(recurrent, strategy=method, mesh=mesh_of(4), batch_axis=axis)
    plain = jax.jit(recurrent)
    mine, theirs = make_state(), make_state()
    for k in range(3):
        (mine, a), (theirs, b) = planned(mine, time_major(k)), plain(theirs, time_major(k))
        same((mine, a), (theirs, b))
    assert planned.plan is not None and len(planned.plan.families) == 2
    named = isinstance(axis, dict)
    expected = {"batch/ids": 1, "batch/negatives": None, "batch/weights": 0 if named else None}
    assert batch_placements(planned) == expected
    # What is compiled takes the ids in shares of the examples, and each device looks its own ones up.
    text = planned.lower(make_state(), time_major()).compile().as_text()
    assert f"s32[{LENGTH},{BATCH // 4}]{{1,0}} parameter" in text
    asked = {LENGTH * BATCH // 4 + 8, 2 * LENGTH * BATCH // 4}  # the loop's ids: forwards, and again backwards
    if method == "ps":
        assert {f.fetched // 4 for f in planned.plan.families if f.fetched} == asked


def test_verify_and_explain_know_the_axis() -> None:
    planned = autopar.parallelize(recurrent, strategy="ps", mesh=mesh_of(4), batch_axis=1, donate=False)
    assert autopar.verify(planned, make_state(), time_major()).ok
    assert "1 inputs are spread over 4 devices" in str(autopar.explain(planned, make_state(), time_major()))


@pytest.mark.parametrize("devices", [1, 4])
def test_what_the_batch_does_not_have(devices: int) -> None:
    def plan(axis: Any) -> Any:
        planned = autopar.parallelize(recurrent, mesh=mesh_of(devices), batch_axis=axis)
        return planned.entry(make_state(), time_major())

    with pytest.raises(
        autopar.ArgumentsError, match=r"'batch/id' matches nothing.*batch/ids \[5, 8\], batch/negatives"
    ):
        plan({"batch/id": 1})
    with pytest.raises(autopar.ArgumentsError, match=r"batch/ids has no axis 2, its shape is \[5, 8\]"):
        plan({"batch/ids": 2})
    with pytest.raises(autopar.ArgumentsError, match="batch_axis=2: nothing in the batch has that axis"):
        plan(2)
    with pytest.raises(autopar.ArgumentsError, match="'params/emb' matches nothing"):
        plan({"params/emb": 1})
    plan({"batch/ids": 1, "**": 1})  # a pattern for everything else names nothing


@pytest.mark.parametrize("axis", [True, None, "batch", 1.0, {"batch/ids": "1"}, {0: 1}])
def test_a_batch_axis_of_another_kind(axis: Any) -> None:
    with pytest.raises(autopar.ArgumentsError, match="give an int, or a mapping from patterns"):
        autopar.parallelize(recurrent, batch_axis=axis)
