"""Lists the timelines of pipelines: an asynchronous one minibatch by minibatch, while it runs (`ir.pipeline`); a
synchronous one at once."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from autopar.ir.pipeline import Asynchronous, StagedStep, StageProgram
from autopar.ir.program import Var
from autopar.ir.schedule import Kind, Schedule
from autopar.ir.timeline import (
    Action,
    Drops,
    Join,
    Microbatch,
    Names,
    Run,
    Send,
    SumOf,
    Timeline,
    Value,
    Whole,
    last_touches,
    reads_of,
    targets_of,
    verify_timeline,
    writes_of,
)

#: Actions, each with what is dropped after it.
Listed = list[tuple[Action, Drops]]


@dataclass(frozen=True, slots=True, eq=False)
class Minibatch:
    """The actions of a minibatch."""

    calls: tuple[Listed, ...]  #: Its actions, by the call in which they run, counted from its own.
    #: Its results -> the devices that have them after the last of these calls.
    results: Mapping[Value, tuple[int, ...]]


class MinibatchLister:
    """Lists the actions of a pipeline's devices for each minibatch.

    Args:
      step: A step without a flush.
      everywhere: Devices that get a minibatch's results; none: they stay where they are made.
      again: Names of past minibatches and versions are reused, and so whole lists.
    """

    def __init__(self, step: StagedStep, everywhere: Iterable[int] = (), *, again: bool = False) -> None:
        assert step.asynchronous is not None, "minibatches aren't flushed"
        self._step, self._everywhere, self._name = step, tuple(everywhere), Names()
        self._asynchronous: Asynchronous = step.asynchronous
        self._calls = step.asynchronous.calls
        self._leaves = {new: leaf for leaf, new in step.asynchronous.news.items()}
        self._joins: dict[int, list[Var]] = collections.defaultdict(list)
        for program in step.programs:
            for v in program.outputs:
                if v in step.joins:
                    self._joins[program.stage].append(v)
        self._last_updates = last_updates(step)
        self._period = self._calls.period if again else 0
        self._lists: dict[int, Minibatch] = {}
        made = {v for p in step.programs for v in p.outputs} | {whole for whole, _ in step.joins.values()}
        self._results = [v for v in dict.fromkeys(step.asynchronous.results.values()) if v in made]

    def leaf(self, var: Var, version: int) -> Value:
        return self._name(var, Whole(), self.called(version))

    def called(self, number: int) -> int:
        """Returns the number that names a minibatch or a version."""
        return number % self._period if self._period else number

    def given(self) -> dict[Value, tuple[int, ...]]:
        return self.versions(0)

    def versions(self, version: int) -> dict[Value, tuple[int, ...]]:
        """Names a version of all leaves that updates change -> the devices that have it."""
        return {self.leaf(v, version): self._calls.stage_devices[stage] for v, stage in self._step.homes.items()}

    def minibatch(self, number: int) -> Minibatch:
        """Lists the actions of minibatch `number`, counted from 0."""
        if not self._period or number < self._calls.last:  # the first ones see versions that aren't updated yet
            return self._listed(number)
        key = self.called(number)
        if key not in self._lists:
            self._lists[key] = self._listed(number)
        return self._lists[key]

    def _listed(self, number: int) -> Minibatch:
        part = Microbatch(self.called(number))
        listed = [(call, action) for call in range(self._calls.last + 1) for action in self._work(call, number)]
        work = [action for _, action in listed]
        makers: dict[Value, list[int]] = {}
        for action in work:
            for value in writes_of(action):
                if isinstance(value.part, Microbatch) and action.device not in makers.setdefault(value, []):
                    makers[value].append(action.device)
        values = [self._name(v, part) for v in self._results]
        results = {value: self._everywhere or self._home(makers[value]) for value in values}
        targets = targets_of(work, makers, results)
        calls, actions = list[int](), list[Action]()
        for call, action in listed:
            sends = [
                Send(value, action.device, target)
                for value in writes_of(action)
                if value in makers and makers[value][0] == action.device
                for target in targets.get(value, ())
            ]
            actions += [action, *sends]
            calls += [call] * (1 + len(sends))
        whole = {v for action in work for v in (*reads_of(action), *writes_of(action)) if isinstance(v.part, Whole)}
        kept = {(device, value) for value in whole for device in range(self._devices)}
        kept |= {(device, value) for value, devices in results.items() for device in devices}
        by_call: tuple[Listed, ...] = tuple([] for _ in range(self._calls.last + 1))
        for call, action, drops in zip(calls, actions, last_touches(actions, kept), strict=True):
            by_call[call].append((action, (*drops, *self._old(action, number))))
        return Minibatch(by_call, results)

    @property
    def _devices(self) -> int:
        return max(max(replicas) for replicas in self._calls.stage_devices) + 1

    def _home(self, makers: Sequence[int]) -> tuple[int, ...]:
        replicas = next(replicas for replicas in self._calls.stage_devices if makers[0] in replicas)
        return replicas if set(replicas) <= set(makers) else (makers[0],)

    def _work(self, call: int, number: int) -> Iterator[Run | Join]:
        """Yields a call's computations: forwards down the stages, backwards up, sums, the update."""
        phases = {phase: [p for p in self._step.programs if (p.phase, p.call) == (phase, call)] for phase in _PHASES}
        for phase, programs in phases.items():
            if phase == "update":
                yield from self._sums(call, number)
            for program in reversed(programs) if phase == "B" else programs:
                replicas = self._calls.stage_devices[program.stage]
                own = replicas if phase == "update" else (replicas[number % len(replicas)],)
                for device in own:
                    yield self._run(program, device, number)

    def _sums(self, call: int, number: int) -> Iterator[Join]:
        """Yields the joins of a minibatch's one part, which the update calls its sums."""
        part = Microbatch(self.called(number))
        for stage, values in self._joins.items():
            if self._calls.backward(stage) == call:
                replicas = self._calls.stage_devices[stage]
                joins = [(v, *self._step.joins[v]) for v in values]
                made = {self._name(whole, part): ((self._name(v, part),), join) for v, whole, join in joins}
                yield Join(replicas[number % len(replicas)], made)

    def _run(self, program: StageProgram, device: int, number: int) -> Run:
        def value(var: Var) -> Value:
            if var in self._step.homes:
                return self.leaf(var, self._seen(program, number))
            if var in self._leaves:
                return self.leaf(self._leaves[var], number + 1)
            return self._name(var, Whole() if var in self._asynchronous.constants else part)

        part = Microbatch(self.called(number))
        reads, writes = map(value, program.block.inputs), map(value, program.outputs)
        return Run(program, device, self.called(number), tuple(reads), tuple(writes))

    def _seen(self, program: StageProgram, number: int) -> int:
        if program.phase == "update":
            return number
        kind: Kind = "B" if program.phase == "B" else "F"
        return self._calls.version(kind, program.stage, number)

    def _old(self, action: Action, number: int) -> Drops:
        """Returns versions of leaves that no task reads after an action; after the update, unless backwards need
        them."""
        if not isinstance(action, Run) or action.program.phase not in ("B", "update"):
            return ()
        stage, device = action.program.stage, action.device
        if action.program.phase == "update":
            olds = () if self._is_stashed(stage, device, number) else self._last_updates.get(action.program, ())
            return tuple((device, self.leaf(v, number)) for v in olds)
        version = self._calls.version("B", stage, number)
        if not self._is_stashed(stage, device, version) or number != self._last_backward(stage, device, version):
            return ()
        leaves = [v for v, home in self._step.homes.items() if home == stage]
        return tuple((device, self.leaf(v, version)) for v in leaves)

    def _is_stashed(self, stage: int, device: int, version: int) -> bool:
        last, call = self._last_backward(stage, device, version), version + self._calls.updates[stage]
        return self._calls.stashes and last + self._calls.backward(stage) > call

    def _last_backward(self, stage: int, device: int, version: int) -> int:
        replicas, last = self._calls.stage_devices[stage], version + self._calls.missed(stage)[0]
        back = (last - replicas.index(device)) % len(replicas)
        return last - back if version == 0 or back == 0 else -1 - last - self._calls.backward(stage)


