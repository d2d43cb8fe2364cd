"""What `choose` decides of a program, given options and measurements: nothing else is asked."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
import pytest

import autopar
from autopar import StrategyError
from autopar.compile import analyze_program
from autopar.cost.rates import Curve, Measurements, Rates
from autopar.ir.figures import HEADROOM
from autopar.ir.options import Options
from autopar.ir.plan import TablePlan
from autopar.ir.program import Program
from autopar.ir.program_plan import ProgramPlan
from autopar.passes.choose import choose, compares_methods
from autopar.run.step import ParallelStep
from autopar.ways.table import way_of
from tests.support.programs import ROWS, projected, sgd, tied
from tests.support.rates import RATES, calibrated, rates, slower

ADAMW, ADAGRAD = optax.adamw(1e-3), optax.adagrad(1e-2)
#: Rates of two cores, of slower and faster ones, and of one that was calibrated (tests/support/two_cores.json).
MACHINES = {"two cores": RATES, "slower": slower(2), "faster": slower(0.5), "calibrated": calibrated()}


def decided(program: Program, measured: Measurements | None = None, **options: Any) -> ProgramPlan:
    given = Options(**options)
    analysed = analyze_program(program, way_of(given)).program
    return choose(analysed, given, measured or Measurements())[0]


def tokens_on(machine: Rates, optimizer: Any, rows: Sequence[int], count: int = 512) -> ProgramPlan:
    """What is chosen for `count` ids in each of tables of so many rows of 64, on 4 devices."""

    def step(state: Any, ids: jax.Array) -> Any:
        tables, slots = state
        grads = jax.grad(lambda tables: sum((t[ids % len(t)] ** 2).sum() for t in tables))(tables)
        updates, slots = optimizer.update(grads, slots, tables)
        return (optax.apply_updates(tables, updates), slots), ids.sum()

    tables = [jax.ShapeDtypeStruct((count, 64), np.float32) for count in rows]
    shapes = (tables, jax.eval_shape(optimizer.init, tables)), jax.ShapeDtypeStruct((count,), np.int32)
    analysed = autopar.parallelize(step).planned_for(*shapes).compiled.analysed
    program, options = Program(analysed.block, analysed.inputs, analysed.outputs, "step"), Options(devices=4)
    ids = np.random.default_rng(0).zipf(1.2, count).astype(np.int32)
    found = analyze_program(program, way_of(options)).program
    looked_up = {space.family: [ids % space.extent] for space in found.rows.spaces}
    return choose(found, options, Measurements(rates=machine, ids=looked_up))[0]


def test_slow_collectives_keep_no_rows_from_being_exchanged() -> None:
    """Between processes the smallest AllReduce takes milliseconds, which is part of what each method takes."""
    slow = dataclasses.replace(RATES, all_reduce=Curve(((1e3, 5e-3), (4.2e6, 3e-2))))
    assert all(table.lifted for table in tokens_on(slow, ADAGRAD, [20_000]).plan.tables)


def test_what_can_be_lifted_is() -> None:
    (table,) = decided(sgd(), strategy="ps").plan.tables
    assert (table.path, table.method, table.lifted, table.axis, table.ids) == ("table", "ps", True, 0, 3)
    (table,) = decided(tied(), strategy="ps").plan.tables
    assert (table.method, table.lifted, table.refused) == ("allreduce", False, True)
    assert "over all rows of the table" in table.reason


def test_what_is_named_and_cannot_be_is_an_error() -> None:
    with pytest.raises(StrategyError, match="table can't be trained with 'allgather'"):
        decided(tied(), strategy={"table": "allgather"}, devices=2)
    with pytest.raises(StrategyError, match="no method 'nearest'"):
        decided(sgd(), strategy="nearest")


def test_rates_are_wanted_where_methods_are_compared() -> None:
    program = analyze_program(projected(), way_of(Options(devices=2))).program
    assert compares_methods(program, Options(devices=2))
    others = Options(devices=2, strategy="ps"), Options(devices=2, sparse="off"), Options(devices=2, choose="formulas")
    for options in (Options(), *others):
        assert not compares_methods(program, options)


def test_the_cheapest_method_is_taken() -> None:
    """By rates, and by bytes where there are none."""
    replicated = {"allgather", "allreduce_rows", "allreduce"}
    for name, others in (("all_to_all", replicated), ("all_reduce", {"ps", "allgather"})):
        (table,) = decided(projected(), Measurements(rates=rates(**{name: 1.0})), devices=2).plan.tables
        assert table.method in others and set(table.seconds) == {"ps", *replicated}
    (table,) = decided(projected(), devices=2).plan.tables
    assert not table.terms and table.sent[table.method] == min(table.sent.values())


@pytest.mark.parametrize(
    ("devices", "ids", "method"),
    [
        # 2 alpha b for ps, 2 (N-1) alpha b for allgather, 2 (N-1) b / N for a dense AllReduce
        (2, [0, 1, 0, 1, 2, 2], "ps"),  # alpha 1/3: 2/3, 2/3 and 1 of b
        (4, [3] * 8, "ps"),  # alpha 1/6: 1/3, 1 and 3/2
        (4, [*range(ROWS)] * 4, "allreduce"),  # alpha 1: 2, 6 and 3/2
        (2, [*range(ROWS)] * 2, "allreduce"),  # alpha 1: 2, 2 and 1
    ],
)
def test_formulas_decide_alone(devices: int, ids: list[int], method: str) -> None:
    """By table 3, whatever the machine's rates say; all of it is in the reason."""
    program, options = projected(ids_count=len(ids)), Options(devices=devices, choose="formulas")
    analysed = analyze_program(program, way_of(options)).program
    looked_up = {analysed.rows.spaces[0].family: [np.array(ids, np.int32)]}
    for machine in (rates(all_to_all=1.0), rates(all_reduce=1.0), None):
        (table,) = choose(analysed, options, Measurements(rates=machine, ids=looked_up))[0].plan.tables
        share = np.mean([np.unique(part).size for part in np.array_split(ids, devices)]) / ROWS
        assert table.method == method and f"N={devices}, alpha={share:.2%}" in table.reason


