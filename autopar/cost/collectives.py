"""Predicts the time of exchanges in a cluster from latency and bandwidth on two levels of links (docs/planning.md).

Each function returns seconds until all devices have their results. Devices exchange inside a machine, then each between
machines with those of its own number in the others, so that a machine's interfaces are shared by all of its devices. N
= m machines of d devices. A measured collective (`ClusterSpec.measured`) has its own latency and bandwidth, which
`fit_collective` fits to measured times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from autopar.ir.cluster import ClusterSpec, Link
from autopar.ir.figures import format_bytes, wire_bytes

#: Measured AllReduces between ranks: by MPI, and in rings (`autopar.mpi.exchange`).
_OF_RANKS = ("mpi_all_reduce", "ring_all_reduce")
#: Measured time that a sum beside a program adds to the program's.
_BESIDE = "beside_all_reduce"
#: Seconds that cutting a program in two, to begin a sum in between, costs.
_CUT_S = 2e-3
#: Sizes that are compared, as powers of two.
_EXPONENTS = range(12, 31)
#: Memory passes of an addition: two operands are read, one result is written.
_ADDED_PASSES = 3


def traffic(collective: str, count: int, size: float) -> tuple[float, int]:
    """Returns bytes that each participant sends over its link, and the number of messages one after the other.

    `collective`: "all_reduce", "all_gather" or "all_to_all". `count`: participants. `size`: bytes of the sum; that each
    one gives to all; that each one gives to each other one.
    """
    others = count - 1
    if collective == "all_reduce":
        return wire_bytes("all-reduce", count, size), 2 * others
    assert collective in ("all_gather", "all_to_all"), f"no collective is called {collective!r}"
    return others * size, others


def all_reduce_s(cluster: ClusterSpec, size: float, by: str = "all_reduce", copies: int = 1) -> float:
    """Predicts a sum of `size` bytes for every device: scattered inside, summed between machines, gathered inside.

    `by`: the measured collective, "mpi_all_reduce" between ranks. `copies`: number of such sums at once, of other
    devices of the same machines, whose interfaces they share.
    """
    m, d = cluster.machines, cluster.devices
    inside, messages = traffic("all_reduce", d, size)
    part, rounds = traffic("all_reduce", m, size / d)
    between = cluster.link("between", by)(copies * d * part, rounds)
    return cluster.link("inside", by)(inside, messages) + between


def host_all_reduce_s(cluster: ClusterSpec, size: float) -> float:
    """Predicts a sum of `size` bytes for every rank, by MPI or in rings, whichever was measured to be faster.

    With N ranks 2 (N - 1) alpha + 2 (N - 1) / N size beta + (N - 1) / N size gamma (MXNET-MPI, section 6.2): latency,
    seconds of a sent byte, and of an added one. A measured beta includes gamma.
    """
    measured = [by for by in _OF_RANKS if by in cluster.measured]
    if measured:
        return min(all_reduce_s(cluster, size, by) for by in measured)
    gamma = _ADDED_PASSES * cluster.devices / cluster.host_bytes_s
    return all_reduce_s(cluster, size) + (cluster.count - 1) / cluster.count * size * gamma


def rings_from(cluster: ClusterSpec) -> int | None:
    """Returns the bytes from which on ranks were measured to add up faster in rings than by MPI; None: never, or
    unknown."""
    if not all(by in cluster.measured for by in _OF_RANKS):
        return None
    return _least(lambda size: _are_rings_faster(cluster, size))


def bucket_bytes(cluster: ClusterSpec) -> int | None:
    """Returns the bytes from which on a sum was measured to pay beside a program; None: never, or unknown."""
    if _BESIDE not in cluster.measured:
        return None
    return _least(lambda size: host_all_reduce_s(cluster, size) - all_reduce_s(cluster, size, _BESIDE) > _CUT_S)


class Reductions(NamedTuple):
    """The ways in which ranks add up."""

    rings_from: int | None = None  #: Bytes from which on they do so in rings; None: never.
    #: Bytes from which on gradients are added up while others are computed; None: never.
    bucket_bytes: int | None = None


def reductions(cluster: ClusterSpec) -> Reductions:
    return Reductions(rings_from(cluster), bucket_bytes(cluster))


def _least(holds: Callable[[int], bool]) -> int | None:
    exponent = max((k for k in _EXPONENTS if not holds(1 << k)), default=_EXPONENTS[0] - 1) + 1
    return 1 << exponent if exponent in _EXPONENTS else None


def _are_rings_faster(cluster: ClusterSpec, size: int) -> bool:
    by_mpi, in_rings = (all_reduce_s(cluster, size, by) for by in _OF_RANKS)
    return in_rings < by_mpi


def all_gather_s(cluster: ClusterSpec, size: float) -> float:
    """Predicts an exchange of `size` bytes of each device for every device, Parallax's AllGatherv of (N - 1) * size
    received."""
    m, d = cluster.machines, cluster.devices
    part, rounds = traffic("all_gather", m, size)
    inside, messages = traffic("all_gather", d, m * size)
    between = cluster.link("between", "all_gather")(d * part, rounds)
    return between + cluster.link("inside", "all_gather")(inside, messages)


def all_to_all_s(cluster: ClusterSpec, size: float, by: str = "all_to_all") -> float:
    """Predicts an exchange of `size` bytes from each device to each other one. `by`: as for `all_reduce_s`."""
    m, d = cluster.machines, cluster.devices
    part, rounds = traffic("all_to_all", m, d * size)
    between = cluster.link("between", by)(d * part, d * rounds)
    return max(between, cluster.link("inside", by)(*traffic("all_to_all", d, size)))


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted link, and the root mean square of its relative errors."""

    link: Link
    error: float


