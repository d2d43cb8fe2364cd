"""The figures of a report, each with one idea: of tables and devices, and of a pipeline's schedule and stages.

Plain numbers are drawn, from `report.tables` and plans.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.text import Annotation

from autopar.cost import Term
from autopar.cost.stage_time import simulate_pipeline
from autopar.cost.units import format_bytes
from autopar.ir.stage_plan import PipelinePlan
from autopar.planning.predictions import Prediction
from autopar.planning.staleness import Staleness
from autopar.report.style import (
    BLUE,
    FONT,
    GREEN,
    GREY,
    HEIGHT,
    INK,
    METHOD_STYLES,
    ORANGE,
    PALE,
    PURPLE,
    SKY,
    WIDTH,
    ReportFigure,
    blank,
    fit_size,
    format_count,
    format_seconds,
    format_share,
    keep_apart,
    label_ends,
    lay_bars,
    legend_above,
    log_axes,
    name_axes,
    write,
)
from autopar.report.tables import NEAR, Curves, TableRow, Timing

_SENT = "bytes a device sends in a step"
#: Points of which all have labels.
_LABELLED = 8
_COLOURS: Mapping[str, str] = {"F": BLUE, "B": ORANGE, "W": GREEN}
_WORDS: Mapping[str, str] = {"F": "forward", "B": "backward", "W": "gradients of weights"}
#: Inches for each device.
_HIGH = 0.32
#: Tasks of a device whose microbatches are numbered.
_NUMBERED = 40
#: Of all the time, what a number has room in.
_NARROW = 0.015


def bytes_figure(curves: Curves, axis: str) -> ReportFigure:
    """Draws bytes by method against "alpha" or "devices"; circles where the least changes, a dot for the plan."""
    figure, (axes,) = blank()
    for method, sent in curves.sent.items():
        _line(axes, curves.x, sent, method)
    for crossing in curves.crossings:
        axes.plot(crossing.x, crossing.sent, "o", color="white", markeredgecolor=INK, markersize=6, zorder=4)
    axes.set_xlim(curves.x[0], curves.x[-1])
    least = min(size for sent in curves.sent.values() for size in sent if size)
    axes.set_ylim(bottom=least / (8 if curves.crossings else 2))  # room for words below the curves
    log_axes(axes, "share" if axis == "alpha" else "count", "bytes", most=4)
    _mark_crossings(axes, curves, format_share if axis == "alpha" else format_count)
    if curves.own_sent:
        axes.plot(curves.own, curves.own_sent, "o", color=METHOD_STYLES[curves.method][0], markersize=5, zorder=5)
        _note(axes, "this plan", curves.own, curves.own_sent, bold=True)
    label_ends(axes, [(sent[-1], method, METHOD_STYLES[method][0]) for method, sent in curves.sent.items() if sent[-1]])
    x = "rows that a device touches (alpha)" if axis == "alpha" else "devices (N)"
    name_axes(axes, x, _SENT, title=curves.path)
    return fit_size(figure)


def _mark_crossings(axes: Axes, curves: Curves, shown: Callable[[float], str]) -> None:
    foot = axes.get_ylim()[0]
    for k, crossing in enumerate(curves.crossings):
        axes.plot([crossing.x] * 2, [foot, crossing.sent], color=INK, linewidth=0.6, linestyle=(0, (1, 2)))
        left = _across(axes, crossing.x) < 0.55
        words = f"{crossing.new} from {shown(float(f'{crossing.x:.2g}') if crossing.x < 1 else crossing.x)}"
        at, offset = (crossing.x, foot), (3 if left else -3, 2 + 10 * (k % 2))
        write(axes, words, at, offset, across="left" if left else "right")


def table_3_figure(ours: Curves, theirs: Mapping[str, Sequence[float]]) -> ReportFigure:
    """Draws a panel for each method of which the paper's table says something else: what is sent, and what it says."""
    figure, panels = blank(height=HEIGHT, width=max(WIDTH, 1.75 * len(theirs)), panels=len(theirs))
    for axes, (method, values) in zip(panels, theirs.items(), strict=True):
        _line(axes, ours.x, ours.sent[method], method)
        axes.plot(ours.x, values, color=PALE, linewidth=2.5, zorder=1)
    for axes, (method, values) in zip(panels, theirs.items(), strict=True):
        log_axes(axes, "count", "bytes", most=3)
        at = 2 * len(ours.x) // 3
        pair = {"sent": (ours.sent[method][at], METHOD_STYLES[method][0]), "table 3": (values[at], GREY)}
        highest = max(pair, key=lambda name: pair[name][0])
        for name, (y, colour) in pair.items():
            if name == highest:
                write(axes, name, (ours.x[at], y), (-3, 3), across="right", colour=colour)
            else:
                write(axes, name, (ours.x[at], y), (3, -3), up="top", colour=colour)
        name_axes(axes, "devices (N)", _SENT if axes is panels[0] else "", title=method)
    return fit_size(figure)


