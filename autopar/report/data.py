"""The tables of a report: rows of plain values, by column."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.cost.formulas import table_3
from autopar.cost.model import touched_bytes
from autopar.errors import ArgumentsError
from autopar.ir.plan import Plan, TablePlan
from autopar.planning import workload
from autopar.planning.simulate import Simulation
from autopar.report.curves import Curves, local_alpha, own_bytes

#: A row of a table: column -> value.
TableRow = Mapping[str, str | int | float]
#: What was measured: label -> (predicted, measured), or (label, predicted, measured); in seconds.
Measured = Mapping[str, tuple[float, float]] | Iterable[tuple[str, float, float]]
#: How far a prediction may be off to be counted as near.
NEAR = 0.2


@dataclass(frozen=True, slots=True)
class Timing:
    """A step's time, predicted and measured."""

    label: str
    predicted_s: float
    measured_s: float

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted_s / self.measured_s

    @property
    def near(self) -> bool:
        """Whether the prediction is off by 20% of what was measured at most."""
        return abs(self.ratio - 1) <= NEAR


def timings(measured: Measured) -> tuple[Timing, ...]:
    """What a user gives; an ArgumentsError if it has another form, or a time that is no positive number."""
    pairs: Iterable[Any] = measured
    if isinstance(measured, Mapping):
        pairs = ((label, *(x if isinstance(x, (tuple, list)) else [x])) for label, x in measured.items())
    return tuple(_timing(tuple(row) if isinstance(row, (tuple, list)) else (row,)) for row in pairs)


def _timing(row: tuple[Any, ...]) -> Timing:
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
    """Of the tables whose sizes are known the one with the most bytes; None where there is none."""
    return max((t for t in plan.families if t.sizes is not None), key=table_bytes, default=None)


def table_bytes(table: TablePlan) -> int:
    """Of all its rows; of the family's tables together. 0 where its sizes aren't known."""
    return 0 if table.sizes is None else table.sizes.extent * table.sizes.row_bytes


def parameter_rows(plan: Plan) -> list[TableRow]:
    """The state, by parameter."""
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


def update_rows(plan: Plan) -> list[TableRow]:
    """Returns what a step's updates read and write: by table, the largest first, and of all other leaves together."""
    rows: list[TableRow] = []
    for table in plan.families:
        size = workload.table_bytes(table)
        plain = touched_bytes(table_bytes=size, family_bytes=(1 + len(table.slots)) * size)
        share = table.alpha.share if table.lifted and table.alpha is not None else 1.0
        rows.append({"leaves": table.path, "bytes of a plain step": plain, "bytes of this plan": share * plain})
    dense = sum(2 * leaf.nbytes for leaf in plan.dense)
    rows.append({"leaves": "all others", "bytes of a plain step": dense, "bytes of this plan": dense})
    return sorted(rows, key=lambda row: -float(row["bytes of a plain step"]))


def method_rows(plan: Plan) -> list[TableRow]:
    """What each method would send and take in a step of the plan, by table."""
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
                }
            )
    return rows


def crossing_rows(curves: Mapping[str, Curves]) -> list[TableRow]:
    """Where another method sends the least; `curves` by what they are drawn against."""
    return [
        {"table": c.path, "against": axis, "from": x.x, "least is sent by": x.new, "before": x.old, "bytes": x.sent}
        for axis, c in curves.items()
        for x in c.crossings
    ]


def part_rows(plan: Plan) -> list[TableRow]:
    """All that a step does, by part, as predicted."""
    return [
        {"part": part, "what": t.name, "predicted ms": 1e3 * t.seconds, "bytes a device sends": t.sent}
        for part, terms in plan.parts.items()
        for t in terms
    ]


def scaling_rows(simulation: Simulation) -> list[TableRow]:
    """Steps by number of devices."""
    return [
        {
            "devices": t.devices,
            "predicted ms": 1e3 * t.seconds,
            "speed-up": speedup,
            "most of it": t.limit,
            "methods": ", ".join(f"{path} {method}" for path, method in t.methods.items()),
        }
        for t, speedup in zip(simulation.times, simulation.speedups, strict=True)
    ]


def timing_rows(timings_: Sequence[Timing]) -> list[TableRow]:
    """Predicted and measured times."""
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
