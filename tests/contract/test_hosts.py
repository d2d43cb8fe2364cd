"""Tables in host memory in one process: no MPI, two programs a step. Several ranks: tests/mpi/test_worlds.py."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar import HostTable
from autopar.backends.host.segmented import SegmentedProgram, awaited_fetches
from autopar.ir.local import ExchangeSegment, ProgramSegment
from autopar.ir.program import ArrayType, Block, Equation, Var
from autopar.planning.verify import compare_runs
from tests.support.compilations import compilations, finish
from tests.support.explained import explained
from tests.support.settings import set_machine
from tests.zoo import MODELS, OPTIMIZERS

HOSTS = ("ps", "hosts")
TX = optax.chain(optax.clip_by_global_norm(0.1), optax.adagrad(0.1))


def make_state(key: jax.Array, rows: int = 1000) -> tuple[Any, Any]:
    params = {"emb": jax.random.normal(key, (rows, 4)), "w": jnp.ones((4, 2))}
    return params, TX.init(params)


def update(params: Any, opt: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
    def loss(p: Any) -> jax.Array:
        return ((p["emb"][batch["ids"]].mean(1) @ p["w"] - batch["y"]) ** 2).mean()

    value, grads = jax.value_and_grad(loss)(params)
    updates, opt = TX.update(grads, opt, params)
    return optax.apply_updates(params, updates), opt, value


def batch_of(i: int, most: int = 1000, size: int = 16) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(i)
    return {
        "ids": rng.integers(0, most, (size, 3)).astype(np.int32),
        "y": rng.normal(size=(size, 2)).astype(np.float32),
    }


@pytest.mark.parametrize(
    ("model", "optimizer"), [("transformer_sampled", "clipped"), ("two_tower", "partitioned"), ("lstm_lm", "zero_nans")]
)
def test_contract(model: str, optimizer: str) -> None:
    case = MODELS[model].make(OPTIMIZERS[optimizer].make())
    entry = autopar.parallelize(case.step, strategy=HOSTS, donate=False).planned_for(case.state, case.batches(0))
    assert entry.compiled.plan.on_hosts
    found = compare_runs(entry, [jax.tree.leaves((case.state, case.batches(i))) for i in range(4)])
    assert found.ok, str(found)


def test_two_programs() -> None:
    """Ids, and all the rest; tables are outside."""
    step = autopar.parallelize(update, strategy={"params/emb": HOSTS})
    program = step.planned_for(*make_state(jax.random.key(0)), batch_of(0)).compiled.program
    items = program.segments.items
    assert [str(i).split(" (")[0].split(" of")[0] for i in items] == [
        "device program",
        "route",
        "pull",
        "device program",
        "sweep",
        "commit",
    ]
    first = next(i for i in items if isinstance(i, ProgramSegment))
    assert all(e.op != "dot_general" for e in first.block.equations)
    commit = next(i for i in items if isinstance(i, ExchangeSegment) and i.op == "ap.commit")
    assert len(commit.equations) == 2  # the table and Adagrad's sum


def test_states_go_round() -> None:
    step = autopar.parallelize(update, strategy={"params/emb": HOSTS})
    params, opt = make_state(jax.random.key(0))
    mine = params, opt
    theirs = jax.tree.map(jnp.copy, mine)
    plain = jax.jit(update)
    for i in range(5):
        old, (*mine, _) = mine, step(*mine, batch_of(i))
        *theirs, _ = plain(*theirs, batch_of(i))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a), b, rtol=1e-5, atol=1e-6), mine, list(theirs))
    table = mine[0]["emb"]
    assert isinstance(table, HostTable) and "in the memory of this process" in repr(table)
    assert old[0]["emb"].is_deleted() and not table.is_deleted()
    with pytest.raises(autopar.DonatedStateError, match="params/emb was given to a step"):
        np.asarray(old[0]["emb"])
    with pytest.raises(autopar.DonatedStateError):
        step(*old, batch_of(0))
    whole = np.asarray(table)
    np.testing.assert_array_equal(table[3], whole[3])
    np.testing.assert_array_equal(table[np.array([5, -1]), 1:], whole[[5, -1], 1:])
    np.testing.assert_array_equal(table[2:9], whole[2:9])
    with pytest.raises(IndexError, match="row 1000 of a table with 1000 rows"):
        table[1000]


def test_old_states_can_be_kept() -> None:
    step = autopar.parallelize(update, strategy={"params/emb": HOSTS}, donate=False)
    params, opt = autopar.init(make_state, jax.random.key(0), step=step, call=lambda m: (*m, batch_of(0)))
    before = np.asarray(params["emb"]).copy()
    new, _, _ = step(params, opt, batch_of(0))
    np.testing.assert_array_equal(np.asarray(params["emb"]), before)
    assert np.any(np.asarray(new["emb"]) != before)


def test_memory_of_fetched_rows_is_used_again_where_the_step_waits() -> None:
    """JAX takes NumPy's memory as it is: it mustn't change under a program that still runs."""
    rows, sums = (Var(ArrayType((4, 2), np.dtype(np.float32))) for _ in range(2))
    fetch = Equation("ap.fetch", (), (rows,), {"axis": 0})
    first = ExchangeSegment("ap.fetch", 2, (fetch,))
    backward = ProgramSegment("device", 3, Block((rows,), (), (sums,)))
    deliver = ExchangeSegment("ap.deliver", 3, (Equation("ap.deliver", (sums,), (Var(sums.type),), {"axis": 0}),))
    metrics = ProgramSegment("device", 5, Block((rows,), (), ()))
    assert awaited_fetches([first, backward, deliver]) == {fetch}
    assert not awaited_fetches([first, backward])  # an evaluation
    assert not awaited_fetches([first, backward, deliver, metrics])


def test_compilations_are_few() -> None:
    """A thousand steps of more and more rows, and then of any number."""
    step = autopar.parallelize(update, strategy={"params/emb": HOSTS})
    state = make_state(jax.random.key(0))
    rng = np.random.default_rng(0)
    for i in range(1000):
        most = min(1000, 2 + i) if i < 300 else int(rng.integers(2, 1000))
        *state, _ = step(*state, batch_of(i, most, size=64))
    assert step.latest is not None
    assert step.latest.runner.compilations <= 8


def test_inside_another_program() -> None:
    step = autopar.parallelize(update, strategy={"params/emb": HOSTS})
    with pytest.raises(autopar.StepError, match="has tables on hosts.*jax.jit"):
        jax.jit(step)(*make_state(jax.random.key(0)), batch_of(0))


def test_tables_that_do_not_fit_the_devices() -> None:
    """The largest leave first, and `explain` says why."""

    def sgd(state: Any, ids: Any) -> tuple[Any, jax.Array]:
        def loss(s: Any) -> jax.Array:
            return (s["large"][ids] ** 2).sum() + (s["small"][ids] ** 2).sum()

        value, grads = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value

    state = {"large": jnp.ones((1000, 4)), "small": jnp.ones((500, 4))}
    step = autopar.parallelize(sgd)
    set_machine(step, 16_000)
    new, _ = step(state, np.arange(3))
    assert isinstance(new["large"], HostTable) and isinstance(new["small"], jax.Array)
    assert "the state takes too much of the 0.0 GiB of a device" in explained(step)
    np.testing.assert_allclose(np.asarray(new["large"])[:4, 0], [0.8, 0.8, 0.8, 1])
    step = autopar.parallelize(sgd)
    set_machine(step, 100_000)
    state = {"large": jnp.ones((1000, 4)), "small": jnp.ones((500, 4))}
    assert isinstance(step(state, np.arange(3))[0]["large"], jax.Array)


def test_explain() -> None:
    step = autopar.parallelize(update, strategy={"params/emb": HOSTS})
    text = explained(step, *make_state(jax.random.key(0)), batch_of(0))
    assert "Plan of update (one process)" in text
    assert "sparse, ps on hosts" in text
    assert re.search(r"Stages: device program of \d+ equations, route \(1\), pull \(2\)", text)


def test_memory_is_asked_for_first() -> None:
    """A table that the machine can't hold: its path and size, before a page is touched."""
    code = """
import jax, numpy as np, autopar
def update(state, ids):
    value, grads = jax.value_and_grad(lambda s: (s["emb"][ids] ** 2).sum())(state)
    return jax.tree.map(lambda p, g: p - g, state, grads), value
step = autopar.parallelize(update, strategy=("ps", "hosts"))
table = np.broadcast_to(np.float32(1), (1 << 28, 1 << 14))
try:
    step({"emb": table}, np.arange(3))
except autopar.HostMemoryError as error:
    print(error)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "emb" in found.stdout and "GB" in found.stdout, found.stdout + found.stderr


def test_strategies() -> None:
    state = make_state(jax.random.key(0))
    for strategy, told in (
        ({"params/emb": ("allreduce", "hosts")}, "tables on hosts are trained by 'ps' only"),
        ({"params/emb": ("ps", "moon")}, "neither on 'devices' nor on 'hosts'"),
        ({"**/w": ("allgather", "devices")}, "matches no parameter that is looked up by rows"),
        ({"params/nothing": HOSTS}, "matches no parameter"),
    ):
        with pytest.raises(autopar.StrategyError, match=told):
            autopar.parallelize(update, strategy=strategy)(*state, batch_of(0))


@pytest.mark.parametrize("optimizer", [optax.adagrad(0.1), optax.adamw(1e-2)], ids=["adagrad", "adamw"])
@pytest.mark.parametrize("is_committed", [False, True])
def test_rows_that_grow_are_compiled_for_beside_the_steps(
    optimizer: optax.GradientTransformation, is_committed: bool
) -> None:
    """No step after the first few compiles anything, and the numbers are plain JAX's."""

    def step(state: Any, ids: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            return jnp.mean(jnp.tanh(p["emb"][ids] @ p["w"]) ** 2)

        value, grads = jax.value_and_grad(loss)(state[0])
        updates, opt = optimizer.update(grads, state[1], state[0])
        return (optax.apply_updates(state[0], updates), opt), value

    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        params = jax.tree.map(jnp.asarray, {"emb": rng.normal(size=(4000, 4)), "w": rng.normal(size=(4, 4))})
        wanted = params, optimizer.init(params)
        mine = jax.tree.map(jnp.copy, wanted)
        if is_committed:
            mine = jax.device_put(mine, jax.devices()[0])
        planned, plain = autopar.parallelize(step, strategy={"0/emb": HOSTS}), jax.jit(step)
        later = 0
        for k in range(120):
            ids = rng.integers(0, 200 + 10 * k, 1024).astype(np.int32)
            with compilations() as made:
                mine, value = planned(mine, jax.device_put(ids, jax.devices()[0]) if is_committed else ids)
            wanted, expected = plain(wanted, ids)
            np.testing.assert_allclose(value, expected, rtol=1e-11)
            assert k < 12 or not made.here, k
            later += k >= 12 and made.beside
        assert planned.latest is not None and planned.latest.runner.compilations >= 4 and later
        for a, b in zip(jax.tree.leaves(mine[0]), jax.tree.leaves(wanted[0]), strict=True):
            np.testing.assert_allclose(np.asarray(a), b, rtol=1e-9, atol=1e-12)


def test_rows_that_grow_and_cannot_be_compiled_for_beside(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told, and the step that needs the program compiles it."""

    def fails(self: SegmentedProgram, committed: Any) -> None:
        raise MemoryError("no room for a program")

    monkeypatch.setattr(SegmentedProgram, "compile", fails)
    planned, plain = autopar.parallelize(update, strategy={"params/emb": HOSTS}), jax.jit(update)
    mine, wanted = make_state(jax.random.key(0)), make_state(jax.random.key(0))
    with caplog.at_level(logging.WARNING, "autopar"):
        for k in range(30):
            batch = batch_of(k, 100 + 15 * k, size=64)
            *mine, value = planned(*mine, batch)
            *wanted, expected = plain(*wanted, batch)
            finish()
            np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert planned.latest is not None and planned.latest.runner.compilations > 2
    assert "update for other numbers of rows couldn't be compiled beside the steps" in caplog.text
    assert "MemoryError: no room for a program" in caplog.text
