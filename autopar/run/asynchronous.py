"""`AsynchronousRunner`: runs a pipeline without flushes, in which minibatches follow one another through the stages.

A call brings one minibatch and issues the actions that `ir.pipeline` lists for it. Leaves of the state that it
returns stand for an `AsynchronousFlight`: what devices hold between calls, and the minibatches under way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.backends.devices import StageDevice
from autopar.backends.emit import emit
from autopar.interrupts import uninterrupted
from autopar.ir.pipeline import Asynchronous, StagedStep, StageProgram
from autopar.ir.program import Var
from autopar.ir.timeline import (
    Action,
    Drops,
    Microbatch,
    Minibatch,
    MinibatchLister,
    Send,
    Value,
    asynchronous_timeline,
    last_updates,
)
from autopar.jax_types import Array, Leaf, Pytree, PyTreeDef
from autopar.launch.progress import PROGRESS
from autopar.run.buffers import with_own_buffers
from autopar.run.kept_placements import KeptArguments
from autopar.run.pipeline import StageLeaves
from autopar.run.planned_step import Runner
from autopar.run.stage_executor import StageExecutor, Values
from autopar.tables.pending import PendingArray
from autopar.tables.staged import StageArray


class AsynchronousRunner(Runner):
    """Calls a planned step on flat arrays, a minibatch a call.

    `new_states`: number of a state input -> number of the output with its new value. `echoes`: number of an output that
    returns an input unchanged (no state) -> number of that input. `devices`: all by number; this process runs programs
    on its own. `donate`: whether a state without minibatches under way is updated in place; one with some always is.
    """

    several_programs = "in stages"

    def __init__(
        self,
        step: StagedStep,
        new_states: Mapping[int, int],
        echoes: Mapping[int, int],
        devices: Sequence[StageDevice],
        out_tree: PyTreeDef,
        donate: bool,
        kept: KeptArguments,
    ) -> None:
        assert step.asynchronous is not None, "minibatches aren't flushed"
        self.step, self.asynchronous, self.new_states, self._out_tree = step, step.asynchronous, new_states, out_tree
        several = len({device.process_index for device in devices}) > 1
        self.donate, self.kept, self._everywhere = donate, kept, tuple(range(len(devices))) if several else ()
        count = 2 * self.asynchronous.calls.last + 2
        self.timeline = asynchronous_timeline(step, count, self._everywhere)
        donated = _donated(step) if donate and not self.asynchronous.calls.stashes else {}
        self.executor = StageExecutor(step, self.timeline, devices, donated)
        self.messages = self.executor.messages
        self.inputs = [leaf if isinstance(leaf, tuple) else (leaf,) for leaf in step.inputs]
        moving = self.asynchronous.news
        #: Numbers of the inputs that updates change, in the order of a flight's leaves.
        self.moving = [k for k, parts in enumerate(self.inputs) if k in new_states and parts[0] in moving]
        #: Echoes that make up a whole part of the results.
        self.passed = dict(self._passed(echoes))
        clock = self.asynchronous.clock
        self._clock = jax.jit(lambda *inputs: emit(clock, {})(*inputs))

    def lister(self) -> MinibatchLister:
        return MinibatchLister(self.step, self._everywhere, again=True)

    def __call__(self, leaves: Sequence[Leaf]) -> Pytree:
        """Runs the step on flat arrays; returns its new state, and the results of the minibatch that has gone through.

        Parts without state are None as long as no minibatch has.
        """
        states, others = self.call(leaves)
        count = self._out_tree.num_leaves
        if others is not None:
            return self._out_tree.unflatten([{**states, **others}[k] for k in range(count)])
        tree, has_no_state = self._out_tree.unflatten(range(count)), self._has_no_state
        return jax.tree.map(lambda x: None if has_no_state(x) else states[x], tree, is_leaf=has_no_state)

    def call(self, leaves: Sequence[Leaf]) -> tuple[dict[int, Leaf], dict[int, Leaf] | None]:
        """Brings a minibatch; returns by number new states, and the results of the minibatch that this call
        finishes."""
        self.executor.compile()  # before anything is given away
        flight = self._flight(leaves)
        if flight is None:
            read = [_read(leaf) for leaf in leaves]
            flight = AsynchronousFlight(self, with_own_buffers(read, set(self.moving)) if self.donate else read)
            for leaf in leaves if self.donate else ():
                if isinstance(leaf, PendingArray):
                    leaf.pending.hand_on()
        self.kept.look(leaves)
        arguments = self._arguments(leaves)
        clocks = self._clock(*(arguments[v] for v in self.asynchronous.clock.inputs))
        try:
            finished = flight.issue(arguments)
        except BaseException:
            flight.hand_on()  # some of its tasks are done, and others aren't
            raise
        new_clocks = dict(zip(self.asynchronous.clocks, clocks, strict=True))
        results: dict[int, Leaf] = {}
        for index, k in enumerate(self.moving):
            results[self.new_states[k]] = PendingArray(flight, index, flight.types[index])
        for k, out in self.new_states.items():
            if out not in results:
                results[out] = new_clocks.get(self.inputs[k][0], leaves[k])
        return results | {out: leaves[k] for out, k in self.passed.items()}, finished

    def _passed(self, echoes: Mapping[int, int]) -> Iterator[tuple[int, int]]:
        end = 0
        for part in self._out_tree.children():
            start, end = end, end + part.num_leaves
            if all(out in echoes for out in range(start, end)):
                yield from ((out, echoes[out]) for out in range(start, end))

    def rest_of(self, states: Mapping[int, Pytree]) -> list[dict[int, Leaf]]:
        """Returns the results of minibatches that finished when these new states were read."""
        flight = next((leaf.pending for leaf in states.values() if isinstance(leaf, PendingArray)), None)
        return flight.rest_by_number if isinstance(flight, AsynchronousFlight) else []

    def structured(self, others: Mapping[int, Leaf]) -> Pytree:
        """Returns a minibatch's results besides the state: the one output part that has no state, or a list of
        several."""
        parts = jax.tree.leaves(self._out_tree.unflatten(range(self._out_tree.num_leaves)), is_leaf=self._has_no_state)
        apart = [jax.tree.map(others.__getitem__, part) for part in parts if self._has_no_state(part)]
        return apart[0] if len(apart) == 1 else apart

    def _has_no_state(self, node: Any) -> bool:
        """Says whether a tree of output numbers has neither state nor inputs that are returned unchanged."""
        numbers = jax.tree.leaves(node)
        return bool(numbers) and {*self.new_states.values(), *self.passed}.isdisjoint(numbers)

    def _flight(self, leaves: Sequence[Leaf]) -> AsynchronousFlight | None:
        """Returns the flight that this call continues: all moving leaves are results of its last call."""
        first = leaves[self.moving[0]] if self.moving else None
        if not isinstance(first, PendingArray) or not isinstance(first.pending, AsynchronousFlight):
            return None
        flight = first.pending
        mine = (
            isinstance(leaf, PendingArray) and leaf.pending is flight and leaf.index == index and not leaf.is_deleted()
            for index, leaf in enumerate(leaves[k] for k in self.moving)
        )
        return flight if all(mine) and flight.goes_on(self, leaves) else None

    def _arguments(self, leaves: Sequence[Leaf]) -> dict[Var, Leaf]:
        """Returns a minibatch's arguments by input. NumPy arrays are copied, as they may be filled anew."""
        pairs = ((parts[0], leaf) for parts, leaf in zip(self.inputs, leaves, strict=True) if len(parts) == 1)
        given = ((v, _read(leaf)) for v, leaf in pairs if v not in self.step.homes)
        return {v: leaf.copy() if isinstance(leaf, np.ndarray) else leaf for v, leaf in given}


