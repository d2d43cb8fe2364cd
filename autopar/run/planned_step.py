"""`PlannedStep`: a step planned for one set of shapes, and the functions made of it."""

from __future__ import annotations

import abc
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import numpy as np

from autopar import jax_compat
from autopar.backends.background import Compilation
from autopar.backends.clients import Clients
from autopar.backends.devices import Devices
from autopar.backends.emit import donation_order, emit, has_unread_states
from autopar.backends.global_arrays import local
from autopar.backends.on_devices import mapped, on_ordinary_arrays, spread, with_fallback, without_fallback
from autopar.compile import Compiled
from autopar.errors import StepError
from autopar.interrupts import interruptible
from autopar.ir.figures import HEADROOM
from autopar.ir.options import Options
from autopar.ir.program import Program
from autopar.ir.program_plan import ProgramPlan
from autopar.jax_types import Jaxpr, Leaf, Pytree, PyTreeDef
from autopar.measure.alpha import id_inputs
from autopar.measure.figures import Machine
from autopar.passes.analyze_batch import parameters_of
from autopar.run.arguments import Call, States
from autopar.run.buffers import is_shared_buffer, with_own_buffers
from autopar.run.stacked import on_ordinary_tables
from autopar.tables.kinds import materialize
from autopar.ways.way import Way


