"""The tables of a report, and curves through a plan: plain values, which figures draw.

Curves are the bytes that each device sends by each method, and where another sends least: `cost.exchange` at the sizes
of steps with more or fewer devices or ids (`cost.simulate.sizes_at`). They have steps, as arrays of a compiled step
have whole numbers of rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.cost.exchange import least, sent_bytes, table_3
from autopar.cost.model import touched_bytes
from autopar.cost.simulate import host_sizes_at, sizes_at
from autopar.errors import ArgumentsError
from autopar.ir.figures import Sizes
from autopar.ir.plan import Plan, TablePlan
from autopar.jax_types import Json
from autopar.planning.plan import table_load
from autopar.planning.predictions import Prediction
from autopar.planning.simulate import Simulation
from autopar.planning.switch_notes import left_out

#: A row of a table: column -> value.
TableRow = Mapping[str, str | int | float]
#: Times in seconds: label -> (predicted, measured), or (label, predicted, measured).
Measured = Mapping[str, tuple[float, float]] | Iterable[tuple[str, float, float]]
#: The relative error up to which a prediction counts as near.
NEAR = 0.2
#: The most devices of a curve, if the plan hasn't more.
MOST_DEVICES = 10_000
#: A curve of alpha begins with so many times fewer ids than the plan has, and ends where it touches this share of the
#: rows, or looks up so many times the table's rows.
_FEWER_IDS, _MOST_ALPHA, _MOST_IDS = 1000, 0.95, 4
_POINTS = 64


@dataclass(frozen=True, slots=True)
class Timing:
    label: str
    predicted_s: float
    measured_s: float

    @property
    def ratio(self) -> float:
        """The predicted time over the measured one."""
        return self.predicted_s / self.measured_s

    @property
    def near(self) -> bool:
        """Says whether the prediction is within 20% of the measured time."""
        return abs(self.ratio - 1) <= NEAR


def timings(measured: Measured) -> tuple[Timing, ...]:
    """Returns the times that a user gives; raises ArgumentsError if they have another form, or one isn't positive."""
    pairs: Iterable[object] = measured
    if isinstance(measured, Mapping):
        pairs = ((label, *(x if isinstance(x, (tuple, list)) else [x])) for label, x in measured.items())
    return tuple(_timing(tuple(row) if isinstance(row, (tuple, list)) else (row,)) for row in pairs)


def _timing(row: tuple[Json, ...]) -> Timing:
    if len(row) != 3 or not isinstance(row[0], str):
        raise ArgumentsError(f"measured: {row!r} isn't (label, predicted seconds, measured seconds)")
    label, predicted, measured = row
    try:
        timing = Timing(label, float(predicted), float(measured))
    except (TypeError, ValueError):
        timing = Timing(label, math.nan, math.nan)
    if not all(math.isfinite(s) and s > 0 for s in (timing.predicted_s, timing.measured_s)):
        raise ArgumentsError(f"measured: {label!r} has times {predicted!r}, {measured!r}; give seconds, more than 0")
    return timing


def largest(plan: Plan) -> TablePlan | None:
    """Returns the table with the most bytes, among those of known sizes."""
    return max((t for t in plan.families if t.sizes is not None), key=table_bytes, default=None)


def table_bytes(table: TablePlan) -> int:
    """Returns the bytes of all rows of a family's tables; 0 if sizes aren't known."""
    return 0 if table.sizes is None else table.sizes.extent * table.sizes.row_bytes


def parameter_rows(plan: Plan) -> list[TableRow]:
    rows: list[TableRow] = [
        {
            "parameter": t.path,
            "kind": "table",
            "shape": _shape(t.shape),
            "dtype": t.dtype,
            "method": t.taken,
            "ids a step": t.ids,
            "alpha of a step": "" if t.alpha is None else t.alpha.share,
            "alpha of a device": "" if t.alpha is None else t.alpha.local_share,
        }
        for t in plan.tables
    ]
    rows += [
        {
            "parameter": leaf.path,
            "kind": "dense, in shards" if leaf.sharded else "dense",
            "shape": _shape(leaf.shape),
            "dtype": leaf.dtype,
            "method": "ps" if leaf.sharded else "allreduce",
            "ids a step": "",
            "alpha of a step": "",
            "alpha of a device": "",
        }
        for leaf in plan.dense
    ]
    return rows


def switch_rows(plan: Plan) -> list[TableRow]:
    """Returns what optimisations that `optimize=` leaves out cost, by table."""
    return [
        {"parameter": t.path, "left out": name, "cost": cost or "nothing"}
        for t in plan.tables
        for name, cost in left_out(plan, t).items()
    ]


def update_rows(plan: Plan) -> list[TableRow]:
    """Returns bytes that a step's updates read and write, by table from the largest on; other leaves are one row. What
    the step only reads has no update."""
    rows: list[TableRow] = []
    for table in (t for t in plan.families if not t.unchanged):
        size = table.nbytes
        plain = touched_bytes(table_bytes=size, family_bytes=(1 + len(table.slots)) * size)
        share = table.alpha.share if table.lifted and table.alpha is not None else 1.0
        rows.append({"leaves": table.path, "bytes of a plain step": plain, "bytes of this plan": share * plain})
    dense = sum(2 * leaf.nbytes for leaf in plan.dense if not leaf.unchanged)
    rows.append({"leaves": "all others", "bytes of a plain step": dense, "bytes of this plan": dense})
    return sorted(rows, key=lambda row: -float(row["bytes of a plain step"]))


