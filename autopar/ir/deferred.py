"""Describes deferred rows: moves of rows that a step doesn't touch, and how they are made up for later.

An optimizer with momentum or decay moves every row in every step. On an untouched row the move is a function of the
row, the *untouched update*, and of a few values of the step that all rows share. So a step writes those values to an
*update log* and leaves the rows; before a row is read, the untouched update is replayed for the steps that it missed.

An update log has two parts of K steps. Steps write into the *newer* one; meanwhile rows are brought up to the end of
the *older* one, some before each step. When the newer part is full, no row needs the older one any more, and the newer
takes its place. A *flush* brings all rows up to date and starts the log anew.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.ir.program import ArrayType, Block, Equation
from autopar.jax_types import Dtype

#: Lower bounds of a leaf's elements, mostly of second moments (`Fading.floors`).
FLOORS = (0.0, 1e-14, 1e-12, 1e-10, 1e-8, 1e-6, 1e-4)
#: Number of full parts whose factors of scale-only rows are kept.
SEGMENTS = 256


@dataclass(frozen=True, slots=True)
class ScaleOnly:
    """Rows that the untouched update only scales, so that it needn't be replayed step by step.

    That holds while the rows of some leaves are zero (Adam's first moment of rows never touched, or long ago). The
    product of the steps' factors then stands for any number of steps.
    """

    #: Changed leaves (numbers among those that the untouched update changes) that must be, and stay, zero.
    zero: tuple[int, ...]
    scaled: tuple[int, ...]  #: All other changed leaves, which each step multiplies by a number.
    dtypes: tuple[Dtype, ...]  #: Dtypes of `scaled`.
    near_one: tuple[bool, ...]  #: A leaf's factor is written less one, so that 1 - 1e-9 isn't rounded to 1.
    not_negative: tuple[int, ...] = ()  #: Leaves in which no element may be negative.


@dataclass(frozen=True, slots=True)
class Fading:
    """Rows that are nearly scale-only: leaves that should be zero are too small to move others.

    In a step a fading leaf moves another at most by *reach* times its element at the same index, and is itself
    multiplied by a number. Where the sum over all steps to come is less than a rounding, the row needn't be replayed
    either, up to the end of the update log. Where the other leaf is divided by a third (Adam's second moment), a larger
    divisor means a smaller reach: there is one for each lower bound in FLOORS.
    """

    zero: tuple[int, ...]  #: As `ScaleOnly.zero`.
    pairs: tuple[tuple[int, int], ...]  #: (A scaled leaf, a leaf of `zero` that moves it).
    floors: tuple[int, ...]  #: Leaves whose elements must not fall below a floor for its reach to be used.
    dtypes: tuple[Dtype, ...]  #: Dtypes of `zero`.

    def moving(self, leaf: int) -> int:
        """Counts the leaves that move a scaled one."""
        return sum(moved == leaf for moved, _ in self.pairs)


@dataclass(frozen=True, slots=True)
class Replay:
    """Says how a family's rows are brought up to date. The replaying equations' body is the untouched update.

    The untouched update's inputs are one row (size 1 along its axis) of each leaf that it changes, one row of each that
    it only reads, and the step's values; its outputs are the new rows.
    """

    #: Inputs of the program: leaves that the untouched update changes, then those that it only reads.
    leaves: tuple[int, ...]
    extent: int  #: V.
    changed: int  #: Number of the leaves that it changes.
    axes: tuple[int, ...]  #: Row axis of each leaf.
    values: tuple[ArrayType, ...]  #: Types of the values that a step writes down.
    #: Rows that needn't be replayed, or not to the end, if there are such.
    scale_only: ScaleOnly | None
    fading: Fading | None
    part: int  #: K, steps in each part of an update log.

    @property
    def length(self) -> int:
        """Steps that an update log has room for. An empty one begins at K, with the newer part."""
        return 2 * self.part

    @property
    def prepared(self) -> int:
        """Number of steps after which the programs that catch up are compiled, since many states train for fewer."""
        return min(16, self.part // 2)

    @property
    def waiting(self) -> int:
        """Number of last full parts that scale-only rows may wait for; older rows are multiplied between steps."""
        return SEGMENTS // 2

    @property
    def dropped(self) -> int:
        """Number of the oldest segments, for which no row waits, that make room for a new one."""
        return SEGMENTS - 1 - self.waiting

    @property
    def read(self) -> int:
        """Number of leaves that the untouched update only reads."""
        return len(self.leaves) - self.changed

    @property
    def records(self) -> tuple[ArrayType, ...]:
        """Types of a step's record in the update log.

        A record has the untouched update's values; factors of scale-only rows, and whether they may be used. And, for
        the steps from this one on, that flag again, factors of scaled leaves, of fading ones, of those with floors, and
        reaches (`backends.segments.Suffixes`).
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
        """Types of what is kept of full parts, one number for each part and scaled leaf."""
        dtypes = () if self.scale_only is None else self.scale_only.dtypes
        return tuple(ArrayType((SEGMENTS,), dtype) for dtype in dtypes)

    @property
    def record_bytes(self) -> int:
        """Bytes of one step in the update log."""
        return sum(t.nbytes for t in self.records)


def flushes(block: Block) -> list[Equation]:
    """Returns a block's flushes, in the order of their stamps among its outputs."""
    flushes_ = [e for e in block.equations if e.op == "ap.flush"]
    return sorted(flushes_, key=lambda e: block.outputs.index(e.outputs[e.params["replay"].changed]))


def update_logs(block: Block) -> list[list[Equation]]:
    """Groups the flushes of a block by their update log; families may share one (`passes.share_logs`)."""
    logs: dict[int, list[Equation]] = {}
    for flush in flushes(block):
        logs.setdefault(flush.params.get("log", flush.params["family"]), []).append(flush)
    return list(logs.values())
