"""Draws clients: what they do where one is slower; and of what servers did, staleness and workers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from matplotlib.ticker import MaxNLocator

from autopar.errors import ArgumentsError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import Plan
from autopar.ir.ring import Ring
from autopar.planning.explain_notes import replica_notes, server_notes
from autopar.report.client_steps import step_figure, step_rows
from autopar.report.data import TableRow
from autopar.report.modes import FACTORS, Stragglers, simulate_stragglers
from autopar.report.page import Parts
from autopar.report.style import (
    BLUE,
    FONT,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PALE,
    PURPLE,
    ReportFigure,
    blank,
    fit_size,
    format_share,
    label_ends,
    log_axes,
    name_axes,
    write,
)
from autopar.servers.timeline import Timeline

#: Of bars; where there are more staleness is drawn in groups, and workers have no numbers.
_MOST_BARS = 30
#: Of ways: colour, and dashes.
_STYLES = ((BLUE, "-"), (ORANGE, "--"), (GREEN, "-."), (PURPLE, ":"))


def add_clients(made: Parts, plan: Plan, cluster: ClusterSpec | None, timeline: Timeline | None) -> str:
    """Add what is known of a plan's clients: what `explain` says of them, what they would do, and what they did.

    Returns:
      Who they are, in words.
    """
    made.notes += [*replica_notes(plan), *server_notes(plan)]
    made.tables["exchanges"] = exchange_rows(plan)
    _add_stragglers(made, plan, cluster)
    if timeline is not None:
        _add_workers(made, timeline, "minibatches" if plan.served is not None or timeline.ring else "exchanges")
        if plan.served is not None and len(timeline.staleness):
            _add_staleness(made, timeline)
    return f"by {plan.way}"


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
    if plan.sync is not None and plan.sync.partners == "neighbors":
        more = " Exchanges count for active clients, who ask; passive ones wait only for what copies and adds weights."
    made.draw(
        "steps",
        "What a step takes where no client is slower: gradients and update, as predicted of this plan's clients, and "
        f"what is waited for, simulated. Hidden is communication that goes on beside them.{more}",
        step_figure(found, rows),
    )


def straggler_figure(found: Stragglers) -> ReportFigure:
    """Minibatches of all clients against c, by way, beside the two formulas; the plan's way is the thick one."""
    figure, (axes,) = blank()
    for values in (found.free, found.tied):
        axes.plot(FACTORS, values, color=PALE, linewidth=2.5, zorder=1)
    ends = [(found.free[-1], "(n-1) + 1/c", GREY), (found.tied[-1], "n/c", GREY)]
    for way, (colour, dashes) in zip(found.found, itertools.cycle(_STYLES), strict=False):
        speedups = found.speedups(way)
        wide = 1.8 if way == found.own else 1.0
        axes.plot(FACTORS, speedups, color=colour, linestyle=dashes, linewidth=wide, marker="o", markersize=2.5)
        ends.append((speedups[-1], "this plan" if way == found.own else way, colour))
    axes.set_xlim(FACTORS[0], FACTORS[-1])
    log_axes(axes)
    label_ends(axes, ends)
    name_axes(axes, "c: times that one client is slower", "speed-up (minibatches a second)")
    return fit_size(figure)


def staleness_figure(timeline: Timeline) -> ReportFigure:
    """The share of pushes by their staleness, and the mean."""
    late = timeline.staleness
    width = -(-(int(late.max()) + 1) // _MOST_BARS)
    counts = np.bincount(late // width)
    figure, (axes,) = blank()
    lefts = width * np.arange(len(counts)) - 0.5  # a number is in the middle of what is drawn of it
    axes.bar(lefts, counts / len(late), width=0.9 * width, align="edge", color=BLUE)
    axes.axvline(late.mean(), color=INK, linewidth=0.8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(lambda value, _: format_share(value))
    axes.set_xlim(left=-0.7)
    axes.margins(y=0.12)
    top = axes.get_ylim()[1]
    write(axes, f"mean {late.mean():.2f}", (late.mean(), top), (3, -2), up="top")
    name_axes(axes, "staleness: pushes of others since the pull", "pushes")
    return fit_size(figure)


def worker_figure(timeline: Timeline, noun: str) -> ReportFigure:
    """A bar for each worker."""
    steps = timeline.steps
    figure, (axes,) = blank(height=0.8 + 0.22 * min(len(steps), _MOST_BARS))
    axes.barh(range(len(steps)), steps, color=BLUE, height=0.65)
    if len(steps) <= _MOST_BARS:
        axes.set_yticks(range(len(steps)))
        for worker, count in enumerate(steps):
            write(axes, f"{count:,}", (float(count), worker), (3, 0), up="center")
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.set_xlim(left=0)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.set_xlabel(noun, fontsize=FONT)
    axes.set_ylabel("worker", fontsize=FONT)
    return fit_size(figure)


def exchange_rows(plan: Plan) -> Sequence[TableRow]:
    """A row for each server, or for each fragment of the weights that is averaged or pulled to a centre at a time."""
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
    """A row for each way and c."""
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
    """A row for each staleness that pushes had."""
    values, counts = np.unique(timeline.staleness, return_counts=True)
    return [
        {"staleness": int(value), "pushes": int(count), "share": float(count / counts.sum())}
        for value, count in zip(values, counts, strict=True)
    ]


def worker_rows(timeline: Timeline, noun: str) -> Sequence[TableRow]:
    """A row for each worker."""
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
