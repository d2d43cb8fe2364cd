"""The part of a value that a device (or a rank) has when it runs its own part of a step.

Three things can be had of a global value: all of it (`None`), an equal shard along one axis (`Spread`), or a partial
sum of it (`Partial`: the value is the sum over all).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.ir.program import ArrayType, Source, Var


@dataclass(frozen=True, slots=True)
class Spread:
    """A shard along an axis, of the same size on each device.

    Attributes:
      axis: The axis.
      owner: Whether of the rows that a device owns, not of the examples that it has.
      examples: Number B of examples, if the devices don't divide it: each has ceil(B / N), the last ones padded by
        copies. The axis has a multiple of B elements, those of an example next to each other. 0: equal shards.
      rank: Whether of the rows that a rank asked for, of which all of its devices have the same.
      sums: Whether of these each of them has a partial sum.
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
    """A partial sum of the value."""


PARTIAL = Partial()
#: None: all of the value.
State = Spread | Partial | None


class NotLocal(Exception):
    """An equation that can't be run on a part of its operands: the reason, where, and what can be done about it.

    Attributes:
      tables: The paths of the tables that it is about, if it is about some.
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
    """A place where something is reduced over all devices.

    Attributes:
      type: Of what is reduced.
      op: "sum", "max", "min", "and", "or" or "prod".
      nested: Whether it stands in a loop or branch.
      source: The user's line.
    """

    type: ArrayType
    op: str
    nested: bool
    source: Source | None


@dataclass(frozen=True, slots=True, eq=False)
class Gathered:
    """A value of the examples that every device has whole, for an equation without a rule for its parts.

    Attributes:
      nbytes: Bytes of all shards together, padding of examples included.
      nested: Whether it stands in a loop or branch.
      op: The equation's primitive; "" for a result of the step.
      source: The user's line.
    """

    nbytes: int
    nested: bool
    op: str
    source: Source | None


@dataclass(frozen=True, slots=True, eq=False)
class LocalFacts:
    """The findings of `localize`.

    Attributes:
      outputs: What each device has of the block's outputs.
      owned: Variables that are shards of an owner's rows.
      reductions: All reductions.
      gathered: What every device has whole of the examples.
      inside: What a device computes on its own examples from a reduced value (as batch norm does), None if nothing.
      tensor: The same over the devices that divide products, if any do.
      between: Whether what is reduced over ranks is reduced between programs, owners' rows apart.
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
    """The work of `once_per_row`.

    Attributes:
      counts: (rows, lookups) of the ids by which something is computed for distinct rows.
      share: Operations of the program's products that are left, of those before.
    """

    counts: tuple[tuple[int, int], ...]
    share: float

    def __str__(self) -> str:
        counts = ", ".join(f"{rows} rows for {lookups} lookups" for rows, lookups in self.counts)
        return f"{counts}; {self.share:.0%} of the products' operations are left"
