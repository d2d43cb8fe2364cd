"""Tables of a stack that one device has whole: named or chosen for bags, balanced, saved, read, on other devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.ir.program import known
from autopar.passes import choose
from autopar.passes.choosing import families
from tests.support.meshes import mesh_of
from tests.support.mpi.bag_cases import BAGS, OTHERS, ROWS, Form, batch_of, pooled, start, step_of
from tests.support.stacked_tables import stacks

CLIPPED = optax.chain(optax.clip_by_global_norm(0.05), optax.adagrad(0.3))
OPTIMIZERS = {"clipped": CLIPPED, "adamw": optax.adamw(0.05, eps=1e-2), "momentum": optax.sgd(0.3, momentum=0.9)}
WITH_FALLBACKS = pytest.mark.filterwarnings("ignore::autopar.CapacityWarning")
FORMS = {name: BAGS[name] for name in ("sum", "masked mean", "where with 3", "weights", "out of range", "two sums")}
WHOLE, SPREAD = {"params/tables/*": "ps:table"}, {"params/tables/*": "ps"}


@pytest.fixture(autouse=True)
def fewer_bytes_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "_BAGS_PAY", (1, 1))


def planned(forms: Mapping[str, Form], tx: Any, devices: int = 4, strategy: Any = None, **options: Any) -> Any:
    options = {"strategy": strategy or SPREAD, "donate": False, **options}
    return autopar.parallelize(step_of(forms, tx), mesh=mesh_of(devices), **options)


def assert_same(mine: Any, theirs: Any) -> None:
    for a, b in zip(jax.tree.leaves(autopar.materialize(mine)), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=1e-4, atol=2e-5)


def compare(step: Any, forms: Mapping[str, Form], tx: Any, state: Any = None, steps: int = 2) -> Any:
    """Returns a trained state, equal to the plain step's; what is sent is what the plan says."""
    plain = jax.jit(step_of(forms, tx))
    mine = theirs = start(forms, tx, (8,)) if state is None else state
    for k in range(steps):
        (mine, told), (theirs, wanted) = step(mine, batch_of(k)), plain(theirs, batch_of(k))
        assert_same((mine, told), (theirs, wanted))
    check = autopar.check(step, mine, batch_of(0))
    assert check.ok, check
    return mine


def owners(step: Any) -> Mapping[str, int | None]:
    return {t.path.removeprefix("params/tables/"): t.owner for t in step.plan.tables}


