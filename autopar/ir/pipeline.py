"""A step cut into stages: the user's options, and the programs of the stages. Data only.

Values are named by variables, which the programs of a pipeline share: each reads values that others made.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal as Choice

from autopar.errors import ArgumentsError, check_whole
from autopar.ir.program import Atom, Block, Var
from autopar.ir.schedule import (
    SCHEDULES,
    AsynchronousRule,
    Kind,
    Rule,
    Schedule,
    StageDevices,
    Task,
    forwards_ahead,
    one_f_one_b,
)

#: "before" runs once, before the microbatches; "F", "B", "W" for each of them; "update" once, after them.
Phase = Choice["before", "F", "B", "W", "update"]
PHASES: tuple[Phase, ...] = ("before", "F", "B", "W", "update")


#: Value of options that autopar chooses.
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Options of a step that is run in stages.

    Attributes:
      stages: S, a number; for each stage, patterns over paths of its parameters; or "auto": the number of stages and
        the devices of each that are predicted to be fastest on all of the mesh's. One stage of several devices is data
        parallelism. (`schedule`, `microbatches` and `remat` may be "auto", too, without patterns.)
      schedule: Synchronous: "1f1b"; "gpipe", which holds more activations; "zero-bubble" (H1), which waits less and
        holds the activations of 1F1B's first stage on every device; "interleaved", with several stages on each device.
        Asynchronous (minibatches follow one another without a flush, another function than the step on one device):
        "async"; "stash", whose backwards see the weights of their forwards; "spectrain", which predicts them.
      microbatches: M, parts of the batch that are in the pipeline together; 8 by default. With "interleaved" a multiple
        of the number of devices; with asynchronous schedules 1.
      replicas: Devices of each stage, one number for all or one for each: they hold the same weights and take the
        microbatches in turn.
      stages_per_device: With "interleaved", stages on each device, 2 by default: stage k is on device k modulo the
        number of devices.
      remat: The backward of each stage but the last computes its forward again, so that a stage holds only the inputs
        of a microbatch that it was sent.
      profile: The gradient program of a microbatch is timed on one device, which all weights must fit, before stages
        are cut. Otherwise times follow from operations and bytes, at measured rates of large products and memory
        passes.
      statistics: "batch": examples that depend on sums over the batch, as with batch norm, are refused. "microbatch":
        the sums are taken over each microbatch, as GPipe does, which changes the function.
      asynchronous: schedule="auto" is "spectrain".
      ahead: With "spectrain", the number of updates by which each stage's (forwards, backwards) predict weights, in
        place of the numbers counted in the simulated schedule.
      slack: With asynchronous schedules, extra minibatches in flight for each border between stages. They hide slow
        links; a minibatch misses as many more updates. None: 0 within a process; between processes as many, 3 at most,
        as bring the simulated schedule to within 10% of its best.

    Raises:
      ArgumentsError: an option has no such value, or options contradict each other.
    """

    stages: int | Sequence[Sequence[str]] | Choice["auto"] = 2
    schedule: str = "1f1b"
    microbatches: int | Choice["auto"] | None = None
    replicas: int | Sequence[int] = 1
    stages_per_device: int | None = None
    remat: bool | Choice["auto"] = False
    profile: bool = False
    statistics: Choice["batch", "microbatch"] = "batch"
    asynchronous: bool = False
    ahead: Sequence[tuple[int, int]] | None = None
    slack: int | None = None

    def __post_init__(self) -> None:
        is_word = isinstance(self.stages, str) and self.stages != AUTO
        if isinstance(self.stages, bool) or is_word or self.count < 1:
            raise ArgumentsError(
                f"stages={self.stages!r}: give a number, for each stage patterns over paths, or 'auto'"
            )
        if self.stages == AUTO and self.replicas != 1:
            raise ArgumentsError("stages='auto' chooses replicas; leave replicas= out")
        if self.is_open and not isinstance(self.stages, (int, str)):
            raise ArgumentsError("patterns say the stages, and 'auto' chooses with them; give a number of stages")
        if self.schedule not in (*SCHEDULES, AUTO):
            raise ArgumentsError(f"schedule={self.schedule!r}: there are {', '.join(map(repr, SCHEDULES))}, or 'auto'")
        if self.microbatches not in (AUTO, None):
            check_whole("microbatches=%r", self.microbatches)
        if not isinstance(self.remat, bool) and self.remat != AUTO:
            raise ArgumentsError(f"remat={self.remat!r}: give True, False or 'auto'")
        if not isinstance(self.profile, bool):
            raise ArgumentsError(f"profile={self.profile!r}: give True or False")
        self._check_asynchronous()
        if self.statistics not in ("batch", "microbatch"):
            raise ArgumentsError(f"statistics={self.statistics!r}: there are 'batch' and 'microbatch'")
        for count in self.replica_counts:
            check_whole("replicas=%r", count)
        if not isinstance(self.replicas, int) and len(self.replicas) != self.count:
            raise ArgumentsError(f"replicas={self.replicas!r}: {len(self.replicas)} numbers for {self.count} stages")
        if self.stages_per_device is not None:
            check_whole("stages_per_device=%r", self.stages_per_device)
        counts = [1] * self.chunks if self.stages == AUTO else self.replica_counts
        problem = self.rule.problem(counts, self.chunks, 0 if self.microbatches == AUTO else self.microbatch_count)
        if problem:
            raise ArgumentsError(problem)

    def _check_asynchronous(self) -> None:
        if not isinstance(self.asynchronous, bool):
            raise ArgumentsError(f"asynchronous={self.asynchronous!r}: give True or False")
        if self.asynchronous and self.schedule != AUTO and not self.is_asynchronous:
            raise ArgumentsError(f"asynchronous=True with {self.rule}, which isn't: leave one of them out")
        if self.statistics == "microbatch" and self.is_asynchronous:
            raise ArgumentsError(f"statistics='microbatch' with {self.rule}, which has no microbatches. Leave it out")
        if self.slack is not None:
            if not self.is_asynchronous:
                raise ArgumentsError(f"slack={self.slack!r} with {self.rule}, which isn't asynchronous. Leave it out")
            if isinstance(self.slack, bool) or not isinstance(self.slack, int) or self.slack < 0:
                raise ArgumentsError(f"slack={self.slack!r}: give a number of minibatches, 0 or more")
        if self.ahead is None:
            return
        if not (isinstance(self.rule, AsynchronousRule) and self.rule.predicts):
            raise ArgumentsError(f"ahead={self.ahead!r} with {self.rule}, which predicts no weights. Leave it out")
        if self.stages == AUTO or [len(pair) for pair in self.ahead] != [2] * self.count:
            raise ArgumentsError(f"ahead={self.ahead!r}: give two numbers for each of {self.count} stages")

    @property
    def is_open(self) -> bool:
        """At least one option is "auto"."""
        return AUTO in (self.stages, self.schedule, self.microbatches, self.remat)

    @property
    def count(self) -> int:
        """The number S of stages; 1 until it is chosen."""
        if isinstance(self.stages, str):
            return 1
        return self.stages if isinstance(self.stages, int) else len(self.stages)

    @property
    def microbatch_count(self) -> int:
        """The number M of microbatches; 1 until it is chosen."""
        if self.microbatches is None:
            return self.rule.microbatches
        return self.microbatches if isinstance(self.microbatches, int) else 1

    @property
    def is_asynchronous(self) -> bool:
        return isinstance(self.rule, AsynchronousRule)

    @property
    def chunks(self) -> int:
        """Stages on each device."""
        return self.stages_per_device or self.rule.stages_per_device

    @property
    def devices(self) -> int:
        """Number of devices that the stages need."""
        return max(max(replicas) for replicas in self.stage_devices) + 1

    @property
    def stage_devices(self) -> StageDevices:
        return self.rule.stage_devices(self.replica_counts, self.chunks)

    @property
    def rule(self) -> Rule:
        """The schedule's rule; until it is chosen, 1F1B's or SpecTrain's."""
        if self.schedule == AUTO:
            return SCHEDULES["spectrain" if self.asynchronous else "1f1b"]
        return SCHEDULES[self.schedule]

    @property
    def replica_counts(self) -> Sequence[int]:
        return [self.replicas] * self.count if isinstance(self.replicas, int) else self.replicas

    def __str__(self) -> str:
        counts = self.replica_counts
        stages = f"{self.count} stage{'s' * (self.count > 1)}"
        return f"{stages} of {', '.join(map(str, counts))} device{'s' * (max(counts) > 1 or self.count > 1)}"

    def scheduled(self, microbatches: int) -> Schedule:
        return self.rule.make(self.stage_devices, microbatches)


