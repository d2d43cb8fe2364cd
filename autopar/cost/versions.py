"""Versions of an asynchronous pipeline: which one each task sees, and how many updates come until its minibatch ends.

SpecTrain's equations 5 and 6 say the latter where forwards and backwards take equally long, for as many stages as
devices. Here it is counted in the simulated schedule, whatever its times, stages and replicas are.
"""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.cost.stage_time import Simulated, StageTimes, simulate_schedule
from autopar.ir.asynchronous import Calls
from autopar.ir.schedule import Kind, Places, Schedule, Task

#: Of two times that are the same but for rounding, as a share of a minibatch's.
_SAME = 1e-6
#: Of slack, and the period that it may have beside the shortest one.
_MOST_SLACK, _NEAR = 3, 1.1


@dataclass(frozen=True, slots=True)
class Versions:
    """Says what tasks see in time.

    Attributes:
      seen: Task -> updates of its stage that are done when it starts.
      ahead: Task -> s, updates of its stage from its start to strictly before the start of stage 0's backward of its
        minibatch.
    """

    seen: Mapping[Task, int]
    ahead: Mapping[Task, int]


def simulate_versions(calls: Calls, times: StageTimes, minibatches: int | None = None) -> Versions:
    """Count versions in a simulated run.

    Args:
      calls: When each task is issued.
      times: How long each takes. An update takes no time of its own: it is part of the backward's.
      minibatches: How many; by default enough for a steady state.
    """
    count = minibatches or calls.enough
    schedule = calls.schedule(count)
    simulated = simulate_schedule(schedule, times)
    done = {
        device: sorted(_updated(calls, stage, device, schedule, simulated))
        for stage, replicas in enumerate(calls.places)
        for device in replicas
    }
    same = _SAME * simulated.seconds / count
    seen, ahead = dict[Task, int](), dict[Task, int]()
    for task, start in simulated.starts.items():
        ends = done[schedule.device_of(task.stage, task.microbatch)]
        until = simulated.starts[Task("B", 0, task.microbatch)]
        seen[task] = bisect.bisect_right(ends, start + same)
        ahead[task] = max(0, bisect.bisect_left(ends, until - same) - seen[task])
    return Versions(seen, ahead)


def by_the_equations(stage: int, stages: int) -> tuple[int, int]:
    """Returns s by SpecTrain's equations 5 and 6, of forwards and of backwards."""
    return stage // 2 + stages - stage - 1, stage // 2


def steps_ahead(calls: Calls, times: StageTimes) -> tuple[tuple[int, int], ...]:
    """Returns s of each stage in the steady state, of its forwards and of its backwards: that of most minibatches."""
    count = calls.enough
    found, steady = simulate_versions(calls, times, count).ahead, range(count // 3, count - calls.last - 1)

    def of(kind: Kind, stage: int) -> int:
        return statistics.mode(found[Task(kind, stage, m)] for m in steady)

    return tuple((of("F", k), of("B", k)) for k in range(len(calls.places)))


def choose_slack(places: Places, times: StageTimes) -> int:
    """Returns how many minibatches more, for each border between stages, hide the links: as few as come near the best.

    Without them there is one minibatch in flight for each device, and a stage waits where what comes back over links
    takes longer than the other stages compute.

    Args:
      places: The devices of each stage.
      times: Of tasks and sends.
    """
    calls = [Calls.soonest(places, slack=slack) for slack in range(_MOST_SLACK + 1)]
    periods = [simulate_schedule(each.schedule(each.enough), times).period for each in calls]
    return next(slack for slack, period in enumerate(periods) if period <= _NEAR * min(periods))


def _updated(calls: Calls, stage: int, device: int, schedule: Schedule, simulated: Simulated) -> Iterator[float]:
    """When a device has done each update of its stage: behind the backward that it follows, and behind what the device
    has been issued until then."""
    ends = simulated.ends
    issued = {"F": calls.forward(stage), "B": calls.backward(stage)}
    own = [(task.microbatch + issued[task.kind], ends[task]) for task in schedule.orders[device]]
    for minibatch in range(sum(task.stage == stage and task.kind == "B" for task in ends)):
        before = [end for call, end in own if call <= minibatch + calls.updates[stage]]
        yield max(ends[Task("B", calls.awaited(stage), minibatch)], *before, 0.0)
