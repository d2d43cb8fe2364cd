"""`bind`: keeps each rank on one core, if the ranks of a machine take all its cores and nobody has bound them.

Launchers differ: srun and Open MPI's mpirun bind ranks as a rule, mpich's mpirun doesn't. Unbound ranks sleep while
they wait for each other, and a core on which all of them sleep comes back late (`mpi/waiting.py`). Smaller jobs aren't
bound, since two of them on one machine would both get its first cores.

Linux binds threads, and a new thread inherits its maker's binding. So this happens before JAX's backend makes its
threads, and existing threads are bound one by one. A BLAS library has started a thread for each core that it saw; they
would now take turns on one, so it is told to use one.
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

#: "core": each rank keeps to one core. "none": none does. Unset: they do if they take all cores.
BIND_VARIABLE = "AUTOPAR_BIND"


@dataclass(frozen=True)
class Bindable:
    """A rank's machine, the cores that it may run on, and whether it computes on one core alone."""

    machine: str
    cores: frozenset[int]
    computes_on_one: bool


def bind(here: World, *, computes_on_one: bool) -> None:
    """Binds this process to a core, if its machine's ranks are to be bound; raises LaunchError if `AUTOPAR_BIND` is
    wrong. Collective over `here`. `computes_on_one`: this rank has one device, a CPU."""
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
    """Returns the core for a rank; None: it isn't bound. `always`: bind ranks even if they don't take all cores."""
    own = ranks[rank]
    beside = [number for number, other in enumerate(ranks) if other.machine == own.machine]
    are_free = len(own.cores) > 1 and all(ranks[number].cores == own.cores for number in beside)
    fill = len(beside) >= len(own.cores) and all(ranks[number].computes_on_one for number in beside)
    if not are_free or not (fill or always):
        return None
    return sorted(own.cores)[beside.index(rank) % len(own.cores)]