def updates_figure(rows: Sequence[Mapping[str, str | int | float]]) -> ReportFigure:
    """Draws what updates read and write: for each table a wide bar of a plain step, and a thin one of the plan."""
    shown = rows[:_LABELLED]
    names = [str(row["leaves"]) for row in shown]
    plain, planned = ([float(row[f"bytes of {of}"]) for row in shown] for of in ("a plain step", "this plan"))
    figure, (axes,) = blank(height=1.0 + 0.24 * len(shown))
    axes.barh(names, plain, color=PALE, height=0.7, label="plain step")
    axes.barh(names, planned, color=BLUE, height=0.35, label="this plan")
    for k, (before, now) in enumerate(zip(plain, planned, strict=True)):
        write(axes, f"{format_bytes(before)}, {format_bytes(now)}", (before, k), (3, 0), up="center")
    lay_bars(axes, "bytes that an update reads and writes")
    axes.set_xticks([])
    legend_above(axes)
    return fit_size(figure)


def parts_figure(step: Prediction) -> ReportFigure:
    """Draws a bar for each part of a step."""
    seconds = {part.name: part.seconds or 0.0 for part in step.parts}
    figure, (axes,) = blank(height=0.5 + 0.24 * len(seconds))
    names = list(seconds)
    axes.barh(names, [1e3 * s for s in seconds.values()], color=BLUE, height=0.65)
    for k, value in enumerate(seconds.values()):
        write(axes, format_seconds(value) if value else "0", (1e3 * value, k), (3, 0), up="center")
    lay_bars(axes, f"predicted time (ms), {format_seconds(sum(seconds.values()))} in all")
    return fit_size(figure)


def methods_figure(path: str, taken: str, terms: Mapping[str, Sequence[Term]]) -> ReportFigure:
    """Draws a bar for each method of a table: exchanges, and work on rows."""
    figure, (axes,) = blank(height=1.0 + 0.24 * len(terms))
    kinds = {"exchanges": BLUE, "rows": SKY, "fixed": PALE}
    split = [_split(seconds) for seconds in terms.values()]
    left = [0.0] * len(split)
    for kind, colour in kinds.items():
        wide = [1e3 * seconds[kind] for seconds in split]
        if any(wide):
            axes.barh(list(terms), wide, left=left, color=colour, height=0.65, label=kind)
        left = [a + b for a, b in zip(left, wide, strict=True)]
    for k, (method, total) in enumerate(zip(terms, left, strict=True)):
        own = method == taken
        words = f"{format_seconds(total / 1e3)}{', this plan' if own else ''}"
        write(axes, words, (total, k), (3, 0), up="center", bold=own)
    lay_bars(axes, "predicted time in a step (ms)")
    axes.set_title(path, fontsize=FONT, loc="left", pad=18)  # above the legend
    legend_above(axes)
    return fit_size(figure)


def _split(terms: Sequence[Term]) -> Mapping[str, float]:
    seconds = {"exchanges": 0.0, "rows": 0.0, "fixed": 0.0}
    for term in terms:
        seconds["fixed" if term.fixed else "exchanges" if term.collective else "rows"] += term.seconds
    return seconds