@WITH_FALLBACKS
@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_trained_as_on_one_device(devices: int, name: str) -> None:
    forms, tx = {**FORMS, "mean": BAGS["mean"], "scaled": BAGS["scaled"]}, OPTIMIZERS[name]
    step = planned(forms, tx, devices)
    state = compare(step, forms, tx)
    found = owners(step)
    assert Counter(found.values()) == dict.fromkeys(range(devices), 8 // devices)
    assert stacks(step) == [8] and pooled(step.plan) == set(forms)
    with mock.patch.object(choose, "device_owners", lambda *of: ({}, {})):
        spread = planned(forms, tx, devices)
        spread.planned_for(state, batch_of(0))
    assert {*owners(spread).values()} == {None}
    sent, instead = (sum(t.sent["ps"] for t in each.plan.tables) for each in (step, spread))
    assert sent < 0.7 * instead, (sent, instead)


@WITH_FALLBACKS
def test_a_large_table_stays_spread_in_the_stack_of_others() -> None:
    state = start(FORMS, CLIPPED, (8,))
    params = state["params"]
    params["tables"]["sum"] = jnp.tile(params["tables"]["sum"], (20, 1))
    state = {"params": params, "opt": CLIPPED.init(params)}
    step = planned(FORMS, CLIPPED, 2)
    compare(step, FORMS, CLIPPED, state)
    found = owners(step)
    assert found["sum"] is None and {*found.values()} == {None, 0, 1} and stacks(step) == [6]
    text = " ".join(str(autopar.explain(step, state, batch_of(0))).split())
    assert "no device has it whole: 250.0 KiB are more than its share of them, 156.2 KiB" in text
    assert text.count("no device has it whole") == 1
    assert "Tables that one device has whole: device 0: params/tables/" in text


def test_devices_have_like_numbers_of_rows() -> None:
    """Of seven tables on four devices, four are whole: shards have one size, that of the fullest."""
    forms, tx = dict.fromkeys("abcdefg", BAGS["sum"]), optax.sgd(0.1)
    plan = planned(forms, tx).planned_for(start(forms, tx, (8,)), batch_of(0)).compiled.plan
    assert Counter(t.owner for t in plan.tables) == {0: 1, 1: 1, 2: 1, 3: 1, None: 3}
    whys = [t.reason.partition("no device has it whole: ")[2] for t in plan.tables if t.owner is None]
    assert whys == [f"with it one would have {x} times the average rows" for x in (1.14, 1.29, 1.43)], whys


@WITH_FALLBACKS
@pytest.mark.parametrize("form", ["nonlinear", "masked mean"])
def test_tables_are_whole_as_the_strategy_says(form: str) -> None:
    """Also those whose rows travel, and some beside others in their stack."""
    forms, tx = dict.fromkeys("abcde", {**BAGS, **OTHERS}[form]), optax.adam(0.05, eps=1e-2)
    step = planned(forms, tx, 4, WHOLE)
    compare(step, forms, tx)
    assert {*owners(step).values()} == {0, 1, 2, 3} and stacks(step) == [5]
    assert pooled(step.plan) == (set(forms) if form == "masked mean" else set())
    some = planned(forms, tx, 2, {"params/tables/b": "ps:table", "params/tables/*": "ps"})
    if form == "nonlinear":
        compare(some, forms, tx)
        assert owners(some) == {"a": None, "b": 0, "c": None, "d": None, "e": None}


def test_a_table_by_itself_is_not_on_one_device() -> None:
    forms, tx = dict.fromkeys("abc", BAGS["sum"]), optax.sgd(0.1)
    state = start(forms, tx, (8,))
    why = r"params/tables/a can't be whole on one device, 'ps:table': shards of an array .* 4 or more tables"
    with pytest.raises(autopar.StrategyError, match=why):
        planned(forms, tx, 4, WHOLE)(state, batch_of(0))
    other = start({**forms, "d": BAGS["sum"]}, tx, (8, 8, 8, 12))
    with pytest.raises(autopar.StrategyError, match=why):
        planned({**forms, "d": BAGS["sum"]}, tx, 4, WHOLE)(other, batch_of(0))
    alone = autopar.parallelize(step_of(forms, tx), strategy=WHOLE, donate=False, mesh=mesh_of(1))
    assert_same(alone(state, batch_of(0)), jax.jit(step_of(forms, tx))(state, batch_of(0)))


def test_more_rows_of_one_table_than_measured() -> None:
    """The first batch asks for one row of each table; the next ones for more than messages have room for."""
    forms, tx = dict.fromkeys("abcd", BAGS["sum"]), optax.adagrad(0.3)
    step, plain = planned(forms, tx), jax.jit(step_of(forms, tx))
    mine = theirs = start(forms, tx, (8,))
    one_row = {**batch_of(1), "ids": np.full_like(batch_of(1)["ids"], ROWS - 1)}
    with pytest.warns(autopar.CapacityWarning, match="with the same result; capacities grow"):
        for batch in (one_row, batch_of(0), batch_of(2)):
            mine, theirs = step(mine, batch)[0], plain(theirs, batch)[0]
            assert_same(mine, theirs)
    assert {*owners(step).values()} == {0, 1, 2, 3} and pooled(step.plan) == set(forms)


@WITH_FALLBACKS
@pytest.mark.parametrize("name", ["clipped", "adamw"])
def test_states_are_saved_read_and_given_to_other_steps(tmp_path: Path, name: str) -> None:
    """Restored on as many devices, fewer, and one; made by `init`; trained on by a step that spreads tables."""
    tx = OPTIMIZERS[name]
    step, plain = planned(FORMS, tx, 4, WHOLE), jax.jit(step_of(FORMS, tx))
    state = autopar.init(lambda: start(FORMS, tx, (8,)), step=step, batch=batch_of(0))
    state, theirs = step(state, batch_of(0))[0], plain(start(FORMS, tx, (8,)), batch_of(0))[0]
    assert_same(state, theirs)
    for path, table in state["params"]["tables"].items():
        wanted = np.asarray(theirs["params"]["tables"][path])
        for read in (np.asarray(table), np.asarray(table[:]), np.asarray(autopar.materialize(table))):
            np.testing.assert_allclose(read, wanted, rtol=1e-4, atol=2e-5)
        for picked in (np.array([3, ROWS - 1, 0, 3]), 7, slice(5, 9)):
            np.testing.assert_allclose(table[picked], wanted[picked], rtol=1e-4, atol=2e-5)
    autopar.save(tmp_path / "1", state)
    theirs = plain(theirs, batch_of(1))[0]
    like = jax.eval_shape(lambda: start(FORMS, tx, (8,)))
    for devices, strategy in ((4, WHOLE), (2, WHOLE), (4, SPREAD), (1, SPREAD)):
        other = planned(FORMS, tx, devices, strategy)
        again = autopar.restore(tmp_path / "1", like=like, step=other, batch=batch_of(0)).state
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), again, state)
        assert_same(other(again, batch_of(1))[0], theirs)
    with mock.patch.object(choose, "device_owners", lambda *of: ({}, {})):
        spread = planned(FORMS, tx)
        assert_same(spread(state, batch_of(1))[0], theirs)
    assert_same(step(spread(state, batch_of(1))[0], batch_of(2))[0], plain(theirs, batch_of(2))[0])


