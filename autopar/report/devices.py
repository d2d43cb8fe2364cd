"""Figures and tables of devices that share a step: data parallelism, and the stages of a pipeline.

They draw plain numbers from `report.tables` and plans.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.text import Annotation

from autopar.cost.simulate import StepTime
from autopar.cost.stage_time import simulate_pipeline
from autopar.errors import ArgumentsError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.figures import Term, format_bytes
from autopar.ir.plan import PipelinePlan, Plan, TablePlan
from autopar.planning.predictions import Prediction, predict
from autopar.planning.replay import Staleness
from autopar.planning.simulate import Simulation, simulate_devices
from autopar.report import style
from autopar.report.build import Parts
from autopar.report.tables import (
    NEAR,
    Curves,
    TableRow,
    Timing,
    by_alpha,
    by_table_3,
    crossing_rows,
    largest,
    method_rows,
    part_rows,
    scaling_rows,
    timing_rows,
    update_rows,
)

#: The paper's bytes are shown beside ours if they differ by more than this share.
_OTHER = 0.1
_SENT = "bytes a device sends in a step"
#: Most points that all have labels.
_LABELLED = 8


def add_devices(made: Parts, plan: Plan, cluster: ClusterSpec | None, table: str | None) -> str:
    """Adds figures and tables of data parallelism; returns the end of the title."""
    shown = _shown(plan, table)
    if plan.devices == 1:
        made.tables["updates"] = update_rows(plan)
        made.draw(
            "updates",
            "What a step's updates read and write: gradients, parameters and optimizer slots; pale as in a plain step, "
            "blue by this plan.",
            updates_figure(made.tables["updates"]),
        )
    if shown is None:
        made.notes.append(f"No figure of bytes: {_unknown(plan)}.")
    else:
        _add_bytes(made, plan, shown)
    if plan.parts:
        _add_times(made, plan, shown)
    elif plan.devices > 1:
        made.notes.append("No predicted times: the plan was made without rates of the devices.")
    _add_scaling(made, plan, cluster, shown)
    return f"on {_count(plan)}" + ("" if plan.cluster is None else f" ({plan.cluster})")


def _count(plan: Plan) -> str:
    return "one device" if plan.devices == 1 else f"{plan.devices} devices"


def _shown(plan: Plan, path: str | None) -> TablePlan | None:
    if path is None:
        return largest(plan)
    wanted = plan.table(path)
    table = next((t for t in plan.families if path == t.path or path in t.slots), wanted)
    if table.sizes is None:
        raise ArgumentsError(f"what is sent of {path!r} isn't known: {_unknown(plan, wanted)}")
    return table


def _unknown(plan: Plan, table: TablePlan | None = None) -> str:
    if plan.devices == 1:
        return f"the plan of {plan.step} is of one device, which sends nothing; plan(..., cluster=...) for several"
    return "no table goes by its rows" if table is None else f"it is trained whole ({table.reason})"


def _add_bytes(made: Parts, plan: Plan, table: TablePlan) -> None:
    alpha, (devices, theirs) = by_alpha(table), by_table_3(table)
    made.tables["methods"] = method_rows(plan)
    made.tables["crossovers"] = crossing_rows({"alpha": alpha, "devices": devices})
    each = f"What each device sends for {table.path} in a step"
    made.draw(
        "bytes_by_alpha",
        f"{each} of {plan.devices} devices, by the share of the rows that it touches: ids are drawn as in the plan's "
        f"batch, more or fewer of them. {_crossed(alpha, lambda c: f'alpha = {100 * c.x:.3g}%')}",
        bytes_figure(alpha, "alpha"),
    )
    made.draw(
        "bytes_by_devices",
        f"{each} of N devices, each with as many ids as in the plan. {_crossed(devices, lambda c: f'N = {c.at:,}')}",
        bytes_figure(devices, "devices"),
    )
    other = {m: nbytes for m, nbytes in theirs.items() if m in devices.sent and _differ(devices.sent[m], nbytes)}
    if not other:
        return
    same = [m for m in theirs if m in devices.sent and m not in other]
    made.draw(
        "table_3",
        "What a device sends (thin) and what it transfers by Parallax's table 3 (wide, grey): the table counts both "
        "directions, but not the rows that a worker serves to others, nor ids and padding."
        + (f" Of {' and '.join(same)} both say the same." if same else ""),
        table_3_figure(devices, other),
    )


def _crossed(curves: Curves, where: Callable[..., str]) -> str:
    if not curves.crossings:
        smallest = min(curves.sent, key=lambda m: curves.sent[m][0])
        return f"{smallest} sends the least everywhere."
    return " ".join(f"From {where(c)} on {c.new} sends the least, before {c.old}." for c in curves.crossings)


def _differ(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    return any(a > 0 and b > 0 and abs(math.log(b / a)) > _OTHER for a, b in zip(ours, theirs, strict=True))


def _add_times(made: Parts, plan: Plan, table: TablePlan | None) -> None:
    step = predict(plan)
    made.tables["parts"] = part_rows(step)
    made.draw(
        "parts",
        f"Predicted time of a step on {_count(plan)}, by part, one after the other.",
        parts_figure(step),
    )
    if table is not None and table.terms:
        made.draw(
            "methods",
            f"Predicted time of a step's work on {table.path}, by method: exchanges between devices, and rows that are "
            "sorted, looked up, added and updated.",
            methods_figure(table.path, table.taken, table.terms),
        )


def _add_scaling(made: Parts, plan: Plan, cluster: ClusterSpec | None, table: TablePlan | None) -> None:
    if plan.devices == 1:
        made.notes.append(f"No speed-up: {_unknown(plan)}.")
        return
    if cluster is None:
        made.notes.append("No speed-up: of devices that are here it isn't simulated; report(plan, cluster=...).")
        return
    simulation = simulate_devices(plan, cluster)
    made.tables["scaling"] = scaling_rows(simulation)
    made.draw(
        "speedup",
        f"Simulated speed-up on {simulation.cluster.device.name} ({simulation.cluster.name}) over one device, with as "
        f"many examples on each. {_limits(simulation, table)}",
        speedup_figure([t.devices for t in simulation.times], simulation.speedups, [t.limit for t in simulation.times]),
    )


def _limits(simulation: Simulation, table: TablePlan | None) -> str:
    said = f"Most of a step is {_changes(simulation, lambda time: time.limit)}."
    if table is None:
        return said
    return f"{said} {table.path} goes by {_changes(simulation, lambda time: time.methods[table.path])}."


def _changes(simulation: Simulation, of: Callable[[StepTime], str]) -> str:
    pairs = itertools.pairwise(simulation.times)
    changes = [f"{of(new)} from {new.devices:,} on" for old, new in pairs if of(old) != of(new)]
    first = of(simulation.times[0])
    return ", ".join([f"{first} on one device", *changes]) if changes else first


def add_measured(made: Parts, measured: Sequence[Timing]) -> None:
    made.tables["measured"] = timing_rows(measured)
    near = sum(t.near for t in measured)
    made.draw(
        "measured",
        f"Predicted against measured time of a step. In the band the prediction is within 20% of what was measured: "
        f"{near} of {len(measured)}.",
        measured_figure(measured),
    )


def bytes_figure(curves: Curves, axis: str) -> style.ReportFigure:
    """Draws bytes by method against "alpha" or "devices", with circles where another method sends least, and a dot for
    the plan."""
    figure, (axes,) = style.blank()
    for method, sent in curves.sent.items():
        _line(axes, curves.x, sent, method)
    for crossing in curves.crossings:
        axes.plot(crossing.x, crossing.sent, "o", color="white", markeredgecolor=style.INK, markersize=6, zorder=4)
    axes.set_xlim(curves.x[0], curves.x[-1])
    least = min(size for sent in curves.sent.values() for size in sent if size)
    axes.set_ylim(bottom=least / (8 if curves.crossings else 2))  # room for words below the curves
    style.log_axes(axes, "share" if axis == "alpha" else "count", "bytes", most=4)
    _mark_crossings(axes, curves, style.format_share if axis == "alpha" else style.format_count)
    if curves.own_sent:
        axes.plot(curves.own, curves.own_sent, "o", color=style.METHOD_STYLES[curves.method][0], markersize=5, zorder=5)
        _note(axes, "this plan", curves.own, curves.own_sent, bold=True)
    style.label_ends(
        axes, [(sent[-1], method, style.METHOD_STYLES[method][0]) for method, sent in curves.sent.items() if sent[-1]]
    )
    x = "rows that a device touches (alpha)" if axis == "alpha" else "devices (N)"
    style.name_axes(axes, x, _SENT, title=curves.path)
    return style.fit_size(figure)


def _mark_crossings(axes: Axes, curves: Curves, shown: Callable[[float], str]) -> None:
    foot = axes.get_ylim()[0]
    for k, crossing in enumerate(curves.crossings):
        axes.plot([crossing.x] * 2, [foot, crossing.sent], color=style.INK, linewidth=0.6, linestyle=(0, (1, 2)))
        left = _fraction(axes, crossing.x) < 0.55
        words = f"{crossing.new} from {shown(float(f'{crossing.x:.2g}') if crossing.x < 1 else crossing.x)}"
        at, offset = (crossing.x, foot), (3 if left else -3, 2 + 10 * (k % 2))
        style.write(axes, words, at, offset, side="left" if left else "right")


def table_3_figure(ours: Curves, theirs: Mapping[str, Sequence[float]]) -> style.ReportFigure:
    """Draws a panel for each method for which the paper's table differs from our bytes."""
    figure, panels = style.blank(height=style.HEIGHT, width=max(style.WIDTH, 1.75 * len(theirs)), panels=len(theirs))
    for axes, (method, values) in zip(panels, theirs.items(), strict=True):
        _line(axes, ours.x, ours.sent[method], method)
        axes.plot(ours.x, values, color=style.PALE, linewidth=2.5, zorder=1)
    for axes, (method, values) in zip(panels, theirs.items(), strict=True):
        style.log_axes(axes, "count", "bytes", most=3)
        at = 2 * len(ours.x) // 3
        pair = {"sent": (ours.sent[method][at], style.METHOD_STYLES[method][0]), "table 3": (values[at], style.GREY)}
        highest = max(pair, key=lambda name: pair[name][0])
        for name, (y, colour) in pair.items():
            if name == highest:
                style.write(axes, name, (ours.x[at], y), (-3, 3), side="right", colour=colour)
            else:
                style.write(axes, name, (ours.x[at], y), (3, -3), up="top", colour=colour)
        style.name_axes(axes, "devices (N)", _SENT if axes is panels[0] else "", title=method)
    return style.fit_size(figure)


