"""`Runner`: runs a planned step. The way to run the step makes it (`ways`), once."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, ClassVar

from autopar.errors import StepError
from autopar.jax_types import Leaf, Pytree


class Runner(abc.ABC):
    """Runs a planned step."""

    #: How a step is said to be that runs in several programs.
    several_programs: ClassVar[str] = ""

    @abc.abstractmethod
    def __call__(self, leaves: Sequence[Leaf]) -> Pytree:
        """Runs the step on flat arguments, arrays and tables; returns its results.

        Raises:
          RuntimeError, ValueError: from JAX, for a donated buffer, for example.
        """

    def lower(self) -> Any:
        """Lowers the step at the plan's shapes, as `jax.jit(step).lower` does.

        Raises:
          StepError: it runs in several programs.
        """
        raise StepError(
            f"a step {self.several_programs} runs in several programs, and so can't be traced into one (lower, jax.jit)"
        )

    def loads(self) -> Sequence[int] | None:
        """Returns the rows that earlier calls needed of measured capacities; None if none came near any."""
        return None
