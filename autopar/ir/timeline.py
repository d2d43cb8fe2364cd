"""Describes a step as one list of actions on named values: programs, sends, sums. Data only.

Each device runs its own actions in the order of the list; a send is an action of both its ends. So two devices see
their common sends in the same order, and no message needs a name. Pure functions make a pipeline's list
for devices of one process as for ranks, a synchronous one at once, an asynchronous one minibatch by minibatch, while it
runs (`ir.pipeline`); `verify_timeline` checks it before it runs.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from autopar.ir.pipeline import Asynchronous, StagedStep, StageProgram
from autopar.ir.program import Var
from autopar.ir.schedule import Kind, Schedule


@dataclass(frozen=True, slots=True)
class Whole:
    """Marks a value of the whole step."""


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Marks a value of a microbatch, numbered from 0."""

    number: int


@dataclass(frozen=True, slots=True)
class SumOf:
    """Marks the sum of a replica (numbered from 0 within its stage) over its microbatches."""

    replica: int


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """A value of one microbatch and version. A timeline has one object for each (`Names`), so runtimes compare
    identities."""

    var: Var  #: Its name in the programs.
    #: The whole step, a microbatch, or a replica's sum.
    part: Whole | Microbatch | SumOf = field(default_factory=Whole)
    version: int = 0  #: Number of updates behind it; 0 except for leaves of the state in a timeline of several steps.