_PHASES = ("before", "F", "B", "update")


def last_updates(step: StagedStep) -> dict[StageProgram, tuple[Var, ...]]:
    """Maps each update program to the leaves of its stage that no later one reads or writes."""
    assert step.asynchronous is not None, "minibatches aren't flushed"
    leaves = {new: leaf for leaf, new in step.asynchronous.news.items()} | {leaf: leaf for leaf in step.homes}
    last = {
        leaves[v]: program
        for program in step.programs
        if program.phase == "update"
        for v in (*program.block.inputs, *program.outputs)
        if v in leaves
    }
    found: dict[StageProgram, tuple[Var, ...]] = {}
    for leaf, program in last.items():
        found[program] = (*found.get(program, ()), leaf)
    return found


def asynchronous_timeline(step: StagedStep, minibatches: int, everywhere: Iterable[int] = ()) -> Timeline:
    """Returns the verified timeline from the first minibatch to the end of the last one.

    `everywhere`: as in `MinibatchLister`.
    """
    lister = MinibatchLister(step, everywhere)
    assert step.asynchronous is not None, "minibatches aren't flushed"
    each = [lister.minibatch(m) for m in range(minibatches)]
    listed = [
        pair
        for call in range(minibatches + step.asynchronous.calls.last)
        for m in reversed(range(max(0, call - step.asynchronous.calls.last), min(call + 1, minibatches)))
        for pair in each[m].calls[call - m]
    ]
    results = {value: devices for m in each for value, devices in m.results.items()}
    given = lister.given()
    timeline = Timeline(
        actions=tuple(action for action, _ in listed),
        drops=tuple(drops for _, drops in listed),
        given=given,
        arguments=_arguments(listed, given),
        results=results | lister.versions(minibatches),
        microbatches=minibatches,
    )
    verify_timeline(timeline)
    verify_versions(timeline, stashes=step.asynchronous.calls.stashes)
    return timeline


