"""Describes asynchronous pipelines: one minibatch a call, no flush, an update behind each backward. Data only.

Call t brings minibatch t. Stage k runs F(t - f), B(t - b), then the update of minibatch t - u. f grows by a call for
each slow border ahead of the stage, whose values are sent beside the call before. b exceeds f by a call for each device
behind the stage's own (1F1B without its end) and for each slow border behind it. So the version of a leaf that a task
sees (the number of updates it includes) follows from the calls, whatever the tasks take.

Sources: SpecTrain (Chen et al., 2018), sections 3.1 and 3.2; PipeDream (Harlap et al., 2018), section 3.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.ir.program import Atom, Block, Var
from autopar.ir.schedule import Kind, Places, Schedule, Task, forwards_ahead, one_f_one_b


@dataclass(frozen=True, slots=True)
class Calls:
    """Says which call issues each task, counted from the one that brings its minibatch, and which version it sees."""

    places: Places  #: The devices of each stage.
    #: u of each stage. A replica's update waits for the others of its turn; one that needs other stages (the factor of
    #: a clip by the global norm) comes in a call after theirs.
    updates: tuple[int, ...]
    last: int  #: The call in which all of a minibatch is done.
    stashes: bool = False  #: A backward sees the version that its forward saw.
    #: Calls that a value takes to cross a border between stages; as many more minibatches are in flight.
    slack: int = 0

    @staticmethod
    def soonest(places: Places, *, stashes: bool = False, slack: int = 0) -> Calls:
        """Returns the calls where no update needs another stage."""
        made = Calls(places, (), 0, stashes, slack)
        updates = tuple(made.backward(k) + len(replicas) - 1 for k, replicas in enumerate(places))
        return dataclasses.replace(made, updates=updates, last=max(updates))

    def forward(self, stage: int) -> int:
        return self.slack * stage

    def backward(self, stage: int) -> int:
        return self.forward(stage) + forwards_ahead(self.places, stage, self.slack) - 1

    def version(self, kind: Kind, stage: int, minibatch: int) -> int:
        """Returns the version of its stage's leaves that a task sees."""
        return max(0, minibatch - self.missed(stage)[kind == "B"])

    def missed(self, stage: int) -> tuple[int, int]:
        """Counts the updates by earlier minibatches that a forward and a backward miss in a full pipeline."""
        forward = self.updates[stage] - self.forward(stage)
        return forward, forward if self.stashes else self.updates[stage] - self.backward(stage)

    def awaited(self, stage: int) -> int:
        """Returns the stage whose backward an update of a stage waits for: its own, or 0 if it needs all."""
        return 0 if self.late(stage) > 0 else stage

    def late(self, stage: int) -> int:
        """Counts the calls that an update of a stage waits for values of other stages."""
        return self.updates[stage] - self.soonest(self.places, slack=self.slack).updates[stage]

    def stashed(self, stage: int) -> int:
        """Counts the old versions that a device of a stage keeps for backwards."""
        between = self.backward(stage) - self.forward(stage)
        return -(-between // len(self.places[stage])) if self.stashes else 0

    @property
    def period(self) -> int:
        """Number of calls after which a minibatch's values and version are gone, and replicas have their turn again."""
        turn = math.lcm(*map(len, self.places))
        return -(-(2 * self.last + 4) // turn) * turn

    @property
    def enough(self) -> int:
        """Number of minibatches with a long steady state."""
        return 6 * (self.last + 1) + 8

    def schedule(self, minibatches: int) -> AsynchronousSchedule:
        """Lists the tasks of some number of minibatches."""
        made = one_f_one_b(self.places, minibatches, self.slack)
        return AsynchronousSchedule("stash" if self.stashes else "async", self.places, made.orders, self)


@dataclass(frozen=True, slots=True)
class AsynchronousSchedule(Schedule):
    """The forwards and backwards of some minibatches in 1F1B order; tasks wait for the versions that they see."""

    calls: Calls

    def waits(self, task: Task) -> tuple[Task, ...]:
        """Lists the backwards whose update a task waits for: its stage's, or stage 0's where that needs all stages."""
        last = self.calls.version(task.kind, task.stage, task.microbatch) - 1
        if last < 0:
            return ()
        return (Task("B", self.calls.awaited(task.stage), last),)

    def issue_order(self) -> Iterator[Task]:
        """Yields all tasks, call by call."""
        stages, count = range(self.stages), sum(map(len, self.orders)) // (2 * self.stages)
        for call in range(count + self.calls.backward(0)):
            forwards = (Task("F", k, call - self.calls.forward(k)) for k in stages)
            backwards = (Task("B", k, call - self.calls.backward(k)) for k in reversed(stages))
            yield from (task for task in (*forwards, *backwards) if 0 <= task.microbatch < count)


@dataclass(frozen=True, slots=True, eq=False)
class Asynchronous:
    """Additions to a step in stages whose minibatches aren't flushed."""

    calls: Calls  #: The call that issues each task.
    news: Mapping[Var, Var]  #: Leaf of the state that updates change -> its new value.
    #: Computes leaves that no gradient reaches, such as step counts and random keys, from those leaves and the call's
    #: arguments. It runs when a minibatch comes, so that no stage waits for another's count.
    clock: Block
    clocks: Mapping[Var, Atom]  #: Leaf -> its new value by `clock`.
    constants: frozenset[Var]  #: Leaves that don't change.
    results: Mapping[Var, Var]  #: Outputs that aren't state -> themselves, or a copy of a leaf.
    #: Predicted weight -> leaves of the pipeline's own, 0 before the first update: the change by the last one and, if
    #: that is of some rows, their numbers.
    differences: Mapping[Var, tuple[Var, ...]]
    #: For each stage, the number of updates by which its forwards and its backwards predict.
    ahead: tuple[tuple[int, int], ...] = ()

    def returned(self, out: Atom | tuple[Atom, ...]) -> tuple[Atom, ...]:
        """Returns what replaces an output that is no state: itself, or copies of leaves; for parts, one each."""
        atoms = out if isinstance(out, tuple) else (out,)
        return tuple(self.results.get(a, a) if isinstance(a, Var) else a for a in atoms)
