"""Tables on devices that are alike are one table; each keeps a leaf of its own."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.tables.sharded import TablePart
from tests.support.meshes import mesh_of
from tests.support.pairs import diagonal, long
from tests.support.stacked_tables import LOOKUPS, OPTIMIZERS, assert_same, batch, stacks, start, step_of, trained

ADAGRAD, ADAMW = OPTIMIZERS["clipped Adagrad"], OPTIMIZERS["AdamW"]


def planned(step: Any, devices: int = 4, **options: Any) -> Any:
    return autopar.parallelize(step, mesh=mesh_of(devices), **{"strategy": "ps", **options})


def evaluate(params: Any, batch: Any) -> Any:
    rows = [jnp.take(t, batch["ids"][:, k], axis=0, mode="fill") for k, t in enumerate(params["tables"].values())]
    return jnp.nansum(jnp.concatenate(rows, 1) @ params["w"])


@pytest.mark.parametrize(("devices", "name"), [*((4, name) for name in OPTIMIZERS), (1, "AdamW")])
def test_trained_and_read_as_by_jax(devices: int, name: str) -> None:
    """An evaluation, and its reading of slots' rows, in between; where rows wait as well."""
    tx = OPTIMIZERS[name]
    step, plain = planned(step_of(tx), devices), jax.jit(step_of(tx))
    evaluation = planned(evaluate, devices, strategy="auto")
    mine, theirs = start(tx), start(tx)
    ids = np.array([0, 5, -1])
    for k in range(25):
        (mine, loss), (theirs, wanted) = step(mine, batch(k)), plain(theirs, batch(k))
        np.testing.assert_allclose(loss, wanted, rtol=1e-4)
        if k % 6 == 2:
            found = evaluation(mine["params"], batch(k, out_of_range=True))
            np.testing.assert_allclose(found, evaluate(theirs["params"], batch(k, out_of_range=True)), rtol=1e-3)
            tables, others = mine["params"]["tables"], theirs["params"]["tables"]
            np.testing.assert_allclose(tables["t1"][ids], others["t1"][ids], rtol=1e-3, atol=1e-4)
            np.testing.assert_allclose(tables["t4"][22], others["t4"][22], rtol=1e-3, atol=1e-4)
            np.testing.assert_allclose(np.asarray(tables["t3"]), others["t3"], rtol=1e-3, atol=1e-4)
    assert stacks(step) == [5]
    assert [e.op for e in step.latest.compiled.program.block.walk()].count("ap.route") == 2  # the wide table's
    assert all(isinstance(mine["params"]["tables"][f"t{k}"], TablePart) for k in range(5))
    assert_same(mine, theirs, rtol=1e-3, atol=1e-4)
    if devices > 1:
        check = autopar.check(step, mine, batch(0))
        assert check.ok, check


@pytest.mark.parametrize("out_of_range", [long(False), True])
@pytest.mark.parametrize("name", LOOKUPS)
def test_lookups_of_all_kinds(name: str, out_of_range: bool) -> None:
    step = step_of(ADAGRAD, LOOKUPS[name])
    ours = planned(step)
    mine, theirs = (trained(s, start(ADAGRAD), 5, out_of_range=out_of_range) for s in (ours, jax.jit(step)))
    assert stacks(ours) == [5]
    assert_same(mine, theirs)


