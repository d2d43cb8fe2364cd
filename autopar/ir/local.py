"""Describes which part of a value a device (or rank) holds in its own program.

A device holds all of a global value (`None`), an equal shard along one axis (`Spread`), or a partial sum (`Partial`:
the sum over all devices is the value).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.ir.program import ArrayType, Source, Var


@dataclass(frozen=True, slots=True)
class Spread:
    """A shard along `axis`, of equal size on each device.

    Attributes:
      owner: The shard has the rows that a device owns rather than the examples that it has.
      examples: Number B of examples, if the devices don't divide it: each has ceil(B / N), the last ones padded by
        copies. The axis has a multiple of B elements, those of an example adjacent. 0: equal shards.
      rank: The shard has the rows that a rank asked for, equal on all devices of the rank.
      sums: Each device of a rank has a partial sum of the rank's rows.
    """

    axis: int
    owner: bool = False
    examples: int = 0
    rank: bool = False
    sums: bool = False

    def moved(self, axis: int) -> Spread:
        """Returns the same shard along another axis."""
        return replace(self, axis=axis)

    def size(self, whole: int, devices: int) -> int:
        """Returns how many of `whole` elements along the axis a device has.

        Raises:
          NotLocal: the devices (or the examples) don't divide them.
        """
        parts = self.examples or devices
        if whole % parts:
            raise NotLocal(f"{parts} {'examples' if self.examples else 'devices'} don't divide {whole}")
        each = whole // parts
        return each * -(-self.examples // devices) if self.examples else each


@dataclass(frozen=True, slots=True)
class Partial:
    pass
    pass


PARTIAL = Partial()
#: None: all of the value.
State = Spread | Partial | None


class NotLocal(Exception):
    """Raised for an equation that can't run on a part of its operands.

    Attributes:
      tables: Paths of the tables concerned, if any.
    """

    def __init__(
        self, reason: str, source: Source | None = None, remedy: str = "", tables: tuple[str, ...] = ()
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.source = source
        self.remedy = remedy
        self.tables = tables

    def __str__(self) -> str:
        return f"{self.reason} ({self.source})" if self.source else self.reason


@dataclass(frozen=True, slots=True, eq=False)
class Reduction:
    """A reduction over all devices; `op` is "sum", "max", "min", "and", "or" or "prod".

    Attributes:
      nested: It is inside a loop or branch.
    """

    type: ArrayType
    op: str
    nested: bool
    source: Source | None


@dataclass(frozen=True, slots=True, eq=False)
class Gathered:
    """A value of the examples that every device has whole, because an equation has no rule for parts of it.

    Attributes:
      nbytes: Bytes of all shards together, padding of examples included.
      nested: It is inside a loop or branch.
      op: The equation's primitive; "" for a result of the step.
    """

    nbytes: int
    nested: bool
    op: str
    source: Source | None


@dataclass(frozen=True, slots=True, eq=False)
class LocalFacts:
    """The findings of `localize`.

    Attributes:
      outputs: The part that each device has of each of the block's outputs.
      owned: Variables that are shards of an owner's rows.
      gathered: Values of the examples that every device has whole.
      inside: Why examples meet before the gradients (as in batch norm); None if they don't.
      tensor: The findings of `localize` over the tensor axis, if there is one.
      between: Reductions over ranks run between programs, except for owners' rows.
    """

    outputs: tuple[State, ...]
    owned: frozenset[Var]
    reductions: tuple[Reduction, ...]
    gathered: tuple[Gathered, ...] = ()
    inside: NotLocal | None = None
    tensor: LocalFacts | None = None
    between: bool = False


@dataclass(frozen=True, slots=True)
class OncePerRow:
    """The findings of `once_per_row`.

    Attributes:
      counts: (rows, lookups) of the ids by which something is computed once for each distinct row.
      share: The products' operations that are left, as a fraction of those before.
    """

    counts: tuple[tuple[int, int], ...]
    share: float

    def __str__(self) -> str:
        counts = ", ".join(f"{rows} rows for {lookups} lookups" for rows, lookups in self.counts)
        return f"{counts}; {self.share:.0%} of the products' operations are left"