def fit_link(points: Sequence[tuple[float, float]], messages: float = 1) -> Fit:
    """Fits the best link through (bytes, seconds); its bandwidth is infinite if larger sizes don't take longer.

    `points`: at least two different sizes, with positive times. `messages`: messages one after the other in each of
    them.
    """
    if len({size for size, _ in points}) < 2 or any(seconds <= 0 for _, seconds in points):
        raise ValueError(f"a link is fitted to positive times of two different sizes at least, not to {list(points)}")
    # (alpha + beta * size) / seconds = 1: a * u + b * v = 1 with sums over the points.
    u, v = [1 / seconds for _, seconds in points], [size / seconds for size, seconds in points]
    uu, uv, vv = (math.fsum(a * b for a, b in zip(x, y, strict=True)) for x, y in ((u, u), (u, v), (v, v)))
    su, sv = math.fsum(u), math.fsum(v)
    determinant = uu * vv - uv * uv
    alpha, beta = (su * vv - sv * uv) / determinant, (uu * sv - uv * su) / determinant
    if alpha < 0:
        alpha, beta = 0.0, sv / vv
    elif beta <= 0:
        alpha, beta = su / uu, 0.0
    squares = [(alpha * a + beta * b - 1) ** 2 for a, b in zip(u, v, strict=True)]
    link = Link(alpha / messages, 1 / beta if beta > 0 else math.inf)
    return Fit(link, math.sqrt(math.fsum(squares) / len(points)))


def fit_collective(collective: str, count: int, points: Sequence[tuple[float, float]], sharing: int) -> Link:
    """Fits a collective's link by its `traffic`; `source` has the error. `count`: participants, at least 2. `points`:
    (size as in `traffic`, measured seconds). `sharing`: number of such collectives that share a link."""
    sent = [(sharing * traffic(collective, count, size)[0], seconds) for size, seconds in points]
    fit = fit_link(sent, traffic(collective, count, 1)[1])
    sizes = [size for size, _ in points]
    of = f"{len(points)} sizes from {format_bytes(min(sizes))} to {format_bytes(max(sizes))} among {count}"
    return replace(fit.link, source=f"measured here: {of}; {fit.error:.0%} off (rms)")
