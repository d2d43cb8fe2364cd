"""The compiler: a tuple of passes, each of which leaves a record.

The record (pass, program after it, what it did) is at once the debug dump, the text of golden tests and what
`explain` prints. The program is verified after every pass that changes it, always.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from autopar.analysis.local import NotLocal
from autopar.collection import paused_collection
from autopar.cost.rates import UNMEASURED, Measurements
from autopar.errors import StrategyError
from autopar.ir.bound_plan import BoundPlan
from autopar.ir.options import Options
from autopar.ir.plan import Plan
from autopar.ir.printer import format_program
from autopar.ir.program import Block, Program
from autopar.ir.verifier import verify_program
from autopar.passes.analyze_batch import analyze_batch
from autopar.passes.analyze_rows import analyze_rows
from autopar.passes.choose import choose
from autopar.passes.choosing.fit_decisions import check_facts, check_followed
from autopar.passes.classify import classify
from autopar.passes.gradient_program import gradient_equations
from autopar.passes.lift_rows import lift_rows
from autopar.passes.localize import localize
from autopar.passes.localizing.rank import localize_rank, localize_worker, not_on_hosts
from autopar.passes.localizing.tensor import localize_stages, localize_tensor
from autopar.passes.merge_pushes import merge_pushes
from autopar.passes.normalize import normalize
from autopar.passes.once_per_row import once_per_row
from autopar.passes.place import place
from autopar.passes.plan_servers import served_plan
from autopar.passes.pull_whole import pull_whole
from autopar.passes.reduce_tables import reduce_tables
from autopar.passes.replicate import check_replicas, replicate
from autopar.passes.share_logs import share_logs
from autopar.passes.split_pipeline import split_pipeline
from autopar.passes.split_servers import split_servers
from autopar.passes.split_stages import split_stages
from autopar.passes.split_update import split_update
from autopar.passes.staging.divided import DividedLeaves
from autopar.passes.staging.search import Reference, preferred, search_pipeline
from autopar.sync import Async


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """What passes go by: the user's options, and what was measured for them."""

    options: Options
    measured: Measurements = UNMEASURED


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """A pass, the program after it, what it says it did, and how long it took."""

    name: str
    program: Program
    note: str
    seconds: float

    def __str__(self) -> str:
        return f"--- {self.name}: {self.note}\n{format_program(self.program)}"


@dataclass(frozen=True, slots=True, eq=False)
class Compiled:
    """The analysed program, the plan, the program as the plan has it (and as its fallback), and how it came about."""

    analysed: Program
    bound: BoundPlan
    program: Program
    records: tuple[Record, ...]
    fallback: Program | None = None

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.bound.plan

    def with_reason(self, paths: Collection[str], reason: str) -> Compiled:
        """The same, whose plan has one more reason for some tables."""
        bound = dataclasses.replace(self.bound, plan=self.plan.with_reason(paths, reason))
        return dataclasses.replace(self, bound=bound)


Result = tuple[Program, BoundPlan | None, str]
Pass = Callable[[Program, BoundPlan | None, Request], Result]


def _classify(program: Program, request: Request) -> tuple[Program, str]:
    """Finds tables; dense leaves that the strategy has on hosts become such."""
    program, note = classify(program, request.options.strategy)
    program, pulled = pull_whole(program, request.options.strategy)
    return program, f"{note}{pulled}"


def _analyze_rows(program: Program, request: Request) -> tuple[Program, str]:
    options = request.options
    return analyze_rows(
        program,
        lazy=options.sparse == "lazy",
        defer=options.sparse == "exact" and options.pipeline is None and not options.is_served,
        undeferred=options.undeferred,
    )


def _analyze_batch(program: Program, request: Request) -> tuple[Program, str]:
    options = request.options
    return analyze_batch(
        program,
        devices=options.devices,
        microbatches=options.microbatches,
        batch_axis=options.batch_axis,
        always=options.hosts or options.pipeline is not None or options.is_served,
        uneven=_uneven(options),
    )


def _uneven(options: Options) -> bool:
    """Returns whether a batch is spread that the devices don't divide: in each device's own program."""
    return not (options.hosts or options.pipeline or options.is_served)


