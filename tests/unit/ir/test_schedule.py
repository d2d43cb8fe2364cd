"""Schedules: no deadlock, the memory that they promise, and the bubble of equal stages."""

from __future__ import annotations

import itertools

import pytest

from autopar.cost.stage_time import StageTimes, simulate_schedule
from autopar.ir.pipeline import Pipeline
from autopar.ir.schedule import Schedule, Task

SIZES = tuple(itertools.product((1, 2, 3, 4, 8), (1, 2, 3, 8, 32)))
CHAINS = ("gpipe", "1f1b", "zero-bubble")


def _times(stages: int, **seconds: float) -> StageTimes:
    return StageTimes({kind: [each] * stages for kind, each in seconds.items()})


def _check_complete(schedule: Schedule, kinds: str, stages: int, count: int) -> None:
    tasks = list(schedule.issue_order())
    assert sorted(map(str, tasks)) == sorted(f"{k}{s}({m})" for k in kinds for s in range(stages) for m in range(count))


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize(("stages", "count"), SIZES)
def test_every_task_once_in_an_order_that_can_be_run(name: str, stages: int, count: int) -> None:
    schedule = Pipeline(stages, name, count).scheduled(count)
    _check_complete(schedule, "FBW" if name == "zero-bubble" else "FB", stages, count)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "count"), SIZES)
@pytest.mark.parametrize("backward", [1.0, 2.0])
def test_bubble_and_memory_of_equal_stages(name: str, stages: int, count: int, backward: float) -> None:
    schedule = Pipeline(stages, name, count).scheduled(count)
    simulated = simulate_schedule(schedule, _times(stages, F=1.0, B=backward))
    assert simulated.bubble == pytest.approx((stages - 1) / (count + stages - 1))
    limits = [count if name == "gpipe" else min(stages - k, count) for k in range(stages)]
    assert list(simulated.held) == limits


@pytest.mark.parametrize(("stages", "count"), [(s, m) for s, m in SIZES if m >= s])
def test_zero_bubble_waits_a_third_in_the_memory_of_the_first_stage(stages: int, count: int) -> None:
    """H1's bubble is (S - 1)(F + B - W); gradients of weights apart from those of inputs, 1F1B's (S - 1)(F + B + W)."""
    times = _times(stages, F=1.0, B=1.0, W=1.0)
    simulated = simulate_schedule(Pipeline(stages, "zero-bubble", count).scheduled(count), times)
    assert simulated.seconds == pytest.approx(3 * count + (stages - 1))
    assert max(simulated.held) <= min(stages, count)
    whole = simulate_schedule(Pipeline(stages, "1f1b", count).scheduled(count), times)
    assert whole.seconds == pytest.approx(3 * count + 3 * (stages - 1))


@pytest.mark.parametrize(("devices", "chunks"), list(itertools.product((1, 2, 3, 4, 8), (2, 3, 4))))
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_interleaved_stages_wait_for_a_part_of_the_time(devices: int, chunks: int, groups: int) -> None:
    stages, count = devices * chunks, devices * groups
    pipeline = Pipeline(stages, "interleaved", count, stages_per_device=chunks)
    schedule = pipeline.scheduled(count)
    assert pipeline.devices == schedule.devices == devices
    _check_complete(schedule, "FB", stages, count)
    simulated = simulate_schedule(schedule, _times(stages, F=1.0, B=2.0))
    assert simulated.seconds == pytest.approx(3 * (chunks * count + devices - 1))


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("replicas", list(itertools.product((1, 2, 3), repeat=3)))
def test_replicas_take_microbatches_in_turn(name: str, replicas: tuple[int, ...]) -> None:
    for count in (1, 2, 5, 8):
        schedule = Pipeline(3, name, count, replicas).scheduled(count)
        _check_complete(schedule, "FBW" if name == "zero-bubble" else "FB", 3, count)
        for device, order in enumerate(schedule.orders):
            assert all(schedule.device_of(task.stage, task.microbatch) == device for task in order)
    even = Pipeline(3, "1f1b", 12, replicas).scheduled(12)
    simulated = simulate_schedule(even, StageTimes({"F": list(replicas), "B": list(replicas)}))
    assert simulated.seconds <= 24 + 2 * 3 * sum(replicas)  # a stage of n devices takes n times as long for each


def test_sends_take_time_and_follow_one_another() -> None:
    seconds = {"F": [1.0, 1.0], "B": [1.0, 1.0]}
    times = StageTimes(seconds, ahead=[5.0, 0.0], back=[0.0, 5.0])
    simulated = simulate_schedule(Pipeline(2, "gpipe", 2).scheduled(2), times)
    assert simulated.starts[Task("F", 1, 0)] == 6.0
    assert simulated.starts[Task("F", 1, 1)] == 11.0  # the link was taken until 6
    same = Pipeline(2, "interleaved", 2, stages_per_device=2).scheduled(2)
    assert simulate_schedule(same, StageTimes(seconds, ahead=[5.0], back=[5.0])).seconds == 8.0


def test_devices_that_wait_for_each_other() -> None:
    first = (Task("B", 0, 0), Task("F", 0, 0))
    second = (Task("F", 1, 0), Task("B", 1, 0))
    with pytest.raises(ValueError, match=r"wait for each other forever: B0\(0\), F1\(0\)"):
        list(Schedule("wrong", ((0,), (1,)), (first, second)).issue_order())
