"""Assigns weights to stages, by the user's patterns or so that the slowest stage is as fast as possible; chooses
options that are left to "auto"."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from autopar.cost.rates import NOMINAL, Measurements, StageRates
from autopar.cost.stage_time import Chain, Partition, StageTimes, choose_slack, partition, simulate_schedule
from autopar.errors import StrategyError
from autopar.ir.figures import format_bytes
from autopar.ir.paths import matches, matches_layers, split_layers
from autopar.ir.pipeline import AUTO, Calls, Pipeline
from autopar.ir.program import Program, Var
from autopar.ir.schedule import SCHEDULES, Rule
from autopar.passes.staging.layers import CutProgram, Ends, Stack, cut_layers, find_stacks, why_whole
from autopar.passes.staging.loads import DividedLeaves, StageLoad, stage_loads
from autopar.passes.staging.parts import find_parts, label_parts, other_homes, used_weights, with_remat


@dataclass(frozen=True, slots=True)
class StageAssignment:
    """The stage of each weight of a program."""

    cut: CutProgram  #: The program; each stacked leaf has a part for each of its stages.
    homes: dict[Var, int]  #: The stage of each weight.


@dataclass(frozen=True, slots=True)
class Units:
    """The weights and layers between which a program can be cut into stages."""

    cut: CutProgram  #: The program, with its stacked leaves cut into single layers.
    units: list[list[Var]]  #: The weights in the order of their first use, those of one layer together.
    stacks: list[Stack]  #: The stacked leaves; `layers`: the parts of each, layer by layer.
    layers: list[list[tuple[Var, ...]]]
    divided: DividedLeaves  #: Leaves of the program that are divided over several devices.


def choose_stages(
    program: Program, pipeline: Pipeline, measured: Measurements, divided: DividedLeaves
) -> StageAssignment:
    """Chooses the stage of each weight, or of some layers of one. `program` has weights in the order of their first
    use; no option of `pipeline` is left to "auto". Raises StrategyError for more stages than weights, none that fit the
    memory, or patterns that don't cover the weights."""
    if not isinstance(pipeline.stages, int):
        cut = cut_layers(program, dict(_asked_ends(program, find_stacks(program), pipeline.stages)))
        return StageAssignment(cut, _by_patterns(cut, program, pipeline.stages))
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
    return StageAssignment(cut, {v: homes[v] for v in weights})


def find_units(program: Program, divided: DividedLeaves) -> Units:
    """Finds the units of a program that `split_update` has cut."""
    stacks = find_stacks(program)
    fine = cut_layers(program, {v: tuple(range(1, stack.layers + 1)) for stack in stacks for v in stack.leaves})
    layers = [fine.layers(stack.leaves) for stack in stacks]
    numbers = {v: k for k, layer in enumerate(itertools.chain(*layers)) for v in layer}
    weights = used_weights(fine.program, find_parts(fine.program))
    groups = itertools.groupby(weights, key=lambda v: numbers.get(v, v))
    return Units(fine, [list(group) for _, group in groups], stacks, layers, divided.within(fine))


def check_units(fine: Units, stages: int) -> None:
    """Raises StrategyError for more stages than there are cuts."""
    if len(fine.units) < stages:
        raise StrategyError(
            f"pipeline: {fine.cut.program.name} has {len(fine.units)} weights and layers to cut between, which is too "
            f"few for {stages} stages. Give fewer stages"
        )


def unit_loads(fine: Units, *, splits_backward: bool, remat: bool) -> list[StageLoad]:
    """Returns the load of each unit as a stage of its own."""
    parts = find_parts(fine.cut.program)
    each = {v: k for k, unit in enumerate(fine.units) for v in unit}
    count = len(fine.units)
    homes = each | other_homes(fine.cut.program, parts, each)
    labels = label_parts(parts, each, count, splits_backward=splits_backward)
    if remat:
        parts, labels = with_remat(parts, labels, count)
    return stage_loads(parts, labels, homes, tuple((k,) for k in range(count)), fine.divided.follow(parts))


def _balanced(fine: Units, pipeline: Pipeline, measured: Measurements) -> dict[Var, int]:
    """Cuts between units so that the slowest stage is as fast as possible; returns the stage of each weight."""
    name, units, microbatches = fine.cut.program.name, fine.units, pipeline.microbatch_count
    check_units(fine, pipeline.count)
    rates = NOMINAL if measured.stages is None else measured.stages
    splits = pipeline.scheduled(microbatches).splits_backward
    loads = unit_loads(fine, splits_backward=splits, remat=bool(pipeline.remat))
    layers = [load.as_layer(rates, microbatches) for load in loads]
    memory = measured.memory if pipeline.rule.has_replicas else None
    counts = [len(replicas) for replicas in pipeline.stage_devices]
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
    """Yields where to cut stacked leaves: at the ends of the layers that patterns name."""
    paths = {v: leaf.path for v, leaf in program.named_inputs}
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
    paths = {v: leaf.path for v, leaf in program.named_inputs}
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