@dataclass(frozen=True, slots=True, eq=False)
class StageProgram:
    """A program of one stage, compiled by itself."""

    phase: Phase
    stage: int
    level: int  #: Order of a phase's update programs: one reads only values of earlier levels and of its own stage.
    block: Block  #: Its inputs and outputs are values of the pipeline.
    call: int = 0  #: In an asynchronous pipeline, the call in which it runs, counted from the minibatch's own.
    #: The program of one of the devices that divide the stage's products: it takes and returns a device's part of
    #: divided values.
    local: Block | None = None

    @property
    def outputs(self) -> tuple[Var, ...]:
        """The values that it makes for others."""
        return tuple(a for a in self.block.outputs if isinstance(a, Var))


@dataclass(frozen=True, slots=True, eq=False)
class StagedStep:
    """A step as the programs of its stages."""

    stages: int  #: S.
    microbatches: int  #: M.
    #: The step's inputs; a leaf whose layers several stages have is a tuple of parts.
    inputs: tuple[Var | tuple[Var, ...], ...]
    parts: Mapping[Var, tuple[Var, int]]  #: A microbatch's part of an input -> (the input, the axis of its examples).
    #: By phase, level and stage; one for each phase and stage, for "update" one for each level.
    programs: tuple[StageProgram, ...]
    #: A microbatch's value -> (the value of all microbatches, a reduction's name or the axis of the examples).
    joins: Mapping[Var, tuple[Var, str | int]]
    homes: Mapping[Var, int]  #: The stage of each input of the state.
    weights: tuple[Var, ...]  #: Inputs that the gradient program reads, in the order of their first use.
    outputs: tuple[Atom | tuple[Atom, ...], ...]  #: The step's outputs; a new value of a leaf in parts is a tuple.
    #: Outputs that are new values of non-scalar leaves of the state -> the leaf's stage. Without a flush, the leaves
    #: themselves.
    new_leaves: Mapping[Var, int]
    divided: Mapping[Var, int]  #: Values that the devices that divide a stage's products have in parts -> the axis.
    asynchronous: Asynchronous | None = None  #: Additions if minibatches aren't flushed.

    @property
    def results(self) -> tuple[Var, ...]:
        atoms = [a for out in self.outputs for a in (out if isinstance(out, tuple) else (out,))]
        return tuple(a for a in atoms if isinstance(a, Var))


