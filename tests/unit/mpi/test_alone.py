"""Processes that were started together and don't know of each other."""

from __future__ import annotations

import os
from collections.abc import Callable

import jax.numpy as jnp
import pytest

import autopar
from autopar.mpi.world import check_connected

_STEP = {"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2"}
_KUBEFLOW = {"JAX_COORDINATOR_ADDRESS": "job-0:1234", "JAX_NUM_PROCESSES": "3", "JAX_PROCESS_ID": "1"}


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (_STEP, r"SLURM_STEP_NUM_TASKS is 4, .* number 2, .*`srun --mpi=pmi2 -n 4 .*AUTOPAR_MPI=off"),
        (_KUBEFLOW, r"JAX_NUM_PROCESSES is 3, .* number 1, .*`mpirun -n 3 .*process_id=int\(os.environ"),
    ],
)
def test_one_of_several_that_knows_of_none(
    variables: dict[str, str], message: str, environment: Callable[..., None]
) -> None:
    environment(**variables)
    step = autopar.parallelize(lambda w, x: (w - x.sum(), x.mean()))
    with pytest.raises(autopar.LaunchError, match=message):
        step(jnp.ones(3), jnp.ones(3))
    environment(AUTOPAR_MPI="off")
    step(jnp.ones(3), jnp.ones(3))


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"},  # A batch script, or a shell of salloc.
        {**_STEP, "SLURM_STEP_NUM_TASKS": "1"},  # A shell that salloc starts by srun.
        {**_STEP, "PMI_RANK": "2", "PMI_SIZE": "4"},  # srun --mpi=pmi2, or Hydra, which starts its proxies by srun.
        {**_STEP, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},  # Open MPI, whose daemons srun starts.
        {**_STEP, "AUTOPAR_RANK_PID": "1"},  # A child of a rank.
        {**_KUBEFLOW, "JAX_NUM_PROCESSES": "1"},
    ],
)
def test_processes_that_are_no_fault(variables: dict[str, str]) -> None:
    check_connected("step", variables)
    assert "AUTOPAR_RANK_PID" not in os.environ, "nobody has claimed to be a rank"
