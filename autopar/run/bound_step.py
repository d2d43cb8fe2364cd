"""`BoundStep`: a step that is a method, with the object that it is a method of."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any


class BoundStep:
    """What `trainer.step` is, of a class whose method `step` was decorated: called without `self`.

    As under `jax.jit` the object is an argument like any other: a pytree of arrays, or static (`static_argnums=0`).

    Attributes:
      step: The step as it was decorated, whose first argument is the object.
      instance: The object.
    """

    def __init__(self, step: Any, instance: Any) -> None:
        functools.update_wrapper(self, step.fun)
        self.__wrapped__ = types.MethodType(step.fun, instance)
        self.step, self.instance = step, instance

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step."""
        return self.step(self.instance, *args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """`jax.jit(step).lower` of the planned step."""
        return self.step.lower(self.instance, *args, **kwargs)

    def calling(self, batch: Any, call: Callable[[Any], Sequence[Any]] | None) -> Callable[[Any], Sequence[Any]]:
        """All arguments of `step` from a state: as `call` says for those behind `self`, else the state and a batch."""
        states = self.step.state_argnums or (1,)

        def all_of(made: Any) -> Sequence[Any]:
            arguments = call(made) if call is not None else (made, batch) if states[0] < 2 else (batch, made)
            return (self.instance, *arguments) if isinstance(arguments, (tuple, list)) else arguments

        return all_of

    def __reduce__(self) -> Any:
        return BoundStep, (self.step, self.instance)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BoundStep) and self.step is other.step and self.instance is other.instance

    def __hash__(self) -> int:
        return hash((id(self.step), id(self.instance)))

    def __getattr__(self, name: str) -> Any:
        """What else there is to see of the step: `name`, `plan`, `latest`."""
        if name in ("step", "instance"):  # of one that is being copied
            raise AttributeError(name)
        return getattr(self.step, name)
