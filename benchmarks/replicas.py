"""Replicas over slow links against data parallelism: held-out loss by samples and by seconds, and bytes on the wire.

`python -m benchmarks replicas`: a transformer on 4 hosts (network namespaces) at 10 and 100 Mbit/s, each system from
the same weights on the same examples. A turn is a system after the other, in one run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.served import started
from tests.support.mpi.namespaces import ENVIRONMENT, hosts

HOSTS, STEPS, EVERY, EVALUATIONS, TASK = 4, 240, 30, 4, "transformer"
RATES = ("10mbit", "100mbit")
SYSTEMS: Mapping[str, Mapping[str, Any] | None] = {
    "data parallelism": None,
    "Average(1)": {},
    f"local SGD, every {EVERY}": {"every": EVERY},
    f"DiLoCo, every {EVERY}": {"every": EVERY, "outer": True},
    f"streaming, every {EVERY}, 3 parts, 5 late": {"every": EVERY, "outer": True, "fragments": 3, "delay": 5},
}


def replicas() -> None:
    """Each system's held-out losses after a quarter, a half, ... of the steps, with the seconds up to there."""
    for rate in RATES:
        with tempfile.TemporaryDirectory() as folder, hosts(HOSTS, Path(folder), rate=rate) as made:
            options: Any = {"wrapper": made.wrapper, "environment": ENVIRONMENT}
            with started("hosts", HOSTS, "benchmarks.replicas_ranks", **options) as ranks:
                print(f"{TASK}, {HOSTS} hosts at {rate}/s, {STEPS} steps of {HOSTS} x 32 examples:", flush=True)
                for name, sync in SYSTEMS.items():
                    planned = ranks("prepare", task=TASK, sync=sync)[0]
                    seconds, sent, shown = 0.0, 0, []
                    for _ in range(EVALUATIONS):
                        turns = ranks("train", steps=STEPS // EVALUATIONS)
                        seconds += max(own for own, _ in turns)
                        sent += sum(own for _, own in turns)
                        shown.append(f"{ranks('held_out')[0]:.4f} at {seconds:.1f} s")
                    wire = sent / HOSTS / STEPS
                    said = f" ({wire / planned:.2f} of the plan's)" if planned else ""
                    print(f"  {name:42s} {', '.join(shown)}; {wire / 1e3:.1f} kB a step leave a host{said}", flush=True)
