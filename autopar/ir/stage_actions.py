"""What the devices of a pipeline do in a step, as one list in the schedule's order: programs, sends, sums.

Each device runs its part of the list from the first action to the last; a send is an action of both its ends. So two
devices see their common sends in the same order, and no message needs a name. A pure function makes the list, whoever
runs it: the devices of one process, or ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from autopar.ir.pipeline import StagedStep, StageProgram
from autopar.ir.program import Var
from autopar.ir.schedule import Schedule

#: Of the whole step. A microbatch's values have its number, from 0; the sum that replica k keeps has -2 - k.
WHOLE = -1
Value = tuple[Var, int]


def sum_of(var: Var, replica: int) -> Value:
    """What a replica has summed of a value of its microbatches."""
    return var, -2 - replica


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """A program runs on a device.

    Attributes:
      program, device: Which, and where.
      microbatch: Which one; `WHOLE` for what runs once.
      reads: What its block's inputs are.
      sums: Outputs of it that are added to the sums of its device -> those.
    """

    program: StageProgram
    device: int
    microbatch: int
    reads: tuple[Value, ...]
    sums: Mapping[Var, Value]


@dataclass(frozen=True, slots=True)
class Send:
    """A value goes from a device to another, as soon as it is made."""

    value: Value
    source: int
    target: int


@dataclass(frozen=True, slots=True, eq=False)
class Join:
    """A device adds up the sums of a stage's replicas, or puts the results of all microbatches together.

    Attributes:
      device: Where.
      made: What becomes of them -> its parts, and the name of a reduction or the axis of the examples.
    """

    device: int
    made: Mapping[Var, tuple[tuple[Value, ...], str | int]]


Action = Run | Send | Join


@dataclass(frozen=True, slots=True, eq=False)
class Actions:
    """A step's list.

    Attributes:
      actions: In order.
      drops: For each action what no device reads after it: device and value.
      leaves: For each leaf of the state its stage's devices.
      homes: For each of the step's results the devices that have it in the end; none of what the call was given.
    """

    actions: tuple[Action, ...]
    drops: tuple[tuple[tuple[int, Value], ...], ...]
    leaves: Mapping[Var, tuple[int, ...]]
    homes: Mapping[Var, tuple[int, ...]]

    def sends(self) -> Iterator[Send]:
        """All of them."""
        return (action for action in self.actions if isinstance(action, Send))


def list_actions(
    step: StagedStep, schedule: Schedule, wanted: Mapping[Var, Iterable[int]] = MappingProxyType({})
) -> Actions:
    """The actions of all devices.

    Args:
      step: The programs.
      schedule: The order of each device's tasks.
      wanted: Result -> devices that are to have it, wherever it is made.
    """
    return _Lister(step, schedule, wanted).run()


class _Lister:
    def __init__(self, step: StagedStep, schedule: Schedule, wanted: Mapping[Var, Iterable[int]]) -> None:
        self._step, self._schedule, self._wanted = step, schedule, wanted
        self._each = {(p.phase, p.stage): p for p in step.programs if p.phase in ("F", "B", "W")}
        self._of_microbatch = {v for p in self._each.values() for v in p.outputs} | set(step.parts)
        self._joined_at = {v: p.stage for p in self._each.values() for v in p.outputs if v in step.joins}

    def run(self) -> Actions:
        work = [*self._once("before"), *self._tasks(), *self._joins(), *self._once("update")]
        makers: dict[Value, list[int]] = {}
        makers |= {(v, WHOLE): list(self._schedule.places[stage]) for v, stage in self._step.homes.items()}
        for action in work:
            for value in _writes(action):
                makers.setdefault(value, [])
                if action.device not in makers[value]:
                    makers[value].append(action.device)
        targets = self._targets(work, makers)
        actions: list[Action] = [s for var in self._step.homes for s in self._sends((var, WHOLE), makers, targets)]
        for action in work:
            if isinstance(action, Join):  # sums are complete
                sums = [part for parts, join in action.made.values() if isinstance(join, str) for part in parts]
                actions += [s for value in sums for s in self._sends(value, makers, targets)]
            actions.append(action)
            for value in _made(action):
                if makers[value][0] == action.device:
                    actions += self._sends(value, makers, targets)
        homes = {v: self._home(makers[v, WHOLE]) for v in self._results() if (v, WHOLE) in makers}
        homes |= {v: tuple(devices) for v, devices in self._wanted.items()}
        leaves = {v: self._schedule.places[stage] for v, stage in self._step.homes.items()}
        return Actions(tuple(actions), tuple(self._drops(actions)), leaves, homes)

    def _results(self) -> list[Var]:
        return [v for v in self._step.results if v not in self._step.homes]

    def _home(self, makers: Sequence[int]) -> tuple[int, ...]:
        """Of all that made it the devices of the first one's stage, if all of these did."""
        replicas = next(replicas for replicas in self._schedule.places if makers[0] in replicas)
        return replicas if set(replicas) <= set(makers) else (makers[0],)

    def _once(self, phase: str) -> Iterator[Run]:
        for program in self._step.programs:
            if program.phase == phase:
                reads = tuple((a, WHOLE) for a in program.block.inputs)
                yield from (Run(program, d, WHOLE, reads, {}) for d in self._schedule.places[program.stage])

    def _tasks(self) -> Iterator[Run]:
        for task in self._schedule.issue_order():
            program = self._each.get((task.kind, task.stage))
            if program is None:
                continue
            reads = tuple((a, task.microbatch if a in self._of_microbatch else WHOLE) for a in program.block.inputs)
            device = self._schedule.device_of(task.stage, task.microbatch)
            replica = self._schedule.places[task.stage].index(device)
            sums = {v: sum_of(v, replica) for v in program.outputs if isinstance(self._join(v), str)}
            yield Run(program, device, task.microbatch, reads, sums)

    def _join(self, var: Var) -> str | int | None:
        return self._step.joins[var][1] if var in self._step.joins else None

    def _joins(self) -> Iterator[Join]:
        """One for each stage, on its first device."""
        count = self._step.microbatches
        for stage, replicas in enumerate(self._schedule.places):
            made: dict[Var, tuple[tuple[Value, ...], str | int]] = {}
            for var, (whole, join) in self._step.joins.items():
                if self._joined_at[var] != stage:
                    continue
                parts = tuple((var, m) for m in range(count))
                if isinstance(join, str):
                    parts = tuple(sum_of(var, k) for k in range(min(len(replicas), count)))
                made[whole] = parts, join
            if made:
                yield Join(replicas[0], made)

    def _targets(self, work: Sequence[Run | Join], makers: Mapping[Value, Sequence[int]]) -> dict[Value, list[int]]:
        """Value -> the devices that read it and don't make it, in order."""
        targets: dict[Value, list[int]] = {}
        wanted = [(value, action.device) for action in work for value in _reads(action)]
        wanted += [((var, WHOLE), device) for var, devices in self._wanted.items() for device in devices]
        for value, device in wanted:
            if value in makers and device not in makers[value]:
                targets.setdefault(value, [])
                if device not in targets[value]:
                    targets[value].append(device)
        return targets

    def _sends(
        self, value: Value, makers: Mapping[Value, Sequence[int]], targets: Mapping[Value, Sequence[int]]
    ) -> list[Send]:
        return [Send(value, makers[value][0], target) for target in targets.get(value, ())]

    def _drops(self, actions: Sequence[Action]) -> list[tuple[tuple[int, Value], ...]]:
        """What is read for the last time. Leaves of the state and results are the caller's."""
        devices = range(self._schedule.devices)
        seen = {(device, (v, WHOLE)) for v in (*self._results(), *self._step.homes) for device in devices}
        drops: list[tuple[tuple[int, Value], ...]] = []
        for action in reversed(actions):
            last = []
            for at in _touched(action):
                if at not in seen:
                    seen.add(at)
                    last.append(at)
            drops.append(tuple(last))
        return drops[::-1]


def _made(action: Run | Join) -> Iterator[Value]:
    """What an action makes, but for sums that it adds to."""
    if isinstance(action, Join):
        yield from ((whole, WHOLE) for whole in action.made)
    else:
        yield from ((v, action.microbatch) for v in action.program.outputs)


def _writes(action: Run | Join) -> Iterator[Value]:
    yield from _made(action)
    if isinstance(action, Run):
        yield from action.sums.values()


def _reads(action: Run | Join) -> Iterator[Value]:
    if isinstance(action, Join):
        yield from (part for parts, _ in action.made.values() for part in parts)
    else:
        yield from action.reads


def _touched(action: Action) -> list[tuple[int, Value]]:
    """What an action reads or makes, and where."""
    if isinstance(action, Send):
        return [(action.source, action.value)]
    return [(action.device, value) for value in (*_reads(action), *_writes(action))]
