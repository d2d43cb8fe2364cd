"""Deferred rows: what a step leaves undone on the rows that it doesn't touch, and how it is done later (DESIGN 4).

An optimizer with momentum or decay moves every row in every step. On rows that a step doesn't touch the move is a
function of the row itself, *phi*, and of a few values of the step that are the same for all rows. So a step writes down
those values, in a *journal*, and leaves the rows; before a row is read, phi is replayed for the steps that it missed.
When the journal is full all rows are brought up to date (a *flush*), and it begins anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.ir.program import ArrayType, Block, Equation

#: Full journals that settled rows wait for at most.
VOLUMES = 256


@dataclass(frozen=True, slots=True)
class Settled:
    """Rows that needn't be replayed step by step, because phi only scales them.

    That holds while the rows of some leaves are zero (Adam's first moment: never touched, or long ago). The scale is
    then the product of the steps' factors, for any number of steps at once.

    Attributes:
      zero: Leaves (numbers among those that phi changes) that must be zero, and stay so.
      scaled: Leaves that are multiplied by a number in each step, all others of those that phi changes.
      dtypes: Theirs.
      near_one: Of each of these, whether the factor is written down less one, so that 1 - 1e-9 isn't rounded to 1.
      not_negative: Leaves in which no element may be negative.
    """

    zero: tuple[int, ...]
    scaled: tuple[int, ...]
    dtypes: tuple[Any, ...]
    near_one: tuple[bool, ...]
    not_negative: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Replay:
    """How the rows of a family are brought up to date. Its equations' body is phi.

    phi's inputs: one row (size 1 along its axis) of each leaf that it changes, one row of each that it only reads, and
    the values of a step; its outputs: the new rows.

    Attributes:
      leaves: Which inputs of the program: leaves that phi changes, then those that it only reads.
      extent: V.
      changed: How many it changes.
      axes: The row axis of each.
      values: Types of the values that a step writes down.
      settled: What needn't be replayed, if there is such.
      length: K, steps in a full journal.
    """

    leaves: tuple[int, ...]
    extent: int
    changed: int
    axes: tuple[int, ...]
    values: tuple[ArrayType, ...]
    settled: Settled | None
    length: int

    @property
    def read(self) -> int:
        """How many leaves phi only reads."""
        return len(self.leaves) - self.changed

    @property
    def records(self) -> tuple[ArrayType, ...]:
        """Types of what a journal holds of one step: phi's values, factors, and whether the factors may be used."""
        if self.settled is None:
            return self.values
        factors = (ArrayType((), dtype) for dtype in self.settled.dtypes)
        return (*self.values, *factors, ArrayType((), np.dtype(bool)))

    @property
    def volumes(self) -> tuple[ArrayType, ...]:
        """Types of what is kept of journals that were full: a number for each of them, and for each scaled leaf."""
        dtypes = () if self.settled is None else self.settled.dtypes
        return tuple(ArrayType((VOLUMES,), dtype) for dtype in dtypes)

    @property
    def record_bytes(self) -> int:
        """Bytes of one step in the journal."""
        return sum(t.nbytes for t in self.records)


def flushes(block: Block) -> list[Equation]:
    """The equations that flush a block's journals, in the order of the journals among its outputs."""
    found = [e for e in block.equations if e.op == "flush"]
    return sorted(found, key=lambda e: block.outputs.index(e.outputs[e.params["replay"].changed]))
