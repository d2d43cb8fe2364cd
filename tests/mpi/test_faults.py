"""A rank that fails ends the job, soon, and is named with its step; no process is left behind (see `run_ranks`)."""

from __future__ import annotations

import re
import sys

import pytest

from tests.support.mpi.jobs import Job, Run
from tests.support.pairs import long

#: Ten steps with one exchange each. In step 5 rank 1 does what is put in place of FAULT.
STEPS = """
import os, sys, threading, time
import autopar
from autopar.launch.progress import mark
from autopar.mpi.world import world

ranks = world()

def say(text):
    os.write(1, (text + "\\n").encode())

def exchange(step):
    mark(step, "row exchange", "waits")
    done = ranks.comm.Ibarrier()
    while not done.Test():
        time.sleep(0.002)

def fault():
    say("fault")
    FAULT

def main():
    for step in range(10):
        mark(step, "computing")
        if step == 5 and ranks.rank == 1:
            fault()
        exchange(step)

main()
"""


CAUGHT = """
try:
    sys.exit(5)
except SystemExit:
    pass
"""


def with_fault(fault: str) -> str:
    return STEPS.replace("FAULT", fault)


def check_ended(job: Job) -> None:
    """By itself, before the rank that is at fault would have gone on, and with an error."""
    assert job.code not in (0, None) and job.ended_s is not None, job.output
    print(f"ended {job.ended_s:.1f} s after the fault, exit code {job.code}")


@pytest.mark.parametrize(
    ("fault", "message", "code"),
    [
        ("raise ValueError('bad batch')", r"rank 1 .*failed, in step 5 \(computing\).*\n.*ValueError: bad batch", 1),
        ("sys.exit(3)", r"rank 1 .*left with exit code 3, last in step 5 \(computing\)", 3),
        (
            "threading.Thread(target=lambda: 1 / 0, name='loader').start(); time.sleep(60)",
            r"rank 1 .*failed in its thread 'loader', in step 5 .*\n.*ZeroDivisionError",
            1,
        ),
        long(
            "threading.Thread(target=sys.exit, args=(4,)).start(); time.sleep(60)",
            r"rank 1 .*failed in its thread .*, in step 5 .*\n.*SystemExit: 4",
            4,
        ),
        long("bytearray(10**18)", r"rank 1 .*failed, in step 5 .*\n.*MemoryError", 1),
    ],
)
def test_a_rank_that_fails_says_so(run_ranks: Run, fault: str, message: str, code: int) -> None:
    job = run_ranks(2, with_fault(fault))
    check_ended(job)
    assert re.search(message, job.ranks[1], re.DOTALL), job.output
    assert job.code == code, job.output
    assert "rank 0 (" not in job.output, job.output


@pytest.mark.parametrize(
    "fault", [long("os._exit(7)"), "os.kill(os.getpid(), 9)", long("__import__('ctypes').string_at(0)")]
)
def test_a_rank_that_is_gone_ends_the_job(run_ranks: Run, fault: str) -> None:
    job = run_ranks(2, with_fault(fault))
    check_ended(job)


@pytest.mark.parametrize(
    ("fault", "message", "code"),
    [
        (
            "os.kill(os.getpid(), 9)",
            r"rank 1 \(process \d+ on \S+\) was killed by SIGKILL .*in step 5 \(computing\)",
            137,
        ),
        ("__import__('ctypes').string_at(0)", r"in string_at(.*\n)*.*rank 1 .*SIGSEGV, in step 5 \(computing\)", 139),
        ("os._exit(0)", r"rank 1 .*ended at once with exit code 0 .*in step 5 \(computing\)", 1),
        long("os._exit(7)", r"rank 1 .*ended at once with exit code 7 .*in step 5 \(computing\)", 7),
        long("raise ValueError('bad batch')", r"rank 1 .*failed, in step 5 \(computing\)(.*\n)*.*bad batch", 1),
    ],
)
def test_the_launcher_names_a_rank_that_is_gone(launch: Run, fault: str, message: str, code: int) -> None:
    job = launch(["-n", "3" if "kill" in fault else "2"], with_fault(fault))
    check_ended(job)
    assert re.search(message, job.output), job.output
    assert job.code == code, job.output
    assert len(re.findall(r"autopar: rank", job.output)) == 1, job.output
    assert "BAD TERMINATION" not in job.output


