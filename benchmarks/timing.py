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
    runners: Mapping[str, Runner], batches: Callable[[int], Any], rounds: int, warm: int = 2, turn: int = 3
) -> dict[str, list[float]]:
    """Seconds a step, a median for each turn.

    The steps take turns of a few steps in a row, as in training; the first of a turn isn't timed, for it finds the
    caches full of what the others left there. All see the same batches.
    """
    found: dict[str, list[float]] = {name: [] for name in runners}
    for k in range(rounds + warm):
        data = [batches(k * (turn + 1) + n) for n in range(turn + 1)]
        for name, runner in runners.items():
            seconds = [runner.seconds(batch) for batch in data][1:]
            if k >= warm:
                found[name].append(float(np.median(seconds)))
    return found


def median_ms(seconds: list[float]) -> float:
    """Median in milliseconds."""
    return float(np.median(seconds)) * 1e3


def ratio(slow: list[float], fast: list[float]) -> float:
    """Median of the ratios turn by turn."""
    return float(np.median(np.asarray(slow) / np.asarray(fast)))
