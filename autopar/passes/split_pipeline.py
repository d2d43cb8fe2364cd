"""Cut a step whose microbatches are apart into the programs of its stages.

`split_update` has the gradient program of one microbatch; here its equations go to the forward or backward program of
a stage (`analysis.stages`), and those of the update to where their leaves are. A gradient that is a sum over stages (of
tied embeddings) is summed by the update.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from autopar.analysis.tensor import Division
from autopar.cost.rates import Measurements
from autopar.cost.stage_time import choose_slack, pipeline_memory, stage_times, steps_ahead
from autopar.cost.units import format_bytes
from autopar.errors import StrategyError
from autopar.ir.asynchronous import Calls
from autopar.ir.pipeline import Pipeline, StagedStep
from autopar.ir.program import Program, Var
from autopar.ir.schedule import AsynchronousRule
from autopar.ir.stage_plan import PipelinePlan, StagePlan
from autopar.passes.staging.asynchronous import without_flush
from autopar.passes.staging.divided import DividedLeaves
from autopar.passes.staging.loads import StageLoad, held_bytes, stage_loads
from autopar.passes.staging.parts import find_parts, label_parts, other_homes, untied
from autopar.passes.staging.prediction import with_prediction
from autopar.passes.staging.programs import StageCutter
from autopar.passes.staging.remat import with_remat
from autopar.passes.staging.stages import choose_stages


def split_pipeline(
    program: Program, pipeline: Pipeline, measured: Measurements, divided: DividedLeaves
) -> tuple[StagedStep, PipelinePlan]:
    """Returns the programs of each stage, and what is decided of the stages.

    Args:
      program: A program that `split_update` has cut.
      pipeline: Stages, schedule and microbatches.
      measured: Rates and memory of the stages' devices.
      divided: Leaves that are divided over the devices of a stage.

    Raises:
      StrategyError: more stages than there are weights to cut at, patterns that don't cover the weights, effects, or a
        stage that exceeds its device's memory.
    """
    effect = next((e for e in program.block.walk() if e.effects), None)
    if effect is not None:
        raise StrategyError(
            f"pipeline: {program.name} has an effect, {effect.op} ({effect.where}), and stages may run it several "
            "times. Leave it out, or run the step without pipeline="
        )
    chosen = choose_stages(program, pipeline, measured, divided)
    program, weights = chosen.cut.program, tuple(chosen.homes)
    parts = find_parts(program)
    homes = chosen.homes | other_homes(program, parts, chosen.homes)
    parts = untied(parts, homes, pipeline.count)
    splits = pipeline.scheduled(pipeline.microbatch_count).splits_backward
    labels = label_parts(parts, homes, pipeline.count, splits_backward=splits)
    if pipeline.remat:
        parts, labels = with_remat(parts, labels, pipeline.count)
    division = divided.within(chosen.cut).follow(parts)
    loads = stage_loads(parts, labels, homes, pipeline.places, division)
    plan = _plan(program, pipeline, weights, homes, loads, division, measured)
    statistics = parts.step.params.get("statistics", ())
    plan = dataclasses.replace(plan, statistics=statistics, tensor=divided.devices)
    staged = StageCutter(program, parts, labels, homes, weights, pipeline, division.axes).run()
    if isinstance(pipeline.rule, AsynchronousRule):
        staged, plan = _without_flush(staged, program, plan, pipeline, measured)
    _check_memory(plan, measured)
    return dataclasses.replace(staged, inputs=chosen.cut.inputs, outputs=chosen.cut.outputs), plan


def _without_flush(
    staged: StagedStep, program: Program, plan: PipelinePlan, pipeline: Pipeline, measured: Measurements
) -> tuple[StagedStep, PipelinePlan]:
    """Returns the step and its plan where minibatches follow one another without a flush."""
    rule = pipeline.rule
    assert isinstance(rule, AsynchronousRule), "it has no flush"
    plan = dataclasses.replace(plan, statistics=())
    slack = pipeline.slack
    if slack is None:
        slack = fitting_slack(plan, choose_slack(plan.places, stage_times(_later(plan, 0))), measured.memory)
    staged = without_flush(staged, program, plan.places, stashes=rule.stashes, slack=slack)
    assert staged.asynchronous is not None, "it has just been made"
    calls = staged.asynchronous.calls
    plan = dataclasses.replace(plan, updates=calls.updates, last=calls.last, slack=slack)
    if not rule.predicts:
        return staged, plan
    ahead = pipeline.ahead or steps_ahead(calls, stage_times(plan))
    return with_prediction(staged, ahead), dataclasses.replace(plan, ahead=tuple(ahead))


def fitting_slack(plan: PipelinePlan, asked: int, memory: int | None) -> int:
    """Returns `asked` minibatches of slack, or as many as devices of so many bytes have room for."""
    if memory is None:
        return asked
    fits = (slack for slack in range(asked, 0, -1) if max(pipeline_memory(_later(plan, slack))) <= memory)
    return next(fits, 0)


def _later(plan: PipelinePlan, slack: int) -> PipelinePlan:
    calls = Calls.soonest(plan.places, slack=slack)
    return dataclasses.replace(plan, updates=calls.updates, last=calls.last, slack=slack)


def _plan(
    program: Program,
    pipeline: Pipeline,
    weights: Sequence[Var],
    homes: Mapping[Var, int],
    loads: Sequence[StageLoad],
    division: Division,
    measured: Measurements,
) -> PipelinePlan:
    paths = {v: leaf.path for v, leaf in zip(program.block.inputs, program.inputs, strict=True)}
    rates, stages = measured.stages, []
    for k, load in enumerate(loads):
        stages.append(
            StagePlan(
                devices=pipeline.places[k],
                weights=tuple(paths[v] for v in weights if homes[v] == k),
                seconds={} if rates is None else load.seconds(rates),
                update_s=0.0 if rates is None else rates.seconds(0.0, 2 * load.state + load.gradient),
                flops=sum(load.flops.values()),
                ahead_bytes=load.ahead,
                back_bytes=load.back,
                state_bytes=load.state + sum(load.copies.values()),
                gradient_bytes=load.gradient,
                weight_bytes=sum(held_bytes(v, division) for v in weights if homes[v] == k),
                activation_bytes=load.activation,
                exchanged_bytes=round(sum(load.exchanged.values())),
                exchanges=sum(load.calls.values()),
            )
        )
    return PipelinePlan(
        schedule=pipeline.schedule,
        microbatches=pipeline.microbatch_count,
        stages=tuple(stages),
        stages_per_device=pipeline.chunks,
        remat=bool(pipeline.remat),
        tied_bytes=sum(load.tied for load in loads),
        send_byte_s=0.0 if rates is None else rates.send_byte_s,
    )


def _check_memory(plan: PipelinePlan, measured: Measurements) -> None:
    """Raises StrategyError for a device that can't hold its stages."""
    for device, size in enumerate(pipeline_memory(plan)):
        if measured.memory is not None and size > measured.memory:
            stage = next(k for k, stage in enumerate(plan.stages) if device in stage.devices)
            own = plan.stages[stage]
            raise StrategyError(
                f"pipeline: stage {stage} needs {format_bytes(size)}, and its device has "
                f"{format_bytes(measured.memory)}: its state takes {format_bytes(own.state_bytes)}, gradients "
                f"{format_bytes(own.gradient_bytes)}, a microbatch's activations {format_bytes(own.activation_bytes)}. "
                "Give more stages or microbatches, schedule='1f1b', or remat=True"
            )
