"""What the ranks of a job do together, for each shape of the world. A job runs the cases of several modules, for to
start one takes longer than most cases; of four at most, for a job's time is limited."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.mpi.ranks import run_cases
from tests.support.pairs import long

#: Ranks and devices of each.
World = tuple[int, int]

#: A module -> a world -> its cases there; all where none are named. What two ranks do with one device each is done by
#: others where it may differ.
CASES: dict[str, dict[World, tuple[str, ...]]] = {
    "global_cases": {
        (2, 1): (
            "check_methods",
            "check_a_model_against_the_oracle",
            "check_small_exchanges_are_messages_to_all",
            "check_state_in_place",
            "check_results_can_be_read",
            "check_results_of_steps",
            "check_large_results_are_told_of",
            "check_a_copy_of_the_state_is_whole_everywhere",
            "check_tables",
            "check_stacked_tables_whose_rows_wait",
            "check_init",
            "check_explain_and_verify",
            "check_rates_are_the_first_ones",
            "check_turns_are_measured_together",
            "check_batches_that_differ_later",
            "check_what_differs_between_processes",
            "check_a_mesh_of_ones_own",
            "check_a_mesh_with_two_axes",
        ),
        (2, 2): ("check_tables", "check_whole_tables", "check_a_mesh_with_two_axes", "check_inside_another_jit"),
        (3, 1): (
            "check_small_exchanges_are_messages_to_all",
            "check_what_differs_between_processes",
            "check_batches_that_the_devices_do_not_divide",
        ),
    },
    "evaluation_cases": {(2, 1): (), (2, 2): ("check_arguments_that_stay",)},
    "capacity_cases": {(2, 1): ()},
    "host_cases": {
        (2, 1): (
            "check_deferred",
            "check_results",
            "check_examples_that_are_handed_back",
            "check_init",
            "check_init_of_several_tables",
            "check_init_without_memory_for_a_whole_table",
            "check_nonfinite",
            "check_growth",
            "check_growth_beside",
            "check_once_per_row",
            "check_bytes_of_stacked_tables",
            "check_as_many_tables_as_categories",
            "check_shape_buckets",
            "check_whole_reads",
            "check_what_cannot_be",
            "check_loops_that_cannot_be",
            "check_ids_of_other_examples",
            "check_interactions",
            "check_a_branch_between_two_steps",
            "check_a_sum_over_examples_times_rows",
        ),
        (2, 2): (
            "check_growth_beside",
            "check_batches_that_devices_do_not_divide",
            "check_models_in_which_examples_meet",
        ),
        (3, 1): ("check_some_of_the_contract", "check_stacked_tables", "check_bytes_of_stacked_tables"),
    },
    "bag_cases": {(2, 1): (), (3, 1): ("check_bytes", "check_bags_of_several_machines")},
    "border_cases": {(2, 1): ()},
    "ahead_cases": {(2, 1): (), (3, 1): ("check_bytes", "check_other_numbers_of_rows")},
    "many_steps_cases": {(2, 1): ("check_some_steps",)},
    "switch_cases": {(2, 1): ()},
    "followed_cases": {(2, 1): ("check_some_are_followed",)},
    "dense_cases": {
        (2, 1): (),
        (2, 2): ("check_beside_a_table",),
        (3, 1): ("check_batches_that_ranks_do_not_divide", "check_the_state", "check_bytes"),
    },
    "pipeline_cases": {
        (2, 1): (
            "check_schedules",
            "check_runs_without_a_flush",
            "check_bytes_are_those_of_the_plan",
            "check_tables_by_their_rows",
        ),
        (2, 2): ("check_the_bits_are_those_of_one_process", "check_products_divided_within_stages"),
        (3, 1): ("check_states_without_a_flush", "check_what_is_refused"),
    },
    "shard_cases": {(2, 2): (), (3, 1): ()},
    "checkpointer_cases": {(2, 1): (), (2, 2): ("check_a_training_is_resumed",)},
    "replica_cases": {
        (2, 1): (),
        (2, 2): (
            "check_a_step_is_compiled_once",
            "check_all_plan_by_one_minibatch",
            "check_states_that_come_in_shards",
        ),
    },
    "means_cases": {(2, 1): ()},
    "served_cases": {(2, 1): ()},
    "piece_cases": {(2, 1): (), (2, 2): ("check_large_weights_of_a_centre_are_kept_by_all",)},
    "kvstore_cases": {(2, 1): ()},
    "ring_cases": {
        (2, 1): (),
        (2, 2): ("check_replays_have_the_same_bits",),
        (3, 1): ("check_odd_rings_are_refused",),
    },
    "resize_cases": {(2, 1): ()},
    "owner_cases": {
        (2, 1): ("check_whole_tables_beside_others", "check_bags_of_whole_tables", "check_states_of_whole_tables")
    },
}
#: The rest of the product.
MORE: dict[str, dict[World, tuple[str, ...]]] = {
    "global_cases": {
        (2, 1): (),
        (2, 2): (
            "check_methods",
            "check_results_can_be_read",
            "check_a_copy_of_the_state_is_whole_everywhere",
        ),
        (3, 1): ("check_methods",),
    },
    "evaluation_cases": {(2, 2): ("check_rows_that_are_read", "check_page", "check_the_page_of_evaluations_runs")},
    "capacity_cases": {(2, 2): ("check_growth",), (3, 1): ()},
    "host_cases": {
        (1, 1): (),
        (2, 1): (),
        (3, 1): (
            "check_contract",
            "check_deferred",
            "check_whole_reads",
            "check_results",
            "check_init",
            "check_init_of_several_tables",
            "check_nonfinite",
        ),
        (4, 1): (
            "check_contract",
            "check_once_per_row",
            "check_growth",
            "check_deferred_growth",
            "check_shape_buckets",
        ),
        (1, 2): ("check_contract", "check_results"),
        (2, 2): (
            "check_contract",
            "check_once_per_row",
            "check_init",
            "check_init_of_several_tables",
            "check_stacked_tables",
            "check_ids_of_other_examples",
        ),
        (3, 2): ("check_contract",),
        (4, 2): ("check_contract",),
    },
    "dense_cases": {(3, 1): ("check_optimizers",)},
    "bag_cases": {(3, 1): (), (4, 1): ()},
    "ahead_cases": {(2, 2): (), (3, 1): ()},
    "many_steps_cases": {(2, 1): ("check_many_steps",)},
    "switch_cases": {(1, 1): (), (3, 1): (), (4, 1): ("check_numbers", "check_bytes")},
    "owner_cases": {(3, 1): ()},
    "followed_cases": {world: ("check_all_are_followed",) for world in ((2, 1), (2, 2), (3, 1))},
    "pipeline_cases": {
        (2, 2): ("check_schedules", "check_the_state_of_divided_products"),
        (3, 1): (
            "check_schedules",
            "check_the_state",
            "check_the_state_of_stacked_layers",
            "check_runs_without_a_flush",
        ),
    },
    "resize_cases": {(2, 2): ("check_tables_over_processes",), (3, 1): ("check_tables_on_hosts", "check_restoring")},
    "shard_cases": {(2, 1): ()},
    "replica_cases": {(2, 2): (), (4, 1): ()},
    "kvstore_cases": {(3, 1): (), (4, 1): ()},
    "ring_cases": {(4, 1): ()},
    "served_cases": {(2, 2): ("check_workers_of_several_processes",), (3, 1): (), (4, 1): ()},
    "piece_cases": {
        (2, 2): ("check_large_leaves_are_kept_by_all", "check_tables_are_kept_by_all"),
        (3, 1): (),
        (4, 1): (),
    },
}


def _worlds(cases: dict[str, dict[World, tuple[str, ...]]]) -> list[Any]:
    found: dict[World, dict[str, tuple[str, ...]]] = {}
    for module, worlds in cases.items():
        for world, names in worlds.items():
            found.setdefault(world, {})[module] = names
    return [
        pytest.param(*world, dict(part), id=" ".join([f"{world[0]} ranks of {world[1]}:", *dict(part)]))
        for world, each in found.items()
        for start in range(0, len(each), 4)
        for part in [list(each.items())[start : start + 4]]
    ]


@pytest.mark.parametrize(("ranks", "devices", "cases"), _worlds(CASES))
def test_ranks(ranks: int, devices: int, cases: dict[str, tuple[str, ...]], tmp_path: Path) -> None:
    run_cases(cases, ranks, devices, tmp_path, timeout_s=1200)


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "devices", "cases"), _worlds(MORE))
def test_more_of_ranks(ranks: int, devices: int, cases: dict[str, tuple[str, ...]], tmp_path: Path) -> None:
    run_cases(cases, ranks, devices, tmp_path, timeout_s=1200)


def test_interrupts(tmp_path: Path) -> None:
    """Two ranks that are interrupted at random times, each for itself, go on training together."""
    run_cases({"interrupt_cases": ()}, 2, 1, tmp_path, timeout_s=200)


@pytest.mark.parametrize("devices", [1, long(2)])
def test_several_machines(devices: int, tmp_path: Path) -> None:
    """Four ranks as on two machines: rows go by way of node leaders."""
    names = (
        "check_leaders",
        "check_without_leaders",
        "check_init_of_several_tables",
        "check_growth" if devices == 1 else "check_results",
        "check_nothing_is_asked_for_ahead",
    )
    run_cases({"machine_cases": names}, 4, devices, tmp_path, timeout_s=400)


@pytest.mark.long
def test_the_contract_on_several_machines(tmp_path: Path) -> None:
    run_cases({"machine_cases": ("check_contract", "check_results")}, 4, 1, tmp_path, timeout_s=400)


@pytest.mark.parametrize(("ranks", "devices"), [long(2, 1), (2, 2)])
def test_detected_clusters(ranks: int, devices: int, tmp_path: Path) -> None:
    run_cases({"detect_cases": ()}, ranks, devices, tmp_path)
