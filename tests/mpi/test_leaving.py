"""What ranks leave, and leave behind: before autopar is imported, by a handler of the user's, in /dev/shm."""

from __future__ import annotations

import re

import pytest

from tests.mpi.test_faults import check_ended
from tests.support.mpi.jobs import Run

TERMINATED = """
import os, signal, sys, time
from pathlib import Path

def leave(number, frame):
    os.write(1, b"handled\\n")
    sys.exit(143)

signal.signal(signal.SIGTERM, leave)
import autopar, jax
from autopar.mpi.world import world

lines = Path("/proc/self/maps").read_text().splitlines()
names = [line.split(maxsplit=5)[-1] for line in lines if "mpich_shm" in line]
os.write(1, f"shared memory: {names}\\n".encode())
world().comm.Barrier()
if jax.process_index() == 1:
    os.write(1, b"fault\\n")
    os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60)
"""


def test_a_handler_of_the_users_answers_sigterm_and_nothing_is_left_in_shared_memory(run_ranks: Run) -> None:
    """JAX's preemption service takes SIGTERM at the import; mpich's memory has a name until MPI_Finalize."""
    job = run_ranks(2, TERMINATED)
    check_ended(job)
    assert job.code == 143 and job.output.count("handled") == 1, job.output
    assert re.search(r"rank 1 .*left with exit code 143, last before the first step", job.ranks[1]), job.output
    names = re.findall(r"/dev/shm/mpich_shm_\w+( \(deleted\))?", job.output)
    assert len(names) >= 2 and all(names), job.output


@pytest.mark.long
def test_a_rank_that_leaves_before_it_imports_autopar(launch: Run) -> None:
    script = """
    import os, sys
    if os.environ["PMI_RANK"] == "1":
        sys.exit(0)
    os.write(1, b"fault\\n")
    import autopar
    """
    job = launch(["-n", "2", "--watchdog", "5"], script)
    check_ended(job)
    assert re.search(r"rank 1 .*ended with exit code 0 and didn't import autopar: ranks that do wait", job.output)
    assert re.search(r"in _all_ranks_import_autopar\n(.*\n)*.*autopar: rank 0 .*exit code 1 ", job.output), job.output
    assert job.output.count("waiting until all ranks have imported autopar") == 1, job.output


def test_ranks_that_never_import_autopar_end_without_a_word(launch: Run) -> None:
    job = launch(["-n", "2"], "import os; os.write(1, b'done\\n')")
    assert job.code == 0 and job.output.count("done") == 2 and "autopar: " not in job.output, job.output
