"""The machine whose figures a step is planned by: the devices here, or a cluster elsewhere."""

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
from autopar.measure.alpha import ids_by_family


@dataclass(frozen=True, slots=True)
class Machine:
    """Functions that return measured figures, None if nobody measures. Across processes the first call is
    collective."""

    rates: Callable[[], Rates] | None = None  #: Rates of exchanges and updates.
    step_rates: Callable[[], Rates] | None = None  #: `rates` with those of whole steps.
    #: Bytes of memory of each device; returns None if there is no limit.
    memory: Callable[[], int | None] | None = None
    stages: Callable[[], StageRates] | None = None  #: Rates of the programs of a pipeline's stages.

    @property
    def memory_bytes(self) -> int | None:
        """Bytes of each device's memory; None if there is no limit, or it is unknown."""
        return None if self.memory is None else self.memory()


@functools.cache
def memory_of(devices: Devices) -> int | None:
    """Returns the bytes of the smallest memory of all devices; None for devices without a memory of their own (CPUs).

    Collective at its first call, since all processes must plan by the same figure.
    """
    own = [d for d in devices.mesh.devices.flat if d.process_index == jax.process_index() and d.platform != "cpu"]
    stats = [device.memory_stats() or {} for device in own]
    smallest = min((int(s["bytes_limit"]) for s in stats if "bytes_limit" in s), default=None)
    all_ = devices.processes.values(smallest, "memory of the devices")
    return min((x for x in all_ if x is not None), default=None)


NOWHERE = Machine()


def looked_up(program: Program, example: Sequence[Leaf] | None) -> dict[int, Sequence[np.ndarray]]:
    """Maps families to the flat ids that an example batch looks up, if they are known. `example`: as in
    `example_ids`."""
    families = [space.family for space in program.facts.spaces if space.refusal is None]
    return ids_by_family(program, {family: program.ids[family] for family in families}, example)