@pytest.mark.parametrize("tx", [ADAGRAD, ADAMW])
def test_an_evaluation_copies_no_table(tx: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither those that it looks up, nor slots that it is given and doesn't read; one that it reads whole."""
    step, copied = planned(step_of(tx)), list[int]()
    whole = planned(lambda state, batch: evaluate(state["params"], batch) + jnp.sum(state["params"]["tables"]["t2"]))
    evaluation = planned(lambda state, batch: evaluate(state["params"], batch), strategy="auto")
    mine, theirs = trained(step, start(tx), 3), trained(jax.jit(step_of(tx)), start(tx), 3)
    current = TablePart.current

    def watched(self: Any) -> Any:
        copied.append(self.index)
        return current(self)

    monkeypatch.setattr(TablePart, "current", watched)
    wanted = evaluate(theirs["params"], batch(5))
    for _ in range(2):
        np.testing.assert_allclose(evaluation(mine, batch(5)), wanted, rtol=1e-3)
    assert not copied
    np.testing.assert_allclose(whole(mine, batch(5)), wanted + theirs["params"]["tables"]["t2"].sum(), rtol=1e-3)
    assert {*copied} == {2}


def _in_turn(tables: Any, ids: Any) -> Any:
    """Ids of a second table are made of the first one's rows."""
    rows = tables["t1"][ids[:, 1]] * tables["t3"][ids[:, 3]]
    return rows, tables["t0"][jnp.abs(rows[:, 0] * 9).astype(jnp.int32) % 7], tables["t4"][ids[:, 4]]


#: Evaluations of tables in a stack, with the number of their lookups in it.
EVALUATIONS: dict[str, tuple[Any, int]] = {
    "in turn": (_in_turn, 2),
    "examples last": (lambda t, ids: (t["t1"][ids.T % 5] * t["t3"][ids.T]).sum(0), 1),
    "what all share": (lambda t, ids: t["t1"][ids[:, 1]] * t["t3"][jnp.arange(4)].sum(0), 2),
    "scan": (
        lambda t, ids: jax.lax.scan(lambda c, i: (c + t["t1"][i % 5] * t["t3"][i], c[:, 0]), t["t1"][ids[:, 1]], ids.T),
        2,
    ),
    "cond": (
        lambda t, ids: jax.lax.cond(
            ids.sum() > 9, lambda i: t["t1"][i].sum() * t["t3"][i].sum(), lambda i: t["t3"][i].sum(), ids[:, 0]
        ),
        2,
    ),
    "checkpoint": (jax.checkpoint(lambda t, ids: t["t1"][ids[:, 1]] * t["t3"][ids[:, 3]]), 1),
}


@functools.cache
def _states(devices: int) -> tuple[Any, Any]:
    """Returns the states of a planned step and of a plain one."""
    steps = planned(step_of(ADAMW), devices), jax.jit(step_of(ADAMW))
    mine, theirs = (trained(step, start(ADAMW), 3) for step in steps)
    return mine, theirs


@pytest.mark.parametrize(("name", "devices"), diagonal(list(EVALUATIONS), [4, 1]))
def test_an_evaluation_looks_up_in_a_stack_at_once(name: str, devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops and branches look up there as well."""
    of_tables, lookups = EVALUATIONS[name]
    mine, theirs = _states(devices)
    evaluation = planned(lambda s, batch: of_tables(s["params"]["tables"], batch["ids"]), devices, strategy="auto")
    for out_of_range in (False, True):
        given = batch(5, out_of_range=out_of_range)
        found, wanted = evaluation(mine, given), of_tables(theirs["params"]["tables"], jnp.asarray(given["ids"]))
        assert_same(found, wanted, rtol=1e-3, atol=1e-4)
        monkeypatch.setattr(TablePart, "current", None)  # from the second call on nothing is copied out of the stack
    ops = [e.op for e in evaluation.latest.compiled.stacked.program.block.walk()]
    assert ops.count("gather") == lookups


#: Ways to call a function of nothing while JAX traces something of which its arguments are no part.
TRACES: dict[str, Any] = {
    "jit": lambda call: jax.jit(lambda: call())(),
    "eval_shape": lambda call: jax.eval_shape(lambda: call()),
    "scan": lambda call: jax.tree.map(lambda x: x[1], jax.lax.scan(lambda c, _: (c, call()), 0, None, 2)[1]),
    "grad": lambda call: jax.grad(lambda x: sum((x * y).sum() for y in call()))(1.0),
    "vmap": lambda call: jax.tree.map(lambda x: x[1], jax.vmap(lambda _: call())(jnp.arange(2))),
}


@pytest.mark.parametrize("name", TRACES)
def test_an_evaluation_that_jax_traces_reads_ids_of_rows(name: str) -> None:
    """It is planned for the ids of its arguments, which a program over all devices reads out of the stack."""
    mine, theirs = _states(4)
    evaluation = planned(lambda s, batch: _in_turn(s["params"]["tables"], batch["ids"]), strategy="auto")
    found = TRACES[name](lambda: evaluation(mine, batch(5)))
    wanted = TRACES[name](lambda: _in_turn(theirs["params"]["tables"], jnp.asarray(batch(5)["ids"])))
    if name == "eval_shape":
        assert jax.tree.map(lambda x: (x.shape, x.dtype), found) == jax.tree.map(lambda x: (x.shape, x.dtype), wanted)
    else:
        assert_same(found, wanted, rtol=1e-3, atol=1e-4)


def test_an_evaluation_of_one_table_of_a_stack() -> None:
    """And of tables of two states, or of arrays, by the same plan's function."""
    step = planned(step_of(ADAGRAD))
    first, second = trained(step, start(ADAGRAD), 1), trained(step, start(ADAGRAD), 4)
    ids = jnp.arange(8)
    one = planned(lambda table, ids: table[ids].sum(), strategy="auto")
    table = first["params"]["tables"]["t3"]
    np.testing.assert_allclose(one(table, ids), np.asarray(table)[:8].sum(), rtol=1e-4)
    both = planned(lambda a, b, ids: (a["t1"][ids] * b["t1"][ids]).sum(), strategy="auto")
    given = first["params"]["tables"], second["params"]["tables"]
    wanted = (np.asarray(given[0]["t1"])[:8] * np.asarray(given[1]["t1"])[:8]).sum()
    np.testing.assert_allclose(both(*given, ids), wanted, rtol=1e-4)
    np.testing.assert_allclose(both(*autopar.materialize(given), ids), wanted, rtol=1e-4)
    mixed = {**given[0], "t0": given[1]["t0"], "t1": given[1]["t1"]}
    added = planned(lambda t, ids: t["t0"][ids % 7].sum() + t["t2"][ids].sum(), strategy="auto")
    wanted = np.asarray(mixed["t0"])[np.arange(8) % 7].sum() + np.asarray(mixed["t2"])[:8].sum()
    np.testing.assert_allclose(added(given[0], ids) * 0 + added(mixed, ids), wanted, rtol=1e-4)


@pytest.mark.parametrize(("devices", "strategy"), diagonal([4, 1], ["auto", "ps"]))
def test_an_evaluation_of_some_tables_within_a_trace(devices: int, strategy: str) -> None:
    """Those before them in the stack aren't read at all."""
    step = planned(step_of(ADAMW), devices)
    state, ids = trained(step, start(ADAMW), 2), jnp.arange(8)

    def some(state: Any, ids: Any) -> Any:
        return state["params"]["tables"]["t2"][ids].sum() + state["params"]["tables"]["t4"][ids].sum()

    evaluation = planned(some, devices, strategy=strategy)
    wanted = some(trained(jax.jit(step_of(ADAMW)), start(ADAMW), 2), ids)
    np.testing.assert_allclose(evaluation(state, ids), wanted, rtol=1e-4)
    np.testing.assert_allclose(jax.jit(lambda ids: evaluation(state, ids))(ids), wanted, rtol=1e-4)


def test_arguments_stay_if_they_are_not_donated() -> None:
    """A table that comes twice is two tables."""
    step = planned(step_of(ADAGRAD), donate=False)
    first, _ = step(start(ADAGRAD), batch(0))
    before = jax.tree.map(np.asarray, first)
    tables = first["params"]["tables"]
    twice = {**first, "params": {**first["params"], "tables": {**tables, "t2": tables["t2"]}}}
    new, _ = step(twice, batch(1))
    assert_same(first, before, 0, 0)
    assert_same(new, trained(jax.jit(step_of(ADAGRAD)), start(ADAGRAD), 2))


def test_a_state_that_was_given_away_is_deleted() -> None:
    step = planned(step_of(ADAMW))
    old, _ = step(start(ADAMW), batch(0))
    step(old, batch(1))
    assert old["params"]["tables"]["t1"].is_deleted()
    with pytest.raises(autopar.DonatedStateError, match="given before"):
        step(old, batch(2))


@pytest.mark.filterwarnings("ignore:.*keeps beside other tables")
@pytest.mark.parametrize("tx", [ADAGRAD, ADAMW])
def test_other_steps_take_some_of_the_tables(tx: Any, tmp_path: Path) -> None:
    """A step that trains two of them by itself; a table from elsewhere; a checkpoint; a state made where it is."""

    def two(state: Any, ids: Any) -> Any:
        tables = state["params"]["tables"]
        some = {k: tables[k] for k in ("t0", "t2")}
        grads = jax.grad(lambda t: sum(jnp.sum(jnp.sin(x[ids])) for x in t.values()))(some)
        some = jax.tree.map(lambda x, g: x - 0.1 * g, some, grads)
        return {**state, "params": {**state["params"], "tables": {**tables, **some}}}

    step, other = planned(step_of(tx)), planned(two)
    plain, plain_two, ids = jax.jit(step_of(tx)), jax.jit(two), np.array([1, 3, 6, 2])
    mine, theirs = autopar.init(functools.partial(start, tx), step=step, batch=batch(0)), start(tx)
    for k in range(12):
        (mine, _), (theirs, _) = step(mine, batch(k)), plain(theirs, batch(k))
        if k % 4 == 1:
            mine, theirs = other(mine, ids), plain_two(theirs, ids)
        if k == 5:
            autopar.save(tmp_path / "state", mine)
            mine = autopar.restore(tmp_path / "state", like=mine).state
        if k == 8:
            mine["params"]["tables"]["t4"] = jnp.ones((23, 8))
            theirs["params"]["tables"]["t4"] = jnp.ones((23, 8))
    assert stacks(step) == [5]
    assert_same(mine, theirs, rtol=1e-3, atol=1e-4)


def test_steps_that_keep_tables_otherwise_are_told() -> None:
    def some(state: Any, batch: Any) -> Any:
        """Without the first table."""
        rest, table = state["params"]["tables"].copy(), state["params"]["tables"]["t0"]
        del rest["t0"]
        grads = jax.grad(lambda rest: sum(jnp.sum(jnp.sin(t[batch["ids"][:, 1] % 7])) for t in rest.values()))(rest)
        rest = jax.tree.map(lambda x, g: x - 0.1 * g, rest, grads)
        return {**state, "params": {**state["params"], "tables": {"t0": table, **rest}}}

    step, other = planned(step_of(ADAGRAD)), planned(some)
    state = start(ADAGRAD)
    with pytest.warns(autopar.SlowPlanWarning, match="that another step keeps beside other tables") as told:
        for k in range(5):
            state = other(step(state, batch(k))[0], batch(k))
    assert sorted(str(w.message).split()[0] for w in told if "beside other" in str(w.message)) == ["some", "train_step"]


def test_two_leaves_with_one_buffer() -> None:
    """Of a table made by `init`, say, and its moving average, both given up."""
    step = planned(step_of(ADAGRAD))
    mine = autopar.init(functools.partial(start, ADAGRAD), step=step, batch=batch(0))
    mine["params"]["tables"]["t1"] = mine["params"]["tables"]["t1"]
    slots = [x for x in jax.tree.leaves(mine["opt"]) if x.shape == (40, 8)]
    table = mine["params"]["tables"]["t1"]
    shared = jax.tree.map(lambda x: table if x is slots[0] else x, mine, is_leaf=lambda x: x is slots[0])
    wanted = jax.tree.map(np.asarray, shared)
    new, _ = step(shared, batch(1))
    assert_same(new, jax.jit(step_of(ADAGRAD))(jax.tree.map(jnp.asarray, wanted), batch(1))[0])


def test_within_a_trace_of_the_users_own() -> None:
    """As ordinary arrays."""
    step = planned(step_of(ADAGRAD))
    state, _ = jax.jit(lambda state, batch: step(state, batch))(start(ADAGRAD), batch(0))
    assert stacks(step) == [5]
    assert_same(state, trained(jax.jit(step_of(ADAGRAD)), start(ADAGRAD), 1))


@pytest.mark.parametrize("tx", [ADAGRAD, ADAMW])
def test_a_batch_that_exceeds_the_capacities(tx: Any) -> None:
    """They are those of all tables of a stack together."""
    few = {**batch(0), "ids": np.zeros((12, 6), np.int32)}
    many = [{**batch(k), "ids": (4 * np.arange(12)[:, None] % [7, 40, 11, 64, 23, 9]).astype(np.int32)} for k in (1, 2)]
    step, plain = planned(step_of(tx)), jax.jit(step_of(tx))
    mine, theirs = start(tx), start(tx)
    for each in (few, *many, few):
        (mine, _), (theirs, _) = step(mine, each), plain(theirs, each)
    assert_same(mine, theirs, rtol=1e-3, atol=1e-4)
