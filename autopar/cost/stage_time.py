"""Simulates a pipeline's schedule task by task, and predicts a step's seconds, memory and stale versions from it.

Without a flush a task misses updates. The version that it sees, and the updates until its minibatch ends, are counted
in the simulated schedule, whatever its times, stages and replicas. SpecTrain's equations 5 and 6 give the latter where
forwards and backwards take equally long, for as many stages as devices.
"""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.ir.pipeline import Calls
from autopar.ir.plan import PipelinePlan
from autopar.ir.schedule import Kind, Schedule, StageDevices, Task

#: Times are equal up to this fraction of a minibatch's, for rounding.
_SAME = 1e-6
#: Most slack, and how much longer than the shortest a period may be.
_MOST_SLACK, _NEAR = 3, 1.1


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Durations of the tasks of each stage."""

    #: Kind of task -> seconds for each stage. "B" is all of the backward where a schedule has no "W".
    seconds: Mapping[str, Sequence[float]]
    #: Seconds of the sends of each stage to the next one, and to the one before.
    ahead: Sequence[float] = ()
    back: Sequence[float] = ()
    #: Activations of a microbatch that each stage holds from F to B or W, in any unit; 1 each by default.
    activations: Sequence[float] = ()

    def of(self, task: Task, splits_backward: bool) -> float:
        seconds = self.seconds[task.kind][task.stage]
        whole = task.kind == "B" and not splits_backward and "W" in self.seconds
        return seconds + self.seconds["W"][task.stage] if whole else seconds


@dataclass(frozen=True, slots=True)
class Simulated:
    """A simulated schedule."""

    seconds: float  #: From the first task's start to the last one's end.
    busy: tuple[float, ...]  #: Seconds that each device computes.
    #: Peak activations of each device, which holds them from the start of F to the end of B or W.
    held: tuple[float, ...]
    starts: Mapping[Task, float]
    ends: Mapping[Task, float]

    @property
    def bubble(self) -> float:
        """Fraction of the devices' time in which they wait."""
        return 1 - sum(self.busy) / (len(self.busy) * self.seconds) if self.seconds else 0.0

    @property
    def period(self) -> float:
        """Seconds between the ends of two minibatches that follow one another without a flush."""
        ends = sorted(end for task, end in self.ends.items() if task.kind == "B" and task.stage == 0)
        half = len(ends) // 2
        return (ends[-1] - ends[half]) / max(1, len(ends) - 1 - half)


def simulate_schedule(schedule: Schedule, times: StageTimes) -> Simulated:
    """Simulates the schedule. Sends overlap with tasks; those between the same two devices follow one another."""
    starts: dict[Task, float] = {}
    ends: dict[Task, float] = {}
    links: dict[tuple[int, int], float] = {}
    free, busy = [0.0] * schedule.devices, [0.0] * schedule.devices
    held, most = [0.0] * schedule.devices, [0.0] * schedule.devices
    last = "W" if schedule.splits_backward else "B"
    for task in schedule.issue_order():
        device = schedule.device_of(task.stage, task.microbatch)
        needed, ready = schedule.needed(task), 0.0
        if needed is not None:
            ready, link = ends[needed], (schedule.device_of(needed.stage, needed.microbatch), device)
            sends = times.ahead if needed.stage < task.stage else times.back
            if sends and link[0] != device:
                ready = max(ready, links.get(link, 0.0)) + sends[needed.stage]
                links[link] = ready
        seconds = times.of(task, schedule.splits_backward)
        starts[task] = max(free[device], ready, *(ends[other] for other in schedule.waits(task)))
        free[device] = ends[task] = starts[task] + seconds
        busy[device] += seconds
        size = times.activations[task.stage] if times.activations else 1.0
        held[device] += size if task.kind == "F" else -size if task.kind == last else 0.0
        most[device] = max(most[device], held[device])
    return Simulated(max(ends.values()), tuple(busy), tuple(most), starts, ends)


def stage_times(plan: PipelinePlan) -> StageTimes:
    """Returns the durations for a microbatch, in floating-point operations if rates aren't known."""
    stages = plan.stages
    ahead = [plan.send_byte_s * stage.ahead_bytes for stage in stages]
    back = [plan.send_byte_s * stage.back_bytes for stage in stages]
    activations = [float(stage.activation_bytes) for stage in stages]
    kinds = {kind: [s.seconds.get(kind, 0.0) for s in stages] for kind in ("F", "B", "W")}
    if not plan.is_timed:
        kinds = {kind: [part * s.flops for s in stages] for kind, part in (("F", 1 / 3), ("B", 2 / 3))}
        kinds["W"] = [0.0] * len(stages)
    if plan.updates:  # behind each backward
        kinds["B"] = [seconds + stage.update_s for seconds, stage in zip(kinds["B"], stages, strict=True)]
    return StageTimes(kinds, ahead, back, activations)


