"""Finds the part of a step with tables on hosts that can run beside the step before it: what follows from its batch,
its tables, and what the step before is expected to write to their update logs.

Rows of deferred tables are brought up to date by entries that the step before hasn't written yet. So these are computed
ahead, from the state. A norm of gradients, by which they are clipped, isn't known then. But an untouched row's gradient
is zero, whatever it is divided by, and all numbers will do. Whoever uses rows compares what was written in the end.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.ir.deferred import Replay, flushes
from autopar.ir.local import ExchangeSegment, ProgramSegment
from autopar.ir.operations import PREFIX, split
from autopar.ir.program import ArrayType, Atom, Block, Equation, Program, RouteType, Var, family_of

#: Most elements of a value that is computed ahead for an update log's entry.
_FEW = 1 << 10
#: Our operations that such values are computed by.
_OF_ENTRIES = frozenset({"ap.record", "ap.next", "ap.full"})


@dataclass(frozen=True, slots=True, eq=False)
class LogAhead:
    """An update log of which a step's entry is expected before the step writes it."""

    family: int
    stamps: Equation  #: The pull of the rows' stamps.
    now: Var
    length: int  #: Entries that there is room for.
    entries: Mapping[Var, Atom]  #: Input -> its value after the step.
    caught: Mapping[Equation, Var]  #: A pull of a leaf that an owner's program brings up to date -> its rows then.


@dataclass(frozen=True, slots=True, eq=False)
class Expected:
    """Computes what a step writes to its update logs from its inputs, and numbers in place of what isn't known yet."""

    block: Block
    assumed: tuple[Var, ...]  #: Inputs of the block that no input of the step is: any numbers.


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """The part of a step that can run ahead."""

    inputs: tuple[Var, ...]  #: Leaves of the batch that it reads.
    ids: tuple[int, ...]  #: Indices of the segments that compute ids.
    routes: tuple[Equation, ...]
    pulls: tuple[Equation, ...]
    owners: tuple[int, ...]  #: Indices of owners' programs between pulls and fetches.
    fetches: tuple[Equation, ...]
    sent: tuple[Equation, ...]  #: Pulls whose rows devices read: in one process.
    logs: tuple[LogAhead, ...]  #: Update logs of tables whose owners bring rows up to date before they are fetched.
    expected: Expected | None  #: What they get; None if there are none.
    values: frozenset[Atom]  #: What ids and routes are.
    #: Index of the first device program that follows all routes and fetches: beside it the next step's prefix runs.
    start: int
    written: frozenset[int]  #: Families of which the step writes rows.


def first_program(items: Sequence[ProgramSegment | ExchangeSegment]) -> int | None:
    """Returns the index of the first device program that follows all routes and fetches; None if none does."""
    last = max((k for k, item in enumerate(items) if _is_of("ap.route", item) or _is_of("ap.fetch", item)), default=0)
    return next((k for k, item in enumerate(items) if k > last and _is_of_devices(item)), None)


def prefix_of(
    program: Program,
    items: Sequence[ProgramSegment | ExchangeSegment],
    hosted: Collection[int],
    *,
    deferred: bool = True,
) -> Prefix | None:
    """Returns the prefix of a step; None if no rows are asked for by ids of the batch, or no program follows.

    `items`: the segments of `program`, which is one rank's. `hosted`: families on hosts. `deferred`: whether rows are
    brought up to date ahead.
    """
    named = list(zip(program.block.inputs, program.inputs, strict=False))  # update logs' entries have no names
    logs = _logs_of(program.block, hosted) if deferred else []
    expected = _expected(program.block, logs) if logs else None
    entries = [entry for log in logs for entry in log.entries if expected is not None]
    batch = [v for v, input_ in named if input_.role == "batch" and isinstance(v.type, ArrayType)]
    pulled = {e.inputs[0] for e in program.block.equations if e.op == "ap.pull" and family_of(e) in hosted}
    tables = pulled & {v for v, input_ in named if input_.role != "batch"}
    start = first_program(items)
    last_route = max((k for k, item in enumerate(items) if _is_of("ap.route", item)), default=-1)
    found: set[Atom] = {*batch, *entries}
    ids, owners = list[int](), list[int]()
    made: dict[str, list[Equation]] = {"ap.route": [], "ap.pull": [], "ap.fetch": []}
    for k, item in enumerate(items[:start]):
        if isinstance(item, ProgramSegment):
            block = item.block
            is_wanted = k < last_route or item.side == "owner"
            if is_wanted and found.issuperset(block.inputs) and not any(e.effects for e in block.walk()):
                found.update(block.outputs)
                (ids if item.side == "device" else owners).append(k)
            continue
        for equation in item.equations if item.op in made else ():
            if item.op == "ap.pull" and equation.inputs[0] not in tables:
                continue  # an array of the batch with the table's rows
            read = [a for a in equation.inputs if isinstance(a, Var) and (item.op != "ap.pull" or a not in tables)]
            if read and found.issuperset(read):
                made[item.op].append(equation)
                found.update(equation.outputs)
    if start is None or not made["ap.route"]:
        return None
    # Of rows only those that are fetched: slots are pulled for the update alone.
    needed: set[Atom] = {e.inputs[0] for e in made["ap.fetch"]}
    kept = list[int]()
    for k in reversed(owners):
        block = _block(items[k])
        if not needed.isdisjoint(block.outputs):
            kept.append(k)
            needed.update(block.inputs)
    outputs = {v for k in kept for v in _block(items[k]).outputs}
    known = [_used(log, outputs) for log in logs if log.stamps.outputs[0] in needed]
    by_devices = {v for item in items if _is_of_devices(item) for v in _block(item).inputs}
    sent = tuple(e for e in made["ap.pull"] if e.outputs[0] in by_devices)
    pulls = tuple(e for e in made["ap.pull"] if e.outputs[0] in needed or e in sent)
    read_by = {a for of in (*made["ap.route"], *(_block(items[k]) for k in (*ids, *kept))) for a in of.inputs}
    commits = (e for item in items for e in _equations(item) if e.op in ("ap.commit", "ap.densify"))
    return Prefix(
        tuple(v for v in batch if v in read_by),
        tuple(ids),
        tuple(made["ap.route"]),
        pulls,
        tuple(kept[::-1]),
        tuple(made["ap.fetch"]),
        sent,
        tuple(known),
        expected if known else None,
        frozenset(v for of in (*made["ap.route"], *(_block(items[k]) for k in ids)) for v in of.outputs),
        start,
        frozenset(a.type.family for e in commits for a in e.inputs if isinstance(a.type, RouteType)),
    )


