"""Versions in asynchronous pipelines, counted in simulated schedules."""

from __future__ import annotations

import pytest

from autopar.cost.stage_time import (
    StageTimes,
    by_the_equations,
    choose_slack,
    simulate_schedule,
    simulate_versions,
    steps_ahead,
)
from autopar.ir.pipeline import Calls
from autopar.ir.schedule import Task


def calls(*replicas: int, stashes: bool = False, slack: int = 0) -> Calls:
    """Of stages of so many devices, whose updates are behind their backwards."""
    ends = [sum(replicas[: k + 1]) for k in range(len(replicas))]
    stage_devices = tuple(tuple(range(end - count, end)) for count, end in zip(replicas, ends, strict=True))
    return Calls.soonest(stage_devices, stashes=stashes, slack=slack)


def times(stages: int, forward: float, backward: float) -> StageTimes:
    return StageTimes({"F": [forward] * stages, "B": [backward] * stages})


@pytest.mark.parametrize("stages", range(1, 9))
def test_equations_5_and_6_hold_where_forwards_take_as_long_as_backwards(stages: int) -> None:
    expected = tuple(by_the_equations(k, stages) for k in range(stages))
    assert steps_ahead(calls(*[1] * stages), times(stages, 1, 1)) == expected


@pytest.mark.parametrize("stages", range(2, 9))
def test_they_do_not_where_backwards_take_twice_as_long(stages: int) -> None:
    """From four stages on."""
    expected = tuple(by_the_equations(k, stages) for k in range(stages))
    assert (steps_ahead(calls(*[1] * stages), times(stages, 1, 2)) == expected) == (stages < 4)


def test_by_hand() -> None:
    """Four stages, B = 2 F, as drawn: stage 1's forward starts with stage 0's two minibatches behind it ..."""
    assert steps_ahead(calls(1, 1, 1, 1), times(4, 1, 2)) == ((3, 0), (2, 0), (2, 1), (2, 2))
    # Figure 6: the first stage has two devices, each of which takes twice as long.
    first = StageTimes({"F": [2.0, 1.0, 1.0], "B": [4.0, 2.0, 2.0]})
    assert steps_ahead(calls(2, 1, 1), first) == ((2, 0), (1, 0), (1, 1))


@pytest.mark.parametrize("replicas", [(1,), (1, 1), (1, 1, 1, 1), (2, 1, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize("seconds", [(1.0, 1.0), (1.0, 2.0), (3.0, 1.0), (1.0, 0.3)])
@pytest.mark.parametrize("slack", [0, 2])
def test_what_is_seen_in_time_is_what_the_calls_say(
    replicas: tuple[int, ...], seconds: tuple[float, float], slack: int
) -> None:
    """Whatever tasks take. A version is never newer, or older, than the order of the devices' tasks has it."""
    made, uneven = calls(*replicas, slack=slack), [1.0 + 0.7 * k for k in range(len(replicas))]
    each = StageTimes({kind: [s * u for u in uneven] for kind, s in zip("FB", seconds, strict=True)})
    for task, version in simulate_versions(made, each).seen.items():
        assert version == made.version(task.kind, task.stage, task.microbatch)


@pytest.mark.parametrize(
    ("stages", "send", "slack", "period"),
    [(4, 0.0, 0, 3.0), (1, 9.0, 0, 3.0), (4, 1.0, 1, 3.0), (2, 2.9, 2, 3.0), (2, 5.0, 1, 5.0), (4, 3.0, 2, 3.0)],
)
def test_minibatches_hide_links(stages: int, send: float, slack: int, period: float) -> None:
    """As many more are in flight as it takes, until a stage, or a link, never waits."""
    made, each = calls(*[1] * stages), times(stages, 1, 2)
    each = StageTimes(each.seconds, ahead=[send] * stages, back=[send] * stages)
    assert choose_slack(made.stage_devices, each) == slack
    hidden = calls(*[1] * stages, slack=slack)
    found = [simulate_schedule(c.schedule(c.enough), each).period for c in (made, hidden)]
    assert found[1] == pytest.approx(period, rel=0.1) and (slack == 0 or found[0] > 1.1 * found[1])


def test_nobody_waits_once_the_pipeline_is_full() -> None:
    full = simulate_schedule(calls(1, 1, 1, 1).schedule(40), times(4, 1, 2))
    assert full.period == pytest.approx(3.0)
    starts, ends = full.starts, full.ends
    assert starts[Task("B", 3, 20)] == ends[Task("F", 3, 20)]


def test_versions_of_a_stash() -> None:
    made = calls(1, 1, 1, stashes=True)
    assert [made.stashed(k) for k in range(3)] == [2, 1, 0]
    assert made.version("F", 0, 5) == made.version("B", 0, 5) == 3
    assert [calls(1, 1, 1).version("B", k, 5) for k in range(3)] == [5, 5, 5]