def test_formulas_are_no_reason_for_what_they_do_not_choose() -> None:
    """On accelerators rows don't wait: the table stays dense although table 3 says "ps"."""

    def step(state: Any, ids: jax.Array) -> Any:
        table, slots = state
        updates, slots = ADAMW.update(jax.grad(lambda t: (t[ids] ** 2).sum())(table), slots, table)
        return (optax.apply_updates(table, updates), slots), ids.sum()

    table = jax.ShapeDtypeStruct((5000, 64), np.float32)
    shapes = (table, jax.eval_shape(ADAMW.init, table)), jax.ShapeDtypeStruct((16,), np.int32)
    found = autopar.parallelize(step).planned_for(*shapes).compiled.analysed
    program = Program(found.block, found.inputs, found.outputs, "step")
    for accelerators in (False, True):
        options = {"devices": 4, "choose": "formulas", "accelerators": accelerators}
        (plan,) = decided(program, **options).plan.tables
        assert plan.lifted != accelerators and ("table 3" in plan.reason) != accelerators


def test_memory_that_does_not_suffice_shards_a_table() -> None:
    free = decided(projected(), Measurements(rates=rates(all_to_all=1.0), memory=1 << 20), devices=2)
    tight = decided(projected(), Measurements(rates=rates(all_to_all=1.0), memory=60), devices=2)
    assert free.plan.tables[0].method != "ps" == tight.plan.tables[0].method
    assert "would take" in tight.plan.tables[0].reason


def test_an_example_says_how_much_room_there_is() -> None:
    options = {"devices": 2, "strategy": "ps"}
    program = projected(ids_count=64)
    analysed = analyze_program(program, way_of(Options(**options))).program
    family = analysed.rows.spaces[0].family
    bound = choose(analysed, Options(**options))[0]
    ids = {family: [np.full((64,), ROWS - 1, np.int32)]}
    measured = choose(analysed, Options(**options), Measurements(ids=ids))[0]
    assert bound.plan.tables[0].capacity == 3 and not bound.plan.tables[0].tight, "an owner's rows"
    assert measured.plan.tables[0].capacity == 3, "capacities are multiples of 8: nothing is saved here"
    assert measured.families[0].bounds.imbalance is not None and bound.families[0].bounds.imbalance is None


