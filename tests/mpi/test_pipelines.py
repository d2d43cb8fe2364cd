"""Stages on several ranks: the cases of `pipeline_cases.py`; and a rank that is killed in a step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.mpi.jobs import Run
from tests.support.mpi.ranks import run_cases

#: Ranks and devices of each -> cases; all where none are named.
WORLDS = {
    (2, 1): ("check_schedules", "check_bytes_are_those_of_the_plan", "check_tables_by_their_rows"),
    (2, 2): (
        "check_schedules",
        "check_the_bits_are_those_of_one_process",
        "check_products_divided_within_stages",
        "check_the_state_of_divided_products",
    ),
    (3, 1): ("check_schedules", "check_the_state", "check_the_state_of_stacked_layers", "check_what_is_refused"),
}


@pytest.mark.parametrize("world", WORLDS, ids=lambda w: f"{w[0]} ranks, {w[1]} devices each")
def test_pipelines(world: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_cases("pipeline_cases", *world, WORLDS[world], tmp_path, timeout_s=300)


def test_a_killed_rank_is_named(launch: Run) -> None:
    job = launch(
        ["-n", "2"],
        """
        import os, signal
        import autopar, jax, optax
        from tests.support.microbatched import batch, language_model

        step, make = language_model(optax.sgd(0.1))
        planned, state = autopar.parallelize(step, pipeline=autopar.Pipeline(2, microbatches=4)), make()
        for k in range(6):
            if k == 4 and jax.process_index() == 1:
                print("fault", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            state, _ = planned(state, batch(k))
        """,
        timeout_s=90,
    )
    assert job.code not in (0, None), job.output
    assert "rank 1" in job.output and "SIGKILL" in job.output, job.output
    assert job.ended_s is not None and job.ended_s < 15, job.output
