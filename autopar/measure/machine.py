"""`Machine`: whose figures a step is planned by: those of the devices here, or of a cluster that is elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from autopar.backends.devices import Devices
from autopar.cost.rates import Rates, StageRates
from autopar.ir.program import Program
from autopar.jax_types import Leaf
from autopar.measure.alpha import example_ids


@dataclass(frozen=True, slots=True)
class Machine:
    """Functions that ask the devices. Collective at the first call where they are of several processes.

    Attributes:
      rates: What exchanges and updates take, measured if need be; None: nobody is to measure.
      step_rates: The same with what whole steps take.
      memory: Bytes of memory of each device, None where that limits nothing; None: that isn't known.
      stages: What the programs of a pipeline's stages take; None: there is no pipeline.
    """

    rates: Callable[[], Rates] | None = None
    step_rates: Callable[[], Rates] | None = None
    memory: Callable[[], int | None] | None = None
    stages: Callable[[], StageRates] | None = None

    @property
    def memory_bytes(self) -> int | None:
        """The bytes of each device's memory; None where that limits nothing, or isn't known."""
        return None if self.memory is None else self.memory()


@functools.cache
def memory_of(devices: Devices) -> int | None:
    """Returns the bytes of the smallest of all devices' memories; None where a device has no memory of its own (a CPU).

    Collective at its first call: all processes must plan by the same.
    """
    own = [d for d in devices.mesh.devices.flat if d.process_index == jax.process_index() and d.platform != "cpu"]
    stats = [device.memory_stats() or {} for device in own]
    smallest = min((int(s["bytes_limit"]) for s in stats if "bytes_limit" in s), default=None)
    all_ = devices.processes.values(smallest, "memory of the devices")
    return min((x for x in all_ if x is not None), default=None)


#: Of which nothing is known.
NOWHERE = Machine()


def looked_up(program: Program, example: Sequence[Leaf] | None) -> dict[int, Sequence[np.ndarray]]:
    """Maps families to the flat ids that an example batch looks up, where they are known.

    `example`: flat arguments; None (or a shape, or a tracer) for those whose values aren't known.
    """
    families = [space.family for space in program.facts.spaces if space.refusal is None]
    ids = {family: example_ids(program, program.ids[family], example) for family in families}
    return {family: flat for family, flat in ids.items() if flat is not None}
