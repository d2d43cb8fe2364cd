"""The programs of a pipeline's stages, compiled each by itself for each device that runs it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.backends.devices import Devices, Mapped
from autopar.backends.emit import emit
from autopar.backends.microbatches import Microbatch, wide
from autopar.backends.stage_device import StageDevice
from autopar.ir.pipeline import StagedStep, StageProgram
from autopar.ir.program import Var
from autopar.ir.reductions import REDUCERS, neutral
from autopar.ir.timeline import Run, SumOf, Timeline, reads_of
from autopar.run.stage_values import placed_types

Array = Any


@dataclass(frozen=True, slots=True, eq=False)
class CompiledProgram:
    """A stage's program on a device.

    Attributes:
      run: A microbatch's number, the sums so far and the inputs -> new sums, values. Sums are updated in place.
      start: Makes what is summed, before the first microbatch; nothing where nothing is.
    """

    run: jax.stages.Compiled
    start: Callable[[], Sequence[Array]] = tuple


@dataclass(frozen=True, eq=False)
class StageExecutable:
    """A stage's program, compiled by itself for each device that runs it.

    Attributes:
      program, count: What it computes, and M.
      joins: Its outputs that are summed over microbatches -> the name of a reduction.
      read: Positions of its outputs that others read.
      donated: Positions of its inputs whose buffers its results take.
      divided: Values that are divided over the devices of a stage -> the axis.
    """

    program: StageProgram
    count: int
    joins: Mapping[Var, str]
    read: tuple[int, ...]
    donated: tuple[int, ...]
    divided: Mapping[Var, int]

    @property
    def _values(self) -> list[Var]:
        return [self.program.outputs[k] for k in self.read]

    def lower(self, device: StageDevice) -> list[jax.stages.Lowered]:
        """The programs of `CompiledProgram` for a device, to be compiled."""

        def places(values: Iterable[Var]) -> list[Any]:
            return [device.sharding(axis) for axis in self._axes(values)]

        def types(values: Sequence[Var], dtype: Callable[[Any], Any] = lambda dtype: dtype) -> list[Any]:
            pairs = zip(values, places(values), strict=True)
            return [placed_types(v, there, dtype) for v, there in pairs]

        donated = (1, *(k + 2 for k in self.donated))
        run = jax.jit(
            self._run(device.mesh), donate_argnums=donated, out_shardings=(places(self.joins), places(self._values))
        )
        number, sums = jax.ShapeDtypeStruct((), np.int32), types(list(self.joins), wide)
        programs = [run.lower(number, sums, *types(self.program.block.inputs))]
        return programs + ([jax.jit(self._start, out_shardings=places(self.joins)).lower()] if sums else [])

    def _start(self) -> Sequence[Array]:
        return [jnp.broadcast_to(neutral(n, wide(v.dtype)), v.shape) for v, n in self.joins.items()]

    def _axes(self, values: Iterable[Var]) -> list[int | None]:
        return [self.divided.get(v) for v in values]

    def _run(self, devices: Devices | None) -> Callable[..., tuple[Sequence[Array], Sequence[Array]]]:
        """The program of new sums and values; `devices`: those that divide products, if several do."""
        block, count = self.program.block, len(self.joins)
        here = None if devices is None else Mapped(devices.mesh, devices.axis, tensor_axis=devices.tensor_axis)
        if devices is not None:
            assert self.program.local is not None, "it is written for one of several devices"
            block = self.program.local

        def of_device(number: Array, *operands: Array) -> tuple[Array, ...]:
            results = emit(block, {}, here, Microbatch(number, self.count))(*operands[count:])
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
    """Returns the executables of a timeline's programs; `donated`: the positions of inputs that each may overwrite."""
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
def joined(joins: tuple[str, ...], dtypes: tuple[Any, ...], parts: Sequence[Sequence[Array]]) -> Sequence[Array]:
    """Adds up the sums of all replicas, in their order."""
    pairs = zip(joins, dtypes, parts, strict=True)
    return [functools.reduce(REDUCERS[n].join, each).astype(dtype) for n, dtype, each in pairs]
