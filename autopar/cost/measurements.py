"""What is measured before a step is planned: data, so that planning itself is a function of what it is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.cost.rates import Rates, StageRates


@dataclass(frozen=True, slots=True, eq=False)
class Measurements:
    """What is known of the devices and of an example batch.

    Attributes:
      rates: What exchanges and updates take on the devices; None: the fewest bytes are chosen.
      memory: Bytes of memory of each device; None where that limits nothing.
      ids: Family -> the flat ids that the example batch looks up, int32, the number of rows for "no row"; without an
        entry where they aren't known.
      stages: Of a pipeline, or of products that are divided, what programs and sends take; None: not measured.
    """

    rates: Rates | None = None
    memory: int | None = None
    ids: Mapping[int, Sequence[np.ndarray]] = field(default_factory=dict)
    stages: StageRates | None = None


#: Where nothing is known.
UNMEASURED = Measurements()
