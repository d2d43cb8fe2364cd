"""What every rank runs in `test_worlds.py`: steps on a mesh over all ranks' devices, against one device's numbers."""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar.backends import layouts
from autopar.backends.global_arrays import local
from autopar.launch.group import StoreGroup
from autopar.measure import calibrate, loops
from autopar.measure.compiled_collectives import sent_by_device
from tests.support import dense_steps, stacked_tables
from tests.support.explained import explained
from tests.support.mpi import bag_cases
from tests.support.pickled import assert_no_part_is_pickled
from tests.support.rates import RATES
from tests.support.row_steps import make_state, step
from tests.support.settings import set_options
from tests.zoo import MODELS, OPTIMIZERS

RANK, RANKS, COUNT = jax.process_index(), jax.process_count(), jax.device_count()
BATCH = 2 * COUNT
ROWS = 12 * COUNT + 1
ALL = StoreGroup(tuple(range(RANKS)))
autopar.api.rates_of = lambda *_, **__: RATES
#: Compiling is what takes time.
PLAIN, PS = jax.jit(step), autopar.parallelize(step, strategy="ps")


def ids_of(rows: int, seed: int = 0, low: int = 0, length: int = 5) -> dict[str, Any]:
    return {"ids": np.random.default_rng(seed).integers(low, rows, (BATCH, length), np.int32)}


def here(tree: Any) -> Any:
    """Arrays and Tables on the host, whole; all ranks do it together."""
    return jax.tree.map(lambda x: np.asarray(local(x)), tree)


def agree(start: Any, mine: Any, theirs: Any) -> None:
    """Each leaf's change is the same; 1e-5 of the largest one, and what adding float32 numbers loses."""

    def check(path: Any, old: Any, a: Any, b: Any) -> None:
        a, b, old = (np.asarray(x, np.float64) for x in (a, b, old))
        allowed = 1e-5 * np.abs(b - old).max(initial=0) + 1e-6 * np.abs(b).max(initial=0)
        assert np.abs(a - b).max(initial=0) <= allowed, (path, np.abs(a - b).max(), allowed)

    start = jax.tree.map(np.zeros_like, theirs) if start is None else start
    jax.tree_util.tree_map_with_path(check, start, here(mine), here(theirs))


def train(planned: Any, plain: Any, state: Any, batches: list[Any]) -> Any:
    """Some steps of both; the planned one's state."""
    start, mine, theirs = here(state), state, state
    for batch in batches:
        (mine, a), (theirs, b) = planned(mine, batch), plain(theirs, batch)
        agree(None, a, b)
    agree(start, mine, theirs)
    return mine


def raises(kind: type[Exception], match: str, run: Callable[[], Any]) -> None:
    """On every rank."""
    try:
        run()
    except kind as error:
        assert match in str(error), str(error)
        return
    raise AssertionError(f"nothing was raised: {match}")


def check_methods() -> None:
    """A table that the devices don't divide; under "ps" each device holds its shard."""
    for method in ("allgather", "allreduce_rows", "allreduce", "auto"):
        planned = autopar.parallelize(step, strategy=method)
        mine = train(planned, PLAIN, make_state(ROWS), [ids_of(ROWS, k) for k in range(3)])
        assert planned.plan is not None and planned.plan.devices == COUNT
        assert method == "auto" or mine["params"]["emb"].is_fully_replicated
    emb = train(PS, PLAIN, make_state(ROWS), [ids_of(ROWS, k) for k in range(3)])["params"]["emb"]
    assert isinstance(emb, autopar.Table)
    assert {s.data.shape for s in emb.stored.addressable_shards} == {(13, 3)}


