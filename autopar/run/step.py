"""`ParallelStep`: the callable that `parallelize` returns, and its plans per shape of the arguments."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from autopar.backends.devices import Devices
from autopar.backends.donation import Donation
from autopar.compile import Options
from autopar.errors import AlphaDriftWarning, ArgumentsError, CapacityWarning, RecompileWarning, StepError
from autopar.interrupts import interruptible, uninterrupted
from autopar.ir.plan import Plan
from autopar.launch.progress import mark
from autopar.mpi.world import world
from autopar.run.arguments import Call, difference, read_call, static_keywords
from autopar.run.bound_step import BoundStep
from autopar.run.drift import ONE_DEVICE, REMEDY, AlphaWatch, told
from autopar.run.entry import Entry
from autopar.run.lost_state import noting_lost_state
from autopar.run.placing import check_not_donated, is_shared_buffer, is_traced, separate_buffers
from autopar.run.planner import Planner
from autopar.tables.kinds import is_table, layout_of, materialize

#: A step that keeps changing shapes is stopped here: each shape costs a compilation.
MAX_PLANS = 16


@dataclass(eq=False)
class ParallelStep:
    """A train step that runs by a plan. Called like the step itself; made by `parallelize`.

    Attributes:
      latest: What is known of the step at the shapes of the latest call that was planned.
      watch: Watches the rows that batches touch; None: nobody does.
    """

    planner: Planner
    watch: AlphaWatch | None = None
    _entries: dict[Any, Entry] = field(default_factory=dict)
    _runners: dict[Any, Any] = field(default_factory=dict)
    _jitted: dict[Any, Any] = field(default_factory=dict)
    _known: dict[Any, Entry] = field(default_factory=dict)
    latest: Entry | None = None
    _takes_tables: bool = False
    _calls: int = 0

    def __post_init__(self) -> None:
        functools.update_wrapper(self, self.fun)

    @property
    def fun(self) -> Callable[..., Any]:
        """The user's step."""
        return self.planner.fun

    @property
    def name(self) -> str:
        """The step's own name."""
        return self.planner.name

    @property
    def options(self) -> Options:
        """What the user chose for the whole step."""
        return self.planner.options

    @property
    def devices(self) -> Devices | None:
        """Those that run the step; None: one."""
        return self.planner.devices

    @property
    def donate(self) -> bool:
        """Whether the state is updated in place."""
        return self.planner.donate

    @property
    def static_argnums(self) -> tuple[int, ...]:
        """Positions of arguments that are no arrays."""
        return self.planner.static_argnums

    @property
    def state_argnums(self) -> tuple[int, ...] | None:
        """Positions of the state, where the user gave them."""
        return self.planner.state_argnums

    @property
    def plan(self) -> Plan | None:
        """The plan in use, None before the first call."""
        return self.latest.compiled.plan if self.latest else None

    @uninterrupted
    @noting_lost_state
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.watch is not None and self.watch.is_due():
            self._look(self.watch, args, kwargs)
        if self.devices is not None or self.options.hosts or self._takes_tables:
            return self._call_spread(args, kwargs)
        runner = self._runners.get((len(args), *kwargs))
        if runner is None:
            leaves = self.leaves(args, kwargs)
            stored = any(map(is_table, leaves))
            if stored or (not any(map(is_traced, leaves)) and self.entry(*args, **kwargs).keeps_tables):
                self._takes_tables = True
                return self._call_spread(args, kwargs)
            runner = self._first_call(args, kwargs)
            return self._run(runner, *self._place(args, kwargs))
        try:
            return runner(*args, **kwargs)
        except _OtherStates:  # these arguments have other states than those of the last call (an evaluation's, say)
            return self._run(self._first_call(args, kwargs), *self._place(args, kwargs))
        except (RuntimeError, ValueError) as error:
            return self._recover(error, runner, args, kwargs)
        except TypeError:
            if not any(map(is_table, self.leaves(args, kwargs))):
                read_call(self.fun, args, kwargs, frozenset(self.static_argnums))  # raises what names the leaf
                raise
            self._takes_tables = True
            return self._call_spread(args, kwargs)

    def _run(self, runner: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        try:
            return runner(*args, **kwargs)
        except (RuntimeError, ValueError) as error:
            return self._recover(error, runner, args, kwargs)

    def _call_spread(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A call on several devices: the plan is looked up here, and arrays are placed as it says."""
        leaves = self.leaves(args, kwargs)
        entry = self._recalled(args, kwargs, leaves, functools.partial(self.entry, *args, **kwargs))
        assert entry is not None, "what isn't planned yet is planned"
        self.latest = entry
        if any(is_traced(x) for x in leaves):
            self._check_not_hosted(entry)
            return jax.tree.unflatten(entry.out_tree, entry.run(*materialize(leaves, copy=False)))
        if entry.runner.was_exceeded():  # by an earlier call; what this raises, a warning too, costs no state
            entry = self._grow(entry)
        mark(self._calls, self.name)
        self._calls += 1
        try:
            results = entry.runner(leaves)
        except (RuntimeError, ValueError) as error:
            check_not_donated(self.name, args, kwargs, error)
            raise
        return jax.tree.unflatten(entry.out_tree, results)

    def _recalled(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        leaves: Sequence[Any],
        find: Callable[[], Entry | None],
    ) -> Entry | None:
        """The plan for a call: that of an earlier one like it, else what `find` says."""
        try:
            statics = tuple(args[k] for k in self.static_argnums if k < len(args))
            named = tuple((k, v) for k, v in kwargs.items() if k in self._static_names)
            types = tuple((x.shape, x.dtype, getattr(x, "weak_type", False), layout_of(x)) for x in leaves)
            key = (statics, named, jax.tree.structure((args, kwargs)), types)
            known = self._known.get(key)
        except (AttributeError, TypeError):  # Python scalars, or what planning has an error for
            return find()
        if known is None and (known := find()) is not None:
            self._known[key] = known
        return known

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """`jax.jit(step).lower` of the planned step; arguments may be shapes."""
        entry = self.entry(*args, **kwargs)
        if self.devices is not None or self.options.hosts or self._takes_tables or entry.keeps_tables:
            self._check_not_hosted(entry)
            return entry.runner.lower()
        runner = self._runners.get((len(args), *kwargs)) or self._first_call(args, kwargs)
        return runner.lower(*args, **kwargs)

    def _check_not_hosted(self, entry: Entry) -> None:
        if entry.compiled.plan.on_hosts:
            raise StepError(
                f"{self.name} has tables on hosts: it runs in several programs with exchanges between them, and so "
                "can't be traced into one (jax.jit, jax.lax.scan, lower). Call it as it is"
            )

    def entry(self, *args: Any, **kwargs: Any) -> Entry:
        """The plan for these arguments (arrays or shapes), made if there is none yet."""
        call = read_call(self.fun, args, kwargs, frozenset(self.static_argnums))
        entry = self._planned_for(call)
        if entry is None:
            with interruptible(world().size == 1):
                leaves = self.leaves(args, kwargs)
                entry = self.planner.plan(call, leaves, self._calls, is_first=not self._entries)
            self._announce(call)
            self._entries[call.key, call.layouts] = entry
        if entry.example is None:
            entry.example = entry.example_of(self.leaves(args, kwargs))
        self.latest = entry
        return entry

    def _planned_for(self, call: Call) -> Entry | None:
        return next((e for e in self._entries.values() if e.takes(call)), None)

    def leaves(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The flat dynamic arguments of a call, in the order of the program's inputs."""
        named = {k: v for k, v in kwargs.items() if k not in self._static_names}
        return jax.tree.leaves(([a for k, a in enumerate(args) if k not in self.static_argnums], named))

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Bind to an instance, as a function does: a step may be a method."""
        return self if instance is None else BoundStep(self, instance)

    @functools.cached_property
    def _static_names(self) -> frozenset[str]:
        return static_keywords(self.fun, frozenset(self.static_argnums))

    # --- planning ---

    def _grow(self, entry: Entry) -> Entry:
        """Plan once more with larger capacities, after batches that exceeded those of the plan."""
        grown = entry
        while grown is entry:  # capacities are rounded
            grown = self._again(entry, entry.example, 2 * entry.headroom)
        pairs = zip(entry.compiled.plan.families, grown.compiled.plan.families, strict=True)
        shown = ", ".join(f"{a.capacity} to {b.capacity}" for a, b in pairs if a.capacity != b.capacity)
        warnings.warn(
            f"{self.name}: a batch needed more rows of one device than the example did. That step was run without "
            f"limits, with the same result; capacities grow from {shown} rows, and the step is compiled again",
            CapacityWarning,
            stacklevel=6,
        )
        return grown

    def _look(self, watch: AlphaWatch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Compare what batches touch with what the plan was made for; between steps, so it may be made again."""
        leaves = self.leaves(args, kwargs)
        statics = frozenset(self.static_argnums)
        entry = self._recalled(
            args, kwargs, leaves, lambda: self._planned_for(read_call(self.fun, args, kwargs, statics))
        )
        drifted = watch.look(entry, leaves)
        if entry is None or not drifted:
            return
        remedy = REMEDY if entry.devices is not None else ONE_DEVICE
        if watch.replan == "auto" and entry.devices is not None:
            again = self._again(entry, entry.example_of(leaves), entry.headroom)
            remedy = f"The plan is made again, by this call's batch: {again.compiled.plan.changes(entry.compiled.plan)}"
        warnings.warn(f"{self.name}: {told(drifted)}. {remedy}", AlphaDriftWarning, stacklevel=5)

    def _again(self, entry: Entry, example: Sequence[Any] | None, headroom: float) -> Entry:
        """Plan once more, by an example and some headroom: another entry in this one's place, if anything changes."""
        with interruptible(world().size == 1):
            compiled = self.planner.plan_again(entry, example, headroom)
        if self.watch is not None:
            self.watch.forget(entry)
        if compiled.plan.decisions == entry.compiled.plan.decisions:
            entry.example, entry.headroom = example, headroom
            return entry
        again = dataclasses.replace(entry, compiled=compiled, headroom=headroom, example=example)
        for known in (self._entries, self._known):
            known.update({key: again for key, found in known.items() if found is entry})
        self.latest = again
        return again

    def _announce(self, call: Call) -> None:
        """Say that a call had new shapes; stop where that doesn't end."""
        names = [a.name for a in call.arguments]
        same = [e.call for e in self._entries.values() if [a.name for a in e.call.arguments] == names]
        if not same:
            return
        change = difference(same[-1], call)
        if change is None:  # only weak types differ: the second step's state has strong ones, as under jax.jit
            return
        if len(self._entries) >= MAX_PLANS:
            raise ArgumentsError(
                f"{self.name} was called with {MAX_PLANS} different sets of shapes, and each is planned and compiled "
                f"anew ({change}). Pad the batches to a few sizes"
            )
        warnings.warn(f"{self.name} is planned and compiled again: {change}", RecompileWarning, stacklevel=8)

    def _first_call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        donation = self.entry(*args, **kwargs).donation
        form = len(args), *kwargs
        runner = self._jitted.get((form, donation))
        if runner is None:
            runner = self._jitted[form, donation] = donation.jit(self._planned(donation), self.static_argnums)
        self._runners[form] = runner
        return runner

    def _planned(self, donation: Donation) -> Callable[..., Any]:
        """What is given to `jax.jit`: runs once for each set of shapes, with tracers."""

        @functools.wraps(self.fun)
        def planned(*args: Any, **kwargs: Any) -> Any:
            entry = self.entry(*args, **kwargs)
            self._check_not_hosted(entry)
            if donation != entry.donation:
                raise _OtherStates
            with interruptible():
                return entry.returned(self.leaves(args, kwargs))

        return planned

    # --- the state in place ---

    def _place(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        entry = self.latest
        if entry is None or not self.donate:
            return args, kwargs
        return separate_buffers([entry.call.arguments[k] for k in entry.states.outputs], args, kwargs)

    def _recover(self, error: Exception, runner: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Explain the use of a donated state; copy shared buffers and try again."""
        check_not_donated(self.name, args, kwargs, error)
        if is_shared_buffer(error):
            args, kwargs = self._place(args, kwargs)
            return runner(*args, **kwargs)
        raise error


class _OtherStates(Exception):
    """Raised while tracing, where the jit at hand donates other arguments than these shapes' states."""
