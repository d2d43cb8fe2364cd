"""Rates of devices for the parts of a step: measured curves, or those that follow from a cluster's figures.

Measured figures are of all devices at work at once (`measure.calibrate`), so they include the cost of sharing memory,
cores or a link.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from autopar.cost.collectives import all_gather_s, all_reduce_s, all_to_all_s, host_all_reduce_s
from autopar.ir.cluster import ClusterSpec
from autopar.ir.program import Atom, Program

_LARGE = float(1 << 30)
#: Sizes of a curve whose fastest algorithm depends on the size.
_SIZES = tuple(1 << k for k in range(0, 31, 2))
#: Passes over its ids in which a device sorts and finds them (a radix sort, assumed).
_SORT_PASSES = 16
#: Fraction of the peak flops that a model's products reach, assumed (training of large models reaches 0.3 to 0.6).
EFFICIENCY = 0.5
#: Bytes that a gather or scatter of a row moves beyond the row itself: parts of cache lines, and the row's number.
_ROW_OVERHEAD = 64


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by size, linear between measured points and beyond the last one."""

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        if not sizes or sizes != sorted(set(sizes)):
            raise ValueError(f"a curve goes through points of growing sizes, not {sizes}")

    def __call__(self, size: float) -> float:
        """Returns the seconds for a size; the first point's for smaller ones."""
        points = self.points
        if size <= points[0][0] or len(points) == 1:
            return points[0][1]
        right = next((k for k, (s, _) in enumerate(points) if s >= size), len(points) - 1)
        (a, low), (b, high) = points[right - 1], points[right]
        slope = (high - low) / (b - a)
        if size > b:
            return high + max(0.0, slope) * (size - b)
        return low + slope * (size - a)

    def shared(self, count: int) -> Curve:
        """Returns one's share of the seconds, by its size, where `count` of a size go together."""
        return Curve(tuple((size / count, seconds / count) for size, seconds in self.points))

    @property
    def bound(self) -> Curve:
        """The time by bandwidth alone, the best that the curve has; it begins at 0 and is nowhere above the curve."""
        last, seconds = self.points[-1]
        if not last:
            return self
        best = min(s / size for size, s in self.points if size)
        beyond = min(best, (self(2 * last) - seconds) / last)
        return Curve(((0.0, 0.0), (last, best * last), (2 * last, (best + beyond) * last)))


#: Takes no time at any size.
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
    """The findings of calibration."""

    #: Seconds by bytes of the result on one device.
    all_to_all: Curve
    all_gather: Curve
    all_reduce: Curve
    route: Curve  #: Seconds by number of ids, to make them unique and to find each among the unique ones.
    walk: Curve  #: Seconds by bytes read and written by an elementwise pass.
    #: Seconds by rows and bytes of a row; a scatter adds.
    gather: RowRate
    scatter: RowRate
    #: Method -> seconds by which its step exceeds the quickest method's, however little there is to do.
    fixed: Mapping[str, float]
    call_s: float = 0.0  #: Seconds of the quickest method's step with next to nothing to do.
    update: Curve | None = None  #: Seconds by bytes read and written by an optimizer's update; None: as `walk`.
    #: Seconds that one more dense parameter adds to a step, by its bytes: the sum of its gradient, clipping, the update
    #: of it and of one slot. Measured in whole steps, in which nothing waits in a cache; None: it follows from
    #: `all_reduce` and `update`.
    dense: Curve | None = None
    joins_sums: bool = False  #: Small sums over examples share a message.
    flop_s: float = 0.0  #: Seconds of a floating-point operation in large matrix products.
    #: Seconds of a byte of the batch's values that a model reads or writes beside its products, in whole steps; 0: as
    #: in `walk`.
    moved_byte_s: float = 0.0
    #: Names of the figures above that are assumed, since there was no time to measure them.
    assumed: tuple[str, ...] = ()

    def update_s(self, size: float) -> float:
        """Returns seconds of an optimizer's update that reads and writes `size` bytes."""
        return (self.walk if self.update is None else self.update)(size)

    def moved_s(self, size: float) -> float:
        """Returns seconds for `size` bytes of a model's values of the batch."""
        return size * self.moved_byte_s or self.walk(size)

    def shared(self, count: int) -> Rates:
        """Returns the rates of one of `count` tables that are exchanged and updated as one."""
        curves = {f.name: each.shared(count) for f in fields(self) if isinstance(each := getattr(self, f.name), Curve)}
        return replace(self, **curves)

    @property
    def shares_cores(self) -> bool:
        """The devices may share cores; only measured ones do, not a described cluster's."""
        return bool(self.fixed)

    @property
    def bound(self) -> Rates:
        """Rates by bandwidths and the flop rate alone, without latencies or costs of calls and single rows."""
        return Rates(
            all_to_all=self.all_to_all.bound,
            all_gather=self.all_gather.bound,
            all_reduce=self.all_reduce.bound,
            route=self.route.bound,
            walk=self.walk.bound,
            gather=replace(self.gather, row_s=0.0),
            scatter=replace(self.scatter, row_s=0.0),
            fixed={},
            flop_s=self.flop_s,
        )


