"""Latency and bandwidth of a link from measured times: alpha and beta of seconds = alpha + beta * bytes.

Least squares of the relative errors, so that small messages count as much as large ones: those tell the latency.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.cost.collectives import traffic
from autopar.cost.units import format_bytes
from autopar.ir.cluster import Link


@dataclass(frozen=True, slots=True)
class Fit:
    """A link, and how well it explains what was measured: the root mean square of the relative errors."""

    link: Link
    error: float


def fit_link(points: Sequence[tuple[float, float]], messages: float = 1) -> Fit:
    """The link that explains some times best; its bandwidth is infinite where larger sizes don't take longer.

    Args:
      points: (bytes, seconds); of two different sizes at least, and positive times.
      messages: Messages one after the other in each of them.
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


def fit_collective(collective: str, count: int, points: Sequence[tuple[float, float]], sharing: int = 1) -> Link:
    """The link that a collective has, by the traffic that `cost.collectives` says it makes; `source` has the error.

    Args:
      count: Participants, at least 2.
      points: (size as in `traffic`, measured seconds).
      sharing: How many such collectives share a link.
    """
    sent = [(sharing * traffic(collective, count, size)[0], seconds) for size, seconds in points]
    fit = fit_link(sent, traffic(collective, count, 1)[1])
    sizes = [size for size, _ in points]
    of = f"{len(points)} sizes from {format_bytes(min(sizes))} to {format_bytes(max(sizes))} among {count}"
    return replace(fit.link, source=f"measured here: {of}; {fit.error:.0%} off (rms)")
