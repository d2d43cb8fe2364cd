"""Bags of rows that their owners add up on devices: in all forms, by what is sent, and where a capacity is exceeded."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar import jax_compat
from autopar.backends import bags
from autopar.ir.local import BagSet
from autopar.ir.program import known
from autopar.passes import choose
from autopar.passes.choosing import families
from tests.support.meshes import mesh_of
from tests.support.mpi.bag_cases import BAGS, OTHERS, ROWS, SEGMENTS, Form, batch_of, pooled, start, step_of
from tests.support.stacked_tables import stacks

CLIPPED = optax.chain(optax.clip_by_global_norm(0.05), optax.adagrad(0.3))
WITH_FALLBACKS = pytest.mark.filterwarnings("ignore::autopar.CapacityWarning")


@pytest.fixture(autouse=True)
def fewer_bytes_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of all tables are spread: test_whole_tables.py has tables that one device has."""
    monkeypatch.setattr(families, "_BAGS_PAY", (1, 1))
    monkeypatch.setattr(choose, "device_owners", lambda *of: ({}, {}))


def planned(forms: Mapping[str, Form], tx: optax.GradientTransformation, **options: Any) -> Any:
    options = {"mesh": mesh_of(4), "strategy": {"params/tables/*": "ps"}, "donate": False, **options}
    return autopar.parallelize(step_of(forms, tx), **options)


def compare(forms: Mapping[str, Form], tx: optax.GradientTransformation, widths: Sequence[int], steps: int = 2) -> Any:
    """Returns a planned step, whose results were the plain one's, and which sends what the plan says."""
    step, plain = planned(forms, tx), jax.jit(step_of(forms, tx))
    mine = theirs = start(forms, tx, widths)
    for k in range(steps):
        (mine, told), (theirs, wanted) = step(mine, batch_of(k)), plain(theirs, batch_of(k))
        assert_same((mine, told), (theirs, wanted))
    check = autopar.check(step, mine, batch_of(0))
    assert check.ok, check
    return step


def assert_same(mine: Any, theirs: Any) -> None:
    for a, b in zip(jax.tree.leaves(autopar.materialize(mine)), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=1e-4, atol=2e-5)


def test_bags_are_found_in_all_forms() -> None:
    forms = {**BAGS, **OTHERS, **SEGMENTS}  # of which between devices rows travel
    tx = optax.sgd(0.1)
    compiled = planned(forms, tx).planned_for(start(forms, tx, range(3, 3 + len(forms))), batch_of(0)).compiled
    assert pooled(compiled.plan) == set(BAGS)
    (note,) = (r.note for r in compiled.records if r.name == "pool_bags")
    assert note == f"bags of {len(BAGS)} families are added up by owners"
    for table in compiled.plan.tables:
        assert table.pooled == ("the owners of the rows add up each device's" in table.reason)


@WITH_FALLBACKS
@pytest.mark.long
@pytest.mark.parametrize("part", range(6))
def test_trained_in_all_forms(part: int) -> None:
    forms = {name: {**BAGS, **OTHERS}[name] for name in [*BAGS, *OTHERS][part::6]}
    step = compare(forms, CLIPPED, range(3, 3 + len(forms)))
    assert pooled(step.plan) == set(forms) & set(BAGS)


@WITH_FALLBACKS
def test_trained_beside_a_table_whose_rows_travel() -> None:
    forms = {name: {**BAGS, **OTHERS}[name] for name in ("masked mean", "out of range, filled", "nonlinear")}
    step = compare(forms, CLIPPED, (3, 4, 5))
    assert pooled(step.plan) == {"masked mean", "out of range, filled"}


@WITH_FALLBACKS
def test_stacked_tables_with_rows_that_wait() -> None:
    forms = {name: BAGS[name] for name in ("sum", "where", "weights", "masked mean")}
    step = compare(forms, optax.adamw(0.05, eps=1e-3), (8,))
    assert pooled(step.plan) == set(forms)
    assert stacks(step) == [4] and step.plan.defers


