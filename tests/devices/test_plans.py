"""Steps of several devices that are run by a plan, and what compiled programs send beside what plans say."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.cost.exchange import sent_bytes
from autopar.measure.compiled_collectives import Collective, read_collectives
from autopar.planning.check import CheckRow, compare_collectives
from tests.support.meshes import mesh_of
from tests.support.pairs import diagonal
from tests.support.row_steps import ids_in, same

ROWS, WIDTH = 400, 8
TX = optax.chain(optax.clip_by_global_norm(0.1), optax.adagrad(0.1))
#: Ids that all are on the first device's shard, if rows lie as they are.
BATCH = ids_in(0, 60, length=20)


def make_state(rows: int = ROWS) -> Any:
    params = {"emb": jax.random.normal(jax.random.key(0), (rows, WIDTH)), "w": jnp.eye(WIDTH)}
    return {"params": params, "opt": TX.init(params)}


def step(state: Any, batch: Any) -> Any:
    loss, g = jax.value_and_grad(lambda p: jnp.mean(jnp.tanh(p["emb"][batch["ids"]] @ p["w"]) ** 2))(state["params"])
    updates, opt = TX.update(g, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss


def by(method: Any, devices: int = 4, **options: Any) -> autopar.ParallelStep:
    return autopar.parallelize(step, strategy=method, mesh=mesh_of(devices), **options)


def trained(planned: Any, batches: Sequence[Any]) -> Any:
    state, losses = make_state(), []
    for batch in batches:
        state, loss = planned(state, batch)
        losses.append(loss)
    return autopar.materialize((state, losses))


@pytest.mark.parametrize("method", ["ps", "allgather", "allreduce_rows", "allreduce"])
def test_a_step_by_a_plan_is_the_step_that_the_plan_is_of(method: str, tmp_path: Path) -> None:
    """The same numbers to the last bit, and the same collectives, though it is planned on another batch."""
    theirs, other = by(method), ids_in(60, 400, 1, length=20)
    made = autopar.plan(theirs, make_state(), BATCH)
    made.save(tmp_path / "plan.json")
    mine = autopar.parallelize(step, plan=tmp_path / "plan.json", mesh=mesh_of(4))
    found = [p.lower(make_state(), x).compile().as_text() for p, x in ((mine, other), (theirs, BATCH))]
    assert read_collectives(found[0]) == read_collectives(found[1]) != []
    batches = [BATCH, ids_in(0, 60, 1, length=20)]
    jax.tree.map(np.testing.assert_array_equal, trained(mine, batches), trained(theirs, batches))
    again = autopar.plan(autopar.parallelize(step, plan=made, mesh=mesh_of(4)), make_state(), BATCH)
    assert not made.diff(again) and again.tables[0].terms == made.tables[0].terms != {}


def test_leaves_in_shares_stay_so() -> None:
    made = autopar.plan(by({"params/w": "ps", "**": "allreduce"}), make_state(), BATCH)
    assert [leaf.path for leaf in made.dense if leaf.sharded] == ["opt/1/0/sum_of_squares/w", "params/w"]
    planned = autopar.parallelize(step, plan=made, mesh=mesh_of(4))
    assert not made.diff(autopar.plan(planned, make_state(), BATCH))
    state, _ = planned(make_state(), BATCH)
    assert {s.data.shape for s in state["params"]["w"].addressable_shards} == {(WIDTH // 4, WIDTH)}


def test_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(*_: Any, **__: Any) -> Any:
        raise AssertionError("rates are measured")

    made = autopar.plan(by("auto"), make_state(), BATCH)
    monkeypatch.setattr("autopar.api.rates_of", measure)
    with pytest.raises(AssertionError, match="rates are measured"):
        by("auto").planned_for(make_state(), BATCH)
    assert not made.diff(autopar.plan(autopar.parallelize(step, plan=made, mesh=mesh_of(4)), make_state(), BATCH))


def test_a_measured_capacity_holds_until_a_batch_exceeds_it() -> None:
    made = autopar.plan(by("ps"), make_state(), BATCH)
    (table,) = made.tables
    assert table.tight and table.cyclic and table.capacity is not None
    planned, plain = autopar.parallelize(step, plan=made, mesh=mesh_of(4)), jax.jit(step)
    one_owner = {"ids": np.int32(4 * np.arange(160).reshape(8, 20) % ROWS)}
    planned.planned_for(make_state(), one_owner)
    assert planned.plan.tables[0].capacity == table.capacity
    mine, theirs = make_state(), make_state()
    with warnings.catch_warnings(record=True) as told:  # when a capacity is known to be exceeded isn't certain
        warnings.simplefilter("always")
        for _ in range(3):
            (mine, a), (theirs, b) = planned(mine, one_owner), plain(theirs, one_owner)
            same(jax.block_until_ready((mine, a)), (theirs, b))
    assert told[0].category is autopar.CapacityWarning
    needed = one_owner["ids"].size // 4
    assert f"capacities grow from {table.capacity} to {needed} ({table.path})" in str(told[0].message)
    with pytest.warns(autopar.RecompileWarning):
        (family,) = planned.planned_for(make_state(), ids_in(0, 400, length=10)).compiled.bound.families
    assert family.layout is not None and family.layout.cyclic and family.table.ids == 80, "another batch: measured anew"


def test_what_does_not_fit_is_named() -> None:
    made = autopar.plan(by("ps"), make_state(), BATCH)
    with pytest.raises(autopar.PlanError, match="is for 4 devices, and step runs on 2. Give a mesh of 4, or plan"):
        autopar.parallelize(step, plan=made, mesh=mesh_of(2)).planned_for(make_state(), BATCH)
    with pytest.raises(autopar.PlanError, match=r"params/emb: shape \[404, 8\] in the step, \[400, 8\] in the plan"):
        autopar.parallelize(step, plan=made, mesh=mesh_of(4)).planned_for(make_state(404), BATCH)


# --- check ---


@pytest.mark.parametrize(
    ("method", "shapes"), diagonal(["ps", "allgather", "allreduce_rows", "allreduce"], [False, True])
)
def test_compiled_programs_send_what_plans_say(method: str, shapes: bool) -> None:
    given = (make_state(), BATCH)
    if shapes:
        given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), given)
    found = autopar.check(by(method), *given)
    assert found.ok, str(found)
    sizes = autopar.plan(by(method), *given).tables[0].sizes
    assert sizes is not None and sizes.checks != shapes
    assert all(row.planned is not None for row in found.rows if row.what != "flags")
    of_model = "gradients of dense leaves", "sums over examples", "flags"
    of_tables = [row for row in found.rows if row.what not in of_model]
    assert sum(row.compiled for row in of_tables) == sent_bytes(sizes)[method] > 0
    (dense,) = [row for row in found.rows if row.what == "gradients of dense leaves"]
    assert (dense.collective, dense.compiled, dense.count) == ("all-reduce", 2 * 3 * 4 * WIDTH**2 // 4, 1)


def test_nothing_travels_on_one_device() -> None:
    found = autopar.check(by("ps", 1), make_state(), BATCH)
    assert found.ok and not found.rows and "the compiled program has no collective" in repr(found)


def test_a_program_that_sends_more_or_less_differs() -> None:
    made = autopar.plan(by("ps"), make_state(), BATCH)
    (table,) = made.tables
    assert table.sizes is not None
    row, capacity = 4 * WIDTH, table.sizes.capacity
    sent = 3 * capacity * (4 + 2 * row)
    exchanges = [Collective("all-to-all", (("f32", (4, capacity, n)),), 1) for n in (1, WIDTH, WIDTH)]
    assert compare_collectives(made, exchanges).ok
    what = "ids, rows and gradients of tables"
    less = compare_collectives(made, exchanges[:2])
    assert less.rows == (CheckRow("all-to-all", what, sent, sent - 3 * capacity * row, 2),) and not less
    # An array of the model is gathered, which the plan doesn't know; then one that could be the table.
    model, whole = (Collective("all-gather", (("f32", (rows, WIDTH)),), 2) for rows in (ROWS // 4, ROWS))
    more = compare_collectives(made, [*exchanges, model])
    assert more and more.rows[1:] == (CheckRow("all-gather", "arrays of the model", None, 2 * 3 * 25 * row, 0),)
    assert not compare_collectives(made, [*exchanges, whole])
    assert not compare_collectives(made, [*exchanges, Collective("collective-permute", (("f32", (2,)),), 1)])
    # A second family of the same ids, which are sent once.
    two = dataclasses.replace(made, tables=(table, dataclasses.replace(table, path="params/b", slots=())))
    assert compare_collectives(two, [*exchanges, *exchanges]) and compare_collectives(two, [*exchanges, *exchanges[1:]])
    assert not compare_collectives(two, exchanges)
    dense = dataclasses.replace(made, tables=(dataclasses.replace(table, method="allreduce", lifted=False),))
    reduced = [Collective("all-reduce", (("f32", (ROWS, WIDTH)), ("f32", ()), ("pred", ())), 1)]
    assert [(r.planned, r.compiled) for r in compare_collectives(dense, reduced).rows] == [
        (19200, 19200),
        (None, 6),
        (None, 1),
    ]
    assert not compare_collectives(dense, []) and "DIFFERS" in str(compare_collectives(dense, []))
    alone = dataclasses.replace(made, devices=1)
    assert compare_collectives(alone, []) and not compare_collectives(alone, reduced)