def verify_versions(timeline: Timeline, *, stashes: bool) -> None:
    """Raises AssertionError, naming the action, unless tasks see the versions that their schedule promises.

    Versions are counted by the list's own updates: a forward sees the newest one, a backward too or, if versions are
    stashed, that of its minibatch's forward; an update sees that of its minibatch, or the one that it makes.
    """
    newest: dict[tuple[int, Var], int] = {(k, v.var): 0 for v, devices in timeline.given.items() for k in devices}
    forward: dict[tuple[int, Var], int] = {}
    for action in (action for action in timeline.actions if isinstance(action, Run)):
        for value in action.reads:
            key, phase = (action.device, value.var), action.program.phase
            if key not in newest:
                continue
            expected = newest[key]
            if phase == "F":
                forward[(action.microbatch or 0), value.var] = value.version
            elif phase == "B" and stashes:
                expected = forward.get((action.microbatch or 0, value.var), expected)
            elif phase == "update":
                expected = action.microbatch or 0
                expected += value.version > expected and newest[key] > expected
            assert value.version == expected, (
                f"{phase}{action.program.stage}({action.microbatch}) on device {action.device} sees version "
                f"{value.version} of {value.var.type} in place of {expected}"
            )
        for value in action.writes:
            if (action.device, value.var) in newest:
                assert value.version == newest[action.device, value.var] + 1, "updates follow one another"
                newest[action.device, value.var] += 1


def _arguments(listed: Listed, given: Iterable[Value]) -> frozenset[Value]:
    made = {value for action, _ in listed for value in writes_of(action)} | {*given}
    return frozenset(value for action, _ in listed for value in reads_of(action) if value not in made)


# --- a synchronous pipeline: all microbatches of a step in a schedule's order, then the update ---


def stage_timeline(
    step: StagedStep, schedule: Schedule, wanted: Mapping[Var, Iterable[int]] = MappingProxyType({})
) -> Timeline:
    """Returns the verified timeline of all devices. `wanted`: result -> devices that must have it."""
    timeline = _Lister(step, schedule, wanted).run()
    verify_timeline(timeline)
    return timeline