@WITH_FALLBACKS
def test_a_stack_in_which_ids_of_one_table_are_in_two_bags() -> None:
    """Messages have room for each id as often as for that table's, which the plan says (`compare`)."""
    forms = {**dict.fromkeys("abc", BAGS["sum"]), "d": BAGS["two sums"]}
    step = compare(forms, optax.sgd(0.1), (8,))
    assert stacks(step) == [4] and pooled(step.plan) == set(forms)


@WITH_FALLBACKS
def test_rows_of_a_stack_travel_where_its_bags_are_not_found() -> None:
    """Parts of bags, whose gradients a stack selects: the bags found are of single rows, each a message to all."""
    step = compare(dict.fromkeys("abcd", BAGS["halves"]), optax.sgd(0.1), (8,))
    assert stacks(step) == [4] and not pooled(step.plan)
    assert all("but its rows travel: a device's own program has 120 bags" in t.reason for t in step.plan.tables)


@WITH_FALLBACKS
def test_ids_take_as_many_bytes_beside_float64() -> None:
    with jax_compat.enable_x64():
        compare({"weights": BAGS["weights"]}, optax.sgd(0.1), (8,), steps=1)


@WITH_FALLBACKS
@pytest.mark.parametrize("names", [("masked mean",), ("sum", "mean", "where", "weights")])
def test_evaluations_read_bags(names: Sequence[str]) -> None:
    """Of a table, and of four in a stack."""
    forms, tx = {name: BAGS[name] for name in names}, optax.adamw(0.05, eps=1e-3)
    step = planned(forms, tx)
    state, batch = step(start(forms, tx, (8,)), batch_of(0))[0], batch_of(1)
    one_row = {**batch, "ids": np.full_like(batch["ids"], ROWS - 1)}

    def read(params: Any, batch: Any) -> jax.Array:
        return sum(form(params["tables"][name], batch) for name, form in forms.items())

    evaluate = autopar.parallelize(read, mesh=mesh_of(4))
    for some in (batch, one_row):
        assert_same(evaluate(state["params"], some), read(autopar.materialize(state["params"]), some))
    assert pooled(evaluate.plan) == set(forms) and autopar.check(evaluate, state["params"], batch).ok


def test_more_ids_of_one_owner_than_measured() -> None:
    """One row only, so that its number of ids alone exceeds what messages have room for."""
    forms, tx = {"sum": BAGS["sum"]}, optax.adagrad(0.3)
    step, plain = planned(forms, tx), jax.jit(step_of(forms, tx))
    mine = theirs = start(forms, tx, (8,))
    one_row = {**batch_of(1), "ids": np.full_like(batch_of(1)["ids"], ROWS - 1)}
    with pytest.warns(autopar.CapacityWarning, match="with the same result; capacities grow"):
        for batch in (batch_of(0), one_row, batch_of(2)):
            mine, theirs = step(mine, batch)[0], plain(theirs, batch)[0]
            assert_same(mine, theirs)
    assert pooled(step.plan) == {"sum"}


