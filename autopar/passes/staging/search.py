"""Searches what a pipeline leaves to "auto": stages and their devices, microbatches, schedule, rematerialization.

All combinations are predicted that fit the devices' memory: for each number of stages and microbatches the best
partition (`cost.partition`), by each schedule in time. Loads are found for two numbers of microbatches: what grows with
a microbatch's examples, and what each has, such as reading the weights, follow from these.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.cost.partition import Chain, Partition, partition
from autopar.cost.rates import NOMINAL, StageRates
from autopar.cost.stage_time import StageTimes, choose_slack, simulate_schedule
from autopar.cost.units import format_bytes
from autopar.errors import StrategyError
from autopar.ir.asynchronous import Calls
from autopar.ir.pipeline import AUTO, Pipeline
from autopar.ir.program import Program
from autopar.ir.schedule import SCHEDULES, Rule
from autopar.passes.staging.divided import DividedLeaves
from autopar.passes.staging.loads import StageLoad
from autopar.passes.staging.stages import check_units, find_units, unit_loads

#: Microbatches that are tried, and those for which loads are found, at most (and for the fewest).
COUNTS, REFERENCE = (1, 2, 4, 8, 16, 32, 64), 8
#: More stages are taken where they are predicted to be faster by more than this.
TIE = 1.1
#: In the order in which they are preferred. "gpipe" is never faster than "1f1b", and holds more.
_SCHEDULES = ("1f1b", "zero-bubble", "interleaved")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A pipeline, and the seconds that its step is predicted to take."""

    pipeline: Pipeline
    seconds: float

    def __str__(self) -> str:
        p = self.pipeline
        return f"{p}, {p.schedule}, M = {p.microbatch_count}{', remat' * bool(p.remat)}"


def microbatch_counts(program: Program, pipeline: Pipeline) -> list[int]:
    """Returns the numbers of microbatches that are to be tried: those that divide the batch.

    Args:
      program: An analysed program.
      pipeline: As the user asks for it.
    """
    if pipeline.microbatches != AUTO or pipeline.is_asynchronous:
        return [pipeline.microbatch_count]
    pairs = zip(program.block.inputs, program.inputs, strict=True)
    sizes = [v.shape[program.batch[v]] for v, input_ in pairs if input_.role == "batch" and v in program.batch]
    examples = math.gcd(*sizes)
    return [count for count in COUNTS if examples % count == 0]


def reference_counts(counts: Sequence[int]) -> list[int]:
    """Returns for which of the numbers that are tried loads are found: one microbatch alone says little of several."""
    return sorted(
        {counts[min(1, len(counts) - 1)], max(count for count in counts if count <= max(REFERENCE, counts[0]))}
    )


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """A step for one number of microbatches.

    Attributes:
      program: As `split_update` cuts it.
      divided: Leaves of it that are divided over several devices.
      rates: Of the devices, for microbatches of this size; None: not measured.
    """

    program: Program
    divided: DividedLeaves
    rates: StageRates | None


def search_pipeline(
    references: Mapping[int, Reference], pipeline: Pipeline, memory: int | None, devices: int, counts: Sequence[int]
) -> list[Candidate]:
    """Finds the best pipeline of each number of stages, the best of all first.

    Args:
      references: Number of microbatches -> the step. One, or two, the fewer first.
      pipeline: As the user asks for it.
      memory: Bytes of each device; None: not known.
      devices: How many there are.
      counts: Numbers of microbatches.

    Raises:
      StrategyError: more stages than weights, or none fits the devices' memory.
    """
    units = {count: find_units(each.program, each.divided) for count, each in references.items()}
    all_rates = {count: each.rates or NOMINAL for count, each in references.items()}
    for each in units.values():
        check_units(each, pipeline.count)
    best: dict[int, Candidate] = {}
    smallest = math.inf
    among = (pipeline.rule.name,) if pipeline.asynchronous else _SCHEDULES
    schedules = list(map(str, _choices(pipeline.schedule, among)))
    by_splitting = {yes: [s for s in schedules if SCHEDULES[s].splits_backward == yes] for yes in (False, True)}
    tried = itertools.product(_choices(pipeline.remat, (False, True)), (k for k in by_splitting if by_splitting[k]))
    for remat, splits in tried:
        loads = {n: unit_loads(each, splits_backward=splits, remat=bool(remat)) for n, each in units.items()}
        for count in counts:
            scaled, rates = _loads_of(count, loads), _rates_of(count, all_rates)
            options = (pipeline, by_splitting[splits], count, bool(remat), scaled, rates, devices, memory)
            for made, cut in _partitions(*options):
                seconds, needed = predicted(made, cut, scaled, rates)
                smallest = min(smallest, needed)
                stages = made.count // made.chunks
                if memory is not None and needed > memory:
                    continue
                if stages not in best or seconds < best[stages].seconds:
                    best[stages] = Candidate(made, seconds)
    if not best:
        raise StrategyError(
            f"pipeline: no stages of {next(iter(references.values())).program.name} that can be chosen fit devices of "
            f"{format_bytes(memory or 0)}: at least {format_bytes(smallest)} are needed. Give more devices, "
            "or leave more to 'auto': microbatches, remat, schedule"
        )
    return sorted(best.values(), key=lambda candidate: candidate.seconds)


