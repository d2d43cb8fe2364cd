"""What importing autopar does, with and without a launcher."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap

import pytest

from autopar.errors import LaunchError
from autopar.launch.group import check_same
from autopar.mpi.world import Launched, World, launched, world
from tests.support.mpi.jobs import ROOT, Run, coordinator


def test_without_a_launcher_nothing_happens() -> None:
    script = (
        "import sys, signal, threading; hook, thread = sys.excepthook, threading.excepthook; "
        "interrupt = signal.getsignal(signal.SIGINT); "
        "import autopar, jax; from autopar import jax_compat; from autopar.mpi.world import World, world; "
        "assert world() == World(0, 1, None); autopar.watchdog(3); "
        "assert not jax_compat.backend_is_up() and not jax.distributed.is_initialized(); "
        "assert 'mpi4py' not in sys.modules and sys.excepthook is hook and threading.excepthook is thread; "
        "assert signal.getsignal(signal.SIGINT) is interrupt; "
        "assert threading.active_count() == 1; "
        "assert not [n for n in __import__('os').environ if n.startswith('AUTOPAR')]; "
        "assert list(autopar.uninterrupted([1])) == [1] and not jax_compat.backend_is_up()"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-W", "error", "-c", script], env=env, check=True, timeout=60)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"PMI_RANK": "2", "PMI_SIZE": "4"}, (2, 4)),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "3", "PMIX_RANK": "0"}, (0, 3)),
        ({"PMIX_RANK": "5", "SLURM_PROCID": "5"}, (5, None)),
        ({"PMIX_RANK": "1", "PMIX_NAMESPACE": "slurm.pmix.7.0", "SLURM_STEP_NUM_TASKS": "4"}, (1, 4)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, None),  # The batch script itself, or srun --mpi=none.
        ({"PMI_RANK": "2", "PMI_SIZE": "4", "AUTOPAR_MPI": "off"}, None),
        ({"PMI_RANK": "2", "PMI_SIZE": "4", "AUTOPAR_RANK_PID": str(os.getpid())}, (2, 4)),
        ({"PMI_RANK": "2", "PMI_SIZE": "4", "AUTOPAR_RANK_PID": "1"}, None),  # A child of a rank.
    ],
)
def test_launchers(environment: dict[str, str], expected: tuple[int, int | None] | None) -> None:
    found = launched(environment)
    assert (found and (found.rank, found.size)) == expected
    assert found is None or isinstance(found, Launched)


#: What ranks that don't do the same are told.
THE_SAME = """
from autopar.errors import LaunchError
from autopar.launch.group import check_same

def told(facts):
    try:
        check_same(here, facts)
    except LaunchError as error:
        return str(error)

