"""A rank's shard of a table (or of a slot) in host memory.

Rows are stored first axis first, distributed cyclically over the ranks (`ir.layout.RowLayout`), and updated in place. A
storage has one current generation: a state that was given to a step is gone, as a donated array is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from autopar.backends.update_log import UpdateLog
from autopar.ir.layout import RowLayout
from autopar.jax_types import Dtype, Leaf
from autopar.mpi.buffers import allocate_table


@dataclass(eq=False, repr=False)
class HostRows:
    """A shard.

    Attributes:
      rows: [shard, ...], spare rows at the end included.
      layout: Which row is where; `layout.devices` is the number of ranks.
      rank: Whose share it is.
      axis: The row axis of the table.
      path: Of the leaf, for messages.
      generation: How often the rows were handed on.
      log: What some rows still miss, if they are deferred.
    """

    rows: np.ndarray
    layout: RowLayout
    rank: int
    axis: int
    path: str
    generation: int = 0
    log: UpdateLog[Any] | None = None

    @staticmethod
    def empty(shape: tuple[int, ...], dtype: Dtype, axis: int, layout: RowLayout, rank: int, path: str) -> HostRows:
        """Allocates a shard of a table of this shape.

        Raises:
          HostMemoryError: there isn't enough.
        """
        others = (*shape[:axis], *shape[axis + 1 :])
        return HostRows(allocate_table((layout.shard_rows, *others), dtype, path), layout, rank, axis, path)

    @staticmethod
    def of(table: Leaf, axis: int, layout: RowLayout, rank: int, path: str) -> HostRows:
        """Returns the shard of a whole table: an array of any kind."""
        shard = HostRows.empty(table.shape, table.dtype, axis, layout, rank, path)
        shard.fill(lambda numbers: np.moveaxis(np.take(np.asarray(table), numbers, axis), axis, 0))
        return shard

    def fill(self, read: Callable[[np.ndarray], np.ndarray], block: int = 1 << 16) -> None:
        """Sets all rows from a function of their numbers in the table; spare ones are copies of the last row."""
        for start in range(0, self.layout.shard_rows, block):
            numbers = self.numbers(start, min(start + block, self.layout.shard_rows))
            self.rows[start : start + numbers.size] = read(numbers)

    def numbers(self, start: int, end: int) -> np.ndarray:
        """Returns which rows of the table are stored in a part of the shard; the last one for spare rows."""
        places = np.arange(start, end) + self.rank * self.layout.shard_rows
        return np.minimum(self.layout.row(places), self.layout.extent - 1)

    def bring_up_to_date(self) -> None:
        """Brings all rows up to date, those of the whole family."""
        if self.log is not None:
            self.log.bring_up_to_date()

    def without_log(self) -> None:
        """Ends the family's update log, all rows up to date: for who is to change some of them otherwise."""
        if self.log is not None:
            self.log.bring_up_to_date()
            for leaf in self.log.leaves:
                leaf.log = None

    def copy(self) -> HostRows:
        """Returns another storage with the same rows, all up to date."""
        self.bring_up_to_date()
        rows = allocate_table(self.rows.shape, self.rows.dtype, self.path)
        other = HostRows(rows, self.layout, self.rank, self.axis, self.path)
        np.copyto(other.rows, self.rows)
        return other

    def pull(self, rows: np.ndarray, count: int, spare: int, state: bool) -> np.ndarray:
        """Returns the rows with these numbers in the shard, and padding; the row axis where the table has it.

        Args:
          rows: int32[U], `count` numbers and then padding.
          count: How many aren't padding.
          spare: A row that the step doesn't touch; what padding is. Of a state it is made finite.
          state: Whether the leaf is state.
        """
        numbers = rows.copy()
        numbers[count:] = spare
        pulled = self.rows.take(numbers, axis=0, mode="clip")
        padding = pulled[count:]
        if state and padding.size and jnp.issubdtype(pulled.dtype, np.inexact):
            finite = np.isfinite(np.abs(padding[-1]).astype(np.float32, copy=False))
            if not finite.all():
                padding[...] = np.where(finite, padding[-1], np.ones((), pulled.dtype))
        return rows_back(pulled, self.axis)

    def commit(self, rows: np.ndarray, count: int, new: np.ndarray) -> None:
        """Replaces rows."""
        self.rows[rows[:count]] = rows_first(new, self.axis)[:count]

    def spread_last(self, new: np.ndarray) -> None:
        """Makes all rows what the padding row is."""
        self.rows[...] = rows_first(new, self.axis)[-1]


def rows_first(array: np.ndarray, axis: int) -> np.ndarray:
    """Moves the row axis to the front."""
    return np.moveaxis(array, axis, 0) if axis else array


def rows_back(array: np.ndarray, axis: int) -> np.ndarray:
    """Moves the row axis from the front to where the table has it."""
    return np.moveaxis(array, 0, axis) if axis else array