def updates_figure(rows: Sequence[Mapping[str, str | int | float]]) -> style.ReportFigure:
    """Draws bytes that updates read and write: for each table a wide bar for a plain step, and a thin one for the
    plan."""
    shown = rows[:_LABELLED]
    names = [str(row["leaves"]) for row in shown]
    plain, planned = ([float(row[f"bytes of {of}"]) for row in shown] for of in ("a plain step", "this plan"))
    figure, (axes,) = style.blank(height=1.0 + 0.24 * len(shown))
    axes.barh(names, plain, color=style.PALE, height=0.7, label="plain step")
    axes.barh(names, planned, color=style.BLUE, height=0.35, label="this plan")
    for k, (before, now) in enumerate(zip(plain, planned, strict=True)):
        style.write(axes, f"{format_bytes(before)}, {format_bytes(now)}", (before, k), (3, 0), up="center")
    style.lay_bars(axes, "bytes that an update reads and writes")
    axes.set_xticks([])
    style.legend_above(axes)
    return style.fit_size(figure)


def parts_figure(step: Prediction) -> style.ReportFigure:
    seconds = {part.name: part.seconds or 0.0 for part in step.parts}
    figure, (axes,) = style.blank(height=0.5 + 0.24 * len(seconds))
    names = list(seconds)
    axes.barh(names, [1e3 * s for s in seconds.values()], color=style.BLUE, height=0.65)
    for k, value in enumerate(seconds.values()):
        style.write(axes, style.format_seconds(value) if value else "0", (1e3 * value, k), (3, 0), up="center")
    style.lay_bars(axes, f"predicted time (ms), {style.format_seconds(sum(seconds.values()))} in all")
    return style.fit_size(figure)


