"""`TableLeaf`: what leaves of autopar's own have in common with an array, wherever their parts are."""

from __future__ import annotations

import abc
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from autopar.ir.layout import RowLayout
from autopar.tables.home import Home


@dataclass(frozen=True)
class Shards:
    """The parts of a leaf as files have them.

    Attributes:
      layout: Which row is in which.
      axis: Of rows.
      own: (number, rows, row axis first) of those that this process saves; each is saved by one. Spare rows at the end
        are left out of files.
    """

    layout: RowLayout
    axis: int
    own: Callable[[], Iterator[tuple[int, np.ndarray]]]


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
        """The table as an ordinary array, which later steps leave alone."""

    def read(self) -> Any:
        """As `materialize`, but it may be an array that the next step updates: to be read at once."""
        return self.materialize()

    def current(self) -> Any:
        """The leaf once nothing is left to be done to it: itself, or what it stands for, an array or another leaf."""
        return self

    @property
    def stored_as(self) -> tuple[RowLayout, int] | None:
        """Layout and row axis of rows that are stored in one; None of others."""
        return None

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

    def __int__(self) -> int:
        return int(self.materialize())

    def __index__(self) -> int:
        return operator.index(self.materialize())

    def __float__(self) -> float:
        return float(self.materialize())

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.materialize())


class PlacedLeaf(TableLeaf):
    """A leaf whose parts are somewhere."""

    @property
    @abc.abstractmethod
    def home(self) -> Home:
        """Where it is."""

    @property
    @abc.abstractmethod
    def shards(self) -> Shards:
        """How it is saved."""


class StandingLeaf(TableLeaf):
    """A leaf that stands for another one, or for an array, to which something is still to be done."""

    @abc.abstractmethod
    def current(self) -> Any: ...

    def read(self) -> Any:
        leaf = self.current()
        return leaf.read() if isinstance(leaf, TableLeaf) else leaf

    def materialize(self) -> Any:
        leaf = self.current()
        return leaf.materialize() if isinstance(leaf, TableLeaf) else jnp.copy(leaf)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = np.asarray(self.current())
        return np.array(array, dtype or array.dtype)

    def __getitem__(self, index: Any) -> Any:
        leaf = self.current()
        picked = leaf[index]
        return jnp.copy(picked) if picked is leaf else picked  # later steps update the leaf in place


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
