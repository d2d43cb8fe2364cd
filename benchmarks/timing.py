"""Timing of steps against each other: alternating, so that a machine that drifts slows all of them alike."""

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
    runners: Mapping[str, Runner], batches: Callable[[int], Any], rounds: int, warm: int = 3
) -> dict[str, list[float]]:
    """Seconds of each step, round by round; the same batch for all in a round."""
    found: dict[str, list[float]] = {name: [] for name in runners}
    for k in range(rounds + warm):
        batch = batches(k)
        for name, runner in runners.items():
            seconds = runner.seconds(batch)
            if k >= warm:
                found[name].append(seconds)
    return found


def median_ms(seconds: list[float]) -> float:
    """Median in milliseconds."""
    return float(np.median(seconds)) * 1e3


def ratio(slow: list[float], fast: list[float]) -> float:
    """Median of the ratios round by round."""
    return float(np.median(np.asarray(slow) / np.asarray(fast)))