def method_rows(plan: Plan) -> list[TableRow]:
    """Returns what each method would send and take in a step of the plan, by table."""
    rows: list[TableRow] = []
    for table in plan.families:
        if table.sizes is None:
            continue
        formulas = table_3(b=table_bytes(table), n=plan.devices, alpha=local_alpha(table))
        for method, sent in own_bytes(table).items():
            seconds = table.seconds.get(method)
            rows.append(
                {
                    "table": table.path,
                    "method": method,
                    "chosen": "yes" if method == table.taken else "",
                    "bytes a device sends": sent,
                    "bytes by Parallax's table 3": formulas.get(method, ""),
                    "predicted ms": "" if seconds is None else 1e3 * seconds,
                    "at least, ms": 1e3 * table.bounds[method] if method in table.bounds else "",
                }
            )
    return rows


def crossing_rows(curves: Mapping[str, Curves]) -> list[TableRow]:
    """Returns the points where another method begins to send least; `curves`: by the name of their axis."""
    return [
        {"table": c.path, "against": axis, "from": x.x, "least is sent by": x.new, "before": x.old, "bytes": x.sent}
        for axis, c in curves.items()
        for x in c.crossings
    ]


def part_rows(step: Prediction) -> list[TableRow]:
    """Returns all terms of a step by part, with predicted times and lower bounds."""
    return [
        {
            "part": part.name,
            "what": term.name,
            "predicted ms": 1e3 * term.seconds,
            "at least, ms": "" if term.bound_s is None else 1e3 * term.bound_s,
            "bytes a device sends": term.sent,
        }
        for part in step.parts
        if isinstance(part, Prediction)
        for term in part.terms
    ]


def scaling_rows(simulation: Simulation) -> list[TableRow]:
    return [
        {
            "devices": t.devices,
            "predicted ms": 1e3 * t.seconds,
            "at least, ms": 1e3 * t.bound_s,
            "speed-up": speedup,
            "most of it": t.limit,
            "methods": ", ".join(f"{path} {method}" for path, method in t.methods.items()),
        }
        for t, speedup in zip(simulation.times, simulation.speedups, strict=True)
    ]


def timing_rows(timings_: Sequence[Timing]) -> list[TableRow]:
    return [
        {
            "step": t.label,
            "predicted ms": 1e3 * t.predicted_s,
            "measured ms": 1e3 * t.measured_s,
            "predicted / measured": t.ratio,
            "off by 20% at most": "yes" if t.near else "no",
        }
        for t in timings_
    ]


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


@dataclass(frozen=True, slots=True)
class Crossing:
    """A point from which on the method `new` sends least, `sent` bytes: `at` devices, or ids of a device (there the
    axis shows `x`)."""

    at: int
    x: float
    sent: float
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Curves:
    """Bytes that each device sends in a step, by method."""

    path: str
    x: tuple[float, ...]  #: The share of the rows that a device touches, or the number of devices.
    sent: Mapping[str, tuple[float, ...]]  #: Method -> bytes at each x.
    crossings: tuple[Crossing, ...]  #: Points where another method begins to send least.
    #: x, method and bytes of the plan.
    own: float
    method: str
    own_sent: float


def by_devices(table: TablePlan) -> Curves:
    """Returns curves against N, 2 to 10,000, with as many ids on each device as in the plan."""
    own = _of(table).devices
    return _curves(table, spaced(2, max(own, MOST_DEVICES)), float, lambda n: sent_at(table, n), own)


def by_alpha(table: TablePlan) -> Curves:
    """Returns curves against the share of the rows that a device touches, at the plan's N, with more or fewer ids."""
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
    """Returns `by_devices`, and bytes by Parallax's table 3 at the same N for a table of as many bytes."""
    ours, sizes = by_devices(table), _of(table)
    formulas = [table_3(b=sizes.extent * sizes.row_bytes, n=round(n), alpha=local_alpha(table)) for n in ours.x]
    return ours, {method: tuple(row[method] for row in formulas) for method in formulas[0]}


def sent_at(table: TablePlan, devices: int, ids: int | None = None) -> Mapping[str, int]:
    """Returns by method the bytes that each of `devices` devices sends in a step, with `ids` ids each."""
    load, own = table_load(table, ids), _of(table)
    if table.where == "hosts":
        return sent_bytes(replace(host_sizes_at(load, devices), spread=own.spread), "hosts")
    sizes = replace(sizes_at(load, devices), checks=own.checks, spread=own.spread)
    if not own.checks:  # a capacity that no batch exceeds
        capacity = min(sizes.requested, -(-sizes.extent // devices))
        sizes = replace(sizes, capacity=capacity)
    return sent_bytes(sizes)


def alpha_at(table: TablePlan, ids: int) -> float:
    """Returns the share of the rows that a device with so many ids touches."""
    load = table_load(table, ids)
    return load.rows(1) / load.sizes.extent


def local_alpha(table: TablePlan) -> float:
    """Returns the share of the rows that a device of the plan touches: the paper's alpha."""
    return alpha_at(table, _of(table).ids) if table.alpha is None else table.alpha.local_share


def crossings(at: Callable[[int], Mapping[str, float]], points: Sequence[int]) -> list[tuple[int, str, str]]:
    """Returns where another method begins to send least: the first number, the old method, the new one.

    `at`: number (of devices, of ids) -> bytes by method. `points`: ascending numbers; between neighbours no method
    sends least only for a while.
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
    """Returns about `count` whole numbers from the first to the last in geometric progression."""
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
    """Returns by method the bytes that each device sends in a step of the plan."""
    return sent_bytes(_of(table), table.where)


def _of(table: TablePlan) -> Sizes:
    assert table.sizes is not None, "curves are of a table whose sizes are known"
    return table.sizes
