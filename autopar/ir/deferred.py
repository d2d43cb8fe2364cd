"""Deferred rows: what a step leaves undone on the rows that it doesn't touch, and how it is done later.

An optimizer with momentum or decay moves every row in every step. On rows that a step doesn't touch the move is a
function of the row itself, the *untouched update*, and of a few values of the step that are the same for all rows. So a
step writes down those values, in an *update log*, and leaves the rows; before a row is read, the untouched update is
replayed for the steps that it missed.

An update log has two parts of K steps. Steps write into the *newer* one. Meanwhile the rows that the *older* one moves
are brought up to its end, some before each step. When the newer part is full, no row needs the older one any more: the
newer takes its place. A *flush* brings all rows up to date, and the update log begins anew.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.ir.program import ArrayType, Block, Equation
from autopar.jax_types import Dtype

#: What elements of a leaf may be known not to fall below (`Fading.floors`): second moments, mostly.
FLOORS = (0.0, 1e-14, 1e-12, 1e-10, 1e-8, 1e-6, 1e-4)
#: Parts of an update log of which it is kept what they multiply scale-only rows by.
SEGMENTS = 256


@dataclass(frozen=True, slots=True)
class ScaleOnly:
    """Rows that needn't be replayed step by step, because the untouched update only scales them.

    That holds while the rows of some leaves are zero (Adam's first moment: never touched, or long ago). The scale is
    then the product of the steps' factors, for any number of steps at once.

    Attributes:
      zero: Leaves (numbers among those that the untouched update changes) that must be zero, and stay so.
      scaled: Leaves that are multiplied by a number in each step, all others of those that the untouched update
        changes.
      dtypes: Theirs.
      near_one: Of each of these, whether the factor is written down less one, so that 1 - 1e-9 isn't rounded to 1.
      not_negative: Leaves in which no element may be negative.
    """

    zero: tuple[int, ...]
    scaled: tuple[int, ...]
    dtypes: tuple[Dtype, ...]
    near_one: tuple[bool, ...]
    not_negative: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Fading:
    """Rows that are nearly scale-only: leaves that should be zero are so small that they move no other leaf any more.

    What they would still add to those is bounded: in a step at most *reach* times the element in the same place, and
    they are themselves multiplied by a number in each step. Where the sum over all steps to come is less than what
    rounding does, the row needn't be replayed either, up to the end of the update log. Reaches are smaller where
    divisors are known to be larger; they are written down for each of FLOORS.

    Attributes:
      zero: The leaves (`ScaleOnly.zero`).
      pairs: (A scaled leaf, a leaf of `zero` that moves it).
      floors: Leaves whose elements must not fall below a floor for its reach to be used.
      dtypes: Those of `zero`.
    """

    zero: tuple[int, ...]
    pairs: tuple[tuple[int, int], ...]
    floors: tuple[int, ...]
    dtypes: tuple[Dtype, ...]

    def moving(self, leaf: int) -> int:
        """Returns how many leaves move a scaled one."""
        return sum(moved == leaf for moved, _ in self.pairs)


@dataclass(frozen=True, slots=True)
class Replay:
    """Says how the rows of a family are brought up to date. Its equations' body is the untouched update.

    The untouched update's inputs: one row (size 1 along its axis) of each leaf that it changes, one row of each that it
    only reads, and the values of a step; its outputs: the new rows.

    Attributes:
      leaves: Which inputs of the program: leaves that the untouched update changes, then those that it only reads.
      extent: V.
      changed: How many it changes.
      axes: The row axis of each.
      values: Types of the values that a step writes down.
      scale_only: What needn't be replayed, if there is such.
      fading: What needn't be replayed to the end, if there is such.
      part: K, steps in each part of an update log.
    """

    leaves: tuple[int, ...]
    extent: int
    changed: int
    axes: tuple[int, ...]
    values: tuple[ArrayType, ...]
    scale_only: ScaleOnly | None
    fading: Fading | None
    part: int

    @property
    def length(self) -> int:
        """Steps that an update log has room for. An empty one begins at K, with the newer part."""
        return 2 * self.part

    @property
    def prepared(self) -> int:
        """After how many steps it is compiled what brings rows up to date: many states are trained for fewer."""
        return min(16, self.part // 2)

    @property
    def waiting(self) -> int:
        """The number of last full parts that scale-only rows may wait for: older rows are multiplied between steps."""
        return SEGMENTS // 2

    @property
    def dropped(self) -> int:
        """The number of segments that make room for another one: the oldest, for which no row waits."""
        return SEGMENTS - 1 - self.waiting

    @property
    def read(self) -> int:
        """The number of leaves that the untouched update only reads."""
        return len(self.leaves) - self.changed

    @property
    def records(self) -> tuple[ArrayType, ...]:
        """Types of what an update log holds of each step.

        The untouched update's values; factors of scale-only rows, and whether they may be used. And of the steps from
        this one on: that, factors of scaled leaves, of those that fade, of those with floors, and reaches
        (`backends.segments.Suffixes`).
        """
        values, scale_only, fading = self.values, self.scale_only, self.fading
        if scale_only is None:
            return values
        holds = ArrayType((), np.dtype(bool))
        factors = tuple(ArrayType((), dtype) for dtype in scale_only.dtypes)
        if fading is None:
            return (*values, *factors, holds)
        of_leaf = dict(zip(scale_only.scaled, factors, strict=True))
        fades = (ArrayType((), dtype) for dtype in fading.dtypes)
        sinks = (of_leaf[leaf] for leaf in fading.floors)
        reaches = (ArrayType((len(FLOORS),), of_leaf[leaf].dtype) for leaf, _ in fading.pairs)
        return (*values, *factors, holds, holds, *factors, *fades, *sinks, *reaches)

    @property
    def segments(self) -> tuple[ArrayType, ...]:
        """Types of what is kept of parts that were full: a number for each of them, and for each scaled leaf."""
        dtypes = () if self.scale_only is None else self.scale_only.dtypes
        return tuple(ArrayType((SEGMENTS,), dtype) for dtype in dtypes)

    @property
    def record_bytes(self) -> int:
        """Bytes of one step in the update log."""
        return sum(t.nbytes for t in self.records)


def flushes(block: Block) -> list[Equation]:
    """Returns the equations that flush a block's update logs, in the order of their stamps among its outputs."""
    flushes_ = [e for e in block.equations if e.op == "ap.flush"]
    return sorted(flushes_, key=lambda e: block.outputs.index(e.outputs[e.params["replay"].changed]))


def update_logs(block: Block) -> list[list[Equation]]:
    """Returns the flushes of a block; together those of families that share an update log (`passes.share_logs`)."""
    logs: dict[int, list[Equation]] = {}
    for flush in flushes(block):
        logs.setdefault(flush.params.get("log", flush.params["family"]), []).append(flush)
    return list(logs.values())
