"""What exchanges cost, where tests are not to measure it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from autopar.cost.rates import Curve, Rates, RowRate
from autopar.measure.figures import rates_of_figures

_FILE = Path(__file__).with_name("two_cores.json")

#: Of two cores, rounded: what tests choose doesn't depend on how busy the machine is.
RATES = Rates(
    all_to_all=Curve(((1e3, 6e-5), (1.3e5, 3e-4), (4.2e6, 5e-3))),
    all_gather=Curve(((1e3, 4e-5), (1.3e5, 1e-4), (4.2e6, 2e-3))),
    all_reduce=Curve(((1e3, 5e-5), (1.3e5, 2e-4), (4.2e6, 4e-3))),
    route=Curve(((256, 3e-5), (8192, 1.5e-3))),
    walk=Curve(((6.5e4, 3e-6), (1e6, 8e-5), (1.7e7, 1.6e-3))),
    gather=RowRate(1e-7, 5e-10),
    scatter=RowRate(3e-8, 6e-10),
    fixed={"ps": 6e-4, "allgather": 0.0, "allreduce_rows": 1e-4, "allreduce": 2e-4},
)


def rates(**seconds: float) -> Rates:
    """A second for each byte, row or id, by part; what isn't named costs nothing."""

    def curve(name: str) -> Curve:
        return Curve(((0.0, 0.0), (1.0, seconds.get(name, 0.0))))

    def rows(name: str) -> RowRate:
        return RowRate(seconds.get(name + "_row", 0.0), seconds.get(name, 0.0))

    curves = {name: curve(name) for name in ("all_to_all", "all_gather", "all_reduce", "route", "walk")}
    fixed = {"ps": seconds.get("ps", 0.0)}
    return Rates(**curves, gather=rows("gather"), scatter=rows("scatter"), fixed=fixed)  # type: ignore[arg-type]


def calibrated() -> Rates:
    """Of two cores with 4 devices, as `python -m autopar calibrate` keeps them."""
    return rates_of_figures(json.loads(_FILE.read_text()), RATES)


def slower(times: float) -> Rates:
    """Of a machine on which all takes so many times as long as on `RATES`'."""
    curves = {
        name: Curve(tuple((at, times * s) for at, s in getattr(RATES, name).points))
        for name in ("all_to_all", "all_gather", "all_reduce", "route", "walk")
    }
    rows = {
        name: RowRate(*(times * s for s in dataclasses.astuple(getattr(RATES, name)))) for name in ("gather", "scatter")
    }
    fixed = {method: times * s for method, s in RATES.fixed.items()}
    return dataclasses.replace(RATES, **curves, **rows, fixed=fixed)
