"""`jit_on`: programs for the devices of a mesh, those of several processes with marks by which the watchdog knows who
waits for whom.

Whoever makes a program for the devices of a mesh makes it here (`tests/unit/backends/test_watched.py` checks that), for
a process may wait in it: JAX dispatches programs, runs them while Python goes on, and blocks the caller wherever it
reads a result, in code that nobody can mark.
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
      mesh: They may be of several processes, which then call it together.
      run: A function of arrays.
      what: What messages call a wait in it.
      options: As for `jax.jit`.
    """
    members = {device.process_index for device in mesh.devices.flat}
    return jax.jit(run, **options) if len(members) == 1 else Watched(run, members, what, options)


class Watched:
    """A program that several processes run together.

    It is compiled by itself first, which waits for nobody and may take its time. A call is a wait for the others: some
    programs run within it, others go on after it. They have one more result, which stays here: results of the user's
    may be gone, as others' memory or unread, while the program is under way.
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
        """Lowers the program as `jax.jit(...).lower` does: what is compiled of it is called."""
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
