"""`StageExecutor`: runs a timeline's actions on the devices of this process.

Each stage's program is compiled for its device. Programs are issued in an order in which their operands exist, and JAX
runs those of different devices at the same time. A value for another stage is sent as soon as it is made, and dropped
after its last reader, so that a stage holds just the activations of its schedule.
"""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np

from autopar import jax_compat
from autopar.backends.devices import Devices, Mapped, StageDevice
from autopar.backends.emit import emit
from autopar.backends.microbatches import Microbatch as MicrobatchOf
from autopar.backends.single import route_types
from autopar.ir.pipeline import StagedStep, StageProgram
from autopar.ir.program import RouteType, Var
from autopar.ir.reductions import REDUCERS, neutral
from autopar.ir.timeline import Action, Drops, Join, Microbatch, Run, Send, SumOf, Timeline, Value, Whole, reads_of
from autopar.jax_types import Array, Dtype, Leaf, Sharding
from autopar.launch.notices import tell
from autopar.launch.progress import PROGRESS
from autopar.measure.compiled_collectives import Collective, read_collectives
from autopar.mpi.point_to_point import Incoming, PointToPoint, point_to_point
from autopar.run.kept_placements import KeptArguments


class Arguments:
    """A call's arguments, and the microbatches' parts of them."""

    def __init__(self, arrays: Mapping[Var, Leaf], step: StagedStep, kept: KeptArguments) -> None:
        self._arrays, self._parts, self._kept = arrays, step.parts, kept
        wholes = step.parts.values()
        self._slices = {whole: _slices(arrays[whole], axis, step.microbatches) for whole, axis in wholes}

    def given(self, var: Var) -> Leaf:
        return self._arrays[var]

    def put(self, value: Value, device: StageDevice, axis: int | None) -> Array:
        """Brings an argument, or a microbatch's part of it, to a device; `axis`: divided along it."""
        if value.var not in self._parts:
            return self._kept.put(value.var, self._arrays[value.var], device, axis)
        assert isinstance(value.part, Microbatch), "parts are of microbatches"
        return device.put(self._slices[self._parts[value.var][0]][value.part.number], axis)


class Values:
    """The values that devices of this process hold in a step. `put` brings an argument to a device, divided along an
    axis if one is given."""

    def __init__(
        self,
        devices: Mapping[int, StageDevice],
        put: Callable[[Value, StageDevice, int | None], Array],
        divided: Mapping[Var, int],
    ) -> None:
        self._devices, self._put, self._divided = devices, put, divided
        self._held: dict[int, dict[Value, Array]] = {device: {} for device in devices}

    def empty(self) -> Values:
        return Values(self._devices, self._put, self._divided)

    def has(self, value: Value, device: int) -> bool:
        return value in self._held[device]

    def put(self, value: Value, device: int, array: Array) -> None:
        self._held[device][value] = array

    def at(self, value: Value, device: int) -> Array:
        """Returns a value on a device. An argument is brought there when it is first read."""
        held = self._held[device]
        if value not in held:
            held[value] = self._put(value, self._devices[device], self._divided.get(value.var))
        array = held[value]
        if isinstance(array, Arriving):
            with PROGRESS.during("waiting for another stage", "waits"):
                array = held[value] = self._devices[device].put(array.wait(), self._divided.get(value.var))
        return array

    def drop(self, value: Value, device: int) -> None:
        self._held[device].pop(value, None)


def _types(var: Var, dtype: Callable[[Dtype], Dtype]) -> Leaf:
    """Returns a value's types; a route is several arrays."""
    if isinstance(var.type, RouteType):
        return route_types(var.type)
    return jax.ShapeDtypeStruct(var.shape, dtype(var.dtype))