def test_more_ids_than_measured_in_a_stack_with_a_table_without_limits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first table's few rows bound what it is asked for; the fallback, in which the others' rows travel, has those
    of all travel."""
    monkeypatch.setattr(families, "_BAGS_PAY", (0, 0))
    forms, tx = {name: BAGS[name] for name in ("sum", "where", "weights", "masked mean")}, optax.sgd(0.1)
    step, plain = planned(forms, tx), jax.jit(step_of(forms, tx))
    mine = start(forms, tx, (8,))
    mine["params"]["tables"]["masked mean"] = mine["params"]["tables"]["masked mean"][:8]
    sizes = [known(table.sizes) for table in step.planned_for(mine, batch_of(0)).compiled.plan.tables]
    assert [(s.bags > 0, s.together, s.checks) for s in sizes] == [(True, 4, k > 0) for k in range(4)]
    theirs, one_row = mine, {**batch_of(1), "ids": np.full_like(batch_of(1)["ids"], ROWS - 1)}
    with pytest.warns(autopar.CapacityWarning, match="with the same result; capacities grow"):
        for batch in (batch_of(0), one_row, batch_of(2)):
            mine, theirs = step(mine, batch)[0], plain(theirs, batch)[0]
            assert_same(mine, theirs)
    assert pooled(step.plan) == set(forms) and stacks(step) == [4]


def test_a_plan_is_followed() -> None:
    forms, tx = {"sum": BAGS["sum"]}, optax.sgd(0.1)
    state = start(forms, tx, (8,))
    plan = known(planned(forms, tx).planned_for(state, batch_of(0)).compiled.plan)
    again = planned(forms, tx, plan=plan, strategy=None).planned_for(state, batch_of(1)).compiled
    (a,), (b,) = plan.tables, again.plan.tables
    assert a.pooled and a.sizes == b.sizes and again.bound.families[0].bounds.bag_ids == known(a.sizes).bag_ids // 4
    by_rows = dataclasses.replace(plan, tables=(dataclasses.replace(a, sizes=known(a.sizes).by_rows()),))
    assert not pooled(planned(forms, tx, plan=by_rows, strategy=None).planned_for(state, batch_of(1)).compiled.plan)


@pytest.mark.parametrize("owner", [None, 0, 2])
def test_sums_and_gradients_of_several_sets(owner: int | None) -> None:
    """Masked, weighted, some ids without a gradient, and a set without any of that; empty bags, and full messages."""
    devices, shard, columns, counts, lengths = 4, 7, 3, (2, 5), (6, 3)
    rng = np.random.default_rng(0)
    table = rng.normal(size=(devices * shard, columns)).astype(np.float32)
    ids = [rng.integers(0, devices * shard, (devices, n, size)) for n, size in zip(counts, lengths, strict=True)]
    mask, kept = (rng.random(ids[0].shape) < 0.7 for _ in range(2))
    mask[:, 0] = False
    kept &= mask
    weights = rng.normal(size=ids[0].shape).astype(np.float32)
    sets = (BagSet((counts[0],), True, True, is_kept=True), BagSet((counts[1], 1), False, False, owner=owner))
    if owner is not None:  # that of all rows of the second set
        ids[1] = ids[1] % shard + owner * shard
    owners = [
        np.concatenate([(a // shard)[k][mask[k]], (b // shard)[k].ravel()]) for k in range(devices) for a, b in [ids]
    ]
    params = {"sets": sets, "slots": max(int(np.bincount(each).max()) for each in owners)}
    cotangents = [rng.normal(size=(devices, n, columns)).astype(np.float32) for n in counts]

    def own(table: jax.Array, *operands: jax.Array) -> Any:
        kept, a, mask, weights, b, *dy = (x[0] for x in operands)
        given = (jnp.zeros(()), kept, a, mask, weights, b)
        rows = jnp.arange(shard + 1, dtype=jnp.int32)
        told = bags.ask(params, given, bags.bag_ids(params, given), rows, shard, "data")
        sums = bags.add_up(sets, jnp.pad(table, ((0, 1), (0, 0))), told, "data")
        dy = [dy[0], dy[1][:, None]]
        return *(x[None] for x in sums), bags.to_rows(sets, dy, told, shard + 1, "data")[:shard]

    given = [kept, ids[0].astype(np.int32), mask, weights, ids[1].astype(np.int32), *cotangents]
    run = jax.shard_map(own, mesh=mesh_of(devices), in_specs=P("data"), out_specs=P("data"), check_vma=False)
    first, second, gradients = jax.jit(run)(table, *given)
    factors = weights * mask
    np.testing.assert_allclose(first, (table[ids[0]] * factors[..., None]).sum(2), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(second[:, :, 0], table[ids[1]].sum(2), rtol=1e-5, atol=1e-5)
    wanted = np.zeros_like(table)
    np.add.at(wanted, ids[0], (weights * kept)[..., None] * cotangents[0][:, :, None])
    np.add.at(wanted, ids[1], np.broadcast_to(cotangents[1][:, :, None], (*ids[1].shape, columns)))
    np.testing.assert_allclose(gradients, wanted, rtol=1e-5, atol=1e-5)


def test_the_most_ids_that_fit() -> None:
    """In rows of a capacity of 10, which stand for 7 ids."""
    loads = [bags.load_of_ids(jnp.array([3] * n + [0, 4, 4]), 4, 7, 10) for n in (0, 1, 6, 7, 8, 14)]
    assert [int(x) for x in loads] == [2, 2, 9, 10, 12, 20]
