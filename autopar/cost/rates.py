"""How long the parts of an exchange take on some devices: measured curves, as plain data.

All figures are of all devices at work at once (`measure.calibrate` takes them so): what they share, memory, cores or a
link, is in them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by size, through measured points: linear between them, and beyond the last one."""

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        if not sizes or sizes != sorted(set(sizes)):
            raise ValueError(f"a curve goes through points of growing sizes, not {sizes}")

    def __call__(self, size: float) -> float:
        """Seconds for a size; the first point's for what is smaller."""
        points = self.points
        if size <= points[0][0] or len(points) == 1:
            return points[0][1]
        right = next((k for k, (s, _) in enumerate(points) if s >= size), len(points) - 1)
        (a, low), (b, high) = points[right - 1], points[right]
        slope = (high - low) / (b - a)
        if size > b:
            return high + max(0.0, slope) * (size - b)
        return low + slope * (size - a)


#: What needs no exchange.
FREE = Curve(((0.0, 0.0),))


@dataclass(frozen=True, slots=True)
class RowRate:
    """Seconds for a row, and for each of its bytes, of a gather or scatter of rows."""

    row_s: float
    byte_s: float

    def __call__(self, rows: float, row_bytes: float) -> float:
        return rows * (self.row_s + self.byte_s * row_bytes)


@dataclass(frozen=True, slots=True)
class Rates:
    """What calibration finds.

    Attributes:
      all_to_all, all_gather, all_reduce: Seconds by bytes of the result on one device.
      route: Seconds by number of ids, to make them unique and to find each among the unique ones.
      walk: Seconds by bytes read and written by an elementwise pass.
      gather, scatter: Of rows; a scatter adds.
      update: Seconds by bytes read and written by an optimizer's update; None: no more than any elementwise pass.
      fixed: Method -> seconds of a step that it takes longer than the quickest method, however little there is to do.
      call_s: Seconds of the quickest method's step where there is next to nothing to do.
      dense: Seconds that one more dense parameter costs a step, by its bytes: the sum of its gradient, clipping, the
        update of it and of one slot. Measured in whole steps, in which nothing waits in a cache; None: what follows
        from `all_reduce` and `update`.
      flop_s: Seconds of a floating-point operation in large matrix products.
      moved_byte_s: Seconds of a byte of the batch's values that a model reads or writes beside its products, in whole
        steps; 0: as in `walk`.
      assumed: Names of those above that there was no time to measure, and that are assumed.
    """

    all_to_all: Curve
    all_gather: Curve
    all_reduce: Curve
    route: Curve
    walk: Curve
    gather: RowRate
    scatter: RowRate
    fixed: Mapping[str, float]
    call_s: float = 0.0
    update: Curve | None = None
    dense: Curve | None = None
    flop_s: float = 0.0
    moved_byte_s: float = 0.0
    assumed: tuple[str, ...] = ()

    def update_s(self, size: float) -> float:
        """Seconds of an optimizer's update that reads and writes so many bytes."""
        return (self.walk if self.update is None else self.update)(size)

    def moved_s(self, size: float) -> float:
        """Seconds of a model's values of the batch, so many bytes of them."""
        return size * self.moved_byte_s or self.walk(size)


@dataclass(frozen=True, slots=True)
class StageRates:
    """What the programs of a pipeline's stages take, each on a device of its own.

    Attributes:
      flop_s: Seconds of a floating-point operation in large matrix products.
      byte_s: Seconds of a byte that a program reads or writes beside its products.
      call_s: Seconds of a program that has next to nothing to do, and of putting on its device what it was sent.
      send_byte_s: Seconds of a byte from a device to another.
    """

    flop_s: float
    byte_s: float
    call_s: float
    send_byte_s: float

    def seconds(self, flops: float, moved_bytes: float) -> float:
        """Of a program."""
        return self.call_s + flops * self.flop_s + moved_bytes * self.byte_s

    def scaled(self, factor: float) -> StageRates:
        """Of devices that take so many times as long for the same work."""
        return replace(self, flop_s=factor * self.flop_s, byte_s=factor * self.byte_s)


#: Where nothing is measured: in floating-point operations.
NOMINAL = StageRates(flop_s=1.0, byte_s=2.0, call_s=0.0, send_byte_s=8.0)

#: Of devices that take no time for anything.
NO_TIME = Rates(FREE, FREE, FREE, FREE, FREE, RowRate(0.0, 0.0), RowRate(0.0, 0.0), {})


@dataclass(frozen=True, slots=True)
class HostRates:
    """What a step with tables on hosts takes there, of all ranks at work at once.

    Attributes:
      host: Of a rank's share of its host, and of MPI between ranks.
      copy: Seconds by bytes between a rank's device and its host's memory, one way.
    """

    host: Rates
    copy: Curve


#: Of hosts that take no time for anything.
NO_HOST_TIME = HostRates(NO_TIME, FREE)
