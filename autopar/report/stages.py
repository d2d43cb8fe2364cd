"""Figures and tables of a pipeline: its schedule in time, what its devices do, and how stale its tasks are."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from matplotlib.patches import Rectangle

from autopar.cost.stage_time import simulate_pipeline
from autopar.ir.plan import PipelinePlan
from autopar.planning.replay import Staleness
from autopar.report import style
from autopar.report.build import Parts
from autopar.report.tables import TableRow

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