def methods_figure(path: str, taken: str, terms: Mapping[str, Sequence[Term]]) -> style.ReportFigure:
    """Draws a bar for each method of a table: exchanges, and work on rows."""
    figure, (axes,) = style.blank(height=1.0 + 0.24 * len(terms))
    kinds = {"exchanges": style.BLUE, "rows": style.SKY, "fixed": style.PALE}
    split = [_split(seconds) for seconds in terms.values()]
    left = [0.0] * len(split)
    for kind, colour in kinds.items():
        wide = [1e3 * seconds[kind] for seconds in split]
        if any(wide):
            axes.barh(list(terms), wide, left=left, color=colour, height=0.65, label=kind)
        left = [a + b for a, b in zip(left, wide, strict=True)]
    for k, (method, total) in enumerate(zip(terms, left, strict=True)):
        own = method == taken
        words = f"{style.format_seconds(total / 1e3)}{', this plan' if own else ''}"
        style.write(axes, words, (total, k), (3, 0), up="center", bold=own)
    style.lay_bars(axes, "predicted time in a step (ms)")
    axes.set_title(path, fontsize=style.FONT, loc="left", pad=18)  # above the legend
    style.legend_above(axes)
    return style.fit_size(figure)


def _split(terms: Sequence[Term]) -> Mapping[str, float]:
    seconds = {"exchanges": 0.0, "rows": 0.0, "fixed": 0.0}
    for term in terms:
        seconds["fixed" if term.fixed else "exchanges" if term.collective else "rows"] += term.seconds
    return seconds


