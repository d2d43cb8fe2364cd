"""Each state is updated where it was, whatever comes back with it and in whatever order: on several devices."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import autopar
from tests.support.donation import (
    ADAM,
    CASES,
    IDS,
    LARGE_RESULTS,
    ROWS,
    WIDTH,
    buffers,
    check_steps,
    large_copies,
    pairs,
    some,
    stamp_copies,
)
from tests.support.meshes import mesh_of

SHARE = ROWS * WIDTH // 4


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("arrays by themselves", "ps"),
        ("arrays by themselves", "allgather"),
        ("containers", "allreduce_rows"),
        ("containers", "allreduce"),
        ("containers", "ps"),
        ("gradients first", "ps"),
        ("an unread state", "allgather"),
        ("an untouched state", "ps"),
    ],
)
def test_each_state_is_updated_where_it_was(name: str, strategy: str) -> None:
    case = CASES[name]
    planned = case.planned(strategy=strategy, mesh=mesh_of(4))
    leaves = check_steps(case, planned, first=False)  # which puts the rows where the plan has them
    text = planned.lower(*case.states(), IDS).compile().as_text()
    assert pairs(text) == {k: k for k in range(leaves)}
    assert name in LARGE_RESULTS or not large_copies(text, SHARE)


def test_with_a_fallback() -> None:
    """Capacities that are measured, and a second program in a loop."""

    def step(slot: Any, table: Any, ids: jax.Array) -> Any:
        return CASES["containers"].step(slot, table, ids)

    planned = autopar.parallelize(step, strategy="ps", mesh=mesh_of(4))
    slot, table = CASES["containers"].states()
    ids = np.random.default_rng(0).integers(0, ROWS, 512, np.int32)
    where = None
    for _ in range(3):
        table, slot, _ = planned(slot, table, ids)
        assert where is None or buffers((slot, table)) == where
        where = buffers((slot, table))
    assert planned.plan is not None and planned.latest.compiled.bound.fallback
    assert not large_copies(planned.lower(*CASES["containers"].states(), ids).compile().as_text(), SHARE)


def test_a_step_written_for_one_of_several_devices() -> None:
    def step(slot: Any, table: Any, ids: jax.Array) -> Any:
        loss, g = jax.value_and_grad(lambda t: (t[ids] ** 2).mean())(table["table"])
        g = jax.lax.pmean(g, "batch")
        return {"table": table["table"] - 0.1 * g}, {"slot": slot["slot"] + g * g}, jax.lax.pmean(loss, "batch")

    planned = autopar.parallelize(step, axis_name="batch", strategy="ps", mesh=mesh_of(4))
    slot, table = CASES["containers"].states()
    where = None
    for _ in range(3):
        table, slot, _ = planned(slot, table, IDS)
        assert where is None or buffers((slot, table)) == where
        where = buffers((slot, table))


def test_deferred_rows() -> None:
    planned = ADAM.planned(mesh=mesh_of(4))
    states, where = ADAM.states(), None
    for _ in range(3):
        states = ADAM.new(planned(*states, IDS))
        assert where is None or buffers(states) == where
        where = buffers(states)
    text = planned.lower(*ADAM.states(), IDS).compile().as_text()
    assert not large_copies(text, SHARE) and not stamp_copies(text, ROWS // 4)


def test_what_lies_where_the_plan_has_it_is_not_copied() -> None:
    """In whatever words its place was given."""
    mesh = mesh_of(4)
    rows = jax.NamedSharding(
        jax.make_mesh((4, 1), ("x", "y"), devices=list(mesh.devices.flat)), jax.P(("x", "y"), None)
    )
    case = CASES["containers"]
    states = jax.device_put(case.states(), rows)
    where = buffers(states)
    planned = case.planned(mesh=mesh)
    found = case.new(planned(*states, IDS))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(states))
    assert buffers(found) == where
    with pytest.raises(autopar.DonatedStateError):
        planned(*states, IDS)


def test_leaves_that_share_buffers_elsewhere_on_the_devices() -> None:
    """A guard: what is brought to its place isn't donated, so that nothing is donated twice."""
    mesh = mesh_of(4)
    rows = jax.NamedSharding(jax.make_mesh((4, 1), ("x", "y"), devices=list(mesh.devices.flat)), jax.P("x"))
    case = CASES["containers"]
    shared = jax.device_put(some(0), rows)
    planned, plain = case.planned(mesh=mesh), jax.jit(case.step)
    found, wanted = planned({"slot": shared}, {"table": shared}, IDS), plain({"slot": some(0)}, {"table": some(0)}, IDS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a), b, rtol=1e-5, atol=1e-6), found, wanted)
