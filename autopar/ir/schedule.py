"""Schedules of a pipeline as data: the tasks of each device in order. Pure functions make them.

Sources: GPipe (Huang et al., 2018), section 2.3; PipeDream's replicas (Narayanan et al., 2019), section 3.2; 1F1B and
interleaved stages (Narayanan et al., 2021), section 2.2; zero-bubble H1 (Qi et al., 2023), section 2; asynchronous
pipelines (Harlap et al., 2018), section 3, and their prediction (Chen et al., 2018), section 3.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar
from typing import Literal as Choice

#: "F": forward. "B": backward, the gradients of a stage's inputs and weights; in a schedule with "W", gradients of
#: weights are computed there and "B" has those of inputs alone.
Kind = Choice["F", "B", "W"]

#: Stage -> its devices. Several devices of a stage are replicas, which take microbatches in turn.
StageDevices = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Task:
    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}({self.microbatch})"


@dataclass(frozen=True, slots=True)
class Schedule:
    """The tasks of each device in order (`orders`), and the devices of each stage (`stage_devices`)."""

    name: str
    stage_devices: StageDevices
    orders: tuple[tuple[Task, ...], ...]

    @property
    def stages(self) -> int:
        return len(self.stage_devices)

    @property
    def devices(self) -> int:
        """Number of devices of all stages together."""
        return len(self.orders)

    @property
    def splits_backward(self) -> bool:
        """Gradients of weights are tasks of their own."""
        return any(task.kind == "W" for task in self.orders[0])

    def device_of(self, stage: int, microbatch: int) -> int:
        replicas = self.stage_devices[stage]
        return replicas[microbatch % len(replicas)]

    def needed(self, task: Task) -> Task | None:
        """Returns the task of another stage, or the earlier one of the same stage, that a task waits for."""
        if task.kind == "F":
            return None if task.stage == 0 else Task("F", task.stage - 1, task.microbatch)
        if task.kind == "W":
            return Task("B", task.stage, task.microbatch)
        if task.stage == self.stages - 1:
            return Task("F", task.stage, task.microbatch)
        return Task("B", task.stage + 1, task.microbatch)

    def waits(self, task: Task) -> tuple[Task, ...]:
        """Lists further tasks that a task waits for."""
        return ()

    def issue_order(self) -> Iterator[Task]:
        """Yields all tasks in an order in which each follows what it needs. Raises ValueError if there is none: devices
        wait for each other forever."""
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


def gpipe(stage_devices: StageDevices, microbatches: int) -> Schedule:
    """Schedules all forwards, then all backwards; a stage holds the activations of all microbatches."""
    return _by_stages("gpipe", stage_devices, microbatches, lambda stage: microbatches)


def one_f_one_b(stage_devices: StageDevices, microbatches: int, slack: int = 0) -> Schedule:
    """Schedules a forward and a backward in turn as early as possible; stage k holds S - k microbatches' activations.

    A stage with replicas holds as many as there are devices from it on, spread over its replicas.
    """
    return _by_stages("1f1b", stage_devices, microbatches, lambda stage: forwards_ahead(stage_devices, stage, slack))


def zero_bubble(stage_devices: StageDevices, microbatches: int) -> Schedule:
    """Schedules 1F1B whose stages put off the gradients of weights until others would wait for them (H1).

    Stage k computes them k microbatches late. Each stage holds the activations of S microbatches, as 1F1B's first does;
    if F, B and W take equally long, the bubble is a third of 1F1B's.
    """
    delay = [devices_from(stage_devices, 0) - devices_from(stage_devices, stage) for stage in range(len(stage_devices))]
    return _by_stages(
        "zero-bubble", stage_devices, microbatches, lambda stage: devices_from(stage_devices, stage), delay
    )


def interleaved(stage_devices: StageDevices, microbatches: int) -> Schedule:
    """Schedules 1F1B where each of D devices has V stages (d, D + d, 2 D + d, ...), in groups of D microbatches.

    The bubble is a V-th of 1F1B's, at V times the sends.
    """
    devices = max(max(replicas) for replicas in stage_devices) + 1
    chunks = len(stage_devices) // devices
    groups = [range(m, min(m + devices, microbatches)) for m in range(0, microbatches, devices)]
    orders = []
    for device in range(devices):
        stages = range(device, len(stage_devices), devices)
        forward = [Task("F", k, m) for group in groups for k in stages for m in group]
        backward = [Task("B", k, m) for group in groups for k in reversed(stages) for m in group]
        ahead = 2 * (devices - device - 1) + (chunks - 1) * len(groups[0]) + 1
        orders.append(_in_turn(forward, backward, ahead))
    return Schedule("interleaved", stage_devices, tuple(orders))


def devices_from(stage_devices: StageDevices, stage: int) -> int:
    """Counts the devices of a stage and those after it."""
    return sum(map(len, stage_devices[stage:]))


def forwards_ahead(stage_devices: StageDevices, stage: int, slack: int) -> int:
    """Counts a stage's forwards before its first backward: one for each device from it on, `slack` for each later
    border."""
    return devices_from(stage_devices, stage) + slack * (len(stage_devices) - 1 - stage)


def _by_stages(
    name: str,
    stage_devices: StageDevices,
    microbatches: int,
    ahead: Callable[[int], int],
    delay: Sequence[int] | None = None,
) -> Schedule:
    """Schedules stages that have devices of their own.

    `ahead`: stage -> how many forwards it runs before its first backward. `delay`: stage -> how many microbatches late
    it computes gradients of weights; None: with those of its inputs.
    """
    orders: dict[int, tuple[Task, ...]] = {}
    for stage, replicas in enumerate(stage_devices):
        forward = [Task("F", stage, m) for m in range(microbatches)]
        backward = [Task("B", stage, m) for m in range(microbatches)]
        order = _in_turn(forward, backward, min(ahead(stage), microbatches))
        if delay is not None:
            order = _with_weights(order, stage, delay[stage], microbatches)
        for k, device in enumerate(replicas):
            orders[device] = tuple(task for task in order if task.microbatch % len(replicas) == k)
    return Schedule(name, stage_devices, tuple(orders[device] for device in sorted(orders)))


def _in_turn(forward: Sequence[Task], backward: Sequence[Task], ahead: int) -> tuple[Task, ...]:
    order = list(forward[:ahead])
    for k, task in enumerate(backward):
        order.append(task)
        order.extend(forward[ahead + k : ahead + k + 1])
    return tuple(order)


def _with_weights(order: Sequence[Task], stage: int, delay: int, microbatches: int) -> tuple[Task, ...]:
    """Adds tasks for a stage's weight gradients to its order, `delay` microbatches late."""
    tasks: list[Task] = []
    for task in order:
        tasks.append(task)
        if task.kind == "B" and task.microbatch >= delay:
            tasks.append(Task("W", stage, task.microbatch - delay))
    late = min(delay, microbatches)
    return (*tasks, *(Task("W", stage, m) for m in range(microbatches - late, microbatches)))


