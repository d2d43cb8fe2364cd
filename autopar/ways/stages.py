"""Stages of the step on devices of their own, through which microbatches pass (`pipeline=`)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import jax
import numpy as np

from autopar import jax_compat
from autopar.backends.devices import Devices, StageDevice
from autopar.compile import Analysed, Pass, analyze_program, decide, run_passes
from autopar.cost.rates import UNMEASURED, Measurements
from autopar.errors import ArgumentsError, StrategyError
from autopar.garbage import paused_collection
from autopar.ir.local import NotLocal
from autopar.ir.pipeline import AUTO, Pipeline
from autopar.ir.program import Program, Var, known
from autopar.ir.program_plan import ProgramPlan
from autopar.ir.strategy import asks_for_hosts
from autopar.ir.timeline import stage_timeline
from autopar.jax_types import Leaf
from autopar.launch.group import StoreGroup
from autopar.measure.figures import Machine, memory_of
from autopar.measure.stage_rates import first_rates, profiled_rates, stage_rates_of
from autopar.passes.localize_tensor import localize_stages
from autopar.passes.split_pipeline import split_pipeline
from autopar.passes.staging.loads import DividedLeaves
from autopar.passes.staging.stages import Reference, microbatch_counts, preferred, reference_counts, search_pipeline
from autopar.run.kept_placements import KeptArguments
from autopar.run.planned_step import PlannedStep, Runner
from autopar.run.planner import Planner
from autopar.run.request import StepRequest
from autopar.tables.leaf import ArrayHome, Home
from autopar.tables.staged import StageHome, StagePart, is_staged
from autopar.ways.way import Way, in_microbatches, lifting, rewriting

if TYPE_CHECKING:
    from jax.stages import Traced

    from autopar.planning.check import Check
    from autopar.planning.verify import Verification
    from autopar.state.init import Maker


@dataclass(frozen=True, eq=False, kw_only=True)
class InStages(Way):
    """A pipeline, with a flush after each step or without (asynchronous stages)."""

    pipeline: Pipeline  #: The pipeline that the user asked for, or the chosen one.
    candidates: tuple[tuple[str, float], ...] = ()  #: What it was chosen from, as text, with predicted seconds a step.
    stage_devices: Sequence[StageDevice] = ()  #: Devices of stages, used or not; (): these devices aren't here.
    count: int = 1  #: Number of devices.
    group: StoreGroup | None = None  #: The processes of the devices.

    @classmethod
    def check(cls, request: StepRequest) -> None:
        """Checks that there are devices for all stages, and that this process has some of them."""
        super().check(request)
        pipeline, options, tensor = request.pipeline, request.planner.options, request.devices.tensor
        if not isinstance(pipeline, Pipeline):
            raise ArgumentsError(f"pipeline={pipeline!r}: give autopar.Pipeline(stages=...)")
        there = request.devices.mesh.size // tensor
        if pipeline.stages != AUTO and pipeline.devices > there:
            divided = f" times the {tensor} of the tensor axis" * (tensor > 1)
            raise ArgumentsError(
                f"pipeline: {pipeline.count} stages need {pipeline.devices} devices, and there are {there}{divided}"
            )
        if asks_for_hosts(options.strategy):
            raise ArgumentsError("pipeline: tables on hosts have no stage; leave them to the devices")
        others = {"microbatches": options.microbatches > 1, "plan": options.plan is not None}
        named = [f"{name}=" for name, is_given in others.items() if is_given]
        if named:
            raise ArgumentsError(
                f"{' and '.join(named)} given together with pipeline=, which decides that. Leave it out"
            )
        devices = _stage_devices(pipeline, request.devices)
        for each in devices:
            if len({device.process_index for device in each.devices}) > 1:
                raise ArgumentsError(
                    f"pipeline: the devices of the tensor axis, {', '.join(map(str, each.devices))}, are of several "
                    "processes. Within a stage products are divided over devices of one process; give a mesh of such "
                    "rows"
                )
        own = {device.process_index for device in devices}
        if jax.process_index() not in own:
            raise ArgumentsError(
                f"pipeline: its {pipeline.devices} devices are those of processes {', '.join(map(str, sorted(own)))}, "
                f"and this is process {jax.process_index()} of {jax.process_count()}. Give more stages or replicas, or "
                "start fewer processes"
            )

    @classmethod
    def planner(cls, request: StepRequest) -> Planner:
        pipeline = request.pipeline
        assert pipeline is not None, "a pipeline is asked for"
        devices = _stage_devices(pipeline, request.devices)
        flat = tuple(device for each in devices for device in each.devices)
        all_ = Devices.of(jax.sharding.Mesh(flat, ("stages",)))
        planner = request.on(request.devices)
        options = replace(planner.options, devices=1, microbatches=pipeline.microbatch_count)
        machine = Machine(memory=partial(memory_of, all_), stages=partial(stage_rates_of, flat, all_.processes))
        way = cls(options, pipeline=pipeline, stage_devices=devices, count=len(devices), group=all_.processes)
        return replace(planner, options=options, machine=machine, devices=None, way_of=way.by)

    def on(self, planner: Planner, devices: int) -> Planner:
        """Returns a planner that gives each of `devices` a stage, or may give it one."""
        options = replace(planner.options, devices=1)
        way = replace(self, options=options, count=devices)
        return replace(planner, options=options, way_of=way.by)

    def processes(self, planner: Planner) -> StoreGroup | None:
        return self.group

    @property
    def choices(self) -> Mapping[str, object]:
        """Leaves out `group`, which follows from `stage_devices`."""
        return {name: value for name, value in super().choices.items() if name != "group"}

    @property
    def defers(self) -> bool:
        return False

    divides = True

    def passes(self, bound: ProgramPlan, measured: Measurements = UNMEASURED) -> tuple[Pass, ...]:
        made = [*self._updated_once(bound), ("split_pipeline", partial(self._split_pipeline, measured))]
        if self.options.tensor > 1:
            made.append(("localize_tensor", rewriting(self._localize)))
        return tuple(made)

    def _updated_once(self, bound: ProgramPlan) -> tuple[Pass, ...]:
        own = self.pipeline.statistics == "microbatch" or self.pipeline.is_asynchronous
        return *lifting(bound), ("split_update", rewriting(partial(in_microbatches, own_statistics=own)))

    def _split_pipeline(
        self, measured: Measurements, program: Program, bound: ProgramPlan
    ) -> tuple[Program, ProgramPlan, str]:
        staged, plan = split_pipeline(program, self.pipeline, measured, _divided(program, bound))
        plan = replace(plan, candidates=self.candidates)
        program = replace(program, staged=staged)
        return program, bound.noting(pipeline=plan), f"{len(staged.programs)} programs for {len(plan.stages)} stages"

    def _localize(self, program: Program, bound: ProgramPlan) -> tuple[Program, str]:
        try:
            staged, note = localize_stages(known(program.staged), bound, self.options.tensor)
        except NotLocal as error:
            raise StrategyError(
                f"pipeline: products of {program.name} can't be divided over the devices of a stage: {error}. Leave "
                "them whole: a mesh without a tensor axis, or strategy='allreduce'"
            ) from error
        return replace(program, staged=staged), note

    # --- what is measured and chosen ---

    def measured(self, planner: Planner, analysed: Analysed, example: Sequence[Leaf] | None) -> Measurements:
        """Returns memory and rates of the devices. With `profile` they are rates of this very step, measured by the
        first process."""
        machine = planner.machine
        found = Measurements(memory=machine.memory_bytes, stages=None if machine.stages is None else machine.stages())
        if not self.pipeline.profile or found.stages is None:
            return found
        program, _ = self._cut(analysed, UNMEASURED)
        block = next(e for e in program.block.equations if e.op == "ap.microbatches").bodies[0]
        devices = [device for each in self.stage_devices for device in each.devices]
        rates = profiled_rates(found.stages, block, self.options.microbatches, devices)
        if planner.processes is not None:
            rates = first_rates(planner.processes, rates)
        return replace(found, stages=rates)

    def resolve(self, planner: Planner, program: Program) -> Way:
        """Returns this way with choices for all that its pipeline leaves to "auto".

        Slack is searched only for stages on several processes. Links within a process are as fast as its memory: one
        that seems slow shows a busy machine, and slack would change the training for nothing.
        """
        if self.pipeline.is_asynchronous and self.pipeline.slack is None and planner.processes is None:
            at_once = replace(self.pipeline, slack=0)
            return replace(self, pipeline=at_once).resolve(planner, program)
        if not self.pipeline.is_open:
            return self
        return self.chosen(program, lambda way, analysed: way.measured(planner, analysed, None))

    def chosen(self, program: Program, measure: Callable[[InStages, Analysed], Measurements]) -> InStages:
        """Chooses stages, schedule and microbatches for a traced program, from the step cut for one or two numbers of
        microbatches. `measure`: returns rates and memory of the devices for one such cut."""
        counts = microbatch_counts(analyze_program(program, self).program, self.pipeline)
        references: dict[int, Reference] = {}
        found: list[Measurements] = []
        for count in reference_counts(counts):
            way = replace(self, options=replace(self.options, microbatches=count))
            analysed = analyze_program(program, way)
            found.append(measure(way, analysed))
            cut, bound = way._cut(analysed, found[-1])
            references[count] = Reference(cut, _divided(cut, bound), found[-1].stages)
        candidates = search_pipeline(references, self.pipeline, found[0].memory, self.count, counts)
        is_measured = all(each.stages is not None for each in found)
        best = preferred(candidates).pipeline
        return replace(
            self,
            options=replace(self.options, microbatches=best.microbatch_count),
            pipeline=best,
            candidates=tuple((str(c), c.seconds) for c in candidates) if is_measured else (),
        )

    def _cut(self, analysed: Analysed, measured: Measurements) -> tuple[Program, ProgramPlan]:
        with paused_collection():
            bound, _ = decide(analysed, self, measured)
            program, bound, _ = run_passes(self._updated_once(bound), analysed.program, bound)
            return program, bound

    # --- what it is run by ---

    may_follow = False

    def needs_mpi(self, planner: Planner) -> tuple[str, str] | None:
        if planner.processes is None:
            return None
        return "stages on several processes", "give the stages devices of one process, mesh="

    def runner(self, planned: PlannedStep) -> Runner:
        """Returns a runner of the stages' tasks. Over several processes a stage's devices get its new leaves, and every
        process gets all other results."""
        from autopar.run.asynchronous import AsynchronousRunner
        from autopar.run.pipeline import PipelineRunner

        assert planned.compiled.plan.pipeline is not None, "stages are planned"
        pipeline = planned.compiled.plan.pipeline.pipeline
        staged = known(planned.compiled.program.staged)
        devices, analysed = self.stage_devices[: pipeline.devices], planned.compiled.analysed
        given = devices, planned.out_tree, planned.donate, KeptArguments(analysed, staged)
        if staged.asynchronous is not None:
            return AsynchronousRunner(staged, analysed.new_states, analysed.echoes, *given)
        schedule = pipeline.scheduled(staged.microbatches)
        wanted: dict[Var, Sequence[int]] = {}
        if len({device.process_index for device in devices}) > 1:
            arguments = {v for leaf in staged.inputs for v in (leaf if isinstance(leaf, tuple) else (leaf,))}
            wanted = dict.fromkeys((v for v in staged.results if v not in arguments), range(schedule.devices))
            wanted |= {v: schedule.stage_devices[stage] for v, stage in staged.new_leaves.items() if v in wanted}
        return PipelineRunner(staged, stage_timeline(staged, schedule, wanted), *given)

    def homes(self, planned: PlannedStep) -> Mapping[int, Home]:
        return {k: StageHome(p) if is_staged(p) else ArrayHome(p[0].sharding) for k, p in self._leaves(planned).items()}

    def maker(self, planned: PlannedStep, traced: Traced, numbers: Sequence[int | None]) -> Maker | None:
        from autopar.state.init import StageMaker

        leaves = self._leaves(planned)
        if not leaves:
            return None
        parts = [() if k is None else leaves.get(k, ()) for k in numbers]
        return StageMaker(traced, None, None, [None] * len(numbers), parts)

    def _leaves(self, planned: PlannedStep) -> dict[int, tuple[StagePart, ...]]:
        """Returns the parts of the state's leaves by index. Scalars and random keys are everywhere, and have none."""
        assert planned.compiled.plan.pipeline is not None, "stages are planned"
        staged = known(planned.compiled.program.staged)
        stage_devices = planned.compiled.plan.pipeline.stage_devices
        leaves: dict[int, tuple[StagePart, ...]] = {}
        for k, leaf in enumerate(staged.inputs):
            parts = leaf if isinstance(leaf, tuple) else (leaf,)
            if all(v in staged.homes and v.shape and not jax_compat.is_key(v.dtype) for v in parts):
                devices = [[self.stage_devices[n] for n in stage_devices[staged.homes[v]]] for v in parts]
                ends = tuple(itertools.accumulate(v.shape[0] for v in parts))
                leaves[k] = StagePart.of_parts(devices, ends, staged.divided.get(parts[0]), self.stage_devices)
        return leaves

    # --- what it is compared with ---

    def replayed(self, planned: PlannedStep, leaves: Sequence[Leaf], steps: int) -> Verification | None:
        """Compares asynchronous stages with their tasks, run one after the other."""
        from autopar.planning.replay import compare_replay

        is_asynchronous = known(planned.compiled.program.staged).asynchronous is not None
        return compare_replay(planned, leaves, steps) if is_asynchronous else None

    def sends(self, planned: PlannedStep, name: str) -> Check:
        from autopar.planning.check import compare_pipeline

        return compare_pipeline(planned, name)


def _stage_devices(pipeline: Pipeline, devices: Devices) -> tuple[StageDevice, ...]:
    rows = devices.mesh.devices
    if devices.tensor_axis is not None:
        rows = np.moveaxis(rows, devices.mesh.axis_names.index(devices.tensor_axis), -1)
    made = [StageDevice(tuple(row)) for row in rows.reshape(-1, devices.tensor)]
    return tuple(made[: None if pipeline.stages == AUTO else pipeline.devices])


def _divided(program: Program, bound: ProgramPlan) -> DividedLeaves:
    if bound.plan.tensor is None:
        return DividedLeaves()
    return DividedLeaves(bound.plan.tensor.devices, {program.block.inputs[k]: a for k, a in bound.tensors.items()})
