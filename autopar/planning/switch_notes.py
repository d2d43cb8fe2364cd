"""Notes of `explain` on optimisations that `optimize=` leaves out: what each would do for this step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from autopar.ir.optimizations import OPTIMIZATIONS
from autopar.jax_types import Leaf
from autopar.passes.place_border import Moved
from autopar.planning.plan import once_per_row_of
from autopar.planning.prefetch_notes import prefetches
from autopar.run.planned_step import PlannedStep

#: Returns what an optimisation would do in a step that is planned with it, given flat arguments; [] for nothing.
_Stake = Callable[[PlannedStep, Sequence[Leaf] | None], Sequence[str]]


def switch_notes(planned: PlannedStep, leaves: Sequence[Leaf] | None) -> Iterator[str]:
    """Yields a line for each optimisation that `optimize=` leaves out; `leaves`: flat arguments of a call."""
    options = planned.options
    with_all = replace(planned, way=planned.way.by(replace(options, optimize="all")))
    for name in OPTIMIZATIONS:
        if not options.optimizes(name):
            stakes = "; ".join(_STAKES[name](with_all, leaves))
            yield f"optimize= leaves out {name!r}: {f'with it {stakes}' if stakes else 'nothing is at stake here'}."


def _border(planned: PlannedStep, leaves: Sequence[Leaf] | None) -> Sequence[str]:
    _, found = planned.way.bordered(planned.compiled.analysed, planned.compiled.bound)
    return [f"of {', '.join(each.tables)} {each}" for each in found if isinstance(each, Moved)]


def _once(planned: PlannedStep, leaves: Sequence[Leaf] | None) -> Sequence[str]:
    once = once_per_row_of(planned, leaves)
    return [] if once is None else [f"functions of a row are computed once for each distinct row: {once}"]


_STAKES: Mapping[str, _Stake] = {
    "border": _border,
    "once": _once,
    "prefetch": lambda planned, _: prefetches(planned),
}
