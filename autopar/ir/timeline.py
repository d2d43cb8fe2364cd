"""Describes a step as one list of actions on named values: programs, sends, sums. Data only.

Each device runs its own actions in the order of the list; a send is an action of both its ends. So two devices see
their common sends in the same order, and no message needs a name. A pure function makes a pipeline's list
(`ir.pipeline_timeline`) for devices of one process as for ranks; `verify_timeline` checks it before it runs.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.ir.pipeline import StageProgram
from autopar.ir.program import Var


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
            assert (where, value) not in dropped, f"{_told(action)} reads {_named(value)}, which was dropped before"
            assert (where, value) in held, f"{_told(action)} reads {_named(value)}, which device {where} doesn't have"
        at = action.target if isinstance(action, Send) else action.device
        sums = set(action.sums.values()) if isinstance(action, Run) else set()
        once_more = isinstance(action, Run) and action.microbatch is None  # stages of a device may share it
        for value in writes_of(action):
            assert once_more or value in sums or (at, value) not in held, (
                f"{_told(action)} makes {_named(value)} once more"
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


def _told(action: Action) -> str:
    if isinstance(action, Run):
        return f"{action.program.phase}{action.program.stage}({action.microbatch}) on device {action.device}"
    if isinstance(action, Send):
        return f"the send from device {action.source} to {action.target}"
    return f"the join on device {action.device}"
