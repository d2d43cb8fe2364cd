"""`PlannedStep`: what is known of a step at one set of shapes, and the functions that it becomes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

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
from autopar.compile import Compiled
from autopar.ir.options import Options
from autopar.ir.program import Program
from autopar.ir.program_plan import ProgramPlan
from autopar.ir.sizes import HEADROOM
from autopar.jax_types import AnyJaxpr, Leaf, Pytree, PyTreeDef
from autopar.measure.alpha import id_inputs
from autopar.measure.machine import NOWHERE, Machine
from autopar.passes.analyze_batch import parameters_of
from autopar.run.arguments import Call, States
from autopar.run.buffers import is_traced
from autopar.run.runner import Runner
from autopar.tables.kinds import materialize
from autopar.ways.way import Way


@dataclass(eq=False)
class PlannedStep:
    """Holds what is known of the step at one set of shapes.

    `example` holds the leaves of the first call's batch that ids depend on (None for all others). `way` is how the step
    is run, with the options that it was compiled by. `fun` is what was traced, the user's step or one made of it;
    `notes` are what `explain` says of that. `clients` are those that have a replica each. `larger` compiles the
    same step with larger capacities, once batches have come near those of this one.
    """

    call: Call
    states: States
    compiled: Compiled
    way: Way
    jaxpr: AnyJaxpr
    out_tree: PyTreeDef
    trace_s: float = 0.0
    example: Sequence[Leaf] | None = None

    devices: Devices | None = None
    donate: bool = True
    machine: Machine = NOWHERE
    headroom: float = HEADROOM
    fun: Callable[..., Pytree] | None = None
    notes: Sequence[str] = ()
    clients: Clients | None = None
    larger: Compilation[PlannedStep] | None = field(default=None, init=False)

    @property
    def options(self) -> Options:
        """Returns what the user chose for the whole step, and what was chosen for it."""
        return self.way.options

    def takes(self, call: Call) -> bool:
        """Returns whether this is the plan for a call, too.

        A state may come as an array or as a Table, but what is only read is planned for where it is.
        """
        layouts = call.read_layouts(self.parameters, self.compiled.plan.devices)
        pairs = zip(self.compiled.analysed.inputs, layouts, strict=True)
        same = (a.role == "state" or a.layout == b for a, b in pairs)
        return self.call.key == call.key and all(same)

    @functools.cached_property
    def parameters(self) -> frozenset[int]:
        """The inputs of an evaluation that are no batch."""
        return parameters_of(self.compiled.analysed, self.options.batch_axis)

    @functools.cached_property
    def lasting_shapes(self) -> Leaf:
        """Shapes of the arguments that outlive a call: those that hold state, or, where none does, the largest one."""
        inputs, arguments = iter(self.compiled.analysed.inputs), self.call.arguments
        lasting = [a for a in arguments if any([next(inputs).role == "state" for _ in a.types])]
        lasting = lasting or sorted(arguments, key=lambda a: sum(t.size for t in a.types))[-1:]
        return [(a.name, a.treedef, [t.shape for t in a.types]) for a in lasting]

    def example_of(self, leaves: Sequence[Leaf]) -> Sequence[Leaf] | None:
        """Returns concrete leaves to measure alpha on, which ids depend on and which are no state; None where there is
        none.

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
    def run(self) -> Callable[..., Sequence[Leaf]]:
        """The planned step on flat arrays. A step of which nothing is lifted is run as JAX traced it."""
        bound = self.compiled.bound
        if bound.plan.defers:  # ordinary arrays have no rows that wait
            return self.plain
        if self.devices is not None:
            return on_ordinary_arrays(self.run_stored, bound, self.compiled.analysed, self.devices)
        return self._typed(emit(self.compiled.program.block)) if bound.rewrites else self.plain

    def _typed(self, run: Callable[..., Sequence[Pytree]]) -> Callable[..., Sequence[Leaf]]:
        """Gives results the plain step's types, weak or strong: a row that is written back takes its table's type."""
        types = [a.type for a in self.compiled.analysed.block.outputs]

        def typed_run(*inputs: Leaf) -> Sequence[Leaf]:
            outputs = run(*inputs)  # and perhaps a flag
            pairs = zip(outputs, types, strict=False)
            typed = [_weak(x) if getattr(t, "weak_type", False) else jax_compat.strong(x) for x, t in pairs]
            return [*typed, *outputs[len(types) :]]

        return typed_run

    @functools.cached_property
    def run_stored(self) -> Callable[..., Sequence[Leaf]]:
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
    def run_first(self) -> Callable[..., Sequence[Leaf]] | None:
        """The planned step without its fallback, None if it has none (`LateFallback`)."""
        bound, program, analysed = self.compiled.bound, self.compiled.program, self.compiled.analysed
        if self.compiled.fallback is None or self.devices is None:
            return None
        run = without_fallback(self._emitted(program, bound), program)
        return spread(self._typed(run), bound, analysed, self.devices)

    def _emitted(self, program: Program, bound: ProgramPlan) -> Callable[..., Sequence[Leaf]]:
        assert self.devices is not None, "one device needs no backends"
        return emit(program.block) if program.local is None else mapped(program, bound, self.devices)

    @functools.cached_property
    def runner(self) -> Runner:
        """Who calls the planned step."""
        return self.way.runner(self)

    @functools.cached_property
    def own_runner(self) -> Runner:
        """Who calls it on one client, or on all processes that train one state."""
        return self.runner if self.way.inner is None else self.way.inner.runner(self)

    @functools.cached_property
    def table_runner(self) -> Runner:
        """Who calls it where an argument is a table of autopar's own."""
        return self.way.table_runner(self)

    @functools.cached_property
    def run_on_tables(self) -> Callable[..., Sequence[Leaf]]:
        """The planned step on one device, on flat arrays and the parts of tables."""
        return self._typed(emit(self.compiled.program.block)) if self.compiled.plan.defers else self.run

    @property
    def are_results_whole(self) -> bool:
        """Results by example are whole on every process."""
        return self.options.are_results_whole(self.compiled.analysed)

    def run_called(self, *leaves: Leaf) -> list[Leaf]:
        """Runs the planned step as it is called, on flat arrays and tables, of which none is donated. Collective."""
        states = {k for k, input_ in enumerate(self.compiled.analysed.inputs) if input_.role == "state"}
        copies = [jax.numpy.copy(x) if k in states and isinstance(x, jax.Array) else x for k, x in enumerate(leaves)]
        results = jax.tree.leaves(self.runner(copies))
        return list(materialize(results, copy=False) if self.compiled.plan.on_hosts else results)

    @functools.cached_property
    def plain(self) -> Callable[..., Sequence[Leaf]]:
        """The step as JAX traced it, on flat arrays."""
        return jax_compat.jaxpr_as_fun(self.jaxpr)


def _weak(value: Leaf) -> Leaf:
    return value if jax_compat.is_weak(value) else jax_compat.weak(value)
