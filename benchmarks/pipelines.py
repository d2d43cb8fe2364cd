"""Stages on ranks that are bound to a core each, against one such rank and data parallelism over the ranks.

`python -m benchmarks pipelines`. SpecTrain's figure 9 on what there is here (cores as devices); the ratios are medians
of turns in one run.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.pipeline_models import MODELS
from benchmarks.served import Ranks, started
from tests.support.mpi.namespaces import ENVIRONMENT, hosts

RANKS, MICROBATCHES = 2, 16
ASYNCHRONOUS = ("async", "stash", "spectrain")
#: What a system is that isn't named like its schedule.
OTHERS: Mapping[str, Mapping[str, Any]] = {"no slack": {"schedule": "spectrain", "slack": 0}}
#: Steps of a turn, and those of them that aren't timed. Without a flush a rank may be some steps ahead of another, and
#: finds messages of the turn before: a turn is many times as long as that.
STEPS, FIRST, LONG, FILLED = 5, 1, 20, 8
TURNS = 3
_MODULE = "benchmarks.pipelines_ranks"


def pipelines(ranks: int = RANKS) -> None:
    """A perceptron, an LSTM, a transformer and a CNN."""
    with started("one rank", 1, _MODULE) as one, started(f"{ranks} ranks", ranks, _MODULE) as several:
        for name in MODELS:
            _compare(name, one, several, ("1f1b", "gpipe", "zero-bubble", *ASYNCHRONOUS))


def pipelines_network() -> None:
    """The same on 2 and 4 ranks, each on a host of its own (a network namespace) with a link of 1 Gbit/s; and the bytes
    that leave each host in a step, beside those of the plan."""
    for ranks in (2, 4):
        with tempfile.TemporaryDirectory() as folder, hosts(ranks, Path(folder), rate="1gbit") as made:
            options: Any = {"wrapper": made.wrapper, "environment": ENVIRONMENT}
            with started("one rank", 1, _MODULE) as one, started("hosts", ranks, _MODULE, **options) as several:
                for name in MODELS:
                    _compare(name, one, several, ("1f1b", "gpipe", "zero-bubble", "spectrain", *OTHERS))
                    for system in ("data", "1f1b", "spectrain"):
                        sent = several("sent", name=name, system=system)
                        wire, planned = sum(own for own, _ in sent), sent[0][1]
                        said = f", {wire / planned:.3f} of the plan's {planned / 1e6:.2f} MB" if planned else ""
                        print(f"  {system}: {wire / 1e6:.2f} MB leave the {ranks} hosts in a step{said}", flush=True)


def _compare(name: str, one: Ranks, several: Ranks, schedules: Sequence[str]) -> None:
    systems = {"plain": one, "microbatches": one, "data": several, **dict.fromkeys(schedules, several)}
    predicted = {
        system: ranks("prepare", name=name, system=system, microbatches=MICROBATCHES, **OTHERS.get(system, {}))[0]
        for system, ranks in systems.items()
    }
    without_flush = {*ASYNCHRONOUS, *OTHERS}
    seconds: dict[str, list[float]] = {system: [] for system in systems}
    losses = {}
    for _ in range(TURNS):
        for system, ranks in systems.items():
            count, first = (LONG, FILLED) if system in without_flush else (STEPS, FIRST)
            turns = ranks("turn", name=name, system=system, count=count)
            losses[system] = turns[0][1]
            seconds[system].append(max(statistics.mean(times[first:]) for times, _ in turns))
    first, alike = losses["plain"], {s: loss for s, loss in losses.items() if s not in without_flush}
    assert all(abs(loss - first) < 1e-3 * abs(first) + 1e-5 for loss in alike.values()), losses
    print(f"{name}, {len(several.pids)} ranks, M = {MICROBATCHES}:", flush=True)
    for system, times in seconds.items():
        ratios = [a / b for a, b in zip(seconds["plain"], times, strict=True)]
        parts = [a / b for a, b in zip(seconds["microbatches"], times, strict=True)]
        said = "" if predicted[system] is None else f"; predicted {1e3 * predicted[system]:.0f} ms"
        print(
            f"  {system:12s} {1e3 * statistics.median(times):6.0f} ms; {statistics.median(ratios):.2f} times one rank, "
            f"{statistics.median(parts):.2f} times one rank's microbatches{said}",
            flush=True,
        )