@dataclass(eq=False)
class PlannedStep:
    """A step planned for one set of shapes."""

    call: Call
    states: States
    compiled: Compiled
    way: Way  #: How the step is run, with the options that it was compiled by.
    jaxpr: Jaxpr
    out_tree: PyTreeDef
    trace_s: float
    fun: Callable[..., Pytree]  #: The function that was traced: the user's step, or one made of it.
    notes: Sequence[str]  #: What `explain` says about that function, and about the plan.
    devices: Devices | None
    clients: Clients | None  #: The clients that have a replica each.
    donate: bool
    machine: Machine
    example: Sequence[Leaf] | None = None  #: Leaves of the first call's batch that ids depend on; None for all others.
    headroom: float = HEADROOM
    #: Compiles the step with larger capacities in the background, once batches have come near these.
    larger: Compilation[PlannedStep] | None = field(default=None, init=False)

    @property
    def options(self) -> Options:
        return self.way.options

    def takes(self, call: Call) -> bool:
        """Says whether this plan serves a call. A state may come as an array or a Table, but leaves that are only read
        must be in the planned layout."""
        devices = self.compiled.plan.devices
        layouts, indices = call.read_layouts(self.parameters, devices), call.read_stack_indices(devices)
        known = zip(self.compiled.analysed.inputs, layouts, indices, strict=True)
        same = (a.role == "state" or (a.layout, a.stack_index) == (layout, index) for a, layout, index in known)
        return self.call.key == call.key and all(same)

    @functools.cached_property
    def parameters(self) -> frozenset[int]:
        """Inputs of an evaluation that are no batch."""
        return parameters_of(self.compiled.analysed, self.options.batch_axis)

    @functools.cached_property
    def lasting_shapes(self) -> Leaf:
        """Shapes of arguments that outlive a call, that is of the state or else of the largest argument."""
        inputs, arguments = iter(self.compiled.analysed.inputs), self.call.arguments
        lasting = [a for a in arguments if any([next(inputs).role == "state" for _ in a.types])]
        lasting = lasting or sorted(arguments, key=lambda a: sum(t.size for t in a.types))[-1:]
        return [(a.name, a.treedef, [t.shape for t in a.types]) for a in lasting]

    def example_of(self, leaves: Sequence[Leaf]) -> Sequence[Leaf] | None:
        """Returns the leaves to measure alpha on (concrete, no state, read by ids), if there are any: whole and local,
        so that measuring again needs no other process. NumPy arrays are copied."""
        program = self.compiled.analysed
        kept = [
            local(x.copy() if isinstance(x, np.ndarray) else x)
            if wanted and input_.role != "state" and not jax_compat.is_tracer(x) and hasattr(x, "__array__")
            else None
            for x, wanted, input_ in zip(leaves, id_inputs(program), program.inputs, strict=True)
        ]
        return kept if any(x is not None for x in kept) else None

    @functools.cached_property
    def run(self) -> Callable[..., Sequence[Leaf]]:
        """The planned step on flat arrays. A step without lifted tables runs as JAX traced it."""
        bound, ran, stacked = self.compiled.bound, self.compiled.as_run, self.compiled.stacked
        if bound.plan.defers or (stacked is not None and self.devices is None):  # ordinary arrays don't wait, or lie so
            return self.plain
        if self.devices is not None:
            run = on_ordinary_arrays(self.run_stored, ran.bound, ran.analysed, self.devices)
            return run if stacked is None else on_ordinary_tables(run, stacked)
        return self._typed(emit(self.compiled.program.block)) if bound.rewrites else self.plain

    def _typed(self, run: Callable[..., Sequence[Pytree]]) -> Callable[..., Sequence[Leaf]]:
        """Gives results the plain step's weak or strong types, as rows that are written back have their table's."""
        types = [a.type for a in self.compiled.as_run.analysed.block.outputs]

        def typed_run(*inputs: Leaf) -> Sequence[Leaf]:
            outputs = run(*inputs)  # a flag may follow
            pairs = zip(outputs, types, strict=False)
            typed = [_weak(x) if getattr(t, "weak_type", False) else jax_compat.strong(x) for x, t in pairs]
            return [*typed, *outputs[len(types) :]]

        return typed_run

    @functools.cached_property
    def run_stored(self) -> Callable[..., Sequence[Leaf]]:
        """The planned step on several devices, on flat arrays as they are stored."""
        assert self.devices is not None, "one device stores arrays as they are"
        ran = self.compiled.as_run
        bound, program, analysed = ran.bound, ran.program, ran.analysed
        if not bound.rewrites:
            return spread(self.plain, bound, analysed, self.devices)
        run = self._emitted(program, bound)
        if self.compiled.fallback is not None:
            run = with_fallback(run, self._emitted(self.compiled.fallback, bound.without_limits()), program)
        return spread(self._typed(run), bound, analysed, self.devices)

    @functools.cached_property
    def run_first(self) -> Callable[..., Sequence[Leaf]] | None:
        """The planned step without its fallback (`LateFallback`); None if it has none."""
        ran = self.compiled.as_run
        bound, program, analysed = ran.bound, ran.program, ran.analysed
        if self.compiled.fallback is None or self.devices is None:
            return None
        run = without_fallback(self._emitted(program, bound), program)
        return spread(self._typed(run), bound, analysed, self.devices)

    def _emitted(self, program: Program, bound: ProgramPlan) -> Callable[..., Sequence[Leaf]]:
        assert self.devices is not None, "one device needs no backends"
        return emit(program.block) if program.local is None else mapped(program, bound, self.devices)

    @functools.cached_property
    def runner(self) -> Runner:
        return self.way.runner(self)

    @property
    def outcome(self) -> str:
        """Says what calls so far have shown; "" before the first one."""
        runner: Runner | None = vars(self).get("runner")
        return "" if runner is None else runner.outcome

    @functools.cached_property
    def own_runner(self) -> Runner:
        """The runner of one client's step; `runner` where there are no clients."""
        return self.runner if self.way.inner is None else self.way.inner.runner(self)

    @functools.cached_property
    def table_runner(self) -> Runner:
        """The runner of calls with tables of autopar's own."""
        return self.way.table_runner(self)

    @functools.cached_property
    def run_on_tables(self) -> Callable[..., Sequence[Leaf]]:
        """The planned step on one device, on flat arrays and the parts of tables."""
        compiled = self.compiled
        is_other = compiled.plan.defers or compiled.stacked is not None
        return self._typed(emit(compiled.program.block)) if is_other else self.run

    @property
    def are_results_whole(self) -> bool:
        return self.options.are_results_whole(self.compiled.analysed)

    def run_called(self, *leaves: Leaf) -> list[Leaf]:
        """Runs the step by its runner without donating anything. Collective."""
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


# --- what runs a planned step: the way to run the step makes it (`ways`), once ---


class Runner(abc.ABC):
    """Runs a planned step."""

    #: How a step is said to be that runs in several programs.
    several_programs: ClassVar[str] = ""

    #: The batches of the next calls, as far as `autopar.shard` has told them; None on all ranks if it tells nothing of
    #: this step.
    upcoming: Upcoming | None = None

    @property
    def outcome(self) -> str:
        """Says what calls so far have shown, for `explain`."""
        return ""

    @abc.abstractmethod
    def __call__(self, leaves: Sequence[Leaf]) -> Pytree:
        """Runs the step on flat arguments, arrays and tables; returns its results. JAX raises a RuntimeError or
        ValueError for a donated buffer, for example."""

    def lower(self) -> Any:
        """Lowers the step at the plan's shapes, as `jax.jit(step).lower` does. Raises StepError if it runs in several
        programs."""
        raise StepError(
            f"a step {self.several_programs} runs in several programs, and so can't be traced into one (lower, jax.jit)"
        )

    def loads(self) -> Sequence[int] | None:
        """Returns the rows that earlier calls needed of measured capacities; None if none came near any."""
        return None


