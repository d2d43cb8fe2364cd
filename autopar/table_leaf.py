"""`TableLeaf`: what `Table` and `HostTable` have in common with an array, wherever their rows are."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any

import numpy as np


class TableLeaf(abc.ABC):
    """A leaf of the state that stands for an array [..., V, ...] of the rows' dtype."""

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The table's own shape, [..., V, ...]."""

    @property
    @abc.abstractmethod
    def dtype(self) -> Any:
        """The rows' dtype."""

    @abc.abstractmethod
    def is_deleted(self) -> bool:
        """Whether the rows were given to a step, which updated them in place."""

    @abc.abstractmethod
    def materialize(self) -> Any:
        """The table as an ordinary array."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(
                f"an autopar.{type(self).__name__} has no attribute {name!r}: table[...] is an ordinary array, and "
                "autopar.materialize(state) makes a state of such"
            )

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements, spare rows excepted."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """Bytes of the table, spare rows excepted."""
        return self.size * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]
