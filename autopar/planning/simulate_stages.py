"""What a step in stages would take on more devices: copies of the whole pipeline, each with examples of its own.

A copy is the pipeline of the plan, by the cluster's rates; copies of a stage add up their gradients once a step. Stages
follow one another over the devices of a machine, and then over the next one.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

from autopar.cost.planned_rates import planned_stage_rates
from autopar.cost.rates import StageRates
from autopar.cost.simulate import BACKWARD, StepTime, expected_maximum
from autopar.cost.stage_time import pipeline_memory, simulate_pipeline
from autopar.errors import ArgumentsError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.figures import Term
from autopar.ir.stage_plan import PipelinePlan, StagePlan


def stage_times(
    name: str, plan: PipelinePlan, cluster: ClusterSpec, counts: Sequence[int], *, overlap: float, variation: float
) -> tuple[StepTime, ...]:
    """A step for each number of devices; see `planning.simulate`.

    Raises:
      ArgumentsError: a number of devices that isn't a multiple of the pipeline's.
    """
    if plan.updates and any(n != plan.size for n in counts):
        raise ArgumentsError(f"{name}: a pipeline without a flush has no copies; leave devices= at {plan.size}")
    wrong = [n for n in counts if n % plan.size]
    if wrong:
        raise ArgumentsError(f"devices={wrong[0]}: {name} has stages on {plan.size} devices; give multiples of them")
    return tuple(
        _step(plan, cluster.of(math.ceil(n / cluster.devices), min(n, cluster.devices)), n, overlap, variation)
        for n in counts
    )


def _step(plan: PipelinePlan, cluster: ClusterSpec, count: int, overlap: float, variation: float) -> StepTime:
    rates, copies = planned_stage_rates(cluster), count // plan.size
    there = cluster.of(math.ceil(plan.size / cluster.devices), min(plan.size, cluster.devices))
    own = dataclasses.replace(
        plan,
        stages=tuple(_at(stage, rates) for stage in plan.stages),
        send_byte_s=planned_stage_rates(there).send_byte_s,
    )
    simulated = simulate_pipeline(own)
    model = simulated.period if own.updates else simulated.seconds
    sums, sent = _sums(plan, cluster, copies)
    parts = {
        "model": (Term("microbatches through the stages", model),),
        "dense gradients": (Term("sums of the copies' gradients", sums, sent),),
        "dense updates": (Term("the slowest stage's update", max(stage.update_s for stage in own.stages)),),
    }
    waiting, hidden = variation * model * expected_maximum(count), min(overlap * sums, BACKWARD * model)
    return StepTime(count, parts, {}, waiting, hidden, max(pipeline_memory(own)) <= cluster.device.memory_bytes)


def _at(stage: StagePlan, rates: StageRates) -> StagePlan:
    """A stage by other rates; kinds of tasks in the proportions of the plan."""
    total = sum(stage.seconds.values())
    seconds = rates.seconds(stage.flops, stage.activation_bytes + stage.ahead_bytes + stage.back_bytes)
    seconds += rates.send_byte_s * stage.exchanged_bytes + rates.call_s * stage.exchanges
    shares = {kind: s / total for kind, s in stage.seconds.items()} if total else {"F": 1 / 3, "B": 2 / 3}
    update = rates.seconds(0.0, 2 * stage.state_bytes + stage.gradient_bytes)
    return dataclasses.replace(stage, seconds={k: share * seconds for k, share in shares.items()}, update_s=update)


def _sums(plan: PipelinePlan, cluster: ClusterSpec, copies: int) -> tuple[float, int]:
    """Seconds and bytes of the AllReduces over the copies: the stages of a machine share what connects it."""
    if copies == 1:
        return 0.0, 0
    each = (plan.tensor * len(stage.devices) * [stage.gradient_bytes] for stage in plan.stages)
    sizes = sorted(itertools.chain(*each), reverse=True)
    share = 2 * (copies - 1) / copies
    if cluster.machines == 1:
        return cluster.inside(share * sizes[0], 2 * (copies - 1)), round(share * sizes[0])
    together = sum(sizes[: min(plan.size, cluster.devices)])
    return cluster.between(share * together, 2 * (copies - 1)), round(share * sizes[0])
