"""What measuring may take, on machines however busy."""

from __future__ import annotations

import pytest

from autopar.launch.group import StoreGroup
from autopar.measure.loops import Budget

WEIGHTS = (2.0, 2.0, 1.0, 1.0, 9.0, 6.0, 1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("pace_s", "measured"),
    [
        (0.1, [True] * 9),
        (0.25, [True, True, True, True, True, False, True, True, True]),
        (0.5, [True, True, True, True, False, False, True, True, True]),
        (2.0, [True, False, False, False, False, False, False, False, False]),
    ],
)
def test_time_is_kept_however_slow_the_machine_is(pace_s: float, measured: list[bool]) -> None:
    """What is too long is left out, and what is shorter still measured."""
    now = 100.0

    def measure() -> bool:
        nonlocal now
        now += weight * pace_s
        return True

    budget = Budget(5.0, StoreGroup((0,)), clock=lambda: now)
    found = []
    for weight in WEIGHTS:
        found.append(budget.run(weight, measure) is not None)
    assert found == measured
    assert now <= 105


def test_nothing_begins_when_the_time_is_up() -> None:
    assert Budget(0.0, StoreGroup((0,))).run(1.0, lambda: 1.0) is None