def check_batches_that_the_devices_do_not_divide() -> None:
    """Examples are spread in the step all the same, and results by example are whole on each process."""

    def by_example(state: Any, batch: Any) -> Any:
        new, metrics = step(state, batch)
        return new, {**metrics, "sums": state["params"]["emb"][batch["ids"]].sum((1, 2))}

    some = [{"ids": ids_of(ROWS, k)["ids"][1:]} for k in range(3)]
    for method in ("ps", "allgather", "allreduce_rows", "allreduce"):
        planned = autopar.parallelize(by_example, strategy=method)
        train(planned, jax.jit(by_example), make_state(ROWS), some)
        assert planned.latest is not None and planned.latest.compiled.bound.uneven
        _, metrics = planned(make_state(ROWS), some[0])
        assert metrics["sums"].is_fully_replicated and metrics["sums"].shape == (BATCH - 1,)


def check_a_table_that_the_devices_divide() -> None:
    planned = autopar.parallelize(step, strategy="ps")
    mine = train(planned, PLAIN, make_state(12 * COUNT), [ids_of(12 * COUNT, k) for k in range(3)])
    assert {s.data.shape for s in mine["params"]["emb"].addressable_shards} == {(12, 3)}


def check_dense_parameters_in_shares() -> None:
    """AdamW. A gathered parameter, a gradient that is reduced to its owner."""
    planned = autopar.parallelize(dense_steps.step, strategy={"**": "ps"})
    batches = [ids_of(dense_steps.ROWS, k)["ids"] for k in range(3)]
    mine = train(planned, jax.jit(dense_steps.step), dense_steps.make_state(), batches)
    assert not mine["params"]["w"].is_fully_replicated


def check_a_model_against_the_oracle() -> None:
    """Wide and deep: a table of rows and one of numbers, bags of ids, dense layers, clipping over all of them."""
    case = MODELS["multi_hot"].make(OPTIMIZERS["clipped"].make())
    planned = autopar.parallelize(case.step, strategy="ps", donate=False)
    assert autopar.verify(planned, case.state, case.batches(0), steps=3).ok
    mine, _ = planned(case.state, case.batches(0))
    agree(here(case.state), mine, jax.jit(case.step)(case.state, case.batches(0))[0])


def check_small_exchanges_are_messages_to_all() -> None:
    """Gloo's gathers and sums are rings; a step has none of these, and sends what the plan says. All have its bits."""
    for method in ("allgather", "allreduce_rows"):
        planned = autopar.parallelize(step, strategy=method, donate=False)
        given = make_state(ROWS), ids_of(ROWS)
        found = autopar.check(planned, *given)
        assert found.ok, str(found)
        text = planned.lower(*given).compile().as_text()
        assert sum(row.compiled for row in found.rows) == sent_by_device(text, jax.device_count())
        assert any("small sums" in row.what for row in found.rows) == (jax.device_count() > 2), str(found)
        rings = [line for line in text.splitlines() if re.search(r" (all-reduce|all-gather)(-start)?\(", line)]
        assert not any("f32[" in line or "s32[" in line for line in rings), rings
        assert " all-to-all" in text
        new, _ = planned(*given)
        digest = hashlib.sha256(b"".join(x.tobytes() for x in jax.tree.leaves(here(new)))).hexdigest()
        assert len(set(ALL.values(digest, "digests"))) == 1


def check_batch_norm() -> None:
    case = MODELS["cnn_batchnorm"].make(OPTIMIZERS["adam"].make())
    train(autopar.parallelize(case.step), jax.jit(case.step), case.state, [case.batches(k) for k in range(2)])


def check_state_in_place() -> None:
    state = make_state(ROWS)
    before = here(state)
    first, metrics = PS(state, ids_of(ROWS))
    PS(first, ids_of(ROWS))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first))
    jax.tree.map(np.testing.assert_array_equal, here(state), before)  # the user's own arrays
    assert np.isfinite(float(metrics["loss"]))
    raises(autopar.DonatedStateError, "given before", lambda: PS(first, ids_of(ROWS)))