def test_a_plan_that_is_followed_keeps_its_capacity_and_grows_it_with_the_headroom() -> None:
    def step(table: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        return table - 0.1 * jax.grad(lambda t: (t[ids] ** 2).sum())(table), ids.sum()

    shapes = jax.ShapeDtypeStruct((4000, 2), np.float32), jax.ShapeDtypeStruct((512,), np.int32)
    analysed = autopar.parallelize(step).planned_for(*shapes).compiled.analysed
    options: dict[str, Any] = {"devices": 2, "strategy": "ps"}
    ids = {analysed.rows.spaces[0].family: [np.arange(512, dtype=np.int32) % 32 * 100]}
    made = choose(analysed, Options(**options), Measurements(ids=ids))[0].plan
    capacities = [
        choose(analysed, Options(**options, plan=made, headroom=HEADROOM * k))[0].plan.tables[0].capacity
        for k in (1, 2, 100)
    ]
    assert made.tables[0].tight and made.tables[0].capacity == 32, "20 rows of an owner, with headroom, in steps of 8"
    assert capacities == [32, 64, 512], "the last is one that no batch exceeds"


def test_dense_leaves_in_shards() -> None:
    bound = decided(projected(), strategy={"w": "ps"}, devices=2)
    (leaf,) = bound.plan.dense
    assert leaf.sharded and leaf.sent and bound.shards == {1: 0}
    assert [p.path for p in bound.plan.parameters] == ["table", "w"]


@pytest.mark.parametrize("devices", [1, 2])
def test_accelerators_replay_no_rows_unless_they_are_told_to(devices: int) -> None:
    def step(state: Any, ids: jax.Array) -> Any:
        table, slots = state
        updates, slots = ADAMW.update(jax.grad(lambda t: (t[ids] ** 2).sum())(table), slots, table)
        return (table + updates, slots), ids.sum()

    table = jax.ShapeDtypeStruct((2**21, 16), np.float32)
    shapes = (table, jax.eval_shape(ADAMW.init, table)), jax.ShapeDtypeStruct((32,), np.int32)
    analysed = autopar.parallelize(step).planned_for(*shapes).compiled.analysed
    there: dict[str, Any] = {"devices": devices, "accelerators": True}
    for options, defers in (({"devices": devices}, True), (there, False), ({**there, "strategy": "ps"}, True)):
        assert choose(analysed, Options(**options))[0].plan.defers == defers


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(("rows", "waits"), [(2000, False), (200_000, True)])
def test_rows_wait_where_that_saves_more_than_it_may_cost(machine: str, rows: int, waits: bool) -> None:
    """A GPT's tokens with AdamW: of 2,000 rows the dense update is as fast on every machine."""
    assert tokens_on(MACHINES[machine], ADAMW, [rows]).plan.defers == waits


def test_a_row_that_many_ids_name_is_brought_up_to_date_once() -> None:
    """8,192 Zipf ids name some 2,400 rows, which costs less than half of what their exchange saves."""
    assert tokens_on(RATES, ADAMW, [60_000], count=8_192).plan.defers


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(("rows", "lifted"), [([2000], 0), ([20_000], 1), ([20_000, 2000, 3000], 3)])
def test_exchanges_of_rows_save_more_than_they_may_cost(machine: str, rows: Sequence[int], lifted: int) -> None:
    """Tokens with Adagrad: of 2,000 rows the dense gradient goes along with the others, unless rows of other tables are
    exchanged anyway."""
    tables = tokens_on(MACHINES[machine], ADAGRAD, rows).plan.tables
    assert sum(t.lifted for t in tables) == lifted
    assert lifted or "may cost a busy step more than they save" in tables[0].reason
    assert all(min(t.seconds, key=t.seconds.__getitem__) != "allreduce" for t in tables), (
        "each by itself would be faster"
    )


@pytest.mark.parametrize(
    ("rows", "strategy", "lifted"), [(10_000, "auto", False), (2**21, "auto", True), (10_000, "ps", True)]
)
def test_on_an_accelerator_a_table_is_lifted_for_its_size(rows: int, strategy: str, lifted: bool) -> None:
    def step(table: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        return table - 0.1 * jax.grad(lambda t: (t[ids] ** 2).sum())(table), ids.sum()

    planner = autopar.parallelize(step, strategy=strategy).planner
    there = ParallelStep(dataclasses.replace(planner, options=dataclasses.replace(planner.options, accelerators=True)))
    shapes = jax.ShapeDtypeStruct((rows, 16), np.float32), jax.ShapeDtypeStruct((32,), np.int32)
    (table,) = autopar.plan(there, *shapes).tables
    assert table.lifted == lifted and (lifted or "the dense update is faster" in table.reason)


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_tables_that_are_alike_wait_for_one_exchange(machine: Rates) -> None:
    """Of many tables each has a share of the time of a call."""
    rows = [50_000 + 1_000 * k for k in range(12)]
    (alone,), few, many = (tokens_on(machine, ADAGRAD, some).plan.tables for some in (rows[:1], rows[:3], rows))
    assert {t.method for t in many} == {"ps"} and all(t.sizes and t.sizes.together == 12 and t.cyclic for t in many)
    assert all(t.sizes and t.sizes.together == 1 for t in few)
    assert many[0].seconds["ps"] < alone.seconds["ps"] / 2
    assert many[0].sent == {**few[0].sent, "ps": many[0].sent["ps"]}


def beside_hosts(sizes: Mapping[str, tuple[int, int]], hosted: str, ids: np.ndarray) -> Sequence[TablePlan]:
    """Plans tables of which one is named for hosts, on 4 ranks; returns their plans. `sizes`: name -> (rows, width)."""

    def step(tables: Any, ids: jax.Array) -> Any:
        grads = jax.grad(lambda tables: sum((t[ids % len(t)] ** 2).sum() for t in tables.values()))(tables)
        return {name: t - 0.1 * grads[name] for name, t in tables.items()}, ids.sum()

    shapes = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in sizes.items()}
    planned = autopar.parallelize(step).planned_for(shapes, jax.ShapeDtypeStruct(ids.shape, np.int32))
    block = planned.compiled.analysed
    options = Options(devices=4, hosts=True, strategy={hosted: ("ps", "hosts")})
    found = analyze_program(Program(block.block, block.inputs, block.outputs, "step"), way_of(options)).program
    looked_up = {space.family: [ids % space.extent] for space in found.rows.spaces}
    return choose(found, options, Measurements(ids=looked_up))[0].plan.tables


def test_beside_tables_on_hosts_those_stay_whole_of_which_a_rank_asks_for_all_rows() -> None:
    """A rank of 4 looks up 128 ids: all of 128 rows, or some of 1,000, whose update would be quick, but not the sum of
    their gradients. Of 40 small rows that sum is quicker than an exchange, however few are asked for."""
    sizes = {"a": (128, 512), "b": (1000, 64), "c": (9000, 64), "d": (40, 5)}
    for zipf in (False, True):
        random = np.random.default_rng(0)
        ids = (random.zipf(1.2, 512) * 7919 if zipf else np.arange(512)).astype(np.int32)
        a, b, c, d = beside_hosts(sizes, "c", ids)
        assert c.where == b.where == "hosts" and (d.lifted, d.where) == (False, "devices")
        assert (a.lifted, a.method, a.where) == ((True, "ps", "hosts") if zipf else (False, "allreduce", "devices"))
        assert zipf or "a rank asks for 128 of 128 rows: their whole gradient takes no more bytes" in a.reason


@pytest.mark.parametrize(
    ("widths", "hosted", "join"),
    [
        ([16] * 3, "big", False),
        ([16] * 8, "big", True),
        ([9, 10, 11, 12, 13, 14, 15, 16], "big", False),
        ([16] * 4, "t0", True),
    ],
    ids=["three", "alike", "of many widths", "like one that is there"],
)
def test_small_tables_join_those_on_hosts_by_what_they_save_together(
    widths: Sequence[int], hosted: str, join: bool
) -> None:
    """A table of 600 rows saves less than 64 KiB. Those that are alike share an exchange, four or more."""
    sizes = {"big": (9000, 64), **{f"t{k}": (600 + k, width) for k, width in enumerate(widths)}}
    big, *small = beside_hosts(sizes, hosted, np.random.default_rng(0).integers(0, 1 << 20, 512).astype(np.int32))
    saved = [t.sent["allreduce"] - t.sent["ps on hosts"] for t in small if t.sent]
    assert big.where == "hosts" and all(0 < each < 1 << 16 for each in saved)
    assert [t.where == "hosts" for t in small] == [join or hosted == f"t{k}" for k in range(len(small))]
    assert join or all("their whole gradient takes hardly more bytes" in t.reason for t in small)
