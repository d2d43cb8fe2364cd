"""`world`: this process's place among the processes that an MPI launcher started.

MPI is started by the first call, and only under a launcher; by itself, a process is a world of one, and imports
nothing. All of autopar's own messages travel on a communicator of their own, so that they can't meet the user's.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from autopar.errors import LaunchError
from autopar.mpi.launchers import Launched, claim, launched


@dataclass(frozen=True)
class World:
    """The processes of a job.

    Attributes:
      rank: The number of this process, from 0.
      size: How many there are.
      comm: An `mpi4py.MPI.Intracomm`, a duplicate of COMM_WORLD; None without a launcher.
    """

    rank: int
    size: int
    comm: Any


@functools.cache
def world() -> World:
    """The world of this process. Starts MPI under an MPI launcher (collectively: every rank must call it).

    Returns:
      `World(0, 1, None)` without a launcher, where no MPI is started and mpi4py isn't imported.

    Raises:
      LaunchError: mpi4py is missing, or belongs to another MPI than the launcher.
    """
    started = launched()
    mpi = None if started is None else _start_mpi(started)
    if mpi is None:
        return World(0, 1, None)
    comm = mpi.COMM_WORLD.Dup()
    return World(comm.Get_rank(), comm.Get_size(), comm)


def _start_mpi(started: Launched) -> Any | None:
    """The module `mpi4py.MPI`, MPI being initialised for calls from several threads; None if none is needed."""
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
    if started.size not in (None, MPI.COMM_WORLD.Get_size()):
        library = MPI.Get_library_version().splitlines()[0].strip()
        raise LaunchError(
            f"rank {started.rank} is one of {started.size} for its launcher, {started.launcher}, but one of "
            f"{MPI.COMM_WORLD.Get_size()} for mpi4py, which uses {library}: launcher and library belong to different "
            "MPIs. Start it with the mpiexec of the same MPI (python -m autopar launch takes the mpich wheel's)"
        )
    return MPI
