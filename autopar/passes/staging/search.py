"""What of a pipeline is left to "auto": stages and their devices, microbatches, schedule, rematerialization.

All combinations are predicted that fit the devices' memory: for each number of stages and microbatches the best
partition (`cost.partition`), by each schedule in time. Loads are found for one number of microbatches, and scaled.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.cost.measurements import Measurements
from autopar.cost.partition import Chain, Partition, partition
from autopar.cost.rates import NOMINAL, StageRates
from autopar.cost.units import format_bytes
from autopar.errors import StrategyError
from autopar.ir.pipeline import AUTO, Pipeline
from autopar.ir.program import Program
from autopar.ir.schedule import StageTimes, simulate_schedule
from autopar.passes.staging.loads import StageLoad
from autopar.passes.staging.stages import find_units, unit_loads

#: Microbatches that are tried, and those for which loads are found, at most.
COUNTS, REFERENCE = (1, 2, 4, 8, 16, 32, 64), 8
#: In the order in which they are preferred. "gpipe" is never faster than "1f1b", and holds more.
_SCHEDULES = ("1f1b", "zero-bubble", "interleaved")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A pipeline, and the seconds that its step is predicted to take."""

    pipeline: Pipeline
    seconds: float

    def __str__(self) -> str:
        p = self.pipeline
        return f"{p}, {p.schedule}, M = {p.microbatches}{', remat' * bool(p.remat)}"


def microbatch_counts(program: Program, pipeline: Pipeline) -> list[int]:
    """The numbers of microbatches that are to be tried: those that divide the batch.

    Args:
      program: An analysed program.
      pipeline: As the user asks for it.
    """
    if pipeline.microbatches != AUTO:
        return [pipeline.microbatch_count]
    pairs = zip(program.block.inputs, program.inputs, strict=True)
    sizes = [v.shape[program.batch[v]] for v, input_ in pairs if input_.role == "batch" and v in program.batch]
    examples = math.gcd(*sizes)
    return [count for count in COUNTS if examples % count == 0]


def search_pipeline(
    program: Program, pipeline: Pipeline, measured: Measurements, devices: int, counts: Sequence[int], reference: int
) -> list[Candidate]:
    """Of each number of stages the best pipeline, the best of all first.

    Args:
      program: One that `split_update` has cut into `reference` microbatches.
      pipeline: As the user asks for it.
      measured: Rates and memory of the devices.
      devices: How many there are.
      counts: Numbers of microbatches.

    Raises:
      StrategyError: none fits the devices' memory.
    """
    rates = NOMINAL if measured.stages is None else measured.stages
    units = find_units(program)
    best: dict[int, Candidate] = {}
    smallest = math.inf
    for remat in _choices(pipeline.remat, (False, True)):
        loads = unit_loads(units, splits_backward=True, remat=bool(remat))
        for count in counts:
            scaled = [load.scaled(reference / count) for load in loads]
            asked = dataclasses.replace(pipeline, microbatches=count, remat=bool(remat))
            for made, cut in _partitions(asked, scaled, rates, devices):
                seconds, needed = predicted(made, cut, scaled, rates)
                smallest = min(smallest, needed)
                stages = made.count // made.chunks
                if measured.memory is not None and needed > measured.memory:
                    continue
                if stages not in best or seconds < best[stages].seconds:
                    best[stages] = Candidate(made, seconds)
    if not best:
        raise StrategyError(
            f"pipeline: no stages of {program.name} that can be chosen fit devices of "
            f"{format_bytes(measured.memory or 0)}: at least {format_bytes(smallest)} are needed. Give more devices, "
            "or leave more to 'auto': microbatches, remat, schedule"
        )
    return sorted(best.values(), key=lambda candidate: candidate.seconds)


def _choices(asked: object, all_: Sequence[object]) -> Sequence[object]:
    return all_ if asked == AUTO else (asked,)


def _partitions(
    asked: Pipeline, loads: Sequence[StageLoad], rates: StageRates, devices: int
) -> Iterator[tuple[Pipeline, Partition]]:
    """The pipelines of a number of microbatches, each with its best partition."""
    layers = [load.as_layer(rates, asked.microbatch_count) for load in loads]
    by_schedule = [str(schedule) for schedule in _choices(asked.schedule, _SCHEDULES)]
    if asked.stages == AUTO:
        numbers: Mapping[int, Sequence[int] | None] = dict.fromkeys(range(1, min(devices, len(layers)) + 1))
    else:
        numbers = {asked.count: [len(replicas) for replicas in asked.places]}
        devices = asked.devices
    chain = Chain(layers, devices, asked.microbatch_count, rates.send_byte_s)
    for schedule, (count, replicas) in itertools.product(by_schedule, numbers.items()):
        if schedule == "interleaved":
            chunks = asked.stages_per_device or 2
            several = asked.stages == AUTO and 1 < count == devices and chunks * count <= len(layers)
            if not several or asked.microbatch_count % devices:
                continue
            wide = dataclasses.replace(chain, devices=chunks * devices)
            cut = partition(wide, wide.devices, [1] * wide.devices)
        else:
            cut = partition(chain, count, replicas)
        if cut is not None:
            own = 1 if schedule == "interleaved" else cut.replicas
            yield dataclasses.replace(asked, stages=len(cut.ends), schedule=schedule, replicas=own), cut


def predicted(pipeline: Pipeline, cut: Partition, loads: Sequence[StageLoad], rates: StageRates) -> tuple[float, float]:
    """Seconds of a step (microbatches, sums of replicas, the slowest update), and bytes of the fullest device."""
    starts = (0, *cut.ends[:-1])
    stages = [StageLoad.of_all(loads[start:end]) for start, end in zip(starts, cut.ends, strict=True)]
    seconds = [stage.seconds(rates) for stage in stages]
    kinds = {kind: [each.get(kind, 0.0) for each in seconds] for kind in ("F", "B", "W")}
    sends = [stage.sent * rates.send_byte_s / 2 for stage in stages]
    held = [float(stage.activation) for stage in stages]
    times = StageTimes(kinds, ahead=[*sends[1:], 0.0], back=sends, activations=held)
    simulated = simulate_schedule(pipeline.scheduled(pipeline.microbatch_count), times)
    ends, sizes = dict.fromkeys(range(pipeline.devices), 0.0), list(simulated.held)
    for stage, places in zip(stages, pipeline.places, strict=True):
        own = 2 * (len(places) - 1) * stage.gradient * rates.send_byte_s
        own += rates.seconds(0.0, 2 * stage.state + stage.gradient)
        for device in places:
            ends[device] += own
            sizes[device] += stage.state + stage.gradient
    tied = max(stage.tied for stage in stages) * rates.send_byte_s
    return simulated.seconds + max(ends.values()) + tied, max(sizes)
