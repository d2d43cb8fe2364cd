"""`Budget`: how long measurements may take together."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from autopar.launch.group import Group

T = TypeVar("T")

#: How much longer than the others before it a measurement may take: a busy machine isn't always equally busy.
_MARGIN = 1.3
#: Seconds that measuring for a purpose may take where it was asked for by nobody.
AT_FIRST_S = 5.0


class Budget:
    """Time for measurements. Most of one is a compilation, which nobody can cut short, so one begins only if it should
    end in time: by its weight, and by how long those before it took on this machine, as busy as it is.

    Args:
      seconds: From now on.
      processes: Those that measure together. The first one's clock counts.
      clock: Gives seconds.
    """

    def __init__(self, seconds: float, processes: Group, clock: Callable[[], float] = time.perf_counter) -> None:
        self._seconds, self._processes, self._clock = seconds, processes, clock
        self._begin, self._weight = clock(), 0.0

    def run(self, weight: float, measure: Callable[[], T], among: Group | None = None) -> T | None:
        """Returns what `measure()` returns; None if there is no time for it. Collective.

        Args:
          weight: How long it takes, about, in measurements of small arrays.
          measure: What measures.
          among: The processes that do; all if left out.
        """
        elapsed = self._clock() - self._begin
        expected = _MARGIN * weight * elapsed / self._weight if self._weight else 0.0
        if not (among or self._processes).first(elapsed + expected < self._seconds, "time to measure"):
            return None
        found = measure()
        self._weight += weight
        return found
