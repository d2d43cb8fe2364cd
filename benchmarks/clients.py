"""Six workers, two servers, a dense model, hosts at 1 Gbit/s: synchronous, asynchronous and elastic SGD, with a worker
a host ("dist-"), and with two workers of three hosts each ("mpi-"): figures 11 to 14 of MXNET-MPI.

`python -m benchmarks clients`: network namespaces that share this machine's cores; held-out loss by time, at equal
samples. Each push of an asynchronous worker is an update, so its learning rate is divided by the workers.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.served import started
from tests.support.mpi.namespaces import ENVIRONMENT, hosts

HOSTS, CLIENTS, SERVERS, STEPS, EVALUATIONS, RATE, TASK = 6, 2, 2, 60, 4, "1gbit", "wide layers"
ELASTIC = {"kind": "Elastic", "interval": 8, "servers": SERVERS}
SYSTEMS: Mapping[str, Mapping[str, Any] | None] = {
    "dist-SGD": {"kind": "kvstore", "servers": SERVERS},
    "mpi-SGD": None,
    "dist-ASGD": {"kind": "Async", "servers": SERVERS},
    "mpi-ASGD": {"kind": "Async", "servers": SERVERS, "clients": CLIENTS},
    "dist-ESGD": {**ELASTIC, "alpha": 0.9 / HOSTS},
    "mpi-ESGD": {**ELASTIC, "alpha": 0.9 / CLIENTS, "clients": CLIENTS},
}


def clients() -> None:
    """Each system's held-out losses after a quarter, a half, ... of the examples, with the seconds up to there."""
    with tempfile.TemporaryDirectory() as folder, hosts(HOSTS, Path(folder), rate=RATE) as made:
        options: Any = {"wrapper": made.wrapper, "environment": ENVIRONMENT}
        with started("hosts", HOSTS, "benchmarks.replicas_ranks", **options) as ranks:
            print(f"{TASK}, {HOSTS} hosts at {RATE}/s, {SERVERS} servers, {STEPS} x {HOSTS} x 32 examples:", flush=True)
            for name, sync in SYSTEMS.items():
                ranks("prepare", task=TASK, sync=sync)
                seconds, shown, sent = 0.0, [], 0
                for _ in range(EVALUATIONS):
                    turns = ranks("train", steps=STEPS // EVALUATIONS)
                    seconds += max(own for own, _ in turns)
                    sent += sum(own for _, own in turns)
                    shown.append(f"{ranks('held_out')[0]:.3f} at {seconds:.1f} s")
                print(
                    f"  {name:10s} {seconds / STEPS * 1e3:6.0f} ms for {HOSTS} x 32 examples, "
                    f"{sent / HOSTS / STEPS / 1e6:.1f} MB sent by a host; loss {', '.join(shown)}",
                    flush=True,
                )