def simulate_pipeline(plan: PipelinePlan) -> Simulated:
    return simulate_schedule(plan.scheduled, stage_times(plan))


def pipeline_seconds(plan: PipelinePlan) -> float:
    """Predicts the seconds of a step, or without a flush of a minibatch; 0 where rates aren't known.

    A step has the microbatches, the slowest update with the sums of its replicas, and exchanges of weights that several
    stages use.
    """
    if not plan.is_timed:
        return 0.0
    if plan.updates:
        return simulate_pipeline(plan).period
    updates = dict.fromkeys(range(plan.devices), 0.0)
    for stage in plan.stages:
        own = stage.update_s + 2 * (len(stage.devices) - 1) * stage.gradient_bytes * plan.send_byte_s
        updates |= {device: updates[device] + own for device in stage.devices}
    return simulate_pipeline(plan).seconds + max(updates.values()) + plan.tied_bytes * plan.send_byte_s


def pipeline_memory(plan: PipelinePlan) -> tuple[int, ...]:
    """Returns the bytes that each device holds: state, sums of gradients, activations, versions of the weights."""
    sizes = [round(activations) for activations in simulate_pipeline(plan).held]
    for k, stage in enumerate(plan.stages):
        for device in stage.devices:
            sizes[device] += stage.state_bytes + stage.gradient_bytes + plan.version_bytes(k)
    return tuple(sizes)


@dataclass(frozen=True, slots=True)
class Versions:
    """The versions that tasks see."""

    seen: Mapping[Task, int]  #: Task -> updates of its stage that are done when it starts.
    #: Task -> s, updates of its stage from its start until stage 0's backward of its minibatch starts.
    ahead: Mapping[Task, int]


