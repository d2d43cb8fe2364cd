"""`PipelineRunner`: runs a pipeline by a schedule, each stage on devices of its own.

Replicas of a stage take microbatches in turn, hold the same weights, and all run the update.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from autopar import jax_compat
from autopar.backends.devices import StageDevice, array_over
from autopar.ir.pipeline import StagedStep, StageProgram
from autopar.ir.program import Atom, Literal, Var
from autopar.ir.timeline import Timeline, Value
from autopar.jax_types import Array, Leaf, Pytree, PyTreeDef
from autopar.launch.progress import PROGRESS
from autopar.run.buffers import with_own_buffers
from autopar.run.kept_placements import KeptArguments
from autopar.run.planned_step import Runner
from autopar.run.stage_executor import Arguments, StageExecutor, Values
from autopar.tables.kinds import copied
from autopar.tables.staged import StageArray, StagePart


class PipelineRunner(Runner):
    """Calls a planned step on flat arrays, its stages on devices of their own: all devices by number, of which this
    process runs programs on its own. `donate`: whether states are updated in place."""

    several_programs = "in stages"

    def __init__(
        self,
        step: StagedStep,
        timeline: Timeline,
        devices: Sequence[StageDevice],
        out_tree: PyTreeDef,
        donate: bool,
        kept: KeptArguments,
    ) -> None:
        self._step, self._out_tree, self._donate, self._kept = step, out_tree, donate, kept
        self.timeline = timeline
        self.executor = StageExecutor(step, timeline, devices, _last_readers(step) if donate else {})
        self.messages = self.executor.messages
        pairs = zip(timeline.actions, timeline.drops, strict=True)
        self._actions = [pair for pair in pairs if self.executor.takes_part(pair[0])]
        self._leaves = StageLeaves(step, self.executor, timeline.given)
        first = (leaf[0] if isinstance(leaf, tuple) else leaf for leaf in step.inputs)
        self._states = {k for k, var in enumerate(first) if var in step.homes}
        self._is_new = True

    def __call__(self, leaves: Sequence[Leaf]) -> Pytree:
        """Runs the step on flat arguments; returns its results. New states are on their stages' devices."""
        if self._is_new and self._donate:  # a state of the user's own may share buffers; what a step returns doesn't
            leaves, self._is_new = with_own_buffers(leaves, self._states), False
        self.executor.compile()  # before anything is given away
        self._kept.look(leaves)
        arguments = Arguments(self._leaves.arguments(leaves), self._step, self._kept)
        values = Values(self.executor.devices, arguments.put, self._step.divided)
        self._leaves.put(values)  # before any of their devices donates its own
        for leaf in leaves if self._donate else ():
            if isinstance(leaf, StageArray):
                leaf.hand_on()
        self.executor.run(self._actions, values)
        if self.messages is not None:
            with PROGRESS.during("waiting for the other stages", "waits"):
                self.messages.finish()
        results = self._leaves.results(self._step.outputs, values, self.timeline.results, arguments.given)
        return self._out_tree.unflatten(results)


def _last_readers(step: StagedStep) -> dict[StageProgram, tuple[int, ...]]:
    """Returns for each update program the positions of state leaves that it is the last to read, and may overwrite."""
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


#: Values of a timeline, and the devices that have them.
Found = Mapping[Value, Sequence[int]]


