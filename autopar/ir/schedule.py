"""Schedules of a pipeline as data: which task each device runs, in which order. Pure functions make them.

Sources: GPipe (Huang et al., 2018), section 2.3; PipeDream's replicas (Narayanan et al., 2019), section 3.2; 1F1B and
interleaved stages (Narayanan et al., 2021), section 2.2; zero-bubble H1 (Qi et al., 2023), section 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal as Choice

#: Forward; backward: the gradients of a stage's inputs and weights; where a schedule has "W", those of the inputs in
#: "B" and those of the weights in "W".
Kind = Choice["F", "B", "W"]

#: Stage -> its devices. Several devices of a stage are replicas, which take microbatches in turn.
Places = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Task:
    """What a stage does for one microbatch."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}({self.microbatch})"


@dataclass(frozen=True, slots=True)
class Schedule:
    """The tasks of each device, in the order in which it runs them.

    Attributes:
      name: As in `SCHEDULES`.
      places: The devices of each stage.
      orders: The tasks of each device.
    """

    name: str
    places: Places
    orders: tuple[tuple[Task, ...], ...]

    @property
    def stages(self) -> int:
        """S."""
        return len(self.places)

    @property
    def devices(self) -> int:
        """How many devices the stages have together."""
        return len(self.orders)

    @property
    def splits_backward(self) -> bool:
        """Whether the gradients of weights are tasks of their own."""
        return any(task.kind == "W" for task in self.orders[0])

    def device_of(self, stage: int, microbatch: int) -> int:
        """The device that runs a microbatch's tasks of a stage."""
        replicas = self.places[stage]
        return replicas[microbatch % len(replicas)]

    def needed(self, task: Task) -> Task | None:
        """The task of another stage (or the earlier one of its own) that a task waits for; None if for nobody."""
        if task.kind == "F":
            return None if task.stage == 0 else Task("F", task.stage - 1, task.microbatch)
        if task.kind == "W":
            return Task("B", task.stage, task.microbatch)
        if task.stage == self.stages - 1:
            return Task("F", task.stage, task.microbatch)
        return Task("B", task.stage + 1, task.microbatch)

    def issue_order(self) -> Iterator[Task]:
        """All tasks in one order in which each follows what it needs.

        Raises:
          ValueError: there is none: devices wait for each other forever.
        """
        done: set[Task] = set()
        waiting = [list(reversed(order)) for order in self.orders]
        while any(waiting):
            before = len(done)
            for tasks in waiting:
                if tasks and (self.needed(tasks[-1]) is None or self.needed(tasks[-1]) in done):
                    task = tasks.pop()
                    done.add(task)
                    yield task
            if len(done) == before:
                shown = ", ".join(str(tasks[-1]) for tasks in waiting if tasks)
                raise ValueError(f"{self.name}: the devices wait for each other forever: {shown}")


def gpipe(places: Places, microbatches: int) -> Schedule:
    """All forwards, then all backwards: a stage holds the activations of all microbatches."""
    return _by_stages("gpipe", places, microbatches, lambda stage: microbatches)


def one_f_one_b(places: Places, microbatches: int) -> Schedule:
    """A forward and a backward in turn as soon as there is one: stage k holds the activations of S - k microbatches.

    A stage of several devices holds as many as there are devices from it on, spread over its replicas.
    """
    return _by_stages("1f1b", places, microbatches, lambda stage: _devices_from(places, stage))


def zero_bubble(places: Places, microbatches: int) -> Schedule:
    """H1: 1F1B whose stages put off the gradients of weights until others would wait for them.

    Stage k computes them k microbatches late. Each stage holds the activations of S microbatches, as 1F1B's first does;
    where F, B and W take equally long, the bubble is a third of 1F1B's.
    """
    delay = [_devices_from(places, 0) - _devices_from(places, stage) for stage in range(len(places))]
    return _by_stages("zero-bubble", places, microbatches, lambda stage: _devices_from(places, stage), delay)


def interleaved(places: Places, microbatches: int) -> Schedule:
    """1F1B in which each of D devices has V stages, d, D + d, 2 D + d, ...: the bubble is a V-th, sends are V times.

    Microbatches go through a device's stages in groups of D.
    """
    devices = max(max(replicas) for replicas in places) + 1
    chunks = len(places) // devices
    groups = [range(m, min(m + devices, microbatches)) for m in range(0, microbatches, devices)]
    orders = []
    for device in range(devices):
        stages = range(device, len(places), devices)
        forward = [Task("F", k, m) for group in groups for k in stages for m in group]
        backward = [Task("B", k, m) for group in groups for k in reversed(stages) for m in group]
        ahead = 2 * (devices - device - 1) + (chunks - 1) * len(groups[0]) + 1
        orders.append(_in_turn(forward, backward, ahead))
    return Schedule("interleaved", places, tuple(orders))


