"""Rates of figures that were measured in part."""

from __future__ import annotations

import pytest

from autopar.cost.rates import Curve, Rates, RowRate
from autopar.measure.figures import DENSE, ROWS, SIDE, Figures, assumed_note, rates_of_figures

LINE = Curve(((1.0, 1.0), (1025.0, 1025.0)))
ASSUMED = Rates(LINE, LINE, LINE, LINE, LINE, RowRate(8.0, 1.0), RowRate(8.0, 1.0), {}, flop_s=7.0)
METHODS = {"ps": 3.0, "allgather": -1.0, "allreduce_rows": 2.0}
ALL: Figures = {
    **{name: {"16": 2.0, "32": 4.0} for name in ("all_to_all", "all_gather", "all_reduce", "route", "walk", "update")},
    **{name: {"8": ROWS * 24.0, "16": ROWS * 40.0} for name in ("gather", "scatter")},
    "call": {"allreduce": 10.0},
    "more": METHODS,
    "dense": {str(size): float(k != 1) for k, size in enumerate(DENSE)},
    "product": {str(SIDE): 4.0 * SIDE**3},
    "moved_byte": {"batch": 0.5},
}


def test_all_figures() -> None:
    found = rates_of_figures(ALL, ASSUMED)
    assert not found.assumed and not assumed_note(found)
    assert found.all_to_all.points == found.update.points == ((16.0, 2.0), (32.0, 4.0))  # type: ignore[union-attr]
    assert found.gather == RowRate(8.0, 2.0)
    assert found.fixed == {"allreduce": 1.0, "ps": 4.0, "allgather": 0.0, "allreduce_rows": 3.0}
    assert (found.call_s, found.flop_s, found.moved_byte_s) == (9.0, 2.0, 0.5)
    assert found.dense is not None
    assert [s for _, s in found.dense.points] == [1.0] * 4, "more bytes don't take less"


def test_no_figures() -> None:
    found = rates_of_figures({}, ASSUMED)
    assert found.all_reduce == LINE and found.flop_s == 7.0 and found.dense is None and not found.fixed
    assert "AllToAll" in assumed_note(found) and "python -m autopar calibrate" in assumed_note(found)


def test_one_size_says_how_many_times_longer_others_take() -> None:
    found = rates_of_figures({"walk": {"65": 195.0}, "gather": {"8": ROWS * 32.0}, "update": {"65": 65.0}}, ASSUMED)
    assert found.walk(1025) == pytest.approx(3 * 1025) and found.walk(65) == pytest.approx(195)
    assert found.gather == RowRate(16.0, 2.0)
    assert found.update is not None
    assert found.update(65) == pytest.approx(65)
    assert {"walk", "gather", "update"} <= set(found.assumed)


def test_what_is_known_of_some_methods_compares_none() -> None:
    found = rates_of_figures({**ALL, "more": {"ps": 3.0}}, ASSUMED)
    assert found.fixed == {} and found.call_s == 10.0
    assert found.assumed == ("fixed",) and "what each method's call takes" in assumed_note(found)
