"""Which method "auto" takes, and the rates by which it does."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import jax
import pytest

import autopar
from autopar.compile import analyze_program, compile_program
from autopar.cost.exchange import DenseLoad, cheapest_together, sent_bytes, step_parts, step_seconds, step_terms
from autopar.cost.rates import Curve, Measurements
from autopar.ir.figures import Sizes
from autopar.ir.options import Options
from autopar.ir.program import Program
from autopar.ir.trace import block_of
from autopar.ways.table import way_of
from tests.support.meshes import mesh_of
from tests.support.rates import rates
from tests.support.row_steps import ids_in, make_state, same, step
from tests.support.settings import set_machine

SIZES = Sizes(
    devices=4,
    extent=1000,
    row_bytes=8,
    family_bytes=16,
    ids=20,
    requested=10,
    routed=81,
    capacity=5,
    owned=21,
    checks=True,
)


def test_a_curve_goes_through_its_points() -> None:
    curve = Curve(((10.0, 1.0), (20.0, 2.0), (40.0, 8.0)))
    assert [curve(x) for x in (1, 10, 15, 20, 30, 40, 50)] == [1.0, 1.0, 1.5, 2.0, 5.0, 8.0, 11.0]
    assert Curve(((10.0, 5.0), (20.0, 3.0)))(30) == 3.0, "noise does not make larger ones free"
    with pytest.raises(ValueError, match="growing sizes"):
        Curve(((2.0, 1.0), (1.0, 1.0)))


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        # (ids, rows, gradients) of 4 x 5 rows; nothing else uses an all_to_all.
        ("all_to_all", {"ps": 20 * (4 + 8 + 8), "allgather": 0, "allreduce_rows": 0, "allreduce": 0}),
        ("all_gather", {"ps": 0, "allgather": 40 * (4 + 8), "allreduce_rows": 4 * 20 * 4, "allreduce": 0}),
        ("all_reduce", {"ps": 0, "allgather": 0, "allreduce_rows": 81 * 8, "allreduce": 1000 * 8}),
        ("ps", {"ps": 1, "allgather": 0, "allreduce_rows": 0, "allreduce": 0}),
        ("route", {"ps": 20 + 20, "allgather": 20 + 40, "allreduce_rows": 80, "allreduce": 0}),
        ("gather_row", {"ps": 20 + 10 + 21, "allgather": 81, "allreduce_rows": 81, "allreduce": 0}),
        ("scatter_row", {"ps": 10 + 20 + 21, "allgather": 40 + 81, "allreduce_rows": 81, "allreduce": 0}),
        (
            "walk",
            {"ps": 42 * 24, "allgather": 162 * 24, "allreduce_rows": 81 * 8 + 162 * 24, "allreduce": 8000 + 2000 * 24},
        ),
    ],
)
def test_what_a_method_needs(part: str, expected: dict[str, int]) -> None:
    assert step_seconds(rates(**{part: 1.0}), SIZES) == pytest.approx(expected)


def test_shares_of_exchanges_add_up() -> None:
    """A message takes a second, and a millisecond for each byte. Large messages aren't shared."""
    figures = dataclasses.replace(rates(), all_to_all=Curve(((0.0, 1.0), (1000.0, 2.0))), fixed={"ps": 4.0})
    alone = step_seconds(figures, SIZES)["ps"]
    assert alone == pytest.approx(3 + 20 * (4 + 8 + 8) / 1000 + 4)
    alike = dataclasses.replace(SIZES, together=3)

    def seconds(*families: tuple[str, Sizes]) -> float:
        parts = step_parts(figures, DenseLoad(0.0, (), ()), families, 4)
        return sum(t.seconds for part in ("call", "tables") for t in parts[part])

    assert seconds(*[("ps", SIZES)] * 3) == pytest.approx(3 * alone - 2 * (3 + 4))
    assert seconds(*[("ps", alike)] * 3, ("ps", SIZES)) == pytest.approx(4 * alone - 3 * (3 + 4))
    assert seconds(("ps", SIZES), ("allgather", SIZES)) == pytest.approx(alone)
    large = dataclasses.replace(SIZES, row_bytes=1 << 16)
    by_itself, beside = (
        {t.name: t.seconds for t in step_terms(figures, large, others)["ps"]} for others in ({}, {"ps": 3})
    )
    assert beside["send rows"] == by_itself["send rows"]
    assert beside["send ids"] == pytest.approx(by_itself["send ids"] - 3 / 4)


