"""`LargerCapacities`: plans a step anew after batches that came near its capacities or exceeded them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar import jax_compat
from autopar.backends.background import Compilation, beside
from autopar.compile import Compiled
from autopar.interrupts import interruptible
from autopar.ir.figures import HEADROOM, NEAR
from autopar.jax_types import Leaf
from autopar.launch.group import everyone
from autopar.launch.notices import compiling
from autopar.passes.choosing.capacity import needed_share
from autopar.run.devices import DevicesRunner
from autopar.run.planned_step import PlannedStep
from autopar.run.planner import Planner


@dataclass(frozen=True, slots=True)
class LargerCapacities:
    """Plans a step with larger capacities. `another` makes a planned step of the old one, a new plan, an example and
    headroom."""

    name: str
    planner: Planner
    another: Callable[[PlannedStep, Compiled, Sequence[Any] | None, float], PlannedStep]

    def after(self, planned: PlannedStep, loads: Sequence[int]) -> tuple[PlannedStep, str]:
        """Returns the planned step to use after batches that needed `loads` rows of each capacity, and a warning if it
        is new.

        A capacity that was exceeded becomes twice as large, or as large as necessary, with headroom. One that was only
        approached stays, and the larger plan is compiled in the background.
        """
        tight = [f for f in planned.compiled.as_run.bound.families if f.bounds.tight]
        needs = [(f.table.path, int(n), f.bounds.capacity or 0) for f, n in zip(tight, loads, strict=True)]
        exceeded = ", ".join(f"{n} of {path}, not {most}" for path, n, most in needs if n > most)
        if not exceeded:
            if planned.larger is None:
                if isinstance(planned.own_runner, DevicesRunner):
                    planned.own_runner.prepare()
                planned.larger = self._larger(planned, 2 * planned.headroom)
            return planned, ""
        is_beside = planned.larger is not None and planned.larger.has_begun
        with interruptible(not everyone().several), compiling(self.name):
            grown = None if planned.larger is None else planned.larger.finish()
            if grown is None or not _has_room(grown, {path: n for path, n, _ in needs}):
                is_beside = False
                needed = HEADROOM * planned.headroom * max(needed_share(most, n) for _, n, most in needs)
                grown = self._with_headroom(planned, planned.example, max(2 * planned.headroom, needed))
        how = "the step was compiled beside the ones before" if is_beside else "the step is compiled again"
        old, new = (
            [(f.table.path, f.bounds.capacity) for f in e.compiled.as_run.bound.families] for e in (planned, grown)
        )
        shown = ", ".join(f"{a} to {b} ({path})" for (path, a), (_, b) in zip(old, new, strict=True) if a != b)
        return grown, (
            f"{self.name}: a batch needed more rows of one device than the example did ({exceeded}). That step was run "
            f"without limits, with the same result; capacities grow from {shown}, in rows, and {how}"
        )

    def _larger(self, planned: PlannedStep, headroom: float) -> Compilation[PlannedStep]:
        """Compiles the step with larger capacities in the background. It is planned there, too; but several processes,
        which must agree on the plan, make it here and keep it even if compiling it failed."""
        made, example = None, planned.example
        if self.planner.processes is not None:
            made = self._with_headroom(planned, example, headroom)
        elif example is not None:  # on the host: a program on all devices would meet those of a step
            example = [x if x is None or jax_compat.is_key(x.dtype) else np.asarray(x) for x in example]

        def compiled() -> PlannedStep:
            larger = made or self._with_headroom(planned, example, headroom)
            if isinstance(larger.own_runner, DevicesRunner):
                larger.own_runner.begin_whole()
            larger.own_runner.lower().compile()
            return larger

        return beside(f"{self.name} with larger capacities", compiled, otherwise=made)

    def _with_headroom(self, planned: PlannedStep, example: Sequence[Leaf] | None, headroom: float) -> PlannedStep:
        """Plans with headroom, doubled until the plan changes: capacities are rounded."""
        while True:
            compiled = self.planner.plan_again(planned, example, headroom)
            if compiled.bound.decisions != planned.compiled.bound.decisions:
                return self.another(planned, compiled, example, headroom)
            headroom *= 2


def _has_room(planned: PlannedStep, needs: Mapping[str, int]) -> bool:
    """Says whether needs (rows by table) stay clear of a plan's capacities."""
    tight = {f.table.path: f.bounds.capacity or 0 for f in planned.compiled.as_run.bound.families if f.bounds.tight}
    return all(n <= NEAR * tight[path] for path, n in needs.items() if path in tight)
