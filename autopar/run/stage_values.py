"""What the devices of a pipeline hold in a step, and what it looks like on its way to another rank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from autopar import jax_compat
from autopar.backends.microbatches import Microbatch as MicrobatchOf
from autopar.backends.microbatches import wide
from autopar.backends.single import route_types
from autopar.backends.stage_device import StageDevice
from autopar.ir.pipeline import StagedStep
from autopar.ir.program import RouteType, Var
from autopar.ir.timeline import Microbatch, SumOf, Value
from autopar.launch.progress import PROGRESS
from autopar.mpi.point_to_point import Incoming, PointToPoint
from autopar.run.kept_placements import KeptArguments

Array = Any


class Arguments:
    """Holds what a call was given, and the microbatches' parts of it.

    Args:
      arrays: By the step's inputs.
      step: The programs.
      kept: Brings them to devices.
    """

    def __init__(self, arrays: Mapping[Var, Any], step: StagedStep, kept: KeptArguments) -> None:
        self._arrays, self._parts, self._kept = arrays, step.parts, kept
        wholes = step.parts.values()
        self._slices = {whole: _slices(arrays[whole], axis, step.microbatches) for whole, axis in wholes}

    def given(self, var: Var) -> Any:
        """An argument as it is."""
        return self._arrays[var]

    def put(self, value: Value, device: StageDevice, axis: int | None) -> Array:
        """Brings an argument, or a microbatch's part of it, to a device, divided along an axis if one is given."""
        if value.var not in self._parts:
            return self._kept.put(value.var, self._arrays[value.var], device, axis)
        assert isinstance(value.part, Microbatch), "parts are of microbatches"
        return device.put(self._slices[self._parts[value.var][0]][value.part.number], axis)


class Values:
    """What the devices of this process hold in a step.

    Args:
      devices: By number.
      put: Brings what a call was given to a device, divided along an axis if one is given.
      divided: As in `StagedStep`.
    """

    def __init__(
        self,
        devices: Mapping[int, StageDevice],
        put: Callable[[Value, StageDevice, int | None], Array],
        divided: Mapping[Var, int],
    ) -> None:
        self._devices, self._put, self._divided = devices, put, divided
        self._held: dict[int, dict[Value, Array]] = {device: {} for device in devices}

    def empty(self) -> Values:
        """Makes one of the same devices, which hold nothing."""
        return Values(self._devices, self._put, self._divided)

    def has(self, value: Value, device: int) -> bool:
        """Whether a device has made or been sent it."""
        return value in self._held[device]

    def put(self, value: Value, device: int, array: Array) -> None:
        """What a device has made or been sent."""
        self._held[device][value] = array

    def at(self, value: Value, device: int) -> Array:
        """The value on a device, an argument being put there when it is first read."""
        held = self._held[device]
        if value not in held:
            held[value] = self._put(value, self._devices[device], self._divided.get(value.var))
        array = held[value]
        if isinstance(array, Arriving):
            with PROGRESS.during("waiting for another stage", "waits"):
                array = held[value] = self._devices[device].put(array.wait(), self._divided.get(value.var))
        return array

    def drop(self, value: Value, device: int) -> None:
        """Let a value go."""
        self._held[device].pop(value, None)


def _types(var: Var, dtype: Callable[[Any], Any]) -> Any:
    """Of a value: a route is several arrays."""
    if isinstance(var.type, RouteType):
        return route_types(var.type)
    return jax.ShapeDtypeStruct(var.shape, dtype(var.dtype))


def placed_types(var: Var, sharding: Any, dtype: Callable[[Any], Any]) -> Any:
    """Of a value with such a sharding, in another `dtype`."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), _types(var, dtype))


def message_of(value: Any) -> list[np.ndarray]:
    """The arrays that are sent for a value: of random keys their data."""
    arrays = jax.tree.leaves(value)
    return [np.asarray(jax.random.key_data(x) if jax_compat.is_key(x.dtype) else x) for x in arrays]


@dataclass(frozen=True, eq=False)
class Arriving:
    """A value that is on its way to this rank."""

    types: Any
    parts: Sequence[Incoming]

    @staticmethod
    def of(value: Value, messages: PointToPoint, source: int) -> Arriving:
        """Begin to receive it; sums are in a wider dtype."""
        types = _types(value.var, wide if isinstance(value.part, SumOf) else lambda dtype: dtype)
        data = jax.tree.leaves(jax.eval_shape(_data, types))
        return Arriving(types, [messages.receive(x.shape, x.dtype, source) for x in data])

    def wait(self) -> Any:
        """The value, once it is there."""
        parts = iter(self.parts)

        def arrived(like: Any) -> Any:
            array = next(parts).wait()
            return jax_compat.wrap_keys(array, like.dtype) if jax_compat.is_key(like.dtype) else array

        return jax.tree.map(arrived, self.types)


def _data(value: Any) -> Any:
    return jax.tree.map(lambda x: jax.random.key_data(x) if jax_compat.is_key(x.dtype) else x, value)


def _slices(value: Any, axis: int, count: int) -> list[Any]:
    """Equal parts of a batch's leaf."""
    if isinstance(value, np.ndarray):
        return np.split(value, count, axis)
    return [_part(value, np.int32(k), axis, count) for k in range(count)]


@functools.partial(jax.jit, static_argnums=(2, 3))
def _part(value: Array, number: Array, axis: int, count: int) -> Array:
    return MicrobatchOf(number, count).share(value, axis)
