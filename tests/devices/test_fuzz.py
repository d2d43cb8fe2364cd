"""Random programs on several devices whose seeds are always the same, a few, and those in which there were faults;
`make fuzz` runs fresh ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar import jax_compat
from tests.fuzz.check import outcome
from tests.fuzz.program import Program
from tests.support.fuzzed import check_sample


@pytest.mark.parametrize("mode", ["devices", "stages"])
def test_random_sessions(mode: str, tmp_path: Path) -> None:
    check_sample(mode, tmp_path)


@pytest.mark.parametrize(
    "program",
    [
        Program(pipeline=("spectrain", 2, 0), results=("the table",)),  # a result that is a version
        Program(pipeline=("stash", 2, 0), gradient="counted loop"),  # a loop's constant beside its sums
        Program(pipeline=("async", 2, 0), events=("another planned step",)),  # nothing is returned but the state
        Program(pipeline=("async", 2, 0), call="params, rest, batch", events=("another planned step",)),
        Program(pipeline=("1f1b", 2, None), gradient="one after the other", optimizer="zero nans"),  # two joins of one
        Program(pipeline=("spectrain", 2, 0), guard="where finite"),  # two programs of a stage tell the loss
        Program(pipeline=("spectrain", 1, 0), where="table in a branch"),  # a branch in two programs
    ],
    ids=str,
)
def test_faults_that_were_found(program: Program, tmp_path: Path) -> None:
    with jax_compat.enable_x64():
        found = outcome(program, tmp_path)
    assert found.status == "ok", found