@dataclass(frozen=True, slots=True)
class StageRates:
    """Rates of the programs of a pipeline's stages, each on a device of its own."""

    flop_s: float  #: Seconds of a floating-point operation in large matrix products.
    byte_s: float  #: Seconds of a byte that a program reads or writes beside its products.
    call_s: float  #: Seconds of a program with next to nothing to do, and of putting its inputs on its device.
    send_byte_s: float  #: Seconds of a byte from a device to another.

    def seconds(self, flops: float, moved_bytes: float) -> float:
        return self.call_s + flops * self.flop_s + moved_bytes * self.byte_s

    def scaled(self, factor: float) -> StageRates:
        """Returns the rates of devices that take `factor` times as long for the same work."""
        return replace(self, flop_s=factor * self.flop_s, byte_s=factor * self.byte_s)


#: Relative rates, in floating-point operations, where nothing is measured.
NOMINAL = StageRates(flop_s=1.0, byte_s=2.0, call_s=0.0, send_byte_s=8.0)

#: Rates of devices that take no time.
NO_TIME = Rates(FREE, FREE, FREE, FREE, FREE, RowRate(0.0, 0.0), RowRate(0.0, 0.0), {})


@dataclass(frozen=True, slots=True)
class HostRates:
    """Rates of a step with tables on hosts, of all ranks at work at once."""

    host: Rates  #: Rates of a rank's share of its host, and of MPI between ranks.
    copy: Curve  #: Seconds by bytes between a rank's device and its host's memory, one way.
    #: Seconds by the bytes of all ranks, for one rank to get them, or to send each its own.
    to_first: Curve = FREE

    @property
    def bound(self) -> HostRates:
        """Rates by bandwidths alone."""
        return HostRates(self.host.bound, self.copy.bound, self.to_first.bound)


#: Rates of hosts that take no time.
NO_HOST_TIME = HostRates(NO_TIME, FREE)


def planned_rates(cluster: ClusterSpec) -> Rates:
    n = cluster.count
    return Rates(
        all_to_all=_line(lambda size: all_to_all_s(cluster, size / n)),
        all_gather=_line(lambda size: all_gather_s(cluster, size / n)),
        all_reduce=_line(lambda size: all_reduce_s(cluster, size)),
        flop_s=1 / (EFFICIENCY * cluster.device.flops_s),
        **_in_memory(cluster.device.memory_bytes_s),
    )


def bound_rates(cluster: ClusterSpec) -> Rates:
    """Returns the fastest possible rates, by bandwidths and the devices' peak flops; ids are read and written once."""
    route = _line(lambda ids: 2 * 4 * ids / cluster.device.memory_bytes_s)
    return replace(planned_rates(cluster).bound, flop_s=1 / cluster.device.flops_s, route=route.bound)


def planned_stage_rates(cluster: ClusterSpec) -> StageRates:
    """Returns rates of the programs of stages, or of divided products; sends go between machines if there are
    several."""
    link = cluster.between if cluster.machines > 1 else cluster.inside
    return StageRates(
        flop_s=1 / (EFFICIENCY * cluster.device.flops_s),
        byte_s=1 / cluster.device.memory_bytes_s,
        call_s=link.latency_s,
        send_byte_s=1 / link.bytes_s,
    )


def planned_host_rates(cluster: ClusterSpec) -> HostRates:
    """Returns rates of the ranks' hosts, a rank for each device; the ranks of a machine share its memory.

    Messages inside a machine go through its memory, written and read once.
    """
    n, each = cluster.count, cluster.host_bytes_s / cluster.devices
    link = cluster.inside
    ranks = replace(cluster, inside=replace(link, bytes_s=min(link.bytes_s, each / 2)))
    host = Rates(
        all_to_all=_line(lambda size: all_to_all_s(ranks, size / n, "mpi_all_to_all")),
        all_gather=FREE,  # nothing of a table on hosts is gathered
        all_reduce=Curve(tuple((float(size), host_all_reduce_s(ranks, size)) for size in _SIZES)),
        **_in_memory(each),
    )
    far, near = (n - cluster.devices) / n, (cluster.devices - 1) / n
    to_first = _line(lambda size: max(cluster.between(far * size) if far else 0.0, ranks.inside(near * size)))
    return HostRates(host, _line(cluster.to_host), to_first)


def _line(seconds: Callable[[float], float]) -> Curve:
    return Curve(((1.0, seconds(1.0)), (_LARGE, seconds(_LARGE))))


def _in_memory(bytes_s: float) -> Any:
    return {
        "route": _line(lambda ids: _SORT_PASSES * 2 * 4 * ids / bytes_s),
        "walk": _line(lambda size: size / bytes_s),
        "gather": RowRate(2 * _ROW_OVERHEAD / bytes_s, 2 / bytes_s),
        "scatter": RowRate(3 * _ROW_OVERHEAD / bytes_s, 3 / bytes_s),
        "fixed": {},
    }


@dataclass(frozen=True, slots=True, eq=False)
class Measurements:
    """Measurements of the devices and of an example batch."""

    #: Rates of exchanges and updates; None: the method that sends the fewest bytes is chosen.
    rates: Rates | None = None
    memory: int | None = None  #: Bytes of memory of each device; None: no limit.
    #: Family -> the flat ids that the example batch looks up, int32, the number of rows for "no row"; without an entry
    #: if they are unknown.
    ids: Mapping[int, Sequence[np.ndarray]] = field(default_factory=dict)
    #: Rates of programs and sends for a pipeline, or for divided products; None: not measured.
    stages: StageRates | None = None
    #: Computes a value of a program of the step for the example batch; None if it can't be computed.
    value: Callable[[Program, Atom], np.ndarray | None] = lambda program, atom: None


UNMEASURED = Measurements()
