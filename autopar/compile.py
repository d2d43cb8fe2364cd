"""The compiler: a tuple of passes, each of which leaves a record.

The record (pass, program after it, what it did) is at once the debug dump, the text of golden tests and what
`explain` prints. The program is verified after every pass that changes it, always.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopar.analysis.local import NotLocal
from autopar.collection import paused_collection
from autopar.cost.measurements import UNMEASURED, Measurements
from autopar.errors import StrategyError
from autopar.ir.options import Options
from autopar.ir.plan import Plan
from autopar.ir.printer import format_program
from autopar.ir.program import Program
from autopar.ir.verifier import verify_program
from autopar.passes.analyze_batch import analyze_batch
from autopar.passes.analyze_rows import analyze_rows
from autopar.passes.choose import choose
from autopar.passes.choosing.fit_decisions import check_facts, check_followed
from autopar.passes.classify import classify
from autopar.passes.lift_rows import lift_rows
from autopar.passes.localize import localize
from autopar.passes.merge_pushes import merge_pushes
from autopar.passes.normalize import normalize
from autopar.passes.once_per_row import once_per_row
from autopar.passes.place import place
from autopar.passes.reduce_tables import reduce_tables
from autopar.passes.shield import shield
from autopar.passes.split_stages import split_stages


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
    plan: Plan
    program: Program
    records: tuple[Record, ...]
    fallback: Program | None = None


Pass = Callable[[Program, Plan | None, Request], tuple[Program, Plan | None, str]]


def _analyze_rows(program: Program, plan: Plan | None, request: Request) -> tuple[Program, Plan | None, str]:
    lazy, refused = request.options.sparse == "lazy", request.options.undeferred
    program, note = analyze_rows(program, lazy=lazy, defer=_may_defer(request), undeferred=refused)
    return program, plan, note


def _may_defer(request: Request) -> bool:
    return request.options.sparse == "exact"


def _analyze_batch(program: Program, plan: Plan | None, request: Request) -> tuple[Program, Plan | None, str]:
    program, note = analyze_batch(
        program, devices=request.options.devices, batch_axis=request.options.batch_axis, always=request.options.hosts
    )
    return program, plan, note


def _choose(program: Program, plan: Plan | None, request: Request) -> tuple[Program, Plan | None, str]:
    if request.options.decisions is not None:
        check_facts(program, request.options.decisions, request.options.devices)
    made, note = choose(program, request.options, request.measured)
    if request.options.decisions is not None:
        check_followed(program, request.options.decisions, made)
    return program, made, note


def _keep(plan: Plan | None, result: tuple[Program, str]) -> tuple[Program, Plan | None, str]:
    return result[0], plan, result[1]


def _following(run: Callable[[Program, Plan], tuple[Program, str]]) -> Pass:
    """A pass that does what the plan says."""

    def follow(program: Program, plan: Plan | None, request: Request) -> tuple[Program, Plan | None, str]:
        assert plan is not None, "the plan is made before it is followed"
        return _keep(plan, run(program, plan))

    return follow


def _lift_rows(program: Program, plan: Plan | None, request: Request) -> tuple[Program, Plan | None, str]:
    assert plan is not None, "the plan is made before it is followed"
    try:
        return _keep(plan, lift_rows(program, plan))
    except NotLocal as error:
        raise _not_on_hosts(program, error) from error


def _localize(program: Program, plan: Plan | None, request: Request) -> tuple[Program, Plan | None, str]:
    assert plan is not None, "the plan is made before it is followed"
    if plan.on_hosts:
        return _localize_rank(program, plan)
    if plan.emit == "pjit":
        return program, plan, "one global program, partitioned by XLA"
    try:
        return _keep(plan, localize(program, plan))
    except NotLocal as error:
        raise StrategyError(
            f"emit='pmap': {program.name} can't be written as the program of one device: {error}. "
            "Leave it to emit='pjit'"
        ) from error


def _localize_rank(program: Program, plan: Plan) -> tuple[Program, Plan, str]:
    """One rank's program; its examples are its own where nothing but gradients and losses is reduced."""
    why = _needs_xla(plan)
    if plan.devices > 1 and why is None:
        try:
            found, note = localize(program, plan)
            why = _obstacle(found)
            if why is None:
                plan = dataclasses.replace(plan, road=("mpi", _reductions(found)))
                return found, plan, note
        except NotLocal as error:
            why = str(error)
    try:
        found, note = localize(program, plan, examples=False)
    except NotLocal as error:
        raise _not_on_hosts(program, error) from error
    road = ("xla", why or "") if plan.devices > 1 else ("", "one process")
    return found, dataclasses.replace(plan, road=road), note


def _reductions(program: Program) -> str:
    """What is reduced over the ranks, in words."""
    ops = sorted({r.op for r in program.local.reductions})
    kinds = "all of sums" if ops in ([], ["sum"]) else f"by {', '.join(ops)}"
    return f"{len(program.local.reductions)} reductions, {kinds}"


def _needs_xla(plan: Plan) -> str | None:
    on_devices = [f for f in plan.families if not f.on_hosts]
    if on_devices:
        return "some tables are on devices"
    return "dense parameters are in shares" if plan.shares else None


