"""The ranks and devices of a step with tables on hosts, and how values reach compiled programs and come back.

Each device runs programs on its own examples. Either each rank's devices run them alone, and MPI reduces between
programs; or all ranks' devices run them together, and XLA reduces within. All devices of a rank have the rows that it
fetched. Programs of the *owner* side, the updates of rows that a rank keeps, always run on one rank alone; those of
the *device* side on its examples.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.profiler import TraceAnnotation
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autopar import jax_compat
from autopar.backends.combined import combined
from autopar.backends.devices import OwnPart
from autopar.backends.global_arrays import is_global, jit_on
from autopar.backends.gloo import uses_gloo
from autopar.backends.host.view import RankDevice, RankView
from autopar.ir.local import Side
from autopar.ir.program import ArrayType
from autopar.jax_types import Array, Device, Leaf, Pytree, Sharding
from autopar.launch.progress import mark
from autopar.mpi.bags import BagIds, RequestedBags, add_up, ask_bags, spread
from autopar.mpi.buffers import Buffers
from autopar.mpi.exchange import Exchange, Requested, RequestedPart, Rounds, divide

T = TypeVar("T")

#: Where an operand or result of a device program is: None: whole on each device; k: spread over them along axis k;
#: `EACH`: each device's own, behind one another along a new first axis.
Placement = int | None
EACH = -1
#: Letters of a step's name in messages, which are short.
_NAME = 24


@functools.partial(jax.jit, static_argnums=3, donate_argnums=0)
def _with_rows(array: jax.Array, at: Array, rows: Array, axis: int) -> jax.Array:
    return array.at[(slice(None),) * axis + (at,)].set(rows, mode="drop")


class Lowerable(Protocol):
    """A function that `jax.jit` has made, or one like it. Compiling what `lower` returns serves later calls."""

    def __call__(self, *operands: Leaf) -> Sequence[Array]: ...

    def lower(self, *operands: Leaf) -> Any: ...


class _OnHost:
    """A program that runs on the host of an accelerator."""

    def __init__(self, program: Lowerable, host: Device) -> None:
        self._program, self._host = program, host

    def __call__(self, *operands: Leaf) -> Sequence[Array]:
        with jax.default_device(self._host):
            return self._program(*operands)

    def lower(self, *operands: Leaf) -> Any:
        with jax.default_device(self._host):
            return self._program.lower(*operands)


class Ranks:
    """One rank's exchange, devices and compiled programs.

    Attributes:
      device_view, owner_view: The devices as programs of either side see them.
      mesh: The mesh of the device programs: the rank's own devices, or all ranks'.
      is_joint, is_single: Whether device programs run on several ranks together, or on one device.
      is_alone: There is no other process.
      host: The device of the owner's programs; None: the default one.
      own_devices: This rank's devices that run device programs.
      buffers: Two sets of buffers, used by steps in turn.
      step: The index of the step, for messages.
      exchanged_s: Seconds of exchanges of ids and rows, the wait for other ranks included.
    """

    def __init__(self, exchange: Exchange, name: str, *, joint: bool, devices: int | None = None) -> None:
        """Takes a rank's exchange. `name`: of the step, for messages; `joint`: device programs are of all ranks;
        `devices`: how many of each rank run them (None: all)."""
        self.exchange = exchange
        self._name = name[:_NAME]
        self.is_joint = joint and exchange.size > 1
        self.own_devices = jax.local_devices()[:devices]
        grid = np.array(self.own_devices).reshape(1, -1)
        if self.is_joint:
            grid = np.array(jax.devices()).reshape(exchange.size, -1)[:, :devices]
        self.mesh = Mesh(grid, ("ranks", "local"), axis_types=(AxisType.Auto,) * 2)
        self.is_single = grid.size == 1
        self.is_alone = jax.process_count() == 1
        own = None if self.is_joint else exchange.rank
        self.owner_view = RankView(self.mesh, "ranks", exchange.rank, exchange.size)
        several = RankDevice(self.mesh, "ranks", rank=own, ranks=exchange.size)
        self.device_view: OwnPart = self.owner_view if self.is_single else several
        self.host = None if self.own_devices[0].platform == "cpu" else jax.local_devices(backend="cpu")[0]
        self.buffers = Buffers()
        #: Compiled programs, by what they compute and where their operands and results are.
        self.programs: dict[Hashable, Lowerable] = {}
        self._thread = ThreadPoolExecutor(1, "autopar-reductions")
        self.step = -1
        self.exchanged_s = 0.0

    # --- exchanges ---

    @staticmethod
    def hides_exchanges(exchange: Exchange) -> bool | None:
        """Says whether exchanges take time in which the devices can compute: on cores that these leave alone, or on
        wires. CPUs of one machine have neither; those of several exchange with the cores that compute, so that it
        depends on how long the wires take: None."""
        if jax.local_devices()[0].platform != "cpu":
            return True
        return None if exchange.near.size < exchange.size else False

    def ask(self, indices: Sequence[np.ndarray], shard_rows: Sequence[int]) -> list[Requested]:
        """Asks for rows of several families at once, as `Exchange.ask`."""
        return self._timed("asking for rows", map(self.exchange.asking, indices, shard_rows))

    def fetch(self, fetches: Sequence[Rounds[np.ndarray]]) -> list[np.ndarray]:
        """Runs some of `fetching` and `fetching_part` at once."""
        return self._timed("fetching rows", fetches)

    def fetching(self, requested: Requested, rows: np.ndarray, out: np.ndarray) -> Rounds[np.ndarray]:
        """Fetches a family's rows, first axis first, as `Exchange.fetch`."""
        return self.exchange.fetching(requested, rows, out)

    def fetching_part(self, part: RequestedPart, rows: np.ndarray, out: np.ndarray) -> Rounds[np.ndarray]:
        """Fetches some of the rows, to where they are among all."""
        out[part.positions] = yield from self.exchange.fetching(part.requested, rows)
        return out

    def deliver(
        self, requested: Sequence[Requested], sums: Sequence[np.ndarray], out: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Delivers gradients of several families at once, as `Exchange.deliver`."""
        rounds = map(self.exchange.delivering, requested, sums, out)
        return self._exchanged("delivering gradients", lambda: self.exchange.together(rounds))

    def _timed(self, what: str, exchanges: Iterable[Rounds[T]]) -> list[T]:
        """Exchanges what could be exchanged beside the step before."""
        start = time.perf_counter()
        results = self._exchanged(what, lambda: self.exchange.together(exchanges))
        self.exchanged_s += time.perf_counter() - start
        return results

    def divide(self, requested: Requested, written: np.ndarray) -> tuple[RequestedPart, RequestedPart]:
        return self._exchanged("telling which rows are written", divide, self.exchange, requested, written)

    def least(self, number: int) -> int:
        """Returns the least of all ranks' numbers. Collective."""
        (least,) = self._exchanged("agreeing", self.exchange.reduce, [np.array(number, np.int64)], "min")
        return int(least)

    def through_first(self, sums: np.ndarray) -> None:
        self._exchanged("sending sums by way of the first rank", self.exchange.through_first, sums)

    def ask_bags(self, requested: Requested, indices: np.ndarray, shard_rows: int, ids: BagIds) -> RequestedBags:
        return self._exchanged("asking for bags", ask_bags, self.exchange, requested, indices, shard_rows, ids)

    def add_up(self, bags: RequestedBags, rows: np.ndarray) -> np.ndarray:
        return self._exchanged("adding up bags", add_up, self.exchange, bags, rows)

    def spread(self, bags: RequestedBags, cotangents: np.ndarray, kept: np.ndarray | None) -> np.ndarray:
        return self._exchanged("delivering cotangents", spread, self.exchange, bags, cotangents, kept)

    def _exchanged(self, what: str, exchange: Callable[..., T], *args: Pytree) -> T:
        """Exchanges something, marked as a wait for others, and named in profiles."""
        if self.exchange.size > 1:
            mark(self.step, f"{self._name}: {what}", "waits")
        with TraceAnnotation(f"autopar: {what}"):
            result = exchange(*args)
        if self.exchange.size > 1:
            mark(self.step, "computing")
        return result

    # --- programs ---

    def compile(
        self,
        run: Callable[..., Sequence[Array]],
        side: Side,
        donated: Sequence[int],
        given: Sequence[Placement] = (),
        returned: Sequence[Placement] = (),
    ) -> Lowerable:
        """Returns a program of one side, which is compiled by its first call; `given`, `returned`: placements of a
        device's operands and results."""
        options: dict[str, Any] = {"donate_argnums": tuple(donated), "keep_unused": bool(donated)}
        if side == "device" and not self.is_single:

            def each(*operands: Leaf) -> tuple[Leaf, ...]:
                pairs = zip(operands, given, strict=True)
                own = (jax.tree.map(lambda a: jax.lax.squeeze(a, (0,)), x) if at == EACH else x for x, at in pairs)
                pairs = zip(run(*own), returned, strict=True)
                return tuple(jax.tree.map(lambda a: jnp.asarray(a)[None], x) if at == EACH else x for x, at in pairs)

            specs = [tuple(self.sharding(at).spec for at in placements) for placements in (given, returned)]
            fun = combined(each, direct=True) if uses_gloo(self.mesh) else each
            mapped = jax.shard_map(fun, mesh=self.mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False)
            return jit_on(self.mesh, mapped, **options)
        if side == "device":
            return jit_on(self.mesh, lambda *xs: tuple(run(*xs)), **options)
        program = jax.jit(lambda *xs: tuple(run(*xs)), **options)

        return program if self.host is None else _OnHost(program, self.host)

    def sharding(self, placement: Placement) -> NamedSharding:
        if placement is None:
            return NamedSharding(self.mesh, P())
        return NamedSharding(self.mesh, P(*[None] * max(placement, 0), ("ranks", "local")))

    # --- values ---

    def operand(
        self, part: ArrayType, placement: Placement, sharding: Sharding | None, side: Side
    ) -> jax.ShapeDtypeStruct:
        """Returns the type of a program's operand, as `for_device` and `for_owner` make it, to compile ahead of a call.

        `part`: the type of a device's own part. `sharding`: of a value that is committed to devices; None: of others.
        """
        shape = part.shape
        if side == "device" and not self.is_single:
            shape = self._joined((1, *shape) if placement == EACH else shape, placement)
            sharding = sharding or self.sharding(placement)
        elif side == "owner" and (self.host is not None or not self.is_single):
            sharding = None  # it is an array of NumPy
        return jax.ShapeDtypeStruct(shape, part.dtype, weak_type=part.weak_type, sharding=sharding)

    def for_device(self, value: Leaf, placement: Placement) -> Leaf:
        """Converts a value that this process has whole to an operand of a device program."""
        return value if self.is_single else jax.tree.map(lambda x: self._on_each(x, placement), value)

    def _on_each(self, value: Leaf, placement: Placement) -> jax.Array:
        """Puts a value on each of the own devices."""
        if isinstance(value, jax.Array) and getattr(value.sharding, "mesh", None) == self.mesh:
            return value
        if isinstance(value, jax.Array) and jax_compat.is_key(value.dtype):
            data = self._on_each(jax.random.key_data(value), placement)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))
        value = value if isinstance(value, jax.Array) else np.asarray(value)
        return self.array_of([value[None] if placement == EACH else value] * len(self.own_devices), placement)

    def array_of(self, parts: Sequence[Leaf], placement: Placement) -> jax.Array:
        if self.is_single:
            return parts[0]
        shape = self._joined(parts[0].shape, placement)
        placed = [jax.device_put(x, d) for x, d in zip(parts, self.own_devices, strict=True)]
        return jax.make_array_from_single_device_arrays(shape, self.sharding(placement), placed)

    def _joined(self, part: tuple[int, ...], placement: Placement) -> tuple[int, ...]:
        """Returns the shape of an array with equal parts on all devices."""
        if placement is None:
            return part
        axis = max(placement, 0)
        return (*part[:axis], self.mesh.size * part[axis], *part[axis + 1 :])

    def send(self, value: np.ndarray) -> list[jax.Array]:
        """Begins to copy an array to each of the own devices."""
        return [jax.device_put(value, device) for device in self.own_devices]

    def sent(self, parts: Sequence[jax.Array], which: np.ndarray, rows: np.ndarray, axis: int) -> jax.Array:
        """Returns what was sent, with other rows at some places, as an operand of device programs.

        `which`: `[n]`, sorted numbers of rows; `rows`: these, along `axis`.
        """
        if which.size:  # to one of few lengths, so that few programs are compiled
            spare = (1 << (which.size - 1).bit_length()) - which.size
            at = np.append(which, np.full(spare, parts[0].shape[axis])).astype(np.int32)
            rows = np.pad(rows, [(0, spare * (k == axis)) for k in range(rows.ndim)])
            parts = [_with_rows(part, at, rows, axis) for part in parts]
        return self.array_of(parts if self.is_single else [part[None] for part in parts], EACH)

    def everywhere(self, value: Leaf) -> jax.Array:
        """Puts a value that all ranks have on all devices."""
        return self._on_each(value, None)

    def from_device(self, value: Leaf, placement: Placement) -> Leaf:
        """Returns a device program's value, which all of a rank's devices share, for other programs and exchanges."""
        if self.is_single or not isinstance(value, jax.Array):
            return value
        jax.block_until_ready(value)  # on all devices: none reads any more what the program was given
        value = value.addressable_data(0)
        value = value if jax_compat.is_key(value.dtype) else np.asarray(value)
        return value[0] if placement == EACH else value

    def for_owner(self, value: Leaf) -> Leaf:
        return np.asarray(value) if isinstance(value, jax.Array) and self.host is not None else value

    def own(self, value: Leaf) -> Leaf:
        """Converts a result that all devices have to an ordinary array of this process."""
        if not self.is_alone and is_global(value) and value.is_fully_replicated:
            return value.addressable_data(0)
        return value

    def own_ids(self, ids: Leaf) -> np.ndarray:
        """Returns this rank's flat ids, from all of its devices."""
        if isinstance(ids, jax.Array) and not self.is_single:
            return np.concatenate([np.asarray(s.data).ravel() for s in ids.addressable_shards])
        return np.asarray(ids)

    def reduce(self, values: Sequence[Leaf], op: str, *, beside: bool = False) -> Callable[[], Sequence[Leaf]]:
        """Reduces values over the ranks; returns a function that waits for the results.

        `beside`: a thread does it, after the programs that make them; until it is done the rank exchanges nothing else.
        """
        if self.exchange.size == 1:
            alone = values if self.host is None else [np.asarray(v) for v in values]
            return lambda: alone
        if not beside:
            reduced = self._exchanged("reducing", self.exchange.reduce, [np.asarray(v) for v in values], op)
            return lambda: reduced
        reducing = self._thread.submit(lambda: self.exchange.reduce([np.asarray(v) for v in values], op, beside=True))

        def result() -> Sequence[np.ndarray]:
            jax.block_until_ready(values)  # until then this rank computes, and isn't marked as waiting
            return self._exchanged("reducing", reducing.result)

        return result

    def in_thread(self, call: Callable[[], T]) -> Callable[[], T]:
        """Calls a function in the thread of the reductions, after those before; returns a function that waits for it.
        Until it is done the rank exchanges nothing else."""
        wide = jax_compat.uses_x64()

        def called() -> T:
            with jax_compat.enable_x64(wide):
                return call()

        return self._thread.submit(called).result

    def agree(self, needs: tuple[int, int], *, first: bool) -> tuple[int, int]:
        """Returns the largest of all ranks' needs if their programs must have one shape, or if it is the `first` step:
        then their first programs are the same, and one rank of a machine compiles them. Collective in these cases."""
        if not self.is_joint and (not first or self.exchange.size == 1):
            return needs
        (largest,) = self.exchange.reduce([np.array(needs, np.int64)], "max")
        return int(largest[0]), int(largest[1])