def simulate_versions(calls: Calls, times: StageTimes, minibatches: int | None = None) -> Versions:
    """Simulates the versions that tasks see; an update's time is part of its backward's. `minibatches`: a steady
    state's by default."""
    count = minibatches or calls.enough
    schedule = calls.schedule(count)
    simulated = simulate_schedule(schedule, times)
    done = {
        device: sorted(_updated(calls, stage, device, schedule, simulated))
        for stage, replicas in enumerate(calls.stage_devices)
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
    """Returns s of forwards and of backwards by SpecTrain's equations 5 and 6."""
    return stage // 2 + stages - stage - 1, stage // 2


def steps_ahead(calls: Calls, times: StageTimes) -> tuple[tuple[int, int], ...]:
    """Returns s of each stage's forwards and backwards in the steady state, the most frequent one."""
    count = calls.enough
    found, steady = simulate_versions(calls, times, count).ahead, range(count // 3, count - calls.last - 1)

    def of(kind: Kind, stage: int) -> int:
        return statistics.mode(found[Task(kind, stage, m)] for m in steady)

    return tuple((of("F", k), of("B", k)) for k in range(len(calls.stage_devices)))


def choose_slack(stage_devices: StageDevices, times: StageTimes) -> int:
    """Returns the least slack whose period is near the best one.

    Without slack there is one minibatch in flight for each device, and a stage waits where values take longer to come
    back over links than the other stages compute.
    """
    calls = [Calls.soonest(stage_devices, slack=slack) for slack in range(_MOST_SLACK + 1)]
    periods = [simulate_schedule(each.schedule(each.enough), times).period for each in calls]
    return next(slack for slack, period in enumerate(periods) if period <= _NEAR * min(periods))


def _updated(calls: Calls, stage: int, device: int, schedule: Schedule, simulated: Simulated) -> Iterator[float]:
    """Yields when a device has done each update of its stage, after the backward and all that was issued before it."""
    ends = simulated.ends
    issued = {"F": calls.forward(stage), "B": calls.backward(stage)}
    own = [(task.microbatch + issued[task.kind], ends[task]) for task in schedule.orders[device]]
    for minibatch in range(sum(task.stage == stage and task.kind == "B" for task in ends)):
        before = [end for call, end in own if call <= minibatch + calls.updates[stage]]
        yield max(ends[Task("B", calls.awaited(stage), minibatch)], *before, 0.0)


# --- a chain of layers is cut into stages by dynamic programming, so that the slowest stage is fastest ---
#
# Source: PipeDream (Narayanan et al., 2019), section 3.1: A(j, m), the time of the slowest stage of the best pipeline
# of layers 0 to j on m devices. Here with every send, the memory of states and activations, and the AllReduce of
# replicas' gradients: it is made once a step, so that each of M microbatches bears an M-th of it.


#: Times are equal up to this factor, for rounding.
_EQUAL = 1 + 1e-9


@dataclass(frozen=True, slots=True)
class Layer:
    """The part of a step between two possible cuts."""

    seconds: float  #: Seconds of a microbatch's forward and backward.
    sent: float = 0.0  #: Bytes of a microbatch that cross the border ahead of it, both ways.
    state: float = 0.0  #: Bytes of weights with their slots.
    gradient: float = 0.0  #: Bytes of the weights' gradients.
    activation: float = 0.0  #: Bytes that a microbatch's forward leaves for its backward.


@dataclass(frozen=True, slots=True)
class Partition:
    """Stages of a chain."""

    ends: tuple[int, ...]  #: Each stage's end, the first layer of the next one.
    replicas: tuple[int, ...]  #: Devices of each stage.
    seconds: float  #: Seconds of the slowest stage or send, for each microbatch.


@dataclass(frozen=True, slots=True)
class Chain:
    """Layers in the order of the forward pass, and the devices (all are used) that run them."""

    layers: Sequence[Layer]
    devices: int
    microbatches: int  #: M.
    byte_s: float = 0.0  #: Seconds for each byte that is sent from a device to another.
    memory: float | None = None  #: Bytes of each device; None: no limit.


def partition(chain: Chain, stages: int | None = None, replicas: Sequence[int] | None = None) -> Partition | None:
    """Finds the best partition into `stages` stages (default: any number), with given `replicas` (default: any).

    Among equally good ones it has the least seconds in all; None if no stages fit the memory.
    """
    count, devices = len(chain.layers), chain.devices
    prefix = {
        name: np.cumsum([0.0, *(getattr(x, name) for x in chain.layers)])
        for name in ("seconds", "state", "gradient", "activation")
    }
    sends = np.array([0.0, *(x.sent * chain.byte_s for x in chain.layers[1:])])
    # (stages, layers, devices) -> (slowest, in all, layers and devices of the stages ahead)
    best: dict[tuple[int, int, int], tuple[float, float, int, int]] = {(0, 0, 0): (0.0, 0.0, 0, 0)}
    for k in range(1, (stages or min(count, devices)) + 1):
        for used in range(1, devices + 1):
            for own in [replicas[k - 1]] if replicas is not None else range(1, used + 1):
                before = used - own
                starts = np.array([i for i in range(count) if (k - 1, i, before) in best], dtype=int)
                if before < 0 or not len(starts):
                    continue
                earlier = np.array([best[k - 1, i, before][:2] for i in starts])
                held = -(-min(chain.microbatches, devices - before) // own)
                for end in range(int(starts[0]) + 1, count + 1):
                    of = {name: total[end] - total[starts[starts < end]] for name, total in prefix.items()}
                    n = len(of["seconds"])
                    reduced = 2 * (own - 1) / own * of["gradient"] * chain.byte_s / chain.microbatches
                    seconds = of["seconds"] / own + reduced
                    slowest = np.maximum(np.maximum(earlier[:n, 0], seconds), sends[starts[:n]])
                    if chain.memory is not None:
                        size = of["state"] + of["gradient"] + held * of["activation"]
                        slowest = np.where(size <= chain.memory, slowest, np.inf)
                    if not np.isfinite(slowest.min()):
                        continue
                    total = np.where(slowest <= slowest.min() * _EQUAL, earlier[:n, 1] + seconds, np.inf)
                    at = int(total.argmin())
                    option = float(slowest[at]), float(total[at]), int(starts[at]), before
                    key = k, end, used
                    if key not in best or option[:2] < best[key][:2]:
                        best[key] = option
    keys = [(k, count, devices) for k in ([stages] if stages else range(1, devices + 1)) if (k, count, devices) in best]
    if not keys:
        return None
    key = min(keys, key=lambda key: best[key][:2])
    slowest, cuts = best[key][0], []
    while key[0]:
        _, _, start, before = best[key]
        cuts.append((key[1], key[2] - before))
        key = key[0] - 1, start, before
    ends, counts = zip(*reversed(cuts), strict=True)
    return Partition(tuple(ends), tuple(counts), slowest)
