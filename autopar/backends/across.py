"""Places plain arrays on devices of several processes, and reads global arrays whole.

A plain array (NumPy's, or one on devices of this process) is the same on every process of the mesh, by contract: each
puts its own slices of it on its own devices, and nothing travels. Reading a global array whole is collective, unless
every device has all of it.
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
    """Returns whether the value is an array that has parts on other processes."""
    return isinstance(value, jax.Array) and not jax_compat.is_tracer(value) and not value.is_fully_addressable


def place_array(value: Leaf, sharding: NamedSharding, *, own: bool = False) -> jax.Array:
    """Works as `jax.device_put`, even if a process has only some of the devices. `own`: shares no memory with plain
    values."""
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
    """Returns the whole of a global array on a device of this process (collective), and other values unchanged."""
    value = whole_everywhere(value)
    if not is_global(value):
        return value
    with jax.ensure_compile_time_eval():  # something else may be traced around it
        if jax_compat.is_key(value.dtype):
            return jax.random.wrap_key_data(local(jax.random.key_data(value)), impl=jax.random.key_impl(value))
        return value.addressable_data(0)


def whole_everywhere(value: Leaf) -> Leaf:
    """Returns a global array replicated on every device, so that NumPy reads it on every process. Collective.

    Other values stay unchanged. It takes the array's whole size on each device, or in the memory of each process if its
    sharding isn't a `NamedSharding`.
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


# --- programs for the devices of a mesh; the watchdog learns which processes wait for which ---
#
# Every program for the devices of a mesh is made here (`tests/unit/backends/test_watched.py` checks that), since a
# process may wait in it: JAX runs programs while Python goes on, and blocks the caller wherever it reads a result, in
# code that can't be marked.


def jit_on(mesh: Mesh, run: Callable[..., Pytree], *, what: str = "on the devices", **options: Any) -> Any:
    """Returns `jax.jit(run, **options)`, a function with `lower`, for the devices of a mesh.

    Args:
      mesh: Its devices may be of several processes, which then call the function together.
      run: A function of arrays.
      what: The name of a wait in it, for messages.
      options: As for `jax.jit`.
    """
    members = {device.process_index for device in mesh.devices.flat}
    return jax.jit(run, **options) if len(members) == 1 else Watched(run, members, what, options)


class Watched:
    """A program that several processes run together.

    It is compiled separately first, which waits for nobody and may take its time. A call is a wait for the others: some
    programs run within it, others go on after it. An extra result stays here, since the user's results may be gone
    (their memory reused, or never read) while the program is still running.
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
