"""A step that is decorated before JAX knows its devices."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from autopar.run.step import ParallelStep


class LateStep(ParallelStep):
    """A step at the top of a module, say: made when it is first used, so that the script may configure JAX before.

    Its fields are those of the step that `make` returns; those that nobody sets are set once one is read.
    """

    def __init__(self, fun: Callable[..., Any], make: Callable[[], ParallelStep]) -> None:
        self._make = make
        functools.update_wrapper(self, fun)

    @property
    def fun(self) -> Callable[..., Any]:
        return self.__wrapped__

    def __getattr__(self, name: str) -> Any:
        if name not in {field.name for field in dataclasses.fields(ParallelStep)}:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        jax.devices()  # from now on they are known
        self.__dict__.update({key: value for key, value in vars(self._make()).items() if key not in self.__dict__})
        return getattr(self, name)