def check_results_can_be_read() -> None:
    """Those of a function without state, on each process by NumPy; by example they are spread if they are to be."""

    def evaluate(w: Any, batch: Any) -> Any:
        by_example = jnp.tanh(batch["x"] @ w)
        return {"examples": by_example, "mean": by_example.mean(0), "sum": by_example.sum(), "w": w.T * 2}

    w, x = np.eye(8, dtype=np.float32), np.random.default_rng(0).normal(size=(BATCH, 8)).astype(np.float32)
    wanted = jax.jit(evaluate)(w, {"x": x})
    planned = autopar.parallelize(evaluate, batch_axis={"w": None})
    found = planned(w, {"x": x})
    for name in wanted:
        np.testing.assert_allclose(np.asarray(found[name]), wanted[name], rtol=1e-5, atol=1e-5)
    assert f"Results by example, {BATCH * 8 * 4} B, come whole to every process" in explained(planned)
    spread = autopar.parallelize(evaluate, batch_axis={"w": None}, results="spread")(w, {"x": x})["examples"]
    assert [s.data.shape for s in spread.addressable_shards] == [(2, 8)] * (COUNT // RANKS)
    np.testing.assert_allclose(here(spread), wanted["examples"], rtol=1e-5, atol=1e-6)


def check_results_of_steps() -> None:
    """Those by example are spread, or come whole where that is asked for."""

    def by_example(state: Any, batch: Any) -> Any:
        new, metrics = step(state, batch)
        return new, {**metrics, "sums": state["params"]["emb"][batch["ids"]].sum((1, 2))}

    _, wanted = jax.jit(by_example)(make_state(ROWS), ids_of(ROWS))
    for results in ("whole", None):
        _, found = autopar.parallelize(by_example, strategy="ps", results=results)(make_state(ROWS), ids_of(ROWS))
        assert found["sums"].is_fully_replicated == (results == "whole")
        np.testing.assert_allclose(here(found["sums"]), wanted["sums"], rtol=1e-5, atol=1e-6)


def check_large_results_are_told_of() -> None:
    def run(**options: Any) -> None:
        planned = autopar.parallelize(lambda x: x.sum(1), **options)
        set_options(planned, slow_bytes=4 * BATCH)
        planned(np.ones((BATCH, 3), np.float32))

    raises(autopar.SlowPlanWarning, f"{4 * BATCH} B, come whole to every process", run)
    run(results="whole")
    run(results="spread")


def check_a_copy_of_the_state_is_whole_everywhere() -> None:
    """Of a Table, of an array whose rows are spread, and of keys; `copy=False` leaves them where they are."""
    for rows in (ROWS, 12 * COUNT):
        planned = autopar.parallelize(step, strategy="ps")
        state, _ = planned(make_state(rows), ids_of(rows))
        wanted, _ = PLAIN(make_state(rows), ids_of(rows))
        read = autopar.materialize(state)
        agree(None, jax.tree.map(np.asarray, read), wanted)
        spread = autopar.materialize(state, copy=False)["params"]["emb"]
        assert spread.is_fully_replicated == (rows == ROWS)  # which nothing divides
        if rows == ROWS:
            assert_no_part_is_pickled(state["params"]["emb"], RANK)
        before = jax.tree.map(np.array, read)
        planned(state, ids_of(rows))
        jax.tree.map(np.testing.assert_array_equal, read, before)
    there = NamedSharding(jax.make_mesh((COUNT,), ("x",), (AxisType.Auto,)), P("x"))
    keys = jax.jit(lambda key: jax.random.split(key, COUNT), out_shardings=there)(np.asarray(jax.random.PRNGKey(3)))
    typed = jax.jit(jax.random.wrap_key_data, out_shardings=there)(keys)
    for whole in (autopar.materialize(keys), jax.random.key_data(autopar.materialize(typed))):
        np.testing.assert_array_equal(np.asarray(whole), jax.random.split(jax.random.PRNGKey(3), COUNT))


def check_kinds_of_arguments() -> None:
    """Keys, Python numbers, statics, keywords; local and global arrays."""

    def noisy(state: Any, rate: float, kind: str, *, batch: Any) -> Any:
        key, use = jax.random.split(state["key"])
        g = jax.grad(lambda e: jnp.sum(e[batch["ids"]] ** 2 * jax.random.normal(use, (BATCH, 5, 1))))(state["emb"])
        return {"emb": state["emb"] - rate * g, "key": key}, (jnp.sum(g), kind == "sgd")

    planned = autopar.parallelize(noisy, strategy="ps", static_argnums=2)
    plain = jax.jit(noisy, static_argnums=2)
    state = {"emb": jnp.asarray(np.random.default_rng(0).normal(size=(41, 3)), jnp.float32), "key": jax.random.key(3)}
    mine = theirs = state
    batch = ids_of(41)
    (global_batch,) = autopar.shard([batch])
    for given in (batch, jax.tree.map(jnp.asarray, batch), global_batch):
        (mine, a), (theirs, b) = planned(mine, 0.1, "sgd", batch=given), plain(theirs, 0.1, "sgd", batch=batch)
        agree(None, a, b)
    agree(here(state["emb"]), mine["emb"], theirs["emb"])
    np.testing.assert_array_equal(*(jax.random.key_data(local(x["key"])) for x in (mine, theirs)))


def check_global_arrays_that_lie_otherwise() -> None:
    """A state that another program spread by its columns, or left on every device."""
    mesh = jax.make_mesh((COUNT,), ("x",), (AxisType.Auto,))
    wide = jnp.concatenate([make_state(ROWS)["params"]["emb"]] * COUNT, 1)

    def sgd(table: Any, batch: Any) -> Any:
        return table - jax.grad(lambda t: jnp.sum(t[batch["ids"]] ** 2))(table), jnp.sum(batch["ids"])

    planned = autopar.parallelize(sgd, strategy="ps")
    for spec in (P(None, "x"), P()):
        given = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, spec))(np.asarray(wide))
        mine, _ = planned(given, ids_of(ROWS))
        assert isinstance(mine, autopar.Table)
        agree(here(wide), mine, jax.jit(sgd)(wide, ids_of(ROWS))[0])


