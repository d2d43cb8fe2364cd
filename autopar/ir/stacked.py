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
    tables, one behind the other.
    """

    extents: tuple[int, ...]  #: Rows of each table.
    devices: int  #: N.

    @functools.cached_property
    def starts(self) -> Sequence[int]:
        """The first row of each table, and behind the last one the rows of all."""
        return list(itertools.accumulate((self.layout_of(n).stored for n in range(len(self.extents))), initial=0))

    @property
    def rows(self) -> int:
        """Rows of the stack."""
        return self.starts[-1]

    @property
    def layout(self) -> RowLayout:
        """The layout of the stack."""
        return RowLayout(self.rows, self.devices, cyclic=self.devices > 1)

    def layout_of(self, table: int) -> RowLayout:
        """Returns the layout of a table's rows by itself."""
        return RowLayout(self.extents[table], self.devices, cyclic=self.devices > 1)


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