def test_a_rank_that_leaves_with_0_while_others_need_it(run_ranks: Run) -> None:
    job = run_ranks(2, with_fault("sys.exit(0)"))
    check_ended(job)
    assert re.search(r"rank 1 .*has left.*last seen in step 5 \(computing\), while rank 0 waits", job.ranks[0])


def test_ranks_that_need_no_one_may_leave_one_by_one(run_ranks: Run) -> None:
    """An exit that was caught before is none."""
    script = STEPS.replace("FAULT", "pass") + CAUGHT + "time.sleep(3 * ranks.rank)\nsay('done')\n"
    job = run_ranks(2, script)
    assert job.code == 0, job.output
    assert "autopar:" not in job.output and job.output.count("done") == 2


def test_all_ranks_may_leave_with_a_code_of_their_own(run_ranks: Run) -> None:
    job = run_ranks(2, f"import sys, autopar\n{CAUGHT}sys.exit(3)")
    assert job.code == 3, job.output
    assert "autopar:" not in job.output


@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python 3.11 shows a SystemExit raised by hand to nobody")
def test_an_exit_that_is_raised_by_hand(run_ranks: Run) -> None:
    job = run_ranks(2, with_fault("raise SystemExit(6)"))
    check_ended(job)
    assert job.code == 6 and "left with exit code 6, last in step 5" in job.ranks[1], job.output


@pytest.mark.parametrize(
    ("waiting", "message"),
    [
        pytest.param("time.sleep(60)", r"computing\)\.", marks=pytest.mark.long),
        ("ranks.comm.recv(source=0, tag=77)", r"computing\), where it can't answer\."),
    ],
    ids=["in Python", "in foreign code"],
)
def test_ctrl_c_ends_all_ranks(run_ranks: Run, waiting: str, message: str) -> None:
    """Where all of them wait."""
    script = STEPS.replace('say("fault")', 'threading.Timer(1, say, ["fault"]).start()')
    script = script.replace("fault()\n", f"fault()\n        if step == 5:\n            {waiting}\n", 1)
    job = run_ranks(2, script.replace("FAULT", "pass"), interrupt=True)
    check_ended(job)
    assert re.search(rf"rank \d .*was interrupted, in step 5 \({message}", job.output), job.output


def test_ctrl_c_passes_through_the_launcher(launch: Run) -> None:
    job = launch(["-n", "2"], with_fault("time.sleep(60)"), interrupt=True)
    check_ended(job)
    assert job.code == 130 and re.search(r"rank \d .*was interrupted, in step 5", job.output), job.output


def test_a_rank_that_stands_still_is_named(run_ranks: Run) -> None:
    job = run_ranks(3, with_fault("time.sleep(60)"), AUTOPAR_WATCHDOG="3")
    check_ended(job)
    message = r"rank 1 \(.*made no progress for \d+ s, in step 5 \(computing\); ranks 0, 2 wait for it"
    assert re.search(message, job.ranks[0]), job.output
    assert re.search(r"rank 1 .* is at\n(.*\n)*.*in fault\n +time.sleep\(60\)", job.ranks[1]), job.output


def test_a_rank_that_is_stopped_is_named(run_ranks: Run) -> None:
    job = run_ranks(3, with_fault("time.sleep(0.5); os.kill(os.getpid(), 19)"), AUTOPAR_WATCHDOG="3")
    check_ended(job)
    assert re.search(r"rank 1 .*no sign of life for \d+ s .*last seen in step 5", job.ranks[0]), job.output
    assert "rank 2 (" not in job.output


