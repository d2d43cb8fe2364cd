"""The devices that a plan runs on: a mesh, and its axis over which batches (and sharded rows) are spread."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autopar import jax_compat
from autopar.backends.indices import as_bits, lengthened
from autopar.ir.reductions import REDUCERS
from autopar.jax_types import Array, Device, Leaf, Pytree, Sharding
from autopar.launch.group import StoreGroup


@dataclass(frozen=True)
class Devices:
    """A mesh with Auto axes."""

    mesh: Mesh  #: Along axes other than `axis` everything is replicated.
    axis: str  #: The data axis.
    #: The axis over which products are divided, if any are.
    tensor_axis: str | None = field(default=None, kw_only=True)

    @staticmethod
    def of(mesh: Mesh | None, axis: str | None = None, tensor_axis: str | None = None) -> Devices:
        """Returns the user's mesh, its Explicit axes made Auto; all devices by default."""
        if mesh is None:
            return Devices(jax.make_mesh((len(jax.devices()),), ("data",), axis_types=(AxisType.Auto,)), "data")
        names = mesh.axis_names
        auto = Mesh(mesh.devices, names, axis_types=(AxisType.Auto,) * len(names))
        return Devices(auto, axis or names[0], tensor_axis=tensor_axis)

    @staticmethod
    def of_array(array: jax.Array, along: int) -> Devices:
        """Returns the devices over which an array is spread along one of its axes."""
        sharding = array.sharding
        assert isinstance(sharding, NamedSharding), "a plan spreads arrays over a mesh"
        assert isinstance(sharding.mesh, Mesh), "of real devices"
        return Devices(sharding.mesh, sharding.spec[along])

    @property
    def count(self) -> int:
        """The number N of devices along the data axis."""
        return self.mesh.shape[self.axis]

    @property
    def tensor(self) -> int:
        """The number T of devices over which products are divided."""
        return 1 if self.tensor_axis is None else self.mesh.shape[self.tensor_axis]

    def position(self) -> Array:
        """Returns the device's index, int32[], in the program of one device."""
        return jax.lax.axis_index(self.axis).astype(jnp.int32)

    @property
    def is_on_cpus(self) -> bool:
        return self.mesh.devices.flat[0].platform == "cpu"

    @functools.cached_property
    def processes(self) -> StoreGroup:
        return StoreGroup.of(self.mesh)

    def spec(self, along: int | None) -> P:
        """Returns the spec of an array that is spread along an axis, or replicated."""
        return P() if along is None else P(*[None] * along, self.axis)

    def sharding(self, along: int | None, tensor: int | None = None) -> NamedSharding:
        """Returns the sharding of an array that is spread along an axis; `tensor`: the axis spread over the tensor
        axis."""
        if tensor is None:
            return NamedSharding(self.mesh, self.spec(along))
        names = {tensor: self.tensor_axis} | ({} if along is None else {along: self.axis})
        return NamedSharding(self.mesh, P(*[names.get(k) for k in range(max(names) + 1)]))

    def constrain(self, value: Array, along: int | None, tensor: int | None = None) -> Array:
        return jax.lax.with_sharding_constraint(value, self.sharding(along, tensor))

    def local(self, fun: Callable[..., Pytree], axes: Sequence[int | None], returned: Leaf, *operands: Array) -> Leaf:
        """Runs a function, which may use collectives over `axis`, on each device's part of the operands. `axes`: for
        each operand the axis along which it is spread; None: every device has all of it. `returned`: the axis of each
        result, as a tuple; a single result's axis as it is."""
        return self.mapped(fun, axes, returned)(*operands)

    def mapped(
        self,
        fun: Callable[..., Pytree],
        axes: Sequence[int | None],
        returned: Leaf,
        tensors: tuple[Sequence[int | None], Sequence[int | None]] | None = None,
    ) -> Callable[..., Leaf]:
        """Returns the function of global arrays that `local` calls.

        Operands are padded with zeros to a multiple of the devices, so results may be longer, too.

        `fun`, `axes`, `returned`: as `local` takes them. `tensors`: for operands and for several results, the axis that
        is spread over the tensor axis.
        """
        parts = self.mesh.shape[self.axis]
        specs = tuple(self.spec(along) for along in axes)
        several = isinstance(returned, tuple)
        out = tuple(self.spec(along) for along in returned) if several else self.spec(returned)
        if tensors is not None:
            specs = tuple(self.sharding(*pair).spec for pair in zip(axes, tensors[0], strict=True))
            out = tuple(self.sharding(*pair).spec for pair in zip(returned, tensors[1], strict=True))
        map_ = functools.partial(jax.shard_map, mesh=self.mesh, out_specs=out, check_vma=False)

        def reading(some: Array, *operands: Array) -> Leaf:
            return jax.lax.optimization_barrier((some, fun(*operands)))[1]

        def run(*operands: Array) -> Pytree:
            pairs = zip(operands, axes, strict=True)
            operands = tuple(x if k is None else lengthened(x, k, -x.shape[k] % parts) for x, k in pairs)
            if not operands or any(x.size for x in operands):
                return map_(fun, in_specs=specs)(*operands)
            # XLA needs an operand that is read, and makes constants of those without elements.
            return map_(reading, in_specs=(self.spec(None), *specs))(jnp.zeros(()), *operands)

        return run


