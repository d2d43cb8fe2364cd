"""`bind`: keeps each rank on one core, where the ranks of a machine take all its cores and nobody has bound them.

Launchers differ: srun and Open MPI's mpirun bind ranks as a rule, mpich's mpirun doesn't. Ranks that aren't bound sleep
while they wait for each other, and a core on which all of them do so comes back late (`mpi/waiting.py`). Smaller jobs
aren't bound: two of them on one machine would both get its first cores.

Linux binds threads, not processes, and a new thread is bound as its maker was. So this happens before JAX's backend
makes its threads, and those that are there already are bound by their numbers. A BLAS library has started as many as it
saw cores; they would now take turns on one, so it is told to use one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autopar.errors import LaunchError
from autopar.launch.notices import LOG
from autopar.mpi.limits import machine_name
from autopar.mpi.world import World

#: "core": each rank keeps to one, however many there are. "none": none does. Unset: where they take all cores.
BIND_VARIABLE = "AUTOPAR_BIND"


@dataclass(frozen=True)
class Bindable:
    """Says what counts of a rank.

    Attributes:
      machine: Where it runs.
      cores: Those that it may run on.
      computes_on_one: Whether one core is all that it computes on by itself.
    """

    machine: str
    cores: frozenset[int]
    computes_on_one: bool


def bind(here: World, *, computes_on_one: bool) -> None:
    """Binds this process to a core, if its machine's ranks are to be bound. Collective.

    Args:
      here: All processes of the job.
      computes_on_one: Whether this rank has one device, a CPU.

    Raises:
      LaunchError: `AUTOPAR_BIND` is neither "core" nor "none".
    """
    wish = os.environ.get(BIND_VARIABLE, "")
    if wish not in ("", "core", "none"):
        raise LaunchError(f"{BIND_VARIABLE}={wish!r} is neither core nor none")
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_setaffinity") else ()
    ranks = here.comm.allgather(Bindable(machine_name(), frozenset(cores), computes_on_one))
    core = choose_core(ranks, here.rank, always=wish == "core")
    if core is None or wish == "none":
        return
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(thread.name), {core})
    with contextlib.suppress(ImportError):
        from threadpoolctl import threadpool_limits

        threadpool_limits(1)
    if here.rank == 0:
        LOG.info("each rank keeps to one core, as they take all of them (%s=none: not)", BIND_VARIABLE)


def choose_core(ranks: Sequence[Bindable], rank: int, *, always: bool = False) -> int | None:
    """Returns the core that a rank is to keep to; None if it isn't to be bound.

    Args:
      ranks: All ranks of the job.
      rank: This one.
      always: Whether each keeps to a core even if they don't take all.
    """
    own = ranks[rank]
    beside = [number for number, other in enumerate(ranks) if other.machine == own.machine]
    are_free = len(own.cores) > 1 and all(ranks[number].cores == own.cores for number in beside)
    fill = len(beside) >= len(own.cores) and all(ranks[number].computes_on_one for number in beside)
    if not are_free or not (fill or always):
        return None
    return sorted(own.cores)[beside.index(rank) % len(own.cores)]
