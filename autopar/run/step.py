"""`ParallelStep`: the callable that `parallelize` returns, with a plan for each set of shapes. `MethodStep` binds it to
an instance, `PickledByOptions` pickles it, and `LazyStep` makes it on first use."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import jax
import numpy as np
from jax.profiler import StepTraceAnnotation

from autopar import explicit_meshes, jax_compat
from autopar.backends.background import Compilation, beside
from autopar.backends.clients import Clients
from autopar.backends.devices import Devices
from autopar.compile import Compiled
from autopar.errors import AlphaDriftWarning, ArgumentsError, CapacityWarning, RecompileWarning, StepError, warn
from autopar.interrupts import interruptible, uninterrupted
from autopar.ir.figures import HEADROOM, NEAR
from autopar.ir.options import Options
from autopar.ir.plan import Plan
from autopar.jax_types import Leaf, Pytree
from autopar.launch.group import everyone, next_compared
from autopar.launch.notices import compiling, noticing
from autopar.launch.progress import mark
from autopar.passes.choosing.capacity import needed_share
from autopar.run.agreement import check_same_batch
from autopar.run.arguments import Call, NamedArguments, call_difference, read_call, static_key, step_name
from autopar.run.buffers import check_not_donated, naming_donated, noting_lost_state
from autopar.run.devices import DevicesRunner
from autopar.run.drift import DRIFT_REMEDY, ONE_DEVICE, AlphaWatch, drift_message
from autopar.run.planned_step import PlannedStep, Runner, Upcoming
from autopar.run.planner import Planner
from autopar.run.slow_plans import warn_of_slow_plan
from autopar.tables.kinds import is_table, layout_of, materialize, stack_index_of
from autopar.tables.leaf import TableLeaf

#: Sets of shapes for which a step is planned before it raises: each of them costs a compilation.
MAX_PLANS = 16


class PickledByOptions:
    """A step that is pickled as its function and options, or by its qualified name if a module has it.

    Plans and compiled programs stay behind: the process that unpickles it plans for its own devices. Copies are the
    step itself, as with functions.
    """

    __wrapped__: Any
    _made_by: tuple[Callable[..., Any], Mapping[str, Any]] | None = None

    def made_by(self, make: Callable[..., Pytree], options: Mapping[str, Any]) -> Self:
        """Records that `make(function, **options)` makes another such step; returns this one."""
        self._made_by = make, options
        return self

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {step_name(self.__wrapped__)}>"

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: object) -> Any:
        return self

    def __reduce__(self) -> Any:
        name = getattr(self, "__qualname__", "")
        module = getattr(self, "__module__", None)
        if module != "__main__" and _found(module, name) is self:  # __main__ is another module elsewhere
            return name
        if self._made_by is None:
            raise TypeError(f"{self!r} can't be pickled: pickle the function that it was made of")
        make, options = self._made_by
        given = {k: _Mesh.of(v) if isinstance(v, jax.sharding.Mesh) else v for k, v in options.items()}
        return _made, (make, self.__wrapped__, given)


def _made(make: Callable[..., Pytree], fun: Pytree, given: Mapping[str, Pytree]) -> Any:
    return make(fun, **{k: v.made() if isinstance(v, _Mesh) else v for k, v in given.items()})


def _found(module: str | None, name: str) -> Any:
    try:
        return functools.reduce(getattr, name.split("."), sys.modules[module or ""])
    except (AttributeError, KeyError):
        return None


@dataclass(frozen=True)
class _Mesh:
    """A mesh by its devices' numbers; devices can't be pickled."""

    ids: np.ndarray
    axis_names: tuple[str, ...]
    axis_types: tuple[jax.sharding.AxisType, ...]

    @staticmethod
    def of(mesh: jax.sharding.Mesh) -> _Mesh:
        ids = np.vectorize(lambda device: device.id, otypes=[np.int64])(mesh.devices)
        return _Mesh(ids, mesh.axis_names, mesh.axis_types)

    def made(self) -> jax.sharding.Mesh:
        devices = {device.id: device for device in jax.devices()}
        missing = sorted({*self.ids.flat} - set(devices))
        if missing:
            raise ArgumentsError(
                f"a pickled step has mesh= with devices {', '.join(map(str, missing))}, and this process has "
                f"{len(devices)} devices. Pickle a step without mesh=, or pickle its function and call parallelize here"
            )
        chosen = np.array([devices[k] for k in self.ids.flat], object).reshape(self.ids.shape)
        return jax.sharding.Mesh(chosen, self.axis_names, axis_types=self.axis_types)


@dataclass(eq=False, repr=False)
class ParallelStep(PickledByOptions):
    """A train step that runs by a plan. Called like the step itself; made by `parallelize`.

    Attributes:
      latest: The step as it is planned for the latest call.
      watch: Watches the rows that batches touch, if anything does.
      upcoming: The batches that the next calls are given, where `shard(step=)` says so.
    """

    planner: Planner
    watch: AlphaWatch | None = None
    _planned: dict[Leaf, PlannedStep] = field(default_factory=dict)
    _ready: dict[Any, _Ready] = field(default_factory=dict)
    _last: _Ready = field(default_factory=lambda: _NONE)
    latest: PlannedStep | None = None
    upcoming: Upcoming | None = None
    _calls: int = 0
    _compared: int = next_compared(0)  #: Number of the next call whose batch processes compare; planning did the first.

    def __post_init__(self) -> None:
        functools.update_wrapper(self, self.fun)

    @property
    def fun(self) -> Callable[..., Pytree]:
        return self.planner.fun

    @property
    def name(self) -> str:
        return self.planner.name

    @property
    def options(self) -> Options:
        return self.planner.options

    @property
    def devices(self) -> Devices | None:
        """The devices that run the step, or None for one."""
        return self.planner.devices

    @property
    def clients(self) -> Clients | None:
        """Clients that train a replica each (`sync=`), or None where all processes train one state."""
        return self.planner.clients

    @property
    def minibatch_clients(self) -> Clients | None:
        """Clients with minibatches of their own (`shard`), or None where all processes take global batches."""
        return self.clients

    @property
    def takes_turns(self) -> bool:
        """Says whether `shard` deals minibatches to clients in turn; otherwise the next free client takes one."""
        return not self.planner.way.is_asynchronous

    def announce(self, batch: Pytree, following: Pytree | None) -> None:
        """Takes from `shard` the batch that the next call is given, and the one after it; both None: it will do so."""
        if self.upcoming is None:
            self.upcoming = Upcoming()
        self.upcoming.announce(batch, following)

    @property
    def static(self) -> NamedArguments:
        return self.planner.static

    @property
    def state_argnums(self) -> tuple[int, ...] | None:
        """The state's positions, if the user gave them."""
        return self.planner.state_argnums

    @property
    def plan(self) -> Plan | None:
        """The plan in use; None before the first call."""
        return self.latest.compiled.plan if self.latest else None

    @uninterrupted
    @explicit_meshes.outside_mesh
    @noting_lost_state
    def __call__(self, *args: Pytree, **kwargs: Pytree) -> Pytree:
        if self.watch is not None and self.watch.is_due():
            self._look(self.watch, args, kwargs)
        leaves, key = self._read(args, kwargs)
        ready = self._last
        if key is None or key != ready.key:
            ready = self._prepare(args, kwargs, leaves, key)
        if ready.is_explicit:
            leaves = list(map(explicit_meshes.on_auto_mesh, leaves))
        runner, has_run = ready.runner, ready.has_run
        if runner is None or jax_compat.is_tracing():
            return self._traced(ready.planned, runner, leaves)
        loads = runner.loads()
        if loads is not None:  # before anything is donated: an error, or a warning as one, costs no state
            grown, message = self._larger_capacities.after(ready.planned, loads)
            if grown is not ready.planned:
                self._replace(ready.planned, grown)
                warn(message, CapacityWarning)
                runner, has_run = grown.runner, False
        runner.upcoming = self.upcoming
        mark(self._calls, self.name)
        if self._calls == self._compared:
            self._compare(ready.planned, leaves)
        self._calls += 1
        try:
            if has_run and not jax_compat.is_profiling():
                return runner(leaves)
            with StepTraceAnnotation(self.name, step_num=self._calls - 1):
                if has_run:
                    return runner(leaves)
                with compiling(self.name):
                    results = runner(leaves)
            ready.has_run = True
            return results
        except (RuntimeError, ValueError) as error:  # without a context manager, which costs a microsecond
            check_not_donated(self.name, args, kwargs, error)
            raise

    def _read(self, args: Sequence[Pytree], kwargs: Mapping[str, Pytree]) -> tuple[list[Leaf], Leaf]:
        """Returns a call's flat arguments, and a key of calls that share a plan; None if it can't be hashed."""
        statics = None
        if self.static:
            statics = static_key(self.static.of_call(args, kwargs))
            args, kwargs = self.static.others(args, kwargs)
        leaves, tree = jax.tree.flatten((args, kwargs))
        try:
            hash(statics)  # what can't be hashed may not be comparable, either
            types = jax_compat.type_keys(leaves, _table_key)
            shardings = jax_compat.shardings(leaves) if self.latest is not None and self.latest.parameters else None
            return leaves, (tree, types, statics, jax_compat.uses_x64(), shardings)
        except TypeError:  # shapes, or what planning has an error for
            return leaves, None

    def _prepare(
        self, args: Sequence[Pytree], kwargs: Mapping[str, Pytree], leaves: Sequence[Leaf], key: Any
    ) -> _Ready:
        """Returns the plan and runner of a call, made if they are new."""
        known = self._ready.get(key)
        if known is not None:
            self._last, self.latest = known, known.planned
            self._planned |= self._forgotten(known.planned)
            return known
        if any(map(self._is_of_another_kind, leaves)):
            raise StepError(
                f"{self.name} was given replicas, or leaves that servers keep, of which each client has its own, and "
                "takes what is the same everywhere: give autopar.average(state), or autopar.materialize(state) for "
                "this client's own"
            )
        planned = self.planned_for(*args, **kwargs)
        if all(ready.planned is not planned for ready in self._ready.values()):
            warn_of_slow_plan(self.name, planned)
        if any(map(jax_compat.is_tracer, leaves)):
            self._check_is_one_program(planned)
            ready = _Ready(key, planned, None)
        else:
            runner = planned.table_runner if any(map(is_table, leaves)) else planned.runner
            ready = _Ready(key, planned, runner, is_explicit=any(map(explicit_meshes.is_explicit, leaves)))
        if key is not None:
            self._ready[key] = self._last = ready
        return ready

    def _compare(self, planned: PlannedStep, leaves: Sequence[Leaf]) -> None:
        """Raises ArgumentsError if processes were given different batches. Collective, where several run the step."""
        self._compared = next_compared(self._calls)
        if self.planner.processes is not None:
            inputs = planned.compiled.analysed.inputs
            batch = [k for k, x in enumerate(inputs) if x.role == "batch" and k not in planned.parameters]
            given = {inputs[k].path: leaves[k] for k in batch}
            check_same_batch(self.planner.processes, self.name, self._calls, given)

    def _is_of_another_kind(self, leaf: Leaf) -> bool:
        """Says whether a leaf belongs to a state of steps with another `sync=`."""
        of_clients = isinstance(leaf, TableLeaf) and leaf.of_clients
        return of_clients and not isinstance(leaf, self.planner.way.leaves)

    def _traced(self, planned: PlannedStep, runner: Runner | None, leaves: Sequence[Leaf]) -> Pytree:
        """Returns a call's results while JAX traces around it, as part of that trace. An evaluation of concrete arrays
        runs by itself."""
        if runner is None or planned.compiled.analysed.new_states:
            return planned.out_tree.unflatten(planned.run(*materialize(leaves, copy=False)))
        with jax_compat.outside_traces():
            return runner(leaves)

    @explicit_meshes.outside_mesh
    def lower(self, *args: Pytree, **kwargs: Pytree) -> Any:
        """Lowers the planned step as `jax.jit(step).lower` does; arguments may be shapes."""
        planned = self.planned_for(*args, **kwargs)
        self._check_is_one_program(planned)
        return planned.runner.lower()

    def _check_is_one_program(self, planned: PlannedStep) -> None:
        what = planned.way.exchanges
        if what:
            raise StepError(
                f"{self.name} has {what}: it runs in several programs with exchanges between them, and so can't be "
                "traced into one (jax.jit, jax.lax.scan, lower). Call it as it is"
            )

    @explicit_meshes.outside_mesh
    def planned_for(self, *args: Pytree, **kwargs: Pytree) -> PlannedStep:
        """Returns the plan for these arguments (arrays or shapes), made if there is none yet."""
        call = read_call(self.fun, args, kwargs, self.static)
        planned = self._planned_for(call)
        if planned is None:
            with (
                interruptible(not everyone().several),
                naming_donated(self.name, args, kwargs),
                noticing(self.name, "tracing"),
            ):
                leaves = self.leaves(args, kwargs)
                planned = self._share_choices(self.planner.plan(call, leaves, self._calls, is_first=not self._planned))
            self._announce(call, planned)
            self._planned[call.key, call.layouts] = planned
        self._planned |= self._forgotten(planned)
        if planned.example is None:
            planned.example = planned.example_of(self.leaves(args, kwargs))
        self.latest = planned
        return planned

    def _share_choices(self, planned: PlannedStep) -> PlannedStep:
        first = next(iter(self._planned.values()), None)
        return planned if first is None else planned.way.share_choices(first, planned)

    def _planned_for(self, call: Call) -> PlannedStep | None:
        return next((e for e in self._planned.values() if e.takes(call)), None)

    def leaves(self, args: Sequence[Pytree], kwargs: Mapping[str, Pytree]) -> list[Leaf]:
        """Returns the flat dynamic arguments of a call, in the order of the program's inputs."""
        return list(map(explicit_meshes.on_auto_mesh, jax.tree.leaves(self.static.others(args, kwargs))))

    def __get__(self, instance: Pytree, owner: type | None = None) -> Any:
        """Binds to an instance, as a function does."""
        return self if instance is None else MethodStep(self, instance)

    # --- planning ---

    @functools.cached_property
    def _larger_capacities(self) -> LargerCapacities:
        return LargerCapacities(self.name, self.planner, self._another)

    def _look(self, watch: AlphaWatch, args: Sequence[Pytree], kwargs: Mapping[str, Pytree]) -> None:
        """Warns if batches touch other numbers of rows than the plan was made for."""
        leaves, key = self._read(args, kwargs)
        ready = self._ready.get(key)
        planned = self._planned_for(read_call(self.fun, args, kwargs, self.static)) if ready is None else ready.planned
        drifted = watch.look(planned, list(map(explicit_meshes.on_auto_mesh, leaves)))
        if planned is not None and drifted:
            remedy = DRIFT_REMEDY if planned.devices is not None else ONE_DEVICE
            warn(f"{self.name}: {drift_message(drifted)}. {remedy}", AlphaDriftWarning)

    def _another(
        self, planned: PlannedStep, compiled: Compiled, example: Sequence[Leaf] | None, headroom: float
    ) -> PlannedStep:
        again = replace(planned, compiled=compiled, headroom=headroom, example=example)
        return self._share_choices(again)

    def _replace(self, planned: PlannedStep, again: PlannedStep) -> None:
        self._planned.update({key: again for key, old in self._planned.items() if old is planned})
        self._not_ready(planned)
        self.latest = again

    def _announce(self, call: Call, planned: PlannedStep) -> None:
        """Warns of new shapes; makes room for another plan, or raises if shapes keep changing."""
        names = [a.name for a in call.arguments]
        same = [e.call for e in self._planned.values() if [a.name for a in e.call.arguments] == names]
        if not same:
            return
        change = call_difference(same[-1], call)
        if change is None:  # only weak types differ: the second step's state has strong ones, as under jax.jit
            return
        if len(self._planned) >= MAX_PLANS:
            others = (e for e in self._planned.values() if e.lasting_shapes != planned.lasting_shapes)
            unused = next(others, None)  # a state of another size: it was resized
            if unused is None:
                are_alike = same[-1].key[1] == call.key[1]
                what = "static arguments" if are_alike else "sets of shapes"
                remedy = (
                    "Pass it as an array, if the step only computes with it"
                    if are_alike
                    else "Pad the batches to a few sizes"
                )
                raise ArgumentsError(
                    f"{self.name} was called with {MAX_PLANS} different {what}, and each is planned and "
                    f"compiled anew ({change}). {remedy}"
                )
            self._forgotten(unused)
            self._not_ready(unused)
        warn(f"{self.name} is planned and compiled again: {change}", RecompileWarning)

    def _not_ready(self, planned: PlannedStep) -> None:
        """Runs no more calls by a plan, nor watches them."""
        if self.watch is not None:
            self.watch.forget(planned)
        self._ready = {key: ready for key, ready in self._ready.items() if ready.planned is not planned}
        self._last = _NONE

    def _forgotten(self, planned: PlannedStep) -> dict[Leaf, PlannedStep]:
        """Removes and returns a plan; the caller adds it again, as the last used."""
        return {key: self._planned.pop(key) for key, known in list(self._planned.items()) if known is planned}


