"""A long run of steps with tables on hosts, over four ranks: memory stays as it is, and compiling ends.

Every step has other ids; every hundredth has many more different ones than the others,
so that buffers and compiled sizes grow when they may. A rank's memory is its resident set (`VmRSS`), read after
`FIRST` steps and again at the end.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lookup import make_state, plain_step, zipf_ids
from benchmarks.ranks import RANK, serve, started

#: From step `FIRST` on nothing is compiled any more: a program takes up to some 10 MiB.
RANKS, STEPS, FIRST, EVERY = 4, 5_000, 1_000, 500
#: Small, so that steps are quick.
ROWS, DIM, HIDDEN, IDS = 20_000, 16, 32, (8, 20)
#: What a rank's memory may grow by from step `FIRST` to the last, in bytes.
TOLERATED_BYTES = 4 << 20
#: Compilations of the same step over `COMPILED_STEPS`.
TOLERATED_COMPILATIONS, COMPILED_STEPS = 8, 1_000


def soak() -> None:
    """5,000 steps on 4 ranks; fails if memory grew or compiling didn't end."""
    with started("soak", RANKS, "benchmarks.soak") as ranks:
        resident: dict[int, list[int]] = {}
        compilations: dict[int, int] = {}
        start = time.perf_counter()
        for done in range(0, STEPS, EVERY):
            answers = ranks("run", first=done, count=EVERY)
            resident[done + EVERY] = [a["resident"] for a in answers]
            compilations[done + EVERY] = max(a["compilations"] for a in answers)
            shown = " ".join(f"{r / 2**20:8.1f}" for r in resident[done + EVERY])
            print(f"after {done + EVERY:5,} steps: MiB by rank {shown}; compiled {compilations[done + EVERY]} times")
            sys.stdout.flush()
        seconds = time.perf_counter() - start
    grown = [b - a for a, b in zip(resident[FIRST], resident[STEPS], strict=True)]
    print(
        f"{STEPS:,} steps on {RANKS} ranks in {seconds:.0f} s: from step {FIRST} on memory grew by "
        f"{max(grown) / 2**20:+.2f} MiB at most ({min(grown) / 2**20:+.2f} at least); "
        f"{compilations[COMPILED_STEPS]} compilations in "
        f"{COMPILED_STEPS:,} steps, {compilations[STEPS]} in all",
        flush=True,
    )
    if max(grown) > TOLERATED_BYTES:
        raise SystemExit(f"a rank's memory grew by {max(grown) / 2**20:.1f} MiB")
    if compilations[COMPILED_STEPS] > TOLERATED_COMPILATIONS:
        raise SystemExit(f"{compilations[COMPILED_STEPS]} compilations in {COMPILED_STEPS:,} steps")


def _ids(seed: int) -> np.ndarray:
    """[ranks * 8, 20]: Zipf; of some steps as many different ones as there can be."""
    shape = (RANKS * IDS[0], IDS[1])
    if seed % 100 == 99:
        return np.random.default_rng(seed).integers(0, ROWS, shape, dtype=np.int32)
    return zipf_ids(ROWS, shape, seed)


def _resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmRSS: the soak runs on Linux")


def _runs() -> Callable[..., dict[str, Any]]:
    """`run(first, count)` of this rank."""
    import autopar

    planned = autopar.parallelize(plain_step, strategy=("ps", "hosts"))
    state = make_state(ROWS, DIM, HIDDEN)

    def run(first: int, count: int) -> dict[str, Any]:
        nonlocal state
        for seed in range(first, first + count):
            state, loss = planned(state, {"ids": _ids(seed)})
        assert np.isfinite(float(loss)), "the loss is finite"
        assert planned.latest is not None
        return {"resident": _resident_bytes(), "compilations": planned.latest.runner.compilations}

    return run


if __name__ == "__main__":
    serve(sys.argv[1], RANK, {"run": _runs()})
