"""`Home`: where a leaf of a state is, and how it is brought there from what has all of it, a file or an array."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from autopar import jax_compat
from autopar.backends import across
from autopar.errors import CheckpointError


class Source(Protocol):
    """All of a leaf, read part by part. Nothing is exchanged."""

    def whole(self) -> np.ndarray:
        """Returns the leaf."""
        ...

    def part(self, index: Any) -> np.ndarray:
        """Returns `leaf[index]`; `index`: a slice for each axis."""
        ...

    def rows(self, numbers: np.ndarray, axis: int) -> np.ndarray:
        """Returns [n, ...]: a copy of what has these numbers along an axis, that axis first."""
        ...


class Described(Protocol):
    """Describes a leaf before it is read."""

    @property
    def path(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def numpy_dtype(self) -> np.dtype[Any]: ...
    @property
    def weak(self) -> bool: ...
    @property
    def key(self) -> str | None: ...


class Home(abc.ABC):
    """A place of leaves. A kind of leaf has its own, beside it."""

    @abc.abstractmethod
    def made(self, source: Source, leaf: Described) -> Any:
        """Makes the leaf at this home; of what several processes have, this one's part."""

    @property
    def reads_itself(self) -> Any:
        """The sharding by which Orbax may read an ordinary array straight to its devices; None: it may not."""
        return None


@dataclass(frozen=True)
class ArrayHome(Home):
    """An ordinary array of JAX, or of random keys. `sharding`: None: where JAX puts arrays by itself."""

    sharding: Any = None

    @property
    def reads_itself(self) -> Any:
        return self.sharding if self.sharding is not None and len(self.sharding.device_set) > 1 else None

    def made(self, source: Source, leaf: Described) -> jax.Array:
        require_dtype(leaf)
        if leaf.key is not None:
            keys = jax.random.wrap_key_data(jnp.asarray(source.whole()), impl=leaf.key)
            return keys if self.sharding is None else across.place_array(keys, self.sharding)
        if self.sharding is None:
            array = jnp.asarray(source.whole())
        else:
            array = jax.make_array_from_callback(leaf.shape, self.sharding, source.part)
        return jax_compat.weak(array) if leaf.weak else array


class NumpyHome(Home):
    """An array of NumPy."""

    def made(self, source: Source, leaf: Described) -> np.ndarray:
        return np.array(source.whole())


def require_dtype(leaf: Described) -> None:
    """Checks that JAX has the leaf's dtype.

    Raises:
      CheckpointError: it hasn't, as without 64 bits.
    """
    if jax.dtypes.canonicalize_dtype(leaf.numpy_dtype) != leaf.numpy_dtype:
        raise CheckpointError(
            f"{leaf.path} was saved as {leaf.numpy_dtype}, which JAX doesn't have now: set jax_enable_x64 as it was"
        )


@dataclass(frozen=True)
class Whole:
    """A source that this process has all of.

    Attributes:
      array: The leaf.
    """

    array: np.ndarray

    def whole(self) -> np.ndarray:
        return self.array

    def part(self, index: Any) -> np.ndarray:
        return self.array[index]

    def rows(self, numbers: np.ndarray, axis: int) -> np.ndarray:
        return np.moveaxis(np.take(self.array, numbers, axis), axis, 0)
