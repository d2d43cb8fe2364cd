"""Notes of `explain` on optimisations that `optimize=` leaves out: what each would do for this step, and for `why` and
`report` what that costs a table; and on rows of tables on hosts that are fetched beside the step before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autopar.analysis.prefix import prefix_of, why_not_ahead
from autopar.backends.host.ranks import Ranks
from autopar.cost.exchange import host_terms
from autopar.cost.simulate import crossing
from autopar.ir.cluster import ClusterSpec
from autopar.ir.figures import format_bytes
from autopar.ir.local import ExchangeSegment
from autopar.ir.plan import Plan, TablePlan
from autopar.ir.program import family_of, known
from autopar.ir.strategy import HOSTED, OPTIMIZATIONS, choice_for, is_on
from autopar.jax_types import Leaf
from autopar.launch.group import everyone
from autopar.mpi.machines import LeaderExchange, exchange
from autopar.planning.plan import movable, once_per_row_of
from autopar.planning.predictions import predict_method
from autopar.planning.text import fold_paths
from autopar.run.planned_step import PlannedStep

#: Names that are listed.
_SHOWN = 8

#: Returns what an optimisation would do, given a step whose way has all of them, flat arguments, and the cluster that
#: it is planned for; [] for nothing.
_Stake = Callable[[PlannedStep, Sequence[Leaf] | None, ClusterSpec | None], Sequence[str]]


def switch_notes(planned: PlannedStep, leaves: Sequence[Leaf] | None, cluster: ClusterSpec | None) -> Iterator[str]:
    """Yields a line for each optimisation that `optimize=` leaves out; `leaves`: flat arguments of a call. Collective
    for tables on hosts here."""
    options = planned.options
    with_all = replace(planned, way=planned.way.by(replace(options, optimize="all")))
    for name in OPTIMIZATIONS:
        if not options.optimizes(name):
            stakes = "; ".join(_STAKES[name](with_all, leaves, cluster))
            yield f"optimize= leaves out {name!r}: {f'with it {stakes}' if stakes else 'nothing is at stake here'}."


def _hybrid(planned: PlannedStep, *_: Any) -> Sequence[str]:
    strategy, plan = planned.options.strategy, planned.compiled.plan
    patterns = strategy if isinstance(strategy, Mapping) else {}
    asked = {t.path for t in plan.tables if choice_for(patterns, t.path).where == "hosts"}
    served = [t for t in plan.families if t.pulled and t.path not in asked]
    if not served or plan.devices == 1:
        return []
    now, then = (format_bytes(sum(t.sent[method] for t in served)) for method in (HOSTED, "allreduce"))
    names = ", ".join(fold_paths(dict.fromkeys((t.path for t in served), 0), _SHOWN))
    return [f"{names} are on every rank, and gradients are reduced: a rank sends {then} for them in place of {now}"]


def _local(planned: PlannedStep, leaves: Sequence[Leaf] | None, cluster: ClusterSpec | None) -> Sequence[str]:
    if not planned.compiled.plan.on_hosts:
        return []
    several = isinstance(exchange(), LeaderExchange) if cluster is None else min(cluster.machines, cluster.devices) > 1
    return ["rows that ranks of a machine want alike cross machines once, and so do sums of their gradients"] * several


def _owner(planned: PlannedStep, *_: Any) -> Sequence[str]:
    plan = planned.compiled.plan
    moved = {t.path: t.sizes for t in plan.families if t.sizes is not None and t.sizes.by_first}
    if not moved:
        return []
    less = sum(term.sent for sizes in moved.values() for term in host_terms(sizes) if term.name == "and back")
    names = ", ".join(fold_paths(dict.fromkeys(moved, 0), _SHOWN))
    return [f"sums of gradients of {names} stay with their owners: the first rank sends {format_bytes(less)} less"]


def _border(planned: PlannedStep, *_: Any) -> Sequence[str]:
    return [f"of {', '.join(each.tables)} {each}" for each in movable(planned)]


def _once(planned: PlannedStep, leaves: Sequence[Leaf] | None, *_: Any) -> Sequence[str]:
    once = once_per_row_of(planned, leaves)
    return [] if once is None else [f"functions of a row are computed once for each distinct row: {once}"]


_STAKES: Mapping[str, _Stake] = {
    "hybrid": _hybrid,
    "local": _local,
    "owner": _owner,
    "border": _border,
    "prefetch": lambda planned, *_: [each for each in prefetches(planned) if "nothing is" not in each],
    "once": _once,
}


# --- for `why` and `report`, which have a plan alone ---


def left_out(plan: Plan, table: TablePlan) -> Mapping[str, str]:
    """Maps each optimisation that `optimize=` leaves out to what that costs a table; "" for nothing. Bytes are those
    that a rank sends in a step."""
    on_hosts, fetched, sizes = table.where == "hosts", table.where == "hosts" and not table.pulled, table.sizes
    costs = {
        "hybrid": _pulled(table) if table.pulled and plan.devices > 1 else "",
        "local": _from_each_rank(plan, table) if on_hosts and plan.devices > 1 else "",
        "owner": _by_first(table) if sizes is not None and sizes.by_first and plan.devices > 1 else "",
        "border": _unmoved(table) if plan.devices > 1 and table.lifted else "",
        "prefetch": f"its rows are fetched in the step that needs them; {_ASK}" if fetched else "",
        "once": f"what depends on its rows alone is computed for each lookup; {_ASK}" if fetched else "",
    }
    return {name: costs[name] for name in OPTIMIZATIONS if not is_on(plan.optimize, name)}


#: Where a plan doesn't have what an optimisation would do.
_ASK = "explain(step, ...) says what it would do"


def _pulled(table: TablePlan) -> str:
    ways = (predict_method(table, method) for method in (HOSTED, "allreduce"))
    now, then = (format_bytes(way.sent) if way else "an unknown number of bytes" for way in ways)
    return f"{now} are sent for it in place of {then}, unless strategy= puts it on hosts by itself"


def _from_each_rank(plan: Plan, table: TablePlan) -> str:
    if plan.cluster is None or table.growth is None:
        return "rows that several ranks of a machine want cross machines once for each of them, if there are several"
    share = crossing(table.growth.rows, plan.cluster.devices) if plan.cluster.machines > 1 else 1.0
    return f"of its rows that cross machines {1 - share:.0%} wouldn't" if share < 1 else ""


def _by_first(table: TablePlan) -> str:
    assert table.sizes is not None, "sums go by way of the first rank"
    nbytes = sum(term.sent for term in host_terms(table.sizes) if term.name == "and back")
    return f"sums of its gradients go by way of the first rank, which sends {format_bytes(nbytes)} more"


def _unmoved(table: TablePlan) -> str:
    return _ASK if table.unmoved is None else "; ".join(f"with it {each}" for each in table.unmoved)


# --- rows of tables on hosts that are fetched beside the step before (`analysis.prefix.prefix_of`) ---


def prefetch_note(planned: PlannedStep) -> str:
    """Returns a line on the rows of the next batch that ranks ask for and fetch during a step; "" if none."""
    lines = prefetches(planned) if planned.options.optimizes("prefetch") else []
    name = planned.compiled.analysed.name
    so_far = f". So far: {planned.outcome}" if planned.outcome else ""
    return f"\nBatches of autopar.shard(source, step={name}): {'; '.join(lines)}{so_far}." if lines else ""


def prefetches(planned: PlannedStep) -> Sequence[str]:
    """Returns texts on the next batch's rows that are fetched, or copied to devices, during a step, by tables."""
    compiled, ran = planned.compiled, planned.compiled.as_run
    hosted = {f.family for f in ran.bound.families if f.on_hosts and not f.table.pulled}
    if not hosted or not compiled.analysed.new_states:
        return []
    usual, is_here = exchange(by_leaders=is_on(compiled.plan.optimize, "local")), everyone().size == ran.bound.devices
    pays = Ranks.hides_exchanges(usual) if is_here and not planned.options.accelerators else True
    is_alone = ran.bound.devices == 1
    when = ", once exchanges of ids and rows are found to take a sixth of the time" if pays is None else ""
    if pays is False and is_alone:
        return []  # rows are where the device computes
    if pays is False:
        return ["nothing is fetched ahead, as all ranks are on one machine, whose cores compute and exchange"]
    if compiled.plan.reduction_backend != "mpi" and not is_alone:
        return ["nothing is fetched ahead, as the devices of all ranks run their programs together"]
    items = known(compiled.program.segments).items
    exchanges = [e for item in items if isinstance(item, ExchangeSegment) for e in item.equations]
    pooled = {family_of(e) for e in exchanges if e.op == "ap.pool"}
    prefix = prefix_of(compiled.program, items, hosted)
    found = ((*prefix.fetches, *prefix.sent), prefix.routes) if prefix else ((), ())
    fetched, asked = (set(map(family_of, of)) for of in found)
    if is_here and not usual.knows_lists:
        return ["nothing is fetched ahead, as node leaders fetch for several ranks"]
    named = {v: each.path for v, each in zip(compiled.program.block.inputs, compiled.program.inputs, strict=False)}
    by = " and ".join(named[v] for v in prefix.inputs) if prefix else ""
    asked_for = f"are asked for beside a step, by {by} as shard gives {'it' if len(by.split()) == 1 else 'them'}"
    paths: dict[str, list[str]] = {}
    for space in ran.analysed.facts.spaces:
        to_date = "brought up to date by what it is expected to write to their update log, " * space.deferred
        text = f"rows of the next batch {asked_for}, {to_date}and fetched as far as it doesn't write them{when}"
        if is_alone:
            text = f"rows of the next batch {asked_for}, and copied to the devices as far as it doesn't write them"
        if space.family not in asked:
            text = f"nothing is asked for ahead, as {why_not_ahead(compiled.program, space.family)}"
        elif space.family not in fetched:
            reason = "what is sent depends on other values than rows of tables"
            reason = "owners add up bags of them" if space.family in pooled else reason
            text = f"rows of the next batch {asked_for}, but not fetched, as {reason}"
            text = text if fetched else f"nothing is fetched ahead, as {reason}"
        if space.family in hosted:
            paths.setdefault(text, []).append(ran.analysed.inputs[space.tables[0]].path)
    return [f"of {', '.join(of)} {text}" for text, of in paths.items()]