@WITH_FALLBACKS
def test_evaluations_read_whole_tables() -> None:
    """Sums of bags, rows, and all of a table."""
    tx = optax.adagrad(0.3)
    step = planned(FORMS, tx)
    state, batch = step(start(FORMS, tx, (8,)), batch_of(0))[0], batch_of(1)
    assert None not in owners(step).values() or Counter(owners(step).values())[None] == 2

    def bags(params: Any, batch: Any) -> Any:
        return sum(form(params["tables"][name], batch) for name, form in FORMS.items())

    def rows(params: Any, batch: Any) -> Any:
        return sum(jnp.tanh(table[batch["ids"]]).sum(1) for table in params["tables"].values())

    def others(params: Any, batch: Any) -> Any:
        return jnp.tanh(params["tables"]["weights"]).sum() + rows(params, batch)

    for fun in (bags, rows, others):
        evaluate = autopar.parallelize(fun, mesh=mesh_of(4))
        for some in (batch, {**batch, "ids": np.full_like(batch["ids"], ROWS - 1)}):
            assert_same(evaluate(state["params"], some), fun(autopar.materialize(state["params"]), some))
        assert autopar.check(evaluate, state["params"], batch).ok
        assert fun is not bags or pooled(evaluate.plan) == set(FORMS)


@WITH_FALLBACKS
@pytest.mark.parametrize("strategy", [SPREAD, WHOLE])
def test_a_plan_is_followed(strategy: Any, tmp_path: Path) -> None:
    tx = optax.sgd(0.1)
    state = start(FORMS, tx, (8,))
    plan = known(planned(FORMS, tx, 4, strategy).planned_for(state, batch_of(0)).compiled.plan)
    plan.save(tmp_path / "plan.json")
    again = autopar.parallelize(step_of(FORMS, tx), plan=tmp_path / "plan.json", mesh=mesh_of(4), donate=False)
    compare(again, FORMS, tx, state)
    before, now = ([(t.path, t.owner, t.sizes, t.capacity) for t in known(each).tables] for each in (plan, again.plan))
    assert before == now and {0, 1, 2, 3} <= {owner for _, owner, *_ in now}
