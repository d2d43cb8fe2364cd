"""Stages of the step are on devices of their own, through which microbatches follow one another (`pipeline=`)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from autopar import jax_compat
from autopar.collection import paused_collection
from autopar.compile import Analysed, Pass, analyze_program, decide, run_passes
from autopar.cost.rates import UNMEASURED, Measurements
from autopar.errors import StrategyError
from autopar.ir.bound_plan import BoundPlan
from autopar.ir.local import NotLocal
from autopar.ir.options import Options
from autopar.ir.pipeline import Pipeline
from autopar.ir.program import Program, Var, known
from autopar.ir.stage_timeline import stage_timeline
from autopar.measure.stage_rates import first_rates, profiled_rates
from autopar.passes.localizing.tensor import localize_stages
from autopar.passes.split_pipeline import split_pipeline
from autopar.passes.staging.loads import DividedLeaves
from autopar.passes.staging.stages import Reference, microbatch_counts, preferred, reference_counts, search_pipeline
from autopar.run.entry import Entry
from autopar.run.kept_placements import KeptArguments
from autopar.run.planner import Planner
from autopar.run.runner import Runner
from autopar.tables.leaf import ArrayHome, Home
from autopar.tables.staged import StageHome, StagePlace, is_staged
from autopar.ways.way import Way, in_microbatches, lifting, rewriting

if TYPE_CHECKING:
    from autopar.planning.check import Check
    from autopar.planning.verify import Verification
    from autopar.state.init import Maker


class InStages(Way):
    """A pipeline, with a flush or without (asynchronous stages)."""

    @staticmethod
    def takes(options: Options) -> bool:
        """Takes pipelines."""
        return options.pipeline is not None

    @property
    def pipeline(self) -> Pipeline:
        """Returns the pipeline as it is asked for."""
        assert self.options.pipeline is not None, "a pipeline is asked for"
        return self.options.pipeline

    @property
    def defers(self) -> bool:
        """Tables are dense."""
        return False

    @property
    def divides(self) -> bool:
        """Microbatches divide the batch."""
        return True

    def passes(self, bound: BoundPlan, measured: Measurements = UNMEASURED) -> tuple[Pass, ...]:
        """Cuts the step into the programs of stages."""
        made = [*self._updated_once(bound), ("split_pipeline", partial(self._split_pipeline, measured))]
        if self.options.tensor > 1:
            made.append(("localize_tensor", rewriting(self._localize)))
        return tuple(made)

    def _updated_once(self, bound: BoundPlan) -> tuple[Pass, ...]:
        own = self.pipeline.statistics == "microbatch" or self.pipeline.is_asynchronous
        return *lifting(bound), ("split_update", rewriting(partial(in_microbatches, own_statistics=own)))

    def _split_pipeline(
        self, measured: Measurements, program: Program, bound: BoundPlan
    ) -> tuple[Program, BoundPlan, str]:
        staged, plan = split_pipeline(program, self.pipeline, measured, _divided(program, bound))
        plan = dataclasses.replace(plan, candidates=self.options.candidates)
        program = dataclasses.replace(program, staged=staged)
        return program, bound.noting(pipeline=plan), f"{len(staged.programs)} programs for {len(plan.stages)} stages"

    def _localize(self, program: Program, bound: BoundPlan) -> tuple[Program, str]:
        try:
            staged, note = localize_stages(known(program.staged), bound, self.options.tensor)
        except NotLocal as error:
            raise StrategyError(
                f"pipeline: products of {program.name} can't be divided over the devices of a stage: {error}. Leave "
                "them whole: a mesh without a tensor axis, or strategy='allreduce'"
            ) from error
        return dataclasses.replace(program, staged=staged), note

    # --- what is measured and chosen ---

    def measured(self, planner: Planner, analysed: Analysed, example: Sequence[Any] | None) -> Measurements:
        """Returns the devices' memory and rates; with `profile` the rates of this very step, as the first process has
        them."""
        machine = planner.machine
        found = Measurements(memory=machine.memory_bytes, stages=None if machine.stages is None else machine.stages())
        if not self.pipeline.profile or found.stages is None:
            return found
        program, _ = self._cut(analysed, UNMEASURED)
        block = next(e for e in program.block.equations if e.op == "ap.microbatches").bodies[0]
        devices = [device for place in planner.stage_devices for device in place.devices]
        rates = profiled_rates(found.stages, block, self.options.microbatches, devices)
        if planner.processes is not None:
            rates = first_rates(planner.processes, rates)
        return dataclasses.replace(found, stages=rates)

    def settled(self, planner: Planner, program: Program) -> Way:
        """Returns the way with a pipeline that leaves nothing to choose.

        Slack is chosen where links join processes. Those within a process are as fast as its memory: what seems slow is
        a busy machine, and slack would change what is trained for nothing.
        """
        if self.pipeline.is_asynchronous and self.pipeline.slack is None and planner.processes is None:
            at_once = dataclasses.replace(self.pipeline, slack=0)
            return InStages(dataclasses.replace(self.options, pipeline=at_once)).settled(planner, program)
        if not self.pipeline.is_open:
            return self
        return self.chosen(program, lambda way, analysed: way.measured(planner, analysed, None))

    def chosen(self, program: Program, measure: Callable[[InStages, Analysed], Measurements]) -> InStages:
        """Chooses stages, schedule and microbatches, by the step as one or two numbers of microbatches cut it.

        Args:
          program: The traced step.
          measure: Gives rates and memory of the devices, for one of these.
        """
        counts = microbatch_counts(analyze_program(program, self).program, self.pipeline)
        references: dict[int, Reference] = {}
        found: list[Measurements] = []
        for count in reference_counts(counts):
            way = InStages(dataclasses.replace(self.options, microbatches=count))
            analysed = analyze_program(program, way)
            found.append(measure(way, analysed))
            cut, bound = way._cut(analysed, found[-1])
            references[count] = Reference(cut, _divided(cut, bound), found[-1].stages)
        candidates = search_pipeline(references, self.pipeline, found[0].memory, self.options.stage_devices, counts)
        is_measured = all(each.stages is not None for each in found)
        best = preferred(candidates).pipeline
        options = dataclasses.replace(
            self.options,
            pipeline=best,
            microbatches=best.microbatch_count,
            candidates=tuple((str(c), c.seconds) for c in candidates) if is_measured else (),
        )
        return InStages(options)

    def _cut(self, analysed: Analysed, measured: Measurements) -> tuple[Program, BoundPlan]:
        """Returns the program as `split_update` cuts it, and the plan so far."""
        with paused_collection():
            bound, _ = decide(analysed, self, measured)
            program, bound, _ = run_passes(self._updated_once(bound), analysed.program, bound)
            return program, bound

    # --- what it is run by ---

    may_follow = False

    def needs_mpi(self, planner: Planner) -> tuple[str, str] | None:
        """Messages between processes do."""
        if planner.processes is None:
            return None
        return "stages on several processes", "give the stages devices of one process, mesh="

    def runner(self, entry: Entry) -> Runner:
        """Runs tasks on the stages' devices. With stages on several processes new leaves are on those of their stage,
        all other results everywhere."""
        from autopar.run.asynchronous import AsynchronousRunner
        from autopar.run.pipeline import PipelineRunner

        assert entry.compiled.plan.pipeline is not None, "stages are planned"
        pipeline = entry.compiled.plan.pipeline.pipeline
        staged = known(entry.compiled.program.staged)
        devices, analysed = entry.stage_devices[: pipeline.devices], entry.compiled.analysed
        given = devices, entry.out_tree, entry.donate, KeptArguments(analysed, staged)
        if staged.asynchronous is not None:
            return AsynchronousRunner(staged, analysed.new_states, analysed.echoes, *given)
        schedule = pipeline.scheduled(staged.microbatches)
        wanted: dict[Var, Sequence[int]] = {}
        if len({device.process_index for device in devices}) > 1:
            arguments = {v for leaf in staged.inputs for v in (leaf if isinstance(leaf, tuple) else (leaf,))}
            wanted = dict.fromkeys((v for v in staged.results if v not in arguments), range(schedule.devices))
            wanted |= {v: schedule.places[stage] for v, stage in staged.new_leaves.items() if v in wanted}
        return PipelineRunner(staged, stage_timeline(staged, schedule, wanted), *given)

    def homes(self, entry: Entry) -> Mapping[int, Home]:
        """Returns where leaves are, or their layers."""
        return {k: StageHome(p) if is_staged(p) else ArrayHome(p[0].sharding) for k, p in _leaves(entry).items()}

    def maker(self, entry: Entry, traced: Any, numbers: Sequence[int | None]) -> Maker | None:
        """Makes each leaf on its stage's devices."""
        from autopar.state.init import StageMaker

        leaves = _leaves(entry)
        if not leaves:
            return None
        places = [() if k is None else leaves.get(k, ()) for k in numbers]
        make, nowhere = jax_compat.jaxpr_as_fun(traced.jaxpr), [None] * len(numbers)
        return StageMaker(make, None, None, nowhere, jax_compat.rounds_by_shape(), traced.jaxpr.out_avals, places)

    # --- what it is compared with ---

    def replayed(self, entry: Entry, leaves: Sequence[Any], steps: int) -> Verification | None:
        """Compares a pipeline without a flush with its tasks, one after the other."""
        from autopar.planning.replay import compare_replay

        is_asynchronous = known(entry.compiled.program.staged).asynchronous is not None
        return compare_replay(entry, leaves, steps) if is_asynchronous else None

    def sends(self, entry: Entry, name: str) -> Check:
        """Compares what devices send each other, and within stages."""
        from autopar.planning.check import compare_pipeline

        return compare_pipeline(entry, name)


