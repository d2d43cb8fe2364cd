"""Describes the program of one device (or rank): the *state* of each value, and a rank's segments.

The state says which part of the global value a device has: all of it (`None`), an equal shard along one axis
(`Spread`), or a partial sum (`Partial`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from autopar import jax_compat
from autopar.ir.operations import plain_name
from autopar.ir.program import ArrayType, Block, Equation, Source, Var
from autopar.jax_types import ValueType


@dataclass(frozen=True, slots=True)
class Spread:
    """A shard along `axis`, of equal size on each device."""

    axis: int
    owner: bool = False  #: The shard has the rows that a device owns rather than the examples that it has.
    #: Number B of examples, if the devices don't divide it: each has ceil(B / N), the last ones padded by copies. The
    #: axis has a multiple of B elements, those of an example adjacent. 0: equal shards.
    examples: int = 0
    rank: bool = False  #: The shard has the rows that a rank asked for, equal on all devices of the rank.
    sums: bool = False  #: Each device of a rank has a partial sum of the rank's rows.

    def moved(self, axis: int) -> Spread:
        """Returns the same shard along another axis."""
        return replace(self, axis=axis)

    def size(self, whole: int, devices: int) -> int:
        """Returns how many of `whole` elements along the axis a device has. Raises NotLocal if the devices (or the
        examples) don't divide them."""
        parts = self.examples or devices
        if whole % parts:
            raise NotLocal(f"{parts} {'examples' if self.examples else 'devices'} don't divide {whole}")
        each = whole // parts
        return each * -(-self.examples // devices) if self.examples else each


@dataclass(frozen=True, slots=True)
class Partial:
    """A partial sum: the sum over all devices is the value."""


PARTIAL = Partial()
#: None: all of the value.
State = Spread | Partial | None


class NotLocal(Exception):
    """Raised for an equation that can't run on a part of its operands."""

    def __init__(
        self, reason: str, source: Source | None = None, remedy: str = "", tables: tuple[str, ...] = ()
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.source = source
        self.remedy = remedy
        self.tables = tables  #: Paths of the tables concerned, if any.

    def __str__(self) -> str:
        return f"{self.reason} ({self.source})" if self.source else self.reason


@dataclass(frozen=True, slots=True, eq=False)
class Reduction:
    """A reduction over all devices; `op` is "sum", "max", "min", "and", "or" or "prod"."""

    type: ArrayType
    op: str
    nested: bool  #: It is inside a loop or branch.
    source: Source | None
    in_shards: bool = False  #: Each device gets a shard of the result.

    @property
    def nbytes(self) -> int:
        """Bytes of an AllReduce that sends as much: a reduce-scatter of as many sends half."""
        return sent_bytes(self.type, self.op) >> self.in_shards


def sent_bytes(type_: ValueType, op: str) -> int:
    """Returns the bytes of a device's part of a reduction: sums of 8 and 16 bits are made in float32."""
    if op != "sum" or not isinstance(type_, ArrayType):
        return getattr(type_, "nbytes", 0)
    return type_.size * np.dtype(jax_compat.sum_dtype(type_.dtype)).itemsize


@dataclass(frozen=True, slots=True, eq=False)
class Gathered:
    """A value of the examples that every device has whole, because an equation has no rule for parts of it."""

    nbytes: int  #: Bytes of all shards together, padding of examples included.
    nested: bool  #: It is inside a loop or branch.
    op: str  #: The equation's primitive; "" for a result of the step.
    source: Source | None


@dataclass(frozen=True, slots=True, eq=False)
class LocalFacts:
    """The findings of `localize`."""

    outputs: tuple[State, ...]  #: The state of each of the block's outputs.
    owned: frozenset[Var]  #: Variables that are shards of an owner's rows.
    reductions: tuple[Reduction, ...]
    gathered: tuple[Gathered, ...] = ()  #: Values of the examples that every device has whole.
    examples_meet: NotLocal | None = None  #: Why examples meet before the gradients (batch norm); None if they don't.
    tensor: LocalFacts | None = None  #: The findings of `localize` over the tensor axis, if there is one.
    reduces_by_mpi: bool = False  #: Reductions over ranks run between programs, except for owners' rows.


@dataclass(frozen=True, slots=True)
class OncePerRow:
    """The findings of `once_per_row`."""

    #: (rows, lookups) of the ids by which something is computed once for each distinct row.
    counts: tuple[tuple[int, int], ...]
    share: float  #: The products' operations that are left, as a fraction of those before.

    def __str__(self) -> str:
        counts = ", ".join(f"{rows} rows for {lookups} lookups" for rows, lookups in self.counts)
        return f"{counts}; {self.share:.0%} of the products' operations are left"


@dataclass(frozen=True, slots=True)
class BagSet:
    """Bags of a rank or device of which owners add up rows.

    Their operands are int[bags, ids], which are the ids; bool[bags, ids], which of them count, if `is_masked`; and
    numbers [bags, ids] by which rows are multiplied, if `is_weighted`. Where `is_jagged`, bags have any number of ids:
    all of these are [ids], and behind the first is int[ids], the bag of each id, or the number of bags for none.
    """

    shape: tuple[int, ...]  #: The bags' axes in the sums.
    is_masked: bool
    is_weighted: bool
    is_kept: bool = False  #: There is a bool[bags, ids] of the ids whose rows get a gradient.
    is_jagged: bool = False
    owner: int | None = None  #: The device that has all rows of their table; None: each may have some.


def bags_of_owner(sets: Sequence[BagSet], count: int) -> int:
    """Returns the bags of a device that a message to or from any of `count` owners has room for."""
    return max(sum(math.prod(one.shape) for one in sets if one.owner in (None, owner)) for owner in range(count))


# --- a rank's step cut into segments: compiled programs, and the exchanges of ranks between them ---
#
# A `ProgramSegment` is a straight-line program of one side: the devices' (examples, dense parameters) or the owner's
# (its rows of tables in host memory). An `ExchangeSegment` is the runtime's work between them: a route, rows pulled,
# fetched and delivered, reductions over the ranks, new rows written back. Source: Parallax, section 4.3;
# docs/hosts.md.


Side = Literal["device", "owner"]


@dataclass(frozen=True, slots=True, eq=False)
class ProgramSegment:
    """A program that is compiled by itself."""

    side: Side
    level: int  #: The most exchanges that any of its inputs depends on.
    block: Block
    last: frozenset[Var] = frozenset()  #: Inputs that no later segment reads.

    def __str__(self) -> str:
        return f"{self.side} program of {len(self.block.equations)} equations"


@dataclass(frozen=True, slots=True, eq=False)
class ExchangeSegment:
    """Equations of one kind that are carried out together, between compiled programs."""

    op: str
    level: int
    equations: tuple[Equation, ...]
    #: The gradient bucket: reductions that run beside the programs that follow them. None: these are awaited at once,
    #: as are the buckets before them.
    gradient_bucket: int | None = None

    def __str__(self) -> str:
        beside = "" if self.gradient_bucket is None else ", beside what follows"
        return f"{plain_name(self.op)} ({len(self.equations)}{beside})"


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """A whole step in the order in which it runs."""

    items: tuple[ProgramSegment | ExchangeSegment, ...]

    @property
    def programs(self) -> int:
        return sum(isinstance(item, ProgramSegment) for item in self.items)
