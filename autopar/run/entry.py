"""`Entry`: what is known of a step at one set of shapes, and the functions that it becomes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from autopar import jax_compat
from autopar.backends.across import local
from autopar.backends.background import Compilation
from autopar.backends.clients import Clients
from autopar.backends.devices import Devices
from autopar.backends.emit import emit
from autopar.backends.fallback import with_fallback, without_fallback
from autopar.backends.spread import mapped, on_ordinary_arrays, spread
from autopar.backends.stage_device import StageDevice
from autopar.compile import Compiled
from autopar.ir.bound_plan import BoundPlan
from autopar.ir.options import Options
from autopar.ir.pipeline import Pipeline, StagedStep
from autopar.ir.program import Program, Var
from autopar.ir.sizes import HEADROOM
from autopar.ir.stage_timeline import stage_timeline
from autopar.measure.alpha import id_inputs
from autopar.measure.machine import NOWHERE, Machine
from autopar.passes.analyze_batch import parameters_of
from autopar.run.arguments import Call, States
from autopar.run.asynchronous import AsynchronousRunner
from autopar.run.buffers import is_traced
from autopar.run.devices import DevicesRunner
from autopar.run.exchanges import ElasticRunner, RingRunner
from autopar.run.hosts import HostRunner
from autopar.run.kept_placements import KeptArguments
from autopar.run.means import MeansRunner
from autopar.run.one_device import OneDeviceRunner
from autopar.run.pipeline import PipelineRunner
from autopar.run.replicas import ReplicaRunner
from autopar.run.runner import Runner
from autopar.run.served import ServedRunner
from autopar.run.touched_rows import TouchedRows
from autopar.sync import Async, Replicated
from autopar.tables.kinds import materialize
from autopar.tables.staged import StagePlace
from autopar.ways.way import Way


@dataclass(eq=False)
class Entry:
    """What is known of the step at one set of shapes.

    `example` holds the leaves of the first call's batch that ids depend on (None for all others). `way` is how the step
    is run, with the options that it was compiled by. `fun` is what was traced, the user's step or one made of it;
    `notes` are what `explain` says of that. `stage_devices` are those of a pipeline's stages, `clients` those that have
    a replica each. `larger` compiles the same step with larger capacities, once batches have come near those of this
    one.
    """

    call: Call
    states: States
    compiled: Compiled
    way: Way
    jaxpr: Any
    out_tree: Any
    trace_s: float = 0.0
    example: Sequence[Any] | None = None

    devices: Devices | None = None
    donate: bool = True
    machine: Machine = NOWHERE
    stage_devices: Sequence[StageDevice] = ()
    headroom: float = HEADROOM
    fun: Callable[..., Any] | None = None
    notes: Sequence[str] = ()
    clients: Clients | None = None
    larger: Compilation[Entry] | None = field(default=None, init=False)

    @property
    def options(self) -> Options:
        """Returns what the user chose for the whole step, and what was chosen for it."""
        return self.way.options

    def takes(self, call: Call) -> bool:
        """Whether this is the plan for a call, too: a state may come as an array or as a Table, but what is only read
        is planned for where it is."""
        layouts = call.read_layouts(self.parameters, self.compiled.plan.devices)
        pairs = zip(self.compiled.analysed.inputs, layouts, strict=True)
        same = (a.role == "state" or a.layout == b for a, b in pairs)
        return self.call.key == call.key and all(same)

    @functools.cached_property
    def parameters(self) -> frozenset[int]:
        """The inputs of an evaluation that are no batch."""
        return parameters_of(self.compiled.analysed, self.options.batch_axis)

    @functools.cached_property
    def lasting_shapes(self) -> Any:
        """Shapes of the arguments that outlive a call: those that hold state, or, where none does, the largest one."""
        inputs, arguments = iter(self.compiled.analysed.inputs), self.call.arguments
        lasting = [a for a in arguments if any([next(inputs).role == "state" for _ in a.types])]
        lasting = lasting or sorted(arguments, key=lambda a: sum(t.size for t in a.types))[-1:]
        return [(a.name, a.treedef, [t.shape for t in a.types]) for a in lasting]

    @property
    def keeps_tables(self) -> bool:
        """Whether the step returns state as tables of autopar's own."""
        return self.compiled.plan.on_hosts or self.compiled.plan.defers

    def example_of(self, leaves: Sequence[Any]) -> Sequence[Any] | None:
        """Concrete leaves of what is not state and what ids depend on, to measure alpha on; None where there is none.

        Global arrays are kept whole, so that measuring once more needs no other process; NumPy's are copied.
        """
        program = self.compiled.analysed
        kept = [
            local(x.copy() if isinstance(x, np.ndarray) else x)
            if wanted and input_.role != "state" and not is_traced(x) and hasattr(x, "__array__")
            else None
            for x, wanted, input_ in zip(leaves, id_inputs(program), program.inputs, strict=True)
        ]
        return kept if any(x is not None for x in kept) else None

    @functools.cached_property
    def run(self) -> Callable[..., Sequence[Any]]:
        """The planned step on flat arrays. A step of which nothing is lifted is run as JAX traced it."""
        bound = self.compiled.bound
        if bound.plan.defers:  # ordinary arrays have no rows that wait
            return self.plain
        if self.devices is not None:
            return on_ordinary_arrays(self.run_stored, bound, self.compiled.analysed, self.devices)
        return self._typed(emit(self.compiled.program.block)) if bound.rewrites else self.plain

    def _typed(self, run: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
        """With the plain step's types, weak or strong: a row that is written back takes its table's type."""
        types = [a.type for a in self.compiled.analysed.block.outputs]

        def typed_run(*inputs: Any) -> Sequence[Any]:
            outputs = run(*inputs)  # and perhaps a flag
            pairs = zip(outputs, types, strict=False)
            typed = [_weak(x) if getattr(t, "weak_type", False) else jax_compat.strong(x) for x, t in pairs]
            return [*typed, *outputs[len(types) :]]

        return typed_run

    @functools.cached_property
    def run_stored(self) -> Callable[..., Sequence[Any]]:
        """The planned step on several devices, on flat arrays as they are stored."""
        assert self.devices is not None, "one device stores arrays as they are"
        bound, program, analysed = self.compiled.bound, self.compiled.program, self.compiled.analysed
        if not bound.rewrites:
            return spread(self.plain, bound, analysed, self.devices)
        run = self._emitted(program, bound)
        if self.compiled.fallback is not None:
            run = with_fallback(run, self._emitted(self.compiled.fallback, bound.without_limits()), program)
        return spread(self._typed(run), bound, analysed, self.devices)

    @functools.cached_property
    def run_first(self) -> Callable[..., Sequence[Any]] | None:
        """The planned step without its fallback, None if it has none (`LateFallback`)."""
        bound, program, analysed = self.compiled.bound, self.compiled.program, self.compiled.analysed
        if self.compiled.fallback is None or self.devices is None:
            return None
        run = without_fallback(self._emitted(program, bound), program)
        return spread(self._typed(run), bound, analysed, self.devices)

    def _emitted(self, program: Program, bound: BoundPlan) -> Callable[..., Sequence[Any]]:
        assert self.devices is not None, "one device needs no backends"
        return emit(program.block) if program.local is None else mapped(program, bound, self.devices)

    @functools.cached_property
    def runner(self) -> Runner:
        """Who calls the planned step."""
        if self.clients is None:
            return self.own_runner
        if isinstance(self.options.sync, Async):
            return ServedRunner(self.compiled, self.options.sync, self.clients, self.out_tree)
        return replica_runner(self, self.clients)

    @functools.cached_property
    def own_runner(self) -> Runner:
        """Who calls it on one client, or on all processes that train one state."""
        if self.compiled.plan.pipeline is not None:
            return self._pipeline_runner(self.compiled.plan.pipeline.pipeline)
        if self.compiled.plan.on_hosts:
            return HostRunner(self.compiled, self.way, self.out_tree, self.donate)
        if self.devices is not None:
            given = self.compiled, self.devices, self.out_tree, self.donate
            return DevicesRunner(self.run_stored, *given, self.run_first, are_results_whole=self.are_results_whole)
        if self.compiled.plan.defers:
            return self._one_device_runner
        name = getattr(self.fun, "__name__", type(self.fun).__name__)
        return OneDeviceRunner(self.run, self.compiled.analysed, name, self.out_tree, self.donate)

    @property
    def are_results_whole(self) -> bool:
        """Whether results by example are whole on every process."""
        return self.options.are_results_whole(self.compiled.analysed)

    @functools.cached_property
    def stage_leaves(self) -> Mapping[int, tuple[StagePlace, ...]]:
        """Of a pipeline, leaves of the state by number -> where they are, or their layers; scalars and random keys are
        everywhere."""
        if self.compiled.plan.pipeline is None:
            return {}
        staged: StagedStep = self.compiled.program.staged
        places = self.compiled.plan.pipeline.places
        leaves: dict[int, tuple[StagePlace, ...]] = {}
        for k, leaf in enumerate(staged.inputs):
            parts = leaf if isinstance(leaf, tuple) else (leaf,)
            if all(v in staged.homes and v.shape and not jax_compat.is_key(v.dtype) for v in parts):
                devices = [[self.stage_devices[n] for n in places[staged.homes[v]]] for v in parts]
                ends = itertools.accumulate(v.shape[0] for v in parts)
                leaves[k] = StagePlace.of_parts(devices, tuple(ends), staged.divided.get(parts[0]), self.stage_devices)
        return leaves

    def _pipeline_runner(self, pipeline: Pipeline) -> Runner:
        """With stages on several processes new leaves are on those of their stage, all other results everywhere."""
        staged: StagedStep = self.compiled.program.staged
        devices, analysed = self.stage_devices[: pipeline.devices], self.compiled.analysed
        given = devices, self.out_tree, self.donate, KeptArguments(analysed, staged)
        if staged.asynchronous is not None:
            return AsynchronousRunner(staged, analysed.new_states, analysed.echoes, *given)
        schedule = pipeline.scheduled(staged.microbatches)
        wanted: dict[Var, Sequence[int]] = {}
        if len({device.process_index for device in devices}) > 1:
            arguments = {v for leaf in staged.inputs for v in (leaf if isinstance(leaf, tuple) else (leaf,))}
            wanted = dict.fromkeys((v for v in staged.results if v not in arguments), range(schedule.devices))
            wanted |= {v: schedule.places[stage] for v, stage in staged.new_leaves.items() if v in wanted}
        return PipelineRunner(staged, stage_timeline(staged, schedule, wanted), *given)

    @functools.cached_property
    def table_runner(self) -> Runner:
        """The same on one device where an argument is a table of autopar's own, or a result is to be."""
        elsewhere = self.devices is not None or self.compiled.plan.on_hosts or self.options.pipeline is not None
        if elsewhere or self.clients is not None:
            return self.runner
        return self._one_device_runner

    @functools.cached_property
    def _one_device_runner(self) -> Runner:
        """Calls it where an argument or result is a table of autopar's own."""
        one = Devices.of(jax.make_mesh((1,), ("data",), devices=jax.local_devices()[:1]), None)
        run = self._typed(emit(self.compiled.program.block)) if self.compiled.plan.defers else self.run
        return DevicesRunner(run, self.compiled, one, self.out_tree, self.donate)

    def run_called(self, *leaves: Any) -> list[Any]:
        """The planned step as it is called, on flat arrays and tables, of which none is donated. Collective."""
        states = {k for k, input_ in enumerate(self.compiled.analysed.inputs) if input_.role == "state"}
        copies = [jax.numpy.copy(x) if k in states and isinstance(x, jax.Array) else x for k, x in enumerate(leaves)]
        results = jax.tree.leaves(self.runner(copies))
        return list(materialize(results, copy=False) if self.compiled.plan.on_hosts else results)

    @functools.cached_property
    def plain(self) -> Callable[..., Sequence[Any]]:
        """The step as JAX traced it, on flat arrays."""
        return jax_compat.jaxpr_as_fun(self.jaxpr)


def replica_runner(entry: Entry, clients: Clients) -> ReplicaRunner:
    """Makes what calls a client's step, by its own runner, and averages behind it."""
    compiled, sync, plan = entry.compiled, entry.options.sync, entry.compiled.plan.sync
    assert isinstance(sync, Replicated) and plan is not None, "clients have replicas"
    touched = TouchedRows(compiled, plan)
    given = entry.own_runner, sync, plan, touched, clients, compiled.analysed, entry.out_tree, entry.plain
    if not entry.options.is_asynchronous:
        return MeansRunner(*given)
    return ElasticRunner(*given) if sync.partners == "center" else RingRunner(*given)


def _weak(value: Any) -> Any:
    return value if jax_compat.is_weak(value) else jax_compat.weak(value)
