"""Assigns weights to stages: as the user's patterns say, or so that the slowest stage is fast."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.cost.partition import Chain, partition
from autopar.cost.rates import NOMINAL, Measurements
from autopar.cost.units import format_bytes
from autopar.errors import StrategyError
from autopar.ir.paths import matches, matches_layers, split_layers
from autopar.ir.pipeline import Pipeline
from autopar.ir.program import Program, Var
from autopar.passes.staging.divided import DividedLeaves
from autopar.passes.staging.layers import CutProgram, Ends, Stack, cut_layers, find_stacks, why_whole
from autopar.passes.staging.loads import StageLoad, stage_loads
from autopar.passes.staging.parts import find_parts, label_parts, other_homes, used_weights
from autopar.passes.staging.remat import with_remat


@dataclass(frozen=True, slots=True)
class Chosen:
    """The decision on stages.

    Attributes:
      cut: The program, its stacked leaves in as many parts as they have stages.
      homes: The stage of each weight.
    """

    cut: CutProgram
    homes: dict[Var, int]


@dataclass(frozen=True, slots=True)
class Units:
    """The units that stages can be cut between.

    Attributes:
      cut: The program, with its stacked leaves cut into single layers.
      units: The weights in the order of their first use, those of one layer together.
      stacks: The stacked leaves; `layers`: of each their parts, layer by layer.
      divided: Which leaves of the program are divided over several devices.
    """

    cut: CutProgram
    units: list[list[Var]]
    stacks: list[Stack]
    layers: list[list[tuple[Var, ...]]]
    divided: DividedLeaves


def choose_stages(program: Program, pipeline: Pipeline, measured: Measurements, divided: DividedLeaves) -> Chosen:
    """Returns the stage of each weight, or of some layers of one.

    Args:
      program: What is cut; its weights are in the order of their first use.
      pipeline: With all that is left to choose chosen.
      measured: Rates and memory of the devices.
      divided: Leaves that are divided over several devices.

    Raises:
      StrategyError: more stages than weights, none that fit the memory, or patterns that don't cover the weights.
    """
    if not isinstance(pipeline.stages, int):
        cut = cut_layers(program, dict(_asked_ends(program, find_stacks(program), pipeline.stages)))
        return Chosen(cut, _by_patterns(cut, program, pipeline.stages))
    fine = find_units(program, divided)
    homes = _balanced(fine, pipeline, measured)
    ends: dict[Var, Ends] = {}
    for stack, each in zip(fine.stacks, fine.layers, strict=True):
        stages = [max(homes[v] for v in layer if v in homes) for layer in each]
        changes = tuple(k for k in range(1, stack.layers) if stages[k] != stages[k - 1])
        homes |= {v: stage for layer, stage in zip(each, stages, strict=True) for v in layer if v in homes}
        ends |= dict.fromkeys(stack.leaves, (*changes, stack.layers))
    cut = cut_layers(program, {v: own for v, own in ends.items() if len(own) > 1})
    for var, own in ends.items():
        firsts = [fine.cut.parts(var)[start] for start in (0, *own[:-1])]
        homes |= {part: homes[first] for part, first in zip(cut.parts(var), firsts, strict=True) if first in homes}
    weights = used_weights(cut.program, find_parts(cut.program))
    return Chosen(cut, {v: homes[v] for v in weights})


def find_units(program: Program, divided: DividedLeaves) -> Units:
    """Finds the units of a program that `split_update` has cut, and leaves of it that are divided."""
    stacks = find_stacks(program)
    fine = cut_layers(program, {v: tuple(range(1, stack.layers + 1)) for stack in stacks for v in stack.leaves})
    layers = [fine.layers(stack.leaves) for stack in stacks]
    numbers = {v: k for k, layer in enumerate(itertools.chain(*layers)) for v in layer}
    weights = used_weights(fine.program, find_parts(fine.program))
    groups = itertools.groupby(weights, key=lambda v: numbers.get(v, v))
    return Units(fine, [list(group) for _, group in groups], stacks, layers, divided.within(fine))


def check_units(fine: Units, stages: int) -> None:
    """Raises StrategyError for more stages than there are places to cut at."""
    if len(fine.units) < stages:
        raise StrategyError(
            f"pipeline: {fine.cut.program.name} has {len(fine.units)} weights and layers to cut between, which is too "
            f"few for {stages} stages. Give fewer stages"
        )


def unit_loads(fine: Units, *, splits_backward: bool, remat: bool) -> list[StageLoad]:
    """Returns the load of each unit, as a stage of its own."""
    parts = find_parts(fine.cut.program)
    each = {v: k for k, unit in enumerate(fine.units) for v in unit}
    count = len(fine.units)
    homes = each | other_homes(fine.cut.program, parts, each)
    labels = label_parts(parts, each, count, splits_backward=splits_backward)
    if remat:
        parts, labels = with_remat(parts, labels, count)
    return stage_loads(parts, labels, homes, tuple((k,) for k in range(count)), fine.divided.follow(parts))


def _balanced(fine: Units, pipeline: Pipeline, measured: Measurements) -> dict[Var, int]:
    """Returns the stage of each weight, cut between units so that the slowest stage is fast."""
    name, units, microbatches = fine.cut.program.name, fine.units, pipeline.microbatch_count
    check_units(fine, pipeline.count)
    rates = NOMINAL if measured.stages is None else measured.stages
    splits = pipeline.scheduled(microbatches).splits_backward
    loads = unit_loads(fine, splits_backward=splits, remat=bool(pipeline.remat))
    layers = [load.as_layer(rates, microbatches) for load in loads]
    memory = measured.memory if pipeline.rule.has_replicas else None
    counts = [len(replicas) for replicas in pipeline.places]
    chain = Chain(layers, sum(counts), microbatches, rates.send_byte_s, memory)
    cut = partition(chain, pipeline.count, counts)
    if cut is None:
        raise StrategyError(
            f"pipeline: no {pipeline.stages} stages of {name} fit devices of "
            f"{format_bytes(measured.memory or 0)}: its state takes {format_bytes(sum(x.state for x in loads))}, its "
            f"gradients {format_bytes(sum(x.gradient for x in loads))} and a microbatch's activations "
            f"{format_bytes(sum(x.activation for x in loads))}. Give more stages or microbatches, or remat=True"
        )
    return {v: sum(k >= end for end in cut.ends[:-1]) for k, unit in enumerate(units) for v in unit}


def _asked_ends(
    program: Program, stacks: Sequence[Stack], stages: Sequence[Sequence[str]]
) -> Iterator[tuple[Var, Ends]]:
    """Yields where stacked leaves are to be cut: at the ends of the layers that patterns name."""
    paths = {v: leaf.path for v, leaf in zip(program.block.inputs, program.inputs, strict=True)}
    named = {pattern: split_layers(pattern) for patterns in stages for pattern in patterns}
    for stack in stacks:
        ranges = []
        for pattern, (general, some) in named.items():
            leaf = next((v for v in stack.leaves if matches(general, paths[v])), None)
            if some is None or leaf is None:
                continue
            if not some or some.stop > stack.layers:
                raise StrategyError(f"pipeline: {pattern!r}: {paths[leaf]} has the layers [0:{stack.layers}]")
            ranges.append(some)
        ends = {end for some in ranges for end in (some.start, some.stop) if 0 < end < stack.layers}
        for var in stack.leaves if ends else ():
            yield var, (*sorted(ends), stack.layers)


def _by_patterns(cut: CutProgram, whole: Program, stages: Sequence[Sequence[str]]) -> dict[Var, int]:
    """Returns the stage of each weight of a program whose leaves are cut where patterns name layers."""
    program = cut.program
    paths = {v: leaf.path for v, leaf in zip(program.block.inputs, program.inputs, strict=True)}
    weights = used_weights(program, find_parts(program))
    homes = {}
    for var in weights:
        where = [k for k, patterns in enumerate(stages) if any(matches_layers(p, paths[var]) for p in patterns)]
        if len(where) != 1:
            which = "no stage" if not where else f"stages {', '.join(map(str, where))}"
            layered = [
                p for each in stages for p in each if split_layers(p)[1] and matches(split_layers(p)[0], paths[var])
            ]
            why = f" ({layered[0]!r} asks for layers, and it has none: {why_whole(whole, var)})" if layered else ""
            raise StrategyError(f"pipeline: {paths[var]} belongs to {which}{why}; patterns must give it to one")
        homes[var] = where[0]
    for k, patterns in enumerate(stages):
        unused = [p for p in patterns if not any(matches_layers(p, paths[v]) for v in weights)]
        if unused:
            raise StrategyError(f"pipeline: {unused[0]!r} of stage {k} matches no weight of {program.name}")
    return homes
