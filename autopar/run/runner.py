"""`Runner`: what calls a planned step. The way to run the step makes it (`ways`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from autopar.jax_types import Leaf, Pytree


class Runner(Protocol):
    """Calls a planned step. Chosen by the plan, once."""

    def __call__(self, leaves: Sequence[Leaf]) -> Pytree:
        """Runs the step on flat arguments, arrays and tables; returns its results.

        Raises:
          RuntimeError, ValueError: of JAX's, for a buffer that is gone, among others.
        """
        ...

    def lower(self) -> Any:
        """Returns what `jax.jit(...).lower` returns, at the plan's shapes."""
        ...

    def loads(self) -> Sequence[int] | None:
        """Returns what earlier calls are known to have needed of capacities, in rows; None if none came near."""
        ...
