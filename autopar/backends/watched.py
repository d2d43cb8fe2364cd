"""Compiles programs for the devices of a mesh; the watchdog learns which processes wait for which.

Every program for the devices of a mesh is made here (`tests/unit/backends/test_watched.py` checks that), since a
process may wait in it: JAX runs programs while Python goes on, and blocks the caller wherever it reads a result, in
code that can't be marked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from autopar import jax_compat
from autopar.jax_types import Leaf, Pytree
from autopar.launch.progress import PROGRESS, Progress


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
