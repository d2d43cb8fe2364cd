"""Deferred rows on several devices: the update log goes with the rows, wherever they and the state go."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import jax_compat
from autopar.backends.update_log import UpdateLog
from autopar.ir import deferred
from autopar.run.step import ParallelStep
from tests.support.deferred import deferring, differences
from tests.support.meshes import mesh_of
from tests.support.pairs import diagonal
from tests.support.settings import set_options

pytestmark = pytest.mark.filterwarnings("ignore::autopar.CapacityWarning", "ignore::autopar.RecompileWarning")

ROWS, WIDTH = 211, 3


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Full flushes, too; and what is computed, not how it is rounded."""
    monkeypatch.setattr(deferred, "SEGMENTS", 3)
    with jax_compat.enable_x64():
        yield


def make_state(rows: int = ROWS) -> dict[str, Any]:
    table = jnp.asarray(np.random.default_rng(1).normal(size=(rows, WIDTH)))
    return {"t": table, "m": jnp.zeros_like(table), "v": jnp.zeros_like(table)}


def step(state: Any, batch: Any) -> Any:
    """Adam with decay and clipping."""

    def loss_fn(table: jax.Array) -> jax.Array:
        looked = table[batch["ids"]]
        if "teacher" in batch:
            looked = looked - 0.5 * batch["teacher"][batch["ids"]]
        return batch.get("scale", 1.0) * jnp.mean(jnp.sin(looked) ** 2)

    loss, g = jax.value_and_grad(loss_fn)(state["t"])
    g *= jnp.minimum(1.0, 0.05 / jnp.sqrt(jnp.sum(g * g)))
    m, v = 0.9 * state["m"] + 0.1 * g, 0.99 * state["v"] + 0.01 * g * g
    return {"t": state["t"] - 0.1 * (m / (jnp.sqrt(v) + 1e-8) + 0.01 * state["t"]), "m": m, "v": v}, loss


def masked_step(state: Any, batch: Any) -> Any:
    """Adam, and a norm of some rows' scaled gradients, which the padding row doesn't tell of others."""
    loss, g = jax.value_and_grad(lambda t: jnp.sum(jnp.sin(t[batch["ids"]]) ** 2))(state["t"])
    g /= batch["scale"]
    norm = jnp.sum(jnp.where((jnp.arange(ROWS) % 2 == 0)[:, None], g, 0) ** 2)
    m, v = 0.9 * state["m"] + 0.1 * g, 0.99 * state["v"] + 0.01 * g * g
    return {"t": state["t"] - 0.1 * m / (jnp.sqrt(v) + 1e-8), "m": m, "v": v}, (loss, norm)


def ids_of(k: int, rows: int = ROWS, length: int = 4) -> dict[str, Any]:
    return {"ids": np.random.default_rng(k).integers(0, rows - 8, (8, length), np.int32)}


def agree(mine: Any, theirs: Any) -> None:
    start = make_state(mine["t"].shape[0])
    assert differences({k: start[k] for k in mine}, theirs, autopar.materialize(mine), 1e-10) == []


def deferring_on(devices: int, log_steps: int = 6, **options: Any) -> ParallelStep:
    made = autopar.parallelize(step, **{"strategy": "ps", "mesh": mesh_of(devices), **options})
    set_options(made, log_steps=log_steps)
    return made


@pytest.mark.parametrize("method", ["ps", "allgather", "allreduce_rows"])
def test_methods(method: str) -> None:
    """With a factor that isn't a number now and then."""
    planned, plain = deferring_on(2, strategy=method), jax.jit(step)
    mine, theirs = make_state(), make_state()
    for k in range(30):
        (mine, a), (theirs, b) = planned(mine, ids_of(k)), plain(theirs, ids_of(k))
        np.testing.assert_allclose(a, b, rtol=1e-9)
    assert isinstance(mine["t"], autopar.DeferredTable)
    agree(mine, theirs)
    for k in range(10):
        batch = {**ids_of(k), "scale": np.float64(np.nan if k == 5 else 1.0)}
        mine, theirs = planned(mine, batch)[0], plain(theirs, batch)[0]
    assert np.isnan(np.asarray(theirs["t"])).all()
    agree(mine, theirs)


