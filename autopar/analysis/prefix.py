"""Finds the part of a step with tables on hosts that follows from its batch and the tables alone: ids, routes, and rows
that are fetched. It can run ahead, while the step before is under way."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from autopar.ir.program import ArrayType, Atom, Block, Equation, Program, RouteType, Var, family_of
from autopar.ir.segments import ExchangeSegment, ProgramSegment


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """The part of a step that can run ahead."""

    inputs: tuple[Var, ...]  #: Leaves of the batch that it reads.
    ids: tuple[int, ...]  #: Indices of the segments that compute ids.
    routes: tuple[Equation, ...]
    pulls: tuple[Equation, ...]
    owners: tuple[int, ...]  #: Indices of owners' programs between pulls and fetches.
    fetches: tuple[Equation, ...]
    values: frozenset[Atom]  #: What ids and routes are.
    #: Index of the first device program that follows all routes and fetches: beside it the next step's prefix runs.
    start: int
    written: frozenset[int]  #: Families of which the step writes rows.


def prefix_of(
    program: Program, items: Sequence[ProgramSegment | ExchangeSegment], hosted: Collection[int]
) -> Prefix | None:
    """Returns the prefix of a step; None if no rows are asked for by ids of the batch, or no program follows.

    Args:
      program: The program of one rank.
      items: Its segments.
      hosted: Families on hosts.
    """
    named = list(zip(program.block.inputs, program.inputs, strict=False))  # update logs' entries have no names
    batch = [v for v, input_ in named if input_.role == "batch" and isinstance(v.type, ArrayType)]
    pulled = {e.inputs[0] for e in program.block.equations if e.op == "ap.pull" and family_of(e) in hosted}
    tables = pulled & {v for v, input_ in named if input_.role != "batch"}
    about = [
        k for k, item in enumerate(items) if isinstance(item, ExchangeSegment) and item.op in ("ap.route", "ap.fetch")
    ]
    start = next((k for k, i in enumerate(items) if k > max(about, default=0) and _is_of_devices(i)), None)
    last_route = max((k for k in about if _equations(items[k])[0].op == "ap.route"), default=-1)
    found: set[Atom] = set(batch)
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
    pulls = tuple(e for e in made["ap.pull"] if e.outputs[0] in needed)
    read_by = {a for of in (*made["ap.route"], *(_block(items[k]) for k in (*ids, *kept))) for a in of.inputs}
    commits = (e for item in items for e in _equations(item) if e.op in ("ap.commit", "ap.densify"))
    return Prefix(
        tuple(v for v in batch if v in read_by),
        tuple(ids),
        tuple(made["ap.route"]),
        pulls,
        tuple(kept[::-1]),
        tuple(made["ap.fetch"]),
        frozenset(v for of in (*made["ap.route"], *(_block(items[k]) for k in ids)) for v in of.outputs),
        start,
        frozenset(a.type.family for e in commits for a in e.inputs if isinstance(a.type, RouteType)),
    )


def _is_of_devices(item: ProgramSegment | ExchangeSegment) -> bool:
    return isinstance(item, ProgramSegment) and item.side == "device"


def _equations(item: ProgramSegment | ExchangeSegment) -> Sequence[Equation]:
    return item.equations if isinstance(item, ExchangeSegment) else ()


def _block(item: ProgramSegment | ExchangeSegment) -> Block:
    assert isinstance(item, ProgramSegment), "exchanges are no programs"
    return item.block
