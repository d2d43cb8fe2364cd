"""A process (or a rank) that runs programs: `python -m tests.fuzz.worker MODE FILE COMMAND ...`, started by `driver`.

It appends a line of JSON to FILE when it begins a program, and one when it is done.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from tests.fuzz.check import FAULTS, Outcome, outcome
from tests.fuzz.modes import MODES, Mode
from tests.fuzz.program import Program, draw, shrunk

#: Of so many programs in which no table lifts one is run all the same.
DENSE_EVERY = 40
#: Programs after which JAX's caches are emptied.
CLEARED_EVERY = 20


def _agreed(mode: Mode) -> Callable[[Outcome], Outcome]:
    """Makes of what each rank found what the job found: the first fault, or what rank 0 has."""
    if mode.ranks == 1:
        return lambda mine: mine
    from mpi4py import MPI

    def agree(mine: Outcome) -> Outcome:
        all_ranks = MPI.COMM_WORLD.allgather(mine)
        return next((found for found in all_ranks if found.status in FAULTS), all_ranks[0])

    return agree


def _rank(mode: Mode) -> int:
    if mode.ranks == 1:
        return 0
    from mpi4py import MPI

    return MPI.COMM_WORLD.rank


class _Runner:
    def __init__(self, mode: Mode, file: Path) -> None:
        self.mode, self.file, self.rank, self.agree = mode, file, _rank(mode), _agreed(mode)
        self.count = 0

    def tell(self, **line: Any) -> None:
        if self.rank == 0:
            with self.file.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def run(self, program: Program, *, dense: bool) -> Outcome:
        self.tell(begin=program.seed)
        start_s = time.monotonic()
        found = self.agree(outcome(program, self.file.parent, dense=dense))
        self.tell(seed=program.seed, seconds=time.monotonic() - start_s, **dataclasses.asdict(found))
        self.count += 1
        if self.count % CLEARED_EVERY == 0:
            jax.clear_caches()
        return found

    def seeds(self, first: int, last: int) -> None:
        for seed in range(first, last):
            self.run(draw(seed, self.mode), dense=seed % DENSE_EVERY == 0)

    def shrink(self, program: Program) -> None:
        """Tell ever smaller programs that fail in the same way."""
        wanted = self.run(program, dense=True).signature
        for smaller in shrunk(program, lambda p: self.run(p, dense=True).signature == wanted):
            self.tell(smaller=dataclasses.asdict(smaller))


def main(mode: str, file: str, command: str, *rest: str) -> None:
    runner = _Runner(MODES[mode], Path(file))
    if command == "seeds":
        runner.seeds(int(rest[0]), int(rest[1]))
    else:
        runner.shrink(Program.read(json.loads(Path(rest[0]).read_text())))


if __name__ == "__main__":
    main(*sys.argv[1:])
