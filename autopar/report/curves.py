"""Curves of the cost model through a plan: what each device sends by each method, and where another sends the least.

Plain numbers, from `cost.exchange` at the sizes that steps of more or fewer devices, or ids, have
(`cost.simulate.sizes_at`). They are steps: the arrays of a compiled step have whole numbers of rows.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autopar.cost import sent_bytes
from autopar.cost.exchange import host_sent_bytes
from autopar.cost.formulas import table_3
from autopar.cost.simulate import host_sizes_at, sizes_at
from autopar.ir.plan import TablePlan
from autopar.ir.sizes import Sizes
from autopar.planning.workload import table_load

#: The most devices of a curve, if the plan hasn't more.
MOST_DEVICES = 10_000
#: A curve of alpha begins with so many times fewer ids than the plan has, and ends where it touches this share of the
#: rows, or looks up so many times the table's rows.
_FEWER_IDS, _MOST_ALPHA, _MOST_IDS = 1000, 0.95, 4
_POINTS = 64


@dataclass(frozen=True, slots=True)
class Crossing:
    """From `at` on (devices, or ids of a device; there the axis shows `x`) the method `new` sends the least: `sent`."""

    at: int
    x: float
    sent: float
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Curves:
    """Bytes that each device sends in a step, by method.

    Attributes:
      path: Of the table.
      x: The share of the rows that a device touches, or the number of devices.
      sent: Method -> bytes at each x.
      crossings: Where the method changes that sends the least.
      own: x of the plan.
      method: The plan's.
      own_sent: What it sends in the plan.
    """

    path: str
    x: tuple[float, ...]
    sent: Mapping[str, tuple[float, ...]]
    crossings: tuple[Crossing, ...]
    own: float
    method: str
    own_sent: float


def by_devices(table: TablePlan) -> Curves:
    """Against N, 2 to 10,000, each device looking up as many ids as in the plan."""
    own = _of(table).devices
    return _curves(table, spaced(2, max(own, MOST_DEVICES)), float, lambda n: sent_at(table, n), own)


def by_alpha(table: TablePlan) -> Curves:
    """Against the share of the rows that a device touches, at the plan's N: it looks up more ids, or fewer."""
    sizes = _of(table)
    last = sizes.ids
    while alpha_at(table, last) < _MOST_ALPHA and last < _MOST_IDS * sizes.extent:
        last = min(2 * last, _MOST_IDS * sizes.extent)
    first = max(1, min(sizes.ids, last) // _FEWER_IDS)
    return _curves(
        table,
        spaced(first, last),
        lambda ids: alpha_at(table, ids),
        lambda ids: sent_at(table, sizes.devices, ids),
        local_alpha(table),
    )


def by_table_3(table: TablePlan) -> tuple[Curves, Mapping[str, tuple[float, ...]]]:
    """`by_devices`, and at the same N what Parallax's table 3 says of the same methods, of a table of as many bytes."""
    ours, sizes = by_devices(table), _of(table)
    formulas = [table_3(b=sizes.extent * sizes.row_bytes, n=round(n), alpha=local_alpha(table)) for n in ours.x]
    return ours, {method: tuple(row[method] for row in formulas) for method in formulas[0]}


def sent_at(table: TablePlan, devices: int, ids: int | None = None) -> Mapping[str, int]:
    """Method -> bytes that each device sends in a step of N devices that look up so many ids each."""
    load, own = table_load(table, ids), _of(table)
    if table.where == "hosts":
        return host_sent_bytes(dataclasses.replace(host_sizes_at(load, devices), spread=own.spread))
    sizes = dataclasses.replace(sizes_at(load, devices), checks=own.checks, spread=own.spread)
    if not own.checks:  # a capacity that no batch exceeds
        capacity = min(sizes.requested, -(-sizes.extent // devices))
        sizes = dataclasses.replace(sizes, capacity=capacity)
    return sent_bytes(sizes)


def alpha_at(table: TablePlan, ids: int) -> float:
    """The share of the rows that a device touches which looks up so many ids."""
    load = table_load(table, ids)
    return load.rows(1) / load.extent


def local_alpha(table: TablePlan) -> float:
    """The share of the rows that a device of the plan touches: the paper's alpha."""
    return alpha_at(table, _of(table).ids) if table.alpha is None else table.alpha.local_share


def least(sent: Mapping[str, float]) -> str:
    """The method that sends the least; of equal ones "ps", as in plans."""
    return min(sent, key=lambda method: (sent[method], method != "ps"))


def crossings(at: Callable[[int], Mapping[str, float]], points: Sequence[int]) -> list[tuple[int, str, str]]:
    """Where the method changes that sends the least: the first number of each, the old method, the new one.

    `at`: number (of devices, of ids) -> what each method sends. `points`: growing numbers, between neighbours of which
    no method is the least only for a while.
    """
    crossings_ = []
    for left, right in itertools.pairwise(points):
        old, last = least(at(left)), least(at(right))
        low = left
        while old != last:
            high = right
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if least(at(middle)) == old else (low, middle)
            new = least(at(high))
            crossings_.append((high, old, new))
            low, old = high, new
    return crossings_


def spaced(first: int, last: int, count: int = _POINTS) -> list[int]:
    """About so many whole numbers from the first to the last, each the same number of times the one before."""
    if first == last:
        return [first]
    return sorted({round(first * (last / first) ** (k / (count - 1))) for k in range(count)})


def _curves(
    table: TablePlan,
    points: Sequence[int],
    axis: Callable[[int], float],
    at: Callable[[int], Mapping[str, float]],
    own: float,
) -> Curves:
    rows = [at(k) for k in points]
    crossings_ = tuple(Crossing(k, axis(k), at(k)[new], old, new) for k, old, new in crossings(at, points))
    sent = {method: tuple(float(row[method]) for row in rows) for method in rows[0]}
    method = table.taken
    return Curves(table.path, tuple(map(axis, points)), sent, crossings_, own, method, own_bytes(table)[method])


def own_bytes(table: TablePlan) -> Mapping[str, int]:
    """Method -> bytes that each device sends in a step of the plan."""
    return (host_sent_bytes if table.where == "hosts" else sent_bytes)(_of(table))


def _of(table: TablePlan) -> Sizes:
    assert table.sizes is not None, "curves are of a table whose sizes are known"
    return table.sizes