def placed_types(var: Var, sharding: Sharding, dtype: Callable[[Dtype], Dtype]) -> Leaf:
    """Returns a value's types with a sharding, and with dtypes mapped by `dtype`."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), _types(var, dtype))


def message_of(value: Leaf) -> list[np.ndarray]:
    """Returns the arrays to send for a value; keys are sent as their data."""
    arrays = jax.tree.leaves(value)
    return [np.asarray(jax.random.key_data(x) if jax_compat.is_key(x.dtype) else x) for x in arrays]


@dataclass(frozen=True, eq=False)
class Arriving:
    """A value on its way to this rank."""

    types: Leaf
    parts: Sequence[Incoming]

    @staticmethod
    def of(value: Value, messages: PointToPoint, source: int) -> Arriving:
        """Begins to receive a value. Sums have a wider dtype."""
        types = _types(value.var, jax_compat.sum_dtype if isinstance(value.part, SumOf) else lambda dtype: dtype)
        data = jax.tree.leaves(jax.eval_shape(_data, types))
        return Arriving(types, [messages.receive(x.shape, x.dtype, source) for x in data])

    def wait(self) -> Leaf:
        parts = iter(self.parts)

        def arrived(like: Leaf) -> Leaf:
            array = next(parts).wait()
            return jax_compat.wrap_keys(array, like.dtype) if jax_compat.is_key(like.dtype) else array

        return jax.tree.map(arrived, self.types)


def _data(value: Leaf) -> Leaf:
    return jax.tree.map(lambda x: jax.random.key_data(x) if jax_compat.is_key(x.dtype) else x, value)


def _slices(value: Leaf, axis: int, count: int) -> list[Leaf]:
    if isinstance(value, np.ndarray):
        return np.split(value, count, axis)
    return [_part(value, np.int32(k), axis, count) for k in range(count)]


@functools.partial(jax.jit, static_argnums=(2, 3))
def _part(value: Array, number: Array, axis: int, count: int) -> Array:
    return MicrobatchOf(number, count).share(value, axis)


@dataclass(frozen=True, slots=True, eq=False)
class CompiledProgram:
    """A stage's program on a device. `run`: (number of a microbatch, sums, *inputs) -> (new sums, values), with sums
    updated in place; `start` makes the sums before the first microbatch."""

    run: jax.stages.Compiled
    start: Callable[[], Sequence[Array]] = tuple


@dataclass(frozen=True, eq=False)
class StageExecutable:
    """A stage's program, to be compiled for each device that runs it."""

    #: The program, and M, the number of microbatches.
    program: StageProgram
    count: int
    joins: Mapping[Var, str]  #: Outputs that are summed over microbatches -> name of the reduction.
    read: tuple[int, ...]  #: Positions of outputs that others read.
    donated: tuple[int, ...]  #: Positions of inputs whose buffers the results may take.
    divided: Mapping[Var, int]  #: Values that the devices of a stage divide -> the axis.

    @property
    def _values(self) -> list[Var]:
        return [self.program.outputs[k] for k in self.read]

    def lower(self, device: StageDevice) -> list[jax.stages.Lowered]:
        """Lowers the programs of `CompiledProgram` for a device."""

        def shardings(values: Iterable[Var]) -> list[Leaf]:
            return [device.sharding(axis) for axis in self._axes(values)]

        def types(values: Sequence[Var], dtype: Callable[[Dtype], Dtype] = lambda dtype: dtype) -> list[Leaf]:
            pairs = zip(values, shardings(values), strict=True)
            return [placed_types(v, there, dtype) for v, there in pairs]

        donated = (1, *(k + 2 for k in self.donated))
        run = jax.jit(
            self._run(device.mesh),
            donate_argnums=donated,
            out_shardings=(shardings(self.joins), shardings(self._values)),
        )
        number, sums = jax.ShapeDtypeStruct((), np.int32), types(list(self.joins), jax_compat.sum_dtype)
        programs = [run.lower(number, sums, *types(self.program.block.inputs))]
        return programs + ([jax.jit(self._start, out_shardings=shardings(self.joins)).lower()] if sums else [])

    def _start(self) -> Sequence[Array]:
        return [jnp.broadcast_to(neutral(n, jax_compat.sum_dtype(v.dtype)), v.shape) for v, n in self.joins.items()]

    def _axes(self, values: Iterable[Var]) -> list[int | None]:
        return [self.divided.get(v) for v in values]

    def _run(self, devices: Devices | None) -> Callable[..., tuple[Sequence[Array], Sequence[Array]]]:
        """Returns the program; `devices`: devices of the stage that divide its products."""
        block, count = self.program.block, len(self.joins)
        here = None if devices is None else Mapped(devices.mesh, devices.axis, tensor_axis=devices.tensor_axis)
        if devices is not None:
            assert self.program.local is not None, "it is written for one of several devices"
            block = self.program.local

        def of_device(number: Array, *operands: Array) -> tuple[Array, ...]:
            results = emit(block, {}, here, MicrobatchOf(number, self.count))(*operands[count:])
            made = dict(zip(self.program.outputs, jax.tree.map(jnp.asarray, results), strict=True))
            pairs = zip(self.joins.items(), operands, strict=False)
            joined = [REDUCERS[name].join(total, made[v].astype(total.dtype)) for (v, name), total in pairs]
            return *joined, *(made[v] for v in self._values)

        of_all = of_device
        if devices is not None:
            given, made = self._axes(self.program.block.inputs), (*self._axes(self.joins), *self._axes(self._values))
            given = [None, *self._axes(self.joins), *given]
            of_all = devices.mapped(of_device, [None] * len(given), (None,) * len(made), tensors=(given, made))

        def run(number: Array, sums: Sequence[Array], *inputs: Array) -> tuple[Sequence[Array], Sequence[Array]]:
            results = of_all(number, *sums, *inputs)
            return [*results[:count]], [*results[count:]]

        run.__name__ = f"{self.program.phase}_{self.program.stage}"
        return run


