"""Steps on a mesh over several processes: the cases of `global_cases.py`, once per shape of the world."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.mpi.ranks import run_cases

#: Ranks and devices of each -> cases; all where none are named.
WORLDS = {
    (2, 1): (),
    (2, 2): ("check_tables", "check_a_mesh_with_two_axes"),
    (3, 1): ("check_methods", "check_what_differs_between_processes"),
}
#: The rest of the product.
MORE = {(2, 2): ("check_methods", "check_results_can_be_read", "check_growth"), (3, 1): ("check_growth",)}


@pytest.mark.parametrize("world", WORLDS, ids=lambda w: f"{w[0]} ranks, {w[1]} devices each")
def test_global(world: tuple[int, int], tmp_path: Path) -> None:
    run_cases("global_cases", *world, WORLDS[world], tmp_path, timeout_s=500)


@pytest.mark.long
@pytest.mark.parametrize("world", MORE, ids=lambda w: f"{w[0]} ranks, {w[1]} devices each")
def test_more_of_global(world: tuple[int, int], tmp_path: Path) -> None:
    run_cases("global_cases", *world, MORE[world], tmp_path, timeout_s=500)
