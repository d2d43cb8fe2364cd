"""Notes of `explain` on optimisations that `optimize=` leaves out: what each would do for this step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autopar.cost.exchange import host_terms
from autopar.ir.cluster import ClusterSpec
from autopar.ir.figures import format_bytes
from autopar.ir.optimizations import OPTIMIZATIONS
from autopar.ir.strategy import HOSTED, choice_for
from autopar.jax_types import Leaf
from autopar.mpi.machines import LeaderExchange, exchange
from autopar.passes.place_border import Moved
from autopar.planning.plan import once_per_row_of
from autopar.planning.prefetch_notes import prefetches
from autopar.planning.text import fold_paths
from autopar.run.planned_step import PlannedStep

#: Names that are listed.
_SHOWN = 8

#: Returns what an optimisation would do, given a step whose way has all of them, flat arguments, and the cluster that
#: it is planned for; [] for nothing.
_Stake = Callable[[PlannedStep, Sequence[Leaf] | None, ClusterSpec | None], Sequence[str]]


def switch_notes(
    planned: PlannedStep, leaves: Sequence[Leaf] | None, cluster: ClusterSpec | None = None
) -> Iterator[str]:
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
    moved = planned.way.bordered(planned.compiled.analysed, planned.compiled.bound)[1]
    return [f"of {', '.join(each.tables)} {each}" for each in moved if isinstance(each, Moved)]


def _once(planned: PlannedStep, leaves: Sequence[Leaf] | None, *_: Any) -> Sequence[str]:
    once = once_per_row_of(planned, leaves)
    return [] if once is None else [f"functions of a row are computed once for each distinct row: {once}"]


_STAKES: Mapping[str, _Stake] = {
    "hybrid": _hybrid,
    "local": _local,
    "owner": _owner,
    "border": _border,
    "prefetch": lambda planned, *_: [each for each in prefetches(planned) if not each.startswith("nothing")],
    "once": _once,
}
