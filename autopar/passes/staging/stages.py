"""Which stage each weight belongs to: as the user's patterns say, or so that the slowest stage is fast."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cost.measurements import Measurements
from autopar.cost.partition import Chain, partition
from autopar.cost.rates import NOMINAL
from autopar.cost.units import format_bytes
from autopar.errors import StrategyError
from autopar.ir.paths import matches
from autopar.ir.pipeline import Pipeline
from autopar.ir.program import Program, Var
from autopar.passes.staging.loads import stage_loads
from autopar.passes.staging.parts import Parts, label_parts, other_homes


def choose_stages(
    program: Program, parts: Parts, weights: Sequence[Var], pipeline: Pipeline, measured: Measurements
) -> dict[Var, int]:
    """The stage of each weight.

    Raises:
      StrategyError: more stages than weights, none that fit the memory, or patterns that don't cover the weights.
    """
    if not isinstance(pipeline.stages, int):
        return _by_patterns(program, weights, pipeline.stages)
    count = pipeline.stages
    if len(weights) < count:
        raise StrategyError(
            f"pipeline: {program.name} has {len(weights)} weights to cut between, which is too few for {count} stages. "
            "Give fewer stages"
        )
    each = {v: k for k, v in enumerate(weights)}
    rates = NOMINAL if measured.stages is None else measured.stages
    homes = each | other_homes(program, parts, each)
    apart = tuple((k,) for k in range(len(weights)))
    loads = stage_loads(parts, label_parts(parts, each, len(weights)), homes, apart)
    layers = [load.as_layer(rates, pipeline.microbatches) for load in loads]
    memory = None if pipeline.schedule == "interleaved" else measured.memory
    counts = [len(replicas) for replicas in pipeline.places]
    chain = Chain(layers, sum(counts), pipeline.microbatches, rates.send_byte_s, memory)
    found = partition(chain, count, counts)
    if found is None:
        raise StrategyError(
            f"pipeline: no {count} stages of {program.name} fit devices of {format_bytes(measured.memory or 0)}: its "
            f"state takes {format_bytes(sum(x.state for x in loads))}, its gradients "
            f"{format_bytes(sum(x.gradient for x in loads))} and a microbatch's activations "
            f"{format_bytes(sum(x.activation for x in loads))}. Give more stages or microbatches"
        )
    return {v: sum(k >= end for end in found.ends[:-1]) for k, v in enumerate(weights)}


def _by_patterns(program: Program, weights: Sequence[Var], stages: Sequence[Sequence[str]]) -> dict[Var, int]:
    paths = {v: given.path for v, given in zip(program.block.inputs, program.inputs, strict=True)}
    found = {}
    for var in weights:
        where = [k for k, patterns in enumerate(stages) if any(matches(p, paths[var]) for p in patterns)]
        if len(where) != 1:
            which = "no stage" if not where else f"stages {', '.join(map(str, where))}"
            raise StrategyError(f"pipeline: {paths[var]} belongs to {which}; patterns must give it to one")
        found[var] = where[0]
    for k, patterns in enumerate(stages):
        unused = [p for p in patterns if not any(matches(p, paths[v]) for v in weights)]
        if unused:
            raise StrategyError(f"pipeline: {unused[0]!r} of stage {k} matches no weight of {program.name}")
    return found