def test_a_rank_that_a_program_waits_for_is_named(run_ranks: Run) -> None:
    script = """
    import os, time
    import autopar, jax, jax.numpy as jnp, numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()), ("data",))

    @autopar.parallelize(strategy="allreduce", mesh=mesh)
    def train_step(state, batch):
        loss, slope = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(state)
        return state - 0.1 * slope, {"loss": loss}

    state = jnp.ones(3)
    for step in range(8):
        if step == 5 and jax.process_index() == 1:
            os.write(1, b"fault\\n")
            time.sleep(60)
        state, metrics = train_step(state, np.ones((8, 3), np.float32))
        float(metrics["loss"])
    """
    job = run_ranks(2, script, AUTOPAR_WATCHDOG="3")
    check_ended(job)
    assert re.search(r"rank 1 .*no progress for \d+ s, in step 4 \(train_step\); rank 0 waits for it", job.ranks[0])


def test_a_rank_may_take_its_time(run_ranks: Run) -> None:
    fault = """
    if mark.__self__.last.step == 5:
        autopar.watchdog(None)
        time.sleep(4)
        autopar.watchdog(2)
    else:
        mark(7, "compiling", "compiles")
        time.sleep(4)
"""
    script = with_fault(fault).replace("step == 5 and", "step in (5, 7) and")
    job = run_ranks(2, script, AUTOPAR_WATCHDOG="2")
    assert job.code == 0 and "autopar:" not in job.output, job.output


#: Five steps with a table on hosts. Beside step 3 ids and rows of the next one are exchanged; within PLACE rank 1 does
#: what is put in place of FAULT.
AHEAD = """
import os, threading
import autopar
import jax, jax.numpy as jnp, numpy as np
from autopar.backends.host.ranks import Ranks
from autopar.launch.progress import PROGRESS
from autopar.mpi.exchange import Exchange

Ranks.hides_exchanges = staticmethod(lambda exchange: True)  # of one machine as well
usual = Exchange.PLACE

def at_fault(exchange, *args):
    is_beside = threading.current_thread() is not threading.main_thread()
    if is_beside and PROGRESS.last.step == 3 and jax.process_index() == 1:
        os.write(1, b"fault\\n")
        FAULT
    return usual(exchange, *args)

Exchange.PLACE = at_fault

@autopar.parallelize(strategy=("ps", "hosts"))
def train_step(state, ids):
    loss, slope = jax.value_and_grad(lambda table: jnp.mean(jnp.tanh(table[ids]) ** 2))(state)
    return state - 0.1 * slope, loss

state = jnp.ones((60, 4))
batches = [np.arange(12, dtype=np.int32) + 4 * k for k in range(5)]
for ids in autopar.shard(batches, step=train_step):
    state, loss = train_step(state, ids)
"""


@pytest.mark.parametrize(
    ("place", "fault", "message", "code"),
    [
        (
            "asking",
            "os.kill(os.getpid(), 9)",
            r"was killed by SIGKILL .*in step 3 \(train_step: asking for rows\)",
            137,
        ),
        (
            "fetching",
            "os.kill(os.getpid(), 9)",
            r"was killed by SIGKILL .*in step 3 \(train_step: fetching rows\)",
            137,
        ),
        long(
            "fetching",
            "raise ValueError('no rows')",
            r"failed, in step 3 \(train_step: fetching rows\)(.*\n)*.*no rows",
            1,
        ),
    ],
)
def test_a_rank_that_is_gone_while_rows_are_fetched_ahead(
    launch: Run, place: str, fault: str, message: str, code: int
) -> None:
    job = launch(["-n", "2"], AHEAD.replace("PLACE", place).replace("FAULT", fault))
    check_ended(job)
    assert re.search(rf"rank 1 \(process \d+ on \S+\) {message}", job.output), job.output
    assert job.code == code, job.output
    assert len(re.findall(r"autopar: rank", job.output)) == 1, job.output