def check_tables() -> None:
    state, _ = PS(make_state(ROWS), ids_of(ROWS))
    table = state["params"]["emb"]
    assert isinstance(table, autopar.Table)
    wanted, _ = PLAIN(make_state(ROWS), ids_of(ROWS))
    emb = wanted["params"]["emb"]
    agree(None, autopar.materialize(state), wanted)
    np.testing.assert_allclose(np.asarray(table), emb, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(in_parts(table), emb, rtol=2e-5, atol=1e-6)
    for index in (3, -1, np.array([5, 0, ROWS - 1]), slice(2, 5), (slice(None), 1), (4, 2), jnp.array([[1], [2]])):
        np.testing.assert_allclose(np.asarray(table[index]), emb[index], rtol=2e-5, atol=1e-6)
    assert len(table) == ROWS and "spread over" in repr(table)
    evaluate = autopar.parallelize(lambda p, ids: p["emb"][ids] @ p["w"])
    agree(None, evaluate(state["params"], np.arange(BATCH)), emb[:BATCH] @ wanted["params"]["w"])
    assert evaluate.plan is not None and evaluate.plan.lifts


def in_parts(table: autopar.Table) -> np.ndarray:
    """Read five rows of each shard at a time, of thirteen."""
    kept, layouts._PART = layouts._PART, 5 * COUNT * 3 * 4
    try:
        return np.asarray(table)
    finally:
        layouts._PART = kept


def check_stacked_tables(names: Sequence[str] = ("clipped Adagrad", "AdamW")) -> None:
    """Tables that are alike are one; they are read, saved and evaluated one by one."""
    for name in names:
        tx = stacked_tables.OPTIMIZERS[name]
        step, plain = (
            autopar.parallelize(stacked_tables.step_of(tx), strategy="ps"),
            jax.jit(stacked_tables.step_of(tx)),
        )
        evaluation = autopar.parallelize(lambda state, ids: state["params"]["tables"]["t1"][ids].sum())
        mine = autopar.init(lambda tx=tx: stacked_tables.start(tx), step=step, batch=stacked_tables.batch(0))
        theirs, ids = stacked_tables.start(tx), np.arange(2 * COUNT)
        for k in range(6):
            given = stacked_tables.batch(k, out_of_range=k % 3 == 2)
            (mine, loss), (theirs, wanted) = step(mine, given), plain(theirs, given)
            np.testing.assert_allclose(local(loss), wanted, rtol=1e-4, err_msg=name)
            if k == 2:
                wanted = theirs["params"]["tables"]["t1"][ids].sum()
                np.testing.assert_allclose(local(evaluation(mine, ids)), wanted, rtol=1e-3)
                mine["params"]["tables"]["t0"] = theirs["params"]["tables"]["t0"]  # from elsewhere
        assert stacked_tables.stacks(step) == [5]
        read = autopar.materialize(mine)
        for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(theirs), jax.tree.leaves(read), strict=True):
            np.testing.assert_allclose(here(b), a, rtol=1e-3, atol=1e-4, err_msg=f"{name}{path}")


