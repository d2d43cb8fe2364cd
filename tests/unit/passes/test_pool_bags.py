"""Which bags owners add up, planned for ranks that aren't there; tests/support/mpi/bag_cases.py runs them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import autopar
from autopar.cost.exchange import sent_bytes
from autopar.ir.cluster import ClusterSpec, Device, Link
from autopar.ir.figures import Sizes
from autopar.ir.program import known
from autopar.passes import pool_bags
from autopar.planning.plan import elsewhere
from autopar.run.planned_step import PlannedStep
from tests.support.mpi.bag_cases import (
    BAGS,
    EXAMPLES,
    HOSTS,
    OTHERS,
    ROWS,
    SEGMENTS,
    Form,
    batch_of,
    pooled,
    start,
    step_of,
)
from tests.support.settings import set_options

LINK = Link(1e-5, 1e10)


def planned_for(
    ranks: int, forms: Mapping[str, Form], widths: Sequence[int], *, batch: Any = None, least_saved: int = 0
) -> PlannedStep:
    """Plans a step, by default so that small tables pay."""
    tx = optax.sgd(0.1)
    step = autopar.parallelize(step_of(forms, tx), strategy={"params/tables/*": HOSTS})
    set_options(step, least_saved=least_saved)
    cluster = ClusterSpec("made up", ranks, 1, Device("cpu", 1e11, 1e12, 1e11), LINK, LINK, 1e11)
    return elsewhere(step, cluster).planned_for(start(forms, tx, widths), batch_of(0) if batch is None else batch)


@pytest.mark.parametrize("stacked", [False, True])
def test_bags_are_found_in_all_forms(stacked: bool) -> None:
    bags = {**BAGS, **SEGMENTS}
    forms = {**bags, **OTHERS}
    planned = planned_for(2, forms, (4, 6) if stacked else range(3, 3 + len(forms)))
    plan = planned.compiled.plan
    assert pooled(plan) == set(bags)
    (note,) = (r.note for r in planned.compiled.records if r.name == "pool_bags")
    ops = Counter(e.op for e in planned.compiled.program.block.equations)
    assert ops["ap.pool"] == ops["ap.push_pool"] and (ops["ap.pool"] < len(bags) // 2 if stacked else True)
    assert note == f"bags of {ops['ap.pool'] if stacked else len(bags)} families are added up by owners"
    for table in plan.tables:
        assert table.sizes is not None
        as_rows = sent_bytes(table.sizes.by_rows(), "hosts")["ps on hosts"]
        assert table.sent["ps on hosts"] < as_rows if table.pooled else table.sent["ps on hosts"] == as_rows
        assert table.pooled == ("the owners of the rows add up" in table.reason)


def test_rows_travel_where_that_sends_less() -> None:
    """More ranks have more partial sums, and those that don't divide the examples cut bags apart."""
    forms = {"sum": BAGS["sum"], "two sums": BAGS["two sums"]}
    assert not pooled(planned_for(2, forms, (8, 9), least_saved=1 << 16).compiled.plan)  # too little for more messages
    assert [pooled(planned_for(n, forms, (8, 9)).compiled.plan) for n in (1, 2, 4, 5, 12)] == [
        set(),
        {"sum", "two sums"},
        {"sum"},
        set(),
        set(),
    ]


def test_segments_pay_by_the_bags_that_a_rank_has_ids_in() -> None:
    """Those in order leave half of the bags to the other of two ranks; the example tells."""
    forms = {name: SEGMENTS[name] for name in ("segments", "segments in any order")}
    ordered, mixed = (known(t.sizes) for t in planned_for(2, forms, (8, 9)).compiled.plan.tables)
    batch = batch_of(0)
    for sizes, key in ((ordered, "bag"), (mixed, "mixed")):
        there = [np.unique(part[(part >= 0) & (part < EXAMPLES)]).size for part in np.split(batch[key], 2)]
        assert (sizes.bags, sizes.bags_filled or EXAMPLES) == (EXAMPLES, max(there))
        assert sizes.bag_sums == 2 * max(there) and sizes.bags_of_all == sizes.bags
    assert ordered.bag_sums < mixed.bag_sums
    unknown = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch.items()}
    tables = planned_for(2, forms, (8, 9), batch=unknown).compiled.plan.tables
    assert [known(t.sizes).bags_filled for t in tables] == [EXAMPLES // 2 + 1] * 2  # as if bag by bag


def _sent(sizes: Sizes) -> int:
    return sent_bytes(sizes, "hosts")["ps on hosts"]


def test_bags_of_tables_that_are_exchanged_as_one_pay_together() -> None:
    """Each table by itself saves less than the least."""
    forms = {f"t{k}": BAGS["sum"] for k in range(6)}
    alone = planned_for(2, forms, (8, 9)).compiled.plan.tables
    spread = [dataclasses.replace(known(t.sizes), whole=False) for t in alone]
    saved = min(_sent(sizes.by_rows()) - _sent(sizes) for sizes in spread)
    for least, widths, pays in ((saved, range(8, 14), True), (3 * saved, range(8, 14), False), (3 * saved, (8,), True)):
        plan = planned_for(2, forms, widths, least_saved=least).compiled.plan
        assert pooled(plan) == (set(forms) if pays else set())


def test_a_plan_in_a_file_says_it(tmp_path: Path) -> None:
    plan = planned_for(2, {"sum": BAGS["sum"]}, (8,)).compiled.plan
    plan.save(tmp_path / "plan.json")
    assert autopar.Plan.load(tmp_path / "plan.json") == plan and pooled(plan) == {"sum"}
    other = planned_for(2, {"sum": OTHERS["nonlinear"]}, (8,)).compiled.plan
    assert "bags added up by owners 6 -> none" in str(plan.diff(other))


def test_bags_that_a_rank_does_not_find_again_travel_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_bags, "find_bags", lambda *_: None)
    forms = {name: BAGS[name] for name in ("sum", "mean", "where", "product")}
    planned = planned_for(2, forms, (8,))
    ops = {e.op for e in planned.compiled.program.block.equations}
    assert not pooled(planned.compiled.plan) and "ap.fetch" in ops and "ap.pool" not in ops
    for table in planned.compiled.plan.tables:
        assert "but its rows travel: bags aren't found in a rank's own program" in table.reason
        assert table.sent["ps on hosts"] > 4 * 8 * ROWS // 10
