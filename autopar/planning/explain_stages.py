"""What `explain` says of a pipeline: a row for each stage, and how long a step's microbatches take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType

from autopar.cost.stage_time import pipeline_memory, pipeline_seconds, simulate_pipeline, stage_times
from autopar.cost.units import format_bytes
from autopar.cost.versions import by_the_equations
from autopar.ir.schedule import Task
from autopar.ir.stage_plan import PipelinePlan
from autopar.planning.folding import fold_paths
from autopar.planning.text import LIST, Column, Columns

#: Names for the weights of a stage, if they can be folded into so few.
_WEIGHTS = 4


def stage_lines(plan: PipelinePlan) -> Iterator[RenderableType]:
    """A table with a row for each stage, its weights, and what follows from the schedule."""
    stages = plan.stages
    kinds = [k for k in ("F", "B", "W") if any(k in stage.seconds for stage in stages)]
    times = {f"{kind} ms": [stage.seconds.get(kind, 0.0) for stage in stages] for kind in kinds}
    times |= {"update ms": [stage.update_s for stage in stages]} if kinds else {}
    sizes = {
        "sent ahead": [stage.ahead_bytes for stage in stages],
        "sent back": [stage.back_bytes for stage in stages],
        "state": [stage.state_bytes for stage in stages],
        "activations": [stage.activation_bytes for stage in stages],
    }
    sizes |= {"exchanged": [stage.exchanged_bytes for stage in stages]} if plan.tensor > 1 else {}
    yield from (
        "",
        Columns(
            [
                Column("stage", [str(k) for k in range(len(stages))], "right"),
                Column("device", [", ".join(map(str, stage.devices)) for stage in stages], "right", breaks=LIST),
                *(Column(title, [f"{1e3 * s:.2f}" for s in seconds], "right") for title, seconds in times.items()),
                *(Column(title, [format_bytes(size) for size in of], "right") for title, of in sizes.items()),
            ]
        ),
        "",
    )
    for k, weights in enumerate(_weights(plan)):
        yield f"  stage {k}: {', '.join(weights) or 'no weights'}"
    if plan.updates:
        yield from ("", _versions(plan), "")
    yield from stage_notes(plan)


def _versions(plan: PipelinePlan) -> Columns:
    """Tells which weights each stage's tasks see, where minibatches follow one another without a flush."""
    numbers, calls = range(len(plan.stages)), plan.calls
    columns = {f"{kind} misses": [calls.missed(k)[i] for k in numbers] for i, kind in enumerate("FB")}
    if plan.ahead:
        equations = [by_the_equations(k, len(plan.stages)) for k in numbers]
        for i, kind in enumerate(("F", "B")):
            columns[f"{kind} predicts"] = [s[i] for s in plan.ahead]
            columns[f"by eq. {5 + i}"] = [s[i] for s in equations]
    columns["stashed"] = [calls.stashed(k) for k in numbers]
    shown = {title: of for title, of in columns.items() if title != "stashed" or any(of)}
    return Columns(
        [
            Column("stage", [str(k) for k in numbers], "right"),
            *(Column(title, [str(n) for n in of], "right") for title, of in shown.items()),
        ]
    )


def _weights(plan: PipelinePlan) -> Sequence[Sequence[str]]:
    """Each stage's weights; of a stack, those of the same rows ("[0:3]") are folded together."""
    names: list[list[str]] = [[] for _ in plan.stages]
    owners: dict[str, dict[str, int]] = {}
    for k, stage in enumerate(plan.stages):
        for weight in stage.weights:
            path, bracket, rows = weight.partition("[")
            owners.setdefault(bracket + rows, {})[path] = k
    for rows, owner in owners.items():
        for name, paths in fold_paths(owner, _WEIGHTS * len(set(owner.values()))).items():
            names[owner[paths[0]]].append(name + rows)
    return names