def check_stacked_tables_whose_rows_wait() -> None:
    """Those of Adam, which have update logs besides."""
    check_stacked_tables(["AdamW"])


def check_whole_tables() -> None:
    """Each of six tables is on one device, of whichever process."""
    forms = {name: bag_cases.BAGS[name] for name in ("sum", "mean", "masked mean", "weights", "two sums", "scaled")}
    tx = optax.chain(optax.clip_by_global_norm(0.05), optax.adagrad(0.3))
    train_step, batch_of = bag_cases.step_of(forms, tx), bag_cases.batch_of
    planned = autopar.parallelize(train_step, strategy={"params/tables/*": "ps:table"})
    plain, mine = jax.jit(train_step), bag_cases.start(forms, tx, (8,))
    theirs = jax.tree.map(jnp.copy, mine)
    for k in range(3):
        (mine, _), (theirs, _) = planned(mine, batch_of(k)), plain(theirs, batch_of(k))
    assert planned.plan is not None and {t.owner for t in planned.plan.tables} == {*range(COUNT)}
    assert autopar.check(planned, mine, batch_of(0)).ok
    for a, b in zip(jax.tree.leaves(theirs), jax.tree.leaves(autopar.materialize(mine)), strict=True):
        np.testing.assert_allclose(here(b), a, rtol=1e-4, atol=2e-5)


def check_init() -> None:
    def make(key: Any, scale: Any) -> Any:
        state = make_state(ROWS)
        return {**state, "params": {**state["params"], "emb": scale * jax.random.normal(key, (ROWS, 3))}}

    state = autopar.init(make, jax.random.key(0), 0.5, step=PS, batch=ids_of(ROWS))
    assert isinstance(state["params"]["emb"], autopar.Table)
    wanted = jax.jit(make)(jax.random.key(0), 0.5)
    jax.tree.map(np.testing.assert_array_equal, here(state), here(wanted))
    new, _ = PS(state, ids_of(ROWS))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state)), "the first step copies nothing"
    agree(here(wanted), new, PLAIN(wanted, ids_of(ROWS))[0])
    raises(
        autopar.ArgumentsError,
        "make has other arguments (a key of its own?) on process 1",
        lambda: autopar.init(make, jax.random.key(RANK), 0.5, step=PS, batch=ids_of(ROWS)),
    )