# --- asynchronous pipelines: one minibatch a call, no flush, an update behind each backward ---
#
# Call t brings minibatch t. Stage k runs F(t - f), B(t - b), then the update of minibatch t - u. f grows by a call for
# each slow border ahead of the stage, whose values are sent beside the call before. b exceeds f by a call for each
# device behind the stage's own (1F1B without its end) and for each slow border behind it. So the version of a leaf that
# a task sees (the number of updates it includes) follows from the calls, whatever the tasks take.
#
# Sources: SpecTrain (Chen et al., 2018), sections 3.1 and 3.2; PipeDream (Harlap et al., 2018), section 3.


@dataclass(frozen=True, slots=True)
class Calls:
    """Says which call issues each task, counted from the one that brings its minibatch, and which version it sees."""

    stage_devices: StageDevices  #: The devices of each stage.
    #: u of each stage. A replica's update waits for the others of its turn; one that needs other stages (the factor of
    #: a clip by the global norm) comes in a call after theirs.
    updates: tuple[int, ...]
    last: int  #: The call in which all of a minibatch is done.
    stashes: bool = False  #: A backward sees the version that its forward saw.
    #: Calls that a value takes to cross a border between stages; as many more minibatches are in flight.
    slack: int = 0

    @staticmethod
    def soonest(stage_devices: StageDevices, *, stashes: bool = False, slack: int = 0) -> Calls:
        """Returns the calls where no update needs another stage."""
        made = Calls(stage_devices, (), 0, stashes, slack)
        updates = tuple(made.backward(k) + len(replicas) - 1 for k, replicas in enumerate(stage_devices))
        return replace(made, updates=updates, last=max(updates))

    def forward(self, stage: int) -> int:
        return self.slack * stage

    def backward(self, stage: int) -> int:
        return self.forward(stage) + forwards_ahead(self.stage_devices, stage, self.slack) - 1

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
        return self.updates[stage] - self.soonest(self.stage_devices, slack=self.slack).updates[stage]

    def stashed(self, stage: int) -> int:
        """Counts the old versions that a device of a stage keeps for backwards."""
        between = self.backward(stage) - self.forward(stage)
        return -(-between // len(self.stage_devices[stage])) if self.stashes else 0

    @property
    def period(self) -> int:
        """Number of calls after which a minibatch's values and version are gone, and replicas have their turn again."""
        turn = math.lcm(*map(len, self.stage_devices))
        return -(-(2 * self.last + 4) // turn) * turn

    @property
    def enough(self) -> int:
        """Number of minibatches with a long steady state."""
        return 6 * (self.last + 1) + 8

    def schedule(self, minibatches: int) -> AsynchronousSchedule:
        """Lists the tasks of some number of minibatches."""
        made = one_f_one_b(self.stage_devices, minibatches, self.slack)
        return AsynchronousSchedule("stash" if self.stashes else "async", self.stage_devices, made.orders, self)


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
