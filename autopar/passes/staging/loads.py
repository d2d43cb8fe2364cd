"""What each stage of a pipeline computes, sends and holds: of the stages that a step is cut into, or of all its layers.

What several stages read of a weight that lives in one (tied embeddings) is sent in each step, its gradient back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.analysis.stages import NOWHERE, Label
from autopar.analysis.work import equation_work
from autopar.cost.partition import Layer
from autopar.cost.rates import StageRates
from autopar.ir.program import Equation, Var
from autopar.ir.schedule import Places
from autopar.passes.staging.parts import Parts, homes_before, read_by


@dataclass(slots=True)
class StageLoad:
    """Of one stage, for a microbatch where nothing else is said.

    Attributes:
      flops, moved: Kind of task -> floating-point operations of its products, and bytes that it reads and writes.
      sent: Bytes that cross the border with the stage before it, both ways.
      ahead, back: Bytes that it sends to later stages, and to earlier ones.
      tied: Bytes that cross it in a step for weights that are used on both sides.
      activation: What its forward leaves for its backward.
      gradient: Of the sums over microbatches.
      state: Of its leaves.
    """

    flops: dict[str, float] = field(default_factory=dict)
    moved: dict[str, float] = field(default_factory=dict)
    sent: int = 0
    ahead: int = 0
    back: int = 0
    tied: int = 0
    activation: int = 0
    gradient: int = 0
    state: int = 0

    def seconds(self, rates: StageRates) -> dict[str, float]:
        """Kind of task -> its seconds."""
        return {kind: rates.seconds(self.flops[kind], self.moved[kind]) for kind in self.flops}

    def as_layer(self, rates: StageRates, microbatches: int) -> Layer:
        """What a partition goes by: no program by itself."""
        sent = self.sent + self.tied / microbatches
        seconds = sum(each - rates.call_s for each in self.seconds(rates).values())
        return Layer(seconds, sent, self.state, self.gradient, self.activation)

    def scaled(self, factor: float) -> StageLoad:
        """Of microbatches that are so many times as large."""
        return replace(
            self,
            flops={kind: factor * flops for kind, flops in self.flops.items()},
            moved={kind: factor * moved for kind, moved in self.moved.items()},
            sent=round(factor * self.sent),
            ahead=round(factor * self.ahead),
            back=round(factor * self.back),
            activation=round(factor * self.activation),
        )

    @staticmethod
    def of_all(loads: Sequence[StageLoad]) -> StageLoad:
        """Of adjacent ones together."""
        whole = StageLoad(sent=loads[0].sent, tied=loads[0].tied)
        for load in loads:
            for kind in load.flops:
                whole.flops[kind] = whole.flops.get(kind, 0.0) + load.flops[kind]
                whole.moved[kind] = whole.moved.get(kind, 0.0) + load.moved[kind]
            whole.activation += load.activation
            whole.gradient += load.gradient
            whole.state += load.state
        return whole


def stage_loads(
    parts: Parts, labels: Mapping[Equation, Label], homes: Mapping[Var, int], places: Places
) -> list[StageLoad]:
    """The load of each stage.

    Args:
      parts: The step.
      labels: Its equations' (`label_parts`).
      homes: The stage of each leaf of the state.
      places: The devices of each stage: between stages of one device nothing is sent.
    """
    loads = [StageLoad() for _ in places]
    made: dict[Var, Label] = {}
    for equation in parts.body.equations:
        label = labels[equation]
        if label.stage == NOWHERE:
            continue
        flops, moved = equation_work(equation)
        load = loads[label.stage]
        load.flops[label.direction] = load.flops.get(label.direction, 0.0) + flops
        load.moved[label.direction] = load.moved.get(label.direction, 0.0) + moved
        made.update(dict.fromkeys(equation.outputs, label))
    for var, readers in _readers(parts, labels).items():
        if var in made:
            _add_value(loads, _bytes(var), made[var], readers, places)
    outer, known = read_by(parts), homes_before(parts, homes)
    for inner, readers in _readers(parts, labels).items():
        home = known.get(outer[inner]) if inner in outer else None
        if home is not None:
            for border in (b for stage in {r.stage for r in readers} for b in _borders(home, stage)):
                loads[border].tied += 2 * _bytes(inner)
    for inner, outer_var in zip(parts.body.outputs, parts.step.outputs, strict=True):
        if isinstance(inner, Var) and inner in made:
            loads[made[inner].stage].gradient += _bytes(outer_var)
    for var, stage in homes.items():
        loads[stage].state += _bytes(var)
    return loads


def _readers(parts: Parts, labels: Mapping[Equation, Label]) -> dict[Var, set[Label]]:
    """Value -> where it is read."""
    readers: dict[Var, set[Label]] = {}
    for equation in parts.body.equations:
        label = labels[equation]
        for atom in equation.inputs if label.stage != NOWHERE else ():
            if isinstance(atom, Var):
                readers.setdefault(atom, set()).add(label)
    return readers


def _add_value(loads: list[StageLoad], size: int, made: Label, readers: set[Label], places: Places) -> None:
    """What is sent of a value, and what is kept of it from a forward to a backward."""
    stages = {r.stage for r in readers}
    for stage in stages:
        for border in _borders(made.stage, stage):
            loads[border].sent += size
    own = loads[made.stage]
    others = {places[stage]: stage for stage in stages if places[stage] != places[made.stage]}
    for stage in others.values():
        own.ahead, own.back = (own.ahead + size, own.back) if stage > made.stage else (own.ahead, own.back + size)
    kept = {r.stage for r in readers if made.direction == "F" and r.direction != "F"}
    for stage in kept:
        loads[stage].activation += size


def _borders(start: int, end: int) -> Iterator[int]:
    """The stages whose border with the one ahead lies between two stages."""
    return iter(range(min(start, end) + 1, max(start, end) + 1))


def _bytes(var: Var) -> int:
    return int(getattr(var.type, "nbytes", 0))