def _devices_from(places: Places, stage: int) -> int:
    """How many devices the stages from one on have."""
    return sum(map(len, places[stage:]))


def _by_stages(
    name: str, places: Places, microbatches: int, ahead: Callable[[int], int], delay: Sequence[int] | None = None
) -> Schedule:
    """Each stage on devices of its own.

    Args:
      name, places, microbatches: Of the schedule.
      ahead: Stage -> how many forwards it runs before its first backward.
      delay: Stage -> how many microbatches late it computes gradients of weights; None: with those of its inputs.
    """
    orders: dict[int, tuple[Task, ...]] = {}
    for stage, replicas in enumerate(places):
        forward = [Task("F", stage, m) for m in range(microbatches)]
        backward = [Task("B", stage, m) for m in range(microbatches)]
        order = _in_turn(forward, backward, min(ahead(stage), microbatches))
        if delay is not None:
            order = _with_weights(order, stage, delay[stage], microbatches)
        for k, device in enumerate(replicas):
            orders[device] = tuple(task for task in order if task.microbatch % len(replicas) == k)
    return Schedule(name, places, tuple(orders[device] for device in sorted(orders)))


def _in_turn(forward: Sequence[Task], backward: Sequence[Task], ahead: int) -> tuple[Task, ...]:
    """So many forwards ahead, then a backward and a forward in turn, then the other backwards."""
    order = list(forward[:ahead])
    for k, task in enumerate(backward):
        order.append(task)
        order.extend(forward[ahead + k : ahead + k + 1])
    return tuple(order)


def _with_weights(order: Sequence[Task], stage: int, delay: int, microbatches: int) -> tuple[Task, ...]:
    """A stage's order with the gradients of its weights, so many microbatches late."""
    tasks: list[Task] = []
    for task in order:
        tasks.append(task)
        if task.kind == "B" and task.microbatch >= delay:
            tasks.append(Task("W", stage, task.microbatch - delay))
    late = min(delay, microbatches)
    return (*tasks, *(Task("W", stage, m) for m in range(microbatches - late, microbatches)))


SCHEDULES: Mapping[str, Callable[[Places, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zero-bubble": zero_bubble,
}


@dataclass(frozen=True, slots=True)
class StageTimes:
    """What the tasks of each stage take.

    Attributes:
      seconds: Kind of task -> seconds for each stage. "B" is all of the backward where a schedule has no "W".
      ahead, back: Seconds of what each stage sends to the next one, and to the one before.
      activations: What each stage holds of a microbatch from F to B or W, in any unit: 1 each by default.
    """

    seconds: Mapping[str, Sequence[float]]
    ahead: Sequence[float] = ()
    back: Sequence[float] = ()
    activations: Sequence[float] = ()

    def of(self, task: Task, splits_backward: bool) -> float:
        """Seconds of a task."""
        seconds = self.seconds[task.kind][task.stage]
        whole = task.kind == "B" and not splits_backward and "W" in self.seconds
        return seconds + self.seconds["W"][task.stage] if whole else seconds


@dataclass(frozen=True, slots=True)
class Simulated:
    """A schedule in time.

    Attributes:
      seconds: From the first task's start to the last one's end.
      busy: Seconds that each device computes.
      held: Activations that each device holds at most, from the start of F to the end of B or W.
      starts: When each task starts.
    """

    seconds: float
    busy: tuple[float, ...]
    held: tuple[float, ...]
    starts: Mapping[Task, float] = field(default_factory=dict)

    @property
    def bubble(self) -> float:
        """The share of the devices' time in which they wait."""
        return 1 - sum(self.busy) / (len(self.busy) * self.seconds) if self.seconds else 0.0


def simulate_schedule(schedule: Schedule, times: StageTimes) -> Simulated:
    """The schedule in time. Sends overlap with tasks; those from one device to another follow one another."""
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
        starts[task] = max(free[device], ready)
        free[device] = ends[task] = starts[task] + seconds
        busy[device] += seconds
        size = times.activations[task.stage] if times.activations else 1.0
        held[device] += size if task.kind == "F" else -size if task.kind == last else 0.0
        most[device] = max(most[device], held[device])
    return Simulated(max(ends.values()), tuple(busy), tuple(most), starts)
