"""`replay`: a timeline, one action after the other in one process: what its devices must have computed, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.backends.stage_device import StageDevice
from autopar.ir.pipeline import StagedStep
from autopar.ir.program import Var
from autopar.ir.timeline import Microbatch, Run, Send, Timeline, Value
from autopar.run.stage_programs import CompiledProgram, joined, stage_executables

Array = Any


def replay(step: StagedStep, timeline: Timeline, arguments: Mapping[Var, Array]) -> dict[Var, Array]:
    """Returns the results of a timeline, by their variables.

    The programs are those of the devices, compiled for one; nothing else is theirs: values are moved at the moment in
    which the list says so, and forgotten where it says so.

    Args:
      step: The programs.
      timeline: Of all devices.
      arguments: What the call was given, and the leaves of the state; of a leaf in several stages its parts.

    Raises:
      KeyError: a device reads what it doesn't have.
    """
    device, executables = StageDevice((jax.devices()[0],)), stage_executables(step, timeline)
    programs = {
        program: CompiledProgram(*(lowered.compile() for lowered in each.lower(device)))
        for program, each in executables.items()
    }
    held: dict[tuple[int, Value], Array] = {}
    for value, devices in timeline.given.items():
        held |= {(k, value): device.put(arguments[value.var]) for k in devices}

    def read(k: int, value: Value) -> Array:
        if (k, value) in held or value not in timeline.arguments:
            return held[k, value]
        if not isinstance(value.part, Microbatch):
            return device.put(arguments[value.var])
        whole, axis = step.parts[value.var]
        parts = jnp.split(jnp.asarray(arguments[whole]), step.microbatches, axis)
        return device.put(parts[value.part.number])

    for action, drops in zip(timeline.actions, timeline.drops, strict=True):
        if isinstance(action, Run):
            program, executable, at = programs[action.program], executables[action.program], action.device
            names = [action.sums[v] for v in executable.joins]
            sums = [held[at, name] for name in names if (at, name) in held] or [*program.start()]
            operands = [read(at, value) for value in action.reads]
            sums, results = program.run(np.int32(action.microbatch or 0), sums, *operands)
            held |= {(at, name): total for name, total in zip(names, sums, strict=True)}
            held |= {(at, action.writes[k]): x for k, x in zip(executable.read, results, strict=True)}
        elif isinstance(action, Send):
            held[action.target, action.value] = read(action.source, action.value)
        else:
            for whole, (names, join) in action.made.items():
                parts = [read(action.device, name) for name in names]
                if isinstance(join, str):
                    (made,) = joined((join,), (whole.var.dtype,), [parts])
                else:
                    made = jnp.concatenate(parts, axis=join)
                held[action.device, whole] = made
        for each in drops:
            held.pop(each, None)
    return {value.var: read(devices[0], value) for value, devices in timeline.results.items()}
