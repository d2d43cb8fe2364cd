"""Ranks that take all cores of the machine, started by mpirun: left unbound, bound by autopar, and bound by mpirun."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

import numpy as np

from autopar.mpi.limits import cores
from benchmarks.hosts import write_table
from benchmarks.served import started
from benchmarks.timing import median_ms, ratio

#: Environment and mpirun's flags.
WAYS: dict[str, tuple[dict[str, str], list[str]]] = {
    "unbound": ({"AUTOPAR_BIND": "none"}, []),
    "bound by autopar": ({}, []),
    "bound by mpirun": ({}, ["-bind-to", "core"]),
}


def binding(rows: int = 100_000, steps: int = 40, rounds: int = 8) -> None:
    """The step of `hosts`, a rank on each core, and two; the ways take turns, whose second half is timed."""
    for count in (cores(), 2 * cores()):
        with tempfile.TemporaryDirectory(prefix="autopar-") as folder, contextlib.ExitStack() as stack:
            write_table(Path(folder, "table.npy"), rows)
            module = "benchmarks.hosts_systems"
            systems = {
                name: stack.enter_context(
                    started(name, count, module, "autopar", folder, flags=flags, environment=environment)
                )
                for name, (environment, flags) in WAYS.items()
            }
            for ranks in systems.values():
                ranks("prepare", rows=rows)
                ranks("turn", rows=rows, count=steps)
            seconds: dict[str, list[float]] = {name: [] for name in systems}
            for _ in range(rounds):
                for name, ranks in systems.items():
                    slowest = np.max([answer[0] for answer in ranks("turn", rows=rows, count=steps)], axis=0)
                    seconds[name].append(float(np.median(slowest[steps // 2 :])))
            shown = ", ".join(f"{name} {median_ms(found):.1f} ms" for name, found in seconds.items())
            gain = ratio(seconds["unbound"], seconds["bound by autopar"])
            print(f"{count} ranks on {cores()} cores: {shown}; unbound / bound by autopar {gain:.2f}", flush=True)
