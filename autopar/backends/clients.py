"""Averages over clients: processes, or groups of them, which train a replica each on devices of their own.

A mean is one program over the devices of all clients: each sums a C-th of the elements in the clients' order, then all
gather the results. So all clients, and `mean_of`, have the same bits. 2(C-1)/C b bytes leave each client, as in a ring
AllReduce (Parallax, section 3.1).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autopar import jax_compat
from autopar.backends.devices import Devices
from autopar.backends.global_arrays import jit_on, place_array
from autopar.errors import ArgumentsError, AutoparError
from autopar.ir.topology import Everyone, Topology
from autopar.jax_types import Array, Dtype, Json, Leaf
from autopar.launch.group import MpiGroup, StoreGroup, part_of_ranks
from autopar.mpi.world import SERVERS_VARIABLE, job

_AXIS = "clients"


@dataclass(frozen=True, eq=False)
class Clients:
    """The devices of all clients."""

    grid: np.ndarray  #: [C, ...], the devices of each client's mesh.
    own: int  #: The number of this process's client.
    devices: Devices  #: Its devices.
    processes: StoreGroup  #: Processes of all clients.

    @staticmethod
    def of(all_: Devices, count: int | None) -> Clients:
        """Divides devices among clients, each of which has the same number of adjacent processes. Raises ArgumentsError
        if clients don't divide the processes, or the data axis isn't divided by them."""
        members = all_.processes.members
        count = len(members) if count is None else count
        if len(members) % count:
            raise ArgumentsError(
                f"sync: {count} clients don't divide {len(members)} processes: each client has as many. Give a divisor"
            )
        axis = all_.mesh.axis_names.index(all_.axis)
        grid = np.moveaxis(all_.mesh.devices, axis, 0)
        each = len(members) // count
        # [C, ...]: the data axis is cut into clients, each of which has adjacent devices.
        if all_.count % count == 0:
            grid = np.moveaxis(grid.reshape(count, -1, *grid.shape[1:]), 1, 1 + axis)
        theirs = [members[k * each : (k + 1) * each] for k in range(count)]
        if all_.count % count or any(
            {d.process_index for d in part.flat} != set(some) for part, some in zip(grid, theirs, strict=True)
        ):
            raise ArgumentsError(
                f"sync: {count} clients need adjacent devices of the mesh's data axis {all_.axis!r} each, those of "
                f"{each} processes. Leave mesh= out, or order its devices by process"
            )
        own = next((k for k, some in enumerate(theirs) if jax.process_index() in some), None)
        if own is None:
            raise ArgumentsError(f"sync: process {jax.process_index()} has no device in the mesh")
        names = all_.mesh.axis_names
        mesh = Mesh(grid[own], names, axis_types=(AxisType.Auto,) * len(names))
        return Clients(grid, own, Devices.of(mesh, all_.axis, all_.tensor_axis), all_.processes)

    @property
    def count(self) -> int:
        return len(self.grid)

    @property
    def leads(self) -> bool:
        """This process is the first one of its client."""
        return jax.process_index() == self.leader(self.own)

    def leader(self, client: int) -> int:
        return self._processes[client][0]

    def speaker(self, client: int, server: int) -> int:
        """Returns the process that speaks for a client to a server; all of a client's take turns."""
        processes = self._processes[client]
        return processes[server % len(processes)]

    @functools.cached_property
    def _processes(self) -> list[list[int]]:
        return [sorted({d.process_index for d in part.flat}) for part in self.grid]

    @functools.cached_property
    def members(self) -> MpiGroup | None:
        """The ranks of this client; None if it has one. Collective over all ranks the first time."""
        size = self.processes.size // self.count
        return None if size == 1 else part_of_ranks(self.own, self.count)

    def said(self, value: Json) -> list[Json]:
        """Returns the value of each process of this client. Collective within the client."""
        if self.members is None:
            return [value]
        return self.members.objects(value, "a worker's messages")

    @functools.cached_property
    def _mesh(self) -> Mesh:
        """All devices, the last client's first.

        XLA has other connections for another order of devices, so that a mean under way can't mix with exchanges of
        other threads' programs.
        """
        names = (_AXIS, *self.devices.mesh.axis_names)
        return Mesh(self.grid[::-1], names, axis_types=(AxisType.Auto,) * len(names))

    @property
    def _is_alone(self) -> bool:
        """No other program may run during a mean.

        CPU devices of a client share threads, which the collectives of two programs could block.
        """
        return self.devices.mesh.size > 1 and self.grid.flat[0].platform == "cpu"

    def mean(self, arrays: Sequence[jax.Array], topology: Topology | None = None, turn: int = 0) -> list[jax.Array]:
        """Averages each array over the clients, in its dtype, where it is. Collective; waits only with several CPU
        devices.

        `topology`, `turn`: whose mean a client takes; None: everyone's.
        """
        return self._joined(arrays, mean_of, topology, turn % topology.period if topology else 0)

    def union(self, bits: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the bits that any client has set. Collective."""
        return self._joined(bits, functools.partial(functools.reduce, jnp.bitwise_or))

    def first(self, arrays: Sequence[Leaf]) -> list[jax.Array]:
        """Returns the first client's arrays, random keys among them. Collective."""
        keys = {n: x for n, x in enumerate(arrays) if jax_compat.is_key(getattr(x, "dtype", None))}
        data = [jax.random.key_data(x) if n in keys else jnp.asarray(x) for n, x in enumerate(arrays)]
        made = self._joined(data, operator.itemgetter(0))
        for n, key in keys.items():
            made[n] = jax.random.wrap_key_data(made[n], impl=jax.random.key_impl(key))
        return made

    def stacked(self, arrays: Sequence[Leaf], about: str) -> list[np.ndarray]:
        """Returns all clients' arrays, [C, ...], in host memory. Collective; each process has its client's whole
        arrays."""
        own: list[np.ndarray] = []
        self.processes.together(AutoparError, lambda: own.extend(np.asarray(x) for x in arrays), about)
        each = self.processes.arrays(own, about)
        return [np.stack(xs) for xs in zip(*each[:: len(each) // self.count], strict=True)]

    def _joined(
        self,
        arrays: Sequence[jax.Array],
        join: Callable[[Sequence[Array]], Array],
        topology: Topology | None = None,
        turn: int = 0,
    ) -> list[jax.Array]:
        if self.count == 1 or not arrays:
            return list(arrays)
        arrays = [self.placed(x) for x in arrays]
        specs = tuple(_spec(x) for x in arrays)
        run = _program(self._mesh, specs, join, topology or Everyone(self.count), turn)
        whole = [self._global(x, spec) for x, spec in zip(arrays, specs, strict=True)]
        if self._is_alone:
            jax.block_until_ready(whole)
        joined = _dispatched(run, whole) if self.grid.flat[0].platform == "cpu" else run(*whole)
        if self._is_alone:
            jax.block_until_ready(joined)
        return [_part(x, like) for x, like in zip(joined, arrays, strict=True)]

    def placed(self, array: jax.Array) -> jax.Array:
        """Returns an array that is committed to all devices of the client, as a step's results are.

        JAX would compile a step anew for each mixture of committed and other arrays, and XLA might round otherwise.
        """
        devices = self.devices.mesh.devices.flat
        if array.committed and array.sharding.device_set == set(devices):
            return array
        if len(devices) == 1:
            return jax.device_put(array, devices[0])
        return place_array(array, self.devices.sharding(None))

    def _global(self, array: jax.Array, spec: P) -> jax.Array:
        """Joins all clients' arrays into one, [C n, ...], of which this client has its part."""
        first, *rest = array.shape or (1,)
        parts = [shard.data.reshape(shard.data.shape or (1,)) for shard in array.addressable_shards]
        shape = (self.count * first, *rest)
        return jax.make_array_from_single_device_arrays(shape, NamedSharding(self._mesh, spec), parts)


@functools.cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "autopar-means")


def _dispatched(run: Callable[..., Sequence[Array]], arrays: Sequence[Array]) -> Sequence[Array]:
    """Runs a program in a thread of its own, so that later programs of this thread don't wait for it.

    On CPUs JAX runs the programs of one thread one after the other. It is dispatched on return, in an order that all
    processes share.
    """
    is_wide = jax.config.read("jax_enable_x64")  # a thread's own

    def dispatch() -> Sequence[Array]:
        with jax_compat.enable_x64(is_wide):
            return run(*arrays)

    return _thread().submit(dispatch).result()


def checked_servers(name: str, wanted: int | None, processes: int) -> int:
    """Returns the number of servers; those are dedicated processes if the job has some, else of `processes`. `name`:
    the option, for the message. `wanted`: their number; None: all. Raises ArgumentsError if there are fewer."""
    dedicated = job().servers
    most = dedicated or processes
    if wanted is not None and not 1 <= wanted <= most:
        there_are = (
            f"this job has {dedicated} dedicated server{'s' * (dedicated > 1)} (launch --servers, {SERVERS_VARIABLE})"
            if dedicated
            else f"there are {processes} processes"
        )
        raise ArgumentsError(f"{name}: servers={wanted}, but {there_are}: give a number from 1 to {most}")
    return wanted or most


def mean_of(parts: Sequence[Array]) -> Array:
    """Averages arrays of one dtype, summed in order, in at least 32 bits."""
    dtype = jnp.promote_types(parts[0].dtype, jnp.float32)
    total = parts[0].astype(dtype)
    for part in parts[1:]:
        total = total + part.astype(dtype)
    return (total / len(parts)).astype(parts[0].dtype)


def _spec(array: jax.Array) -> P:
    """Returns the spec of all clients' arrays, concatenated along the first axis."""
    own = array.sharding.spec if isinstance(array.sharding, NamedSharding) else P()
    first, *rest = own or (None,)
    names = () if first is None else first if isinstance(first, tuple) else (first,)
    return P((_AXIS, *names), *rest)


def _part(array: jax.Array, like: jax.Array) -> jax.Array:
    shapes = {shard.device: shard.data.shape for shard in like.addressable_shards}
    parts = [shard.data.reshape(shapes[shard.device]) for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(like.shape, like.sharding, parts)


@functools.lru_cache(maxsize=64)
def _program(
    mesh: Mesh, specs: tuple[P, ...], join: Callable[[Sequence[Array]], Array], topology: Topology, turn: int
) -> Callable[..., Sequence[Array]]:
    """Compiles a program that joins each client's arrays with its partners' of a turn.

    Where all are partners each client computes a C-th of the elements of every dtype.
    """
    count = topology.clients
    # The mesh has the last client first (`Clients._mesh`).
    owners = range(count)[::-1]

    def joined_by_all(flat: Array) -> Array:
        each = -(-flat.size // count)
        parts = jnp.pad(flat, (0, count * each - flat.size)).reshape(count, each)
        received = jax.lax.all_to_all(parts, _AXIS, 0, 0)
        return jax.lax.all_gather(join([received[owners[c]] for c in range(count)]), _AXIS, tiled=True)

    def joined_by_partners(flat: Array) -> Array:
        columns = zip(*(topology.partners(c, turn) for c in range(count)), strict=True)
        sent = [[(owners[c], owners[own]) for own, c in enumerate(column)] for column in columns]
        return join([flat, *(jax.lax.ppermute(flat, _AXIS, pairs) for pairs in sent[1:])])

    def run(*arrays: Array) -> Sequence[Array]:
        by_dtype: dict[Dtype, list[int]] = {}
        for k, x in enumerate(arrays):
            by_dtype.setdefault(x.dtype, []).append(k)
        joined: list[Array] = [None] * len(arrays)
        for some in by_dtype.values():
            flat = jnp.concatenate([arrays[k].reshape(-1) for k in some])
            whole, start = (joined_by_all if isinstance(topology, Everyone) else joined_by_partners)(flat), 0
            for k in some:
                joined[k] = whole[start : start + arrays[k].size].reshape(arrays[k].shape)
                start += arrays[k].size
        return joined

    mapped = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=list(specs), check_vma=False)
    return jit_on(mesh, mapped, what="averaging replicas")
