"""A rank's shard of a table (or of a slot) in host memory.

Rows are stored first axis first, distributed cyclically over the ranks (`ir.layout.RowLayout`), and updated in place. A
storage has one current generation: a state that was given to a step is gone, as a donated array is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from autopar.backends.update_log import AnyLog
from autopar.errors import SlowPlanWarning, warn
from autopar.ir.figures import format_bytes
from autopar.ir.layout import RowLayout
from autopar.jax_types import Dtype, Leaf
from autopar.mpi.buffers import aligned, allocate_table, require_pages

#: Bytes of rows that are read at a time.
_BLOCK_BYTES = 1 << 24

#: Numbers of writes to any storage.
_WRITES = itertools.count(1)


@dataclass(eq=False, repr=False)
class HostRows:
    """A shard."""

    rows: np.ndarray  #: [shard, ...], spare rows at the end included.
    layout: RowLayout  #: Which row is where; `layout.devices` is the number of ranks.
    rank: int  #: Whose share it is.
    axis: int  #: The row axis of the table.
    path: str  #: Of the leaf, for messages.
    generation: int = 0  #: How often the rows were handed on.
    log: AnyLog | None = None  #: What some rows still miss, if they are deferred.
    #: The storage of several tables' shards of which `rows` is a part, from row `start` on.
    stack: HostRows | None = None
    start: int = 0
    write: int = 0  #: The number of the last write to the rows.
    #: Of a stack: the steps that stacked its first table, one after the other, up to the first that did so twice.
    steps: tuple[str, ...] = ()

    @staticmethod
    def empty(shape: tuple[int, ...], dtype: Dtype, axis: int, layout: RowLayout, rank: int, path: str) -> HostRows:
        """Allocates a shard of a table of this shape. Raises HostMemoryError if there isn't enough."""
        others = (*shape[:axis], *shape[axis + 1 :])
        return HostRows(allocate_table((layout.held_on(rank), *others), dtype, path), layout, rank, axis, path)

    @staticmethod
    def of(table: Leaf, axis: int, layout: RowLayout, rank: int, path: str) -> HostRows:
        """Returns the shard of a whole table: an array of any kind."""
        shard = HostRows.empty(table.shape, table.dtype, axis, layout, rank, path)
        shard.fill(lambda numbers: np.moveaxis(np.take(np.asarray(table), numbers, axis), axis, 0))
        return shard

    @staticmethod
    def over(table: Leaf, layout: RowLayout, rank: int, path: str) -> HostRows:
        """Returns a whole table's rows in the memory that it has, which nobody else may use any more; rows first."""
        return HostRows(np.asarray(_Memory(np.asarray(table))).view(table.dtype), layout, rank, 0, path)

    def blocks(self) -> Iterator[slice]:
        """Yields parts of a shard that are read or sent at a time: on all ranks the same, perhaps behind its end."""
        count = self.layout.shard_rows
        step = max(1, _BLOCK_BYTES * len(self.rows) // max(self.rows.nbytes, 1))
        yield from (slice(start, min(start + step, count)) for start in range(0, count, step))

    def fill(self, read: Callable[[np.ndarray], np.ndarray]) -> None:
        """Sets all rows from a function of their numbers in the table; spare ones are copies of the last row."""
        for part in self.blocks():
            self.rows[part] = read(rows_in(self.layout, self.rank, part))
        self.has_written()

    def bring_up_to_date(self) -> None:
        """Brings all rows up to date, those of the whole family."""
        if self.log is not None:
            self.log.bring_up_to_date()
        if self.stack is not None:
            self.stack.bring_up_to_date()

    def catch_up(self, rows: np.ndarray) -> None:
        """Brings some rows of the shard up to date."""
        if self.log is not None:
            self.log.catch_up(rows)
        if self.stack is not None:
            self.stack.catch_up(rows + self.start)

    def without_log(self) -> None:
        """Ends the update logs, all rows up to date: for who is to change some of them otherwise."""
        self.without_own_log()
        if self.stack is not None:
            self.stack.without_own_log()

    def without_own_log(self) -> None:
        """Ends the family's update log, but not that of a stack."""
        if self.log is not None:
            self.log.bring_up_to_date()
            for leaf in self.log.leaves:
                leaf.log = None

    @property
    def handed(self) -> int:
        """The number of times that the rows were handed on, or lost with those of a whole stack."""
        return self.generation + (0 if self.stack is None else self.stack.generation)

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
        self.rows[rows[:count]] = rows_first(new, self.axis)[:count]
        self.has_written()

    def spread_last(self, new: np.ndarray) -> None:
        """Makes all rows what the padding row is."""
        self.rows[...] = rows_first(new, self.axis)[-1]
        self.has_written()

    @property
    def version(self) -> int:
        """A number that is another one after each write to the rows, whoever writes them."""
        return self.write if self.stack is None else max(self.write, self.stack.write)

    def has_written(self) -> None:
        """Gives the rows another version, after a write."""
        self.write = next(_WRITES)
        if self.stack is not None:
            self.stack.write = self.write


class _Memory:
    """Memory of an array, to be written to; `np.asarray` makes an array of it."""

    def __init__(self, owner: np.ndarray) -> None:
        self._owner = owner
        self.__array_interface__ = {**owner.__array_interface__, "data": (owner.ctypes.data, False)}


def rows_in(layout: RowLayout, rank: int, part: slice) -> np.ndarray:
    """Returns which rows of a table are stored in a part of a rank's shard; the last one for spare rows."""
    indices = np.arange(part.start, min(part.stop, layout.held_on(rank))) + rank * layout.shard_rows
    return np.minimum(layout.row(indices), layout.extent - 1)


def stacked(members: Sequence[HostRows], layout: RowLayout, starts: Sequence[int], step: str) -> HostRows:
    """Returns one storage of several tables' shards, which are parts of it from now on.

    `members`: shards with their rows first, in order. `layout`: of the stack. `starts`: where each begins
    in the stack's rows here. `step`: who stacks them. If another step
    has meanwhile stacked some of them otherwise, it is warned of that once. Raises HostMemoryError if there is no room
    for the largest of them once more, which moving them takes.
    """
    first = members[0]
    pairs = zip(members, starts, strict=False)
    is_whole = first.stack is not None and len(first.stack.rows) == layout.shard_rows  # no other table is in it
    if first.stack is not None and is_whole and all(m.stack is first.stack and m.start == at for m, at in pairs):
        for member in members:
            member.without_own_log()
        return first.stack
    steps: Sequence[str] = next((m.stack.steps for m in members if m.stack is not None), ())
    if steps and step in steps and len({*steps}) == len(steps):
        size = format_bytes(sum(member.rows.nbytes for member in members))
        warn(
            f"{step} and {steps[-1]} keep {first.path} beside other tables each, so that whenever one of them follows "
            f"the other, each rank moves its part of such tables in memory, {size}. Give both steps the same tables, "
            "updated alike: autopar.explain says which are exchanged and updated as one",
            SlowPlanWarning,
        )
    for member in members:
        member.without_log()
    largest = max(members, key=lambda member: member.rows.nbytes)
    require_pages(largest.rows.nbytes, largest.path, f"moving {largest.rows.shape} of {largest.rows.dtype}")
    shape = layout.shard_rows, *first.rows.shape[1:]
    # Not set to anything: the system gives a page once it is written, and each table gives its own back.
    stack = HostRows(aligned(shape, first.rows.dtype), layout, first.rank, 0, first.path)
    stack.steps = (*steps, step) if len({*steps}) == len(steps) else (*steps,)
    for member, start in zip(members, starts, strict=False):  # one after the other: each one's own memory goes at once
        part = stack.rows[start : start + len(member.rows)]
        np.copyto(part, member.rows)
        member.rows, member.stack, member.start = part, stack, start
    stack.has_written()  # no member has a version again that it had before
    return stack


def rows_first(array: np.ndarray, axis: int) -> np.ndarray:
    """Moves the row axis to the front."""
    return np.moveaxis(array, axis, 0) if axis else array


def rows_back(array: np.ndarray, axis: int) -> np.ndarray:
    """Moves the row axis from the front to where the table has it."""
    return np.moveaxis(array, 0, axis) if axis else array
