"""Each state is updated where it was, whatever comes back with it and in whatever order."""

from __future__ import annotations

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.integrations import equinox as aeqx
from tests.support.donation import (
    ADAM,
    CASES,
    IDS,
    LARGE_RESULTS,
    WIDTH,
    Case,
    buffers,
    check_steps,
    large_copies,
    pairs,
    some,
    stamp_copies,
)
from tests.support.pairs import every


def check(case: Case, planned: Any, *, copies: bool = False, first: bool = True) -> None:
    """Three steps: each writes where the last one wrote, and the numbers are plain ones."""
    leaves = check_steps(case, planned, first=first)
    text = planned.lower(*case.states(), IDS).compile().as_text()
    assert pairs(text) == {k: k for k in range(leaves)}
    assert copies or not large_copies(text)


@pytest.mark.parametrize(
    ("name", "strategy"), [*((name, "ps") for name in CASES), *every(3, [(name, "allreduce") for name in CASES])]
)
def test_each_state_is_updated_where_it_was(name: str, strategy: str) -> None:
    case = CASES[name]
    check(case, case.planned(strategy=strategy), copies=name in LARGE_RESULTS)


def test_keywords_in_another_order() -> None:
    def step(ids: Any, *, table: Any, slot: Any) -> Any:
        new_table, new_slot, loss = CASES["containers"].step(slot, table, ids)
        return loss, new_table, new_slot

    planned = autopar.parallelize(step, strategy="ps")
    slot, table = CASES["containers"].states()
    where = buffers((table, slot))
    for _ in range(2):
        _, table, slot = planned(IDS, slot=slot, table=table)
        assert buffers((table, slot)) == where


def test_what_is_lowered_returns_the_users_results() -> None:
    """A guard: the program itself returns the states first."""
    case = CASES["containers"]
    lowered = case.planned().lower(*case.states(), IDS)
    wanted = case.step(*case.states(), IDS)
    assert jax.tree.structure(lowered.out_info) == jax.tree.structure(wanted)
    found = lowered.compile()(*case.states(), IDS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, wanted)


def test_inside_other_transformations() -> None:
    """The user donates there. A guard: nothing is donated, or put in another order, within another program."""
    case = CASES["containers"]
    planned = case.planned()
    slot, table = case.states()
    text = jax.jit(planned).lower(slot, table, IDS).compile().as_text()
    assert text is not None and pairs(text) == {}
    turned = jax.vmap(planned, in_axes=(0, 0, None))
    states = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), (slot, table))
    wanted = jax.vmap(case.step, in_axes=(0, 0, None))(*states, IDS)
    found = turned(*states, IDS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, wanted)


def test_an_integrations_step() -> None:
    case = CASES["containers"]
    planned = aeqx.parallelize(case.step, strategy="ps")
    states = case.states()
    where = buffers(states)
    for _ in range(2):
        states = case.new(planned(*states, jnp.asarray(IDS)))
        assert buffers(states) == where


def test_deferred_rows() -> None:
    """From the first step on."""
    planned = ADAM.planned()
    states, where = ADAM.states(), None
    for _ in range(3):
        old, where = states, where or buffers(states)
        states = ADAM.new(planned(*states, IDS))
        assert buffers(states) == where
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
        with pytest.raises(autopar.DonatedStateError):
            planned(*old, IDS)
    text = planned.latest.runner.lower().compile().as_text()
    found = pairs(text)
    assert found and all(out == given if given < 3 else out == given - 1 for out, given in found.items())  # ids are [3]
    assert not large_copies(text) and not stamp_copies(text)


def test_leaves_that_share_a_buffer_before_their_rows_are_deferred() -> None:
    """Each gets its own; a batch, or a key, that is part of the state survives."""

    def step(state: Any, batch: Any) -> Any:
        m, v, table = state["m"], state["v"], state["t"]
        table, v, m, loss = ADAM.step({"m": m}, {"v": v}, {"t": table}, batch["ids"])
        noise = jax.random.normal(state["key"]) + batch["table"][0, 0]
        new = {"m": m["m"], "v": v["v"], "t": table["t"], "key": jax.random.split(state["key"])[0], "w": state["w"] + 1}
        return {**new, "average": 0.9 * state["average"] + 0.1 * new["w"]}, loss + noise

    zeros, start, w, key = some(3) * 0, some(2), jnp.arange(4.0), jax.random.key(0)
    state = {"m": zeros, "v": zeros, "t": start, "w": w, "average": w, "key": key}
    batch = {"ids": IDS, "table": start, "key": key}
    kept = np.array(start)
    planned, plain = autopar.parallelize(step, strategy="ps"), jax.jit(step)
    theirs = jax.tree.map(jnp.copy, state)
    mine = state
    for _ in range(3):
        (mine, loss), (theirs, wanted) = planned(mine, batch), plain(theirs, batch)
        np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    assert planned.plan is not None and planned.plan.defers
    for name in ("m", "v", "t", "w", "average"):
        np.testing.assert_allclose(np.asarray(mine[name]), theirs[name], rtol=1e-4, atol=1e-6)
    assert bool(mine["key"] == theirs["key"])
    np.testing.assert_array_equal(start, kept)
    assert zeros.is_deleted() and w.is_deleted() and not key.is_deleted()


