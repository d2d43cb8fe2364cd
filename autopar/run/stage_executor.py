"""`StageExecutor`: runs the actions of a timeline on the devices of this process.

Each program of a stage is compiled by itself for its device. Programs are issued in an order in which their operands
exist, and JAX runs those of different devices at the same time; a value that another stage reads is sent as soon as it
is made. What no later program reads is let go, so that a stage holds the activations that its schedule says.
"""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar import jax_compat
from autopar.backends.stage_device import StageDevice
from autopar.ir.pipeline import StagedStep, StageProgram
from autopar.ir.timeline import Action, Drops, Join, Run, Send, Timeline, Value, Whole
from autopar.launch.notices import tell
from autopar.measure.collectives import Collective, read_collectives
from autopar.mpi.point_to_point import point_to_point
from autopar.run.stage_programs import CompiledProgram, joined, stage_executables
from autopar.run.stage_values import Arriving, Values, message_of

Array = Any


class StageExecutor:
    """Runs what this process has of a timeline.

    Args:
      step: The programs.
      timeline: All that is ever run of them, at least once.
      devices: All of them, by number; this process runs the programs of its own.
      donated: The positions of inputs that each program may overwrite.
    """

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
        """Whether a device of this process does something in it."""
        ends = (action.source, action.target) if isinstance(action, Send) else (action.device,)
        return not self.devices.keys().isdisjoint(ends)

    def compile(self) -> None:
        """Compile all programs, if they aren't yet."""
        _ = self._compiled

    def run(self, actions: Iterable[tuple[Action, Drops]], values: Values) -> None:
        """Run actions of this process, one after the other."""
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
        """Lists what the devices within each stage of this process exchange for a microbatch."""
        runs = {program: each.run for (program, _), each in self._compiled.items() if program.phase in ("F", "B", "W")}
        return [c for run in runs.values() for c in read_collectives(run.as_text() or "")]

    @functools.cached_property
    def _compiled(self) -> Mapping[tuple[StageProgram, int], CompiledProgram]:
        """(Program, device) -> what runs there. All are compiled before the first step, at the same time."""
        places = dict.fromkeys((a.program, a.device) for a in self._timeline.actions if isinstance(a, Run))
        own = [key for key in places if key[1] in self.devices]
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
        number = (action.microbatch or 0) % self._step.microbatches  # of a minibatch, its only part's
        sums, results = compiled.run(np.int32(number), sums, *operands)
        for name, total in zip(names, sums, strict=True):
            values.put(name, device, total)
        for k, result in zip(program.read, results, strict=True):
            values.put(action.writes[k], device, result)
        if self.messages is not None and self.devices[device].platform == "cpu":
            made = jax.tree.leaves((sums, results))
            if self._step.asynchronous is not None:  # whose programs and messages are those of whole minibatches
                self.messages.during(lambda: all(map(jax_compat.is_ready, made)))
            jax.block_until_ready(made)  # what comes next would take cores from it

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
        for array in message_of(value):  # a copy where the update may give its buffer away
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