# --- a step on one device ---


class OneDeviceRunner(Runner):
    """Calls a planned step on flat arrays, under one `jax.jit`. `name` is for JAX's messages and profiles; `donate`:
    states are updated in place."""

    def __init__(
        self, run: Callable[..., Sequence[Pytree]], program: Program, name: str, out_tree: PyTreeDef, donate: bool
    ) -> None:
        order = donation_order(program.new_states, len(program.outputs))
        self._is_in_order = list(order) == list(range(len(order)))
        self._order = sorted(range(len(order)), key=order.__getitem__)
        self._out_tree = out_tree
        self._types = [v.type for v in program.block.inputs]
        self._states = {k for k, input_ in enumerate(program.inputs) if input_.role == "state"} if donate else set()
        self._is_new = True

        def step(*leaves: Leaf) -> Pytree:
            with interruptible():
                results = run(*leaves)
            return out_tree.unflatten(results) if self._is_in_order else [results[k] for k in order]

        step.__name__ = step.__qualname__ = name
        keep = donate and has_unread_states(program)
        self._run = jax.jit(step, donate_argnums=tuple(sorted(self._states)), keep_unused=keep)

    def lower(self) -> Lowered:
        """Lowers the step at the plan's shapes."""
        shapes = (jax.ShapeDtypeStruct(t.shape, t.dtype, weak_type=t.weak_type) for t in self._types)
        return Lowered(self._run.lower(*shapes), self._results)

    def __call__(self, leaves: Sequence[Leaf]) -> Pytree:
        """Runs the step on flat arguments; returns its results."""
        if self._is_new:  # a state of the user's own may share buffers; what a step returns doesn't
            leaves, self._is_new = with_own_buffers(leaves, self._states), False
        try:
            return self._results(self._run(*leaves))
        except (RuntimeError, ValueError) as error:
            if not is_shared_buffer(error) or any(isinstance(x, jax.Array) and x.is_deleted() for x in leaves):
                raise
            return self._results(self._run(*with_own_buffers(leaves, self._states)))

    def _results(self, returned: Leaf) -> Leaf:
        """Returns the results as a tree. JAX makes it, which is faster, unless donation needed another order."""
        return returned if self._is_in_order else self._out_tree.unflatten([returned[k] for k in self._order])


class Lowered:
    """A `jax.stages.Lowered` or `Compiled` of a step, with the user's arguments and results."""

    def __init__(self, stage: Any, results: Callable[[Leaf], Leaf]) -> None:
        self._stage, self._results = stage, results

    def __call__(self, *args: Pytree, **kwargs: Pytree) -> Pytree:
        """Runs the compiled step; static arguments are left out."""
        return self._results(self._stage(*jax.tree.leaves((args, kwargs))))

    def compile(self, *args: Pytree, **kwargs: Pytree) -> Lowered:
        return Lowered(self._stage.compile(*args, **kwargs), self._results)

    @property
    def out_info(self) -> Any:
        return self._results(self._stage.out_info)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)


class Upcoming:
    """The latest batch that was given out, and the one after it. Neither is kept alive by this."""

    def __init__(self) -> None:
        self._pairs: list[tuple[weakref.ref[Leaf], weakref.ref[Leaf]]] = []

    def announce(self, batch: Pytree, following: Pytree | None) -> None:
        """Takes a batch and the one after it; None: there is none, or it isn't known."""
        leaves, tree = jax.tree.flatten(batch)
        others, other = jax.tree.flatten(following)
        pairs = list(zip(leaves, others, strict=True)) if tree == other else []
        is_like = all(a.shape == b.shape and a.dtype == b.dtype for a, b in pairs)
        self._pairs = [(weakref.ref(a), weakref.ref(b)) for a, b in pairs if is_like]

    def after(self, leaves: Sequence[Leaf]) -> Mapping[int, Leaf]:
        """Returns by number the arguments of the call after one with these leaves, as far as they are known."""
        known = [(now(), then()) for now, then in self._pairs]
        following = {id(now): then for now, then in known if now is not None and then is not None}
        return {k: following[id(leaf)] for k, leaf in enumerate(leaves) if id(leaf) in following}
