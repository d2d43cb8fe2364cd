"""Batches that come to touch other numbers of rows: seen, reported, and the plain step's numbers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.run.drift import AlphaWatch
from tests.support.at_once import AtOnce
from tests.support.meshes import mesh_of
from tests.support.pairs import long
from tests.support.row_steps import same

ROWS, WIDTH = 400, 3
TX = {
    "adagrad": optax.chain(optax.clip_by_global_norm(0.1), optax.adagrad(0.1)),
    "adam": optax.adam(0.01),
}


def training(optimizer: str) -> tuple[Any, Any]:
    """A step, and what makes its state."""
    tx = TX[optimizer]

    def step(state: Any, batch: Any) -> Any:
        loss, g = jax.value_and_grad(lambda p: jnp.mean(jnp.tanh(p["emb"][batch["ids"]] @ p["w"]) ** 2))(
            state["params"]
        )
        updates, opt = tx.update(g, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    def make() -> Any:
        rng = np.random.default_rng(0)
        params = {"emb": jnp.asarray(rng.normal(size=(ROWS, WIDTH)), jnp.float32), "w": jnp.eye(WIDTH)}
        return {"params": params, "opt": tx.init(params)}

    return step, make


def batches(most: int, count: int) -> Iterator[dict[str, np.ndarray]]:
    """Ids below a bound, in one buffer that is filled again and again, as data loaders do."""
    rng, ids = np.random.default_rng(1), np.zeros((8, 40), np.int32)
    for _ in range(count):
        ids[:] = rng.integers(0, most, ids.shape)
        yield {"ids": ids}


@pytest.mark.parametrize("optimizer", ["adagrad", long("adam")])
def test_a_step_that_is_parallelized_again_goes_on_with_the_state(optimizer: str) -> None:
    """320 ids of 400 rows, then of 12: the warning says what to do, and so messages become short."""
    step, make = training(optimizer)
    planned, plain = autopar.parallelize(step, strategy="ps", mesh=mesh_of(4)), jax.jit(step)
    planned.watch = AlphaWatch(3, AtOnce())
    mine, theirs = make(), make()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for batch in (*batches(ROWS, 1), *batches(12, 30)):
            (mine, a), (theirs, b) = planned(mine, batch), plain(theirs, batch)
            same(a, b)
    assert [w.category for w in told] == [autopar.AlphaDriftWarning]
    text = str(told[0].message)
    assert "params/emb was planned for 2" in text and "now 12 (3.000%)" in text
    assert "parallelize the function once more, which plans by the batch of its first call" in text
    assert told[0].filename == __file__ and planned.plan.table("params/emb").capacity == 40
    again = autopar.parallelize(planned.fun, strategy="ps", mesh=mesh_of(4))
    for batch in batches(12, 3):
        (mine, a), (theirs, b) = again(mine, batch), plain(theirs, batch)
        same(a, b)
    same(autopar.materialize(mine), theirs)
    assert again.plan.table("params/emb").capacity == 8


@pytest.mark.parametrize("devices", [1, 4])
def test_drift_is_reported_once(devices: int) -> None:
    planned = autopar.parallelize(training("adagrad")[0], strategy="ps", mesh=mesh_of(devices))
    assert planned.watch is not None
    planned.watch = AlphaWatch(every=2)
    step, make = training("adagrad")
    state, plain, run = make(), make(), jax.jit(step)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for k, batch in enumerate((*batches(ROWS, 1), *batches(12, 200))):
            (state, loss), (plain, expected) = planned(state, batch), run(plain, batch)
            same(loss, expected)
            if k % 10 == 0 and (at_work := planned.watch._at_work) is not None:
                at_work[1].exception(60)  # who counts may be slower than such a step
    same(state, plain)
    assert [w.category for w in told] == [autopar.AlphaDriftWarning], [str(w.message) for w in told]
    text = str(told[0].message)
    assert "params/emb was planned for 220 of 400 rows (55.000%), now 12 (3.000%)" in text
    assert ("parallelize the function once more" in text, "The plan of one device doesn't depend on it" in text) == (
        devices > 1,
        devices == 1,
    )
    seen = planned.watch.seen["params/emb"]
    assert (seen.planned, seen.rows, seen.extent) == (220, 12, ROWS) and seen.samples >= 3


def test_batches_as_planned_are_no_drift() -> None:
    step, make = training("adagrad")
    planned, plain = autopar.parallelize(step, strategy="ps", mesh=mesh_of(4)), jax.jit(step)
    planned.watch = AlphaWatch(1, AtOnce())
    mine, theirs = make(), make()
    for batch in batches(ROWS, 25):  # a warning is an error
        (mine, a), (theirs, b) = planned(mine, batch), plain(theirs, batch)
        same(a, b)
    same(autopar.materialize(mine), theirs)
    assert planned.watch.seen["params/emb"].rows == pytest.approx(220, rel=0.1)
