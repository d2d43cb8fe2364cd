"""Figures of a plan: rows that a step touches, bytes of exchanges, predicted terms. Plain data."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Alpha:
    """Rows touched of `extent`, by `ids` looked-up ids; `measured` on a batch, or an upper bound.

    `local_rows`: rows that one device touches, averaged over the devices.
    """

    rows: int
    extent: int
    ids: int
    measured: bool
    local_rows: float

    @property
    def share(self) -> float:
        """Fraction of the rows that a step touches."""
        return self.rows / self.extent

    @property
    def local_share(self) -> float:
        """Fraction of the rows that one device touches, the paper's alpha of one worker."""
        return self.local_rows / self.extent


@dataclass(frozen=True, slots=True)
class RowGrowth:
    """The number of distinct rows of a table that n workers touch together in a step."""

    extent: int  #: V, rows of the table.
    ids: float  #: Ids that a worker looks up in a step, duplicates included.
    points: tuple[tuple[float, float], ...]  #: Measured (n, rows that n workers touched together, on average).
    #: Parameters of Heaps' law.
    k: float
    beta: float
    residual: float  #: The largest relative error of the fit at a point.

    def rows(self, n: float) -> float:
        """Returns the expected number of distinct rows that n workers touch together."""
        drawn = n * self.ids
        return min(drawn, distinct(self.extent, self.k * drawn**self.beta))

    def with_ids(self, ids: float) -> RowGrowth:
        """Returns the growth for workers that look up `ids` ids each."""
        scale = self.ids / ids
        return replace(self, ids=ids, points=tuple((n * scale, rows) for n, rows in self.points))


def distinct(extent: int, endless: float) -> float:
    """Returns the distinct rows hit of V, if `endless` were hit in an endless table."""
    return -extent * math.expm1(-endless / extent)


def wire_bytes(collective: str, count: int, size: float) -> float:
    """Returns the bytes that each of `count` devices sends in a collective (rings: Patarasuk and Yuan, 2009).

    Args:
      collective: XLA's name: "all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute".
      count: Devices that take part.
      size: Bytes of the result on each device.
    """
    if collective == "collective-permute":
        return size
    rounds = {"all-reduce": 2, "reduce-scatter": count}.get(collective, 1)
    return rounds * (count - 1) * size / count


@dataclass(frozen=True, slots=True)
class Term:
    """One part of a method's cost."""

    name: str
    seconds: float
    sent: int = 0  #: Bytes that each device sends for it.
    collective: str = ""  #: XLA's name of the collective that sends them; "" if there is none.
    fixed: bool = False  #: The method costs this however little there is to do.
    #: The least seconds, by bandwidths of wires and memory and the devices' full rate, if known; no file holds it.
    bound_s: float | None = field(default=None, compare=False, metadata={"saved": False})


@dataclass(frozen=True, slots=True)
class Work:
    """Floating-point operations of a step's products (matrix products and convolutions), and the sums over examples."""

    examples: float = 0.0  #: Operations of products that depend on the batch, which the devices share.
    parameters: float = 0.0  #: Operations of all others, which each device does.
    #: Bytes of the batch's values that products and elementwise operations read and write, if each product reads and
    #: writes its operands, and what lies between two products writes each result once. Some of that is fused away; the
    #: devices share all of it.
    moved_bytes: float = 0.0
    #: (bytes, number) of sums over examples that every device needs (dense gradients, mostly). Sums of a loop's
    #: iterations count each; gradients of lookups don't count.
    sums: tuple[tuple[int, int], ...] = ()

    @property
    def reduced_bytes(self) -> int:
        """Bytes of all sums over examples."""
        return sum(size * count for size, count in self.sums)

    def on(self, devices: int) -> float:
        """Returns the operations of each of `devices` devices."""
        return self.examples / devices + self.parameters
