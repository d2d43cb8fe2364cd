"""Figures and tables of clients: minibatches by this plan and others if one client is slower, parts of a step, and what
servers or neighbours did (`Timeline`)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.ticker import MaxNLocator

from autopar.errors import ArgumentsError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import Plan, ServedPlan, ServerPlan, SyncPlan
from autopar.ir.topology import Ring
from autopar.jax_types import Json
from autopar.planning.notes import replica_notes, server_notes
from autopar.planning.plan import goes_by_rows, untouched_bytes
from autopar.planning.simulate_clients import ClientOptions, SyncSimulation, sent_bytes, simulate_clients
from autopar.report import style
from autopar.report.build import Parts
from autopar.report.tables import TableRow
from autopar.servers.timeline import Timeline

#: Most bars; beyond that staleness is drawn in groups, and workers have no numbers.
_MOST_BARS = 30
#: Colour and dashes of plans.
_STYLES = ((style.BLUE, "-"), (style.ORANGE, "--"), (style.GREEN, "-."), (style.PURPLE, ":"))
#: Parts of a step in order: column -> label, colour.
_PARTS = {
    "gradients, ms": ("gradients", style.BLUE),
    "update, ms": ("update", style.SKY),
    "communication waited for, ms": ("communication", style.ORANGE),
    "slower clients, ms": ("slower clients", style.PALE),
}
_HIDDEN = "communication hidden, ms"
#: Factors by which one worker is slower.
FACTORS = (1.0, 2.0, 4.0, 10.0, 30.0, 100.0)
#: The staleness bound of the plan of servers with one.
_BOUND = 4
#: Simulated steps of a worker, and most workers, for which that takes seconds.
_STEPS, MOST_WORKERS = 60, 20


def add_clients(made: Parts, plan: Plan, cluster: ClusterSpec | None, timeline: Timeline | None) -> str:
    """Adds notes, simulations and events of a plan's clients; returns the end of the title."""
    made.notes += [*replica_notes(plan), *server_notes(plan)]
    made.tables["exchanges"] = exchange_rows(plan)
    _add_stragglers(made, plan, cluster)
    if timeline is not None:
        _add_workers(made, timeline, "minibatches" if plan.served is not None or timeline.ring else "exchanges")
        if plan.served is not None and len(timeline.staleness):
            _add_staleness(made, timeline)
    return f"by {plan.clients_plan}"


def _add_workers(made: Parts, timeline: Timeline, noun: str) -> None:
    made.tables["workers"], steps = worker_rows(timeline, noun), timeline.steps
    applied = "" if timeline.ring else " that servers applied"
    made.draw(
        "workers",
        f"The {noun} of each worker{applied}: {steps.sum():,} in all, at least {steps.min():,} and at most "
        f"{steps.max():,} of one.",
        worker_figure(timeline, noun),
    )


def _add_staleness(made: Parts, timeline: Timeline) -> None:
    made.tables["staleness"], late = staleness_rows(timeline), timeline.staleness
    bound = "no bound" if timeline.bound is None else f"a bound of {timeline.bound} steps"
    made.draw(
        "staleness",
        f"How many pushes of others a server applied between the pull of weights and the push of their gradient, with "
        f"{bound}: {late.mean():.2f} on average, at most {late.max()}. Without a bound workers that are equally fast "
        f"have {timeline.workers - 1}.",
        staleness_figure(timeline),
    )


def _add_stragglers(made: Parts, plan: Plan, cluster: ClusterSpec | None) -> None:
    if cluster is None:
        made.notes.append(
            "No figure of stragglers: of devices that are here it isn't simulated; report(plan, cluster=...)."
        )
        return
    try:
        found = simulate_stragglers(plan, cluster)
    except ArgumentsError as error:
        made.notes.append(f"No figure of stragglers: {error}.")
        return
    made.tables["stragglers"] = straggler_rows(found)
    own = found.found[found.own][0]
    made.draw(
        "stragglers",
        f"Simulated on {cluster.device.name} ({cluster.name}): minibatches that {found.clients} clients do, one of "
        f"them c times slower, in those of one by itself ({1e3 * own.step_s:.3g} ms each). This plan is {found.own}. "
        "Grey: (n-1) + 1/c, where nobody waits, and n/c, where all wait for the slowest.",
        straggler_figure(found),
    )
    made.tables["steps"] = rows = step_rows(found)
    more = "" if plan.served is None else " Updates are the servers', and so a part of communication."
    if plan.sync is not None and plan.sync.asks_neighbors:
        more = " Exchanges count for active clients, who ask; passive ones wait only for what copies and adds weights."
    made.draw(
        "steps",
        "What a step takes where no client is slower: gradients and update, as predicted of this plan's clients, and "
        f"what is waited for, simulated. Hidden is communication that goes on beside them.{more}",
        step_figure(found, rows),
    )


