"""Evaluations of a state whose rows wait: those that are read are brought up to date, and what is read whole, whole."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import autopar
from autopar.backends.deferred import Deferred
from tests.support.compilations import finish
from tests.support.deferred import deferring
from tests.support.evaluation_rows import EVALUATIONS, OTHER, ROWS, assert_same, make_state, rows_alone, train_step
from tests.support.meshes import mesh_of
from tests.support.pairs import diagonal


@pytest.mark.parametrize(("evaluate", "devices"), diagonal([f for f, _ in EVALUATIONS], {"1": None, "4": 4}))
def test_evaluations_see_what_plain_ones_do(evaluate: Callable[..., Any], devices: int | None) -> None:
    """And training goes on with the same numbers, past the end of the update log."""
    flushes = dict(EVALUATIONS)[evaluate]
    mesh = mesh_of(devices) if devices else None
    step = deferring(train_step, 8, mesh=mesh)
    mine, theirs, plain = make_state(), make_state(), jax.jit(train_step)
    planned, random = autopar.parallelize(evaluate, mesh=mesh), np.random.default_rng(0)
    for k in range(30):
        ids = random.integers(0, ROWS, 4).astype(np.int32)
        mine, theirs = step(mine, ids)[0], plain(theirs, ids)[0]
        if k % 3 == 2:
            seen = random.integers(0, ROWS + 9, 6).astype(np.int32)
            assert_same(planned(mine, seen), evaluate(theirs, seen))
            log = mine["params"]["emb"].pending
            assert log.is_up_to_date == flushes and (flushes or int(log.entries[1]) > 0)
    assert_same(autopar.materialize(mine), theirs)


def test_old_states_are_evaluated_too() -> None:
    """With `donate=False`, in any order: each has an update log of its own."""
    step, plain = deferring(train_step, 8, donate=False), jax.jit(train_step)
    mine, theirs, ids = [make_state()], [make_state()], np.arange(4, dtype=np.int32)
    for k in range(20):
        mine.append(step(mine[-1], ids + k)[0])
        theirs.append(plain(theirs[-1], ids + k)[0])
    planned = autopar.parallelize(rows_alone)
    for read in (lambda k: (planned(mine[k], ids), rows_alone(theirs[k], ids)), lambda k: (mine[k], theirs[k])):
        for k in (20, 5, 7, 8, 9, 16, 15, 1):
            assert_same(*read(k))


@pytest.mark.parametrize("devices", [None, 4])
def test_a_state_is_read_while_something_else_is_traced(devices: int | None) -> None:
    """It keeps its arrays: what brings rows up to date isn't traced with it."""
    mesh = mesh_of(devices) if devices else None
    step, plain = deferring(train_step, 8, mesh=mesh), jax.jit(train_step)
    mine, theirs, random = make_state(), make_state(), np.random.default_rng(0)
    planned = autopar.parallelize(rows_alone, mesh=mesh)
    reads: list[Callable[[Any, Any], Any]] = [
        lambda state, seen: jax.jit(lambda ids: planned(state, ids))(seen),
        lambda state, seen: jax.tree.map(
            lambda x: x[0], jax.lax.scan(lambda carry, ids: (carry, planned(state, ids)), None, seen[None])[1]
        ),
        lambda state, seen: jax.jit(lambda ids: (planned(state, seen), ids))(seen)[0],
        lambda state, seen: jax.jit(lambda ids: rows_alone(autopar.materialize(state), ids))(seen),
        lambda state, seen: jax.tree.map(
            lambda x: x[0], jax.vmap(lambda _: planned(state, seen), axis_name="a")(np.arange(1))
        ),
    ]
    for k in range(24):
        ids = random.integers(0, ROWS, 4).astype(np.int32)
        mine, theirs = step(mine, ids)[0], plain(theirs, ids)[0]
        if k % 3 == 2:
            seen = random.integers(0, ROWS + 9, 6).astype(np.int32)
            assert_same(reads[k // 3 % len(reads)](mine, seen), rows_alone(theirs, seen))
            jax.eval_shape(functools.partial(step, mine, ids))  # which takes no step
    assert_same(autopar.materialize(mine), theirs)


def test_an_evaluation_without_ids() -> None:
    step = deferring(train_step, 8)
    state = step(make_state(), np.arange(4, dtype=np.int32))[0]
    none = np.zeros(0, np.int32)
    by_one = autopar.parallelize(lambda state, ids: jax.vmap(lambda k: state["params"]["emb"][k])(ids))
    assert by_one(state, none).shape == (0, 3)


@pytest.mark.parametrize("devices", [None, 4])
def test_evaluations_find_their_program_compiled(devices: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """For as many rows as a step reads, and up to eight times as many; of which some are one table's alone."""
    programs: list[int] = []

    def counted(self: Deferred, *operands: Any, _some: Any = Deferred.catch_up_some) -> Any:
        programs.append(1)
        return _some(self, *operands)

    monkeypatch.setattr(Deferred, "catch_up_some", counted)
    mesh = mesh_of(devices) if devices else None
    step, plain = deferring(train_step, 64, mesh=mesh), jax.jit(train_step)
    mine, theirs = make_state(), make_state()
    for k in range(20):
        mine, theirs = step(mine, np.arange(k, k + 4))[0], plain(theirs, np.arange(k, k + 4))[0]
    finish()
    before = len(programs)
    assert before > 0

    def one_table(state: Any, ids: jax.Array) -> Any:
        return state["params"]["other"][:, ids % OTHER]

    for evaluate, count in ((rows_alone, 4), (rows_alone, 3), (one_table, 31), (rows_alone, 33), (rows_alone, 16)):
        seen = np.arange(7, 7 + count)
        assert_same(autopar.parallelize(evaluate, mesh=mesh)(mine, seen), evaluate(theirs, seen))
        assert (len(programs) > before) == (count == 33)
        before = len(programs)
