"""Batches that come to touch other numbers of rows: seen, reported, planned for anew, and the plain step's numbers."""

from __future__ import annotations

import time
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
from tests.support.meshes import mesh_of
from tests.support.pairs import long
from tests.support.rates import rates as seconds_of
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


def trained(planned: Any, optimizer: str, *stretches: tuple[int, int]) -> list[warnings.WarningMessage]:
    """Train by both steps, compare after every one, and return what was warned of."""
    step, make = training(optimizer)
    plain = jax.jit(step)
    mine, theirs = make(), make()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for stretch in stretches:
            for batch in batches(*stretch):
                (mine, a), (theirs, b) = planned(mine, batch), plain(theirs, batch)
                same(a, b)
        same(autopar.materialize(mine), theirs)
    return told


@pytest.mark.parametrize("optimizer", ["adagrad", long("adam")])
def test_the_plan_is_made_again(optimizer: str) -> None:
    """320 ids of 400 rows, then of 12: messages become short. One warning, which says so."""
    planned = autopar.parallelize(training(optimizer)[0], strategy="ps", mesh=mesh_of(4), replan="auto")
    planned.watch = AlphaWatch("auto", every=3)
    told = trained(planned, optimizer, (ROWS, 1), (12, 30))
    assert [w.category for w in told] == [autopar.AlphaDriftWarning]
    text = str(told[0].message)
    assert "params/emb was planned for 2" in text and "now 12 (3.000%)" in text
    assert "made again, by this call's batch: params/emb ps, capacity 40 -> ps, capacity 8" in text
    assert told[0].filename == __file__
    assert planned.plan is not None and planned.latest.compiled.bound.families[0].bounds.capacity == 8
    assert planned.watch is not None and planned.watch.seen["params/emb"].planned == 12


def test_the_method_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exchange costs by its bytes: 4 x 40 rows by all_to_all more than all_gather's 4 x 80, 4 x 8 rows less."""
    costs = seconds_of(all_to_all=1, all_gather=0.5, all_reduce=1)
    monkeypatch.setattr("autopar.api.rates_of", lambda *_, **__: costs)
    planned = autopar.parallelize(training("adagrad")[0], mesh=mesh_of(4), replan="auto")
    planned.watch = AlphaWatch("auto", every=2)
    told = trained(planned, "adagrad", (ROWS, 1), (12, 15))
    assert [w.category for w in told] == [autopar.AlphaDriftWarning]
    assert "params/emb allgather -> ps, capacity 8" in str(told[0].message)
    assert planned.plan is not None and planned.plan.parameters[0].method == "ps"


def test_a_plan_that_stays_the_same_is_not_compiled_again() -> None:
    planned = autopar.parallelize(training("adagrad")[0], strategy="allgather", mesh=mesh_of(4), replan="auto")
    planned.watch = AlphaWatch("auto", every=2)
    planned(training("adagrad")[1](), next(batches(ROWS, 1)))
    entry = planned.latest
    told = trained(planned, "adagrad", (12, 15))
    assert ["nothing changes" in str(w.message) for w in told] == [True]
    assert planned.latest is entry and planned.watch.seen["params/emb"].planned == 12


@pytest.mark.parametrize("devices", [1, 4])
def test_drift_is_reported_once(devices: int) -> None:
    planned = autopar.parallelize(training("adagrad")[0], strategy="ps", mesh=mesh_of(devices))
    assert planned.watch is not None and planned.watch.replan == "warn"
    planned.watch = AlphaWatch("warn", every=2)
    step, make = training("adagrad")
    state, plain, run = make(), make(), jax.jit(step)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for batch in (*batches(ROWS, 1), *batches(12, 200)):
            (state, loss), (plain, expected) = planned(state, batch), run(plain, batch)
            same(loss, expected)
            time.sleep(0.002)  # who counts may be slower than such a step
    same(state, plain)
    assert [w.category for w in told] == [autopar.AlphaDriftWarning], [str(w.message) for w in told]
    text = str(told[0].message)
    assert "params/emb was planned for 220 of 400 rows (55.000%), now 12 (3.000%)" in text
    assert ("replan='auto'" in text, "The plan of one device doesn't depend on it" in text) == (
        devices > 1,
        devices == 1,
    )
    seen = planned.watch.seen["params/emb"]
    assert (seen.planned, seen.rows, seen.extent) == (220, 12, ROWS) and seen.samples >= 3


@pytest.mark.parametrize("replan", ["warn", "auto"])
def test_batches_as_planned_are_no_drift(replan: Any) -> None:
    planned = autopar.parallelize(training("adagrad")[0], strategy="ps", mesh=mesh_of(4), replan=replan)
    planned.watch = AlphaWatch(replan, every=1)
    assert trained(planned, "adagrad", (ROWS, 25)) == []
    assert planned.watch.seen["params/emb"].rows == pytest.approx(220, rel=0.1)