class _Lister:
    def __init__(self, step: StagedStep, schedule: Schedule, wanted: Mapping[Var, Iterable[int]]) -> None:
        self._step, self._schedule, self._name = step, schedule, Names()
        self._wanted = {self._name(v): tuple(devices) for v, devices in wanted.items()}
        self._each = {(p.phase, p.stage): p for p in step.programs if p.phase in ("F", "B", "W")}
        self._of_microbatch = {v for p in self._each.values() for v in p.outputs} | set(step.parts)
        self._joined_at = {v: p.stage for p in self._each.values() for v in p.outputs if v in step.joins}
        self._results = [self._name(v) for v in step.results if v not in step.homes]

    def run(self) -> Timeline:
        work = [*self._once("before"), *self._tasks(), *self._joins(), *self._once("update")]
        given = {self._name(v): self._schedule.stage_devices[stage] for v, stage in self._step.homes.items()}
        makers = {value: list(devices) for value, devices in given.items()}
        for action in work:
            for value in writes_of(action):
                makers.setdefault(value, [])
                if action.device not in makers[value]:
                    makers[value].append(action.device)
        targets = targets_of(work, makers, self._wanted)
        actions: list[Action] = [s for value in given for s in self._sends(value, makers, targets)]
        for action in work:
            if isinstance(action, Join):  # sums are complete
                sums = [part for parts, join in action.made.values() if isinstance(join, str) for part in parts]
                actions += [s for value in sums for s in self._sends(value, makers, targets)]
            actions.append(action)
            for value in action.made if isinstance(action, Join) else action.writes:
                if makers[value][0] == action.device:
                    actions += self._sends(value, makers, targets)
        results = {value: self._home(makers[value]) for value in self._results if value in makers} | self._wanted
        arguments = frozenset(value for action in work for value in reads_of(action) if value not in makers)
        kept = {(device, value) for value in (*self._results, *given) for device in range(self._schedule.devices)}
        return Timeline(tuple(actions), last_touches(actions, kept), given, arguments, results, self._step.microbatches)

    def _home(self, makers: Sequence[int]) -> tuple[int, ...]:
        replicas = next(replicas for replicas in self._schedule.stage_devices if makers[0] in replicas)
        return replicas if set(replicas) <= set(makers) else (makers[0],)

    def _once(self, phase: str) -> Iterator[Run]:
        for program in self._step.programs:
            if program.phase == phase:
                reads, writes = ([*map(self._name, each)] for each in (program.block.inputs, program.outputs))
                for device in self._schedule.stage_devices[program.stage]:
                    yield Run(program, device, None, tuple(reads), tuple(writes))

    def _tasks(self) -> Iterator[Run]:
        for task in self._schedule.issue_order():
            program = self._each.get((task.kind, task.stage))
            if program is None:
                continue
            part = Microbatch(task.microbatch)
            reads = [self._name(v, part) if v in self._of_microbatch else self._name(v) for v in program.block.inputs]
            writes = [self._name(v, part) for v in program.outputs]
            device = self._schedule.device_of(task.stage, task.microbatch)
            replica = SumOf(self._schedule.stage_devices[task.stage].index(device))
            sums = {v: self._name(v, replica) for v in program.outputs if isinstance(self._join(v), str)}
            yield Run(program, device, task.microbatch, tuple(reads), tuple(writes), sums)

    def _join(self, var: Var) -> str | int | None:
        return self._step.joins[var][1] if var in self._step.joins else None

    def _joins(self) -> Iterator[Join]:
        count = self._step.microbatches
        for stage, replicas in enumerate(self._schedule.stage_devices):
            made: dict[Value, tuple[tuple[Value, ...], str | int]] = {}
            for var, (whole, join) in self._step.joins.items():
                if self._joined_at[var] != stage:
                    continue
                parts = [Microbatch(m) for m in range(count)]
                if isinstance(join, str):
                    parts = [SumOf(k) for k in range(min(len(replicas), count))]
                made[self._name(whole)] = tuple(self._name(var, part) for part in parts), join
            if made:
                yield Join(replicas[0], made)

    def _sends(
        self, value: Value, makers: Mapping[Value, Sequence[int]], targets: Mapping[Value, Sequence[int]]
    ) -> list[Send]:
        return [Send(value, makers[value][0], target) for target in targets.get(value, ())]