@dataclass(frozen=True, slots=True)
class Rule:
    """Makes a schedule and checks what it demands of a pipeline; here each stage has devices of its own."""

    name: str
    #: Makes the schedule of stages' devices and a number of microbatches.
    make: Callable[[StageDevices, int], Schedule]
    stages_per_device: int = 1  #: The default; 1: never more.

    microbatches: ClassVar[int] = 8  #: The default of M.
    #: A stage may have several devices (and their memory may limit how stages are cut).
    has_replicas: ClassVar[bool] = True

    @property
    def splits_backward(self) -> bool:
        """Its schedules have tasks for the gradients of weights."""
        return self.make(self.stage_devices((1,) * self.stages_per_device, self.stages_per_device), 1).splits_backward

    def stage_devices(self, counts: Sequence[int], stages_per_device: int) -> StageDevices:
        """Returns the devices of each stage; `counts` has their numbers."""
        ends = tuple(itertools.accumulate(counts))
        return tuple(tuple(range(start, end)) for start, end in zip((0, *ends), ends, strict=False))

    def numbers(self, devices: int, stages_per_device: int) -> Iterable[int]:
        """Returns the possible numbers of stages on some number of devices."""
        return range(1, devices + 1)

    def problem(self, counts: Sequence[int], stages_per_device: int, microbatches: int) -> str:
        """Says why such stages are impossible; "" if they aren't."""
        several = "several stages on a device take schedule='interleaved'"
        return f"stages_per_device={stages_per_device} with {self}: {several}" if stages_per_device > 1 else ""

    def __str__(self) -> str:
        return f"schedule={self.name!r}"


class CyclicRule(Rule):
    """Gives each of D devices V stages (d, D + d, 2 D + d, ...), without replicas; microbatches come in groups of D."""

    has_replicas = False

    def stage_devices(self, counts: Sequence[int], stages_per_device: int) -> StageDevices:
        return tuple((k % (len(counts) // stages_per_device),) for k in range(len(counts)))

    def numbers(self, devices: int, stages_per_device: int) -> Iterable[int]:
        return (devices * stages_per_device,) if devices > 1 else ()

    def problem(self, counts: Sequence[int], stages_per_device: int, microbatches: int) -> str:
        devices, rest = divmod(len(counts), stages_per_device)
        if any(count != 1 for count in counts):
            return f"replicas={counts!r} with {self}, whose stages have none"
        if rest:
            return f"{len(counts)} stages can't be {stages_per_device} on each device (stages_per_device)"
        if microbatches % devices:
            return f"microbatches={microbatches} with {self} on {devices} devices: give a multiple of their number"
        return ""


@dataclass(frozen=True, slots=True)
class AsynchronousRule(Rule):
    """Lets minibatches follow one another without a flush, each with an update of its own (`ir.pipeline`)."""

    stashes: bool = False  #: A minibatch's backward sees the weights that its forward saw.
    predicts: bool = False  #: Both see the weights that are predicted for the end of the minibatch.

    microbatches = 1

    def problem(self, counts: Sequence[int], stages_per_device: int, microbatches: int) -> str:
        if microbatches > 1:
            return f"microbatches={microbatches} with {self}, in whose stages a whole minibatch is after the other"
        return Rule.problem(self, counts, stages_per_device, microbatches)


RULES = (
    Rule("gpipe", gpipe),
    Rule("1f1b", one_f_one_b),
    CyclicRule("interleaved", interleaved, stages_per_device=2),
    Rule("zero-bubble", zero_bubble),
    AsynchronousRule("async", one_f_one_b),
    AsynchronousRule("stash", one_f_one_b, stashes=True),
    AsynchronousRule("spectrain", one_f_one_b, predicts=True),
)
SCHEDULES: Mapping[str, Rule] = {rule.name: rule for rule in RULES}
