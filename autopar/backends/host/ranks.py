"""Who takes part in a step with tables on hosts, and how values get to compiled programs and back.

Two reduction backends. "mpi": a rank's device programs are its own, on its own devices and its own examples; what is
reduced travels between programs. "xla": they are global programs over all ranks' devices, and XLA reduces; rows that
ranks fetched are global arrays of which each rank has its part. The owner's programs are always its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import jax
import numpy as np
from jax.profiler import TraceAnnotation
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autopar import jax_compat
from autopar.analysis.rules import resized
from autopar.backends.across import is_global, local
from autopar.backends.devices import Devices
from autopar.backends.host.view import AllRanks, RankView
from autopar.backends.protocol import RowBackend
from autopar.backends.spread import backends
from autopar.backends.watched import jit_on
from autopar.ir.bound_plan import BoundPlan
from autopar.ir.stages import Side
from autopar.launch.progress import mark
from autopar.mpi.buffers import Buffers
from autopar.mpi.exchange import Exchange, Requested

Array = Any
T = TypeVar("T")

#: Where a program's result is: XLA decides.
ANYHOW = -1


class Ranks:
    """One rank's part.

    Attributes:
      exchange: Between ranks.
      device_view, owner_view: How programs of either side see the devices.
      mesh: Of the device programs: the rank's own devices ("mpi"), or all ranks' ("xla").
      host: The device of the owner's programs, where that isn't the default one.
      buffers: Memory that the step after next uses again.
      step: The number of the step, for messages.
    """

    def __init__(self, exchange: Exchange, reduction_backend: str) -> None:
        self.exchange = exchange
        self.is_global = reduction_backend == "xla"
        mine = jax.local_devices()
        if self.is_global:
            grid = np.array(jax.devices()).reshape(exchange.size, -1)
            self.mesh = Mesh(grid, ("ranks", "local"), axis_types=(AxisType.Auto,) * 2)
            self.device_view: Devices = AllRanks(self.mesh, "ranks")
        else:
            self.mesh = Mesh(np.array(mine).reshape(1, -1), ("ranks", "local"), axis_types=(AxisType.Auto,) * 2)
            self.device_view = RankView(self.mesh, "ranks", exchange.rank, exchange.size)
        self.owner_view = RankView(self.mesh, "ranks", exchange.rank, exchange.size)
        self.is_single = not self.is_global and len(mine) == 1
        self.host = None if mine[0].platform == "cpu" else jax.local_devices(backend="cpu")[0]
        self.buffers = Buffers()
        self._thread = ThreadPoolExecutor(1, "autopar-reductions")
        self.step = -1

    # --- exchanges ---

    def ask(self, places: np.ndarray, shard_rows: int) -> Requested:
        return self._exchanged("asking for rows", self.exchange.ask, places, shard_rows)

    def fetch(self, requested: Requested, rows: np.ndarray, out: np.ndarray) -> np.ndarray:
        return self._exchanged("fetching rows", self.exchange.fetch, requested, rows, out)

    def deliver(self, requested: Requested, sums: np.ndarray, out: np.ndarray) -> np.ndarray:
        return self._exchanged("delivering gradients", self.exchange.deliver, requested, sums, out)

    def _exchanged(self, what: str, exchange: Callable[..., T], *args: Any) -> T:
        """Marked as a wait for others, and named in profiles."""
        if self.exchange.size > 1:
            mark(self.step, what, "waits")
        with TraceAnnotation(f"autopar: {what}"):
            result = exchange(*args)
        if self.exchange.size > 1:
            mark(self.step, "computing")
        return result

    # --- programs ---

    def backends(self, bound: BoundPlan, side: Side) -> Mapping[int, RowBackend]:
        """Of families on devices."""
        return backends(bound, self.device_view) if self.is_global and side == "device" else {}

    def compile(
        self, run: Callable[..., Sequence[Array]], side: Side, donated: Sequence[int], along: Sequence[int | None]
    ) -> Callable[..., Sequence[Array]]:
        """A program of one side. `along`: the axis by which a result is spread over the devices of a program of all
        ranks; None for one of which every device must have all, or `ANYHOW`."""
        options: dict[str, Any] = {"donate_argnums": tuple(donated), "keep_unused": bool(donated)}
        if side == "device" and not self.is_single:
            is_left = [a == ANYHOW or (a is not None and not self.is_global) for a in along]
            options["out_shardings"] = tuple(
                None if k else self.sharding(a) for a, k in zip(along, is_left, strict=True)
            )
        if side == "device":
            return jit_on(self.mesh, lambda *xs: tuple(run(*xs)), **options)
        program = jax.jit(lambda *xs: tuple(run(*xs)), **options)

        def on_host(*operands: Array) -> Sequence[Array]:
            with jax.default_device(self.host):
                return program(*operands)

        return program if self.host is None else on_host

    def sharding(self, along: int | None, *, ranks_only: bool = False) -> NamedSharding:
        """On all devices, or spread along an axis: over the ranks, and over each rank's devices."""
        if along is None:
            return NamedSharding(self.mesh, P())
        return NamedSharding(self.mesh, P(*[None] * along, "ranks" if ranks_only else ("ranks", "local")))

    # --- values ---

    def for_device(self, value: Any) -> Any:
        """A value as a device program takes it."""
        if not self.is_global or is_global(value):
            return value
        return jax.tree.map(self.everywhere, value)

    def everywhere(self, value: Any) -> jax.Array:
        """A value that all ranks have, on all devices."""
        if is_global(value):
            return value
        if isinstance(value, jax.Array) and jax_compat.is_key(value.dtype):
            data = self.everywhere(jax.random.key_data(value))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))
        value = value if isinstance(value, jax.Array) else np.asarray(value)
        mine = [d for d in self.mesh.devices.flat if d.process_index == jax.process_index()]
        parts = [jax.device_put(value, d) for d in mine]
        return jax.make_array_from_single_device_arrays(value.shape, self.sharding(None), parts)

    def for_owner(self, value: Any) -> Any:
        """A value, all of it, as an owner's program takes it."""
        if isinstance(value, jax.Array) and (self.host is not None or not self.is_single):
            return np.asarray(local(value))
        return value

    def own(self, value: Any) -> Any:
        """A result that all devices have, as an ordinary array of this process."""
        if is_global(value) and value.is_fully_replicated:
            return value.addressable_data(0)
        return value

    def spread(self, part: np.ndarray, axis: int) -> Any:
        """This rank's part of an array that is spread over the ranks."""
        if not self.is_global:
            return part
        sharding = self.sharding(axis, ranks_only=True)
        shape = resized(part.shape, axis, part.shape[axis] * self.exchange.size)
        return jax.make_array_from_callback(shape, sharding, lambda index: part)

    def own_part(self, value: Any, axis: int) -> np.ndarray:
        """Returns this rank's part of a global array."""
        if isinstance(value, jax.Array) and self.is_global:
            return np.asarray(value.addressable_data(0))
        return np.asarray(value)

    def own_ids(self, ids: Any) -> np.ndarray:
        """Flat ids of this rank: all that its devices have."""
        if isinstance(ids, jax.Array) and self.is_global:
            return np.concatenate([np.asarray(s.data) for s in ids.addressable_shards])
        return np.asarray(ids)

    def reduce(self, values: Sequence[Any], op: str, *, beside: bool = False) -> Callable[[], Sequence[Any]]:
        """Values of all ranks, reduced, as what returns them. `beside`: by a thread of its own, which waits for the
        programs that make them; until it is done the rank exchanges nothing else."""
        if self.exchange.size == 1:
            alone = values if self.host is None else [np.asarray(v) for v in values]
            return lambda: alone
        if not beside:
            reduced = self._exchanged("reducing", self.exchange.reduce, [np.asarray(v) for v in values], op)
            return lambda: reduced
        reducing = self._thread.submit(lambda: self.exchange.reduce([np.asarray(v) for v in values], op, beside=True))

        def result() -> Sequence[np.ndarray]:
            jax.block_until_ready(values)  # until then this rank isn't one that waits for others
            return self._exchanged("reducing", reducing.result)

        return result

    def agree(self, needs: tuple[int, int]) -> tuple[int, int]:
        """The largest of all ranks' needs, where their programs must have one shape."""
        if not self.is_global:
            return needs
        (largest,) = self.exchange.reduce([np.array(needs, np.int64)], "max")
        return int(largest[0]), int(largest[1])
