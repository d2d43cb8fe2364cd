"""What each stage of a step with tables on hosts takes: a `StagedProgram`'s actions, timed from outside.

Results of a stage's compiled program are waited for before the next one begins, so that a program's time is its own;
a step then takes a little longer than it does untimed. An exchange's time holds the wait for the slowest rank:
the least of all ranks' times for the same stage of the same step is what it costs once everyone is there.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from autopar.run.hosts import HostRunner

#: What is left of a step's time: finding the plan, placing arguments, handing on results.
AROUND = "around the stages"


class StageTimes:
    """Seconds by stage, a list of all steps for each."""

    def __init__(self, stages: Sequence[str]) -> None:
        self.seconds: dict[str, list[float]] = {f"{k:2} {name}": [] for k, name in enumerate(named(stages))}
        self.seconds[AROUND] = []
        #: Of the step that is under way.
        self._step = dict.fromkeys(self.seconds, 0.0)

    def add(self, name: str, seconds: float) -> None:
        """A stage of this step took so long; where the step went on in another program, once more."""
        self._step[name] += seconds

    def finish(self, step_s: float) -> None:
        """A step is over; `step_s` is what all of it took, in seconds."""
        self._step[AROUND] = step_s - sum(self._step.values())
        for name, seconds in self._step.items():
            self.seconds[name].append(seconds)
        self._step = dict.fromkeys(self.seconds, 0.0)


@contextlib.contextmanager
def timed(runner: HostRunner, stages: Sequence[str]) -> Iterator[StageTimes]:
    """Times the stages of the runner's steps, in all programs that it has; no other may be compiled meanwhile."""
    found = StageTimes(stages)
    programs: list[Any] = list(runner._programs.values())  # a benchmark may look inside
    actions = [staged._actions for staged in programs]
    for staged in programs:
        pairs = zip(list(found.seconds)[:-1], staged._actions, strict=True)
        staged._actions = [_timed(action, name, found) for name, action in pairs]
    try:
        yield found
    finally:
        assert len(programs) == len(runner._programs), "compiled again while its stages were timed"
        for staged, before in zip(programs, actions, strict=True):
            staged._actions = before


def _timed(action: Callable[[Any], None], name: str, times: StageTimes) -> Callable[[Any], None]:
    def act(step: Any) -> None:
        start = time.perf_counter()
        try:
            action(step)
            jax.block_until_ready(
                [v for v in step.values.values() if isinstance(v, jax.Array) and not v.is_deleted()],
            )
        finally:
            times.add(name, time.perf_counter() - start)

    return act


def named(stages: Sequence[str]) -> list[str]:
    """What each stage is for, told by its place: "device program of 5 equations" before the route finds the ids."""
    names = []
    kinds = [stage.split()[0] for stage in stages]
    for k, (kind, stage) in enumerate(zip(kinds, stages, strict=True)):
        meaning = ""
        if kind == "device":
            delivered = "deliver" in kinds[:k]
            meaning = "ids" if "route" not in kinds[:k] else "dense update" if delivered else "forward and backward"
        elif kind == "owner":
            meaning = "norm" if "reduce" in kinds[k:] else "row update"
        names.append(f"{stage}: {meaning}" if meaning else stage)
    return names


def table(by_rank: Sequence[Mapping[str, Sequence[float]]]) -> list[str]:
    """Lines: medians over the steps, in ms, of the fastest rank in each step and of all ranks."""
    lines = [f"  {'stage':46} {'fastest rank':>12} {'all ranks':>12}  ms"]
    fastest_total = mean_total = 0.0
    for name in by_rank[0]:
        seconds = np.array([rank[name] for rank in by_rank]) * 1e3
        fastest, mean = float(np.median(seconds.min(0))), float(np.median(seconds.mean(0)))
        fastest_total, mean_total = fastest_total + fastest, mean_total + mean
        lines.append(f"  {name:46} {fastest:12.3f} {mean:12.3f}")
    return [*lines, f"  {'sum':46} {fastest_total:12.3f} {mean_total:12.3f}"]
