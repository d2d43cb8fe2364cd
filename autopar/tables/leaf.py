"""`TableLeaf`: what `Table` and `HostTable` have in common with an array, wherever their rows are."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np


class TableLeaf(abc.ABC):
    """A leaf of the state that stands for an array [..., V, ...] of the rows' dtype.

    Python's operators read it whole, and make ordinary arrays, as `0.9 * average + 0.1 * table` of a moving average.
    """

    #: NumPy's operators leave the work to those of this class, as they do for arrays of JAX.
    __array_priority__ = 100

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
    @abc.abstractmethod
    def _where(self) -> str:
        """What `repr` says of its rows."""

    def __repr__(self) -> str:
        kind, shape = type(self).__name__, ",".join(map(str, self.shape))
        remedy = "for other JAX functions: autopar.materialize(state)"
        return f"autopar.{kind}({self.dtype}[{shape}]{self._where}; {remedy})"

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

    #: By identity, as those of containers must be: `==` compares elements.
    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        if self.size != 1:
            raise ValueError(f"a table of {self.size} elements is neither true nor false: ask for `is None`, or any()")
        return bool(self.materialize())

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.materialize())


def _operator(name: str) -> Callable[..., Any]:
    def apply(self: TableLeaf, *others: Any) -> Any:
        arrays = [x.materialize() if isinstance(x, TableLeaf) else x for x in others]
        return getattr(self.materialize(), name)(*arrays)

    apply.__name__ = name
    apply.__doc__ = "As of an array: the result is an ordinary one, of all rows."
    return apply


_BINARY = "add sub mul truediv floordiv mod divmod pow matmul and or xor lshift rshift".split()
_OTHERS = "eq ne lt le gt ge neg pos abs invert".split()
for _name in (*_BINARY, *(f"r{name}" for name in _BINARY), *_OTHERS):
    setattr(TableLeaf, f"__{_name}__", _operator(f"__{_name}__"))
