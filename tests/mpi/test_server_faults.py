"""A rank that fails, hangs or leaves in training with servers or in a ring, where others may not wait for it."""

from __future__ import annotations

import re

import pytest

from tests.mpi.test_faults import check_ended
from tests.support.mpi.jobs import Run
from tests.support.pairs import long

#: Twelve steps; behind the fifth one rank 1 does what is put in place of FAULT.
SCRIPT = """
import os, sys, time
import autopar, jax, jax.numpy as jnp, numpy as np

@autopar.parallelize(sync=SYNC)
def train_step(state, batch):
    loss, slope = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(state)
    return state - 0.01 * slope, loss

state, rank = jnp.ones(3), jax.process_index()
for step in range(STEPS):
    if step == 5 and rank == 1:
        os.write(1, b"fault\\n")
        FAULT
    state, loss = train_step(state, np.ones((8, 3), np.float32))
    float(loss)
    time.sleep(PAUSE)
final = np.asarray(autopar.average(state))
os.write(1, f"done {final[0]:.6f}\\n".encode())
"""
UNBOUNDED, BOUNDED = "autopar.sync.Async()", "autopar.sync.Async(staleness=2)"
ELASTIC = "autopar.sync.Elastic(alpha=0.4, interval=2)"
FAILED = r"rank 1 .*failed, in step 4 (.*\n)*.*ValueError: bad batch"
HYBRID, PAIRS, NEIGHBORS = "autopar.sync.Hybrid()", "autopar.sync.DPSGD()", "autopar.sync.ADPSGD()"


def ranks_of(sync: str) -> int:
    """A ring has an even number of clients."""
    return 4 if sync in (PAIRS, NEIGHBORS) else 3


def with_fault(fault: str, sync: str, steps: int = 12, pause: float = 0.0) -> str:
    script = SCRIPT.replace("FAULT", fault).replace("SYNC", sync).replace("STEPS", str(steps))
    return script.replace("PAUSE", str(pause))


@pytest.mark.parametrize(
    ("sync", "fault", "message"),
    [
        (UNBOUNDED, "raise ValueError('bad batch')", FAILED),
        long(BOUNDED, "raise ValueError('bad batch')", FAILED),
        (BOUNDED, "sys.exit(3)", r"rank 1 .*left with exit code 3, last in step 4 "),
        (ELASTIC, "os.kill(os.getpid(), 9)", ""),
        (NEIGHBORS, "os.kill(os.getpid(), 9)", ""),
        *[long(sync, "os.kill(os.getpid(), 9)", "") for sync in (HYBRID, PAIRS)],
        *[long(sync, "raise ValueError('bad batch')", FAILED) for sync in (HYBRID, PAIRS, NEIGHBORS)],
        long(UNBOUNDED, "os.kill(os.getpid(), 9)", ""),
    ],
)
def test_a_rank_that_fails_ends_the_job(run_ranks: Run, sync: str, fault: str, message: str) -> None:
    job = run_ranks(ranks_of(sync), with_fault(fault, sync))
    check_ended(job)
    assert re.search(message, job.output), job.output


@pytest.mark.parametrize(("sync", "rank"), [(BOUNDED, 0), (NEIGHBORS, 1)])
def test_a_server_that_fails_ends_the_job(run_ranks: Run, sync: str, rank: int) -> None:
    """Its thread does, while others wait for what it should have answered. In a ring a passive client has one."""
    fault = (
        "import threading; from autopar.protocols import Log; call = Log.change; Log.change = "
        "lambda *a: call(*a) if threading.current_thread() is threading.main_thread() else 1 / 0"
    )
    # Many steps: the others, which wait for nobody, are not to be through before this rank is at its fifth one.
    script = with_fault(fault, sync, steps=60, pause=0.05)
    job = run_ranks(ranks_of(sync), script.replace("rank == 1", f"rank == {rank}"))
    check_ended(job)
    assert re.search(rf"rank {rank} .*failed(.*\n)*.*ZeroDivisionError", job.output), job.output


@pytest.mark.parametrize("sync", [UNBOUNDED, long(BOUNDED), long(ELASTIC), long(HYBRID), long(PAIRS), long(NEIGHBORS)])
def test_a_rank_that_is_stopped_is_named(run_ranks: Run, sync: str) -> None:
    # With a pause: a rank's last heartbeat is not to come from before its first step.
    job = run_ranks(ranks_of(sync), with_fault("os.kill(os.getpid(), 19)", sync, pause=0.2), AUTOPAR_WATCHDOG="3")
    check_ended(job)
    assert re.search(r"rank 1 .*no sign of life for \d+ s .*last seen in step \d", job.ranks[0]), job.output


@pytest.mark.parametrize("sync", [BOUNDED, HYBRID, long(PAIRS)])
def test_a_rank_that_others_wait_for_is_named(run_ranks: Run, sync: str) -> None:
    """By the bound, the others wait for pulls; by means, for those of the next step."""
    job = run_ranks(ranks_of(sync), with_fault("time.sleep(60)", sync, steps=40), AUTOPAR_WATCHDOG="3")
    check_ended(job)
    message = r"rank 1 .*made no progress for \d+ s, in step 4 .*; ranks 0, 2(, 3)? wait for it"
    assert re.search(message, job.ranks[0]), job.output


@pytest.mark.parametrize("sync", [UNBOUNDED, NEIGHBORS])
def test_a_rank_that_nobody_waits_for_is_named(run_ranks: Run, sync: str) -> None:
    script = with_fault("time.sleep(7)", sync, steps=70, pause=0.1)
    job = run_ranks(ranks_of(sync), script, AUTOPAR_WATCHDOG="3")
    assert job.code == 0, job.output
    named = r"rank 1 .*made no progress for \d+ s, in step 4 .*; the others go on without it"
    assert len(re.findall(named, job.ranks[0])) == 1 and not re.search(named, job.ranks[2]), job.output
    assert len(set(re.findall("done (.*)", job.output))) == 1, job.output


@pytest.mark.parametrize("sync", [UNBOUNDED, long(BOUNDED), long(ELASTIC), NEIGHBORS])
def test_a_rank_may_do_fewer_steps(run_ranks: Run, sync: str) -> None:
    job = run_ranks(ranks_of(sync), with_fault("break", sync, pause=0.05))
    assert job.code == 0 and len(set(re.findall("done (.*)", job.output))) == 1, job.output


def test_a_rank_may_leave_at_any_time(run_ranks: Run) -> None:
    """Others don't wait for its steps; its server goes on. A last push, large and slow to apply, is taken."""
    script = with_fault("break", BOUNDED, pause=0.05).split("final = ")[0]
    script += """
@autopar.parallelize(sync=autopar.sync.Async())
def large_step(state, batch):
    slope = jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(state[0])
    return (state[0] - 0.1 * slope, jnp.sort(state[1]) + slope[0, 0]), None

state = jnp.ones((500, 500)), jnp.ones(1 << 20)
for step in range(3):
    state, _ = large_step(state, np.ones((4, 500), np.float32))
os.write(1, b"done\\n")
"""
    job = run_ranks(3, script, timeout_s=60)
    assert job.code == 0 and job.output.count("done") == 3, job.output
