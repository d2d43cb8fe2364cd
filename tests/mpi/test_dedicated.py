"""Jobs whose last ranks are dedicated servers: `launch --servers`, or AUTOPAR_SERVERS."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.mpi.test_faults import check_ended
from tests.support.mpi.jobs import Run
from tests.support.mpi.ranks import run_cases
from tests.support.pairs import long

#: What served_cases checks that differs where servers are apart.
SERVED = (
    "check_steps_before",
    "check_a_worker_with_fewer_steps_holds_up_nobody",
    "check_the_bound_holds_after_a_rest",
    "check_checkpoints",
    "check_elastic_checkpoints",
    "check_minibatches_are_given_to_whoever_is_free",
    "check_what_must_fail",
)

PIECES = ("check_large_weights_of_a_centre_are_kept_by_all", "check_tables_are_kept_by_all")


@pytest.mark.parametrize(("workers", "servers"), [(2, 2), long(2, 1), long(1, 2), long(3, 2)])
def test_workers_and_servers(workers: int, servers: int, tmp_path: Path) -> None:
    cases = {"dedicated_cases": (), "kvstore_cases": ()} | (
        {"served_cases": SERVED, "piece_cases": PIECES} if workers == 2 else {}
    )
    run_cases(cases, workers + servers, 1, tmp_path, timeout_s=600, servers=servers)


@pytest.mark.long
def test_all_of_training_with_servers(tmp_path: Path) -> None:
    run_cases({"served_cases": (), "piece_cases": ()}, 4, 2, tmp_path, timeout_s=900, servers=2)


@pytest.mark.long
def test_workers_of_several_processes(tmp_path: Path) -> None:
    run_cases({"served_cases": ("check_workers_of_several_processes",)}, 6, 1, tmp_path, timeout_s=600, servers=2)


#: Behind its fifth step worker 1 does what is put in place of FAULT, and server 3 what is put in place of LATER once
#: there is the file "fault".
SCRIPT = """
import os, pathlib, sys, threading, time

def later():
    while not pathlib.Path("fault").exists():
        time.sleep(0.01)
    LATER

if os.environ["PMI_RANK"] == "3":
    threading.Thread(target=later, daemon=True).start()
try:
    import autopar, jax, jax.numpy as jnp, numpy as np
finally:
    os.write(1, b"script\\n")

@autopar.parallelize(sync=autopar.sync.Async())
def train_step(state, batch):
    loss, slope = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(state["w"])
    return {"w": state["w"] - 0.01 * slope, "v": state["v"] + slope}, loss

class Mine:
    pass  # servers do not know what it is

store = autopar.kvstore.create("sync")
state, rank = {"w": jnp.ones(3), "v": jnp.ones(3)}, jax.process_index()
for step in range(STEPS):
    if step == 5 and rank == 1:
        os.write(1, b"fault\\n")
        pathlib.Path("fault").touch()
        FAULT
    state, loss = train_step(state, np.ones((8, 3), np.float32))
    float(loss)
    time.sleep(0.05)
