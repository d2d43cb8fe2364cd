"""`world` and `job`: this process's rank among the processes that an MPI launcher started.

The last processes of a job may be dedicated servers (`AUTOPAR_SERVERS`), which run nothing of the user's script: `job`
has all processes, and `world` the workers alone, with the same numbers.

MPI is started by the first call, and only under a launcher; otherwise a process is a world of one, and imports nothing.
All of autopar's own messages travel on a communicator of their own, and can't meet the user's.

Launchers number their processes in environment variables, which differ. A process without any was started by hand. A
child of a rank (a data loader's worker) inherits the variables, but must not take part in MPI under its parent's
number: ranks therefore leave their process id in the environment (`claim`).
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from autopar.errors import LaunchError
from autopar.jax_types import Comm

#: (variable of the rank, variable of the number of ranks if there is one, launcher). The first that is set counts.
LAUNCHERS: tuple[tuple[str, str | None, str], ...] = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "Open MPI's mpirun"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MVAPICH's mpirun"),
    ("PMI_RANK", "PMI_SIZE", "hydra (mpich's or Intel's mpiexec), or srun --mpi=pmi2"),
    ("PALS_RANKID", None, "PALS (HPE Cray's mpiexec)"),
    ("PMIX_RANK", None, "a PMIx launcher (srun --mpi=pmix, prterun)"),
)

#: "off": the process ignores its launcher.
OFF_VARIABLE = "AUTOPAR_MPI"

#: Number of dedicated servers, the last ranks; 0 or unset: none.
SERVERS_VARIABLE = "AUTOPAR_SERVERS"

#: Number of clients for a `sync=` that doesn't say it, or "machines": one on each. Unset: every process is one.
CLIENTS_VARIABLE = "AUTOPAR_CLIENTS"

#: The process id of the rank, by which its children see that they are none.
RANK_PID_VARIABLE = "AUTOPAR_RANK_PID"


@dataclass(frozen=True)
class Launched:
    """A launcher's data on a process: its rank, the number of ranks (None: not given), and the launcher's name."""

    rank: int
    size: int | None
    launcher: str


def launched(environment: Mapping[str, str] = os.environ) -> Launched | None:
    """Returns this process's data of its launcher; None if it is no rank of an MPI launcher."""
    if is_off_or_child(environment):
        return None
    for rank, size, launcher in LAUNCHERS:
        if environment.get(rank, "").isdigit():
            if size is None and environment.get("PMIX_NAMESPACE", "").startswith("slurm."):
                size = "SLURM_STEP_NUM_TASKS"
            count = environment.get(size, "") if size else ""
            return Launched(int(environment[rank]), int(count) if count.isdigit() else None, launcher)
    return None


def claim() -> None:
    """Records that this process is the rank, and none of its children."""
    os.environ[RANK_PID_VARIABLE] = str(os.getpid())


def is_off_or_child(environment: Mapping[str, str]) -> bool:
    """Says whether this process takes no part in a job: it was told to ignore one, or is a rank's child."""
    owner = environment.get(RANK_PID_VARIABLE, "")
    is_child = multiprocessing.parent_process() is not None or owner not in ("", str(os.getpid()))
    return is_child or environment.get(OFF_VARIABLE, "").lower() == "off"


@dataclass(frozen=True)
class World:
    """Some processes of a job.

    Attributes:
      rank, size: The number of this process, from 0, and the number of processes.
      comm: Their own `mpi4py.MPI.Intracomm`; None without a launcher.
      servers: How many of them, the last ones, are dedicated servers.
    """

    rank: int
    size: int
    comm: Comm
    servers: int = 0

    @property
    def workers(self) -> int:
        """The number of processes that run the user's script."""
        return self.size - self.servers

    @property
    def is_server(self) -> bool:
        return self.rank >= self.workers


@functools.cache
def world() -> World:
    """Returns the workers of this process's job; a dedicated server gets the servers.

    Starts MPI under an MPI launcher (collective); without one it is `World(0, 1, None)`, and mpi4py isn't imported.
    Errors as for `job`.
    """
    here = job()
    if not here.servers:
        return here
    comm = here.comm.Split(int(here.is_server), here.rank)
    return World(comm.Get_rank(), comm.Get_size(), comm)


@functools.cache
def job() -> World:
    """Returns all processes of this process's job, including dedicated servers. Collective, as `world`. Raises
    LaunchError if mpi4py is missing, or belongs to another MPI than the launcher; or if there are no more ranks than
    servers."""
    started = launched()
    mpi = None if started is None else _start_mpi(started)
    if mpi is None:
        return World(0, 1, None)
    comm = mpi.COMM_WORLD.Dup()
    return World(comm.Get_rank(), comm.Get_size(), comm, _dedicated_servers(comm.Get_size()))


def _dedicated_servers(size: int) -> int:
    text = os.environ.get(SERVERS_VARIABLE, "") or "0"
    if not text.isdecimal():
        raise LaunchError(f"{SERVERS_VARIABLE}={text!r} is no number of servers")
    if int(text) >= size:
        raise LaunchError(
            f"{SERVERS_VARIABLE}={text} of {size} ranks: the last ones are servers, and one at least must be left to "
            "train"
        )
    return int(text)


def _start_mpi(started: Launched) -> Any | None:
    """Returns the module `mpi4py.MPI`, initialised for calls from several threads; None if none is needed."""
    try:
        import mpi4py
    except ImportError as error:
        if started.size == 1:
            return None
        raise LaunchError(
            f"rank {started.rank} was started by {started.launcher}, but mpi4py is not installed: "
            "pip install 'autopar[mpi]'. (If it is to run by itself, set AUTOPAR_MPI=off)"
        ) from error
    mpi4py.rc.threads = True
    mpi4py.rc.thread_level = "multiple"
    claim()
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"rank {started.rank} was started by {started.launcher}, but mpi4py finds no MPI library ({error}). "
            "pip install 'autopar[mpi]' brings one; a system's own MPI must be on LD_LIBRARY_PATH"
        ) from error
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    size = MPI.COMM_WORLD.Get_size()
    if started.size not in (None, size) or started.rank >= size:
        library = MPI.Get_library_version().splitlines()[0].strip()
        raise LaunchError(
            f"rank {started.rank} is one of {started.size or 'more'} for its launcher, {started.launcher}, but one of "
            f"{size} for mpi4py, which uses {library}: launcher and library belong to different "
            "MPIs. Start it with the mpiexec of the same MPI (python -m autopar launch takes the mpich wheel's)"
        )
    return MPI


# --- processes of one job that don't see each other: each would train by itself, on the whole batch, in silence ---
#
# They are found when a step is planned. An import is too early: the user may connect JAX's processes after it, and a
# script that only prints its `--help` needs no job.


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
