"""Turns measured figures into rates of devices; figures that weren't measured are assumed of similar devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.cost.rates import Curve, Rates, RowRate
from autopar.ir.strategy import METHODS
from autopar.jax_types import Leaf
from autopar.measure.loops import undisturbed

#: Figure -> where it was measured (bytes, ids, a method) -> seconds; the content of a file.
Figures = dict[str, dict[str, float]]

#: Number of gathered or scattered rows; side of the multiplied matrices.
ROWS, SIDE = 1024, 512
#: Bytes of the dense parameters that are added to a whole step.
DENSE = tuple(4 * side**2 for side in (1, 64, 256, 1024))
#: The method of the step that others are compared with.
BASE = "allreduce"

#: Names, for people, of the figures by which methods are compared.
NAMES = {
    "all_to_all": "AllToAll",
    "all_gather": "AllGather",
    "all_reduce": "AllReduce",
    "route": "making ids unique",
    "walk": "passes over memory",
    "gather": "looking rows up",
    "scatter": "adding to rows",
    "update": "updates",
    "fixed": "what each method's call takes",
}
_CURVES = ("all_to_all", "all_gather", "all_reduce", "route", "walk")
_ROW_RATES = ("gather", "scatter")


def rates_of_figures(figures: Figures, assumed: Rates) -> Rates:
    """Returns rates by measured figures, and by `assumed` ones for the rest.

    A figure measured at one size scales the assumed curve. `Rates.assumed` names figures measured at fewer than two
    sizes, or not of all methods.
    """
    points = {name: _by_size(figures, name) for name in (*_CURVES, *_ROW_RATES, "update")}
    found: dict[str, Leaf] = {name: _curve(points[name], getattr(assumed, name)) for name in _CURVES}
    found |= {name: _row_rate(points[name], getattr(assumed, name)) for name in _ROW_RATES}
    found["update"] = _curve(points["update"], found["walk"]) if points["update"] else None
    missing = [name for name, measured in points.items() if len(measured) < 2]

    base, more = figures.get("call", {}).get(BASE, 0.0), {BASE: 0.0, **figures.get("more", {})}
    least = min(more.values())
    if base and set(more) == {m for m in METHODS if m != "auto"}:
        found |= {"fixed": {m: s - least for m, s in more.items()}, "call_s": max(0.0, base + least)}
    else:
        found |= {"fixed": {}, "call_s": base}
        missing.append("fixed")
    dense = sorted(_by_size(figures, "dense").items())
    if len(dense) == len(DENSE):
        found["dense"] = Curve(tuple((size, max(s for _, s in dense[: k + 1])) for k, (size, _) in enumerate(dense)))
    else:
        missing.append("dense")
    for name, figure, operations in (("flop_s", "product", 2 * SIDE**3), ("moved_byte_s", "moved_byte", 1)):
        if figure in figures:
            (seconds,) = figures[figure].values()
            found[name] = seconds / operations
        else:
            missing.append(name)
    return replace(assumed, **found, assumed=tuple(missing))


def assumed_note(rates: Rates) -> str:
    """Names the assumed figures by which methods are compared; "" if all were measured."""
    names = [NAMES[name] for name in rates.assumed if name in NAMES]
    if not names:
        return ""
    return (
        f"Assumed, as of devices like these, for want of time to measure: {', '.join(names)}. The next process goes on "
        "measuring; python -m autopar calibrate measures all at once."
    )


def _by_size(figures: Figures, name: str) -> dict[float, float]:
    return {float(at): seconds for at, seconds in figures.get(name, {}).items()}


def _curve(measured: Mapping[float, float], assumed: Curve) -> Curve:
    if not measured:
        return assumed
    if len(measured) == 1:
        ((size, seconds),) = measured.items()
        return Curve(tuple((at, s * seconds / assumed(size)) for at, s in assumed.points))
    return Curve(tuple(undisturbed(sorted(measured.items()))))


def _row_rate(measured: Mapping[float, float], assumed: RowRate) -> RowRate:
    """Fits the rate of rows to the times of `ROWS` rows of two widths in bytes."""
    if not measured:
        return assumed
    (narrow, first), *others = sorted((width, s / ROWS) for width, s in measured.items())
    if not others:
        longer = first / assumed(1, narrow)
        return RowRate(assumed.row_s * longer, assumed.byte_s * longer)
    ((wide, last),) = others
    per_byte = max(0.0, (last - first) / (wide - narrow))
    return RowRate(max(0.0, first - per_byte * narrow), per_byte)