# --- options left to "auto": stages and their devices, microbatches, schedule, rematerialization ---
#
# All combinations that fit the devices' memory are predicted: the best partition for each number of stages and
# microbatches (`cost.stage_time`), and its time by each schedule. Loads are computed for two numbers of microbatches,
# and interpolated for others: some costs grow with a microbatch's examples, others (reading the weights) are fixed.
#: Numbers of microbatches that are tried; the larger one for which loads are computed.
COUNTS, REFERENCE = (1, 2, 4, 8, 16, 32, 64), 8
#: More stages are taken if they are predicted to be faster by more than this factor.
TIE = 1.1
#: Schedules in order of preference. "gpipe" is never faster than "1f1b", and holds more.
_SCHEDULES = ("1f1b", "zero-bubble", "interleaved")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A pipeline, and its predicted seconds of a step."""

    pipeline: Pipeline
    seconds: float

    def __str__(self) -> str:
        p = self.pipeline
        return f"{p}, {p.schedule}, M = {p.microbatch_count}{', remat' * bool(p.remat)}"


def microbatch_counts(program: Program, pipeline: Pipeline) -> list[int]:
    """Returns the numbers of microbatches to try: those that divide the batch of an analysed program."""
    if pipeline.microbatches != AUTO or pipeline.is_asynchronous:
        return [pipeline.microbatch_count]
    batch = [v for v, input_ in program.named_inputs if input_.role == "batch" and v in program.batch]
    examples = math.gcd(*(v.shape[program.batch[v]] for v in batch))
    return [count for count in COUNTS if examples % count == 0]


def reference_counts(counts: Sequence[int]) -> list[int]:
    """Returns the numbers of microbatches for which loads are computed; 1 says little of several."""
    return sorted(
        {counts[min(1, len(counts) - 1)], max(count for count in counts if count <= max(REFERENCE, counts[0]))}
    )


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """A step for one number of microbatches."""

    program: Program  #: As `split_update` cuts it.
    divided: DividedLeaves  #: Leaves that are divided over several devices.
    rates: StageRates | None  #: Rates of the devices, for microbatches of this size; None: not measured.


def search_pipeline(
    references: Mapping[int, Reference], pipeline: Pipeline, memory: int | None, devices: int, counts: Sequence[int]
) -> list[Candidate]:
    """Finds the best pipeline of each number of stages, the best of all first.

    `references`: number of microbatches -> the step; one, or two, the fewer first. `memory`: bytes of each device;
    None: unknown. `counts`: numbers of microbatches. Raises StrategyError for more stages than weights, or if none fits
    the devices' memory.
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
    # Loads depend on whether a schedule splits the backward: they are computed once for each kind.
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
    """Returns the pipeline with the fewest stages of those that are nearly the fastest, as predictions are rough."""
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
    """Interpolates rates between two sizes of microbatches on a logarithmic scale, as small ones stay in a cache."""
    (first, before), *rest = rates.items()
    if not rest:
        return before
    second, behind = rest[0]
    share = min(max(math.log(count / first) / math.log(second / first), 0.0), 1.0)
    pairs = {f.name: (getattr(before, f.name), getattr(behind, f.name)) for f in fields(StageRates)}
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
    """Yields pipelines of `count` microbatches: each with its best partition, and the best that fits the memory."""
    layers = [load.as_layer(rates, count) for load in loads]
    for schedule in schedules:
        rule = SCHEDULES[schedule]
        chooses_replicas = asked.stages == AUTO and rule.has_replicas
        for stages, chunks in _numbers(asked, rule, count, len(layers), devices):
            fields = {"stages": stages, "schedule": schedule, "microbatches": count, "stages_per_device": chunks}
            made = replace(asked, remat=remat, **fields)
            own = None if chooses_replicas else [len(replicas) for replicas in made.stage_devices]
            for limit in dict.fromkeys((None, memory if rule.has_replicas else None)):
                chain = Chain(layers, devices if own is None else sum(own), count, rates.send_byte_s, limit)
                cut = partition(chain, stages, own)
                if cut is not None:
                    yield replace(made, replicas=cut.replicas) if chooses_replicas else made, cut


def _numbers(asked: Pipeline, rule: Rule, count: int, layers: int, devices: int) -> Iterator[tuple[int, int]]:
    """Yields (stages, stages on each device) that a schedule of `count` microbatches can have."""
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
    """Returns seconds of a step, and bytes of the fullest device.

    A step has the microbatches, sums of replicas and the slowest update; without a flush it is a minibatch's period.
    """
    starts = (0, *cut.ends[:-1])
    stages = [StageLoad.of_all(loads[start:end]) for start, end in zip(starts, cut.ends, strict=True)]
    seconds = [stage.seconds(rates) for stage in stages]
    kinds = {kind: [each.get(kind, 0.0) for each in seconds] for kind in ("F", "B", "W")}
    sends = [stage.sent * rates.send_byte_s / 2 for stage in stages]
    held = [float(stage.activation) for stage in stages]
    times = StageTimes(kinds, ahead=[*sends[1:], 0.0], back=sends, activations=held)
    if pipeline.is_asynchronous:
        slack = choose_slack(pipeline.stage_devices, times) if pipeline.slack is None else pipeline.slack
        calls = Calls.soonest(pipeline.stage_devices, slack=slack)
        simulated = simulate_schedule(calls.schedule(calls.enough), times)
    else:
        simulated = simulate_schedule(pipeline.scheduled(pipeline.microbatch_count), times)
    ends, sizes = dict.fromkeys(range(pipeline.devices), 0.0), list(simulated.held)
    for stage, devices in zip(stages, pipeline.stage_devices, strict=True):
        own = 2 * (len(devices) - 1) * stage.gradient * rates.send_byte_s
        own += rates.seconds(0.0, 2 * stage.state + stage.gradient)
        copies = 2 * sum(stage.copies.values())  # copies have gradients of their own
        for device in devices:
            ends[device] += own
            sizes[device] += stage.state + stage.gradient + copies
    tied = max(stage.tied for stage in stages) * rates.send_byte_s
    seconds = simulated.period if pipeline.is_asynchronous else simulated.seconds
    return seconds + max(ends.values()) + tied, max(sizes)