def _obstacle(program: Program) -> str | None:
    """Why the ranks' sums can't be reduced between compiled programs."""
    if program.local.inside is not None:
        return str(program.local.inside)
    nested = next((r for r in program.local.reductions if r.nested), None)
    return None if nested is None else f"a sum over all examples in a loop ({nested.source})"


def _not_on_hosts(program: Program, error: NotLocal) -> StrategyError:
    if any(given.role == "state" for given in program.inputs):
        what, elsewhere = "trained", "leave them on the devices"
        if error.tables:
            there = ", ".join(f"{path!r}: 'auto'" for path in error.tables)
            names = " and ".join(error.tables)
            elsewhere = f"leave {names} on the devices, with all slots: strategy={{{there}, '**': ('ps', 'hosts')}}"
    else:
        what, elsewhere = "run", "give it ordinary arrays (autopar.materialize)"
    remedy = f"{error.remedy}, or {elsewhere}" if error.remedy else f"{elsewhere[:1].upper()}{elsewhere[1:]}"
    return StrategyError(f"strategy: {program.name} can't be {what} with tables on hosts: {error}. {remedy}")


def _reduce_tables(program: Program, plan: Plan | None, request: Request) -> tuple[Program, Plan | None, str]:
    assert plan is not None, "the plan is made before it is followed"
    try:
        return _keep(plan, reduce_tables(program, plan))
    except NotLocal as error:
        raise _not_on_hosts(program, error) from error


def _once_per_row(program: Program, plan: Plan | None, request: Request) -> tuple[Program, Plan | None, str]:
    assert plan is not None, "the plan is made before it is followed"
    return _keep(plan, once_per_row(program, plan, request.options.rank_devices))


def _shield(program: Program, plan: Plan | None, request: Request) -> tuple[Program, Plan | None, str]:
    """Of what XLA partitions: over all devices, or over those of a rank."""
    assert plan is not None, "the plan is made before it is followed"
    by_rank = plan.on_hosts and plan.road[0] != "xla"
    devices = (1 if by_rank else plan.devices) * request.options.rank_devices
    if devices == 1 or (plan.emit == "pmap" and not plan.on_hosts):
        return program, plan, "XLA partitions nothing"
    program, isolated = shield(program, plan, devices)
    note = f"lines kept from XLA's partitioner: {len(isolated)}" if isolated else "XLA's partitioner gets nothing wrong"
    return program, dataclasses.replace(plan, isolated=isolated), note


def _split(program: Program, plan: Plan | None, request: Request) -> tuple[Program, Plan | None, str]:
    if plan is None or not plan.on_hosts:
        return program, plan, "one program"
    try:
        stages = split_stages(program, plan.devices, {f.family for f in plan.families if f.on_hosts})
    except NotLocal as error:
        raise _not_on_hosts(program, error) from error
    plan = dataclasses.replace(plan, stages=tuple(map(str, stages.items)))
    return dataclasses.replace(program, stages=stages), plan, f"{stages.programs} compiled programs"


#: What makes a program of the plan, in this order.
_FOLLOWED: tuple[tuple[str, Pass], ...] = (
    ("lift_rows", _lift_rows),
    ("merge_pushes", _following(merge_pushes)),
    ("place", _following(place)),
    ("reduce_tables", _reduce_tables),
    ("localize", _localize),
    ("once_per_row", _once_per_row),
    ("shield", _shield),
    ("split_stages", _split),
)

#: What finds out about a traced program.
ANALYSIS: tuple[tuple[str, Pass], ...] = (
    ("normalize", lambda program, plan, request: _keep(plan, normalize(program))),
    ("classify", lambda program, plan, request: _keep(plan, classify(program))),
    ("analyze_rows", _analyze_rows),
    ("analyze_batch", _analyze_batch),
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
        found, _, records = _run(ANALYSIS, program, None, Request(options), traced=True)
        return Analysed(found, tuple(records))


def compile_program(analysed: Analysed, options: Options, measured: Measurements = UNMEASURED) -> Compiled:
    """The rest of it.

    Raises:
      NotDeferrable: rows of some leaves can't wait; analyze again without deferring them (`Options.undeferred`).
    """
    with paused_collection():
        request = Request(options, measured)
        program, plan, records = _run((("choose", _choose), *_FOLLOWED), analysed.program, None, request)
        assert plan is not None, "the pipeline makes a plan"
        fallback = follow(analysed.program, plan.without_limits(), options) if plan.fallback else None
        return Compiled(analysed.program, plan, program, (*analysed.records, *records), fallback)


def _run(
    passes: Sequence[tuple[str, Pass]], program: Program, plan: Plan | None, request: Request, *, traced: bool = False
) -> tuple[Program, Plan | None, list[Record]]:
    """Passes one after the other, each checked; `traced`: nothing has checked the program yet."""
    records: list[Record] = []
    for name, run in passes:
        start = time.perf_counter()
        before = None if traced and not records else program.block
        program, plan, note = run(program, plan, request)
        verify_program(program, before, name)
        records.append(Record(name, program, note, time.perf_counter() - start))
    return program, plan, records


def follow(analysed: Program, plan: Plan, options: Options) -> Program:
    """The program of another plan than the one that was chosen."""
    program = analysed
    for _, run in _FOLLOWED:
        program, _, _ = run(program, plan, Request(options))
    verify_program(program)
    return program
