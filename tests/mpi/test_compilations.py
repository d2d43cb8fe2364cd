"""Programs of ranks on one machine are compiled once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpi.test_faults import check_ended
from tests.support.mpi.jobs import Run

#: XLA writes down what each rank compiles, in a folder of the rank's own: the same flags on all, or nothing is shared.
COUNTED = """
import glob, os
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_dump_to=compiled --xla_dump_hlo_as_text"
os.mkdir(str(os.getpid()))
os.chdir(str(os.getpid()))

import autopar, jax
import jax.numpy as jnp
import numpy as np
from autopar.mpi.world import world

def compiled():
    paths = glob.glob("compiled/module_*.before_optimizations.txt")
    return [(path.split(".")[1], open(path).read()) for path in paths]
"""
TRAINED = """
def make_state():
    table = jax.random.normal(jax.random.key(0), (1000, 4))
    return {"table": table, "slot": jnp.ones((1000, 4)), "w": jnp.eye(4), "slots": jnp.ones((4, 4))}

def train_step(state, ids):
    def loss(table, w):
        return jnp.mean(jnp.tanh(table[ids] @ w) ** 2)
    value, (g, h) = jax.value_and_grad(loss, (0, 1))(state["table"], state["w"])
    slot, slots = state["slot"] + g * g, state["slots"] + h * h
    new = {"table": state["table"] - 0.1 * g / jnp.sqrt(slot), "slot": slot}
    return new | {"w": state["w"] - 0.1 * h / jnp.sqrt(slots), "slots": slots}, value

# Ranks need rows of very different numbers: 12, 24, 36, ...
count = world().size
ids = np.concatenate([np.arange(48) % (12 * (k + 1)) * 7 + k for k in range(count)]).astype(np.int32)
for strategy in (("ps", "hosts"), "allgather"):
    step = autopar.parallelize(train_step, strategy=strategy)
    state = autopar.init(make_state, step=step, batch=ids)
    for k in range(3):
        state, loss = step(state, ids)
    found = np.asarray(state["table"])  # collective
    plain, expected = jax.jit(train_step), make_state()
    for k in range(3):
        expected, _ = plain(expected, ids)
    np.testing.assert_allclose(found, expected["table"], rtol=1e-4, atol=1e-5)
    assert all(x.devices() == {jax.local_devices()[0]} for x in jax.tree.leaves(expected))

all_ = world().comm.allgather(compiled())
if world().rank == 0:
    texts = [text for each in all_ for text in each]
    twice = sorted({name for name, text in texts if texts.count((name, text)) > 1})
    own = [sum((name, text) not in each for name, text in set(texts)) for each in all_]
    print(f"{len(set(texts))} programs, {len(texts)} compiled; twice: {twice}; not compiled by ranks: {own}")
"""
#: The rank that compiles `slow` is killed while it does so.
KILLED = """
import signal, threading, time

def kill():
    while not glob.glob("compiled/*jit_slow*.before_optimizations.txt"):
        time.sleep(1e-3)
    if not os.path.exists("../killed"):
        open("../killed", "w").close()
        os.write(1, b"fault\\n")
        os.kill(os.getpid(), signal.SIGKILL)

def slow(x):
    for k in range(500):
        x = jnp.sin(x) @ jnp.full((2 + k % 3, 2 + (k + 1) % 3), 0.1)
    return x

threading.Thread(target=kill, daemon=True).start()
jax.jit(slow)(jnp.ones((2, 2)))
"""
#: Each job compiles, and ranks on devices of their own.
FRESH = {"JAX_ENABLE_COMPILATION_CACHE": "false"}


def test_ranks_compile_each_program_once(run_ranks: Run, tmp_path: Path) -> None:
    """With tables on hosts and on devices, and plain ones; the job leaves no file behind."""
    job = run_ranks(4, COUNTED + TRAINED, TMPDIR=str(tmp_path), timeout_s=400, **FRESH)
    assert job.code == 0, job.output
    (line,) = [line for line in job.output.splitlines() if " programs, " in line]
    programs, compiled = (int(part.split()[0]) for part in line.split(";")[0].split(", "))
    assert programs == compiled > 10 and "twice: []" in line, line
    assert not list(tmp_path.glob("autopar-*"))


@pytest.mark.long
def test_a_rank_dies_while_it_compiles(run_ranks: Run, tmp_path: Path) -> None:
    """Others wait for its program: the job ends at once all the same, and leaves no file behind."""
    script = COUNTED + KILLED
    job = run_ranks(4, script, TMPDIR=str(tmp_path), **FRESH)
    check_ended(job)
    assert job.code != 0 and not list(tmp_path.glob("autopar-*")), job.output
