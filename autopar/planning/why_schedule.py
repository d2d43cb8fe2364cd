"""`why` of a schedule that a pipeline didn't take: the updates that a weight's tasks would miss by it."""

from __future__ import annotations

import dataclasses

from autopar.cost.units import format_bytes
from autopar.errors import ArgumentsError
from autopar.ir.asynchronous import Calls
from autopar.ir.schedule import SCHEDULES, AsynchronousRule
from autopar.ir.stage_plan import PipelinePlan


def schedule_text(plan: PipelinePlan, path: str, schedule: str) -> str:
    """Tells what tasks see of a weight by the plan's schedule, and what they would see by another one.

    Raises:
      ArgumentsError: it is a weight of no stage.
    """
    stage = next((k for k, stage in enumerate(plan.stages) if path in stage.weights), None)
    if stage is None:
        raise ArgumentsError(f"{path!r} is no weight of a stage; explain(step, ...) lists those of each")
    own = f"it is in stage {stage} of {len(plan.stages)}. By {_versions(plan, stage, plan.schedule)}"
    return own if schedule == plan.schedule else f"{own}. By {_versions(plan, stage, schedule)}"


def _versions(plan: PipelinePlan, stage: int, schedule: str) -> str:
    """Tells which versions a stage's tasks see by a schedule."""
    rule = SCHEDULES[schedule]
    if not isinstance(rule, AsynchronousRule):
        return f"{schedule} no task misses an update: each call ends with a flush, where devices wait for one another"
    calls = dataclasses.replace(plan.calls if plan.updates else Calls.soonest(plan.places), stashes=rule.stashes)
    forward, backward = calls.missed(stage)
    late = f"{forward} update{'s' * (forward != 1)}" if forward else "no update"
    text = f"{schedule} its forwards miss {late} of earlier minibatches, its backwards {backward or 'none'}"
    if stashed := calls.stashed(stage):
        size = format_bytes(stashed * plan.stages[stage].weight_bytes)
        text += f", for which {stashed} older version{'s' * (stashed > 1)} of the stage's weights ({size}) are kept"
    if rule.predicts and plan.ahead:
        text += ", and they predict the weights {} and {} updates ahead".format(*plan.ahead[stage])
    elif rule.predicts:
        text += ", and they predict the weights by the last change"
    return text
