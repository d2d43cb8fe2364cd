"""A rank that sleeps, or leaves with exit code 0, while others wait for it in programs that run beside Python: a weight
of some 100,000 numbers, whose programs JAX doesn't run within their call. The launcher starts each job again, and each
of its runs is another case."""

from __future__ import annotations

import re

import pytest

from tests.support.mpi.jobs import Run

#: Rank 1 does FAULT, and rank 0 waits for it where READ says.
SCRIPT = """
import functools, os, sys, time
from pathlib import Path
import autopar, jax, jax.numpy as jnp, numpy as np

CASES, rank = CASE_LIST, jax.process_index()
runs = Path(f"runs-{rank}")
run = len(runs.read_bytes()) if runs.exists() else 0
runs.write_bytes(bytes(run + 1))
way, fault, read = CASES[run] if run < len(CASES) else ("Average", "none", "end")
options = {"strategy": way} if way == "allreduce" else {"sync": getattr(autopar.sync, way)()}

@functools.partial(autopar.parallelize, **options)
def train_step(state, batch):
    loss, slope = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(state)
    return state - 0.1 * slope, {"loss": loss, "large": slope}

@autopar.parallelize
def evaluate(w, batch):
    return jnp.mean(batch @ w)

def may_fail(place):
    if rank == 1 and place == ("step" if read in ("loss", "end") else read):
        os.write(1, f"run {run}: {way}, {read}, {fault}\\n".encode())
        if fault == "leaves":
            sys.exit(0)
        if fault == "sleeps":
            time.sleep(3600)

state, batch = jnp.ones((400, 400)) / 400, np.ones((8, 400), np.float32)
for step in range(6):
    if step == 4:
        may_fail("step")
    state, metrics = train_step(state, batch)
    if read == "loss":
        float(metrics["loss"])
    del metrics
if read in ("average", "evaluation"):
    np.asarray(state)
    may_fail("average")
    w = autopar.average(state)
if read == "evaluation":
    np.asarray(w)
    may_fail("evaluation")
    float(evaluate(w, batch))
np.asarray(w if read == "average" else state)
os.write(1, b"done\\n")
"""
LEFT, SLEEPS = r"has left with exit code 0, .* while rank 0 waits", r"has made no progress for \d+ s, .*rank 0 waits"
Case = tuple[str, str, str]


@pytest.mark.parametrize(
    "cases",
    [
        [("Average", "leaves", "end"), ("Hybrid", "sleeps", "loss"), ("Average", "sleeps", "evaluation")],
        pytest.param(
            [
                ("Average", "sleeps", "loss"),
                ("Average", "leaves", "average"),
                ("Average", "sleeps", "average"),
                ("Average", "leaves", "evaluation"),
                ("Hybrid", "leaves", "end"),
                ("Hybrid", "leaves", "average"),
                ("DPSGD", "leaves", "end"),
                ("DPSGD", "sleeps", "end"),
                ("DPSGD", "sleeps", "average"),
                ("allreduce", "leaves", "end"),
                ("allreduce", "sleeps", "end"),
                ("allreduce", "leaves", "loss"),
            ],
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_rank_that_is_awaited_beside_python_is_named(launch: Run, cases: list[Case]) -> None:
    flags = ["-n", "2", "--watchdog", "3", "--max-restarts", str(len(cases))]
    job = launch(flags, SCRIPT.replace("CASE_LIST", repr(cases)), timeout_s=60.0 * (len(cases) + 1))
    assert job.code == 0 and job.output.count("done") == 2, job.output
    runs = re.split(r"autopar launch: .* restart \d", job.output)
    for (way, fault, read), output in zip(cases, runs, strict=False):
        assert f"{way}, {read}, {fault}" in output and "done" not in output, output
        named = re.findall(rf"rank (\d) \(process \d+ on \S+\) (?:{LEFT if fault == 'leaves' else SLEEPS})", output)
        assert named == ["1"], output


ALONE = """
import functools
import autopar, jax, jax.numpy as jnp, numpy as np
from pathlib import Path

rank = jax.process_index()
runs = Path(f"runs-{rank}")
run = len(runs.read_bytes()) if runs.exists() else 0
runs.write_bytes(bytes(run + 1))

@autopar.parallelize(strategy=("ps", "hosts"))
def train_step(tables, batch):
    loss, slopes = jax.value_and_grad(lambda t: jnp.mean(t["a"][batch] * t["b"][batch]))(tables)
    return jax.tree.map(lambda t, g: t - 0.1 * g, tables, slopes), loss

@autopar.parallelize
def evaluate(tables, batch):
    return jnp.mean(tables["a"][batch] ** 2)

alike = [autopar.parallelize(functools.partial(lambda f, t, b: jnp.mean(f(t["a"][b])), f)) for f in (jnp.sin, jnp.cos)]

tables, batch = {name: jnp.ones((50_000, 64)) for name in "ab"}, np.arange(2048, dtype=np.int32) * 7
for _ in range(3):  # ranks compare the batches of the first three calls, and not that of the fourth
    tables, loss = train_step(tables, batch)
    for other in (evaluate, *alike):
        float(other(tables, batch))
if rank == 0 and run == 0:
    np.asarray(tables["a"])
if rank == 0 and run == 1:
    float(evaluate(tables, batch))
if run == 2:
    np.asarray(tables["ab"[rank]])
if run == 3:
    float(alike[rank](tables, batch))
for _ in range(2):
    tables, loss = train_step(tables, batch)
float(loss)
"""


def test_a_rank_that_reads_or_evaluates_alone_waits_and_is_named(launch: Run) -> None:
    """It isn't sent what another rank's step sends, nor the rows of another table; nor are steps of one name mixed."""
    job = launch(["-n", "2", "--watchdog", "3", "--max-restarts", "4"], ALONE, timeout_s=300)
    told = re.findall(r"All ranks wait for each other.*", job.output)
    assert job.code == 0 and len(told) == 4, job.output
    assert "reading rows of a in host memory" in told[0] and "asking for rows" in told[0]
    assert "evaluate: asking for rows" in told[1] and "train_step: asking for rows" in told[1]
    assert "reading rows of a in host memory" in told[2] and "reading rows of b in host memory" in told[2]
    assert told[3].count("<lambda>: asking for rows") == 2