def stage_executables(
    step: StagedStep, timeline: Timeline, donated: Mapping[StageProgram, tuple[int, ...]] = MappingProxyType({})
) -> dict[StageProgram, StageExecutable]:
    """Returns the executables of a timeline's programs; `donated`: positions of inputs that each may overwrite."""
    runs = {action.program: action for action in timeline.actions if isinstance(action, Run)}
    values = (value for action in timeline.actions for value in reads_of(action))
    read = {value for value in values if not isinstance(value.part, SumOf)} | {*timeline.results}
    used: dict[StageProgram, set[int]] = {program: set() for program in runs}
    for action in timeline.actions:
        if isinstance(action, Run):
            used[action.program].update(k for k, value in enumerate(action.writes) if value in read)
    return {
        program: StageExecutable(
            program=program,
            count=step.microbatches,
            joins={v: str(step.joins[v][1]) for v in run.sums},
            read=tuple(sorted(used[program])),
            donated=donated.get(program, ()),
            divided=step.divided,
        )
        for program, run in runs.items()
    }


@functools.partial(jax.jit, static_argnums=(0, 1))
def joined(joins: tuple[str, ...], dtypes: tuple[Dtype, ...], parts: Sequence[Sequence[Array]]) -> Sequence[Array]:
    """Adds up all replicas' sums in the order of their numbers."""
    pairs = zip(joins, dtypes, parts, strict=True)
    return [functools.reduce(REDUCERS[n].join, each).astype(dtype) for n, dtype, each in pairs]