class OwnPart(Devices, abc.ABC):
    """A device's own view of the devices, in which arrays are its own shards."""

    @property
    def examples(self) -> tuple[str, ...]:
        """The mesh's axes over which examples are spread."""
        return (self.axis,)

    @property
    def by_ranks(self) -> OwnPart:
        """The view in which a rank counts as one device, for values that are spread over ranks."""
        return self

    def share(self, value: Array, axis: int) -> Array:
        """Returns this device's shard of an array that every device has."""
        size = value.shape[axis] // self.count
        # The barrier: XLA merges two slices without clamping the first one's start before it adds the second one's.
        value = jax.lax.optimization_barrier(value)
        return jax.lax.dynamic_slice_in_dim(value, self.position() * size, size, axis)

    def padded_share(self, value: Array, axis: int, size: int) -> Array:
        """Returns a shard of `size` elements, where the last device repeats the last element."""
        return jnp.take(value, self.position() * size + jnp.arange(size), axis=axis, mode="clip")

    def once(self, value: Array) -> Array:
        """Returns the value on the first device, zeros on the others."""
        return jnp.where(self.position() == 0, value, jnp.zeros_like(value))

    def only_examples(self, value: Array, axis: int, size: int, fill: Leaf) -> Array:
        """Returns this device's shard with `fill` in place of elements from `size` (of the whole array) on."""
        own = value.shape[axis]
        number = self.position() * own + jax.lax.broadcasted_iota(jnp.int32, value.shape, axis)
        return jnp.where(number < size, value, jnp.asarray(fill, value.dtype))

    @abc.abstractmethod
    def gathered(self, value: Array, along: int) -> Array:
        """Returns all of a value that is spread along an axis, on every device."""
        ...

    @abc.abstractmethod
    def reduce(self, value: Array, op: str) -> Array:
        """Reduces a value over the devices."""
        ...


class Mapped(OwnPart):
    """One device's view in `shard_map`."""

    def gathered(self, value: Array, along: int) -> Array:
        return as_bits(lambda x: jax.lax.all_gather(x, self.axis, axis=along, tiled=True), value)

    def reduce(self, value: Array, op: str) -> Array:
        return reduce_over(op, value, self.axis)

    def reduce_scatter(self, value: Array, along: int) -> Array:
        """Adds up a value over the devices; each gets its shard of the sum."""
        return jax.lax.psum_scatter(value, self.axis, scatter_dimension=along, tiled=True)