def speedup_figure(devices: Sequence[int], speedups: Sequence[float], limits: Sequence[str]) -> style.ReportFigure:
    """Draws speed-up against N beside the ideal one, with colours and names for what takes most of a step."""
    figure, (axes,) = style.blank()
    axes.plot(devices, [n / devices[0] for n in devices], color=style.PALE, linewidth=1.2)
    axes.plot(devices, speedups, color=style.INK, linewidth=0.8, zorder=2)
    for limit, colour in zip(
        dict.fromkeys(limits),
        itertools.cycle((style.BLUE, style.ORANGE, style.GREEN, style.PURPLE, style.INK)),
        strict=False,
    ):
        at = [k for k, limit_ in enumerate(limits) if limit_ == limit]
        x, y = [devices[k] for k in at], [speedups[k] for k in at]
        axes.plot(x, y, "o", color=colour, markersize=4, zorder=3, label=limit)
    style.log_axes(axes)
    style.label_ends(axes, [(devices[-1] / devices[0], "ideal", style.GREY), (speedups[-1], "simulated", style.INK)])
    legend = {"title": "most of a step", "title_fontsize": style.FONT, "alignment": "left", "handlelength": 0.8}
    axes.legend(fontsize=style.FONT, frameon=False, loc="upper left", **legend)
    style.name_axes(axes, "devices (N), as many examples on each", "speed-up (examples a second)")
    return style.fit_size(figure)


def measured_figure(measured: Sequence[Timing]) -> style.ReportFigure:
    """Draws predicted against measured times, with the diagonal and a band of 20%. If there are many, only those
    outside of the band have labels, and none that would cover another."""
    figure, (axes,) = style.blank(height=3.0)
    times = [s for t in measured for s in (t.predicted_s, t.measured_s)]
    ends = [min(times) / 1.6, max(times) * 1.6]
    low, high = ([(1 + sign * NEAR) * x for x in ends] for sign in (-1, 1))
    axes.fill_between(ends, low, high, color=style.PALE, alpha=0.5, linewidth=0)
    axes.plot(ends, ends, color=style.GREY, linewidth=0.8)
    for timing in measured:
        axes.plot(
            timing.measured_s, timing.predicted_s, "o", color=style.BLUE if timing.near else style.ORANGE, markersize=4
        )
    axes.set_xlim(*ends)
    axes.set_ylim(*ends)
    style.log_axes(axes, "seconds", "seconds")
    axes.set_aspect("equal")
    labelled = sorted(
        measured if len(measured) <= _LABELLED else [t for t in measured if not t.near], key=lambda t: t.near
    )
    labels = [_note(axes, timing.label, timing.measured_s, timing.predicted_s) for timing in labelled]
    style.name_axes(axes, "measured time of a step", "predicted time of a step")
    style.fit_size(figure)
    style.keep_apart(labels)
    return figure


def _note(axes: Axes, words: str, x: float, y: float, bold: bool = False) -> Annotation:
    if _fraction(axes, x) < 0.55:
        return style.write(axes, words, (x, y), (4, -3), up="top", bold=bold)
    return style.write(axes, words, (x, y), (-1, -4), side="right", up="top", bold=bold)


