"""The first few random programs of a mode, in this process: the small sample of `make fuzz` that `make test` has."""

from __future__ import annotations

import itertools
from pathlib import Path

from autopar import jax_compat
from tests.fuzz.check import FAULTS, outcome
from tests.fuzz.modes import MODES
from tests.fuzz.program import draw

#: Programs that are run of each mode; those in which no table lifts, or that are refused, don't count.
SAMPLE = 3


def check_sample(mode: str, folder: Path, first: int = 0) -> None:
    done = 0
    for seed in itertools.count(first):
        program = draw(seed, MODES[mode])
        with jax_compat.enable_x64():
            found = outcome(program, folder)
        assert found.status not in FAULTS, f'make fuzz ARGS="--mode {mode} --seed {seed}"\n{program}\n{found}'
        done += found.status in ("ok", "sensitive")
        if done == SAMPLE:
            return
