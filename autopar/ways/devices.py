"""The devices of one process, or of several, run the whole step together: each on its part of the batch. One device is
a case of it."""

from __future__ import annotations

from autopar.analysis.local import NotLocal
from autopar.compile import Pass
from autopar.cost.rates import UNMEASURED, Measurements
from autopar.ir.bound_plan import BoundPlan
from autopar.ir.options import Options
from autopar.ir.program import Program
from autopar.passes.localize import localize
from autopar.passes.localizing.tensor import localize_tensor
from autopar.passes.place import place
from autopar.ways.way import Way, in_microbatches, lifting, rewriting, without_own_program


class OnDevices(Way):
    """Data parallelism, with products divided over a tensor axis, if there is one."""

    @staticmethod
    def takes(options: Options) -> bool:
        """Takes all."""
        return True

    def passes(self, bound: BoundPlan, measured: Measurements = UNMEASURED) -> tuple[Pass, ...]:
        """Lifts tables, divides the batch into microbatches, and writes the program of each device."""
        made = list(lifting(bound))
        if bound.shards:
            made.append(("place", rewriting(place)))
        if bound.plan.microbatches > 1:
            made.append(("split_update", rewriting(in_microbatches)))
        if bound.devices * self.options.tensor > 1:
            made.append(("localize", rewriting(_localize)))
        if bound.tensors:
            made.append(("localize_tensor", rewriting(_localize_tensor)))
        return tuple(made)


def _localize(program: Program, bound: BoundPlan) -> tuple[Program, str]:
    try:
        return localize(program, bound)
    except NotLocal as error:
        raise without_own_program(program, error) from error


def _localize_tensor(program: Program, bound: BoundPlan) -> tuple[Program, str]:
    try:
        return localize_tensor(program, bound)
    except NotLocal as error:
        raise without_own_program(program, error) from error
