"""Data parallelism over the devices of one or several processes, each on its part of the batch. One device is a case of
it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import jax

from autopar.backends.devices import Devices
from autopar.compile import Pass
from autopar.cost.rates import UNMEASURED, Measurements
from autopar.errors import StrategyError
from autopar.ir.local import NotLocal
from autopar.ir.pipeline import AUTO, Pipeline
from autopar.ir.program import Program
from autopar.ir.program_plan import ProgramPlan
from autopar.ir.stacked import StackedProgram
from autopar.passes.localize import localize
from autopar.passes.localize_tensor import localize_tensor
from autopar.passes.place import place
from autopar.passes.pool_bags import pool_bags
from autopar.passes.stack_tables import read_stacks, stack_tables
from autopar.run.devices import DevicesRunner
from autopar.run.planned_step import OneDeviceRunner, PlannedStep, Runner
from autopar.run.planner import Planner
from autopar.run.request import StepRequest
from autopar.tables.leaf import ArrayHome, Home
from autopar.tables.sharded import RowsHome
from autopar.ways.way import Way, in_microbatches, lifting, rewriting


class OnDevices(Way):
    """Data parallelism, with products divided over a tensor axis if the mesh has one."""

    @classmethod
    def planner(cls, request: StepRequest) -> Planner:
        """Returns a planner for all devices. If the user left everything open, it may fall back to a pipeline for a
        state that fits in no other way."""
        planner = request.on(request.devices)
        options = planner.options
        is_open = options.strategy == "auto" and options.plan is None and options.microbatches == 1
        if not is_open or planner.per_device is not None or request.devices.mesh.size == 1:
            return planner
        pipeline = Pipeline(AUTO, AUTO, AUTO, remat=AUTO)
        return replace(planner, in_stages=partial(request.planner_by, pipeline=pipeline))

    def passes(self, bound: ProgramPlan, measured: Measurements = UNMEASURED) -> tuple[Pass, ...]:
        made = list(lifting(bound))
        if bound.shards:
            made.append(("place", rewriting(place)))
        if bound.plan.microbatches > 1:
            made.append(("split_update", rewriting(in_microbatches)))
        if bound.devices * self.options.tensor > 1:
            made.append(("localize", rewriting(partial(_checked, localize))))
        if any(family.bounds.bag_ids for family in bound.families):
            made.append(("pool_bags", pool_bags))
        if bound.tensors:
            made.append(("localize_tensor", rewriting(partial(_checked, localize_tensor))))
        return tuple(made)

    def stacked(self, program: Program, bound: ProgramPlan) -> StackedProgram | None:
        """Stacks tables that are alike; an evaluation reads those in stacks where they are."""
        return (stack_tables if program.new_states else read_stacks)(program, bound, self.analyzed_again)

    def runner(self, planned: PlannedStep) -> Runner:
        """Returns a runner for several devices, or for one. A plan with update logs takes the former even on one."""
        if planned.devices is not None:
            rest = planned.devices, planned.out_tree, planned.donate, planned.run_first
            return DevicesRunner(
                planned.run_stored, planned.compiled, *rest, are_results_whole=planned.are_results_whole
            )
        if planned.compiled.plan.defers:
            return _runs_tables(planned)
        name = getattr(planned.fun, "__name__", type(planned.fun).__name__)
        return OneDeviceRunner(planned.run, planned.compiled.analysed, name, planned.out_tree, planned.donate)

    def table_runner(self, planned: PlannedStep) -> Runner:
        return planned.runner if planned.devices is not None or planned.compiled.plan.defers else _runs_tables(planned)

    def homes(self, planned: PlannedStep) -> Mapping[int, Home]:
        bound, devices, homes = planned.compiled.bound, planned.devices, dict[int, Home]()
        if devices is None:
            return homes
        for k in range(len(bound.placements)):
            layout, axis = bound.layouts.get(k, (None, 0))
            sharding = devices.sharding(*bound.placement(k))
            homes[k] = ArrayHome(sharding) if layout is None else RowsHome(layout, axis, sharding)
        return homes


def _runs_tables(planned: PlannedStep) -> Runner:
    """Returns a runner for tables of autopar's own on one device: a mesh of one."""
    one = Devices.of(jax.make_mesh((1,), ("data",), devices=jax.local_devices()[:1]), None)
    return DevicesRunner(planned.run_on_tables, planned.compiled, one, planned.out_tree, planned.donate)


def _checked(
    run: Callable[[Program, ProgramPlan], tuple[Program, str]], program: Program, bound: ProgramPlan
) -> tuple[Program, str]:
    """Runs a pass and turns `NotLocal` into the user's error."""
    try:
        return run(program, bound)
    except NotLocal as error:
        what = f"{program.name} can't be written as the program of one device of several: {error}"
        raise StrategyError(what) from error
