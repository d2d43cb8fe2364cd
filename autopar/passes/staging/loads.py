"""Computes the loads of a pipeline's stages: their computation, sends and memory.

A weight that lives in one stage and is read by others (tied embeddings) is sent in each step, its gradient back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.analysis.tensor import Divider, Division
from autopar.analysis.work import equation_work
from autopar.cost.rates import StageRates
from autopar.cost.stage_time import Layer
from autopar.ir.program import Equation, Var
from autopar.ir.schedule import StageDevices
from autopar.passes.staging.layers import CutProgram
from autopar.passes.staging.parts import NOWHERE, Label, Parts, homes_before, read_by


@dataclass(slots=True)
class StageLoad:
    """The load of one stage, for a microbatch unless stated otherwise."""

    #: Kind of task -> floating-point operations of its products; bytes that it reads and writes.
    flops: dict[str, float] = field(default_factory=dict)
    moved: dict[str, float] = field(default_factory=dict)
    #: Kind of task -> bytes that each device of a tensor axis sends to the others; number of exchanges.
    exchanged: dict[str, float] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    sent: int = 0  #: Bytes that cross the border to the stage before it, both ways.
    #: Bytes that it sends to later stages, and to earlier ones.
    ahead: int = 0
    back: int = 0
    tied: int = 0  #: Bytes that cross that border in a step, for weights used on both sides.
    activation: int = 0  #: Bytes that its forward leaves for its backward.
    gradient: int = 0  #: Bytes of the sums over microbatches.
    state: int = 0  #: Bytes of its leaves.
    #: Leaves that live in it, and functions of them that are computed before the microbatches.
    homed: set[Var] = field(default_factory=set)
    #: Other stage's leaf that it reads (tied embeddings) -> its bytes.
    copies: dict[Var, int] = field(default_factory=dict)

    def seconds(self, rates: StageRates) -> dict[str, float]:
        return {
            kind: rates.seconds(flops, self.moved[kind])
            + rates.send_byte_s * self.exchanged.get(kind, 0.0)
            + rates.call_s * self.calls.get(kind, 0)
            for kind, flops in self.flops.items()
        }

    def as_layer(self, rates: StageRates, microbatches: int) -> Layer:
        """Returns the load as a layer of a partition, without the cost of a program."""
        sent = self.sent + self.tied / microbatches
        seconds = sum(each - rates.call_s for each in self.seconds(rates).values())
        return Layer(seconds, sent, self.state, self.gradient, self.activation)

    def scaled(self, factor: float) -> StageLoad:
        """Returns the load for microbatches `factor` times as large, if everything grows with them."""
        return self.mixed(StageLoad(), factor)

    def mixed(self, other: StageLoad, share: float) -> StageLoad:
        """Mixes this load (by `share`) with that of the same stage for microbatches of another size."""

        def mix(own: float, others: float) -> float:
            return max(0.0, share * own + (1 - share) * others)

        def each(own: Mapping[str, float], others: Mapping[str, float]) -> dict[str, float]:
            return {kind: mix(own.get(kind, 0.0), others.get(kind, 0.0)) for kind in {**own, **others}}

        return replace(
            self,
            flops=each(self.flops, other.flops),
            moved=each(self.moved, other.moved),
            exchanged=each(self.exchanged, other.exchanged),
            sent=round(mix(self.sent, other.sent)),
            ahead=round(mix(self.ahead, other.ahead)),
            back=round(mix(self.back, other.back)),
            activation=round(mix(self.activation, other.activation)),
        )

    @staticmethod
    def of_all(loads: Sequence[StageLoad]) -> StageLoad:
        """Returns the load of adjacent stages together."""
        whole = StageLoad(sent=loads[0].sent, tied=loads[0].tied)
        for load in loads:
            for kind in load.flops:
                whole.flops[kind] = whole.flops.get(kind, 0.0) + load.flops[kind]
                whole.moved[kind] = whole.moved.get(kind, 0.0) + load.moved[kind]
            for kind, calls in load.calls.items():
                whole.exchanged[kind] = whole.exchanged.get(kind, 0.0) + load.exchanged[kind]
                whole.calls[kind] = whole.calls.get(kind, 0) + calls
            whole.activation += load.activation
            whole.gradient += load.gradient
            whole.state += load.state
            whole.homed |= load.homed
            whole.copies |= load.copies
        whole.copies = {var: size for var, size in whole.copies.items() if var not in whole.homed}
        return whole


def stage_loads(
    parts: Parts,
    labels: Mapping[Equation, Label],
    homes: Mapping[Var, int],
    stage_devices: StageDevices,
    division: Division,
) -> list[StageLoad]:
    """Returns the load of each stage, for one of the devices that divide its products. `labels`: each equation's stage
    and direction (`label_parts`). `homes`: the stage of each leaf of the state. `stage_devices`: those of each stage;
    stages of one device send each other nothing. `division`: of `DividedLeaves.follow`."""
    loads = [StageLoad() for _ in stage_devices]
    made: dict[Var, Label] = {}
    for equation in parts.body.equations:
        label = labels[equation]
        if label.stage == NOWHERE:
            continue
        _add_work(loads[label.stage], label.direction, equation, division)
        made.update(dict.fromkeys(equation.outputs, label))
    for var, readers in _readers(parts, labels).items():
        if var in made:
            _add_value(loads, var, made[var], readers, stage_devices, division)
    outer, known = read_by(parts), homes_before(parts, homes)
    for inner, readers in _readers(parts, labels).items():
        home = known.get(outer[inner]) if inner in outer else None
        if home is None:
            continue
        loads[home].homed.add(outer[inner])
        for stage in {r.stage for r in readers} - {home}:
            loads[stage].copies[outer[inner]] = held_bytes(inner, division)
            for border in _borders(home, stage):
                loads[border].tied += 2 * _bytes(inner)
    for inner, outer_var in zip(parts.body.outputs, parts.step.outputs, strict=True):
        if isinstance(inner, Var) and inner in made:
            size, label = held_bytes(outer_var, division), made[inner]
            loads[label.stage].gradient += size
            loads[label.stage].moved[label.direction] += 2 * size  # the sum so far is read, and written
    for var, stage in homes.items():
        loads[stage].state += held_bytes(var, division)
    return loads


def _readers(parts: Parts, labels: Mapping[Equation, Label]) -> dict[Var, set[Label]]:
    readers: dict[Var, set[Label]] = {}
    for equation in parts.body.equations:
        label = labels[equation]
        for atom in equation.inputs if label.stage != NOWHERE else ():
            if isinstance(atom, Var):
                readers.setdefault(atom, set()).add(label)
    return readers


def _add_work(load: StageLoad, kind: str, equation: Equation, division: Division) -> None:
    """Counts what an equation computes, reads and writes on each device, and what the devices exchange for it."""
    flops, moved = equation_work(equation)
    saved = 1 - 1 / division.devices
    if equation in division.flops or any(v in division.axes for v in equation.outputs):
        moved -= saved * moved
    load.flops[kind] = load.flops.get(kind, 0.0) + flops - saved * division.flops.get(equation, 0.0)
    load.moved[kind] = load.moved.get(kind, 0.0) + moved
    for exchange in division.exchanges.get(equation, ()):
        load.exchanged[kind] = load.exchanged.get(kind, 0.0) + exchange.sent(division.devices)
        load.calls[kind] = load.calls.get(kind, 0) + exchange.times


def _add_value(
    loads: list[StageLoad], var: Var, made: Label, readers: set[Label], stage_devices: StageDevices, division: Division
) -> None:
    """Counts the bytes of a value that are sent, and that a forward keeps for a backward."""
    size = _bytes(var)
    stages = {r.stage for r in readers}
    for stage in stages:
        for border in _borders(made.stage, stage):
            loads[border].sent += size
    own = loads[made.stage]
    others = {stage_devices[stage]: stage for stage in stages if stage_devices[stage] != stage_devices[made.stage]}
    for stage in others.values():
        own.ahead, own.back = (own.ahead + size, own.back) if stage > made.stage else (own.ahead, own.back + size)
    kept = {r.stage for r in readers if made.direction == "F" and r.direction != "F"}
    for stage in kept:
        loads[stage].activation += held_bytes(var, division)


def _borders(start: int, end: int) -> Iterator[int]:
    return iter(range(min(start, end) + 1, max(start, end) + 1))


def held_bytes(var: Var, division: Division) -> int:
    """Returns the bytes of a device's part of a value."""
    return -(-_bytes(var) // division.devices) if var in division.axes else _bytes(var)


def _bytes(var: Var) -> int:
    return int(getattr(var.type, "nbytes", 0))


# --- products that are divided within the stages of a pipeline, over the devices of a tensor axis ---
#
# `passes.choose` decides which leaves are divided for the step as a whole; here they are followed through the programs
# that stages are cut from.


@dataclass(frozen=True, slots=True, eq=False)
class DividedLeaves:
    """The leaves of a program that are divided over T devices."""

    devices: int = 1
    axes: Mapping[Var, int] = field(default_factory=dict)  #: Divided leaf -> its axis.

    def within(self, cut: CutProgram) -> DividedLeaves:
        """Returns the divided leaves of the program with stacked leaves in parts; layers aren't divided."""
        return DividedLeaves(self.devices, {part: axis for v, axis in self.axes.items() for part in cut.parts(v)})

    def follow(self, parts: Parts) -> Division:
        divider = Divider(self.axes, self.devices)
        if self.axes:
            divider.run(parts.before)
            for inner, outer in read_by(parts).items():
                divider.same(inner, outer)
            divider.run(parts.body.equations)
            for inner, outer in zip(parts.body.outputs, parts.step.outputs, strict=True):
                divider.same(outer, inner)
            divider.run(parts.after)
        return divider.division
