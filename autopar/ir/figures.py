"""Figures of a plan: rows that a step touches, bytes of exchanges, and the parts of what it takes.

Plain data; `measure` and `cost` find them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Alpha:
    """Rows touched of `extent`, by `ids` looked-up ids; `measured` on a batch, or an upper bound.

    `local_rows`: of them those that one device touches, on average over the devices.
    """

    rows: int
    extent: int
    ids: int
    measured: bool
    local_rows: float

    @property
    def share(self) -> float:
        """Touched rows over all rows."""
        return self.rows / self.extent

    @property
    def local_share(self) -> float:
        """Rows that one device touches over all rows: the paper's alpha, of one worker."""
        return self.local_rows / self.extent


@dataclass(frozen=True, slots=True)
class RowGrowth:
    """Says how many distinct rows of a table n workers touch together in a step.

    Attributes:
      extent: V, rows of the table.
      ids: Ids that a worker looks up in a step, duplicates included.
      points: What was measured: (n, rows that n workers touched together, on average).
      k, beta: Of Heaps' law.
      residual: The most by which the fit is off at a point, relative to it.
    """

    extent: int
    ids: float
    points: tuple[tuple[float, float], ...]
    k: float
    beta: float
    residual: float

    def rows(self, n: float) -> float:
        """Returns the number of distinct rows that n workers are expected to touch together."""
        drawn = n * self.ids
        return min(drawn, distinct(self.extent, self.k * drawn**self.beta))

    def with_ids(self, ids: float) -> RowGrowth:
        """Returns the same of workers that look up so many ids each."""
        scale = self.ids / ids
        return replace(self, ids=ids, points=tuple((n * scale, rows) for n, rows in self.points))


def distinct(extent: int, endless: float) -> float:
    """Returns the number of distinct rows of V that are hit, if in an endless table `endless` were."""
    return -extent * math.expm1(-endless / extent)


def wire_bytes(collective: str, count: int, size: float) -> float:
    """Returns the bytes that each of `count` devices sends in a collective (rings: Patarasuk and Yuan, 2009; messages
    from each to each).

    Args:
      collective: As XLA calls it: "all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute".
      count: Devices that take part.
      size: Bytes of the result on each device.
    """
    if collective == "collective-permute":
        return size
    rounds = {"all-reduce": 2, "reduce-scatter": count}.get(collective, 1)
    return rounds * (count - 1) * size / count


@dataclass(frozen=True, slots=True)
class Term:
    """One part of what a method takes.

    Attributes:
      name: What it is.
      seconds: How long it takes.
      sent: Bytes that each device sends for it.
      collective: By which collective, as XLA calls it; "" where nothing is sent, or not by XLA.
      fixed: Whether it is what the method costs however little there is to do.
      bound_s: Seconds that it takes by bandwidths alone, of wires or of memory, and by the devices' full rate: nothing
        is faster. None where these aren't known; no file holds it.
    """

    name: str
    seconds: float
    sent: int = 0
    collective: str = ""
    fixed: bool = False
    bound_s: float | None = field(default=None, compare=False, metadata={"saved": False})


@dataclass(frozen=True, slots=True)
class Work:
    """Floating-point operations of a step's products (matrix products and convolutions), and what is reduced.

    Attributes:
      examples: Operations of products with something of the batch in them: the devices share them.
      parameters: Of all others: each device does them all.
      moved_bytes: Bytes of the batch's values that products and elementwise operations read and write, if each product
        reads and writes its operands, and what lies between two products writes each of its results once: some of that
        is fused away, and all of it is shared by the devices.
      sums: Of the sums over examples that are needed on every device (dense gradients, mostly): bytes, and how many
        there are of so many. Sums of a loop's iterations count each. Gradients of lookups aren't among them.
    """

    examples: float = 0.0
    parameters: float = 0.0
    moved_bytes: float = 0.0
    sums: tuple[tuple[int, int], ...] = ()

    @property
    def reduced_bytes(self) -> int:
        """Bytes of all sums over examples."""
        return sum(size * count for size, count in self.sums)

    def on(self, devices: int) -> float:
        """Returns the figures of each of so many devices."""
        return self.examples / devices + self.parameters