def speedup_figure(devices: Sequence[int], speedups: Sequence[float], limits: Sequence[str]) -> ReportFigure:
    """Draws speed-up against N, the ideal one beside it; colours and names for what takes most of a step."""
    figure, (axes,) = blank()
    axes.plot(devices, [n / devices[0] for n in devices], color=PALE, linewidth=1.2)
    axes.plot(devices, speedups, color=INK, linewidth=0.8, zorder=2)
    for limit, colour in zip(dict.fromkeys(limits), itertools.cycle((BLUE, ORANGE, GREEN, PURPLE, INK)), strict=False):
        at = [k for k, limit_ in enumerate(limits) if limit_ == limit]
        x, y = [devices[k] for k in at], [speedups[k] for k in at]
        axes.plot(x, y, "o", color=colour, markersize=4, zorder=3, label=limit)
    log_axes(axes)
    label_ends(axes, [(devices[-1] / devices[0], "ideal", GREY), (speedups[-1], "simulated", INK)])
    legend = {"title": "most of a step", "title_fontsize": FONT, "alignment": "left", "handlelength": 0.8}
    axes.legend(fontsize=FONT, frameon=False, loc="upper left", **legend)
    name_axes(axes, "devices (N), as many examples on each", "speed-up (examples a second)")
    return fit_size(figure)


def measured_figure(measured: Sequence[Timing]) -> ReportFigure:
    """Draws predicted against measured times: on the diagonal they are equal, in the band within 20%.

    Of many only those outside the band have their labels, and none whose label would lie on another one.
    """
    figure, (axes,) = blank(height=3.0)
    times = [s for t in measured for s in (t.predicted_s, t.measured_s)]
    ends = [min(times) / 1.6, max(times) * 1.6]
    low, high = ([(1 + sign * NEAR) * x for x in ends] for sign in (-1, 1))
    axes.fill_between(ends, low, high, color=PALE, alpha=0.5, linewidth=0)
    axes.plot(ends, ends, color=GREY, linewidth=0.8)
    for timing in measured:
        axes.plot(timing.measured_s, timing.predicted_s, "o", color=BLUE if timing.near else ORANGE, markersize=4)
    axes.set_xlim(*ends)
    axes.set_ylim(*ends)
    log_axes(axes, "seconds", "seconds")
    axes.set_aspect("equal")
    labelled = sorted(
        measured if len(measured) <= _LABELLED else [t for t in measured if not t.near], key=lambda t: t.near
    )
    labels = [_note(axes, timing.label, timing.measured_s, timing.predicted_s) for timing in labelled]
    name_axes(axes, "measured time of a step", "predicted time of a step")
    fit_size(figure)
    keep_apart(labels)
    return figure


def _note(axes: Axes, words: str, x: float, y: float, bold: bool = False) -> Annotation:
    if _across(axes, x) < 0.55:
        return write(axes, words, (x, y), (4, -3), up="top", bold=bold)
    return write(axes, words, (x, y), (-1, -4), across="right", up="top", bold=bold)


def _across(axes: Axes, x: float) -> float:
    """Says where x lies in a panel with a logarithmic axis: 0 at its left end, 1 at its right one."""
    low, high = axes.get_xlim()
    return math.log(x / low) / math.log(high / low)


def _line(axes: Axes, x: Sequence[float], sent: Sequence[float], method: str) -> None:
    colour, dashes = METHOD_STYLES[method]
    pairs = [(a, b) for a, b in zip(x, sent, strict=True) if b]  # nothing has no place on a log axis
    axes.plot([a for a, _ in pairs], [b for _, b in pairs], color=colour, linestyle=dashes, linewidth=1.2)