def check_explain_and_verify() -> None:
    planned = autopar.parallelize(step, strategy="ps")
    first, second = autopar.shard([ids_of(ROWS, k) for k in range(2)])
    text = explained(planned, make_state(ROWS), first)  # measured on a global array
    assert (
        f"{COUNT} devices of {RANKS} processes" in text and "a device asks another one for" in text and "<=" not in text
    )
    again = explained(planned)
    assert len(set(ALL.gather(again.split("Traced in")[0].encode(), "explain"))) == 1
    if RANK == 0:
        explained(planned)  # the plan in use: no other process is needed
    state, _ = PS(make_state(ROWS), first)
    assert autopar.verify(PS, state, second).ok


def check_rates_are_the_first_ones() -> None:
    """Each rank would measure something else, and reads another cache."""
    calibrate._known.clear()
    cache = os.environ["XDG_CACHE_HOME"]
    os.environ["XDG_CACHE_HOME"] = f"{cache}/new"
    mine = {"all_reduce": {"1024": 0.001 * (RANK + 1), "4194304": 1.0}}
    calibrate.measure_probes, kept = (lambda probes, budget, advance: mine), calibrate.measure_probes
    try:
        devices = autopar.parallelize(step).devices
        assert devices is not None
        found = calibrate.rates_of(devices, lambda *_: step)
        assert found.all_reduce(1) == 0.001 and "all_gather" in found.assumed
        assert calibrate.cache_file(devices, "rates-1-{}.json").exists() or RANK
    finally:
        os.environ["XDG_CACHE_HOME"] = cache  # other cases have their files beside it
        calibrate.measure_probes = kept
        calibrate._known.clear()


def check_turns_are_measured_together() -> None:
    """Each process would take another number of turns, in each of which it waits for the others."""
    kept, loops._TARGET_S = loops._TARGET_S, 0.002 * (1 + 4 * RANK)
    try:
        devices = PS.devices
        assert devices is not None
        seconds = loops.loop_seconds(devices, lambda x: jax.lax.psum(x, devices.axis) / COUNT, jnp.ones(COUNT))
        assert 0 < seconds
    finally:
        loops._TARGET_S = kept
    kept, rounds = calibrate._TURN_S, calibrate._ROUNDS
    calibrate._TURN_S, calibrate._ROUNDS = 0.001 * (1 + 40 * RANK), 4
    try:
        found = calibrate._times({"ps": (PS, lambda: make_state(ROWS), ids_of(ROWS))}, devices)
        assert found["ps"] > 0
    finally:
        calibrate._TURN_S, calibrate._ROUNDS = kept, rounds


def check_batches_that_differ_later() -> None:
    """After planning, the batches of calls 1, 2, 4, 8 are compared; the state is as it was before the call."""

    def train_step(state: Any, batch: Any) -> Any:
        new, metrics = step(state, batch)
        return new, metrics["loss"]

    for method in ("auto", ("ps", "hosts")):
        planned, state = autopar.parallelize(train_step, strategy={"**/emb": method}), make_state(40)
        for k in range(8):
            state, _ = planned(state, ids_of(40, k))
        there = "batch/ids isn't the same array on process 1 as on process 0 in call 8"
        raises(autopar.ArgumentsError, there, functools.partial(planned, state, ids_of(40, RANK)))
        planned(state, ids_of(40, 9))


