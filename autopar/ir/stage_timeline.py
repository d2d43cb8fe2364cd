"""Builds the timeline of a synchronous pipeline: all microbatches of a step in a schedule's order, then the update."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from autopar.ir.pipeline import StagedStep
from autopar.ir.program import Var
from autopar.ir.schedule import Schedule
from autopar.ir.timeline import (
    Action,
    Join,
    Microbatch,
    Names,
    Run,
    Send,
    SumOf,
    Timeline,
    Value,
    last_touches,
    reads_of,
    targets_of,
    verify_timeline,
    writes_of,
)


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
        given = {self._name(v): self._schedule.places[stage] for v, stage in self._step.homes.items()}
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
        replicas = next(replicas for replicas in self._schedule.places if makers[0] in replicas)
        return replicas if set(replicas) <= set(makers) else (makers[0],)

    def _once(self, phase: str) -> Iterator[Run]:
        for program in self._step.programs:
            if program.phase == phase:
                reads, writes = ([*map(self._name, each)] for each in (program.block.inputs, program.outputs))
                for device in self._schedule.places[program.stage]:
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
            replica = SumOf(self._schedule.places[task.stage].index(device))
            sums = {v: self._name(v, replica) for v in program.outputs if isinstance(self._join(v), str)}
            yield Run(program, device, task.microbatch, tuple(reads), tuple(writes), sums)

    def _join(self, var: Var) -> str | int | None:
        return self._step.joins[var][1] if var in self._step.joins else None

    def _joins(self) -> Iterator[Join]:
        count = self._step.microbatches
        for stage, replicas in enumerate(self._schedule.places):
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