def schedule_figure(plan: PipelinePlan) -> ReportFigure:
    """Draws each device's tasks in time, as in SpecTrain's figure 6 and GPipe's figure 2: numbers are microbatches."""
    simulated = simulate_pipeline(plan)
    figure, (axes,) = blank(height=0.8 + _HIGH * plan.devices, width=2 * WIDTH)
    is_numbered = max(2 * plan.microbatches, len(plan.scheduled.orders[-1])) <= _NUMBERED
    for task, start in simulated.starts.items():
        replicas = plan.stages[task.stage].devices
        device = replicas[task.microbatch % len(replicas)]
        length = simulated.ends[task] - start
        colour = _COLOURS[task.kind]
        axes.add_patch(Rectangle((start, device - 0.4), length, 0.8, facecolor=colour, edgecolor="white", lw=0.5))
        if is_numbered and length > _NARROW * simulated.seconds:
            middle = start + length / 2
            axes.text(middle, device, str(task.microbatch), fontsize=FONT - 2, color="white", ha="center", va="center")
    axes.set_xlim(0, simulated.seconds)
    axes.set_ylim(plan.devices - 0.4, -0.6)
    axes.set_yticks(range(plan.devices))
    if plan.is_timed:
        axes.xaxis.set_major_formatter(lambda value, _: format_seconds(value) if value else "0")
    else:
        axes.set_xticks([])
    kinds = [kind for kind in _COLOURS if any(task.kind == kind for task in simulated.starts)]
    axes.legend(
        [Rectangle((0, 0), 1, 1, facecolor=_COLOURS[kind]) for kind in kinds],
        [_WORDS[kind] for kind in kinds],
        fontsize=FONT,
        frameon=False,
        ncols=len(kinds),
        loc="lower right",
        bbox_to_anchor=(1, 1),
    )
    name_axes(axes, "time" if plan.is_timed else "time (rates of the devices aren't known)", "device")
    return fit_size(figure)


def device_figure(plan: PipelinePlan) -> ReportFigure:
    """Draws what each device does of a step's time, as in SpecTrain's figure 10: it computes, waits, or updates."""
    simulated = simulate_pipeline(plan)
    figure, (axes,) = blank(height=0.8 + _HIGH * plan.devices)
    for device, busy in enumerate(simulated.busy):
        axes.barh(device, busy, color=BLUE, height=0.7)
        axes.barh(device, simulated.seconds - busy, left=busy, color=PALE, height=0.7)
        share = f"{1 - busy / simulated.seconds:.0%} waits" if simulated.seconds else ""
        axes.text(simulated.seconds, device, f" {share}", fontsize=FONT, color=INK, va="center")
    axes.set_ylim(plan.devices - 0.4, -0.6)
    axes.set_yticks(range(plan.devices))
    axes.set_xticks([])
    name_axes(axes, "time of the microbatches", "device")
    return fit_size(figure)


def staleness_figure(measured: Staleness) -> ReportFigure:
    """Draws how far weights are from those that they stand for, as in SpecTrain's figure 8: as they are, and as
    predicted. Of each stage's forwards, or of backwards where these miss nothing."""
    tasks = {task.stage: task for task in reversed(measured.tasks)}
    shown = [tasks[stage] for stage in sorted(tasks)]
    figure, panels = blank(width=max(WIDTH, 1.75 * len(shown)), panels=len(shown))
    for axes, task in zip(panels, shown, strict=True):
        updates = range(1, len(task.stale) + 1)
        axes.plot(updates, task.stale, color=ORANGE, linewidth=1.2)
        axes.plot(updates, task.predicted, color=BLUE, linewidth=1.2)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.2g}")
        what = f"{task.kind} of stage {task.stage}, s = {task.ahead}"
        name_axes(axes, "updates", "RMSE" if axes is panels[0] else "", title=what)
    label_ends(panels[-1], [(shown[-1].stale[-1], "stale", ORANGE), (shown[-1].predicted[-1], "predicted", BLUE)])
    return fit_size(figure)


def staleness_rows(measured: Staleness) -> Sequence[TableRow]:
    """Returns a row for the forwards, and one for the backwards, of each stage that miss updates; medians."""
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
    """Returns a row for each stage of an asynchronous pipeline: the updates that its tasks miss, and what is done about
    it."""
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
    """Returns a row for each stage; times and bytes of a microbatch."""
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