def test_dense_leaves_beside_tables_on_hosts() -> None:
    def step(a: Any, b: Any, params: Any, ids: jax.Array) -> Any:
        def loss_fn(emb: jax.Array, u: jax.Array, w: jax.Array) -> jax.Array:
            return jnp.mean(jnp.tanh(emb[ids] @ (u * w)) ** 2)

        loss, (g, gu, gw) = jax.value_and_grad(loss_fn, (0, 1, 2))(params["emb"], a["u"], b["w"])
        return {"emb": params["emb"] - 0.1 * g}, {"w": b["w"] - 0.1 * gw}, {"u": a["u"] - 0.1 * gu}, loss

    planned = autopar.parallelize(step, strategy={"params/emb": ("ps", "hosts")}, state_argnums=(0, 1, 2))
    dense = lambda seed: jnp.array(np.random.default_rng(seed).normal(size=(WIDTH, 512)), jnp.float32) + 0  # noqa: E731
    a, b, params = {"u": dense(0)}, {"w": dense(1)}, {"emb": some(2)}
    where = buffers((a, b))
    for _ in range(3):
        old = a, b, params
        params, b, a, _ = planned(*old, IDS)
        assert buffers((a, b)) == where
        with pytest.raises(autopar.DonatedStateError):
            planned(*old, IDS)


def test_the_same_form_by_what_carries_on() -> None:
    """Of arguments of one form, each comes back as the result that it is carried on to."""
    one = lambda seed: {"x": some(seed)}  # noqa: E731

    def momentum(m: Any, table: Any, ids: jax.Array) -> Any:
        _, g = jax.value_and_grad(lambda t: jnp.mean(t[ids] ** 2))(table["x"])
        new = 0.9 * m["x"] + g
        return {"x": 0.999 * table["x"] - 0.1 * new}, {"x": new}

    def target(online: Any, target: Any, ids: jax.Array) -> Any:
        _, g = jax.value_and_grad(lambda t: jnp.mean((t[ids] - target["x"][ids]) ** 2))(online["x"])
        return {"x": target["x"]}, {"x": online["x"] - 0.1 * g}

    def round_(a: Any, b: Any, c: Any, ids: jax.Array) -> Any:
        g = jnp.zeros_like(a["x"]).at[ids].add(1.0)
        return {"x": c["x"] + g}, {"x": a["x"] + g}, {"x": b["x"] + g}

    expected = {momentum: {0: 1, 1: 0}, target: {0: 1, 1: 0}, round_: {0: 1, 1: 2, 2: 0}}
    for step, wanted in expected.items():
        planned: Any = autopar.parallelize(step, state_argnums=tuple(range(len(wanted))))
        entry = planned.planned_for(*(one(k) for k in wanted), IDS)
        assert entry.states.outputs == wanted, step


@pytest.mark.filterwarnings("ignore::autopar.RecompileWarning")
def test_going_to_and_fro_compiles_once(caplog: pytest.LogCaptureFixture) -> None:
    """A step that trains or evaluates by a flag: what is donated differs."""

    def step(state: Any, ids: jax.Array, training: bool) -> Any:
        _, new, loss = CASES["gradients of the state's form"].step(state, ids)
        return (new, loss) if training else loss

    planned = autopar.parallelize(step, strategy="ps", static_argnums=2)
    state = {"table": some(1)}
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        for _ in range(4):
            state, _ = planned(state, IDS, True)
            planned(state, IDS, False)
    compiled = [r for r in caplog.messages if r.startswith("Finished XLA compilation of jit(step)")]
    assert len(compiled) == 2


def test_batches_of_shard_compile_once(caplog: pytest.LogCaptureFixture) -> None:
    """The state comes back where it was."""

    def step(state: Any, batch: Any) -> Any:
        _, new, loss = CASES["gradients of the state's form"].step(state, batch)
        return new, loss

    planned = autopar.parallelize(step, strategy="ps")
    state = {"table": some(1)}
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        for batch in autopar.shard([np.asarray(IDS)] * 3):
            state, _ = planned(state, batch)
    compiled = [r for r in caplog.messages if r.startswith("Finished XLA compilation of jit(step)")]
    assert len(compiled) == 1
