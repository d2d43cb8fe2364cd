"""Steps with options that `parallelize` doesn't take, and with devices other than those here."""

from __future__ import annotations

import dataclasses
from typing import Any

from autopar import ParallelStep
from autopar.cost.rates import Rates


def set_options(step: ParallelStep, **changes: Any) -> None:
    """Change what the step's compiler is told."""
    options = dataclasses.replace(step.options, **changes)
    step.planner = dataclasses.replace(step.planner, options=options)


def set_machine(step: ParallelStep, memory: int, rates: Rates | None = None) -> None:
    """Plan for devices of so many bytes, and of these rates."""
    old = step.planner.machine
    new = dataclasses.replace(old, memory=lambda: memory)
    if rates is not None:
        new = dataclasses.replace(new, rates=lambda: rates, step_rates=lambda: rates)
    step.planner = dataclasses.replace(step.planner, machine=new)
