"""What an equation that needs all rows is told of those that the step doesn't touch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autopar.ir.operations import plain_name
from autopar.ir.program import Atom, Block, Equation


@dataclass(frozen=True, slots=True, eq=False)
class UntouchedRows:
    """The rows that a step doesn't touch, for a reduction over all.

    Attributes:
      operands: Whether they are to be looked at, leaves, and values of the step.
      axes: The leaves' row axes.
      body: From a route to some rows, and these operands but the first, to what is reduced.
    """

    operands: tuple[Atom, ...]
    axes: tuple[int, ...]
    body: Block


@dataclass(frozen=True, slots=True, eq=False)
class RowValue:
    """What all rows are needed of.

    Attributes:
      rows: It at the routed rows.
      axis: Where its rows lie.
      family: Whose they are.
      constant: What analysis has found it to be off the touched rows.
      sources: Values in row space that it is made of, and where their rows lie.
      equation: The reduction over all rows, or what makes the value.
      product: Makes it of the sources' rows, and where its rows lie; None where it is the only source.
      is_reduced: Whether all that is needed is a reduction of it.
    """

    rows: Atom
    axis: int
    family: int
    constant: Any
    sources: tuple[tuple[Atom, int], ...]
    equation: Equation | None
    product: tuple[Equation, int] | None = None
    is_reduced: bool = True

    @property
    def op(self) -> str:
        """What the user's line does."""
        return "an equation" if self.equation is None else plain_name(self.equation.op)