def _fraction(axes: Axes, x: float) -> float:
    """Returns the position of x on a panel's logarithmic axis: 0 at its left end, 1 at its right."""
    low, high = axes.get_xlim()
    return math.log(x / low) / math.log(high / low)


def _line(axes: Axes, x: Sequence[float], sent: Sequence[float], method: str) -> None:
    colour, dashes = style.METHOD_STYLES[method]
    pairs = [(a, b) for a, b in zip(x, sent, strict=True) if b]  # a log axis has no 0
    axes.plot([a for a, _ in pairs], [b for _, b in pairs], color=colour, linestyle=dashes, linewidth=1.2)


# --- the stages of a pipeline: its schedule in time, what its devices do, and how stale its tasks are ---


_COLOURS: Mapping[str, str] = {"F": style.BLUE, "B": style.ORANGE, "W": style.GREEN}
_WORDS: Mapping[str, str] = {"F": "forward", "B": "backward", "W": "gradients of weights"}
#: Inches for each device.
_HIGH = 0.32
#: Most tasks of a device whose microbatches are numbered.
_NUMBERED = 40
#: The least share of the time in which a number has room.
_NARROW = 0.015


def add_stages(made: Parts, pipeline: PipelinePlan, staleness: Staleness | None) -> str:
    """Adds figures and tables of a pipeline; returns the end of the title."""
    simulated, where = simulate_pipeline(pipeline), f"{len(pipeline.stages)} stages on {pipeline.devices} devices"
    made.tables["stages"] = stage_rows(pipeline)
    what = f"with {pipeline.microbatches} microbatches, simulated: the devices wait {simulated.bubble:.0%} of the time."
    if pipeline.updates:
        what = "without a flush, simulated, from an empty pipeline to an empty one. Numbers are minibatches."
    made.draw("schedule", f"{pipeline.schedule} {what}", schedule_figure(pipeline))
    made.draw(
        "devices",
        "What each device does while the microbatches are in the pipeline: it computes (blue) or waits (grey).",
        device_figure(pipeline),
    )
    if pipeline.updates:
        made.tables["versions"] = version_rows(pipeline)
    if staleness is not None and staleness.tasks:
        made.tables["staleness"] = staleness_rows(staleness)
        made.draw(
            "staleness",
            "How far the weights that tasks find are from those that are there when their minibatch's last backward "
            "starts (root of the mean square), as they are (stale), and as they are predicted.",
            staleness_figure(staleness),
        )
    if not pipeline.is_timed:
        made.notes.append("No predicted times: the plan was made without rates of the devices.")
    return f"in {where}"


def schedule_figure(plan: PipelinePlan) -> style.ReportFigure:
    """Draws each device's tasks in time, as in SpecTrain's figure 6 and GPipe's figure 2; numbers are microbatches."""
    simulated = simulate_pipeline(plan)
    figure, (axes,) = style.blank(height=0.8 + _HIGH * plan.devices, width=2 * style.WIDTH)
    is_numbered = max(2 * plan.microbatches, len(plan.scheduled.orders[-1])) <= _NUMBERED
    for task, start in simulated.starts.items():
        replicas = plan.stages[task.stage].devices
        device = replicas[task.microbatch % len(replicas)]
        length = simulated.ends[task] - start
        colour = _COLOURS[task.kind]
        axes.add_patch(Rectangle((start, device - 0.4), length, 0.8, facecolor=colour, edgecolor="white", lw=0.5))
        if is_numbered and length > _NARROW * simulated.seconds:
            middle = start + length / 2
            axes.text(
                middle, device, str(task.microbatch), fontsize=style.FONT - 2, color="white", ha="center", va="center"
            )
    axes.set_xlim(0, simulated.seconds)
    axes.set_ylim(plan.devices - 0.4, -0.6)
    axes.set_yticks(range(plan.devices))
    if plan.is_timed:
        axes.xaxis.set_major_formatter(lambda value, _: style.format_seconds(value) if value else "0")
    else:
        axes.set_xticks([])
    kinds = [kind for kind in _COLOURS if any(task.kind == kind for task in simulated.starts)]
    axes.legend(
        [Rectangle((0, 0), 1, 1, facecolor=_COLOURS[kind]) for kind in kinds],
        [_WORDS[kind] for kind in kinds],
        fontsize=style.FONT,
        frameon=False,
        ncols=len(kinds),
        loc="lower right",
        bbox_to_anchor=(1, 1),
    )
    style.name_axes(axes, "time" if plan.is_timed else "time (rates of the devices aren't known)", "device")
    return style.fit_size(figure)


