"""`unlink_segments`: memory that mpich's ranks share on a machine loses its name in /dev/shm as soon as all have it.

mpich removes it at MPI_Finalize, to which a job that fails doesn't come: 2 MB a job would stay, and a container has 64.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

_NAMES = "/dev/shm/mpich_shm_"


def unlink_segments(comm: Any, maps: Path = Path("/proc/self/maps")) -> None:
    """Remove the names of what this process has mapped of that. Collective.

    Args:
      comm: A communicator of all ranks.
      maps: Where the kernel lists what a process has mapped.
    """
    comm.Barrier()  # all have come out of MPI_Init, and so have it
    with contextlib.suppress(OSError):
        paths = {line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines() if _NAMES in line}
        for path in paths:  # the first rank of a machine removes them
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