@pytest.mark.parametrize("devices", [1, 4])
def test_scale_only_rows_wait_for_some_parts_only(devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then they are multiplied between steps: there is always room for a part, and all rows are never moved at once."""
    planned, plain = deferring_on(devices, log_steps=4), jax.jit(step)
    mine, theirs = make_state(), make_state()
    with monkeypatch.context() as patch:
        patch.setattr(UpdateLog, "_flush", lambda log: pytest.fail("all rows are moved at once"))
        for k in range(60):
            batch = ids_of(k) if k < 3 else {"ids": ids_of(k)["ids"] % 16}
            mine, theirs = planned(mine, batch)[0], plain(theirs, batch)[0]
        log = mine["t"].pending
        waiting = np.asarray(log.stamps[0])
        assert (waiting < 0).sum() > ROWS / 2 and int(log.steps[1]) == 2
        assert (~waiting[waiting < 0] >= 1).all(), "rows wait for a segment that is no more"
    agree(mine, theirs)


def test_a_batch_that_exceeds_capacities() -> None:
    """The step is done again by other means, and then compiled again: the same update log goes on."""
    planned, plain = deferring_on(4, log_steps=50), jax.jit(step)
    mine, theirs = make_state(403), make_state(403)
    for k in range(40):
        batch = ids_of(k, 60, length=20)
        if k % 13 == 7:
            batch = {"ids": (4 * batch["ids"] + k % 4).astype(np.int32)}  # all of one device
        mine, theirs = planned(mine, batch)[0], plain(theirs, batch)[0]
        now = mine["t"].pending.entries[1]
        assert int(now) == 25 + 1 + k % 25  # of the newer part
    assert not planned.plan.tables[0].tight
    agree(mine, theirs)


def test_a_step_that_is_done_again_counts_once_for_faded_rows() -> None:
    """By factors that the update log keeps of all steps from each one on."""

    def fast(state: Any, batch: Any) -> Any:
        loss, g = jax.value_and_grad(lambda table: jnp.sum(jnp.sin(table[batch["ids"]])))(state["t"])
        m = 0.3 * state["m"] + g
        return {"t": state["t"] - 0.1 * (m + 0.1 * state["t"]), "m": m}, loss

    planned = autopar.parallelize(fast, strategy="ps", mesh=mesh_of(4))
    set_options(planned, log_steps=90)
    plain = jax.jit(fast)
    mine, theirs = ({k: v for k, v in make_state(403).items() if k != "v"} for _ in range(2))
    for k in range(80):
        batch = ids_of(k, 60, length=20)
        if k == 0:
            batch["ids"][0, 0] = 400
        if k == 60:
            batch = {"ids": (4 * batch["ids"]).astype(np.int32)}  # all of one device
        mine, theirs = planned(mine, batch)[0], plain(theirs, batch)[0]
    assert planned.plan is not None and planned.plan.defers
    agree(mine, theirs)


@pytest.mark.long
def test_a_step_that_is_done_again_keeps_to_each_tables_update_log() -> None:
    """The second table is looked up first: its rows are then sent first where capacities aren't asked about."""

    def both(state: Any, batch: Any) -> Any:
        def loss_fn(tables: Any) -> jax.Array:
            scale = jnp.mean(jnp.sin(tables["b"][batch["b"]]))
            return scale + 3 * jnp.mean(jnp.sin(scale * tables["a"][batch["a"]]))

        loss, grads = jax.value_and_grad(loss_fn)(state["tables"])
        m = {k: decay * state["m"][k] + grads[k] for k, decay in (("a", 0.9), ("b", 0.7))}
        return {"tables": {k: state["tables"][k] - 0.1 * m[k] for k in m}, "m": m}, loss

    def made(rows: int) -> Any:
        tables = {"a": make_state(rows)["t"], "b": 2 * make_state(rows)["t"]}
        return {"tables": tables, "m": jax.tree.map(jnp.zeros_like, tables)}

    planned = autopar.parallelize(both, strategy="ps", mesh=mesh_of(4))
    set_options(planned, log_steps=50)
    plain = jax.jit(both)
    mine, theirs = made(403), made(403)
    with pytest.warns(autopar.CapacityWarning):
        for k in range(12):
            batch = {name: ids_of(k + n, 60, length=20)["ids"] for n, name in enumerate("ab")}
            if k == 7:
                batch = {name: (4 * ids).astype(np.int32) for name, ids in batch.items()}  # all of one device
            # A later call warns, if the step has been run by then.
            mine, theirs = jax.block_until_ready(planned(mine, batch)[0]), plain(theirs, batch)[0]
    assert planned.plan is not None and planned.plan.defers
    assert differences(made(403), theirs, autopar.materialize(mine), 1e-10) == []


def test_wherever_the_state_goes(tmp_path: Path) -> None:
    """Four devices, one, host memory, four again; by checkpoints, and as it is."""
    made = [deferring_on(4), deferring(step, 6), deferring_on(1, mesh=None, strategy=("ps", "hosts"))]
    planned = [*made, made[0]]
    plain, theirs = jax.jit(step), make_state()
    mine = autopar.init(make_state, step=planned[0], batch=ids_of(0))
    for k in range(48):
        mine, theirs = planned[k // 8 % 4](mine, ids_of(k))[0], plain(theirs, ids_of(k))[0]
        if k > 16 and k % 8 == 7:
            autopar.save(tmp_path / "c", mine)
            mine = autopar.restore(tmp_path / "c", step=planned[(k + 1) // 8 % 4], batch=ids_of(0)).state
            agree(mine, theirs)
    agree(mine, theirs)


@pytest.mark.parametrize(("devices", "donate"), diagonal([1, 2], [False, True]))
def test_the_states_own_rows_as_another_argument(devices: int, donate: bool) -> None:
    """They are read as they are before the step, and the same update log goes on."""
    plain = jax.jit(step)
    planned = deferring_on(2, donate=donate) if devices == 2 else deferring(step, 6, donate=donate)
    mine, theirs = make_state(), make_state()
    for k in range(15):
        if k % 3:
            mine, theirs = (
                planned(mine, {**ids_of(k), "teacher": mine["t"]})[0],
                plain(theirs, {**ids_of(k), "teacher": theirs["t"]})[0],
            )
        else:
            mine, theirs = planned(mine, ids_of(k))[0], plain(theirs, ids_of(k))[0]
    agree(mine, theirs)


def test_verify_after_some_steps() -> None:
    planned = deferring_on(2, donate=False)
    state = make_state()
    for k in range(3):
        state, _ = planned(state, ids_of(k))
    assert autopar.verify(planned, state, ids_of(9), steps=8).ok


@pytest.mark.parametrize("scale", [2.0, 0.0])
def test_some_rows_of_a_table_whose_rows_are_spread(scale: float) -> None:
    """Nothing could look at the other rows, one on each device: so none wait."""
    given = {**ids_of(0), "scale": np.float64(scale)}
    planned = autopar.parallelize(masked_step, mesh=mesh_of(4), strategy="ps", donate=False)
    agree_all(planned(make_state(), given), jax.jit(masked_step)(make_state(), given))
    assert planned.plan is not None and not any(t.log_steps for t in planned.plan.tables)


def agree_all(mine: Any, theirs: Any) -> None:
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(autopar.materialize(a), b, rtol=1e-9, atol=1e-12)
