"""Limits the time of measurements."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from autopar.launch.group import Group

T = TypeVar("T")

#: Factor by which a measurement may take longer than earlier ones, as the load of the machine varies.
_MARGIN = 1.3
#: Seconds for measurements of one purpose that the user didn't ask for.
AT_FIRST_S = 5.0


class Budget:
    """Time for measurements.

    Most of a measurement is a compilation, which can't be interrupted. So one begins only if it should end in time, by
    its weight and the time that earlier ones took on this machine, as busy as it is.

    Args:
      seconds: From now on.
      processes: Those that measure together, by the first one's clock.
    """

    def __init__(self, seconds: float, processes: Group, clock: Callable[[], float] = time.perf_counter) -> None:
        self._seconds, self._processes, self._clock = seconds, processes, clock
        self._begin, self._weight = clock(), 0.0

    def run(self, weight: float, measure: Callable[[], T], among: Group | None = None) -> T | None:
        """Returns the result of `measure()`, or None if there is no time for it. Collective.

        Args:
          weight: Its expected duration, in measurements of small arrays.
          among: The processes that measure; all if left out.
        """
        elapsed = self._clock() - self._begin
        expected = _MARGIN * weight * elapsed / self._weight if self._weight else 0.0
        if not (among or self._processes).first(elapsed + expected < self._seconds, "time to measure"):
            return None
        found = measure()
        self._weight += weight
        return found
