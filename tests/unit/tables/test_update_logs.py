"""What a full update log needs is compiled beside the steps: no step does it, the first time that it is full."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest

import autopar
from autopar.run.step import ParallelStep
from tests.support.compilations import compilations, finish
from tests.support.deferred import differences
from tests.support.settings import set_options

ROWS, WIDTH, LOG_STEPS = 320, 3, 24
TX = optax.adamw(0.1, weight_decay=0.1)


def step(state: Any, batch: Any) -> Any:
    loss, g = jax.value_and_grad(lambda t: jax.numpy.sum(jax.numpy.sin(t[batch["ids"]]) ** 2))(state["t"])
    updates, opt = TX.update(g, state["opt"], state["t"])
    return {"t": optax.apply_updates(state["t"], updates), "opt": opt}, loss


def make_state() -> Any:
    table = jax.numpy.asarray(np.random.default_rng(1).normal(size=(ROWS, WIDTH)), np.float32)
    return {"t": table, "opt": TX.init(table)}


def batch_of(k: int) -> dict[str, Any]:
    """As many distinct rows in each step: programs for rows on hosts are of one size."""
    return {"ids": ((8 * k + np.arange(8)) % ROWS).astype(np.int32)}


def made_for(strategy: Any) -> ParallelStep:
    made = autopar.parallelize(step, strategy=strategy)
    set_options(made, log_steps=LOG_STEPS)
    return made


def trained(planned: ParallelStep, state: Any, first: int, end: int) -> Any:
    for k in range(first, end):
        state, _ = planned(state, batch_of(k))
    return jax.block_until_ready(state)


@pytest.mark.parametrize("strategy", ["ps", ("ps", "hosts")])
def test_no_step_compiles_when_the_log_is_full(strategy: Any) -> None:
    planned = made_for(strategy)
    with compilations() as at_first:
        state = trained(planned, make_state(), 0, 8)
    assert planned.plan is not None and planned.plan.defers
    assert at_first.beside == 2, "a log's turn, and some rows that are brought up to date: after it, or to be read"
    with compilations() as later:
        state = trained(planned, state, 8, 3 * LOG_STEPS)
    assert later.here == later.beside == 0
    log = state["t"].pending if strategy == "ps" else state["t"].waiting.log
    assert log.now < LOG_STEPS + 1 < 3 * LOG_STEPS, "it was full"
    plain, theirs = jax.jit(step), make_state()
    for k in range(3 * LOG_STEPS):
        theirs, _ = plain(theirs, batch_of(k))
    assert differences(make_state(), theirs, autopar.materialize(state), 1e-4) == []


def test_what_a_full_log_needs_is_compiled_before_longer_programs() -> None:
    """Those that are begun behind 32 steps would have the step that fills the log wait for them."""
    planned = autopar.parallelize(step, strategy="ps")
    set_options(planned, log_steps=8 * LOG_STEPS)
    with compilations() as made:
        trained(planned, make_state(), 0, 20)
        finish()
    assert made.beside == 2, "a log's turn, and some rows that are brought up to date"


def test_another_log_of_the_same_step_compiles_nothing() -> None:
    planned = made_for("ps")
    trained(planned, make_state(), 0, LOG_STEPS)
    finish()
    with compilations() as made:
        trained(planned, make_state(), 0, LOG_STEPS)
    assert made.beside == made.here == 0


def test_an_evaluation_compiles_what_goes_on_between_steps() -> None:
    """Once: what brings rows up to date that are read brings up to date those that a full log moves."""
    planned, evaluation = made_for("ps"), autopar.parallelize(lambda state, ids: state["t"][ids] * 2)
    state = trained(planned, make_state(), 0, 2)
    with compilations() as first:
        evaluation(state, batch_of(0)["ids"])
    assert first.here > 0 == first.beside
    with compilations() as later:
        state = trained(planned, state, 2, 3 * LOG_STEPS)
        finish()
        evaluation(state, batch_of(3)["ids"])
    assert later.here + later.beside == 1, "a log's turn: by the thread, or by a step that comes before it"