final = autopar.average(state)
os.write(1, f"done {np.asarray(final['w'])[0]:.6f}\\n".encode())
"""


def script(fault: str = "pass", later: str = "pass", steps: int = 400) -> str:
    return SCRIPT.replace("FAULT", fault).replace("LATER", later).replace("STEPS", str(steps))


def test_servers_run_nothing_of_the_script(run_ranks: Run, launch: Run) -> None:
    """And end with exit code 0, when the workers do."""
    text = script(steps=8)
    for job in (run_ranks(4, text, AUTOPAR_SERVERS="2"), launch(["-n", "4", "--servers", "2"], text)):
        assert job.code == 0 and job.output.count("script\n") == 2, job.output
        assert len(set(re.findall("done (.*)", job.output))) == 1, job.output
        assert not job.ranks or job.ranks[2:] == ("", ""), job.output


@pytest.mark.parametrize(
    ("fault", "later", "message"),
    [
        (
            "pass",
            "os.kill(os.getpid(), 9)",
            r"rank 3 \(a server, process \d+ on \S+\) was killed by SIGKILL .*(serving|answering)",
        ),
        long("pass", "os._exit(0)", r"rank 3 \(a server, .*\) ended at once with exit code 0 .*(serving|answering)"),
        (
            "store._link.tell(1, Mine())",
            "pass",
            r"rank 3 \(a server, .*\) failed, .*; all ranks end(.*\n)*.*AttributeError: .*Mine",
        ),
        (
            "raise ValueError('bad batch')",
            "pass",
            r"rank 1 \(process .*failed, in step 4 (.*\n)*.*ValueError: bad batch",
        ),
        long("sys.exit(3)", "pass", r"rank 1 .*left with exit code 3, last in step 4 "),
        long("os.kill(os.getpid(), 9)", "pass", r"rank 1 \(process .*\) was killed by SIGKILL"),
    ],
)
def test_a_process_that_dies_ends_the_job(launch: Run, fault: str, later: str, message: str) -> None:
    job = launch(["-n", "4", "--servers", "2"], script(fault, later), timeout_s=60)
    check_ended(job)
    assert re.search(message, job.output), job.output


def test_a_server_that_is_stopped_is_named(launch: Run) -> None:
    job = launch(["-n", "4", "--servers", "2", "--watchdog", "3"], script(later="os.kill(os.getpid(), 19)"))
    check_ended(job)
    named = r"rank 3 \(a server, .*no sign of life for \d+ s .*last seen (serving|answering)"
    assert re.search(named, job.output), job.output


def test_a_server_that_nobody_asks_is_not_blamed(launch: Run) -> None:
    """Nor are the workers, for which it doesn't wait."""
    flags = ["-n", "3", "--servers", "1", "--watchdog", "1"]
    job = launch(flags, "import time, autopar\ntime.sleep(4)\nprint('done')")
    assert job.code == 0 and job.output.count("done") == 2 and "autopar:" not in job.output, job.output


#: In place of the loop over steps.
INTERRUPTED = """
batches = autopar.shard({"n": np.arange(4000)}, batch_size=1, step=train_step)
try:
    for batch in batches:
        state, loss = train_step(state, np.ones((8, 3), np.float32))
        if rank == 1 and int(batch["n"][0]) > 20:
            os.write(1, b"fault\\n")
        time.sleep(0.05)
except KeyboardInterrupt:
    autopar.save("saved", state)
assert (np.asarray(autopar.restore("saved")[0]["w"]) < 1).all()
"""


def test_an_interrupt_is_for_workers_to_answer(launch: Run) -> None:
    """They save what servers keep."""
    before, _, end = script().partition("for step in")
    text = before + INTERRUPTED + "final = " + end.partition("final = ")[2]
    job = launch(["-n", "4", "--servers", "2"], text, interrupt=True)
    assert job.code == 0 and len(set(re.findall("done (.*)", job.output))) == 1, job.output


@pytest.mark.parametrize(
    ("servers", "message"),
    [("2", "AUTOPAR_SERVERS=2 of 2 ranks"), ("x", "AUTOPAR_SERVERS='x' is no number of servers")],
)
def test_numbers_that_cannot_be(run_ranks: Run, servers: str, message: str) -> None:
    job = run_ranks(2, "import autopar", AUTOPAR_SERVERS=servers)
    assert job.code == 1 and message in job.output, job.output


def test_ranks_that_know_of_other_servers(run_ranks: Run) -> None:
    text = "import os\nif os.environ['PMI_RANK'] == '1':\n    del os.environ['AUTOPAR_SERVERS']\nimport autopar"
    job = run_ranks(3, text, AUTOPAR_SERVERS="1")
    assert job.code == 1 and "AUTOPAR_SERVERS: (missing) on rank 1, 1 on ranks 0, 2" in job.output, job.output


def test_a_launch_without_workers(launch: Run) -> None:
    job = launch(["-n", "2", "--servers", "2"], "")
    assert job.code == 2 and "--servers 2 of 2 processes: one at least must be left to train" in job.output, job.output