class Names:
    """The values of a timeline, by variable, part and version."""

    def __init__(self) -> None:
        self._values: dict[tuple[object, ...], Value] = {}

    def __call__(self, var: Var, part: Whole | Microbatch | SumOf = Whole(), version: int = 0) -> Value:
        key = var, part, version
        if key not in self._values:
            self._values[key] = Value(*key)
        return self._values[key]


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """A program runs on a device."""

    program: StageProgram
    device: int
    microbatch: int | None  #: Its number; None of a program that runs once.
    #: The values of its block's inputs and outputs.
    reads: tuple[Value, ...]
    writes: tuple[Value, ...]
    #: Outputs that are added to sums of its device -> the sums.
    sums: Mapping[Var, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Send:
    """A value goes from one device to another as soon as it is made."""

    value: Value
    source: int
    target: int


@dataclass(frozen=True, slots=True, eq=False)
class Join:
    """A device adds up the sums of a stage's replicas, or concatenates the results of all microbatches."""

    device: int
    #: Result -> its parts, and the name of a reduction or the axis of the examples.
    made: Mapping[Value, tuple[tuple[Value, ...], str | int]]


Action = Run | Send | Join
#: Values that devices drop after an action.
Drops = tuple[tuple[int, Value], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """A step's actions."""

    actions: tuple[Action, ...]
    drops: tuple[Drops, ...]  #: For each action, (device, value) that are not read after it.
    given: Mapping[Value, tuple[int, ...]]  #: Leaves of the state -> devices that have them before the first action.
    arguments: frozenset[Value]  #: The call's other inputs, which any device may read.
    results: Mapping[Value, tuple[int, ...]]  #: Wanted values -> devices that have them at the end.
    microbatches: int  #: M.

    def sends(self) -> Iterator[Send]:
        return (action for action in self.actions if isinstance(action, Send))


def reads_of(action: Action) -> Sequence[Value]:
    """Returns the values that an action needs where it runs; a send, at its source."""
    if isinstance(action, Run):
        return action.reads
    if isinstance(action, Send):
        return (action.value,)
    return [part for parts, _ in action.made.values() for part in parts]


def writes_of(action: Action) -> Sequence[Value]:
    """Returns the values that an action makes where it runs, sums that it adds to included; a send, at its target."""
    if isinstance(action, Run):
        return (*action.writes, *action.sums.values())
    return (action.value,) if isinstance(action, Send) else tuple(action.made)


def targets_of(
    work: Iterable[Run | Join], makers: Mapping[Value, Sequence[int]], wanted: Mapping[Value, Iterable[int]]
) -> dict[Value, list[int]]:
    """Maps values to the devices, in order, that read or want them and don't make them."""
    targets: dict[Value, list[int]] = {}
    read = [(value, action.device) for action in work for value in reads_of(action)]
    read += [(value, device) for value, devices in wanted.items() for device in devices]
    for value, device in read:
        if value in makers and device not in makers[value]:
            targets.setdefault(value, [])
            if device not in targets[value]:
                targets[value].append(device)
    return targets


def last_touches(actions: Sequence[Action], kept: Iterable[tuple[int, Value]]) -> tuple[Drops, ...]:
    """Returns for each action the values that are read or made there for the last time, except for `kept`."""
    seen = set(kept)
    drops: list[Drops] = []
    for action in reversed(actions):
        last = []
        for at in _touched(action):
            if at not in seen:
                seen.add(at)
                last.append(at)
        drops.append(tuple(last))
    return tuple(drops[::-1])


def _touched(action: Action) -> list[tuple[int, Value]]:
    if isinstance(action, Send):
        return [(action.source, action.value)]
    return [(action.device, value) for value in (*reads_of(action), *writes_of(action))]


def verify_timeline(timeline: Timeline) -> None:
    """Raises AssertionError, naming the action, unless devices can run the list and lose nothing.

    Each read has an earlier writer on its device, whose value wasn't dropped; each send leaves a device that has the
    value for one that hasn't; values are made once; each sum has each microbatch of its replicas once; results are
    where they are wanted. There is one list, in which everything is written before it is read, so devices can't
    deadlock.
    """
    assert len(timeline.actions) == len(timeline.drops), "every action has its drops"
    held = {(device, value) for value, devices in timeline.given.items() for device in devices}
    dropped: set[tuple[int, Value]] = set()
    summed: dict[Value, list[int | None]] = collections.defaultdict(list)
    for action, drops in zip(timeline.actions, timeline.drops, strict=True):
        where = action.source if isinstance(action, Send) else action.device
        for value in reads_of(action):
            if value in timeline.arguments and (where, value) not in dropped:
                held.add((where, value))
            assert (where, value) not in dropped, f"{_describe(action)} reads {_named(value)}, which was dropped before"
            assert (where, value) in held, (
                f"{_describe(action)} reads {_named(value)}, which device {where} doesn't have"
            )
        at = action.target if isinstance(action, Send) else action.device
        sums = set(action.sums.values()) if isinstance(action, Run) else set()
        once_more = isinstance(action, Run) and action.microbatch is None  # stages of a device may share it
        for value in writes_of(action):
            assert once_more or value in sums or (at, value) not in held, (
                f"{_describe(action)} makes {_named(value)} once more"
            )
            held.add((at, value))
        for value in sums:
            summed[value].append(action.microbatch)  # type: ignore[union-attr]
        if isinstance(action, Join):
            _verify_sums(action, summed, timeline.microbatches)
        for each in drops:
            assert each in held, f"device {each[0]} drops {_named(each[1])}, which it doesn't have"
            held.remove(each)
            dropped.add(each)
    for value, devices in timeline.results.items():
        missing = [device for device in devices if (device, value) not in held]
        assert not missing, f"devices {missing} don't have the result {_named(value)}"


def _verify_sums(action: Join, summed: Mapping[Value, Sequence[int | None]], microbatches: int) -> None:
    for whole, (parts, join) in action.made.items():
        expected = [whole.part.number] if isinstance(whole.part, Microbatch) else [*range(microbatches)]
        if isinstance(join, str):
            numbers = (n for part in parts for n in summed.get(part, [getattr(part.part, "number", None)]))
            found = sorted(number for number in numbers if number is not None)
            assert found == expected, f"{_named(whole)} is summed over the microbatches {found}"
        else:
            assert len(parts) == len(expected), f"{_named(whole)} has {len(parts)} parts of {len(expected)}"


def _named(value: Value) -> str:
    version = f", version {value.version}" if value.version else ""
    return f"{value.var.type} of {value.part}{version}"


def _describe(action: Action) -> str:
    if isinstance(action, Run):
        return f"{action.program.phase}{action.program.stage}({action.microbatch}) on device {action.device}"
    if isinstance(action, Send):
        return f"the send from device {action.source} to {action.target}"
    return f"the join on device {action.device}"


#: Actions, each with what is dropped after it.
Listed = list[tuple[Action, Drops]]


@dataclass(frozen=True, slots=True, eq=False)
class Minibatch:
    """The actions of a minibatch."""

    calls: tuple[Listed, ...]  #: Its actions, by the call in which they run, counted from its own.
    #: Its results -> the devices that have them after the last of these calls.
    results: Mapping[Value, tuple[int, ...]]


class MinibatchLister:
    """Lists the actions of a pipeline's devices for each minibatch, without a flush. `everywhere`: devices that get a
    minibatch's results; none: they stay where they are made. `again`: names of past minibatches and versions are
    reused, and so whole lists."""

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
