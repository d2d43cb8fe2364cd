"""How steps are copied and pickled: as functions are, and made anew from the user's function and the options."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import jax
import numpy as np

from autopar.errors import ArgumentsError


class PickledByOptions:
    """A step that is pickled as its function and its options, or by its name, where a module has it by that.

    Plans and compiled programs stay behind: the process that reads it plans by its own devices. A copy is the step
    itself, as a copy of a function is.
    """

    __wrapped__: Any
    _made_by: tuple[Callable[..., Any], Mapping[str, Any]] | None = None

    def made_by(self, make: Callable[..., Any], options: Mapping[str, Any]) -> Self:
        """Has the step, which is returned, know that `make(function, **options)` makes another one like it."""
        self._made_by = make, options
        return self

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __reduce__(self) -> Any:
        name = getattr(self, "__qualname__", "")
        module = getattr(self, "__module__", None)
        if module != "__main__" and _found(module, name) is self:  # __main__ is another module elsewhere
            return name
        if self._made_by is None:
            raise TypeError(f"{self!r} can't be pickled: pickle the function that it was made of")
        make, options = self._made_by
        given = {k: _Mesh.of(v) if isinstance(v, jax.sharding.Mesh) else v for k, v in options.items()}
        return _made, (make, self.__wrapped__, given)


def _made(make: Callable[..., Any], fun: Any, given: Mapping[str, Any]) -> Any:
    return make(fun, **{k: v.made() if isinstance(v, _Mesh) else v for k, v in given.items()})


def _found(module: Any, name: str) -> Any:
    """Returns what a module has by a qualified name; None if nothing."""
    try:
        return functools.reduce(getattr, name.split("."), sys.modules[module])
    except (AttributeError, KeyError):
        return None


@dataclass(frozen=True)
class _Mesh:
    """A mesh by the numbers of its devices, which can't be pickled themselves."""

    ids: np.ndarray
    axis_names: tuple[str, ...]
    axis_types: tuple[Any, ...]

    @staticmethod
    def of(mesh: jax.sharding.Mesh) -> _Mesh:
        ids = np.vectorize(lambda device: device.id, otypes=[np.int64])(mesh.devices)
        return _Mesh(ids, mesh.axis_names, mesh.axis_types)

    def made(self) -> jax.sharding.Mesh:
        devices = {device.id: device for device in jax.devices()}
        missing = sorted({*self.ids.flat} - set(devices))
        if missing:
            raise ArgumentsError(
                f"a pickled step has mesh= with devices {', '.join(map(str, missing))}, and this process has "
                f"{len(devices)} devices. Pickle a step without mesh=, or pickle its function and call parallelize here"
            )
        chosen = np.array([devices[k] for k in self.ids.flat], object).reshape(self.ids.shape)
        return jax.sharding.Mesh(chosen, self.axis_names, axis_types=self.axis_types)
