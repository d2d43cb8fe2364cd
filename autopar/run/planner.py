"""`Planner`: makes the plan and the programs of a call: traces, analyses, measures, compiles."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding

from autopar import jax_compat
from autopar.backends.clients import Clients
from autopar.backends.devices import Devices
from autopar.backends.global_arrays import local
from autopar.compile import Compiled, analyze_program, compile_program
from autopar.errors import ArgumentsError, SlowPlanWarning, StepError, StrategyError, warn
from autopar.ir.cluster import state_budget
from autopar.ir.figures import format_bytes
from autopar.ir.layout import even_axis
from autopar.ir.options import Options
from autopar.ir.plan import Plan
from autopar.ir.program import Block, Input, Program
from autopar.ir.strategy import TENSOR, asks_for_hosts, choice_for, without_hosts
from autopar.ir.trace import block_of
from autopar.jax_types import Jaxpr, Leaf, Pytree, PyTreeDef
from autopar.launch.group import StoreGroup, everyone
from autopar.launch.notices import tell
from autopar.launch.progress import mark
from autopar.measure.cluster import reductions_here
from autopar.measure.figures import Machine, assumed_note
from autopar.mpi.world import check_connected, check_ranks
from autopar.passes.analyze_batch import parameters_of
from autopar.passes.choose import move_tables, on_hosts
from autopar.passes.lifting.deferral import NotDeferrable, replayed_in_vain
from autopar.run.agreement import check_same_call, check_same_plan
from autopar.run.arguments import (
    Call,
    NamedArguments,
    States,
    check_positions,
    describe_leaves,
    note_cause,
    step_name,
)
from autopar.run.per_device import CallOfOne, PerDevice, unknown_axis, without_sharding
from autopar.run.planned_step import PlannedStep
from autopar.run.state_match import match_states, warn_of_missed_states
from autopar.tables.host import HostTable
from autopar.tables.kinds import spread_as
from autopar.ways.way import Way

#: Advice for those who can't have tables on hosts.
ON_DEVICES = 'keep their rows on the devices, strategy="ps"'


class _Choice(NamedTuple):
    """A compiled step, the way that runs it, and the options that the way was asked for by."""

    compiled: Compiled
    way: Way
    options: Options


@dataclass(frozen=True, slots=True, eq=False)
class _Traced:
    """A traced call."""

    call: Call
    fun: Callable[..., Pytree]  #: The function that was traced: the user's step, or one made of it.
    jaxpr: Jaxpr
    block: Block
    outputs: Pytree  #: The shapes of its results.
    out_tree: PyTreeDef
    states: States  #: The states among its arguments.
    seconds: float
    notes: Sequence[str]  #: What `explain` says about `fun`.


@dataclass(frozen=True, eq=False)
class Planner:
    """Plans calls of a step."""

    fun: Callable[..., Pytree]  #: The user's step.
    options: Options  #: The options of the whole step.
    machine: Machine  #: The machine, by whose figures plans are made.
    donate: bool  #: Whether the state is updated in place.
    #: As for `parallelize`.
    state_argnums: tuple[int, ...] | None
    batch_argnums: tuple[int, ...] | None
    static: NamedArguments  #: The static arguments.
    donated: NamedArguments | None = None  #: Arguments that the user donates; None: all of the state.
    devices: Devices | None = None  #: The devices that run the step; None: one.
    per_device: PerDevice | None = None  #: The devices of a per-device step (`axis_name=`).
    clients: Clients | None = None  #: Clients that train a replica each; `devices` are those of this one.
    #: Makes the planner of a pipeline, for a state that doesn't fit otherwise; None: not allowed.
    in_stages: Callable[[], Planner] | None = None
    #: Returns the way to run the step with some options.
    way_of: Callable[[Options], Way] = field(kw_only=True)

    @property
    def name(self) -> str:
        return step_name(self.fun)

    @functools.cached_property
    def way(self) -> Way:
        """The way to run the step by the user's options; arguments in host memory, or too large, ask for another."""
        return self.way_of(self.options)

    @functools.cached_property
    def processes(self) -> StoreGroup | None:
        """The processes that run the step together, or None for this one alone."""
        processes = self.way.processes(self)
        return processes if processes is not None and processes.several else None

    def plan(self, call: Call, leaves: Sequence[Leaf], number: int, *, is_first: bool) -> PlannedStep:
        """Plans a call.

        Args:
          call: The call.
          leaves: Its flat arguments; the ids in them are counted.
          number: Number of earlier calls, for messages.
          is_first: Whether this is the step's first plan.
        """
        self._check_job(leaves)
        traced = self._trace(call)
        if self.state_argnums is None and is_first:
            rest = traced.block, traced.states, self.batch_argnums or ()
            warn_of_missed_states(self.name, call, traced.outputs, *rest)
        parts = everyone().size if any(isinstance(x, HostTable) for x in leaves) else self.options.devices
        program = self._program(traced, parts)
        example = self._agreed_example(program, leaves, is_first=is_first)
        mark(number, f"planning {self.name}"[:64], "compiles")
        tell("planning")
        choice = self._keeping_shards(program, leaves, example)
        compiled, way, options = self._movable(traced, choice, example)
        notes, memory = [*traced.notes], self.machine.memory_bytes
        if self.in_stages is not None and memory is not None and compiled.plan.state_bytes > state_budget(memory):
            note = f"By data parallelism the state takes {format_bytes(compiled.plan.state_bytes)} on each device"
            try:
                staged = self.in_stages().plan(call, leaves, number, is_first=False)
                return replace(staged, notes=(*staged.notes, f"{note}, so it is run in stages."))
            except StrategyError as error:
                notes.append(f"{note}, and in stages it doesn't run: {error}.")
        warn_of_replicated_shards(compiled, way, self._own_devices, leaves)
        notes += shard_notes(options)
        if self.machine.rates is not None and any(table.terms for table in compiled.plan.tables):
            notes += filter(None, [assumed_note(self.machine.rates())])
        notes += _reduction_notes(compiled)
        return PlannedStep(
            call,
            traced.states,
            compiled,
            way,
            traced.jaxpr,
            traced.out_tree,
            traced.seconds,
            traced.fun,
            tuple(notes),
            self.devices,
            self.clients,
            self._donates(call, traced.states),
            self.machine,
        )

    # --- the phases of a plan ---

    def _trace(self, call: Call) -> _Traced:
        """Traces a call, and finds the states among its arguments. A per-device step (`axis_name=`) is first batched
        over all devices."""
        args, kwargs = call.shapes
        known = self.state_argnums, self.batch_argnums or ()
        check_positions(call, self.state_argnums, self.batch_argnums)
        start = time.perf_counter()
        fun, notes = self.fun, []
        try:
            if self.per_device is not None:
                fun, notes = CallOfOne(fun, self.name, call, self.per_device, *known, self.static).everywhere()
            traced = jax_compat.trace(fun, args, kwargs, **self.static.static_options)
        except NameError as error:
            raise unknown_axis(self.name, error, self.per_device) from error
        except Exception as error:
            note_cause(call, self.fun, error)
            raise
        seconds = time.perf_counter() - start
        if any(isinstance(c, jax_compat.Tracer) for c in jax_compat.open_jaxpr(traced.jaxpr)[1]):
            raise StepError(
                f"{self.name} isn't a function of its arguments: it uses a value that is being traced around it. "
                "Pass that value as an argument"
            )
        jaxpr, block, unfollowed = without_sharding(self.name, traced.jaxpr)
        states = match_states(call, block, traced.out_info, *known)
        notes = [*notes, *unfollowed]
        return _Traced(call, fun, jaxpr, block, traced.out_info, traced.out_tree, states, seconds, notes)

    def _program(self, traced: _Traced, devices: int) -> Program:
        call, described = traced.call, describe_leaves(traced.call, traced.states, traced.outputs, devices)
        program = Program(traced.block, *described, self.name)
        # An evaluation reads sharded parameters in place, arrays as well as Tables.
        layouts = call.read_layouts(parameters_of(program, self.options.batch_axis), devices)
        inputs = [
            x if x.role == "state" or layout is None else replace(x, role="table", layout=layout)
            for x, layout in zip(program.inputs, layouts, strict=True)
        ]
        return replace(program, inputs=tuple(inputs))

    def _agreed_example(self, program: Program, leaves: Sequence[Leaf], *, is_first: bool) -> Sequence[Leaf]:
        """Checks that all processes make the same call. Returns the flat arguments to plan by: the first client's, so
        that all clients run one program. Collective."""
        choices = {**self.choices, **incoming_shards(program.inputs, leaves)}
        if self.processes is not None:
            check_same_call(self.processes, program, choices, leaves)
        clients = self.clients
        if clients is None or not clients.processes.several or not is_first:
            return leaves
        batch = [k for k, input_ in enumerate(program.inputs) if input_.role != "state"]
        check_same_call(clients.processes, program, choices, [None if k in batch else x for k, x in enumerate(leaves)])
        if any(isinstance(leaves[k], jax.ShapeDtypeStruct) for k in batch):
            return leaves
        theirs = dict(zip(batch, clients.first([local(leaves[k]) for k in batch]), strict=True))
        return [theirs.get(k, x) for k, x in enumerate(leaves)]

    def _keeping_shards(self, program: Program, leaves: Sequence[Leaf], example: Sequence[Leaf]) -> _Choice:
        """Compiles by the user's options; tables that come in host memory stay there, and leaves that come in shards
        stay so where they can."""
        paths = [x.path for x, leaf in zip(program.inputs, leaves, strict=True) if isinstance(leaf, HostTable)]
        options = self.options
        if paths and not options.hosts:
            options = on_hosts(options, paths, everyone().size)
        asked = self.way_of(options)
        choice = self._compile(program, asked, example)
        keeping = keep_shards(asked, replicated_shards(choice.compiled, options, self._own_devices, leaves))
        if keeping is not options:
            with contextlib.suppress(StrategyError):  # they are replicated, and a warning says so
                return self._compile(program, asked.by(keeping), example)
        return choice

    def _movable(self, traced: _Traced, choice: _Choice, example: Sequence[Leaf]) -> _Choice:
        """Compiles again with tables moved that can't stay: to hosts if devices lack memory, or off hosts."""
        counts = {"devices": 1 if self.devices is None else self.devices.count, "ranks": everyone().size}
        compiled, _, options = choice
        move = move_tables(compiled.analysed, compiled.bound, options, self.machine.memory_bytes, **counts)
        if move is None:
            return choice
        options = move.options
        if options.hosts:
            check_ranks(self.name, f"tables on hosts ({move.reason})", ON_DEVICES)
        else:  # tables that came on hosts are none of the user's strategy
            options = replace(options, strategy=without_hosts(self.options.strategy))
        moved = self._compile(self._program(traced, options.devices), self.way_of(options), example)
        return moved._replace(compiled=moved.compiled.with_reason(move.paths, move.reason))

    def _compile(self, program: Program, asked: Way, example: Sequence[Leaf] | None) -> _Choice:
        """Analyses, measures and compiles; once more without deferring a leaf's rows whenever these can't be."""
        way = asked.resolve(self, program)
        while True:
            analysed = analyze_program(program, way)
            try:
                compiled = compile_program(analysed, way, way.measured(self, analysed, example))
                tables = {k for space in analysed.program.facts.spaces for k in space.tables}
                known = replayed_in_vain(compiled.program, tables, way.options)
                if not known:
                    break
            except NotDeferrable as error:
                known = dict.fromkeys(error.leaves, error.refusal)
            way = way.by(replace(way.options, undeferred={**way.options.undeferred, **known}))
        if self.processes is not None:
            check_same_plan(self.processes, compiled)
        return _Choice(compiled, way, asked.options)

    @property
    def _own_devices(self) -> Devices | None:
        """The devices of this process's client, if clients train; else all."""
        return self.devices if self.clients is None else self.clients.devices

    def may_follow(self, plan: Plan) -> bool:
        """Says whether an earlier plan may decide what the user left open: it is for as many devices, or hosts."""
        options = self.options
        given = options.plan is not None or not self.way.may_follow
        hosts = asks_for_hosts(plan.strategy)
        return not given and plan.devices == options.devices and hosts == options.hosts

    def following(self, plan: Plan) -> Planner:
        """Returns a planner of this step that follows an earlier plan, and measures nothing."""
        options = replace(self.options, plan=plan, strategy=plan.strategy, sparse=plan.sparse)
        machine = replace(self.machine, rates=None, stages=None)
        return replace(self, options=options, machine=machine, in_stages=None)

    def _check_job(self, leaves: Sequence[Leaf]) -> None:
        """Checks that this job's processes are connected, by MPI if the step needs it."""
        check_connected(self.name)
        if any(isinstance(leaf, HostTable) for leaf in leaves):
            check_ranks(self.name, "tables on hosts", ON_DEVICES)
        needed = self.way.needs_mpi(self)
        if needed is not None:
            check_ranks(self.name, *needed)

    def _donates(self, call: Call, states: States) -> bool:
        """Says whether a call's state is updated in place. Where the user donates a part, none is, with a warning."""
        arguments = [call.arguments[k] for k in states.outputs]
        kept = [a.name for a in arguments if self.donated is not None and a.key not in self.donated]
        donate = self.donate and not kept
        if self.way.is_asynchronous and not donate:
            raise ArgumentsError(
                f"{self.name}: servers go on with every step, so the old state can't be kept. Leave out donate=False, "
                "donate_argnums and donate_argnames; autopar.average(state) and autopar.materialize(state) make copies"
            )
        if kept and len(kept) < len(arguments):
            warn(
                f"{self.name}: donate_argnums (or donate_argnames) names a part of the state, and leaves out "
                f"{', '.join(map(repr, kept))}: so each step copies all of it. Name all of the state, or leave both "
                "options out: autopar updates the state in place by itself",
                SlowPlanWarning,
            )
        return donate

    def plan_again(self, planned: PlannedStep, example: Sequence[Leaf] | None, headroom: float) -> Compiled:
        """Plans the step again with another example and headroom."""
        old = planned.compiled.analysed
        program = Program(block_of(planned.jaxpr), old.inputs, old.outputs, self.name)
        return self._compile(program, planned.way.by(replace(planned.options, headroom=headroom)), example).compiled

    @property
    def choices(self) -> Mapping[str, str]:
        """The user's choices as text, by option. All processes that run the step must have the same."""
        chosen: dict[str, Any] = {f.name: getattr(self.options, f.name) for f in fields(self.options)}
        chosen |= {
            "donate": self.donate,
            "state_argnums": self.state_argnums,
            "batch_argnums": self.batch_argnums,
            "static": self.static,
            "donated": self.donated,
            "axis_name": None if self.per_device is None else self.per_device.axis,
            "mesh": None if self.devices is None else (self.devices, self.devices.mesh.devices.tolist()),
            **self.way.choices,
        }
        if self.clients is not None:
            chosen["mesh"] = self.clients.grid.tolist()
        plain = {name: dict(x) if isinstance(x, Mapping) else x for name, x in chosen.items()}
        return {name: x.digest if isinstance(x, Plan) else repr(x) for name, x in plain.items()}