class StageLeaves:
    """Brings leaves to stages, and back. `given`: leaves of the state -> the devices of their stages."""

    def __init__(self, step: StagedStep, executor: StageExecutor, given: Found) -> None:
        self._step, self._executor = step, executor
        self._leaves = {value.var: (value, devices) for value, devices in given.items()}
        self._inputs = [leaf if isinstance(leaf, tuple) else (leaf,) for leaf in step.inputs]

    def arguments(self, leaves: Sequence[Leaf]) -> dict[Var, Leaf]:
        """Returns this rank's part of each of the step's inputs."""
        arrays: dict[Var, Leaf] = {}
        for parts, leaf in zip(self._inputs, leaves, strict=True):
            arrays |= zip(parts, self._parts(parts, leaf), strict=True)
        return arrays

    def put(self, values: Values) -> None:
        for value, devices in self._leaves.values():
            for device in devices:
                if device in self._executor.devices:
                    values.at(value, device)

    def _parts(self, parts: Sequence[Var], leaf: Leaf) -> Sequence[Leaf]:
        """Returns this rank's parts of a leaf, which another pipeline may have cut at other layers."""
        if len(parts) == 1 and not isinstance(leaf, StageArray):
            return [leaf]
        ends = tuple(itertools.accumulate(var.shape[0] for var in parts))
        if isinstance(leaf, StageArray) and tuple(part.stop for part in leaf.parts) == ends:
            return [self._moved(*each) for each in zip(parts, leaf.parts, leaf.values, strict=True)]
        array = np.asarray(leaf) if isinstance(leaf, StageArray) else leaf
        return [array[start:end] for start, end in zip((0, *ends), ends, strict=False)]

    def _moved(self, var: Var, part: StagePart, value: Leaf) -> Leaf:
        """Returns this rank's part of a leaf, exchanged between ranks if another pipeline has left it elsewhere."""
        messages = self._executor.messages
        ranks = dict.fromkeys(self._executor.ranks[device] for device in self._leaves.get(var, ((), ()))[1])
        missing, me = [rank for rank in ranks if rank not in part.ranks], jax.process_index()
        if messages is None or (me != part.ranks[0] and me not in missing):
            return value
        if me in missing:
            shape = (part.stop - part.start, *var.shape[1:])
            return messages.receive(shape, var.dtype, part.ranks[0]).wait()
        for rank in missing:
            messages.send(np.array(value), rank)
        return value

    def results(
        self, outputs: Sequence[Atom | tuple[Atom, ...]], values: Values, found: Found, given: Callable[[Var], Leaf]
    ) -> list[Leaf]:
        """Returns the results of a call, each in buffers of its own. `outputs`: a tuple is a leaf in parts on several
        stages. `found`: values that stages have made, and their devices. `given`: returns arguments of the call."""
        made = {value.var: (value, devices) for value, devices in found.items()}
        seen = set[int]()
        return [self._result(out, values, made, given, seen) for out in outputs]

    def _result(
        self,
        out: Atom | tuple[Atom, ...],
        values: Values,
        made: Mapping[Var, tuple[Value, Sequence[int]]],
        given: Callable[[Var], Leaf],
        seen: set[int],
    ) -> Leaf:
        """Returns a result where it is; a state leaf on several stages, or on stages of several ranks, comes in parts.
        Arrays in `seen` are copied."""
        if isinstance(out, Literal):
            return out.value
        parts = [a for a in (out if isinstance(out, tuple) else (out,)) if isinstance(a, Var)]
        if isinstance(out, tuple) or (self._executor.messages is not None and out in self._step.new_leaves):
            where = [made[var] if var in made else self._leaves[var] for var in parts]
            stages = [[self._executor.all[k] for k in devices] for _, devices in where]
            ends = tuple(itertools.accumulate(v.shape[0] for v in parts))
            stage_parts = StagePart.of_parts(stages, ends, self._step.divided.get(parts[0]), self._executor.all)
            arrays = [self._array(*each, values, seen) for each in where]
            shape, type_ = (stage_parts[-1].stop, *parts[0].shape[1:]), parts[0].type
            return StageArray(shape, type_.dtype, stage_parts, arrays, is_weak=type_.weak_type)
        if parts[0] in made:
            return self._array(*made[parts[0]], values, seen)
        return _own(given(parts[0]), seen)

    def _array(self, value: Value, devices: Sequence[int], values: Values, seen: set[int]) -> Array | None:
        """Returns one array over all devices of its stage that this process has."""
        here = [k for k in devices if k in self._executor.devices]
        shards = [_own(values.at(value, k), seen) for k in here]
        axis = self._step.divided.get(value.var)
        if not shards:
            return None
        array = array_over(shards, [self._executor.devices[k] for k in here], axis)
        return jax_compat.weak(array) if value.var.type.weak_type and not jax_compat.is_weak(array) else array


def _own(array: Leaf, seen: set[int]) -> Leaf:
    array = copied(array) if id(array) in seen else array
    seen.add(id(array))
    return array