def test_methods_are_chosen_for_all_families_together() -> None:
    """Alone each goes by what takes 5 s; together by what takes 8 s for all and 1 s for each."""
    figures = dataclasses.replace(
        rates(),
        all_to_all=Curve(((0.0, 8 / 3), (400.0, 8 / 3 + 1))),
        all_gather=Curve(((0.0, 100.0),)),
        all_reduce=Curve(((0.0, 0.0), (8000.0, 5.0))),
    )
    family, small = SIZES, dataclasses.replace(SIZES, extent=100)
    assert cheapest_together(figures, [family], Counter()) == ["allreduce"]
    assert cheapest_together(figures, [family, small], Counter()) == ["allreduce"] * 2
    assert cheapest_together(figures, [family] * 3 + [small], Counter()) == ["ps"] * 3 + ["allreduce"]
    assert cheapest_together(figures, [family], Counter(ps=2)) == ["ps"]


def test_bytes_by_hand() -> None:
    ring = 2 * 3 / 4
    assert sent_bytes(SIZES) == {
        "ps": 3 * 5 * (4 + 8 + 8),
        "allgather": 3 * 10 * (4 + 8),
        "allreduce_rows": 3 * 20 * 4 + ring * 81 * 8,
        "allreduce": ring * 8000,
    }
    # Devices that all have the whole batch ask owners for rows, and need nothing else of each other.
    replicated = dataclasses.replace(SIZES, spread=False)
    assert sent_bytes(replicated) == {"ps": 3 * 5 * (4 + 8), "allgather": 0, "allreduce_rows": 0, "allreduce": 0}


@pytest.mark.parametrize(
    ("slow", "fast"),
    [
        (("all_to_all", "walk"), ("allgather", "allreduce_rows")),
        (("all_gather", "all_reduce"), ("ps",)),
        (("all_to_all", "all_gather", "route"), ("allreduce",)),
        (("all_to_all", "all_reduce"), ("allgather",)),
    ],
)
def test_auto_takes_the_fastest(slow: tuple[str, ...], fast: tuple[str, ...]) -> None:
    state, batch = make_state(4000), ids_in(0, 4000)
    entry = autopar.parallelize(step, strategy="ps", mesh=mesh_of(4)).planned_for(state, batch)
    given = entry.compiled.analysed
    program = Program(block_of(entry.jaxpr), given.inputs, given.outputs)
    options, measured = Options(devices=4), Measurements(rates=rates(**dict.fromkeys(slow, 1.0)))
    (told,) = compile_program(analyze_program(program, way_of(options)), way_of(options), measured).plan.parameters
    assert told.method in fast and told.lifted == (told.method != "allreduce")
    assert told.seconds[told.method] == min(told.seconds.values())


def test_what_does_not_fit_is_sharded_and_trains_the_same() -> None:
    """Memory for a quarter of the state, and a bit: the table is spread, and doesn't leave for the hosts."""
    state, batch = make_state(4000), ids_in(0, 4000)
    size = sum(x.nbytes for x in jax.tree.leaves(state))
    free, tight = (autopar.parallelize(step, mesh=mesh_of(4), donate=False) for _ in range(2))
    slow = rates(all_to_all=1.0)
    for planned, memory in ((free, 2 * size), (tight, size // 2)):
        set_machine(planned, memory, slow)
        same(planned(state, batch), jax.jit(step)(state, batch))
    methods = [planned.plan.parameters[0].method for planned in (free, tight)]
    assert methods[0] != "ps" and methods[1] == "ps" and not tight.plan.on_hosts
    assert f"{methods[0]} would take " in tight.plan.parameters[0].reason


def test_explain_says_where_formulas_and_times_differ() -> None:
    """Rates are measured for `explain` alone."""
    planned, asked = autopar.parallelize(step, mesh=mesh_of(4), choose="formulas"), []

    def measure() -> Any:
        asked.append(1)
        return rates(all_to_all=1.0)

    planned.planner = dataclasses.replace(
        planned.planner, machine=dataclasses.replace(planned.planner.machine, rates=measure)
    )
    table = planned.planned_for(make_state(1000), ids_in(0, 1000)).compiled.plan.tables[0]
    assert table.method == "ps" and "table 3 (b=" in table.reason and not asked
    text = str(autopar.explain(planned, make_state(1000), ids_in(0, 1000)))
    assert "By this machine's rates other methods than table 3's are faster:" in text
    assert f"{table.path}: " in text and "in place of ps" in text
    with pytest.raises(autopar.ArgumentsError, match="choose='paper': there are 'times' and 'formulas'"):
        autopar.parallelize(step, choose="paper")
    with pytest.raises(autopar.ArgumentsError, match="choose= given together with plan="):
        autopar.parallelize(step, plan=autopar.plan(planned, make_state(1000), ids_in(0, 1000)), choose="times")
