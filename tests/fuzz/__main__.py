"""`python -m tests.fuzz`: random programs by fresh seeds, for some minutes. Exits with 1 if it finds a fault."""

from __future__ import annotations

import argparse
import secrets
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz import driver
from tests.fuzz.driver import Summary
from tests.fuzz.modes import MODES


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="in all; each mode has its share (default 5)")
    parser.add_argument(
        "--mode", action="append", choices=list(MODES), help="where programs run; several may be given (all by default)"
    )
    parser.add_argument("--seed", type=int, help="the first seed, in place of a fresh one; alone: this program only")
    parser.add_argument("--programs", type=int, help="how many seeds, one after the other, at most")
    parser.add_argument("--scripts", type=Path, default=Path("fuzz-found"), help="where scripts are written")
    parser.add_argument("--no-shrink", action="store_true", help="write programs as they were drawn")
    return parser.parse_args()


def _run(summary: Summary, seeds: range, seconds: float) -> None:
    mode, start_s = summary.mode, time.monotonic()
    print(f"{mode.name}: seeds from {seeds.start}", flush=True)
    with tempfile.TemporaryDirectory(prefix="fuzz") as folder:
        for seed in driver.run_seeds(mode, seeds, seconds, Path(folder), summary):
            program, found = summary.faults[-1]
            print(f"{found.status}: mode {mode.name}, seed {seed}: {program}", *found.told[:4], sep="\n  ", flush=True)
            print(f'  again: make fuzz ARGS="--mode {mode.name} --seed {seed}"', flush=True)
    print(f"{summary}\n  in {time.monotonic() - start_s:.0f} s", flush=True)


def _write(summary: Summary, scripts: Path, shrink: bool) -> None:
    """Scripts of all faults; the first few of them, of kinds of their own where that can be told, are shrunk."""
    seen = set()
    for program, found in summary.faults:
        new = found.status == "wrong" or (found.status == "crash" and found.signature not in seen)
        if shrink and new and len(seen) < driver.SHRUNK:
            seen.add((*found.signature, program) if found.status == "wrong" else found.signature)
            with tempfile.TemporaryDirectory(prefix="fuzz") as folder:
                program = driver.shrunk(summary.mode, program, Path(folder))
            print(f"{found.status}, shrunk: {program}")
        print(f"{found.status}: {driver.write_script(summary.mode, program, found, scripts)}", flush=True)


def main() -> int:
    given = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the worker is ended on the way
    modes = [MODES[name] for name in given.mode or MODES]
    count = given.programs or (10**6 if given.seed is None else 1)
    summaries = [Summary(mode) for mode in modes]
    for summary in summaries:
        first = given.seed if given.seed is not None else secrets.randbelow(10**9)
        _run(summary, range(first, first + count), 60 * given.minutes / len(modes))
        _write(summary, given.scripts, not given.no_shrink)
    return 1 if any(summary.faults for summary in summaries) else 0


if __name__ == "__main__":
    sys.exit(main())