def _choose(program: Program, bound: BoundPlan | None, request: Request) -> Result:
    earlier = request.options.plan
    if earlier is not None:
        check_facts(program, earlier, request.options.devices, request.options.tensor)
    made, note = choose(program, request.options, request.measured)
    if earlier is not None:
        check_followed(program, earlier, made)
    return program, made, note


def _replicate(program: Program, bound: BoundPlan, request: Request) -> Result:
    options = request.options
    if options.sync is None:
        return program, bound, "all processes train one state"
    if isinstance(options.sync, Async):
        return program, bound, "servers keep the state"
    return program, *replicate(
        program,
        bound,
        options.sync,
        options.clients,
        options.batch_axis,
        options.plan,
        options.servers,
        options.server_ranks,
    )


def _split_update(program: Program, bound: BoundPlan, request: Request) -> Result:
    if bound.plan.microbatches == 1 and request.options.pipeline is None and not request.options.is_served:
        return program, bound, "one batch"
    if bound.on_hosts:
        raise StrategyError(
            f"microbatches={bound.plan.microbatches}: {program.name} has tables on hosts, whose steps take a batch as "
            "a whole. Leave microbatches= out, or the tables on the devices"
        )
    pipeline = request.options.pipeline
    own = pipeline is not None and (pipeline.statistics == "microbatch" or pipeline.is_asynchronous)
    is_served = request.options.is_served
    own = own or (is_served and bound.plan.microbatches == 1)  # a worker has its minibatch whole
    try:
        program, note = split_update(program, bound, own_statistics=own, option="sync=" if is_served else "pipeline=")
    except StrategyError as error:
        if not is_served or bound.plan.microbatches > 1:
            raise
        if not gradient_equations(program):
            raise StrategyError(f"{error} Or return the loss: it shows which weights the examples meet") from error
        note = "examples meet others: a worker's minibatch is whole"
    return program, bound, note


def _split_servers(program: Program, bound: BoundPlan, request: Request) -> Result:
    options = request.options
    if not isinstance(options.sync, Async):
        return program, bound, "no servers"
    is_cut = any(e.op == "ap.microbatches" for e in program.block.equations)
    served = split_servers(program, options.servers, None if is_cut else gradient_equations(program))
    plan = served_plan(program, bound, served, options.sync, options.clients, options.server_ranks)
    check_replicas(options.plan, program.name, options.plan and options.plan.served, plan)
    program = dataclasses.replace(program, served=served)
    return program, bound.noting(served=plan), f"{served.pushed} values are pushed to {options.servers} servers"


def _split_pipeline(program: Program, bound: BoundPlan, request: Request) -> Result:
    pipeline = request.options.pipeline
    if pipeline is None:
        return program, bound, "every device runs all stages"
    staged, plan = split_pipeline(program, pipeline, request.measured, _divided(program, bound))
    plan = dataclasses.replace(plan, candidates=request.options.candidates)
    program = dataclasses.replace(program, staged=staged)
    return program, bound.noting(pipeline=plan), f"{len(staged.programs)} programs for {len(plan.stages)} stages"


def _divided(program: Program, bound: BoundPlan) -> DividedLeaves:
    """Leaves that are divided over the devices of a tensor axis."""
    if bound.plan.tensor is None:
        return DividedLeaves()
    return DividedLeaves(bound.plan.tensor.devices, {program.block.inputs[k]: a for k, a in bound.tensors.items()})


def _localize(program: Program, bound: BoundPlan, request: Request) -> Result:
    if bound.on_hosts:
        return localize_rank(program, bound)
    if program.served is not None and request.options.worker_devices:
        program, note = _localize_worker(program, bound, request.options.worker_devices)
        return program, bound, note
    if bound.devices * request.options.tensor == 1:
        return program, bound, "one device"
    if program.staged is not None:
        return program, bound, "the programs of stages"
    try:
        program, note = localize(program, bound)
    except NotLocal as error:
        raise _without_own_program(program, error) from error
    return program, bound, note


