"""Steps with tables in host memory: the cases of `host_cases.py`, once per shape of the world."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.mpi.ranks import run_cases

#: Ranks and devices of each -> cases. What two ranks do with one device each is done by others where it may differ.
WORLDS = {
    (2, 1): (
        "check_some_of_the_contract",
        "check_deferred",
        "check_results",
        "check_init",
        "check_nonfinite",
        "check_growth",
        "check_once_per_row",
        "check_shape_buckets",
        "check_whole_reads",
        "check_what_cannot_be",
        "check_loops_that_cannot_be",
        "check_ids_of_other_examples",
        "check_a_branch_between_two_steps",
        "check_a_sum_over_examples_times_rows",
    ),
    (3, 1): ("check_some_of_the_contract", "check_results", "check_init", "check_nonfinite"),
    (2, 2): (
        "check_some_of_the_contract",
        "check_batches_that_devices_do_not_divide",
        "check_ids_of_other_examples",
    ),
}
#: The product: every pair of a world, a model and an optimizer.
ALL = {
    (1, 1): (),
    (2, 1): (),
    (3, 1): ("check_contract", "check_deferred", "check_whole_reads"),
    (4, 1): ("check_contract", "check_once_per_row", "check_growth", "check_deferred_growth", "check_shape_buckets"),
    (1, 2): ("check_contract", "check_results"),
    (2, 2): ("check_contract", "check_once_per_row", "check_init"),
    (3, 2): ("check_contract",),
    (4, 2): ("check_contract",),
}


def told(world: tuple[int, int]) -> str:
    return f"{world[0]} ranks, {world[1]} devices each"


@pytest.mark.parametrize("world", WORLDS, ids=told)
def test_hosts(world: tuple[int, int], tmp_path: Path) -> None:
    run_cases("host_cases", *world, WORLDS[world], tmp_path, timeout_s=400)


@pytest.mark.long
@pytest.mark.parametrize("world", ALL, ids=told)
def test_all_of_hosts(world: tuple[int, int], tmp_path: Path) -> None:
    run_cases("host_cases", *world, ALL[world], tmp_path, timeout_s=600)


def test_interrupts(tmp_path: Path) -> None:
    """Two ranks that are interrupted at random times, each for itself, go on training together."""
    run_cases("interrupt_cases", 2, 1, (), tmp_path, timeout_s=200)


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.long)])
def test_several_machines(devices: int, tmp_path: Path) -> None:
    """Four ranks as on two machines: rows go by way of node leaders."""
    names = ("check_leaders", "check_results", "check_growth", "check_contract")
    run_cases("machine_cases", 4, devices, names if devices == 1 else names[:2], tmp_path, timeout_s=400)
