"""Timing of steps against each other: taking turns, so that a machine that drifts slows all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

Step = Callable[[Any, Any], tuple[Any, Any]]


class Runner:
    """A step with a state of its own, which goes around."""

    def __init__(self, step: Step, state: Any) -> None:
        self._step = step
        self._state = state

    def seconds(self, batch: Any) -> float:
        """Time of one step, the device's work included."""
        start = time.perf_counter()
        self._state, metrics = self._step(self._state, batch)
        jax.block_until_ready((self._state, metrics))
        return time.perf_counter() - start


def alternate(
    runners: Mapping[str, Runner],
    batches: Callable[[int], Any],
    rounds: int,
    *,
    turns: Mapping[str, int] | None = None,
    warm: int = 1,
) -> dict[str, list[float]]:
    """Seconds a step, a median for each turn; the steps take turns of several in a row, as in training.

    The first half of a turn isn't timed. A plain step on a large table leaves cold caches and gigabytes that go back
    to the system: for a third of a second whatever comes next runs at half its speed, and that is not its own doing.

    Args:
      runners: Steps by name.
      batches: The n-th batch; all steps see the same ones.
      rounds: Turns of each.
      turns: Steps in a turn, 8 for those that aren't named.
      warm: Rounds before the first that counts.
    """
    found: dict[str, list[float]] = {name: [] for name in runners}
    for k in range(rounds + warm):
        for name, runner in runners.items():
            count = (turns or {}).get(name, 8)
            seconds = [runner.seconds(batches(100 * k + n)) for n in range(count)]
            if k >= warm:
                found[name].append(float(np.median(seconds[count // 2 :])))
    return found


def median_ms(seconds: list[float]) -> float:
    """Median in milliseconds."""
    return float(np.median(seconds)) * 1e3


def ratio(slow: list[float], fast: list[float]) -> float:
    """Median of the ratios turn by turn."""
    return float(np.median(np.asarray(slow) / np.asarray(fast)))