class AsynchronousFlight:
    """Minibatches that follow one another from a first state (`leaves`: the first call's arguments), until they are
    drained."""

    def __init__(self, runner: AsynchronousRunner, leaves: Sequence[Leaf]) -> None:
        self._runner, self._step = runner, runner.step
        self._asynchronous: Asynchronous = runner.asynchronous
        self._lister = runner.lister()
        self._leaves = StageLeaves(runner.step, runner.executor, self._lister.given())
        self._first = self._leaves.arguments(leaves)
        constants = self._asynchronous.constants
        self._constants = [(k, leaf) for k, leaf in enumerate(leaves) if self._runner.inputs[k][0] in constants]
        self._minibatches: dict[int, Minibatch] = {}
        self._given: dict[int, Mapping[Var, Leaf]] = {}
        self._values = Values(runner.executor.devices, self._put, runner.step.divided)
        self._has_begun = False
        self._leaves.put(self._values)
        self._has_begun = True
        for leaf in leaves if runner.donate else ():
            if isinstance(leaf, StageArray):
                leaf.hand_on()
        self._first = {v: x for v, x in self._first.items() if v in runner.asynchronous.constants}
        self._drained: list[Leaf] | None = None
        self._is_gone = False
        self.calls = 0
        #: Shape and dtype of each moving leaf.
        self.types = [_type_of(runner.inputs[k]) for k in runner.moving]
        #: Results, by number, of minibatches that finished when the state was read.
        self.rest_by_number: list[dict[int, Leaf]] = []

    @property
    def call(self) -> int:
        """Number of the last call; -1 once another pipeline has taken the leaves."""
        return -1 if self._is_gone else self.calls

    def hand_on(self) -> None:
        """Marks its leaves as gone: a step has taken them, or failed."""
        self._is_gone = True

    @property
    def finished(self) -> int | None:
        """Number of the minibatch whose results the last call returned; None before the first."""
        number = self.calls - 1 - self._asynchronous.calls.last
        return number if number >= 0 else None

    @property
    def is_of_several(self) -> bool:
        """Says whether its stages are on several processes."""
        return self._runner.messages is not None

    def goes_on(self, runner: AsynchronousRunner, leaves: Sequence[Leaf]) -> bool:
        """Says whether a call of `runner` continues it: nothing was drained, and constant leaves are the same."""
        same = all(leaves[k] is leaf for k, leaf in self._constants)
        return self._runner is runner and self._drained is None and same

    def issue(self, arguments: Mapping[Var, Pytree]) -> dict[int, Leaf] | None:
        """Brings a minibatch; returns by number the results of the one that this call finishes."""
        number = self.calls
        self._minibatches[number] = self._lister.minibatch(number)
        self._given[self._lister.called(number)] = arguments
        self.calls += 1
        return self._run(number)

    def _run(self, call: int) -> dict[int, Leaf] | None:
        """Runs the actions of a call, those of the newest minibatch first."""
        for number in sorted(self._minibatches, reverse=True):
            actions = self._minibatches[number].calls[call - number] if call - number >= 0 else []
            self._executed(actions)
        number = call - self._asynchronous.calls.last
        return self._results(number) if number >= 0 else None

    def _executed(self, actions: Sequence[tuple[Action, Drops]]) -> None:
        executor = self._runner.executor
        executor.run((pair for pair in actions if executor.takes_part(pair[0])), self._values)

    def _results(self, number: int) -> dict[int, Leaf]:
        """Returns a minibatch's results besides the state, and forgets the minibatch."""
        minibatch, given = self._minibatches.pop(number), self._given.pop(self._lister.called(number))
        states = {*self._runner.new_states.values(), *self._runner.passed}
        indices = [k for k in range(len(self._step.outputs)) if k not in states]
        named = [self._asynchronous.returned(self._step.outputs[k]) for k in indices]
        outputs = [each[0] if len(each) == 1 else each for each in named]
        arrays = self._leaves.results(outputs, self._values, minibatch.results, given.__getitem__)
        for value, devices in minibatch.results.items():
            for device in devices:
                if device in self._runner.executor.devices:
                    self._values.drop(value, device)
        return dict(zip(indices, arrays, strict=True))

    @uninterrupted
    def drained(self) -> list[Leaf]:
        """Returns the moving leaves after all minibatches. Collective over the stages' ranks."""
        if self._drained is None:
            try:
                self._drained = self._finished()
            except BaseException:
                self.hand_on()  # some of its tasks are done, and others aren't
                raise
            self._values = self._values.empty()  # versions, changes and copies of leaves are let go
        return self._drained

    def _finished(self) -> list[Leaf]:
        executor, asynchronous = self._runner.executor, self._asynchronous
        for call in range(self.calls, self.calls + asynchronous.calls.last):
            results = self._run(call)
            if results is not None:
                self.rest_by_number.append(results)
        own = {v for k in self._runner.moving for v in self._runner.inputs[k]}
        found = {value: devices for value, devices in self._lister.versions(self.calls).items() if value.var in own}
        if executor.messages is not None:
            found |= self._spread_scalars(found)
            with PROGRESS.during("waiting for the other stages", "waits"):
                executor.messages.finish()
        outputs = [self._step.inputs[k] for k in self._runner.moving]
        return self._leaves.results(outputs, self._values, found, self._first.__getitem__)

    def rest(self) -> list[Leaf]:
        """Returns the results, in order, of minibatches that finished when the state was read; [] if a step
        returns the state alone."""
        self.drained()
        return [self._runner.structured(results) for results in self.rest_by_number if results]

    def _spread_scalars(self, found: Mapping[Value, tuple[int, ...]]) -> dict[Value, tuple[int, ...]]:
        """Sends to every device the values that aren't leaves of one stage; returns their new devices."""
        everywhere = tuple(range(len(self._runner.executor.all)))
        scalars = {value: devices for value, devices in found.items() if value.var not in self._step.new_leaves}
        for value, devices in scalars.items():
            self._executed([(Send(value, devices[0], k), ()) for k in everywhere if k not in devices])
        return dict.fromkeys(scalars, everywhere)

    def _put(self, value: Value, device: StageDevice, axis: int | None) -> Array:
        return self._runner.kept.put(value.var, self._argument(value), device, axis)

    def _argument(self, value: Value) -> Leaf:
        """Returns a value that no device makes: an argument of a minibatch, or a leaf of the first state."""
        if isinstance(value.part, Microbatch):
            whole, _ = self._step.parts.get(value.var, (value.var, 0))
            return self._given[value.part.number][whole]
        if value.var in self._asynchronous.constants:
            return self._first[value.var]
        assert not self._has_begun, "a version is made before it is read"
        if value.var in self._first:
            return self._first[value.var]
        return jnp.zeros(value.var.shape, value.var.dtype)  # no update has changed it


def _read(leaf: Leaf) -> Leaf:
    """Returns a leaf after all minibatches that update it."""
    return leaf.current() if isinstance(leaf, PendingArray) else leaf


def _type_of(parts: Sequence[Var]) -> jax.ShapeDtypeStruct:
    """Returns shape and dtype of a leaf that stages may hold in parts."""
    first = parts[0]
    rows = (sum(v.shape[0] for v in parts),) if len(parts) > 1 else first.shape[:1]
    return jax.ShapeDtypeStruct((*rows, *first.shape[1:]), first.dtype)


def _donated(step: StagedStep) -> dict[StageProgram, tuple[int, ...]]:
    return {
        program: tuple(k for k, v in enumerate(program.block.inputs) if v in leaves)
        for program, leaves in last_updates(step).items()
    }
