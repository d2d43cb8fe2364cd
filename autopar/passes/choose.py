"""Make the Plan: which families are lifted, from the strategy, from what analysis allows and from what pays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.cost.formulas import sent_bytes
from autopar.cost.model import lifting_pays
from autopar.errors import StrategyError
from autopar.ir.layout import RowLayout
from autopar.ir.plan import METHODS, ROW_METHODS, FamilyPlan, ParameterPlan, Plan, Sparse, Strategy, matches
from autopar.ir.program import Program
from autopar.ir.row_ids import RowIds, collect_ids
from autopar.ir.rowspace import RowSpace
from autopar.passes.capacity import bounds, device_ids, tightened, with_layout

#: Program, family, its ids -> the flat ids of an example batch, None where they aren't known.
Example = Callable[[Program, RowSpace, RowIds], Sequence[np.ndarray] | None]


def choose(
    program: Program,
    *,
    strategy: Strategy = "auto",
    sparse: Sparse = "exact",
    devices: int = 1,
    example: Example | None = None,
    headroom: float = 1.25,
) -> tuple[Plan, str]:
    """Decide for every table of an analysed program.

    Args:
      program: An analysed program.
      strategy, sparse: The user's choice.
      devices: N.
      example: Gives the flat ids of the example batch.
      headroom: How much more than the example's load a device may send to another one.

    Raises:
      StrategyError: a method or pattern that doesn't exist, or a row method for a table that can't be lifted.
    """
    methods = _methods(program, strategy)
    families, parameters = [], []
    has_effects = any(e.effects for e in program.block.equations)
    options = _Options(methods, sparse, devices, None if has_effects else example, headroom)
    for space in program.rows.spaces:
        chosen, told = _decide(program, space, options)
        families += [chosen] if chosen else []
        parameters += told
    order = {given.path: k for k, given in enumerate(program.inputs)}
    parameters.sort(key=lambda p: order[p.path])
    safe, tight = [f for f, _ in families], [f for _, f in families]
    placements, layouts = _placements(program, safe)
    fallback = tuple(safe) if any(f.tight for f in tight) else ()
    plan = Plan(tuple(tight), tuple(parameters), sparse, devices, placements, layouts, fallback)
    lifted = sum(p.lifted for p in parameters)
    return plan, f"{lifted} of {len(parameters)} tables run on their touched rows"


def _methods(program: Program, strategy: Strategy) -> dict[int, tuple[str, bool]]:
    """Table -> (method, whether the strategy names this very table)."""
    named = isinstance(strategy, str)
    patterns = {"**": strategy} if isinstance(strategy, str) else dict(strategy)
    states = [given.path for given in program.inputs if given.role == "state"]
    for pattern, method in patterns.items():
        if method not in METHODS:
            raise StrategyError(f"strategy: there is no method {method!r}; the methods are {', '.join(METHODS)}")
        if pattern not in ("**", "*") and not any(matches(pattern, path) for path in states):
            shown = ", ".join(program.inputs[k].path for k, _ in program.tables) or "none"
            raise StrategyError(f"strategy: {pattern!r} matches no parameter. Looked up by rows: {shown}")
    found = {}
    for k, _ in program.tables:
        path = program.inputs[k].path
        pattern = next((p for p in patterns if matches(p, path)), None)
        method = patterns[pattern] if pattern is not None else "auto"
        found[k] = (method, not named and pattern not in ("*", "**", None))
    return found


@dataclass(frozen=True, slots=True)
class _Options:
    methods: dict[int, tuple[str, bool]]
    sparse: Sparse
    devices: int
    example: Example | None
    headroom: float


def _decide(
    program: Program, space: RowSpace, options: _Options
) -> tuple[tuple[FamilyPlan, FamilyPlan] | None, list[ParameterPlan]]:
    """The family without limits and as it is planned, None if it stays dense; and what is said of its tables."""
    paths = [program.inputs[k].path for k in space.tables]
    asked = [options.methods[k] for k in space.tables]
    sparse, devices = options.sparse, options.devices
    method = next((m for m, _ in asked if m != "auto"), "auto")
    source = _line(space)

    def dense(reason: str, remedy: str = "", line: str = source) -> tuple[None, list[ParameterPlan]]:
        return None, [ParameterPlan(p, False, "allreduce", reason, remedy, line) for p in paths]

    if space.refusal is not None:
        named = [m for m, by_name in asked if by_name and m in ROW_METHODS and m != "ps"]
        if named:
            raise StrategyError(
                f"strategy: {paths[0]} can't be trained with {named[0]!r}: {space.refusal}. "
                "Leave it to 'auto', or to 'allreduce'"
            )
        where = str(space.refusal.source) if space.refusal.source else source
        return dense(space.refusal.reason, space.refusal.remedy, where)
    if sparse == "off":
        return dense("sparse='off'")
    if method == "allreduce":
        return dense("the strategy says 'allreduce'")
    found = collect_ids(program.block, space, program.batch, devices)
    ids = found.count
    row_bytes = max(1, sum(program.block.inputs[k].type.nbytes for k in space.leaves) // space.extent)
    if method == "auto" and not lifting_pays(extent=space.extent, ids=ids, row_bytes=row_bytes):
        return dense(f"{ids} ids a step against {space.extent} rows: the dense update is faster", "strategy='ps'")
    safe, tight = _sharded(program, space, found, options)
    sent = _sent(program, space, found, tight)
    if method == "auto":
        method = min(sent, key=lambda m: (sent[m], m != "ps")) if sent else "ps"
    if method == "allreduce":
        return dense("reducing the whole gradient is the least to send", "strategy='ps'")
    if method != "ps":
        safe = tight = bounds(space, found, method, sparse == "lazy", devices)
    reason = f"at most {min(space.extent, ids)} of {space.extent} rows a step{_told(tight)}"
    notes = "; ".join(space.notes)
    reason += f"; {notes}" if notes else ""
    told = [ParameterPlan(p, True, method, reason, "", source, sent) for p in paths]
    return (safe, tight), told


def _told(family: FamilyPlan) -> str:
    """How sharded rows are spread, in words."""
    if family.layout is None:
        return ""
    order = ", dealt out over the devices" if family.layout.dealt else ", in shares of adjacent rows"
    measured = "measured, with headroom" if family.tight else "a bound"
    return f"{order}; a device asks another one for {family.capacity} of them at most ({measured})"


def _sharded(program: Program, space: RowSpace, ids: RowIds, options: _Options) -> tuple[FamilyPlan, FamilyPlan]:
    """The family by `ps`: without limits, and with the capacity that the example needs, if there is one."""
    family = bounds(space, ids, "ps", options.sparse == "lazy", options.devices)
    if family.layout is None or options.example is None or space.depends_on:
        return family, family
    flat = options.example(program, space, ids)
    if flat is None:
        return family, family
    loads = device_ids(flat, ids.batched, options.devices, space.extent)
    safe = with_layout(family, loads)
    return safe, tightened(safe, loads, options.headroom)


def _sent(program: Program, space: RowSpace, ids: RowIds, sharded: FamilyPlan) -> Mapping[str, int]:
    """Method -> bytes that each device sends in a step; nothing on one device."""
    if sharded.layout is None or sharded.fetched is None or sharded.capacity is None:
        return {}
    devices = sharded.layout.devices
    return sent_bytes(
        n=devices,
        row_bytes=sum(program.block.inputs[k].type.nbytes for k in space.tables) // space.extent,
        extent=space.extent,
        ids=ids.count_on(devices),
        asked=sharded.fetched // devices,
        routed=min(space.extent, ids.count) + 1,
        capacity=sharded.capacity,
    )


def _placements(
    program: Program, families: Sequence[FamilyPlan]
) -> tuple[tuple[int | None, ...], dict[int, tuple[RowLayout, int]]]:
    """Batches, and what is carried with them, along their examples; sharded tables along their rows.

    The rest is on every device. And the layouts of tables that can't be stored as they are.
    """
    found = [program.batch.get(v) for v in program.block.inputs]
    sharded = {f.family: f.layout for f in families if f.layout is not None}
    layouts = {}
    for space in program.rows.spaces:
        layout = sharded.get(space.family)
        if layout is not None:
            for leaf, axis in zip(space.leaves, space.axes, strict=True):
                found[leaf] = axis
                if not layout.is_plain:
                    layouts[leaf] = layout, axis
    return tuple(found), layouts


def _line(space: RowSpace) -> str:
    """Where the table is looked up."""
    lookups: Sequence = [a.equation for a in space.accesses if a.is_lookup]
    source = next((e.source for e in lookups if e.source), None)
    return str(source) if source else ""
