"""Runs the programs of a pipeline's stage on one device, or on several that divide its products."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from autopar import jax_compat
from autopar.backends.devices import Devices
from autopar.jax_types import Array, Leaf


@dataclass(frozen=True)
class StageDevice:
    """A device of a pipeline, or the T devices of a tensor axis that act as one, all of one process."""

    devices: tuple[Any, ...]

    @property
    def process_index(self) -> int:
        """The process that has it."""
        return self.devices[0].process_index

    @property
    def platform(self) -> str:
        return self.devices[0].platform

    @functools.cached_property
    def mesh(self) -> Devices | None:
        """The devices over which products are divided; None for one device."""
        return None if len(self.devices) == 1 else _mesh([self])

    def sharding(self, axis: int | None = None) -> Any:
        """Returns the sharding of an array that is here, divided along an axis or whole on each device."""
        return sharding_over([self], axis)

    def put(self, value: Leaf, axis: int | None = None) -> Array:
        """Puts a value here, without a copy if it is here already."""
        sharding = self.sharding(axis)
        if isinstance(value, jax.Array) and not jax_compat.is_key(value.dtype) and _is_there(value, sharding):
            return _of_shards([value], sharding)
        return jax.device_put(value, sharding)


def sharding_over(stage_devices: Sequence[StageDevice], axis: int | None = None) -> Any:
    """Returns the sharding of an array that each of several stage devices has: whole, or divided along an axis."""
    if len(stage_devices) == len(stage_devices[0].devices) == 1:
        return jax.sharding.SingleDeviceSharding(stage_devices[0].devices[0])
    return _mesh(stage_devices).sharding(None, axis)


def array_over(values: Sequence[Array], stage_devices: Sequence[StageDevice], axis: int | None = None) -> Array:
    """Makes one array of the arrays of several stage devices."""
    return values[0] if len(values) == 1 else _of_shards(values, sharding_over(stage_devices, axis))


def _mesh(stage_devices: Sequence[StageDevice]) -> Devices:
    """Returns a mesh with replicas along the first axis, the devices that divide products along the second one."""
    devices = np.array([each.devices for each in stage_devices])
    return Devices(jax.sharding.Mesh(devices, ("replica", "tensor")), "replica", tensor_axis="tensor")


def _is_there(value: Array, sharding: Any) -> bool:
    """Returns whether each device of a sharding has its part of an array; others may have some, too."""
    if value.is_fully_replicated and sharding.is_fully_replicated:
        return sharding.device_set <= value.sharding.device_set
    have, wanted = (each.devices_indices_map(value.shape) for each in (value.sharding, sharding))
    return all(have.get(device) == part for device, part in wanted.items())


def _of_shards(values: Sequence[Array], sharding: Any) -> Array:
    own = {shard.device: shard.data for value in values for shard in value.addressable_shards}
    if isinstance(sharding, jax.sharding.SingleDeviceSharding):
        (device,) = sharding.device_set
        return own[device]
    shards = [own[device] for device in sharding.mesh.devices.flat]
    return jax.make_array_from_single_device_arrays(values[0].shape, sharding, shards)
