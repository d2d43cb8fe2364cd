"""Steps of a library's own objects (flax.nnx, Equinox), as `explain` and `verify` see them."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any

from autopar.errors import ArgumentsError
from autopar.planned import Entry
from autopar.step import ParallelStep


class WrappedStep(abc.ABC):
    """A step of a library's own objects, of which an integration (`autopar.integrations`) makes a step of arrays."""

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The step's own name."""

    @property
    @abc.abstractmethod
    def latest(self) -> Entry | None:
        """What is known of the step at the shapes of the latest call that was planned."""

    @abc.abstractmethod
    def pure(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[ParallelStep, Sequence[Any], Mapping[str, Any]]:
        """The step of arrays for these arguments, and what it is to be called with."""


def unwrapped(
    step: ParallelStep | WrappedStep, args: Sequence[Any], kwargs: Mapping[str, Any], what: str
) -> tuple[ParallelStep, Sequence[Any], Mapping[str, Any]]:
    """A step of arrays and its arguments, whatever the step is of.

    Raises:
      ArgumentsError: `step` is no planned step; `what` names the function that wanted one.
    """
    if isinstance(step, WrappedStep):
        return step.pure(args, kwargs)
    if not isinstance(step, ParallelStep):
        raise ArgumentsError(f"{what} takes a step that parallelize returned")
    return step, args, kwargs
