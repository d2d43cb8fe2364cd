"""One of four workers slower than the others: minibatches a second of synchronous and asynchronous training.

`python -m benchmarks stragglers`: four ranks of one machine, whose steps sleep for most of their time (so that they
don't compete for cores), one of them 2, 10 and 100 times as long. The unit is what one worker alone does at full speed.
With n workers, one of them c times slower, no exchange that costs anything and nobody who waits, (n-1) + 1/c is all
there is; who waits for the slowest has n/c.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.served import started

RANKS, LEAST_S, SECONDS, TURNS, TASK = 4, 0.1, 12.0, 3, "transformer"
FACTORS = (1, 2, 10, 100)
SYSTEMS: Mapping[str, Mapping[str, Any]] = {
    "Average(), SYNC": {},
    "Async(staleness=4)": {"kind": "Async", "staleness": 4},
    "Async(), unbounded": {"kind": "Async"},
    "Hybrid()": {"kind": "Hybrid"},
    "DPSGD()": {"kind": "DPSGD"},
    "ADPSGD()": {"kind": "ADPSGD"},
}
#: Those that wait for the slowest.
TIED = ("Average(), SYNC", "Hybrid()", "DPSGD()")


def stragglers() -> None:
    """Each system's minibatches a second, in units of one worker's, medians of some turns, systems in turn."""
    with started("stragglers", RANKS, "benchmarks.replicas_ranks") as ranks:
        print(f"{TASK}, {RANKS} workers on one machine, steps of {LEAST_S} s at least (slept), one of them slowed:")
        for factor in FACTORS:
            found: dict[str, list[float]] = {name: [] for name in SYSTEMS}
            stale: dict[str, list[float]] = {name: [] for name in SYSTEMS}
            for _ in range(TURNS):
                for name, sync in SYSTEMS.items():
                    ranks("prepare", task=TASK, sync=sync)
                    # Who waits for the slowest has few steps in that time: they are counted, not foreseen.
                    limit = max(2, int(SECONDS / LEAST_S / factor)) if name in TIED else None
                    turns = ranks(
                        "slowed", rank=RANKS - 1, factor=factor, least_s=LEAST_S, seconds=SECONDS, steps=limit
                    )
                    found[name].append(sum(steps / seconds for steps, seconds, _ in turns) * LEAST_S)
                    stale[name].append(turns[0][2])
            most = RANKS - 1 + 1 / factor
            print(f"  {factor} times: (n-1) + 1/c = {most:.2f}, n/c = {RANKS / factor:.2f}", flush=True)
            for name, values in found.items():
                value = statistics.median(values)
                late = statistics.median(stale[name])
                said = f", staleness {late:.2f} on average" if "Async" in name else ""
                bound = RANKS / factor if name in TIED else most
                print(f"    {name:20s} {value:.2f}, {value / bound:.0%} of its bound{said}", flush=True)