def _reduction_notes(compiled: Compiled) -> list[str]:
    """Returns notes on MPI's sums in rings, or beside programs. Collective the first time."""
    if compiled.plan.reduction_backend != "mpi" or not everyone().several:
        return []
    ways = (
        "sums of {} or more are made in rings, by calibration faster than MPI's AllReduce",
        "gradients are summed in buckets of {} or more while others are computed, by calibration hidden by them",
    )
    sizes = reductions_here()
    return [way.format(format_bytes(least)) for way, least in zip(ways, sizes, strict=True) if least is not None]


# --- a state that comes sharded stays so, although the fastest plan would replicate it ---


class Sharded(NamedTuple):
    """A strategy by which a leaf stays sharded, and the axis."""

    method: str
    axis: int


def incoming_shards(inputs: Sequence[Input], leaves: Sequence[Leaf]) -> dict[str, str]:
    """Returns the shardings of state leaves that come sharded, as text to compare between processes."""
    pairs = zip(inputs, leaves, strict=True)
    specs = [f"{x.path} {leaf.sharding.spec}" for x, leaf in pairs if x.role == "state" and _is_sharded(leaf)]
    return {"the state's shards": ", ".join(specs)}


def replicated_shards(
    compiled: Compiled, options: Options, devices: Devices | None, leaves: Sequence[Leaf]
) -> dict[str, Sharded | None]:
    """Finds state leaves that come sharded and that the plan replicates.

    Returns:
      Path -> how the leaf can stay sharded; None if its shards aren't along the data or the tensor axis, or if these
      devices can't divide it evenly.
    """
    bound, inputs = compiled.bound, compiled.analysed.inputs
    if devices is None or bound.on_hosts:
        return {}
    plan, found = bound.plan, dict[str, Sharded | None]()
    by_rows = {table.path for table in plan.tables} if options.rows_travel else set[str]()
    for k, (input_, leaf) in enumerate(zip(inputs, leaves, strict=True)):
        is_whole = bound.placement(k) == (None, None) and k not in bound.uneven and input_.path not in by_rows
        if input_.role == "state" and is_whole and _is_sharded(leaf):
            found[input_.path] = _how_sharded(input_.path, leaf, plan, devices)
    return found