assert told({"plan": "a", "JAX version": "0.10"}) is None
text = told({"plan": "b" if here.rank == 2 else "a", "batch size": "64"})
assert text.startswith(f"rank {here.rank}: the ranks of this job don't do the same"), text
assert "plan: b on rank 2, a on ranks 0, 1" in text and "batch size" not in text, text
text = told({"code": str(here.rank)})
assert "code: 1 on rank 1, 0 on rank 0" in text and "code: 2 on rank 2, 0 on rank 0" in text, text
print("told")
"""


def test_ranks_are_jax_processes(run_ranks: Run) -> None:
    script = """
    import autopar, jax, sys, subprocess
    from autopar.mpi.world import world
    here = world()
    assert world() is here and here.size == 3 and here.comm.Get_size() == 3
    assert (jax.process_index(), jax.process_count()) == (here.rank, 3)
    assert jax.local_device_count() == 2 and jax.device_count() == 6
    child = "import autopar, sys; from autopar.mpi.world import world; assert world().size == 1; "
    child += "assert 'mpi4py' not in sys.modules"
    subprocess.run([sys.executable, "-c", child], check=True)
    print("all right")
    """
    job = run_ranks(3, textwrap.dedent(script) + textwrap.dedent(THE_SAME), devices=2)
    assert job.code == 0 and job.output.count("all right") == 3 == job.output.count("told"), job.output


def test_one_rank(run_ranks: Run) -> None:
    script = """
    import autopar, jax
    from autopar.mpi.world import world
    here = world()
    assert (here.rank, here.size) == (0, 1) and here.comm.allgather(7) == [7]
    assert not jax.distributed.is_initialized() and jax.device_count() == 2
    """
    job = run_ranks(1, script, devices=2)
    assert job.code == 0 and not job.output, job.output


def test_independent_runs_under_a_launcher(run_ranks: Run) -> None:
    script = """
    import autopar, jax, sys
    from autopar.mpi.world import world
    assert world().size == 1 and jax.process_count() == 1 and "mpi4py" not in sys.modules
    """
    job = run_ranks(2, script, AUTOPAR_MPI="off")
    assert job.code == 0, job.output


def test_a_backend_that_is_up_already(run_ranks: Run) -> None:
    job = run_ranks(2, "import jax\nif __import__('os').environ['PMI_RANK'] == '1':\n    jax.devices()\nimport autopar")
    assert job.code == 1, job.output
    message = (
        r"rank 1 \(.*(.*\n)*.*LaunchError: rank 1: JAX has been used before .* Import autopar before the first use"
    )
    assert re.search(message, job.ranks[1]), job.output


def test_another_version_of_jax(run_ranks: Run) -> None:
    script = "import os, jax\nif os.environ['PMI_RANK'] == '1':\n    jax.__version__ = '0.1'\nimport autopar"
    job = run_ranks(3, script)
    assert job.code == 1 and "JAX version: 0.1 on rank 1, " in job.output, job.output


def test_an_initialisation_of_ones_own(run_ranks: Run) -> None:
    script = """
    import jax
    jax.distributed.initialize(cluster_detection_method="mpi4py")
    import autopar
    from autopar.mpi.world import world
    assert jax.process_index() == world().rank and jax.process_count() == 2
    """
    job = run_ranks(2, script)
    assert job.code == 0 and "autopar:" not in job.output, job.output


def test_a_launcher_of_another_mpi(run_ranks: Run) -> None:
    script = "import os\ndel os.environ['PMI_RANK']\nos.environ['PMIX_RANK'] = '1'\nimport autopar"
    job = run_ranks(1, script)
    assert job.code != 0 and "LaunchError: rank 1 is one of more for its launcher" in job.output, job.output


def test_processes_that_jax_connects_without_mpi(run_ranks: Run) -> None:
    """They share their devices, checkpoints, interrupts and replicas, but can have no tables on hosts and no stages."""
    script = """
    import os, pathlib, signal, jax, jax.numpy as jnp
    rank = int(os.environ.pop("PMI_RANK"))
    jax.distributed.initialize(os.environ["COORDINATOR"], 2, rank, cluster_detection_method="deactivate")
    import autopar

    def step(table, ids):
        return table - 0.1 * jax.grad(lambda t: (t[ids] ** 2).sum())(table), ids.sum()

    ids = next(iter(autopar.shard([jnp.full(2, rank)], per_process=True)))
    planned = autopar.parallelize(step, strategy="ps")
    table, total = planned(jnp.ones((64, 2)), ids)
    assert total == 2 and jax.process_count() == 2
    state = {"table": table, "count": jnp.int32(3)}
    autopar.save("saved", state, position={"batch": 1})
    shards = list(pathlib.Path("saved").glob("version-*/rows/*"))
    assert len(shards) == 2, shards
    found, position = autopar.restore("saved", state)
    assert position == {"batch": 1} and found["count"] == 3
    assert type(found["table"]) is type(table), (type(table), type(found["table"]))
    assert [s.data.shape for s in getattr(table, "stored", table).addressable_shards] == [(32, 2)]
    found["table"], table = (planned(x, ids)[0] for x in (found["table"], table))
    assert (autopar.materialize(found["table"]) == autopar.materialize(table)).all()
    for position in {"batch": 2}, {"batch": {1}}:
        try:
            autopar.save("saved", found["count"], position=position if rank else {"batch": 1})
        except autopar.CheckpointError as error:
            print(error)
    assert autopar.restore("saved").position == {"batch": 1}
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    batches, seen = autopar.shard([jnp.arange(8) + k for k in range(100)]), 0
    try:
        for batch in batches:
            seen += 1
            if rank == 1 and seen == 3:
                os.kill(os.getpid(), signal.SIGTERM)
    except KeyboardInterrupt:
        print("interrupted after", seen, "batches, at", batches.state()["batch"])
    replicated = autopar.parallelize(step, sync=autopar.sync.Average(every=2))
    mine = autopar.materialize(found["table"])
    for k in range(3):
        mine, _ = replicated(mine, jnp.array([rank, 2, k]))
    autopar.save("saved", mine)
    kept, _ = autopar.restore("saved", mine, step=replicated, batch=jnp.array([rank, 2, 0]))
    assert isinstance(kept, autopar.Replica) and (jnp.asarray(kept) == jnp.asarray(mine)).all()
    assert replicated.plan.sync.clients == 2 and autopar.average(kept).sum() == autopar.average(mine).sum()
    stages = autopar.Pipeline(stages=2, microbatches=1)
    for options in {"strategy": ("ps", "hosts")}, {"pipeline": stages}:
        try:
            autopar.parallelize(step, **options)(jnp.ones((64, 2)), ids)
        except autopar.LaunchError as error:
            print(error)
    """
    with coordinator() as address:
        job = run_ranks(2, script, COORDINATOR=address)
    assert job.code == 0, job.output
    (seen,) = {found for text in job.ranks for found in re.findall(r"after (\d+) batches, at \1\n", text)}
    assert 3 <= int(seen) <= 3 + 32, job.output
    for message in "process 1 saves another state than process 0", r"process 1: position=.* can't be saved":
        assert all(re.search(message, text) for text in job.ranks), job.output
    for what in "tables on hosts", "stages on several processes":
        message = rf"step: {what} need MPI, but these 2 processes .*`mpirun -n 2 \S+python\S* .*train.py`"
        assert all(re.search(message, text) for text in job.ranks), job.output


class _Told:
    """A communicator that has heard this."""

    def __init__(self, *told: dict[str, str]) -> None:
        self.told = told

    def allgather(self, mine: dict[str, str]) -> list[dict[str, str]]:
        return [mine, *self.told]


def test_differences_are_shown() -> None:
    long = "x" * 1000
    with pytest.raises(LaunchError, match=r"code: \.\.\.x{50}b on rank 1, \.\.\.x{50}a on rank 0"):
        check_same(World(0, 2, _Told({"code": long + "b"})), {"code": long + "a"})
    with pytest.raises(LaunchError, match=r"plan: a on rank 0, b on ranks 1, 2"):
        check_same(World(0, 3, _Told({"plan": "b"}, {"plan": "b"})), {"plan": "a"})
    with pytest.raises(LaunchError, match=r"JAX: \(missing\) on rank 1, 0.10 on rank 0"):
        check_same(World(0, 2, _Told({})), {"JAX": "0.10"})
    check_same(World(0, 1, None), {"plan": "a"})


def test_a_world_of_one() -> None:
    assert world() == World(0, 1, None)


def test_ranks_that_take_all_cores_are_bound(run_ranks: Run) -> None:
    """With all their threads, those of the BLAS library among them, and they say so once."""
    script = """
    import os, numpy, threadpoolctl
    free = os.sched_getaffinity(0)
    import autopar, jax
    rank = int(os.environ["PMI_RANK"])
    jax.numpy.ones(3).block_until_ready()
    found = {core for thread in os.listdir("/proc/self/task") for core in os.sched_getaffinity(int(thread))}
    blas = {library["num_threads"] for library in threadpoolctl.threadpool_info()}
    print("bound to", found == {sorted(free)[rank % len(free)]}, blas)
    """
    count = len(os.sched_getaffinity(0))
    bound = run_ranks(count, script, AUTOPAR_BIND="")
    assert bound.code == 0 and bound.output.count("bound to True {1}") == count, bound.output
    assert len(re.findall("^autopar: each rank keeps to one core", bound.output, re.MULTILINE)) == 1
    free = run_ranks(count, script, devices=2, AUTOPAR_BIND="")
    assert free.code == 0 and free.output.count("bound to False") == count, free.output
    assert "autopar:" not in free.output
