"""Two forms of one train step, timed side by side in one run.

Timings on a shared machine drift by a factor of two within minutes, so the two take turns and medians are compared.
A turn is a few steps in a row, as in training, and the first of them isn't timed: it finds the caches full of what
the other form left there. Both start from equal states and see the same batches, so their metrics must agree, which
is measured too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from statistics import median
from typing import Any

import jax

TIMED_STEPS = 3  # a turn

Step = Callable[[Any, Any], tuple[Any, dict[str, Any]]]


@dataclass(frozen=True)
class Comparison:
    """Medians of both forms, and how far apart what they computed is."""

    plain_s: float
    planned_s: float
    steps: int  # timed, of each form
    difference: float  # of any metric after any step, relative to the plain form's: the largest

    @property
    def ratio(self) -> float:
        return self.plain_s / self.planned_s

    def __str__(self) -> str:
        agreement = f"differ by at most {self.difference:.1e}" if self.difference else "are equal to the last bit"
        return (
            f"one train step, median of {self.steps}, taking turns on the same batches:\n"
            f"  plain jax.jit  {self.plain_s * 1e3:8.1f} ms\n"
            f"  autopar        {self.planned_s * 1e3:8.1f} ms\n"
            f"  autopar is {self.ratio:.1f} times as fast; after every step the metrics {agreement}"
        )


class Runner:
    """One form of the step, its own state, and what was measured."""

    def __init__(self, step: Step, state: Any) -> None:
        self.step, self.state = step, state
        self.seconds: list[float] = []
        self.metrics: list[float] = []

    def turn(self, batches: list[Any]) -> None:
        for place, batch in enumerate(batches):
            start = time.perf_counter()
            self.state, metrics = jax.block_until_ready(self.step(self.state, batch))
            if place:
                self.seconds.append(time.perf_counter() - start)
            self.metrics.extend(float(metrics[name]) for name in sorted(metrics))


def compare(
    plain: Step, planned: Step, make_state: Callable[[], Any], batches: Iterator[Any], turns: int
) -> Comparison:
    """Times both steps in turn, each on a state of its own. What compiles is the first step, which isn't timed."""
    runners = Runner(plain, make_state()), Runner(planned, make_state())
    for _ in range(turns):
        shared = list(islice(batches, 1 + TIMED_STEPS))
        for runner in runners:
            runner.turn(shared)
    first, second = runners
    apart = (abs(b - a) / max(abs(a), 1e-30) for a, b in zip(first.metrics, second.metrics, strict=True))
    return Comparison(median(first.seconds), median(second.seconds), len(first.seconds), max(apart))
