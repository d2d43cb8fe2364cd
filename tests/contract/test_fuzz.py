"""Random programs whose seeds are always the same, a few; and what makes of fresh ones a script (`make fuzz`)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar import jax_compat
from tests.fuzz import pieces, sessions, updates
from tests.fuzz.check import outcome
from tests.fuzz.modes import MODES
from tests.fuzz.program import Program, draw, shrunk
from tests.fuzz.script import script_of
from tests.support.fuzzed import check_sample


@pytest.mark.parametrize("mode", ["one", "one-host"])
def test_random_sessions(mode: str, tmp_path: Path) -> None:
    check_sample(mode, tmp_path)


@pytest.mark.parametrize("mode", ["one", "optimised"])
def test_this_jax_starts_with_what_a_mode_sets(mode: str) -> None:
    environment = {**os.environ, **MODES[mode].environment}
    subprocess.run([sys.executable, "-c", "import jax; jax.devices()"], env=environment, check=True, timeout=120)


def test_a_planned_step_that_is_off_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parallelize = autopar.parallelize

    def wrongly(fun: Callable[..., Any], **options: Any) -> Any:
        def wrong(state: Any, batch: Any) -> Any:
            return jax.tree.map(lambda x: x * (1 + 1e-7) if jnp.issubdtype(x.dtype, float) else x, fun(state, batch))

        return parallelize(wrong, **options)

    program = Program(events=("step",))
    with jax_compat.enable_x64():
        assert outcome(program, tmp_path, dense=True).status == "ok"
        monkeypatch.setattr(autopar, "parallelize", wrongly)
        found = outcome(program, tmp_path, dense=True)
    assert found.status == "wrong" and any("table0" in told for told in found.told)


def test_what_a_fault_needs_not_is_taken_back() -> None:
    program = next(
        p for p in (draw(seed, MODES["devices"]) for seed in range(10**4)) if p.writes and "doubled" in p.results
    )
    *_, last = shrunk(program, lambda p: bool(p.writes) and "doubled" in p.results)
    assert last == Program(seed=program.seed, writes=last.writes, results=("doubled",)) and len(last.writes) == 1


def test_a_seed_is_one_program_in_every_process() -> None:
    """Ranks have hash seeds of their own, and a seed that failed is run again by another process."""
    draws = """
from tests.fuzz.modes import MODES
from tests.fuzz.program import draw
from tests.fuzz.script import text_of
for seed in range(200):
    print(program := draw(seed, MODES["hosts"]), text_of(program) if seed < 10 else "")
"""
    told = [
        subprocess.run(
            [sys.executable, "-c", draws],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert told[0] == told[1] and told[0].count(b"\n") > 1_000


def test_scripts_of_all_pieces_are_programs() -> None:
    mode = MODES["hosts"]
    several = {pieces: ("CHAIN", "TRANSFORMS"), updates: ("WRITES", "RESULTS", "KEPT"), sessions: ("EVENTS",)}
    for module, name in ((module, name) for module, names in several.items() for name in names):
        everything = {name.lower(): tuple(getattr(module, name))}
        compile(script_of(Program(**everything), mode, "nothing"), name, "exec")
    for seed in range(20):
        compile(script_of(draw(seed, mode), mode, "nothing"), "drawn", "exec")
