"""A program in which tables that are alike are one table (`passes.stack_tables`)."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.program import Program
from autopar.ir.program_plan import ProgramPlan


@dataclass(frozen=True, slots=True, eq=False)
class StackedTable:
    """An input that stands for the same leaf of several tables' families: for the tables, or for one of their slots."""

    inputs: tuple[int, ...]  #: Those leaves, inputs of the program before, in the order in which their rows lie.


@dataclass(frozen=True, slots=True, eq=False)
class StackedProgram:
    """A program whose tables are stacked."""

    program: Program  #: The program, analysed.
    plan: ProgramPlan  #: The plan, as this program follows it.
    inputs: tuple[int | StackedTable, ...]  #: The number of each input in the program before; of a stack the leaves.
    outputs: tuple[tuple[int, ...], ...]  #: The numbers of each output in the program before; several of a stack.

    def input_of(self, number: int) -> int:
        """Returns the input that an input of the program before is, or is a part of."""
        return next(k for k, of in enumerate(self.inputs) if number == of or _has(of, number))


def _has(of: int | StackedTable, number: int) -> bool:
    return isinstance(of, StackedTable) and number in of.inputs
