"""Which stage each weight belongs to: as the user's patterns say, or so that the slowest stage is fast."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.cost.measurements import Measurements
from autopar.cost.partition import Chain, Partition, partition
from autopar.cost.rates import NOMINAL, StageRates
from autopar.cost.units import format_bytes
from autopar.errors import StrategyError
from autopar.ir.paths import matches, matches_layers, split_layers
from autopar.ir.pipeline import Pipeline
from autopar.ir.program import Program, Var
from autopar.ir.schedule import StageTimes, simulate_schedule
from autopar.passes.staging.layers import CutProgram, Ends, Stack, cut_layers, find_stacks
from autopar.passes.staging.loads import StageLoad, stage_loads
from autopar.passes.staging.parts import find_parts, label_parts, other_homes, used_weights


@dataclass(frozen=True, slots=True)
class Chosen:
    """What is decided of stages.

    Attributes:
      cut: The program, its stacked leaves in as many parts as they have stages.
      pipeline: With a number of stages and replicas.
      homes: The stage of each weight.
      candidates: Where the number is chosen, each with the seconds that it is predicted to take.
    """

    cut: CutProgram
    pipeline: Pipeline
    homes: dict[Var, int]
    candidates: tuple[tuple[Pipeline, float], ...] = ()


def choose_stages(program: Program, pipeline: Pipeline, measured: Measurements, devices: int) -> Chosen:
    """The stage of each weight, or of some layers of one.

    Args:
      program: What is cut; its weights are in the order of their first use.
      pipeline: As the user asks for it.
      measured: Rates and memory of the devices.
      devices: How many there are, where the number of stages is to be chosen.

    Raises:
      StrategyError: more stages than weights, none that fit the memory, or patterns that don't cover the weights.
    """
    stacks = find_stacks(program)
    if not isinstance(pipeline.stages, (int, str)):
        cut = cut_layers(program, dict(_asked_ends(program, stacks, pipeline.stages)))
        return Chosen(cut, pipeline, _by_patterns(cut.program, pipeline.stages))
    fine = cut_layers(program, {v: tuple(range(1, stack.layers + 1)) for stack in stacks for v in stack.leaves})
    layers = [fine.layers(stack.leaves) for stack in stacks]
    units = _units(fine.program, [layer for each in layers for layer in each])
    pipeline, homes, candidates = _balanced(fine.program, units, pipeline, measured, devices)
    ends: dict[Var, Ends] = {}
    for stack, each in zip(stacks, layers, strict=True):
        stages = [max(homes[v] for v in layer if v in homes) for layer in each]
        changes = tuple(k for k in range(1, stack.layers) if stages[k] != stages[k - 1])
        homes |= {v: stage for layer, stage in zip(each, stages, strict=True) for v in layer if v in homes}
        ends |= dict.fromkeys(stack.leaves, (*changes, stack.layers))
    cut = cut_layers(program, {v: own for v, own in ends.items() if len(own) > 1})
    for var, own in ends.items():
        firsts = [fine.parts(var)[start] for start in (0, *own[:-1])]
        homes |= {part: homes[first] for part, first in zip(cut.parts(var), firsts, strict=True) if first in homes}
    weights = used_weights(cut.program, find_parts(cut.program))
    return Chosen(cut, pipeline, {v: homes[v] for v in weights}, candidates)


def _units(program: Program, layers: Sequence[Sequence[Var]]) -> list[list[Var]]:
    """The weights in the order of their first use, those of one layer together."""
    numbers = {v: k for k, layer in enumerate(layers) for v in layer}
    weights = used_weights(program, find_parts(program))
    groups = itertools.groupby(weights, key=lambda v: numbers.get(v, v))
    return [list(group) for _, group in groups]


def _balanced(
    program: Program, units: Sequence[Sequence[Var]], pipeline: Pipeline, measured: Measurements, devices: int
) -> tuple[Pipeline, dict[Var, int], tuple[tuple[Pipeline, float], ...]]:
    """The pipeline with a number of stages, the stage of each weight, and what there was to choose from; cut between
    `units` so that the slowest stage is fast."""
    if len(units) < pipeline.count:
        raise StrategyError(
            f"pipeline: {program.name} has {len(units)} weights and layers to cut between, which is too few for "
            f"{pipeline.count} stages. Give fewer stages"
        )
    parts = find_parts(program)
    each = {v: k for k, unit in enumerate(units) for v in unit}
    rates = NOMINAL if measured.stages is None else measured.stages
    homes = each | other_homes(program, parts, each)
    apart = tuple((k,) for k in range(len(units)))
    splits = pipeline.scheduled(pipeline.microbatches).splits_backward
    loads = stage_loads(parts, label_parts(parts, each, len(units), splits_backward=splits), homes, apart)
    layers = [load.as_layer(rates, pipeline.microbatches) for load in loads]
    memory = None if pipeline.schedule == "interleaved" else measured.memory
    if pipeline.is_open:
        chain = Chain(layers, devices, pipeline.microbatches, rates.send_byte_s, memory)
        cuts = {k: partition(chain, k) for k in range(1, min(devices, len(units)) + 1)}
    else:
        counts = [len(replicas) for replicas in pipeline.places]
        chain = Chain(layers, sum(counts), pipeline.microbatches, rates.send_byte_s, memory)
        cuts = {pipeline.count: partition(chain, pipeline.count, counts)}
    fitting = {k: p for k, p in cuts.items() if p is not None}
    if not fitting:
        raise StrategyError(
            f"pipeline: no {pipeline.stages} stages of {program.name} fit devices of "
            f"{format_bytes(measured.memory or 0)}: its state takes {format_bytes(sum(x.state for x in loads))}, its "
            f"gradients {format_bytes(sum(x.gradient for x in loads))} and a microbatch's activations "
            f"{format_bytes(sum(x.activation for x in loads))}. Give more stages or microbatches"
        )
    candidates = []
    for k, cut in fitting.items() if pipeline.is_open else ():
        open_ = dataclasses.replace(pipeline, stages=k, replicas=cut.replicas)
        candidates.append((open_, _predicted(open_, cut, loads, rates)))
    chosen = min(candidates, key=lambda x: x[1])[0] if candidates else pipeline
    ends = fitting[chosen.count].ends
    return chosen, {v: sum(k >= end for end in ends[:-1]) for v, k in each.items()}, tuple(candidates)


def _predicted(pipeline: Pipeline, cut: Partition, loads: Sequence[StageLoad], rates: StageRates) -> float:
    """Seconds of a step: its microbatches, the sums of replicas, the slowest update."""
    starts = (0, *cut.ends[:-1])
    stages = [StageLoad.of_all(loads[start:end]) for start, end in zip(starts, cut.ends, strict=True)]
    seconds = [stage.seconds(rates) for stage in stages]
    kinds = {kind: [each.get(kind, 0.0) for each in seconds] for kind in ("F", "B", "W")}
    sends = [stage.sent * rates.send_byte_s / 2 for stage in stages]
    times = StageTimes(kinds, ahead=[*sends[1:], 0.0], back=sends)
    simulated = simulate_schedule(pipeline.scheduled(pipeline.microbatches), times)
    ends = [
        2 * (own - 1) * stage.gradient * rates.send_byte_s + rates.seconds(0.0, 2 * stage.state + stage.gradient)
        for stage, own in zip(stages, cut.replicas, strict=True)
    ]
    tied = max(stage.tied for stage in stages) * rates.send_byte_s
    return simulated.seconds + max(ends) + tied


def _asked_ends(
    program: Program, stacks: Sequence[Stack], stages: Sequence[Sequence[str]]
) -> Iterator[tuple[Var, Ends]]:
    """Where stacked leaves are to be cut: at the ends of the layers that patterns name."""
    paths = {v: leaf.path for v, leaf in zip(program.block.inputs, program.inputs, strict=True)}
    named = [split_layers(pattern) for patterns in stages for pattern in patterns]
    for stack in stacks:
        ranges = [some for general, some in named if some and any(matches(general, paths[v]) for v in stack.leaves)]
        ends = {end for some in ranges for end in (some.start, some.stop) if 0 < end < stack.layers}
        for var in stack.leaves if ends else ():
            yield var, (*sorted(ends), stack.layers)


def _by_patterns(program: Program, stages: Sequence[Sequence[str]]) -> dict[Var, int]:
    paths = {v: leaf.path for v, leaf in zip(program.block.inputs, program.inputs, strict=True)}
    weights = used_weights(program, find_parts(program))
    homes = {}
    for var in weights:
        where = [k for k, patterns in enumerate(stages) if any(matches_layers(p, paths[var]) for p in patterns)]
        if len(where) != 1:
            which = "no stage" if not where else f"stages {', '.join(map(str, where))}"
            raise StrategyError(f"pipeline: {paths[var]} belongs to {which}; patterns must give it to one")
        homes[var] = where[0]
    for k, patterns in enumerate(stages):
        unused = [p for p in patterns if not any(matches_layers(p, paths[v]) for v in weights)]
        if unused:
            raise StrategyError(f"pipeline: {unused[0]!r} of stage {k} matches no weight of {program.name}")
    return homes
