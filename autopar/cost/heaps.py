"""Models the growth of rows: how many distinct rows n workers touch together, from what a few of them touch.

Heaps' law (Heaps, "Information Retrieval", 1978, 7.5): m words of a text hold about k m^beta distinct ones. It has no
end, but a table has V rows. So H is the number of distinct rows in an endless table, and of V rows there are

    rows = V (1 - exp(-H / V)),  H = k m^beta,  m = n * ids of a worker

which is Heaps' law while few rows are touched, never exceeds V, and is exact for uniformly drawn ids (beta is 1).
Fitted to 1, 2, 4 and 8 workers it is 1% below to 9% above what 48 touch; Heaps' law cut off at V is up to 47% above
(ids by Zipf's law, exponents 0 to 1.5, V of 10^3 to 10^6, workers of 64 to 20,000 ids).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autopar.ir.figures import RowGrowth

#: Fewest untouched rows in the fit, whose logarithm must exist.
_LEFT = 0.5


def fit_growth(extent: int, ids: float, points: Sequence[tuple[float, float]]) -> RowGrowth:
    """Fits the growth through points (n, rows that n workers touch together), by least squares in log space.

    Args:
      extent: V, rows of the table.
      ids: Ids of a worker.
      points: At least two, of different n.

    >>> round(fit_growth(1000, 10, [(1, 9.955), (2, 19.811)]).rows(100))
    632
    """
    if len({n for n, _ in points}) < 2:
        raise ValueError(f"growth is fitted to two numbers of workers at least, not to {list(points)}")
    if any(n <= 0 or not 0 <= rows <= extent for n, rows in points):
        raise ValueError(f"workers are positive and touch 0 to {extent} rows, not {list(points)}")
    kept = tuple((n, float(rows)) for n, rows in points)
    touched = [(n, rows) for n, rows in kept if rows]  # 0 (padding alone) has no logarithm
    if not touched:
        return RowGrowth(extent, ids, kept, 0.0, 1.0, 0.0)
    drawn = [math.log(n * ids) for n, _ in touched]
    endless = [math.log(_endless(extent, rows)) for _, rows in touched]
    beta, log_k = np.polyfit(drawn, endless, 1) if len(touched) > 1 else (1.0, endless[0] - drawn[0])
    growth = RowGrowth(extent, ids, kept, math.exp(log_k), float(beta), 0.0)
    return replace(growth, residual=max(abs(growth.rows(n) / rows - 1) for n, rows in touched))


def _endless(extent: int, rows: float) -> float:
    return -extent * math.log1p(-min(rows, extent - _LEFT) / extent)