def _localize_worker(program: Program, bound: BoundPlan, devices: int) -> tuple[Program, str]:
    try:
        worker = localize_worker(program, bound, devices)
    except NotLocal as error:
        return program, f"{devices} devices of a worker are all given the whole minibatch: {error}"
    served = dataclasses.replace(program.served, local_worker=worker)
    return dataclasses.replace(program, served=served), f"a worker's minibatch is divided over {devices} devices"


def _without_own_program(program: Program, error: NotLocal) -> Exception:
    if program.staged is not None:
        return StrategyError(
            f"pipeline: products of {program.name} can't be divided over the devices of a stage: {error}. Leave them "
            "whole: a mesh without a tensor axis, or strategy='allreduce'"
        )
    return StrategyError(f"{program.name} can't be written as the program of one device of several: {error}")


def _localize_tensor(program: Program, bound: BoundPlan, request: Request) -> tuple[Program, str]:
    try:
        if program.staged is not None and request.options.tensor > 1:
            staged, note = localize_stages(program.staged, bound, request.options.tensor)
            return dataclasses.replace(program, staged=staged), note
        if program.local is not None and bound.plan.tensor is not None:
            return localize_tensor(program, bound)
    except NotLocal as error:
        raise _without_own_program(program, error) from error
    return program, "no products are divided in a device's own program"


def _split_stages(program: Program, bound: BoundPlan, request: Request) -> Result:
    if not bound.on_hosts:
        return program, bound, "one program"
    hosted = [f for f in bound.families if f.on_hosts]
    owners = bound.devices > 1 or any(f.table.pulled for f in hosted)
    families = {f.family for f in hosted}
    stages = split_stages(program, families, owners=owners, bucket_bytes=request.options.bucket_bytes)
    bound = bound.noting(stages=tuple(map(str, stages.items)))
    return dataclasses.replace(program, stages=stages), bound, f"{stages.programs} compiled programs"


def _analyzing(run: Callable[[Program, Request], tuple[Program, str]]) -> Pass:
    """A pass that finds out about a program."""

    def analyze(program: Program, bound: BoundPlan | None, request: Request) -> Result:
        program, note = run(program, request)
        return program, bound, note

    return analyze


def _following(run: Callable[[Program, BoundPlan, Request], Result | tuple[Program, str]]) -> Pass:
    """A pass that does what the plan says."""

    def follow(program: Program, bound: BoundPlan | None, request: Request) -> Result:
        assert bound is not None, "the plan is made before it is followed"
        try:
            result = run(program, bound, request)
        except NotLocal as error:
            raise not_on_hosts(program, error) from error
        return result if len(result) == 3 else (result[0], bound, result[1])

    return follow


#: What makes a program of the plan, in this order.
_FOLLOWED: tuple[tuple[str, Pass], ...] = (
    ("replicate", _following(_replicate)),
    ("lift_rows", _following(lambda program, bound, _: lift_rows(program, bound))),
    ("share_logs", _following(lambda program, bound, _: share_logs(program, bound))),
    ("merge_pushes", _following(lambda program, bound, _: merge_pushes(program, bound))),
    ("place", _following(lambda program, bound, _: place(program, bound))),
    ("reduce_tables", _following(lambda program, bound, _: reduce_tables(program, bound))),
    ("split_update", _following(_split_update)),
    ("split_servers", _following(_split_servers)),
    ("split_pipeline", _following(_split_pipeline)),
    ("localize", _following(_localize)),
    ("once_per_row", _following(lambda program, bound, _: once_per_row(program, bound))),
    ("localize_tensor", _following(_localize_tensor)),
    ("split_stages", _following(_split_stages)),
)

#: What finds out about a traced program.
ANALYSIS: tuple[tuple[str, Pass], ...] = (
    ("normalize", _analyzing(lambda program, _: normalize(program))),
    ("classify", _analyzing(_classify)),
    ("analyze_rows", _analyzing(_analyze_rows)),
    ("analyze_batch", _analyzing(_analyze_batch)),
)

PIPELINE: tuple[tuple[str, Pass], ...] = (*ANALYSIS, ("choose", _choose), *_FOLLOWED)


