"""A program in which tables that are alike are one table (`passes.stack_tables`)."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.ir.layout import RowLayout
from autopar.ir.program import Program
from autopar.ir.program_plan import ProgramPlan


@dataclass(frozen=True)
class StackShape:
    """The rows of a stack: those of each table behind those of the one before, rounded up to a multiple of N.

    With rows distributed cyclically over N devices, or ranks, each device's shard of the stack has its shards of the
    tables, one behind the other; those of tables that are whole on one device behind all others. The n-th row of such a
    table, which begins at row s of device d's shard, is row (s + n) N + d of the stack.
    """

    extents: tuple[int, ...]  #: Rows of each table.
    devices: int  #: N.
    owners: tuple[int | None, ...] = ()  #: The device that has all of a table's rows, if it is one; (): spread, all.

    @functools.cached_property
    def starts(self) -> Sequence[int]:
        """The row of the stack that is each table's first."""
        starts = [self.starts_on(self.owner(n) or 0)[n] for n in range(len(self.extents))]
        return [start * self.devices + (self.owner(n) or 0) for n, start in enumerate(starts)]

    def stride(self, table: int) -> int:
        """Returns the number of the stack's rows from one of a table's rows to the next."""
        return 1 if self.owner(table) is None else self.devices

    def rows_of(self, table: int) -> slice:
        start, stride = self.starts[table], self.stride(table)
        return slice(start, start + stride * self.extents[table], stride)

    def starts_on(self, device: int) -> Sequence[int]:
        """Returns where each table's shard begins in a device's shard of the stack, and where the last one ends."""
        numbers = sorted(range(len(self.extents)), key=lambda n: self.owner(n) is not None)
        held = (self.layout_of(n).held_on(device) for n in numbers)
        *starts, end = itertools.accumulate(held, initial=0)
        return [*(start for _, start in sorted(zip(numbers, starts, strict=True))), end]

    def owner(self, table: int) -> int | None:
        """Returns the device that has all of a table's rows, if it is one."""
        return self.owners[table] if self.owners else None

    @functools.cached_property
    def rows(self) -> int:
        return self.devices * max(self.starts_on(device)[-1] for device in range(self.devices))

    @property
    def layout(self) -> RowLayout:
        return RowLayout(self.rows, self.devices, cyclic=self.devices > 1)

    def layout_of(self, table: int) -> RowLayout:
        """Returns the layout of a table's rows by itself."""
        return RowLayout(self.extents[table], self.devices, self.devices > 1, self.owner(table))


@dataclass(frozen=True)
class StackIndex:
    """The index of a leaf among the leaves of a stack."""

    shape: StackShape
    table: int  #: Number of its table.
    slot: int  #: Number of the leaf among those of its table: of the table itself, and of its slots.


@dataclass(frozen=True, slots=True, eq=False)
class StackedTable:
    """An input that stands for the same leaf of several tables' families: for the tables, or for one of their slots."""

    inputs: tuple[int, ...]  #: Those leaves, inputs of the program before, in the order in which their rows lie.
    indices: tuple[StackIndex, ...]  #: Their indices in the stack.


@dataclass(frozen=True, slots=True, eq=False)
class StackedProgram:
    """A program whose tables are stacked."""

    program: Program  #: The program, analysed.
    plan: ProgramPlan  #: The plan, as this program follows it.
    inputs: tuple[int | StackedTable, ...]  #: The number of each input in the program before; of a stack the leaves.
    outputs: tuple[tuple[int, ...], ...]  #: The numbers of each output in the program before; several of a stack.

    def input_of(self, number: int) -> int:
        """Returns the input that an input of the program before is, or is a part of."""
        of_each = [of.inputs if isinstance(of, StackedTable) else (of,) for of in self.inputs]
        return next(k for k, of in enumerate(of_each) if number in of)
