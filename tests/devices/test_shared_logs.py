"""Tables that an optimizer treats alike share an update log, and nobody can tell."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import jax_compat
from autopar.backends import deferred
from autopar.backends.deferred import Deferred
from autopar.ir import deferred as deferred_ir
from autopar.ir.deferred import update_logs
from autopar.run.step import ParallelStep
from tests.support.deferred import differences
from tests.support.meshes import mesh_of
from tests.support.pairs import long
from tests.support.settings import set_options

pytestmark = pytest.mark.filterwarnings("ignore::autopar.CapacityWarning", "ignore::autopar.RecompileWarning")

WIDTH, LOG_STEPS = 3, 6
#: Rows of tables that are alike, one of them hardly a table, of one with longer rows, and of one that is scaled.
EXTENTS = {"long": 61, "short": 23, "tiny": 5, "wide": 31, "apart": 29}


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Few rows between steps, and few segments; and what is computed, not how it is rounded."""
    monkeypatch.setattr(deferred_ir, "SEGMENTS", 3)
    monkeypatch.setattr(deferred, "_LEAST_ELEMENTS", 8)
    monkeypatch.setattr(deferred, "_SOME_ELEMENTS", 4 * WIDTH)
    with jax_compat.enable_x64():
        yield


def make_state() -> dict[str, Any]:
    random = np.random.default_rng(0)
    widths = {"wide": 2 * WIDTH}
    tables = {k: jnp.asarray(random.normal(size=(rows, widths.get(k, WIDTH)))) for k, rows in EXTENTS.items()}
    return {"t": tables, "m": jax.tree.map(jnp.zeros_like, tables), "v": jax.tree.map(jnp.zeros_like, tables)}


def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
    """Adam with decay, of which one table gets a rate of its own; the numbers of "short" follow from rows of "long"."""

    def loss_fn(tables: Any) -> jax.Array:
        rows = {k: tables[k][batch["ids"] % EXTENTS[k]] for k in EXTENTS if k != "short"}
        follows = jnp.abs(1000 * rows["long"][:, 0]).astype(jnp.int32) % EXTENTS["short"]
        rows["short"] = tables["short"][jax.lax.stop_gradient(follows)]
        return sum(jnp.sum(jnp.sin(x) ** 2) for x in rows.values())

    loss, gradients = jax.value_and_grad(loss_fn)(state["t"])
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["m"], gradients)
    v = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, state["v"], gradients)

    def moved(name: str) -> jax.Array:
        rate = 0.1 * batch["rate"] if name == "apart" else batch["rate"]
        table = state["t"][name]
        return table - rate * (m[name] / (jnp.sqrt(v[name]) + 1e-8) + 0.01 * table)

    return {"t": {k: moved(k) for k in EXTENTS}, "m": m, "v": v}, loss


def batch_of(k: int) -> dict[str, Any]:
    ids = np.random.default_rng(k).zipf(1.3, 8).astype(np.int32)
    return {"ids": ids % (16 if k > 9 else 10**6), "rate": np.float64(0.1 + 0.01 * (k % 3))}


def deferring_on(devices: int, strategy: Any = "ps", **options: Any) -> ParallelStep:
    options = options if devices == 1 else {"mesh": mesh_of(devices), **options}
    made = autopar.parallelize(step, strategy=strategy, **options)
    set_options(made, log_steps=LOG_STEPS)
    return made


def differ(planned: ParallelStep, between: Callable[[int, Any], Any] = lambda k, state: state) -> list[str]:
    """What differs after 40 steps. `between`: what is done to both states before each."""
    mine, theirs, plain = make_state(), make_state(), jax.jit(step)
    for k in range(40):
        mine, loss = planned(between(k, mine), batch_of(k))
        theirs, expected = plain(between(k, theirs), batch_of(k))
        np.testing.assert_allclose(loss, expected, rtol=1e-9)
    assert all(isinstance(x, autopar.DeferredTable) for x in jax.tree.leaves(mine))
    return differences(make_state(), theirs, autopar.materialize(mine), 1e-10)


MIXED = {"t/long": "ps", "t/tiny": "ps", "t/short": "allgather", "t/wide": "allgather", "t/apart": "ps"}
PLACES: dict[str, dict[str, Any]] = {
    "one device": {"devices": 1},
    "ps": {"devices": 4},
    "two devices": {"devices": 2},
    "spread and whole": {
        "devices": 2,
        "strategy": {"t/long": "ps", "t/tiny": "ps", "t/short": "allgather", "t/wide": "allgather", "t/apart": "ps"},
    },
}


@pytest.mark.parametrize("place", ["one device", "ps", long("two devices"), "spread and whole"])
def test_numbers_are_those_of_the_plain_step(place: str) -> None:
    planned = deferring_on(**PLACES[place])
    assert differ(planned) == []
    block = planned.latest.compiled.program.block
    logs = [{e.params["replay"].extent for e in flushes} for flushes in update_logs(block)]
    assert sorted(map(sorted, logs)) == [[5, 23, 61], [29], [31]]
    # Rows of "short" wait for those of "long", so that they are brought up to date after them.
    together = sorted(len(e.params["families"]) for e in block.equations if e.op == "ap.catch_up")
    assert together == [1, 1, 1, 2]
    assert sum(e.op == "ap.record" for e in block.equations) == 3


def test_rows_of_one_table_that_are_left_behind_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(self: Deferred, leaves: Any, stamps: Any, *rest: Any, _some: Any = Deferred.catch_up_some) -> Any:
        *results, last = _some(self, leaves, stamps, *rest)
        return *results, jnp.maximum(last, self.replay.part)  # stamps of the last table

    monkeypatch.setattr(Deferred, "catch_up_some", forgetful)
    with pytest.raises(AssertionError, match="Not equal"):
        differ(deferring_on(1))


@pytest.mark.parametrize("devices", [1, 4])
def test_between_steps(devices: int) -> None:
    """One table is read, one is replaced, and one is looked up by an evaluation: the others go on."""
    reads = autopar.parallelize(lambda state, ids: state["t"]["short"][ids % 23] * 2, mesh=mesh_of(devices))

    def between(k: int, state: Any) -> Any:
        if k == 11:
            np.asarray(state["t"]["tiny"])
        if k == 17:
            state["t"]["long"] = 0.5 * jnp.asarray(state["t"]["long"])
        if k == 23:
            state["m"]["tiny"] = jnp.zeros((5, WIDTH))
        if k % 5 == 4:
            expected = np.asarray(jnp.asarray(copied(state)["t"]["short"]))[batch_of(k)["ids"] % 23] * 2
            before = state["t"]["long"]
            stamps = np.asarray(before.pending.entries[0]) if isinstance(before, autopar.DeferredTable) else None
            np.testing.assert_allclose(reads(state, batch_of(k)["ids"]), expected, rtol=1e-9)
            if stamps is not None:
                np.testing.assert_array_equal(before.pending.entries[0], stamps)
        return state

    assert differ(deferring_on(devices), between) == []


def copied(state: Any) -> Any:
    """The same with update logs of its own, so that reading it changes nothing."""
    logs: dict[int, Any] = {}

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, autopar.DeferredTable):
            return leaf
        log = leaf.pending
        if id(log) not in logs:
            lists = {name: [x.copy() for x in getattr(log, name)] for name in ("leaves", "stamps", "steps")}
            logs[id(log)] = dataclasses.replace(log, **lists)
        return autopar.DeferredTable(logs[id(log)], leaf.index)

    return jax.tree.map(copy, state, is_leaf=lambda x: isinstance(x, autopar.DeferredTable))
