"""Where tables can be: what a plan shows, and the options of the next one."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.compile import analyze_program
from autopar.ir.options import Options
from autopar.ir.program import Program
from autopar.passes.choose import Move, choose, move_tables
from autopar.ways.table import way_of
from tests.support.programs import projected, tied


def moved(program: Program, memory: int | None, **options: Any) -> Move | None:
    given = Options(**options)
    analysed = analyze_program(program, way_of(given)).program
    bound, _ = choose(analysed, given)
    return move_tables(analysed, bound, given, memory, devices=1, ranks=3)


@pytest.mark.parametrize(
    ("memory", "options"), [(None, {}), (1 << 30, {}), (64, {"strategy": "ps"}), (64, {"may_leave": False})]
)
def test_tables_stay(memory: int | None, options: dict[str, Any]) -> None:
    """Without a known memory, with enough of it, and where the user has said where they are."""
    assert moved(projected(), memory, **options) is None


def test_what_does_not_fit_leaves() -> None:
    move = moved(projected(), 64)
    assert move is not None and move.paths == ("table",) and "of a device" in move.reason
    assert (move.options.hosts, move.options.devices) == (True, 3)
    assert move.options.strategy == {"table": ("ps", "hosts"), "**": "auto"}


def test_what_cannot_be_lifted_stays() -> None:
    assert moved(tied(), 64) is None


def test_nothing_can_be_on_hosts() -> None:
    move = moved(tied(), None, hosts=True, devices=3, strategy=("ps", "hosts"))
    assert move is not None and not move.paths
    assert (move.options.hosts, move.options.devices, move.options.strategy) == (False, 1, "auto")
