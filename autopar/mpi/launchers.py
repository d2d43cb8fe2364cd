"""What a process can read about its launcher in its environment, before MPI is started.

Launchers number their processes in the environment; which variables, differs. A process that has none of them was
started by hand, and so was a child of a rank (a data loader's worker): it inherits the variables, and must not take
part in MPI under its parent's number. Ranks therefore leave their process id in the environment (`claim`).
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

#: (variable of the rank, variable of the number of ranks if there is one, launcher). The first that is set counts.
LAUNCHERS: tuple[tuple[str, str | None, str], ...] = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "Open MPI's mpirun"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MVAPICH's mpirun"),
    ("PMI_RANK", "PMI_SIZE", "hydra (mpich's or Intel's mpiexec), or srun --mpi=pmi2"),
    ("PALS_RANKID", None, "PALS (HPE Cray's mpiexec)"),
    ("PMIX_RANK", None, "a PMIx launcher (srun --mpi=pmix, prterun)"),
)

#: Set to "off": a process takes no notice of its launcher.
OFF_VARIABLE = "AUTOPAR_MPI"

#: The process id of the rank, for its children to see that they are none.
RANK_PID_VARIABLE = "AUTOPAR_RANK_PID"


@dataclass(frozen=True)
class Launched:
    """What a launcher says: the rank, the number of ranks (None: it doesn't say), and which launcher it is."""

    rank: int
    size: int | None
    launcher: str


def launched(environment: Mapping[str, str] = os.environ) -> Launched | None:
    """What the launcher of this process says; None for a process that is no rank of an MPI launcher."""
    if environment.get(OFF_VARIABLE, "").lower() == "off" or _is_child(environment):
        return None
    for rank, size, launcher in LAUNCHERS:
        if environment.get(rank, "").isdigit():
            count = environment.get(size, "") if size else ""
            return Launched(int(environment[rank]), int(count) if count.isdigit() else None, launcher)
    return None


def claim(environment: MutableMapping[str, str] = os.environ) -> None:
    """Say that this process is the rank, and none of its children."""
    environment[RANK_PID_VARIABLE] = str(os.getpid())


def _is_child(environment: Mapping[str, str]) -> bool:
    owner = environment.get(RANK_PID_VARIABLE, "")
    return multiprocessing.parent_process() is not None or owner not in ("", str(os.getpid()))
