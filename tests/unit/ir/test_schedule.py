"""Schedules: no deadlock, the memory that they promise, and the bubble of equal stages."""

from __future__ import annotations

import itertools

import pytest

from autopar.ir.schedule import SCHEDULES, Schedule, Task, simulate_schedule

SIZES = tuple(itertools.product((1, 2, 3, 4, 8), (1, 2, 3, 8, 32)))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("stages", "count"), SIZES)
def test_every_task_once_in_an_order_that_can_be_run(name: str, stages: int, count: int) -> None:
    schedule = SCHEDULES[name](stages, count)
    tasks = list(schedule.issue_order())
    assert sorted(map(str, tasks)) == sorted(f"{k}{s}({m})" for k in "FB" for s in range(stages) for m in range(count))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("stages", "count"), SIZES)
@pytest.mark.parametrize("backward", [1.0, 2.0])
def test_bubble_and_memory_of_equal_stages(name: str, stages: int, count: int, backward: float) -> None:
    found = simulate_schedule(SCHEDULES[name](stages, count), [1.0] * stages, [backward] * stages)
    assert found.bubble == pytest.approx((stages - 1) / (count + stages - 1))
    limits = [count if name == "gpipe" else min(stages - k, count) for k in range(stages)]
    assert list(found.held) == limits


def test_stages_that_wait_for_each_other() -> None:
    first = (Task("B", 0, 0), Task("F", 0, 0))
    second = (Task("F", 1, 0), Task("B", 1, 0))
    with pytest.raises(ValueError, match=r"wait for each other forever: B0\(0\), F1\(0\)"):
        list(Schedule("wrong", (first, second)).issue_order())
