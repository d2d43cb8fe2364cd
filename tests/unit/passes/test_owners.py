"""Which tables on hosts one rank has whole, planned for ranks that aren't there; owner_cases.py runs them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.cost.exchange import sent_bytes
from autopar.ir.cluster import ClusterSpec, Device, Link
from autopar.ir.layout import RowLayout
from autopar.ir.plan import Plan
from autopar.ir.program import known
from autopar.ir.stacked import StackShape
from tests.support.mpi.bag_cases import BAGS, OTHERS, batch_of, start, step_of
from tests.support.settings import set_options

LINK = Link(1e-5, 1e10)
SPREADS, WHOLE = {"params/tables/*": ("ps", "hosts")}, ("ps:table", "hosts")


def case(strategy: Any, count: int, rows: Sequence[int] = (), form: str = "sum") -> tuple[Any, Any, Any]:
    """Makes a step with tables of bags, however small, and its arguments. `rows`: of the first tables, if others."""
    forms, tx = {f"{k}": {**BAGS, **OTHERS}[form] for k in range(count)}, optax.sgd(0.1)
    state = start(forms, tx, (8,))
    for k, n in enumerate(rows):
        state["params"]["tables"][f"{k}"] = jnp.zeros((n, 8))
    step = autopar.parallelize(step_of(forms, tx), strategy=strategy)
    set_options(step, least_saved=0)
    return step, state, batch_of(0)


def cluster_of(ranks: int) -> ClusterSpec:
    return ClusterSpec("made up", ranks, 1, Device("cpu", 1e11, 1e12, 1e11), LINK, LINK, 1e11)


def owners_of(plan: Plan) -> Mapping[str, int | None]:
    return {t.path.removeprefix("params/tables/"): t.owner for t in plan.tables}


@pytest.mark.parametrize("seed", range(20))
def test_a_stack_has_each_row_where_its_table_has_it(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 5))
    extents = tuple(rng.integers(1, 12, rng.integers(1, 7)).tolist())
    owners = tuple(None if rng.random() < 0.5 else int(rng.integers(n)) for _ in extents)
    shape, taken = StackShape(extents, n, owners), set[int]()
    for k, extent in enumerate(extents):
        numbers = np.arange(shape.rows)[shape.rows_of(k)]
        assert len(numbers) == extent and taken.isdisjoint(numbers.tolist())
        taken.update(numbers.tolist())
        layout, stack = shape.layout_of(k), shape.layout
        own, there = layout.storage_index(np.arange(extent)), stack.storage_index(numbers)
        ranks = own // layout.shard_rows
        np.testing.assert_array_equal(ranks, there // stack.shard_rows)
        begins = np.array([shape.starts_on(r)[k] for r in ranks])
        np.testing.assert_array_equal(begins + own % layout.shard_rows, there % stack.shard_rows)
        np.testing.assert_array_equal(layout.row(own), np.arange(extent))
        assert sum(int(layout.rows_on(np.int64(r))) for r in range(n)) == extent


def test_rows_of_others_are_spare() -> None:
    layout = RowLayout(5, 3, cyclic=True, owner=1)
    assert [layout.held_on(r) for r in range(3)] == [1, 5, 1] and layout.shard_rows == 5
    rows = layout.row(np.arange(layout.stored))
    assert rows[5:10].tolist() == [0, 1, 2, 3, 4] and (np.delete(rows, range(5, 10)) >= 5).all()


def test_bags_have_one_owner_each(tmp_path: Path) -> None:
    step = case(SPREADS, 6)
    plan = autopar.plan(*step, cluster=cluster_of(3))
    assert Counter(owners_of(plan).values()) == {0: 2, 1: 2, 2: 2}
    for table in plan.tables:
        sizes = known(table.sizes)
        assert sizes.whole and f"all rows in the memory of rank {table.owner}" in table.reason
        spread = sent_bytes(dataclasses.replace(sizes, whole=False), "hosts")
        assert table.sent["ps on hosts"] < spread["ps on hosts"]
    text = " ".join(str(autopar.explain(*step, cluster=cluster_of(3))).split())
    for rank in range(3):
        paths = ", ".join(t.path for t in plan.tables if t.owner == rank)
        assert f"rank {rank}: {paths}; 12.5 KiB, 33% of their rows a step" in text
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    by_rows = case(SPREADS, 6, form="nonlinear")
    text = " ".join(str(autopar.explain(*by_rows, cluster=cluster_of(3))).split())
    assert "save their ids, less than 5.9% of what is sent" in text
    rows = autopar.plan(*by_rows, cluster=cluster_of(3))
    assert {*owners_of(rows).values()} == {None} and "all on rank 0 -> cyclic" in str(plan.diff(rows))


def test_tables_stay_spread_where_one_rank_would_have_all() -> None:
    """All of the memory, or all of the work; and this is said."""
    step = case(SPREADS, 6, rows=[2000])
    large = owners_of(autopar.plan(*step, cluster=cluster_of(3)))
    assert large["0"] is None and None not in [large[f"{k}"] for k in range(1, 6)]
    text = " ".join(str(autopar.explain(*step, cluster=cluster_of(3))).split())
    share = f"{4 * 8 * (2000 + 5 * 200) / 3 / 1024:.1f} KiB"
    said = "no rank has it whole"
    assert f"{said}: 62.5 KiB are more than its share of all tables, {share}" in text and text.count(said) == 1
    few = case(SPREADS, 3, rows=[2000])
    plan = autopar.plan(*few, cluster=cluster_of(4))
    assert {*owners_of(plan).values()} == {None}
    text = " ".join(str(autopar.explain(*few, cluster=cluster_of(4))).split())
    assert f"{said}: with such tables the busiest one would have 2 times the average work" in text
    assert text.count(said) == 2 and "are more than its share" in text
    again = autopar.plan(autopar.parallelize(few[0].fun, plan=plan), *few[1:], cluster=cluster_of(4))
    assert [t.reason for t in again.tables] == [t.reason for t in plan.tables]
    assert said not in str(autopar.explain(*case(SPREADS, 6, form="nonlinear"), cluster=cluster_of(3)))


def test_tables_are_whole_as_the_strategy_says() -> None:
    """Of whatever size, looked up in whatever way."""
    strategy = {"params/tables/0": ("ps", "hosts"), "params/tables/*": WHOLE}
    plan = autopar.plan(*case(strategy, 3, rows=[10, 2000], form="nonlinear"), cluster=cluster_of(2))
    assert owners_of(plan) == {"0": None, "1": 0, "2": 1}
    with pytest.raises(autopar.StrategyError, match="on hosts \\('ps:table', 'hosts'\\) keeps each table whole"):
        autopar.plan(*case({"params/tables/*": "ps:table"}, 3), cluster=cluster_of(2))
