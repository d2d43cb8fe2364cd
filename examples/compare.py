"""Several forms of one train step, timed side by side in one run.

Timings on a shared machine drift by a factor of two within minutes, so the forms take turns and medians are compared.
A turn is a few steps in a row, as in training, and the first of them isn't timed: it finds the caches full of what
the form before left there. All start from equal states and see the same batches, so their metrics must agree, which
is measured too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from statistics import median
from typing import Any

import jax

TIMED_STEPS = 3  # a turn

Step = Callable[[Any, Any], tuple[Any, dict[str, Any]]]


@dataclass(frozen=True)
class Form:
    """One form of the step, what makes its first state, and the bytes that each device sends in a step."""

    step: Step
    make_state: Callable[[], Any]
    sent: int | None = None


@dataclass(frozen=True)
class Comparison:
    """Medians of all forms, by name; how far apart what they computed is. The first form is what others are held to."""

    seconds: Mapping[str, float]
    sent: Mapping[str, int | None]
    steps: int  # timed, of each form
    difference: float  # of any metric after any step, relative to the first form's: the largest

    def __str__(self) -> str:
        agreement = f"differ by at most {self.difference:.1e}" if self.difference else "are equal to the last bit"
        first, *_ = self.seconds
        width = max(map(len, self.seconds))
        lines = [f"one train step, median of {self.steps}, taking turns on the same batches:"]
        for name, seconds in self.seconds.items():
            ratio = "" if name == first else f"  {self.seconds[first] / seconds:6.1f} times as fast"
            sent = self.sent[name]
            told = "" if sent is None else f"  {sent / 2**20:8.2f} MiB sent by each device"
            lines.append(f"  {name:{width}} {seconds * 1e3:8.1f} ms{ratio}{told}")
        return "\n".join([*lines, f"  after every step the metrics {agreement}"])


class Runner:
    """A form with its own state, and what was measured."""

    def __init__(self, form: Form) -> None:
        self.step, self.state = form.step, form.make_state()
        self.seconds: list[float] = []
        self.metrics: list[float] = []

    def turn(self, batches: list[Any]) -> None:
        for place, batch in enumerate(batches):
            start = time.perf_counter()
            self.state, metrics = jax.block_until_ready(self.step(self.state, batch))
            if place:
                self.seconds.append(time.perf_counter() - start)
            self.metrics.extend(float(metrics[name]) for name in sorted(metrics))


def compare(forms: Mapping[str, Form], batches: Iterator[Any], turns: int) -> Comparison:
    """Times the forms in turn, each on a state of its own. What compiles is the first step, which isn't timed."""
    runners = {name: Runner(form) for name, form in forms.items()}
    for _ in range(turns):
        shared = list(islice(batches, 1 + TIMED_STEPS))
        for runner in runners.values():
            runner.turn(shared)
    first, *others = runners.values()
    apart = [
        abs(b - a) / max(abs(a), 1e-30) for other in others for a, b in zip(first.metrics, other.metrics, strict=True)
    ]
    seconds = {name: median(runner.seconds) for name, runner in runners.items()}
    sent = {name: form.sent for name, form in forms.items()}
    return Comparison(seconds, sent, len(first.seconds), max(apart, default=0.0))