def stage_notes(plan: PipelinePlan) -> Sequence[str]:
    """What follows from the schedule."""
    held = ", ".join(format_bytes(size) for size in pipeline_memory(plan))
    notes = [
        *(_asynchronous_notes(plan) if plan.updates else [_synchronous_note(plan)]),
        f"Memory of each device for state, gradients and activations: {held}.",
    ]
    if len({tuple(stage.devices) for stage in plan.stages}) > 1:
        notes.append(
            "The state lies on several devices; for other functions under jax.jit: autopar.materialize(state)."
        )
    if plan.tensor > 1:
        notes.append(
            f"Each of them is {plan.tensor} devices that divide products; times and bytes are those of each, and "
            "'exchanged' is what it sends to the others."
        )
    if plan.tied_bytes:
        notes.append(f"Weights of several stages: {format_bytes(plan.tied_bytes)} are sent in a step, gradients back.")
    if plan.candidates:
        notes.append(
            "Chosen of these, as predicted for a step (one stage is data parallelism; more are taken where they are "
            "faster by more than 10%):"
        )
        own = f"{plan.pipeline}, {plan.schedule}, M = {plan.microbatches}{', remat' * plan.remat}"
        times = ((what, pipeline_seconds(plan) if what == own else seconds) for what, seconds in plan.candidates)
        notes += [f"  {1e3 * seconds:.2f} ms: {what}" for what, seconds in times]
    if plan.statistics:
        notes.append(
            "statistics='microbatch': these sums over the batch, which examples depend on, are those of a microbatch, "
            f"which is not what the plain step computes: {', '.join(plan.statistics)}."
        )
    return notes


def _slack_notes(plan: PipelinePlan) -> Sequence[str]:
    if not plan.slack:
        return []
    return [
        f"{plan.slack} minibatch{'es' * (plan.slack > 1)} more for each border between stages are in flight, to hide "
        "links: as many updates more are missed (slack=0 has one minibatch in flight for each device)."
    ]


def _late_notes(plan: PipelinePlan) -> Sequence[str]:
    """Tells of updates that wait for all stages, so that others see them later than their own backward allows."""
    calls = plan.calls
    late = {k: calls.late(k) for k in range(len(plan.stages)) if calls.late(k)}
    if not late:
        return []
    least, most = min(late.values()), max(late.values())
    calls_later = f"{least} to {most} calls" if least < most else f"{most} call{'s' * (most > 1)}"
    uncounted = ", which s, counted up to stage 0's backward, leaves out: they are staler than it says"
    return [
        f"Updates of stage{'s' * (len(late) > 1)} {', '.join(map(str, late))} need a value of all stages (the factor "
        f"of a clip by the global norm, say), and come {calls_later} later than without it. Their tasks miss as many "
        f"updates more{uncounted * bool(plan.ahead)}. Gradients that are clipped by value, or leaf by leaf, wait "
        "for no other stage."
    ]


def _synchronous_note(plan: PipelinePlan) -> str:
    simulated, seconds, count = simulate_pipeline(plan), pipeline_seconds(plan), plan.microbatches
    time = f"{seconds * 1e3:.2f} ms, " if seconds else ""
    return (
        f"{plan.schedule}, {count} microbatch{'es' * (count > 1)}{', remat' * plan.remat}: {time}of which the "
        f"{plan.devices} devices wait {simulated.bubble:.0%} (bubble). Times and bytes of the table are those of a "
        "microbatch, but for the update."
    )


def _asynchronous_notes(plan: PipelinePlan) -> Sequence[str]:
    """Tells what differs without a flush: the function, by design."""
    seconds, last = pipeline_seconds(plan), plan.calls.last
    time = f" {seconds * 1e3:.2f} ms each once it is full;" if seconds else ""
    times, period = stage_times(plan), plan.devices * simulate_pipeline(plan).period
    tasks = [Task(kind, k, 0) for kind in ("F", "B") for k in range(len(plan.stages))]
    waits = max(0.0, 1 - sum(times.of(task, splits_backward=False) for task in tasks) / period) if period else 0.0
    sees = {
        "async": "A task sees the weights as its stage has them: it misses the updates of so many minibatches ahead.",
        "stash": "A backward sees the weights that its forward saw; both miss the updates of so many minibatches.",
        "spectrain": "Tasks predict the weights that their minibatch will meet behind stage 0's backward: W + s u, of "
        "which u is the last change (SpecTrain, section 3.2); s is counted in the simulated schedule.",
    }[plan.schedule]
    return [
        f"{plan.schedule}{', remat' * plan.remat}: minibatches follow one another without a flush,{time} the devices "
        f"wait {waits:.0%}. Times and bytes of the table are those of a minibatch.",
        f"This is another function than the step on one device, by design. {sees}",
        *_slack_notes(plan),
        *_late_notes(plan),
        f"A call returns the results of the minibatch that came {last} call{'s' * (last != 1)} before, None as long as "
        "there is none: autopar.paired(step, state, batches). autopar.drain(state) finishes those on their way.",
    ]