def straggler_figure(found: Stragglers) -> style.ReportFigure:
    """Draws all clients' minibatches against c, by plan, beside the two formulas; this plan's line is thick."""
    figure, (axes,) = style.blank()
    for values in (found.free, found.tied):
        axes.plot(FACTORS, values, color=style.PALE, linewidth=2.5, zorder=1)
    ends = [(found.free[-1], "(n-1) + 1/c", style.GREY), (found.tied[-1], "n/c", style.GREY)]
    for way, (colour, dashes) in zip(found.found, itertools.cycle(_STYLES), strict=False):
        speedups = found.speedups(way)
        wide = 1.8 if way == found.own else 1.0
        axes.plot(FACTORS, speedups, color=colour, linestyle=dashes, linewidth=wide, marker="o", markersize=2.5)
        ends.append((speedups[-1], "this plan" if way == found.own else way, colour))
    axes.set_xlim(FACTORS[0], FACTORS[-1])
    style.log_axes(axes)
    style.label_ends(axes, ends)
    style.name_axes(axes, "c: times that one client is slower", "speed-up (minibatches a second)")
    return style.fit_size(figure)


def staleness_figure(timeline: Timeline) -> style.ReportFigure:
    """Draws the share of pushes by their staleness, and the mean."""
    late = timeline.staleness
    width = -(-(int(late.max()) + 1) // _MOST_BARS)
    counts = np.bincount(late // width)
    figure, (axes,) = style.blank()
    lefts = width * np.arange(len(counts)) - 0.5  # a number is in the middle of its bar
    axes.bar(lefts, counts / len(late), width=0.9 * width, align="edge", color=style.BLUE)
    axes.axvline(late.mean(), color=style.INK, linewidth=0.8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(lambda value, _: style.format_share(value))
    axes.set_xlim(left=-0.7)
    axes.margins(y=0.12)
    top = axes.get_ylim()[1]
    style.write(axes, f"mean {late.mean():.2f}", (late.mean(), top), (3, -2), up="top")
    style.name_axes(axes, "staleness: pushes of others since the pull", "pushes")
    return style.fit_size(figure)


def worker_figure(timeline: Timeline, noun: str) -> style.ReportFigure:
    steps = timeline.steps
    figure, (axes,) = style.blank(height=0.8 + 0.22 * min(len(steps), _MOST_BARS))
    axes.barh(range(len(steps)), steps, color=style.BLUE, height=0.65)
    if len(steps) <= _MOST_BARS:
        axes.set_yticks(range(len(steps)))
        for worker, count in enumerate(steps):
            style.write(axes, f"{count:,}", (float(count), worker), (3, 0), up="center")
    style.lay_bars(axes, noun, margin=0.2)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.set_ylabel("worker", fontsize=style.FONT)
    return style.fit_size(figure)


def exchange_rows(plan: Plan) -> Sequence[TableRow]:
    """Returns a row for each server, or for each fragment of weights that is exchanged at a time."""
    if plan.served is not None:
        return [
            {
                "server": n,
                "leaves": len(server.leaves),
                "first leaf": server.leaves[0],
                "keeps, bytes": server.leaf_bytes,
                "pulled in a step, bytes": server.pull_bytes,
                "pushed in a step, bytes": server.push_bytes,
            }
            for n, server in enumerate(plan.served.servers)
        ]
    assert plan.sync is not None, "clients train"
    return [
        {"fragment": n, "weights": len(paths), "first weight": paths[0], "bytes": size, "every, steps": plan.sync.every}
        for n, (paths, size) in enumerate(zip(plan.sync.fragments, plan.sync.fragment_bytes, strict=True))
    ]


def straggler_rows(found: Stragglers) -> Sequence[TableRow]:
    return [
        {
            "c": factor,
            "mode": way,
            "minibatches a second": simulated.times[0].minibatches_s,
            "speed-up": simulated.speedups[0],
            "(n-1) + 1/c": free,
            "staleness": simulated.times[0].staleness if simulated.times[0].has_servers else "",
            "most of the time": simulated.times[0].limit,
        }
        for way, several in found.found.items()
        for factor, free, simulated in zip(FACTORS, found.free, several, strict=True)
    ]


def staleness_rows(timeline: Timeline) -> Sequence[TableRow]:
    values, counts = np.unique(timeline.staleness, return_counts=True)
    return [
        {"staleness": int(value), "pushes": int(count), "share": float(count / counts.sum())}
        for value, count in zip(values, counts, strict=True)
    ]


def worker_rows(timeline: Timeline, noun: str) -> Sequence[TableRow]:
    if timeline.ring:
        ring = Ring(timeline.workers)
        return [
            {"worker": c, noun: int(count), "in the ring": "active" if ring.is_active(c) else "passive"}
            for c, count in enumerate(timeline.steps)
        ]
    late, workers = timeline.staleness, np.concatenate([pushes[:, 0] for pushes in timeline.pushes])
    rows: list[TableRow] = []
    for worker, count in enumerate(timeline.steps):
        own = late[workers == worker]
        rows.append(
            {
                "worker": worker,
                noun: int(count),
                "staleness on average": float(own.mean()) if len(own) else "",
                "at most": int(own.max()) if len(own) else "",
            }
        )
    return rows


def step_rows(found: Stragglers) -> Sequence[TableRow]:
    """Returns a row for each plan (for `ADPSGD` one for active and one for passive clients): mean times of a step if no
    client is slower."""
    rows: list[TableRow] = []
    own = found.found[found.own][0]
    update_s = own.update_s or 0.0
    for way, (simulated, *_) in found.found.items():
        plan, clients = found.plans[way], simulated.times[0].clients
        sent, groups = sent_bytes(plan, len(clients)), {"all": clients}
        if plan.sync is not None and plan.sync.asks_neighbors:
            topology = plan.sync.topology(len(clients))
            groups = {
                kind: [client for c, client in enumerate(clients) if topology.is_active(c) == (kind == "active")]
                for kind in ("active", "passive")
            }
        for kind, some in groups.items():
            each = 1e3 / sum(client.minibatches for client in some)
            rows.append(
                {
                    "mode": way,
                    "clients": kind,
                    "gradients, ms": 1e3 * (own.step_s - update_s),
                    "update, ms": 1e3 * update_s,
                    "communication waited for, ms": each * sum(client.exchange_s for client in some),
                    "slower clients, ms": each * sum(client.slowest_s for client in some),
                    _HIDDEN: each * sum(client.hidden_s for client in some),
                    "sent in a step, bytes": sent,
                    "bandwidth to break even, bytes/s": sent / own.step_s,
                }
            )
    return rows


def step_figure(found: Stragglers, rows: Sequence[TableRow]) -> style.ReportFigure:
    """Draws a bar for each row, by parts of the step; a thin one above shows what is hidden beside them."""
    figure, (axes,) = style.blank(height=1.1 + 0.3 * len(rows))
    values: list[dict[str, Json]] = [dict(row) for row in rows]
    left = [0.0] * len(rows)
    for part, (label, colour) in _PARTS.items():
        wide = [row[part] for row in values]
        if any(wide):
            axes.barh(range(len(rows)), wide, left=left, color=colour, height=0.5, label=label)
        left = [a + b for a, b in zip(left, wide, strict=True)]
    hidden = [row[_HIDDEN] for row in values]
    if any(hidden):
        above = [k - 0.34 for k in range(len(rows))]
        axes.barh(above, hidden, color=style.PURPLE, height=0.14, label="hidden")
    for k, total in enumerate(left):
        style.write(axes, style.format_seconds(total / 1e3), (total, k), (3, 0), up="center")
    axes.set_yticks(range(len(rows)), [_name(found, row) for row in values])
    style.lay_bars(axes, "simulated time of a step (ms)")
    style.legend_above(axes, columns=2)
    return style.fit_size(figure)


def _name(found: Stragglers, row: TableRow) -> str:
    way = "this plan" if row["mode"] == found.own else str(row["mode"])
    return way if row["clients"] == "all" else f"{way}, {row['clients']}"


@dataclass(frozen=True, slots=True)
class Stragglers:
    """Simulations of clients of which one is slower."""

    clients: int  #: n.
    own: str  #: Name of this plan.
    plans: Mapping[str, Plan]  #: Name -> plan; this one first.
    found: Mapping[str, tuple[SyncSimulation, ...]]  #: Name -> a simulation for each of `FACTORS`.

    def speedups(self, way: str) -> tuple[float, ...]:
        """Returns minibatches a second of all clients relative to one undisturbed client."""
        return tuple(simulated.speedups[0] for simulated in self.found[way])

    @property
    def free(self) -> tuple[float, ...]:
        """The upper bound (n-1) + 1/c."""
        return tuple(self.clients - 1 + 1 / c for c in FACTORS)

    @property
    def tied(self) -> tuple[float, ...]:
        """The speed-up n/c of clients that wait for the slowest."""
        return tuple(self.clients / c for c in FACTORS)


def simulate_stragglers(plan: Plan, cluster: ClusterSpec) -> Stragglers:
    """Simulates all plans on all devices of a cluster, the last client slower than the others. Raises ArgumentsError if
    it has devices for one client alone, or for so many that it would take long."""
    clients = cluster.count // plan.devices
    if clients < 2:
        raise ArgumentsError(f"{cluster} has devices for {clients} of its clients, of {plan.devices} devices each")
    if clients > MOST_WORKERS:
        raise ArgumentsError(
            f"{clients} clients take long to simulate; give fewer machines, report(plan, cluster=cluster.of(...)), or "
            "call autopar.simulate"
        )
    numbers, found, step_s = [clients * plan.devices], dict[str, tuple[SyncSimulation, ...]](), None
    plans = ways(plan)
    for way, other in plans.items():
        simulated = []
        for factor in FACTORS:
            options = ClientOptions({clients - 1: factor}, step_s, steps=_STEPS)
            simulated.append(simulate_clients(other, cluster, numbers, options))
            step_s = simulated[-1].step_s
        found[way] = tuple(simulated)
    return Stragglers(clients, next(iter(found)), plans, found)


def ways(plan: Plan) -> Mapping[str, Plan]:
    """Returns this plan, and those of averaging in every step and of servers with a bound and without, by their
    names."""
    served = plan.served if plan.served is not None else _served(plan)
    leaves = dict.fromkeys([*served.by_rows, *(path for server in served.servers for path in server.leaves)])
    average = SyncPlan(
        name="",
        clients=served.clients,
        every=1,
        delay=0,
        outer=False,
        fragments=(tuple(leaves),),
        fragment_bytes=(size := _weight_bytes(plan, served),),
        mean_bytes=size,
        by_rows=served.by_rows,
        own=(),
        examples=served.examples,
    )
    others = [replace(plan, sync=average, served=None)]
    for bound in (_BOUND, None):
        others.append(replace(plan, sync=None, served=replace(served, staleness=bound)))
    return {name_of(plan): plan} | {name: other for other in others if (name := name_of(other)) != name_of(plan)}


def _served(plan: Plan) -> ServedPlan:
    """Returns a plan with one server for the whole state, for a plan whose clients train replicas."""
    sync = plan.sync
    assert sync is not None, "clients train"
    weights = [path for fragment in sync.fragments for path in fragment]
    tables = [table for table in plan.tables if table.path in weights and goes_by_rows(table)]
    size = round(sum(sync.fragment_bytes) - sum(untouched_bytes(table, 1) for table in tables))
    leaves = dict.fromkeys([*weights, *(slot for table in tables for slot in table.slots)])
    server = ServerPlan(tuple(leaves), plan.state_bytes, pull_bytes=size, push_bytes=size)
    return ServedPlan("", sync.clients, None, (server,), tuple(table.path for table in tables), (), sync.examples)


def _weight_bytes(plan: Plan, served: ServedPlan) -> int:
    rest = (untouched_bytes(table, 1) for table in plan.tables if table.path in served.by_rows)
    return round(sum(server.pull_bytes for server in served.servers) + sum(rest))


def name_of(plan: Plan) -> str:
    """Returns the plan's `sync=` as a user writes it."""
    if plan.served is not None:
        return "Async()" if plan.served.staleness is None else f"Async(staleness={plan.served.staleness})"
    assert plan.sync is not None, "clients train"
    return plan.sync.way
