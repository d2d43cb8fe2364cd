"""Runs programs in processes of their own, which may die or hang; and shrinks what fails to a script."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fuzz.check import FAULTS, Outcome
from tests.fuzz.modes import Mode
from tests.fuzz.program import Program, draw
from tests.fuzz.script import script_of

ROOT = Path(__file__).parents[2]
#: Seconds after which a program hangs, those of a process's start included; and seconds spent on shrinking one.
HANGS_AFTER_S, SHRINKING_S = 180.0, 240.0
#: Faults of one mode that are shrunk; of those after them the seed is printed.
SHRUNK = 4


@dataclass
class Summary:
    """What became of the programs of a mode."""

    mode: Mode
    counts: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    #: Programs that fail, and how.
    faults: list[tuple[Program, Outcome]] = field(default_factory=list)

    def __str__(self) -> str:
        told = ", ".join(f"{count} {status}" for status, count in self.counts.most_common())
        refused = "".join(f"\n  {count} times refused: {why}" for why, count in self.refusals.most_common(8))
        return f"{self.mode.name}: {sum(self.counts.values())} programs: {told}{refused}"


def _command(mode: Mode, arguments: Sequence[str]) -> list[str]:
    own = [sys.executable, "-m", "tests.fuzz.worker", mode.name, *arguments]
    if mode.ranks == 1:
        return own
    beside = Path(sys.executable).with_name("mpiexec")
    ranks = [str(beside) if beside.exists() else "mpiexec", "-n", str(mode.ranks)]
    return [*ranks, sys.executable, "-m", "mpi4py.run", *own[1:]]


@contextlib.contextmanager
def _started(mode: Mode, folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A worker, and the file that it writes to; whatever is left of it is killed."""
    told, output = folder / "told", folder / "output"
    told.write_text("")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    own = {"TMPDIR": str(folder), "XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": os.pathsep.join(sys.path)}
    with output.open("wb") as file:
        process = subprocess.Popen(
            _command(mode, [str(told), *arguments]),
            cwd=ROOT,
            env={**kept, **own, **mode.environment},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
        try:
            yield process, told
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _lines(process: subprocess.Popen[bytes], told: Path, end_s: float) -> Iterator[dict[str, Any]]:
    """What a worker tells, until it ends or the time is up. Silence for too long is a line, {"silent": True}."""
    heard_s, read = time.monotonic(), 0
    while True:
        ended = process.poll() is not None
        complete = told.read_text().split("\n")[read:-1]
        for line in complete:
            heard_s, read = time.monotonic(), read + 1
            yield json.loads(line)
        if time.monotonic() > end_s or (ended and not complete):
            return
        if time.monotonic() - heard_s > HANGS_AFTER_S:
            yield {"silent": True}
            return
        time.sleep(0.05)


def run_seeds(mode: Mode, seeds: range, seconds: float, folder: Path, summary: Summary) -> Iterator[int]:
    """Run the programs of these seeds until the time is up; yields the seed of each that fails."""
    end_s = time.monotonic() + seconds
    first = seeds.start
    while first < seeds.stop and time.monotonic() < end_s:
        begun, silent = None, False
        with _started(mode, folder, "seeds", str(first), str(seeds.stop)) as (process, told):
            for line in _lines(process, told, end_s):
                silent = "silent" in line
                if "begin" in line:
                    begun = line["begin"]
                elif "seed" in line:
                    begun, first = None, line["seed"] + 1
                    found = Outcome(line["status"], tuple(line["told"]), line["place"])
                    yield from _note(summary, line["seed"], found)
            code = process.poll()
        if silent or (code is not None and first < seeds.stop):
            tail = tuple((folder / "output").read_text(errors="replace").splitlines()[-3:])
            if begun is None:
                raise RuntimeError("a worker ended before its first program:\n" + "\n".join(tail))
            yield from _note(summary, begun, Outcome("hang" if silent else "died", tail))
            first = begun + 1


def _note(summary: Summary, seed: int, found: Outcome) -> Iterator[int]:
    summary.counts[found.status] += 1
    if found.status == "refused":
        summary.refusals[found.told[0].split("(")[0][:100]] += 1
    if found.status in FAULTS:
        summary.faults.append((draw(seed, summary.mode), found))
        yield seed


def shrunk(mode: Mode, program: Program, folder: Path) -> Program:
    """The plainest program found in a while that fails in the same way."""
    wanted = folder / "program.json"
    wanted.write_text(json.dumps(dataclasses.asdict(program)))
    with _started(mode, folder, "shrink", str(wanted)) as (process, told):
        for line in _lines(process, told, time.monotonic() + SHRINKING_S):
            if "smaller" in line:
                program = Program.read(line["smaller"])
    return program


def write_script(mode: Mode, program: Program, found: Outcome, scripts: Path) -> Path:
    """The program as a file that shows the fault when it is run."""
    scripts.mkdir(parents=True, exist_ok=True)
    path = scripts / f"{mode.name}_{program.seed}.py"
    path.write_text(script_of(program, mode, f"Found: {found.status}. " + " ".join(found.told[:3])))
    return path
