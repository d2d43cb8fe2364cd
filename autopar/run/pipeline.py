"""`PipelineRunner`: calls a step whose stages are on devices of their own, in the order of a schedule.

Each program of a stage is compiled by itself for its device. Programs are issued in an order in which their operands
exist, and JAX runs those of different devices at the same time; a value that another stage reads is sent as soon as it
is made. What no later program reads is let go, so that a stage holds the activations that its schedule says. The
devices of a stage (replicas) take microbatches in turn, hold the same weights, and each runs the update.
"""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.backends.stage_device import StageDevice, array_over
from autopar.errors import StepError
from autopar.ir.pipeline import StagedStep, StageProgram
from autopar.ir.program import Atom, Literal, Var
from autopar.ir.timeline import Action, Join, Run, Send, Timeline, Value, Whole
from autopar.launch.notices import tell
from autopar.launch.progress import PROGRESS
from autopar.mpi.point_to_point import point_to_point
from autopar.run.buffers import with_own_buffers
from autopar.run.stage_programs import CompiledProgram, joined, stage_executables
from autopar.run.stage_values import Arriving, Values, message_of
from autopar.tables.kinds import copied
from autopar.tables.staged import StageArray, StagePlace

Array = Any


class PipelineRunner:
    """Calls a planned step on flat arrays, its stages on devices of their own.

    Args:
      step: The programs.
      timeline: What all devices do.
      devices: All of them, by number; this process runs the programs of its own.
      out_tree: The structure of the results.
      donate: Whether states are updated in place.
    """

    def __init__(
        self, step: StagedStep, timeline: Timeline, devices: Sequence[StageDevice], out_tree: Any, donate: bool
    ) -> None:
        self._step, self._out_tree, self._donate = step, out_tree, donate
        self.timeline = timeline
        self._all, self._ranks = tuple(devices), [device.process_index for device in devices]
        self._devices = {k: d for k, d in enumerate(devices) if d.process_index == jax.process_index()}
        self.messages = point_to_point() if len(set(self._ranks)) > 1 else None
        self._actions = [
            (action, drops)
            for action, drops in zip(timeline.actions, timeline.drops, strict=True)
            if not self._devices.keys().isdisjoint(_ends(action))
        ]
        self._leaves = {value.var: devices for value, devices in timeline.given.items()}
        self._homes = {value.var: devices for value, devices in timeline.results.items()}
        self._named = {value.var: value for value in (*timeline.given, *timeline.results)}
        self._inputs = [leaf if isinstance(leaf, tuple) else (leaf,) for leaf in step.inputs]
        self._states = {k for k, (var, *_) in enumerate(self._inputs) if var in step.homes}
        self._is_new = True
        self._programs = stage_executables(step, timeline, _last_readers(step) if donate else {})

    @functools.cached_property
    def _compiled(self) -> Mapping[tuple[StageProgram, int], CompiledProgram]:
        """(Program, device) -> what runs there. All are compiled before the first step, at the same time."""
        places = dict.fromkeys((a.program, a.device) for a, _ in self._actions if isinstance(a, Run))
        own = [key for key in places if key[1] in self._devices]
        lowered = [self._programs[program].lower(self._devices[device]) for program, device in own]
        with concurrent.futures.ThreadPoolExecutor() as threads:
            made = [[threads.submit(each.compile) for each in programs] for programs in lowered]
            count = sum(map(len, made))
            tell("compiling stages", parts=count)
            for done, _ in enumerate(concurrent.futures.as_completed(itertools.chain(*made)), 1):
                tell("compiling stages", parts=count, done=done)
            return {key: CompiledProgram(*(f.result() for f in each)) for key, each in zip(own, made, strict=True)}

    def lower(self) -> Any:
        """A pipeline is several programs."""
        raise StepError("a step in stages runs in several programs, and so can't be traced into one (lower, jax.jit)")

    def was_exceeded(self) -> bool:
        """Never: no capacity is measured."""
        return False

    def __call__(self, leaves: Sequence[Any]) -> Any:
        """The step's results, of flat arrays; new states are where their stages are."""
        if self._is_new and self._donate:  # a state of the user's own may share buffers; what a step returns doesn't
            leaves, self._is_new = with_own_buffers(leaves, self._states), False
        compiled, values = self._compiled, self._given(leaves)
        for action, drops in self._actions:
            if isinstance(action, Run):
                self._run(action, compiled[action.program, action.device], values)
            elif isinstance(action, Send):
                self._send(action, values)
            else:
                self._join(action, values)
            for device, value in drops:
                if device in self._devices:
                    values.drop(value, device)
        if self.messages is not None:
            with PROGRESS.during("waiting for the other stages", "waits"):
                self.messages.finish()
        seen = set[int]()
        return self._out_tree.unflatten([self._result(each, values, seen) for each in self._step.outputs])

    def _given(self, leaves: Sequence[Any]) -> Values:
        """The arguments; leaves of the state on all devices of their stages, before any of these donates its own."""
        step, arrays = self._step, dict[Var, Any]()
        for parts, leaf in zip(self._inputs, leaves, strict=True):
            arrays |= zip(parts, self._parts(parts, leaf), strict=True)
        values = Values(self._devices, arrays, step)
        for value, devices in self.timeline.given.items():
            for device in devices:
                if device in self._devices:
                    values.at(value, device)
        for leaf in leaves if self._donate else ():
            if isinstance(leaf, StageArray):
                leaf.hand_on()
        return values

    def _parts(self, parts: Sequence[Var], leaf: Any) -> Sequence[Any]:
        """What this rank has of the parts of a leaf, which another pipeline may have cut otherwise."""
        if len(parts) == 1 and not isinstance(leaf, StageArray):
            return [leaf]
        ends = tuple(itertools.accumulate(var.shape[0] for var in parts))
        if isinstance(leaf, StageArray) and tuple(place.stop for place in leaf.places) == ends:
            return [self._moved(*each) for each in zip(parts, leaf.places, leaf.values, strict=True)]
        array = np.asarray(leaf) if isinstance(leaf, StageArray) else leaf
        return [array[start:end] for start, end in zip((0, *ends), ends, strict=False)]

    def _moved(self, var: Var, place: StagePlace, value: Any) -> Any:
        """What this rank has of a part; sent there where another pipeline has left it on other ranks."""
        places = dict.fromkeys(self._ranks[device] for device in self._leaves.get(var, ()))
        missing, me = [rank for rank in places if rank not in place.ranks], jax.process_index()
        if self.messages is None or (me != place.ranks[0] and me not in missing):
            return value
        if me in missing:
            shape = (place.stop - place.start, *var.shape[1:])
            return self.messages.receive(shape, var.dtype, place.ranks[0]).wait()
        for rank in missing:
            self.messages.send(np.array(value), rank)
        return value

    def _run(self, action: Run, compiled: CompiledProgram, values: Values) -> None:
        program, device = self._programs[action.program], action.device
        operands = [values.at(value, device) for value in action.reads]
        names = [action.sums[v] for v in program.joins]
        if names and not values.has(names[0], device):
            sums = compiled.start()
        else:
            sums = [values.at(name, device) for name in names]
        sums, results = compiled.run(np.int32(action.microbatch or 0), sums, *operands)
        for name, total in zip(names, sums, strict=True):
            values.put(name, device, total)
        for k, result in zip(program.read, results, strict=True):
            values.put(action.writes[k], device, result)
        if self.messages is not None and self._devices[device].platform == "cpu":
            jax.block_until_ready((sums, results))  # what comes next would take cores from it

    def _send(self, action: Send, values: Values) -> None:
        if action.source not in self._devices:
            assert self.messages is not None, "there are several ranks"
            source = self._ranks[action.source]
            values.put(action.value, action.target, Arriving.of(action.value, self.messages, source))
            return
        value = values.at(action.value, action.source)
        if action.target in self._devices:
            placed = self._devices[action.target].put(value, self._step.divided.get(action.value.var))
            values.put(action.value, action.target, placed)
            return
        assert self.messages is not None, "there are several ranks"
        for array in message_of(value):  # a copy where the update may give its buffer away
            self.messages.send(
                array.copy() if isinstance(action.value.part, Whole) else array, self._ranks[action.target]
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
        values.put(value, device, self._devices[device].put(array, self._step.divided.get(value.var)))

    def _result(self, out: Atom | tuple[Atom, ...], values: Values, seen: set[int]) -> Any:
        """A result where it is; a leaf of the state that stages on several ranks have, or several stages, part by part.
        Each has buffers of its own: those of `seen` are copied."""
        if isinstance(out, Literal):
            return out.value
        parts = [a for a in (out if isinstance(out, tuple) else (out,)) if isinstance(a, Var)]
        if isinstance(out, tuple) or (self.messages is not None and out in self._step.new_leaves):
            stages = [[self._all[k] for k in self._devices_of(var)] for var in parts]
            ends = tuple(itertools.accumulate(v.shape[0] for v in parts))
            places = StagePlace.of_parts(stages, ends, self._step.divided.get(parts[0]), self._all)
            arrays = [self._array(var, values, seen) for var in parts]
            return StageArray((places[-1].stop, *parts[0].shape[1:]), parts[0].dtype, places, arrays)
        if parts[0] in self._homes:
            return self._array(parts[0], values, seen)
        return _own(values.given(parts[0]), seen)

    def _devices_of(self, var: Var) -> Sequence[int]:
        """Of a result, or of a leaf of the state that is returned as it was."""
        return self._homes[var] if var in self._homes else self._leaves[var]

    def _array(self, var: Var, values: Values, seen: set[int]) -> Array | None:
        """One array on all devices of its stage that this process has."""
        places = [k for k in self._devices_of(var) if k in self._devices]
        shards = [_own(values.at(self._named[var], k), seen) for k in places]
        return array_over(shards, [self._devices[k] for k in places], self._step.divided.get(var)) if shards else None


def _own(array: Any, seen: set[int]) -> Any:
    """An array, or a copy if it was seen before."""
    array = copied(array) if id(array) in seen else array
    seen.add(id(array))
    return array


def _ends(action: Action) -> tuple[int, ...]:
    """The devices that take part."""
    return (action.source, action.target) if isinstance(action, Send) else (action.device,)


def _last_readers(step: StagedStep) -> dict[StageProgram, tuple[int, ...]]:
    """Of each program the positions of the state's leaves that no later one reads: their buffers take the new ones."""
    readers: dict[Var, tuple[StageProgram, int]] = {}
    outputs = set(step.results)
    for program in step.programs:
        for k, var in enumerate(program.block.inputs):
            if var in step.homes and step.homes[var] == program.stage and var not in outputs:
                readers[var] = program, k
            else:
                readers.pop(var, None)  # read where it was sent to
    positions: dict[StageProgram, list[int]] = {}
    for program, k in readers.values():
        if program.phase == "update":
            positions.setdefault(program, []).append(k)
    return {program: tuple(numbers) for program, numbers in positions.items()}
