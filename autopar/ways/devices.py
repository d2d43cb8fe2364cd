"""The devices of one process, or of several, run the whole step together: each on its part of the batch. One device is
a case of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial

import jax

from autopar.backends.devices import Devices
from autopar.compile import Pass
from autopar.cost.rates import UNMEASURED, Measurements
from autopar.ir.bound_plan import BoundPlan
from autopar.ir.local import NotLocal
from autopar.ir.pipeline import AUTO, Pipeline
from autopar.ir.program import Program
from autopar.passes.localize import localize
from autopar.passes.localizing.tensor import localize_tensor
from autopar.passes.place import place
from autopar.run.asked import Asked
from autopar.run.devices import DevicesRunner
from autopar.run.entry import Entry
from autopar.run.one_device import OneDeviceRunner
from autopar.run.planner import Planner
from autopar.run.runner import Runner
from autopar.tables.leaf import ArrayHome, Home
from autopar.tables.sharded import RowsHome
from autopar.ways.way import Way, in_microbatches, lifting, rewriting, without_own_program


class OnDevices(Way):
    """Data parallelism, with products divided over a tensor axis, if there is one."""

    @classmethod
    def planner(cls, asked: Asked) -> Planner:
        """Plans for all devices; in stages, if all is left to autopar, for a state that fits them in no other way."""
        planner = asked.on(asked.devices)
        options = planner.options
        is_open = options.strategy == "auto" and options.plan is None and options.microbatches == 1
        if not is_open or planner.per_device is not None or asked.devices.mesh.size == 1:
            return planner
        pipeline = Pipeline(AUTO, AUTO, AUTO, remat=AUTO)
        return dataclasses.replace(planner, in_stages=partial(asked.planner_by, pipeline=pipeline))

    def passes(self, bound: BoundPlan, measured: Measurements = UNMEASURED) -> tuple[Pass, ...]:
        """Lifts tables, divides the batch into microbatches, and writes the program of each device."""
        made = list(lifting(bound))
        if bound.shards:
            made.append(("place", rewriting(place)))
        if bound.plan.microbatches > 1:
            made.append(("split_update", rewriting(in_microbatches)))
        if bound.devices * self.options.tensor > 1:
            made.append(("localize", rewriting(_localize)))
        if bound.tensors:
            made.append(("localize_tensor", rewriting(_localize_tensor)))
        return tuple(made)

    def runner(self, entry: Entry) -> Runner:
        """Runs the step on several devices, or on one; an update log's tables are run as on several."""
        if entry.devices is not None:
            rest = entry.devices, entry.out_tree, entry.donate, entry.run_first
            return DevicesRunner(entry.run_stored, entry.compiled, *rest, are_results_whole=entry.are_results_whole)
        if entry.compiled.plan.defers:
            return _runs_tables(entry)
        name = getattr(entry.fun, "__name__", type(entry.fun).__name__)
        return OneDeviceRunner(entry.run, entry.compiled.analysed, name, entry.out_tree, entry.donate)

    def table_runner(self, entry: Entry) -> Runner:
        """Runs tables on one device as on several."""
        return entry.runner if entry.devices is not None or entry.compiled.plan.defers else _runs_tables(entry)

    def homes(self, entry: Entry) -> Mapping[int, Home]:
        """Returns shards of several devices."""
        bound, devices, planned = entry.compiled.bound, entry.devices, dict[int, Home]()
        if devices is None:
            return planned
        for k in range(len(bound.placements)):
            layout, axis = bound.layouts.get(k, (None, 0))
            sharding = devices.sharding(*bound.place(k))
            planned[k] = ArrayHome(sharding) if layout is None else RowsHome(layout, axis, sharding)
        return planned


def _runs_tables(entry: Entry) -> Runner:
    """Returns what calls a step on one device where arguments or results are tables of autopar's own."""
    one = Devices.of(jax.make_mesh((1,), ("data",), devices=jax.local_devices()[:1]), None)
    return DevicesRunner(entry.run_on_tables, entry.compiled, one, entry.out_tree, entry.donate)


def _localize(program: Program, bound: BoundPlan) -> tuple[Program, str]:
    try:
        return localize(program, bound)
    except NotLocal as error:
        raise without_own_program(program, error) from error


def _localize_tensor(program: Program, bound: BoundPlan) -> tuple[Program, str]:
    try:
        return localize_tensor(program, bound)
    except NotLocal as error:
        raise without_own_program(program, error) from error
