"""Evaluations of a state whose rows wait: those that are read are brought up to date, and what is read whole, whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.backends.deferred import Deferred
from tests.support.compilations import finish
from tests.support.deferred import deferring
from tests.support.meshes import mesh_of

ROWS, OTHER = 60, 40
TX = optax.adamw(0.05, weight_decay=0.1)


def train_step(state: Any, ids: jax.Array) -> tuple[Any, jax.Array]:
    def loss_fn(params: Any) -> jax.Array:
        return ((params["emb"][ids] - 1) ** 2).sum() + ((params["other"][:, ids % OTHER].T @ params["w"]) ** 2).sum()

    loss, gradients = jax.value_and_grad(loss_fn)(state["params"])
    updates, opt = TX.update(gradients, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss


def make_state() -> Any:
    a, b, c = jax.random.split(jax.random.key(0), 3)
    params = {
        "emb": jax.random.normal(a, (ROWS, 3)),
        "other": jax.random.normal(b, (2, OTHER)),
        "w": jax.random.normal(c, (2,)),
    }
    return {"params": params, "opt": TX.init(params)}


def rows_alone(state: Any, ids: jax.Array) -> Any:
    """With numbers out of range, negative ones, and some twice; the rows of one table run along its second axis."""
    moved = state["params"]["emb"][ids - 5] * state["params"]["w"].sum()
    return moved, jnp.take(state["params"]["other"], ids, axis=1), state["opt"][0].mu["emb"][ids % 7]


def whole(state: Any, ids: jax.Array) -> Any:
    return state["params"]["emb"][ids], jnp.linalg.norm(state["params"]["emb"]), state["params"]["other"].sum()


def by_a_table(state: Any, ids: jax.Array) -> Any:
    """The numbers of rows follow from rows that wait, too."""
    return state["params"]["emb"][(10 * jnp.abs(state["params"]["other"][0, ids % OTHER])).astype(jnp.int32)]


def looped(state: Any, ids: jax.Array) -> Any:
    _, found = jax.lax.scan(lambda total, i: (total, state["params"]["emb"][i % ROWS]), 0.0, ids)
    return found, jax.lax.cond(ids[0] > 20, lambda t: t[0], lambda t: t[1], state["params"]["other"])


def returned(state: Any, ids: jax.Array) -> Any:
    return state["params"]["emb"][ids], state["params"]["emb"]


@pytest.mark.parametrize("devices", [None, 4])
@pytest.mark.parametrize(
    ("evaluate", "flushes"),
    [(rows_alone, False), (whole, True), (by_a_table, True), (looped, True), (returned, True)],
)
def test_evaluations_see_what_plain_ones_do(evaluate: Callable[..., Any], flushes: bool, devices: int | None) -> None:
    """And training goes on with the same numbers, past the end of the update log."""
    mesh = mesh_of(devices) if devices else None
    step = deferring(train_step, 8, mesh=mesh)
    mine, theirs, plain = make_state(), make_state(), jax.jit(train_step)
    planned, random = autopar.parallelize(evaluate, mesh=mesh), np.random.default_rng(0)
    for k in range(30):
        ids = random.integers(0, ROWS, 4).astype(np.int32)
        mine, theirs = step(mine, ids)[0], plain(theirs, ids)[0]
        if k % 3 == 2:
            seen = random.integers(0, ROWS + 9, 6).astype(np.int32)
            for a, b in zip(
                *(jax.tree.leaves(f(s, seen)) for f, s in ((planned, mine), (evaluate, theirs))), strict=True
            ):
                np.testing.assert_allclose(np.asarray(a), b, rtol=2e-5, atol=1e-6)
            log = mine["params"]["emb"].log
            assert log.is_up_to_date == flushes and (flushes or int(log.entries[1]) > 0)
    for a, b in zip(jax.tree.leaves(autopar.materialize(mine)), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


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
            for a, b in zip(*map(jax.tree.leaves, read(k)), strict=True):
                np.testing.assert_allclose(np.asarray(a), b, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("devices", [None, 4])
def test_evaluations_find_their_program_compiled(devices: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """For as many rows as a step reads, and up to eight times as many; of which some are one table's alone."""
    programs: list[int] = []

    def counted(self: Deferred, *operands: Any, _catch_up: Any = Deferred.catch_up_in_place) -> Any:
        programs.append(1)
        return _catch_up(self, *operands)

    monkeypatch.setattr(Deferred, "catch_up_in_place", counted)
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
        found = autopar.parallelize(evaluate, mesh=mesh)(mine, seen), evaluate(theirs, seen)
        for a, b in zip(*map(jax.tree.leaves, found), strict=True):
            np.testing.assert_allclose(np.asarray(a), b, rtol=2e-5, atol=1e-6)
        assert (len(programs) > before) == (count == 33)
        before = len(programs)