@dataclass(slots=True, eq=False)
class _Ready:
    """A plan that is ready for calls of one key."""

    key: Any
    planned: Any
    runner: Runner | None  #: Runs the calls; None: they are traced.
    has_run: bool = False  #: The first run compiles.
    is_explicit: bool = False  #: Arguments are on meshes with Explicit axes.


#: Before the first call.
_NONE = _Ready(object(), None, None)


def _table_key(leaf: Leaf) -> Any:
    return (type(leaf), leaf.shape, leaf.dtype, layout_of(leaf), stack_index_of(leaf)) if is_table(leaf) else None


class MethodStep:
    """A bound method whose function was decorated: called without `self`.

    As under `jax.jit` the object is an argument like any other: a pytree of arrays, or static (`static_argnums=0`).

    Attributes:
      step: The decorated step, whose first argument is the object.
      instance: The object.
    """

    def __init__(self, step: Pytree, instance: Pytree) -> None:
        functools.update_wrapper(self, step.fun)
        self.__wrapped__ = types.MethodType(step.fun, instance)
        self.step, self.instance = step, instance

    def __call__(self, *args: Pytree, **kwargs: Pytree) -> Pytree:
        return self.step(self.instance, *args, **kwargs)

    def lower(self, *args: Pytree, **kwargs: Pytree) -> Any:
        return self.step.lower(self.instance, *args, **kwargs)

    def calling(
        self, batch: Pytree, call: Callable[[Pytree], Sequence[Pytree]] | None
    ) -> Callable[[Pytree], Sequence[Pytree]]:
        """Returns a function that makes all arguments of `step` from a state: `self`, then the result of `call`, or
        state and batch by default."""
        states = self.step.state_argnums or (1,)

        def all_of(made: Pytree) -> Sequence[Pytree]:
            arguments = call(made) if call is not None else (made, batch) if states[0] < 2 else (batch, made)
            return (self.instance, *arguments) if isinstance(arguments, (tuple, list)) else arguments

        return all_of

    def __reduce__(self) -> Any:
        return MethodStep, (self.step, self.instance)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MethodStep) and self.step is other.step and self.instance is other.instance

    def __hash__(self) -> int:
        return hash((id(self.step), id(self.instance)))

    def __getattr__(self, name: str) -> Any:
        if name in ("step", "instance"):  # a copy is being made, which has none yet
            raise AttributeError(name)
        return getattr(self.step, name)