@dataclass(frozen=True, slots=True, eq=False)
class Analysed:
    """A program with all that analysis has found, and how that came about."""

    program: Program
    records: tuple[Record, ...]


def analyze_program(program: Program, options: Options) -> Analysed:
    """The first part of the pipeline, on a traced program: what there is to measure follows from it."""
    with paused_collection():
        analyzed, _, records = _run(ANALYSIS, program, None, Request(options), traced=True)
        return Analysed(analyzed, tuple(records))


def compile_program(analysed: Analysed, options: Options, measured: Measurements = UNMEASURED) -> Compiled:
    """The rest of it.

    Raises:
      NotDeferrable: rows of some leaves can't wait; analyze again without deferring them (`Options.undeferred`).
    """
    with paused_collection():
        request = Request(options, measured)
        program, bound, records = _run((("choose", _choose), *_FOLLOWED), analysed.program, None, request)
        assert bound is not None, "the pipeline makes a plan"
        fallback = follow(analysed.program, bound.without_limits(), options) if bound.fallback else None
        return Compiled(analysed.program, bound, program, (*analysed.records, *records), fallback)


def gradient_program(analysed: Analysed, options: Options) -> Block:
    """The program of one microbatch, as a pipeline cuts it into stages."""
    program, _ = _updated_once(analysed, options, UNMEASURED)
    return next(e for e in program.block.equations if e.op == "ap.microbatches").bodies[0]


def choose_pipeline(
    analysed: Mapping[int, Analysed], options: Options, measured: Mapping[int, Measurements], counts: Sequence[int]
) -> Options:
    """The options with a pipeline that leaves nothing to choose.

    Args:
      analysed: The step for one or two numbers of microbatches (`passes.staging.search.reference_counts`).
      options: The pipeline as the user asks for it.
      measured: For each of these, rates and memory of the devices.
      counts: Numbers of microbatches to choose from.
    """
    pipeline = options.pipeline
    assert pipeline is not None, "a pipeline is chosen"
    references: dict[int, Reference] = {}
    for count, each in analysed.items():
        program, bound = _updated_once(each, dataclasses.replace(options, microbatches=count), measured[count])
        references[count] = Reference(program, _divided(program, bound), measured[count].stages)
    memory = next(iter(measured.values())).memory
    found = search_pipeline(references, pipeline, memory, options.stage_devices, counts)
    is_measured = all(each.rates is not None for each in references.values())
    candidates = tuple((str(c), c.seconds) for c in found) if is_measured else ()
    chosen = preferred(found).pipeline
    return dataclasses.replace(options, pipeline=chosen, microbatches=chosen.microbatch_count, candidates=candidates)


def _updated_once(analysed: Analysed, options: Options, measured: Measurements) -> tuple[Program, BoundPlan]:
    """The program as `split_update` cuts it, and the plan so far."""
    with paused_collection():
        until = next(k for k, (name, _) in enumerate(_FOLLOWED) if name == "split_update") + 1
        passes, request = (("choose", _choose), *_FOLLOWED[:until]), Request(options, measured)
        program, bound, _ = _run(passes, analysed.program, None, request)
        assert bound is not None, "the pipeline makes a plan"
        return program, bound


def _run(
    passes: Sequence[tuple[str, Pass]],
    program: Program,
    bound: BoundPlan | None,
    request: Request,
    *,
    traced: bool = False,
) -> tuple[Program, BoundPlan | None, list[Record]]:
    """Passes one after the other, each checked; `traced`: nothing has checked the program yet."""
    records: list[Record] = []
    for name, run in passes:
        start = time.perf_counter()
        before = None if traced and not records else program.block
        program, bound, note = run(program, bound, request)
        verify_program(program, before, name)
        records.append(Record(name, program, note, time.perf_counter() - start))
    return program, bound, records


def follow(analysed: Program, bound: BoundPlan, options: Options) -> Program:
    """The program of another plan than the one that was chosen."""
    program = analysed
    for _, run in _FOLLOWED:
        program, _, _ = run(program, bound, Request(options))
    verify_program(program)
    return program
