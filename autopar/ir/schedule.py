"""Schedules of a pipeline as data: which task each device runs, in which order. Pure functions make them.

Sources: GPipe (Huang et al., 2018), section 2.3; PipeDream-Flush, 1F1B (Narayanan et al., 2021), section 2.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal as Choice

#: Forward, and backward: the gradients of a stage's inputs and weights.
Kind = Choice["F", "B"]


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
    """The tasks of each stage, in the order in which its device runs them."""

    name: str
    orders: tuple[tuple[Task, ...], ...]

    @property
    def stages(self) -> int:
        """S."""
        return len(self.orders)

    def needed(self, task: Task) -> Task | None:
        """The task of another stage (or the forward of the last one) that a task waits for; None if for nobody."""
        if task.kind == "F":
            return None if task.stage == 0 else Task("F", task.stage - 1, task.microbatch)
        if task.stage == self.stages - 1:
            return Task("F", task.stage, task.microbatch)
        return Task("B", task.stage + 1, task.microbatch)

    def issue_order(self) -> Iterator[Task]:
        """All tasks in one order in which each follows what it needs.

        Raises:
          ValueError: there is none: stages wait for each other forever.
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
                raise ValueError(f"{self.name}: the stages wait for each other forever: {shown}")


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards: a stage holds the activations of all microbatches."""
    return _made("gpipe", stages, microbatches, lambda stage: microbatches)


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """A forward and a backward in turn as soon as there is one: stage k holds the activations of S - k microbatches."""
    return _made("1f1b", stages, microbatches, lambda stage: min(stages - stage, microbatches))


def _made(name: str, stages: int, microbatches: int, ahead: Callable[[int], int]) -> Schedule:
    """`ahead`: how many forwards a stage runs before its first backward."""
    orders = []
    for stage in range(stages):
        tasks = [Task("F", stage, m) for m in range(ahead(stage))]
        for m in range(microbatches):
            tasks.append(Task("B", stage, m))
            if ahead(stage) + m < microbatches:
                tasks.append(Task("F", stage, ahead(stage) + m))
        orders.append(tuple(tasks))
    return Schedule(name, tuple(orders))


SCHEDULES: Mapping[str, Callable[[int, int], Schedule]] = {"gpipe": gpipe, "1f1b": one_f_one_b}


@dataclass(frozen=True, slots=True)
class Simulated:
    """A schedule in time.

    Attributes:
      seconds: From the first task's start to the last one's end.
      busy: Seconds that each stage computes.
      held: Activations that each stage holds at most, in microbatches: from the start of F to the end of B.
    """

    seconds: float
    busy: tuple[float, ...]
    held: tuple[int, ...]

    @property
    def bubble(self) -> float:
        """The share of the devices' time in which they wait."""
        return 1 - sum(self.busy) / (len(self.busy) * self.seconds)


def simulate_schedule(schedule: Schedule, forward: Sequence[float], backward: Sequence[float]) -> Simulated:
    """The schedule with so many seconds a stage for F and for B, sends taking none."""
    ends: dict[Task, float] = {}
    free, busy = [0.0] * schedule.stages, [0.0] * schedule.stages
    held, most = [0] * schedule.stages, [0] * schedule.stages
    for task in schedule.issue_order():
        k = task.stage
        seconds = (forward if task.kind == "F" else backward)[k]
        needed = schedule.needed(task)
        free[k] = max(free[k], 0.0 if needed is None else ends[needed]) + seconds
        ends[task] = free[k]
        busy[k] += seconds
        held[k] += 1 if task.kind == "F" else -1
        most[k] = max(most[k], held[k])
    return Simulated(max(ends.values()), tuple(busy), tuple(most))
