"""Make the Plan: which families are lifted, from the strategy, from what analysis allows and from what pays."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cost.model import lifting_pays
from autopar.errors import StrategyError
from autopar.ir.layout import RowLayout
from autopar.ir.plan import METHODS, ROW_METHODS, FamilyPlan, ParameterPlan, Plan, Sparse, Strategy, matches
from autopar.ir.program import Program
from autopar.ir.row_ids import RowIds, collect_ids
from autopar.ir.rowspace import RowSpace


def choose(
    program: Program, *, strategy: Strategy = "auto", sparse: Sparse = "exact", devices: int = 1
) -> tuple[Plan, str]:
    """Decide for every table of an analysed program.

    Raises:
      StrategyError: a method or pattern that doesn't exist, or a row method for a table that can't be lifted.
    """
    methods = _methods(program, strategy)
    families, parameters = [], []
    for space in program.rows.spaces:
        family, told = _decide(program, space, methods, sparse, devices)
        families += [family] if family else []
        parameters += told
    order = {given.path: k for k, given in enumerate(program.inputs)}
    parameters.sort(key=lambda p: order[p.path])
    placements, layouts = _placements(program, families)
    plan = Plan(tuple(families), tuple(parameters), sparse, devices, placements, layouts)
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


def _decide(
    program: Program, space: RowSpace, methods: dict[int, tuple[str, bool]], sparse: Sparse, devices: int
) -> tuple[FamilyPlan | None, list[ParameterPlan]]:
    paths = [program.inputs[k].path for k in space.tables]
    asked = [methods[k] for k in space.tables]
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
    if method == "auto":
        method = "ps"
    family = _family(space, found, method, sparse == "lazy", devices)
    reason = f"at most {min(space.extent, ids)} of {space.extent} rows a step"
    notes = "; ".join(space.notes)
    told = [ParameterPlan(p, True, family.method, reason + (f"; {notes}" if notes else ""), "", source) for p in paths]
    return family, told


def _family(space: RowSpace, ids: RowIds, method: str, lazy: bool, devices: int) -> FamilyPlan:
    """Static bounds: rows that a step may touch, and with sharded rows those that each device asks for and owns."""
    if method != "ps" or devices == 1:
        return FamilyPlan(space.family, min(space.extent, ids.count) + 1, ids.count, method, lazy)
    layout = RowLayout(space.extent, devices, dealt=space.extent % devices != 0)
    share = layout.share
    asked = max(1, min(space.extent, ids.count_on(devices)))
    capacity = min(asked, share)
    owned = min(share, devices * capacity) + 1
    return FamilyPlan(space.family, devices * owned, ids.count, method, lazy, devices * asked, capacity, layout)


def _placements(
    program: Program, families: Sequence[FamilyPlan]
) -> tuple[tuple[int | None, ...], dict[int, tuple[RowLayout, int]]]:
    """Batches along their examples, sharded tables along their rows; the rest is on every device.

    And the layouts of tables that can't be stored as they are.
    """
    pairs = zip(program.block.inputs, program.inputs, strict=True)
    found = [program.batch.get(v) if given.role == "batch" else None for v, given in pairs]
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