def reduce_over(op: str, part: Array, name: str | tuple[str, ...]) -> Array:
    """Reduces the devices' results over axes of the mesh, in `shard_map`; sums in float32 at least, rounded once."""
    kind = REDUCERS[op]
    if op == "sum" and (wide := jax_compat.sum_dtype(part.dtype)) != part.dtype:
        return jax.lax.psum(part.astype(wide), name).astype(part.dtype)
    if kind.collective is not None and part.dtype != jnp.bool_:
        result = kind.collective(part, name)
        if op == "sum" or not jax_compat.is_float(part.dtype):
            return result
        is_nan = jax.lax.pmax(jnp.isnan(part).astype(jnp.int32), name)  # the collectives may lose a NaN
        return jnp.where(is_nan > 0, jnp.asarray(jnp.nan, part.dtype), result)
    return kind.reduce(jax.lax.all_gather(part, name), (0,))


# --- devices of a pipeline's stages, each alone or several that divide products ---


@dataclass(frozen=True)
class StageDevice:
    """A device of a pipeline, or the T devices of a tensor axis that act as one, all of one process."""

    devices: tuple[Device, ...]

    @property
    def process_index(self) -> int:
        return self.devices[0].process_index

    @property
    def platform(self) -> str:
        return self.devices[0].platform

    @functools.cached_property
    def mesh(self) -> Devices | None:
        """The devices over which products are divided; None for one device."""
        return None if len(self.devices) == 1 else _mesh([self])

    def sharding(self, axis: int | None = None) -> Sharding:
        """Returns the sharding of an array that is here, divided along an axis or whole on each device."""
        return sharding_over([self], axis)

    def put(self, value: Leaf, axis: int | None = None) -> Array:
        """Puts a value here, without a copy if it is here already."""
        sharding = self.sharding(axis)
        if isinstance(value, jax.Array) and not jax_compat.is_key(value.dtype) and _is_there(value, sharding):
            return _of_shards([value], sharding)
        return jax.device_put(value, sharding)


def sharding_over(stage_devices: Sequence[StageDevice], axis: int | None) -> Sharding:
    """Returns the sharding of an array that each of several stage devices has: whole, or divided along an axis."""
    if len(stage_devices) == len(stage_devices[0].devices) == 1:
        return jax.sharding.SingleDeviceSharding(stage_devices[0].devices[0])
    return _mesh(stage_devices).sharding(None, axis)


def array_over(values: Sequence[Array], stage_devices: Sequence[StageDevice], axis: int | None) -> Array:
    """Makes one array of the arrays of several stage devices."""
    return values[0] if len(values) == 1 else _of_shards(values, sharding_over(stage_devices, axis))


def _mesh(stage_devices: Sequence[StageDevice]) -> Devices:
    """Returns a mesh with replicas along the first axis, the devices that divide products along the second one."""
    devices = np.array([each.devices for each in stage_devices])
    return Devices(jax.sharding.Mesh(devices, ("replica", "tensor")), "replica", tensor_axis="tensor")


def _is_there(value: Array, sharding: Sharding) -> bool:
    """Returns whether each device of a sharding has its part of an array; others may have some, too."""
    if value.is_fully_replicated and sharding.is_fully_replicated:
        return sharding.device_set <= value.sharding.device_set
    have, wanted = (each.devices_indices_map(value.shape) for each in (value.sharding, sharding))
    return all(have.get(device) == part for device, part in wanted.items())


def _of_shards(values: Sequence[Array], sharding: Sharding) -> Array:
    own = {shard.device: shard.data for value in values for shard in value.addressable_shards}
    if isinstance(sharding, jax.sharding.SingleDeviceSharding):
        (device,) = sharding.device_set
        return own[device]
    shards = [own[device] for device in sharding.mesh.devices.flat]
    return jax.make_array_from_single_device_arrays(values[0].shape, sharding, shards)