def _how_sharded(path: str, leaf: jax.Array, plan: Plan, devices: Devices) -> Sharded | None:
    """Returns how a leaf can stay sharded: as a divided weight, or along an axis that the data axis divides evenly."""
    if devices.mesh.size == 1:
        return None
    groups = () if plan.tensor is None else plan.tensor.groups
    divided = next((group.axes[path] for group in groups if path in group.axes), None)
    if divided is not None and _mesh_axes(leaf) == {devices.tensor_axis}:
        return Sharded(TENSOR, divided)
    along = spread_as(leaf)
    axis = 0 if along is None else along[1]
    is_along_data = along is not None and leaf.sharding.is_equivalent_to(devices.sharding(axis), leaf.ndim)
    if not is_along_data and devices.count != devices.mesh.size:
        return None
    even = even_axis(leaf.shape, axis, devices.count)
    return None if even is None else Sharded("ps", even)


def _is_sharded(leaf: Leaf) -> bool:
    if not isinstance(leaf, jax.Array) or jax_compat.is_tracer(leaf) or jax_compat.is_key(leaf.dtype):
        return False
    return isinstance(leaf.sharding, NamedSharding) and not leaf.is_fully_replicated


def _mesh_axes(leaf: jax.Array) -> set[str]:
    """Returns the mesh axes over which an array is divided."""
    assert isinstance(leaf.sharding, NamedSharding), "it is sharded"
    parts = [part if isinstance(part, tuple) else (part,) for part in leaf.sharding.spec if part is not None]
    return {name for names in parts for name in names if leaf.sharding.mesh.shape[name] > 1}


