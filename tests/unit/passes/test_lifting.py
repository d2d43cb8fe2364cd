"""`lift_rows`, `merge_pushes` and `split_segments` on programs written by hand: what they promise of any program."""

from __future__ import annotations

import dataclasses

import pytest

from autopar.compile import analyze_program, compile_program
from autopar.ir.local import ExchangeSegment, ProgramSegment
from autopar.ir.operations import OPERATIONS
from autopar.ir.options import Options
from autopar.ir.program import ArrayType, Program
from autopar.ir.verifier import verify_program
from autopar.ways.table import way_of
from tests.support.programs import ROWS, Builder, adagrad, add_rows, lookup, projected, scan, sgd, times, total, zeros

PROGRAMS = {p.__name__: p for p in (sgd, adagrad, scan, projected)}


def compiled(program: Program, after: str | None, **options: object) -> Program:
    """Returns a program after a pass, or after all."""
    given = Options(**{"strategy": "ps", **options})  # type: ignore[arg-type]
    made = compile_program(analyze_program(program, way_of(given)), way_of(given))
    return made.program if after is None else next(r.program for r in made.records if r.name == after)


def ops(program: Program) -> list[str]:
    return [e.op for e in program.block.walk()]


@pytest.mark.parametrize("name", PROGRAMS)
def test_rows_are_pulled_first_and_committed_last(name: str) -> None:
    """So a donated table is updated in place; and nothing else has as many rows."""
    program = compiled(PROGRAMS[name](), "lift_rows")
    found = [e.op for e in program.block.equations]
    commits = [k for k, op in enumerate(found) if op == "ap.commit"]
    assert commits and found.count("ap.route") == 1
    assert max(k for k, op in enumerate(found) if op == "ap.pull") < min(commits)
    written = {"ap.sweep", "ap.commit", "ap.fill"}
    for equation in program.block.equations:
        for var in equation.outputs:
            is_large = isinstance(var.type, ArrayType) and ROWS in var.shape
            assert not is_large or equation.op in written, f"{equation.op} makes {var.type}"


def test_nothing_is_lifted_of_a_dense_plan() -> None:
    program = compiled(sgd(), None, strategy="allreduce")
    assert not any(op.startswith("ap.") for op in ops(program))


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_padding_row_stands_for_others_where_they_are_constant(name: str) -> None:
    """What takes it for more, the verifier refuses."""
    program = compiled(PROGRAMS[name](), "lift_rows")
    table = program.block.inputs[0]
    equations = program.block.equations
    taking = [k for k, e in enumerate(equations) if e.op in OPERATIONS and OPERATIONS[e.op].takes_padding]
    for k in taking:
        hoped = dataclasses.replace(equations[k], params={**equations[k].params, "of": (table,)})
        block = program.block.with_equations([*equations[:k], hoped, *equations[k + 1 :]])
        with pytest.raises(AssertionError, match="taken for a constant, and are unchanged"):
            verify_program(dataclasses.replace(program, block=block))
    assert bool(taking) == (name == "adagrad")


def two_lookups() -> Program:
    """The gradient of two lookups of one table, added up."""
    b = Builder()
    table = b.input("table", "state", (ROWS, 2))
    pushed = b(zeros)
    for name in ("ids", "others"):
        ids = b.input(name, "batch", (4, 1), "int32")
        pushed = b(add_rows, pushed, ids, b(times(2.0), b(lookup, table, ids)))
    new = b(lambda t, g: t - g, table, pushed)
    return b.program("two", [(new, "table", 0), (b(total, b(times(1.0), pushed)), "sum", None)])


def test_gradients_of_two_lookups_are_delivered_once() -> None:
    before, after = (compiled(two_lookups(), name, devices=2) for name in ("lift_rows", "merge_pushes"))
    assert ops(before).count("ap.push") == 2 and "ap.deliver" not in ops(before)
    assert ops(after).count("ap.aggregate") == 2 and ops(after).count("ap.deliver") == 1 and "ap.push" not in ops(after)


def test_rows_of_two_lookups_are_fetched_once() -> None:
    assert ops(compiled(two_lookups(), "lift_rows", devices=2)).count("ap.lookup") == 2
    assert ops(compiled(two_lookups(), "lift_rows", devices=2)).count("ap.fetch") == 1
    assert "ap.fetch" not in ops(compiled(two_lookups(), "lift_rows")), "one device has all rows"


@pytest.mark.parametrize("devices", [1, 2])
def test_stages_read_what_earlier_ones_made(devices: int) -> None:
    options = {"strategy": {"table": ("ps", "hosts")}, "hosts": True, "devices": devices}
    program = compiled(projected(ids_count=8), "split_segments", **options)
    made = set(program.block.inputs)
    seen = []
    for item in program.segments.items:
        if isinstance(item, ProgramSegment):
            assert made.issuperset(item.block.inputs)
            made.update(item.block.outputs)
        else:
            assert isinstance(item, ExchangeSegment)
            for equation in item.equations:
                assert made.issuperset(a for a in equation.inputs if hasattr(a, "type") and not hasattr(a, "value"))
                made.update(equation.outputs)
            seen.append(item.op)
    assert made.issuperset(program.block.outputs)
    assert seen[:2] == ["ap.route", "ap.pull"] and seen[-1] == "ap.commit"
    assert ("ap.deliver" in seen) == (devices > 1), "a single rank has what it delivers"