class LazyStep(ParallelStep):
    """A step that is made on first use, so that a script may configure JAX after decorating it at the top of a module.

    Its fields are those of the step that `make` returns. Fields that were never set are filled in when one of them is
    read.
    """

    def __init__(self, fun: Callable[..., Pytree], make: Callable[[], ParallelStep]) -> None:
        self._make = make
        functools.update_wrapper(self, fun)

    @property
    def fun(self) -> Callable[..., Pytree]:
        return self.__wrapped__

    def __getattr__(self, name: str) -> Any:
        if name not in {field.name for field in fields(ParallelStep)}:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        jax.devices()  # initialises JAX, as a used step would
        self.__dict__.update({key: value for key, value in vars(self._make()).items() if key not in self.__dict__})
        return getattr(self, name)


# --- larger capacities, after batches that came near theirs or exceeded them ---


@dataclass(frozen=True, slots=True)
class LargerCapacities:
    """Plans a step with larger capacities. `another` makes a planned step of the old one, a new plan, an example and
    headroom."""

    name: str
    planner: Planner
    another: Callable[[PlannedStep, Compiled, Sequence[Leaf] | None, float], PlannedStep]

    def after(self, planned: PlannedStep, loads: Sequence[int]) -> tuple[PlannedStep, str]:
        """Returns the planned step to use after batches that needed `loads` rows of each capacity, and a warning if it
        is new.

        A capacity that was exceeded becomes twice as large, or as large as necessary, with headroom. One that was only
        approached stays, and the larger plan is compiled in the background.
        """
        tight = [f for f in planned.compiled.as_run.bound.families if f.bounds.tight]
        needs = [(f.table.path, int(n), f.bounds.capacity or 0) for f, n in zip(tight, loads, strict=True)]
        exceeded = ", ".join(f"{n} of {path}, not {most}" for path, n, most in needs if n > most)
        if not exceeded:
            if planned.larger is None:
                if isinstance(planned.own_runner, DevicesRunner):
                    planned.own_runner.prepare()
                planned.larger = self._larger(planned, 2 * planned.headroom)
            return planned, ""
        is_beside = planned.larger is not None and planned.larger.has_begun
        with interruptible(not everyone().several), compiling(self.name):
            grown = None if planned.larger is None else planned.larger.finish()
            if grown is None or not _has_room(grown, {path: n for path, n, _ in needs}):
                is_beside = False
                needed = HEADROOM * planned.headroom * max(needed_share(most, n) for _, n, most in needs)
                grown = self._with_headroom(planned, planned.example, max(2 * planned.headroom, needed))
        how = "the step was compiled beside the ones before" if is_beside else "the step is compiled again"
        old, new = (
            [(f.table.path, f.bounds.capacity) for f in e.compiled.as_run.bound.families] for e in (planned, grown)
        )
        shown = ", ".join(f"{a} to {b} ({path})" for (path, a), (_, b) in zip(old, new, strict=True) if a != b)
        return grown, (
            f"{self.name}: a batch needed more rows of one device than the example did ({exceeded}). That step was run "
            f"without limits, with the same result; capacities grow from {shown}, in rows, and {how}"
        )

    def _larger(self, planned: PlannedStep, headroom: float) -> Compilation[PlannedStep]:
        """Compiles the step with larger capacities in the background. It is planned there, too; but several processes,
        which must agree on the plan, make it here and keep it even if compiling it failed."""
        made, example = None, planned.example
        if self.planner.processes is not None:
            made = self._with_headroom(planned, example, headroom)
        elif example is not None:  # on the host: a program on all devices would meet those of a step
            example = [x if x is None or jax_compat.is_key(x.dtype) else np.asarray(x) for x in example]

        def compiled() -> PlannedStep:
            larger = made or self._with_headroom(planned, example, headroom)
            if isinstance(larger.own_runner, DevicesRunner):
                larger.own_runner.begin_whole()
            larger.own_runner.lower().compile()
            return larger

        return beside(f"{self.name} with larger capacities", compiled, otherwise=made)

    def _with_headroom(self, planned: PlannedStep, example: Sequence[Leaf] | None, headroom: float) -> PlannedStep:
        """Plans with headroom, doubled until the plan changes: capacities are rounded."""
        while True:
            compiled = self.planner.plan_again(planned, example, headroom)
            if compiled.bound.decisions != planned.compiled.bound.decisions:
                return self.another(planned, compiled, example, headroom)
            headroom *= 2


def _has_room(planned: PlannedStep, needs: Mapping[str, int]) -> bool:
    tight = {f.table.path: f.bounds.capacity or 0 for f in planned.compiled.as_run.bound.families if f.bounds.tight}
    return all(n <= NEAR * tight[path] for path, n in needs.items() if path in tight)