class StageExecutor:
    """Runs this process's part of a timeline, which has every action that will ever be run. `donated`: positions of
    inputs that each program may overwrite."""

    def __init__(
        self,
        step: StagedStep,
        timeline: Timeline,
        devices: Sequence[StageDevice],
        donated: Mapping[StageProgram, tuple[int, ...]] = MappingProxyType({}),
    ) -> None:
        self._step, self._timeline = step, timeline
        self.all, self.ranks = tuple(devices), [device.process_index for device in devices]
        self.devices = {k: d for k, d in enumerate(devices) if d.process_index == jax.process_index()}
        self.messages = point_to_point() if len(set(self.ranks)) > 1 else None
        self._programs = stage_executables(step, timeline, donated)

    def takes_part(self, action: Action) -> bool:
        """Says whether an action involves a device of this process."""
        ends = (action.source, action.target) if isinstance(action, Send) else (action.device,)
        return not self.devices.keys().isdisjoint(ends)

    def compile(self) -> None:
        _ = self._compiled

    def run(self, actions: Iterable[tuple[Action, Drops]], values: Values) -> None:
        """Runs actions of this process in order."""
        compiled = self._compiled
        for action, drops in actions:
            if isinstance(action, Run):
                self._run(action, compiled[action.program, action.device], values)
            elif isinstance(action, Send):
                self._send(action, values)
            else:
                self._join(action, values)
            for device, value in drops:
                if device in self.devices:
                    values.drop(value, device)

    def collectives(self) -> list[Collective]:
        """Returns the collectives of a microbatch between the devices of each stage."""
        runs = {program: each.run for (program, _), each in self._compiled.items() if program.phase in ("F", "B", "W")}
        return [c for run in runs.values() for c in read_collectives(run.as_text() or "")]

    @functools.cached_property
    def _compiled(self) -> Mapping[tuple[StageProgram, int], CompiledProgram]:
        """(Program, device) -> compiled program. All are compiled at the same time, before the first step."""
        runs = dict.fromkeys((a.program, a.device) for a in self._timeline.actions if isinstance(a, Run))
        own = [key for key in runs if key[1] in self.devices]
        lowered = [self._programs[program].lower(self.devices[device]) for program, device in own]
        with concurrent.futures.ThreadPoolExecutor() as threads:
            made = [[threads.submit(each.compile) for each in programs] for programs in lowered]
            count = sum(map(len, made))
            tell("compiling stages", parts=count)
            for done, _ in enumerate(concurrent.futures.as_completed(itertools.chain(*made)), 1):
                tell("compiling stages", parts=count, done=done)
            return {key: CompiledProgram(*(f.result() for f in each)) for key, each in zip(own, made, strict=True)}

    def _run(self, action: Run, compiled: CompiledProgram, values: Values) -> None:
        program, device = self._programs[action.program], action.device
        operands = [values.at(value, device) for value in action.reads]
        names = [action.sums[v] for v in program.joins]
        if names and not values.has(names[0], device):
            sums = compiled.start()
        else:
            sums = [values.at(name, device) for name in names]
        number = (action.microbatch or 0) % self._step.microbatches  # 0 where a minibatch is its only microbatch
        sums, results = compiled.run(np.int32(number), sums, *operands)
        for name, total in zip(names, sums, strict=True):
            values.put(name, device, total)
        for k, result in zip(program.read, results, strict=True):
            values.put(action.writes[k], device, result)
        if self.messages is not None and self.devices[device].platform == "cpu":
            made = jax.tree.leaves((sums, results))
            if self._step.asynchronous is not None:  # programs are long: messages of whole minibatches move meanwhile
                self.messages.during(lambda: all(map(jax_compat.is_ready, made)))
            jax.block_until_ready(made)  # the next program would compete with it for cores

    def _send(self, action: Send, values: Values) -> None:
        if action.source not in self.devices:
            assert self.messages is not None, "there are several ranks"
            source = self.ranks[action.source]
            values.put(action.value, action.target, Arriving.of(action.value, self.messages, source))
            return
        value = values.at(action.value, action.source)
        if action.target in self.devices:
            placed = self.devices[action.target].put(value, self._step.divided.get(action.value.var))
            values.put(action.value, action.target, placed)
            return
        assert self.messages is not None, "there are several ranks"
        for array in message_of(value):  # a copy if an update may donate its buffer
            self.messages.send(
                array.copy() if isinstance(action.value.part, Whole) else array, self.ranks[action.target]
            )

    def _join(self, action: Join, values: Values) -> None:
        sums: dict[Value, tuple[str, list[Array]]] = {}
        for whole, (names, join) in action.made.items():
            parts = [values.at(name, action.device) for name in names]
            if isinstance(join, str):
                sums[whole] = join, parts
            else:
                self._put(whole, action.device, jnp.concatenate(parts, axis=join), values)
        joins, dtypes = tuple(join for join, _ in sums.values()), tuple(value.var.dtype for value in sums)
        totals = joined(joins, dtypes, [parts for _, parts in sums.values()]) if sums else []
        for whole, total in zip(sums, totals, strict=True):
            self._put(whole, action.device, total, values)

    def _put(self, value: Value, device: int, array: Array, values: Values) -> None:
        values.put(value, device, self.devices[device].put(array, self._step.divided.get(value.var)))