def preferred(found: Sequence[Candidate]) -> Candidate:
    """Returns the one with the fewest stages of those that are nearly as fast as the fastest: predictions are no
    better."""
    limit = TIE * min(candidate.seconds for candidate in found)
    return min((c for c in found if c.seconds <= limit), key=lambda c: c.pipeline.count // c.pipeline.chunks)


def _loads_of(count: int, loads: Mapping[int, list[StageLoad]]) -> list[StageLoad]:
    first, *rest = loads
    if not rest or len(loads[first]) != len(loads[rest[0]]):
        return [load.scaled(first / count) for load in loads[first]]
    second = rest[0]
    share = (1 / count - 1 / first) / (1 / second - 1 / first)
    return [b.mixed(a, share) for a, b in zip(loads[first], loads[second], strict=True)]


def _rates_of(count: int, rates: Mapping[int, StageRates]) -> StageRates:
    """Interpolates between two sizes of microbatches, on a scale of their logarithms: small ones stay in a cache."""
    (first, before), *rest = rates.items()
    if not rest:
        return before
    second, behind = rest[0]
    share = min(max(math.log(count / first) / math.log(second / first), 0.0), 1.0)
    pairs = {f.name: (getattr(before, f.name), getattr(behind, f.name)) for f in dataclasses.fields(StageRates)}
    return StageRates(**{name: (1 - share) * a + share * b for name, (a, b) in pairs.items()})


def _choices(asked: object, all_: Sequence[object]) -> Sequence[object]:
    return all_ if asked == AUTO else (asked,)


def _partitions(
    asked: Pipeline,
    schedules: Sequence[str],
    count: int,
    remat: bool,
    loads: Sequence[StageLoad],
    rates: StageRates,
    devices: int,
    memory: int | None,
) -> Iterator[tuple[Pipeline, Partition]]:
    """Yields the pipelines of so many microbatches by some schedules, with remat or without, each with its best
    partition, and with the best one within the memory."""
    layers = [load.as_layer(rates, count) for load in loads]
    for schedule in schedules:
        rule = SCHEDULES[schedule]
        chooses_replicas = asked.stages == AUTO and rule.has_replicas
        for stages, chunks in _numbers(asked, rule, count, len(layers), devices):
            fields = {"stages": stages, "schedule": schedule, "microbatches": count, "stages_per_device": chunks}
            made = dataclasses.replace(asked, remat=remat, **fields)
            own = None if chooses_replicas else [len(replicas) for replicas in made.places]
            for limit in dict.fromkeys((None, memory if rule.has_replicas else None)):
                chain = Chain(layers, devices if own is None else sum(own), count, rates.send_byte_s, limit)
                cut = partition(chain, stages, own)
                if cut is not None:
                    yield dataclasses.replace(made, replicas=cut.replicas) if chooses_replicas else made, cut


def _numbers(asked: Pipeline, rule: Rule, count: int, layers: int, devices: int) -> Iterator[tuple[int, int]]:
    """Yields the numbers of stages that a schedule of so many microbatches can have, and how many are on each
    device."""
    chunks = rule.stages_per_device
    if (asked.stages_per_device is not None and chunks > 1) or asked.schedule != AUTO:
        chunks = asked.chunks
    if asked.stages == AUTO:
        numbers = rule.numbers(devices, chunks)
    elif chunks > 1 and asked.schedule == AUTO:  # a given number of stages has its devices
        return
    else:
        numbers = (asked.count,)
    for number in numbers:
        counts = [1] * number if asked.stages == AUTO else asked.replica_counts
        if number <= layers and not rule.problem(counts, chunks, count):
            yield number, chunks


def predicted(pipeline: Pipeline, cut: Partition, loads: Sequence[StageLoad], rates: StageRates) -> tuple[float, float]:
    """Returns seconds of a step (microbatches, sums of replicas, the slowest update; without a flush those from a
    minibatch to the next one), and bytes of the fullest device."""
    starts = (0, *cut.ends[:-1])
    stages = [StageLoad.of_all(loads[start:end]) for start, end in zip(starts, cut.ends, strict=True)]
    seconds = [stage.seconds(rates) for stage in stages]
    kinds = {kind: [each.get(kind, 0.0) for each in seconds] for kind in ("F", "B", "W")}
    sends = [stage.sent * rates.send_byte_s / 2 for stage in stages]
    held = [float(stage.activation) for stage in stages]
    times = StageTimes(kinds, ahead=[*sends[1:], 0.0], back=sends, activations=held)
    if pipeline.is_asynchronous:
        slack = choose_slack(pipeline.places, times) if pipeline.slack is None else pipeline.slack
        calls = Calls.soonest(pipeline.places, slack=slack)
        simulated = simulate_schedule(calls.schedule(calls.enough), times)
    else:
        simulated = simulate_schedule(pipeline.scheduled(pipeline.microbatch_count), times)
    ends, sizes = dict.fromkeys(range(pipeline.devices), 0.0), list(simulated.held)
    for stage, places in zip(stages, pipeline.places, strict=True):
        own = 2 * (len(places) - 1) * stage.gradient * rates.send_byte_s
        own += rates.seconds(0.0, 2 * stage.state + stage.gradient)
        copies = 2 * sum(stage.copies.values())  # with gradients of their own
        for device in places:
            ends[device] += own
            sizes[device] += stage.state + stage.gradient + copies
    tied = max(stage.tied for stage in stages) * rates.send_byte_s
    seconds = simulated.period if pipeline.is_asynchronous else simulated.seconds
    return seconds + max(ends.values()) + tied, max(sizes)
