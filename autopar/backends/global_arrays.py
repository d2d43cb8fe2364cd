"""Places plain arrays on devices of several processes, and reads global arrays whole.

A *plain* array (NumPy's, or one on devices of this process) must be the same on every process of the mesh: each puts
its own slices on its own devices, and nothing is sent. Reading a *global* array (with parts on other processes) whole
is collective, unless it is replicated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autopar import jax_compat
from autopar.jax_types import Array, Index, Leaf, Pytree
from autopar.launch.progress import PROGRESS, Progress


def is_global(value: Leaf) -> bool:
    """Returns whether a value is an array with parts on other processes."""
    return isinstance(value, jax.Array) and not jax_compat.is_tracer(value) and not value.is_fully_addressable


def place_array(value: Leaf, sharding: NamedSharding, *, own: bool = False) -> jax.Array:
    """Works as `jax.device_put`, also on devices of several processes. `own`: the result shares no memory with a plain
    value."""
    if is_global(value):
        with PROGRESS.during("moving an array", "waits"):
            return jax.device_put(value, sharding)
    if sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    if isinstance(value, jax.Array) and jax_compat.is_key(value.dtype):
        data = place_array(jax.random.key_data(value), sharding, own=own)
        return jax.device_put(jax.random.wrap_key_data(data, impl=jax.random.key_impl(value)), sharding)
    host = np.asarray(value)
    dtype = jax.dtypes.canonicalize_dtype(host.dtype)

    def part(index: Index) -> np.ndarray:
        return np.array(host[index], dtype, copy=True if own else None)

    placed = jax.make_array_from_callback(host.shape, sharding, part)
    return jax_compat.weak(placed) if jax_compat.is_weak(value) else placed


def local(value: Leaf) -> Leaf:
    """Returns a global array whole on a device of this process (collective); any other value unchanged."""
    value = whole_everywhere(value)
    if not is_global(value):
        return value
    with jax.ensure_compile_time_eval():  # something else may be traced around it
        if jax_compat.is_key(value.dtype):
            return jax.random.wrap_key_data(local(jax.random.key_data(value)), impl=jax.random.key_impl(value))
        return value.addressable_data(0)


def whole_everywhere(value: Leaf) -> Leaf:
    """Replicates a global array on every device, so that NumPy can read it on every process. Collective.

    Returns other values unchanged. Takes the array's whole size on each device, or in the memory of each process if its
    sharding is no `NamedSharding`.
    """
    if not is_global(value) or value.is_fully_replicated:
        return value
    with jax.ensure_compile_time_eval():
        if jax_compat.is_key(value.dtype):
            data = whole_everywhere(jax.random.key_data(value))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))
        if not isinstance(value.sharding, NamedSharding):
            with PROGRESS.during("gathering an array", "waits"):
                return multihost_utils.process_allgather(value, tiled=True)
        return _replicate(NamedSharding(value.sharding.mesh, P()))(value)


@functools.cache
def _replicate(sharding: NamedSharding) -> Callable[[Array], jax.Array]:
    return jit_on(cast(Mesh, sharding.mesh), lambda x: x, out_shardings=sharding)


# --- programs for the devices of a mesh ---
#
# All of them are made here (`tests/unit/backends/test_watched.py` checks that), as the watchdog must know whom a
# process waits for: JAX runs a program while Python continues, and blocks wherever a result is read, in code that can't
# be marked.


def jit_on(mesh: Mesh, run: Callable[..., Pytree], *, what: str = "on the devices", **options: Any) -> Any:
    """Returns `jax.jit(run, **options)`, a function with `lower`, for the devices of a mesh. These may be of several
    processes, which then call it together. `what`: the name of a wait in it, for messages."""
    members = {device.process_index for device in mesh.devices.flat}
    return jax.jit(run, **options) if len(members) == 1 else Watched(run, members, what, options)


class Watched:
    """A program that several processes run together, for the watchdog.

    It is compiled before the first call, as that waits for nobody and may take long. A call is marked as a wait for the
    other processes. As programs may run on after it, an extra result shows whether one has finished: the user's results
    may be donated, or never read.
    """

    def __init__(
        self,
        run: Callable[..., Pytree],
        members: set[int],
        what: str,
        options: dict[str, Any],
        progress: Progress = PROGRESS,
    ) -> None:
        @functools.wraps(run)
        def run_with_token(*operands: Leaf) -> tuple[Leaf, Leaf]:
            return run(*operands), jnp.zeros((), bool)

        if "out_shardings" in options:
            options = {**options, "out_shardings": (options["out_shardings"], None)}
        self._program = jax.jit(run_with_token, **options)
        self._needs = range(min(members), max(members) + 1)
        self._what, self._is_compiled, self._progress = what, False, progress

    def lower(self, *operands: Leaf) -> Any:
        """Lowers the program as `jax.jit(...).lower` does; compiling it serves later calls."""
        return self._program.lower(*operands)

    def __call__(self, *operands: Leaf) -> Pytree:
        if not self._is_compiled:
            with self._progress.during("compiling", "compiles"):
                self.lower(*operands).compile()
            self._is_compiled = True
        with self._progress.during(self._what, "waits", self._needs):
            results, token = self._program(*operands)
        if not jax_compat.is_tracer(token):
            self._progress.dispatched(token, self._needs)
        return results