def check_what_differs_between_processes() -> None:
    planned = autopar.parallelize(step)
    state, batch = make_state(40), ids_of(40)
    there = "on process 1 "
    raises(autopar.ArgumentsError, "batch/ids isn't the same array " + there, lambda: planned(state, ids_of(40, RANK)))
    other = jax.tree.map(lambda x: x + RANK, state)
    raises(autopar.ArgumentsError, "isn't the same array " + there, lambda: planned(other, batch))
    longer = {"ids": np.zeros((BATCH, 5 + RANK), np.int32)}
    raises(autopar.ArgumentsError, f"on process 1 (batch/ids i32[{BATCH},6])", lambda: planned(state, longer))

    def other_code(state: Any, batch: Any) -> Any:
        new, metrics = step(state, batch)
        return new, {**metrics, "loss": metrics["loss"] * (RANK + 2.0)}

    raises(
        autopar.StepError, "isn't the same function on process 1", lambda: autopar.parallelize(other_code)(state, batch)
    )
    constant = np.arange(BATCH) + RANK

    def closing_over(state: Any, batch: Any) -> Any:
        return step(state, {"ids": (batch["ids"] + constant[:, None]) % 40})

    raises(autopar.StepError, "isn't the same function", lambda: autopar.parallelize(closing_over)(state, batch))
    named = autopar.parallelize(step, strategy=["ps", "allgather", "allreduce"][RANK])
    raises(autopar.AutoparError, "process 1 has strategy='allgather'", lambda: named(state, batch))
    divided = autopar.parallelize(step, microbatches=[1, 2, 1][RANK])
    told = "process 1 has microbatches=2; process 0 has microbatches=1."
    raises(autopar.AutoparError, told, lambda: divided(state, batch))
    raises(autopar.AutoparError, "is at '", lambda: ALL.gather(b"", f"something else on {RANK}"))


def check_a_mesh_of_ones_own() -> None:
    """Of this process's devices: nobody else takes part, and arguments may differ."""
    own = jax.local_devices()
    mesh = jax.make_mesh((len(own),), ("data",), (AxisType.Auto,), devices=own)
    planned = autopar.parallelize(step, strategy="ps", mesh=mesh)
    for k in range(RANK + 1):
        train(planned, PLAIN, make_state(40 + RANK), [ids_of(40, RANK + k)])
    assert planned.plan is not None and planned.plan.devices == len(own)


def check_a_mesh_with_two_axes() -> None:
    """Of which one is for data: along it devices are of one process, or of all."""
    if COUNT == RANKS:
        return
    devices = np.array(jax.devices()).reshape(RANKS, -1)
    for grid in (devices, devices.T):
        mesh = jax.sharding.Mesh(grid, ("model", "batch"), axis_types=(AxisType.Auto,) * 2)
        planned = autopar.parallelize(step, strategy="ps", mesh=mesh, data_axis="batch")
        source = [ids_of(ROWS, k) for k in range(2)]
        batches = [*autopar.shard(source, mesh=mesh, data_axis="batch")]
        state, wanted = make_state(ROWS), make_state(ROWS)
        for given, plain in zip(batches, source, strict=True):
            (state, a), (wanted, b) = planned(state, given), PLAIN(wanted, plain)
            agree(None, a, b)
        agree(here(make_state(ROWS)), state, wanted)
        mine = [{"ids": np.zeros((4, 5), np.int32)}]
        parts = autopar.shard(mine, mesh=mesh, data_axis="batch", per_process=True)
        if grid is devices:
            raises(autopar.ArgumentsError, "ordered by process along the data axis", lambda parts=parts: next(parts))
        else:
            assert next(parts)["ids"].shape == (4 * RANKS, 5)


def check_inside_another_jit() -> None:
    PS(make_state(ROWS), ids_of(ROWS))
    nested = jax.jit(lambda s, b: PS(s, b)[0])
    agree(here(make_state(ROWS)), nested(make_state(ROWS), ids_of(ROWS)), PLAIN(make_state(ROWS), ids_of(ROWS))[0])

    def in_turn(state: Any, batch: Any) -> Any:
        emb = state["params"]["emb"]
        return emb[jnp.abs(emb[batch["ids"]][..., 0] * 9).astype(jnp.int32) % ROWS]

    state, batch = PS(make_state(ROWS), ids_of(ROWS))[0], ids_of(ROWS)
    shape = jax.eval_shape(lambda: autopar.parallelize(in_turn)(state, batch))  # planned for ids that are read there
    assert shape == jax.eval_shape(in_turn, make_state(ROWS), batch)
