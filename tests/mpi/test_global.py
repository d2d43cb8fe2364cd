"""Steps on a mesh over several processes: the cases of `global_cases.py`, once per shape of the world."""

from __future__ import annotations

import pytest

from .global_ranks import run_ranks

#: Ranks and devices of each -> cases; all where none are named.
WORLDS = {
    (2, 1): (),
    (2, 2): ("check_methods", "check_results_can_be_read", "check_growth", "check_tables", "check_init"),
    (3, 1): ("check_methods", "check_growth", "check_what_differs_between_processes", "check_batch_norm"),
}


@pytest.mark.parametrize("world", WORLDS, ids=lambda w: f"{w[0]} ranks, {w[1]} devices each")
def test_global(world: tuple[int, int]) -> None:
    ranks, devices = world
    command = ["tests/mpi/worker.py", "tests.mpi.global_cases", str(devices), *WORLDS[world]]
    run_ranks(ranks, command, timeout_s=280)