def device_figure(plan: PipelinePlan) -> style.ReportFigure:
    """Draws how long each device computes and waits, as in SpecTrain's figure 10."""
    simulated = simulate_pipeline(plan)
    figure, (axes,) = style.blank(height=0.8 + _HIGH * plan.devices)
    for device, busy in enumerate(simulated.busy):
        axes.barh(device, busy, color=style.BLUE, height=0.7)
        axes.barh(device, simulated.seconds - busy, left=busy, color=style.PALE, height=0.7)
        share = f"{1 - busy / simulated.seconds:.0%} waits" if simulated.seconds else ""
        axes.text(simulated.seconds, device, f" {share}", fontsize=style.FONT, color=style.INK, va="center")
    axes.set_ylim(plan.devices - 0.4, -0.6)
    axes.set_yticks(range(plan.devices))
    axes.set_xticks([])
    style.name_axes(axes, "time of the microbatches", "device")
    return style.fit_size(figure)


def staleness_figure(measured: Staleness) -> style.ReportFigure:
    """Draws the distance of weights to those that they stand for, as they are and as predicted (SpecTrain, figure 8):
    of each stage's forwards, or of backwards if these miss nothing."""
    tasks = {task.stage: task for task in reversed(measured.tasks)}
    shown = [tasks[stage] for stage in sorted(tasks)]
    figure, panels = style.blank(width=max(style.WIDTH, 1.75 * len(shown)), panels=len(shown))
    for axes, task in zip(panels, shown, strict=True):
        updates = range(1, len(task.stale) + 1)
        axes.plot(updates, task.stale, color=style.ORANGE, linewidth=1.2)
        axes.plot(updates, task.predicted, color=style.BLUE, linewidth=1.2)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.2g}")
        what = f"{task.kind} of stage {task.stage}, s = {task.ahead}"
        style.name_axes(axes, "updates", "RMSE" if axes is panels[0] else "", title=what)
    style.label_ends(
        panels[-1], [(shown[-1].stale[-1], "stale", style.ORANGE), (shown[-1].predicted[-1], "predicted", style.BLUE)]
    )
    return style.fit_size(figure)


def staleness_rows(measured: Staleness) -> Sequence[TableRow]:
    """Returns a row of medians for each stage's forwards and backwards that miss updates."""
    return [
        {
            "stage": task.stage,
            "task": _WORDS[task.kind],
            "s": task.ahead,
            "RMSE stale": statistics.median(task.stale),
            "RMSE predicted": statistics.median(task.predicted),
        }
        for task in measured.tasks
    ]


def version_rows(plan: PipelinePlan) -> Sequence[TableRow]:
    """Returns a row for each stage of an asynchronous pipeline, with the updates that its tasks miss, predict or
    stash."""
    return [
        {
            "stage": k,
            "forward misses": forward,
            "backward misses": backward,
            **({} if not plan.ahead else {"forward predicts": plan.ahead[k][0], "backward predicts": plan.ahead[k][1]}),
            "stashed versions": plan.calls.stashed(k),
        }
        for k, (forward, backward) in enumerate(map(plan.calls.missed, range(len(plan.stages))))
    ]


def stage_rows(plan: PipelinePlan) -> Sequence[TableRow]:
    """Returns a row for each stage, with times and bytes of a microbatch."""
    return [
        {
            "stage": k,
            "devices": ", ".join(map(str, stage.devices)),
            "weights": len(stage.weights),
            "first weight": stage.weights[0] if stage.weights else "",
            **{f"{_WORDS[kind]}, ms": round(1e3 * seconds, 3) for kind, seconds in stage.seconds.items()},
            "update, ms": round(1e3 * stage.update_s, 3),
            "sent ahead, bytes": stage.ahead_bytes,
            "sent back, bytes": stage.back_bytes,
            "state, bytes": stage.state_bytes,
            "activations, bytes": stage.activation_bytes,
        }
        for k, stage in enumerate(plan.stages)
    ]
