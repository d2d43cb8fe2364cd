"""Finds processes of one job that don't see each other: each would train by itself, on the whole batch, in silence.

They are found when a step is planned. An import is too early: the user may connect JAX's processes after it, and a
script that only prints its `--help` needs no job.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping

import jax

from autopar.errors import LaunchError
from autopar.mpi.world import OFF_VARIABLE, is_off_or_child, launched, world

#: Launchers that leave it to processes to connect: (variable of their number, variable of this one's number, what
#: connects them without MPI). Only a step's variables are srun's: a batch script and a Python in an interactive shell
#: have those of Slurm's job (SLURM_NTASKS), too, and are alone.
STARTERS = (
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "jax.distributed.initialize()"),
    (
        "JAX_NUM_PROCESSES",
        "JAX_PROCESS_ID",
        "jax.distributed.initialize(num_processes=int(os.environ['JAX_NUM_PROCESSES']), "
        "process_id=int(os.environ['JAX_PROCESS_ID']))",
    ),
)


def check_connected(name: str, environment: Mapping[str, str] = os.environ) -> None:
    """Checks that this process knows of others that were started with it, or raises LaunchError, which says how to
    start them."""
    if is_off_or_child(environment) or launched(environment) is not None or jax.process_count() > 1:
        return
    for count, number, by_jax in STARTERS:
        text = environment.get(count, "")
        if text.isdigit() and int(text) > 1:
            raise LaunchError(
                f"{name}: {count} is {text}, but nothing connects this process, number {environment.get(number, '?')}, "
                f"with the others: each would train by itself. Start them by MPI: {_mpi_commands(int(text))}. Or "
                f"connect them by {by_jax} at the top of the script. If each is to train by itself, set "
                f"{OFF_VARIABLE}=off"
            )


def check_ranks(name: str, what: str, instead: str) -> None:
    """Checks that JAX's processes are ranks of an MPI job, or raises LaunchError. `what` needs MPI; `instead` needs
    none."""
    count = jax.process_count()
    if count > world().size:
        off = f", without {OFF_VARIABLE}=off" * (OFF_VARIABLE in os.environ)
        raise LaunchError(
            f"{name}: {what} need MPI, but these {count} processes are connected by jax.distributed alone. Start them "
            f"by MPI{off}: {_mpi_commands(count)}; importing autopar then connects JAX's processes, too. Or {instead}"
        )


def _mpi_commands(count: int) -> str:
    script = "python train.py" if "-c" in sys.orig_argv else shlex.join(sys.orig_argv)
    return (
        f"`mpirun -n {count} {script}` (pip install 'autopar[mpi]' brings mpirun), or under Slurm "
        f"`srun --mpi=pmi2 -n {count} {script}` (`srun --mpi=list` shows what else there is, such as pmix)"
    )