def why_not_ahead(program: Program, family: int) -> str:
    """Says why the rows of a family can't be asked for before their step."""
    routes = (e for e in program.block.equations if e.op == "ap.route" and family_of(e) == family)
    needed: set[Atom] = {a for e in routes for a in e.inputs}
    for equation in reversed(program.block.equations):
        if not needed.isdisjoint(equation.outputs):
            needed.update(equation.inputs)
    inputs = zip(program.block.inputs, program.inputs, strict=False)
    state = next((each.path for v, each in inputs if v in needed and each.role != "batch"), None)
    if state is not None:
        return f"ids depend on the state ({state})"
    return "ids are computed beside an effect (a callback, jax.debug.print), which happens once, in their own step"


def _logs_of(block: Block, hosted: Collection[int]) -> list[LogAhead]:
    """Returns the update logs of families on hosts."""
    pulls: dict[Atom, Equation] = {e.outputs[0]: e for e in block.equations if e.op == "ap.pull"}
    flushed = {e.params["family"]: split(e.op, e.params, e.inputs)["entries"] for e in flushes(block)}
    logs = list[LogAhead]()
    for equation in block.equations:
        families = equation.params["families"] if equation.op == "ap.catch_up" else ()
        if len(families) != 1 or families[0] not in hosted or families[0] not in flushed:
            continue  # on hosts no families share a log
        replay: Replay = equation.params["replay"]
        named = split(equation.op, equation.params, equation.inputs)
        caught = {pulls[a]: v for a, v in zip(named["leaves"], equation.outputs, strict=False)}
        entries = {v: new for v, new in zip(named["entries"], flushed[families[0]], strict=True) if isinstance(v, Var)}
        now = next(iter(entries))
        logs.append(LogAhead(families[0], pulls[named["stamps"][0]], now, replay.length, entries, caught))
    return logs


def _used(log: LogAhead, outputs: Collection[Atom]) -> LogAhead:
    """Returns a log with rows that programs return once they are up to date: those of all of its leaves, or none."""
    return log if all(v in outputs for v in log.caught.values()) else replace(log, caught={})


def _expected(block: Block, logs: Sequence[LogAhead]) -> Expected:
    """Returns the program of a step's entries: numbers, and what is made of few of them."""
    outputs = dict.fromkeys(new for log in logs for old, new in log.entries.items() if new is not old)
    needed: set[Atom] = set(outputs)
    kept, assumed = list[Equation](), list[Var]()
    for equation in reversed(block.equations):
        if needed.isdisjoint(equation.outputs):
            continue
        if _is_settled(equation):
            kept.append(equation)
            needed.update(equation.inputs)
        else:
            assumed += [v for v in equation.outputs if v in needed]
    inputs = (*(v for v in block.inputs if v in needed), *assumed)
    return Expected(Block(inputs, tuple(kept[::-1]), tuple(outputs)), tuple(assumed))


def _is_settled(equation: Equation) -> bool:
    """Says whether an equation makes few numbers, of few numbers, without ranks or rows."""
    if equation.op in ("ap.record", "ap.next"):
        return True
    each = (equation, *(e for body in equation.bodies for e in body.walk()))
    if equation.effects or any(e.op.startswith(PREFIX) and e.op not in _OF_ENTRIES for e in each):
        return False
    types = [a.type for a in (*equation.inputs, *equation.outputs)]
    return all(isinstance(t, ArrayType) and t.size <= _FEW for t in types)


def _is_of(op: str, item: ProgramSegment | ExchangeSegment) -> bool:
    return isinstance(item, ExchangeSegment) and item.op == op


def _is_of_devices(item: ProgramSegment | ExchangeSegment) -> bool:
    return isinstance(item, ProgramSegment) and item.side == "device"


def _equations(item: ProgramSegment | ExchangeSegment) -> Sequence[Equation]:
    return item.equations if isinstance(item, ExchangeSegment) else ()


def _block(item: ProgramSegment | ExchangeSegment) -> Block:
    assert isinstance(item, ProgramSegment), "exchanges are no programs"
    return item.block
