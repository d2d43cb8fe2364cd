"""HYBRID at 1 Gbit/s: a step with the mean of all weights beside its gradient, against what each takes alone.

`python -m benchmarks hybrid`: 2 hosts (network namespaces, a core each), dense layers of 9 MB, minibatches of several
sizes. Computing is a step without a mean, communication what a step with a mean behind it (SYNC) takes longer. No step
can be shorter than the longer one of them (Zhang et al., "Distributed deep learning strategies for automatic speech
recognition", section 3.2).
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.served import started
from tests.support.mpi.namespaces import ENVIRONMENT, hosts

HOSTS, RATE, TASK, STEPS, TURNS = 2, "1gbit", "wide layers", 20, 3
EXAMPLES = (32, 256, 512)
SYSTEMS: Mapping[str, Mapping[str, Any]] = {
    "alone": {"every": 2 * STEPS},
    "SYNC": {},
    "HYBRID": {"kind": "Hybrid"},
    "DPSGD": {"kind": "DPSGD"},
    "ADPSGD": {"kind": "ADPSGD"},
}


def hybrid() -> None:
    """Each system's milliseconds a step: medians of some turns, systems in turn."""
    with tempfile.TemporaryDirectory() as folder, hosts(HOSTS, Path(folder), rate=RATE) as made:
        options: Any = {"wrapper": made.wrapper, "environment": {**ENVIRONMENT, "PJRT_NPROC": "2"}}
        with started("hosts", HOSTS, "benchmarks.replicas_ranks", **options) as ranks:
            print(f"{TASK}, {HOSTS} hosts at {RATE}/s, ms a step:", flush=True)
            for examples in EXAMPLES:
                found: dict[str, list[float]] = {name: [] for name in SYSTEMS}
                for _ in range(TURNS):
                    for name, sync in SYSTEMS.items():
                        ranks("prepare", task=TASK, sync=sync, examples=examples)
                        found[name].append(max(s for s, _ in ranks("train", steps=STEPS)) / STEPS * 1e3)
                ms = {name: statistics.median(values) for name, values in found.items()}
                longer = max(ms["alone"], ms["SYNC"] - ms["alone"])
                shown = ", ".join(f"{name} {value:.0f}" for name, value in ms.items())
                print(
                    f"  {examples:5d} examples: {shown}; HYBRID is {ms['HYBRID'] / longer:.2f} of the longer part",
                    flush=True,
                )
