"""What processes tell each other, read as data: whoever reaches the port of JAX's store can write to it.

So nothing there is pickled. A process reads JSON, arrays whose types it knows, and errors by their names, which are
those of a fixed list. A function here that reads raises a ValueError (a TypeError, a LookupError) of anything else.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from autopar import errors
from autopar.errors import AutoparError
from autopar.mpi.limits import machine_name

#: The errors that a process can tell others of, by name.
_ERRORS: dict[str, type[AutoparError]] = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, AutoparError)
}


class Failure(NamedTuple):
    """An error of a process.

    Attributes:
      kind: What it is raised as elsewhere.
      machine: Where the process runs.
    """

    kind: type[AutoparError]
    text: str
    machine: str

    @staticmethod
    def of(error: Exception, kind: type[AutoparError]) -> Failure:
        """Makes it of an error, which is raised as `kind` elsewhere if it isn't one of autopar's."""
        known = next((c for c in type(error).__mro__ if c in _ERRORS.values()), kind)
        return Failure(known, text_of(error), machine_name())

    def told(self) -> list[str]:
        """Returns what is sent."""
        return [self.kind.__name__, self.text, self.machine]


def text_of(error: Exception) -> str:
    """Returns what a message says of an error."""
    return str(error) if isinstance(error, AutoparError) else f"{type(error).__name__}: {error}"


def read_outcome(value: Any) -> tuple[Failure | None, Any]:
    """Reads the failure of a process's work, or None, and what the work returned."""
    match value:
        case [None, result]:
            return None, result
        case [[str(name), str(text), str(machine)], result]:
            return Failure(_ERRORS[name], text, machine), result
    raise ValueError("it says neither what was found nor which error it was")


def read_json(data: bytes, like: Any) -> Any:
    """Reads a value of the same kind as another one: an object, a list, a text, or anything else."""
    value = json.loads(data)
    kinds = ((dict, dict), (list, (list, tuple)), (str, str))
    theirs, ours = (next((kind for kind, types in kinds if isinstance(x, types)), None) for x in (value, like))
    if theirs is not ours:
        raise ValueError(f"a {type(value).__name__}, where this process has a {type(like).__name__}")
    return value


def read_arrays(data: bytes, like: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Reads arrays of the shapes and dtypes of others."""
    ends = list(itertools.accumulate((x.nbytes for x in like), initial=0))
    if len(data) != ends[-1]:
        raise ValueError(f"{len(data)} bytes instead of {ends[-1]}")
    return [np.frombuffer(data, x.dtype, x.size, at).reshape(x.shape) for x, at in zip(like, ends, strict=False)]
