"""What `explain` says of a pipeline: a row for each stage, and how long a step's microbatches take."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from autopar.cost.units import format_bytes
from autopar.ir.stage_plan import PipelinePlan, StagePlan

#: Weights of a stage that are named.
_SHOWN = 2


def stage_table(plan: PipelinePlan) -> Table:
    """A row for each stage."""
    kinds = [k for k in ("F", "B", "W") if any(k in stage.seconds for stage in plan.stages)]
    table = Table(title="Stages", title_justify="left", title_style="bold")
    table.add_column("stage", justify="right")
    table.add_column("devices" if any(len(s.devices) > 1 for s in plan.stages) else "device", justify="right")
    table.add_column("weights", overflow="fold")
    for kind in kinds:
        table.add_column(f"{kind} ms", justify="right", no_wrap=True)
    if kinds:
        table.add_column("update ms", justify="right", no_wrap=True)
    columns = {"sent ahead": "ahead_bytes", "sent back": "back_bytes", "state": "state_bytes"}
    columns |= {"activations": "activation_bytes"} | ({"exchanged": "exchanged_bytes"} if plan.tensor > 1 else {})
    for name in columns:
        table.add_column(name, justify="right")
    for k, stage in enumerate(plan.stages):
        seconds = [*(stage.seconds.get(kind, 0.0) for kind in kinds), *([stage.update_s] if kinds else [])]
        times = (f"{each * 1e3:.2f}" for each in seconds)
        sizes = (format_bytes(getattr(stage, name)) for name in columns.values())
        table.add_row(str(k), ", ".join(map(str, stage.devices)), _weights(stage), *times, *sizes)
    return table


def _weights(stage: StagePlan) -> str:
    more = len(stage.weights) - _SHOWN
    return ", ".join(stage.weights[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def stage_notes(plan: PipelinePlan) -> Sequence[str]:
    """What follows from the schedule."""
    simulated = plan.simulated
    time = f"{plan.seconds * 1e3:.2f} ms, " if plan.seconds else ""
    held = ", ".join(format_bytes(size) for size in plan.memory_bytes)
    count = plan.microbatches
    what = f"{plan.schedule}, {count} microbatch{'es' * (count > 1)}{', remat' * plan.remat}"
    notes = [
        f"{what}: {time}of which the {plan.devices} devices wait "
        f"{simulated.bubble:.0%} (bubble). Times and bytes of the table are those of a microbatch, but for the update.",
        f"Memory of each device for state, gradients and activations: {held}.",
    ]
    if plan.tensor > 1:
        notes.append(
            f"Each of them is {plan.tensor} devices that divide products; times and bytes are those of each, and "
            "'exchanged' is what it sends to the others."
        )
    if plan.tied_bytes:
        notes.append(f"Weights of several stages: {format_bytes(plan.tied_bytes)} are sent in a step, gradients back.")
    if plan.candidates:
        shown = "; ".join(f"{what} {1e3 * seconds:.2f} ms" for what, seconds in plan.candidates)
        notes.append(
            f"Chosen of these, as predicted for a step: {shown}. One stage is data parallelism; more are taken where "
            "they are faster by more than 10%."
        )
    if plan.statistics:
        notes.append(
            "statistics='microbatch': these sums over the batch, which examples depend on, are those of a microbatch, "
            f"which is not what the plain step computes: {', '.join(plan.statistics)}."
        )
    return notes