def _leaves(entry: Entry) -> dict[int, tuple[StagePlace, ...]]:
    """Returns leaves of the state by number -> where they are, or their layers; scalars and random keys are
    everywhere."""
    assert entry.compiled.plan.pipeline is not None, "stages are planned"
    staged = known(entry.compiled.program.staged)
    places = entry.compiled.plan.pipeline.places
    leaves: dict[int, tuple[StagePlace, ...]] = {}
    for k, leaf in enumerate(staged.inputs):
        parts = leaf if isinstance(leaf, tuple) else (leaf,)
        if all(v in staged.homes and v.shape and not jax_compat.is_key(v.dtype) for v in parts):
            devices = [[entry.stage_devices[n] for n in places[staged.homes[v]]] for v in parts]
            ends = tuple(itertools.accumulate(v.shape[0] for v in parts))
            leaves[k] = StagePlace.of_parts(devices, ends, staged.divided.get(parts[0]), entry.stage_devices)
    return leaves


def _divided(program: Program, bound: BoundPlan) -> DividedLeaves:
    """Returns the leaves that are divided over the devices of a tensor axis."""
    if bound.plan.tensor is None:
        return DividedLeaves()
    return DividedLeaves(bound.plan.tensor.devices, {program.block.inputs[k]: a for k, a in bound.tensors.items()})