def keep_shards(way: Way, replicated: Mapping[str, Sharded | None]) -> Options:
    """Returns the way's options, changed so that leaves that would be replicated stay sharded, unless the user's
    strategy says otherwise."""
    options = way.options
    kept = {path: how for path, how in replicated.items() if how is not None and _is_open(options, path)}
    if not kept or not way.keeps_shards:
        return options
    rest = options.strategy if isinstance(options.strategy, Mapping) else {"**": options.strategy}
    strategy = {**{path: how.method for path, how in kept.items()}, **rest}
    return replace(options, strategy=strategy, spread_axes={path: how.axis for path, how in kept.items()})


def _is_open(options: Options, path: str) -> bool:
    return options.plan is None and choice_for(options.strategy, path).method == "auto"


def _sorted_paths(paths: Iterable[str]) -> list[str]:
    """Sorts paths, parameters before their slots."""
    return sorted(paths, key=lambda path: (len(path), path))


def shard_notes(options: Options) -> list[str]:
    """Returns `explain`'s note on leaves that stay sharded."""
    paths = _sorted_paths(options.spread_axes)
    others = f", and {len(paths) - 3} others" if len(paths) > 3 else ""
    return [f"In shards, as they came: {', '.join(paths[:3])}{others}."] if paths else []


def warn_of_replicated_shards(compiled: Compiled, way: Way, devices: Devices | None, leaves: Sequence[Leaf]) -> None:
    """Warns of leaves that come sharded and are replicated, unless the user asked for it."""
    options = way.options
    replicated = replicated_shards(compiled, options, devices, leaves)
    paths = _sorted_paths(path for path in replicated if options.plan is not None or _is_open(options, path))
    if not paths or devices is None:
        return
    given = {input_.path: leaf for input_, leaf in zip(compiled.analysed.inputs, leaves, strict=True)}
    others = f" (and {len(paths) - 1} other leaves)" if len(paths) > 1 else ""
    size = format_bytes(sum(given[p].nbytes for p in paths))
    if not options.rows_travel:
        where = f"after the step each of {devices.mesh.size} devices has all of it, {size} each"
    else:
        where = f"servers keep all of it, {size}, which each device of a worker has in each step"
    warn(
        f"{compiled.analysed.name}: {paths[0]}{others} came in shards, {given[paths[0]].sharding.spec}, and {where}. "
        f"{_remedy(way, given[paths[0]], devices)} (docs/devices.md)",
        SlowPlanWarning,
    )


def _remedy(way: Way, leaf: jax.Array, devices: Devices) -> str:
    if not way.keeps_shards:
        return "Where clients average, sync=autopar.sync.Average(every=...), it stays in shards"
    if devices.mesh.size == 1:
        return "Clients that have several devices each keep it in shards: give fewer, clients="
    names = _mesh_axes(leaf)
    axis = next((name for name in devices.mesh.axis_names if names == {name} and name != devices.axis), None)
    if axis is None:
        return (
            f"What the {devices.count} devices of the data axis {devices.axis!r} alone have, and can divide, stays in "
            f"shards: bring it there, jax.device_put(..., NamedSharding(mesh, P({devices.axis!r})))"
        )
    asked = "" if axis == devices.tensor_axis else f"Say tensor_axis={axis!r}: w"
    return (
        f"{asked or 'W'}eights of products that the {devices.mesh.shape[axis]} devices of {axis!r} can divide stay in "
        "their shards; others can lie along the data axis"
    )
