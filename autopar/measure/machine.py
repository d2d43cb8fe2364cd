"""`Machine`: whose figures a step is planned by: those of the devices here, or of a cluster that is elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.cost.rates import Rates
from autopar.ir.program import Program
from autopar.measure.alpha import example_ids


@dataclass(frozen=True, slots=True)
class Machine:
    """What can be asked of the devices. Collective at the first call where they are of several processes.

    Attributes:
      rates: What exchanges and updates take, measured if need be; None: nobody is to measure.
      memory: Bytes of memory of each device, None where that limits nothing; None: that isn't known.
    """

    rates: Callable[[], Rates] | None = None
    memory: Callable[[], int | None] | None = None

    @property
    def memory_bytes(self) -> int | None:
        """Of each device; None where that limits nothing, or isn't known."""
        return None if self.memory is None else self.memory()


#: Of which nothing is known.
NOWHERE = Machine()


def looked_up(program: Program, example: Sequence[Any] | None) -> dict[int, Sequence[np.ndarray]]:
    """Family -> the flat ids that an example batch looks up, where they are known.

    Args:
      program: An analysed program.
      example: Flat arguments; None (or a shape, or a tracer) for those whose values aren't known.
    """
    found = {}
    for space in program.rows.spaces:
        if space.refusal is None:
            flat = example_ids(program, program.ids[space.family], example)
            if flat is not None:
                found[space.family] = flat
    return found
