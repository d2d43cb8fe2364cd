"""Steps that are planned by other figures than those of the devices here."""

from __future__ import annotations

import dataclasses
from typing import Any

from autopar.measure.figures import Machine
from autopar.run.planner import Planner


def on_machine(planned: Any, **known: Any) -> Any:
    """Has a step planned by `memory=` bytes of each device, or `stages=` rates of programs; gives the step."""
    planned.planner = _on(planned.planner, {name: lambda value=value: value for name, value in known.items()})
    return planned


def _on(planner: Planner, known: dict[str, Any]) -> Planner:
    in_stages = planner.in_stages
    machine: Machine = dataclasses.replace(planner.machine, **known)
    return dataclasses.replace(
        planner, machine=machine, in_stages=None if in_stages is None else lambda: _on(in_stages(), known)
    )
