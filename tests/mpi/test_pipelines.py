"""Stages on several ranks: the cases of `pipeline_cases.py`; and a rank that is killed in a step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.mpi.jobs import Run
from tests.support.mpi.ranks import run_cases

#: Ranks and devices of each -> cases; all where none are named.
WORLDS = {
    (2, 1): ("check_schedules", "check_bytes_are_those_of_the_plan", "check_tables_by_their_rows"),
    (2, 2): (
        "check_the_bits_are_those_of_one_process",
        "check_products_divided_within_stages",
    ),
    (3, 1): ("check_the_state_of_stacked_layers", "check_what_is_refused"),
}
#: The rest of the product.
MORE = {
    (2, 2): ("check_schedules", "check_the_state_of_divided_products"),
    (3, 1): ("check_schedules", "check_the_state"),
}


@pytest.mark.parametrize("world", WORLDS, ids=lambda w: f"{w[0]} ranks, {w[1]} devices each")
def test_pipelines(world: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_cases("pipeline_cases", *world, WORLDS[world], tmp_path, timeout_s=300)


@pytest.mark.long
@pytest.mark.parametrize("world", MORE, ids=lambda w: f"{w[0]} ranks, {w[1]} devices each")
def test_more_of_pipelines(world: tuple[int, int], tmp_path: Path) -> None:
    run_cases("pipeline_cases", *world, MORE[world], tmp_path, timeout_s=300)


def test_a_killed_rank_is_named(launch: Run) -> None:
    job = launch(
        ["-n", "2"],
        """
        import os, signal
        import autopar, jax, optax
        from tests.support.microbatched import batch, language_model

        step, make = language_model(optax.sgd(0.1))
        planned, state = autopar.parallelize(step, pipeline=autopar.Pipeline(2, microbatches=4)), make()
        for k in range(6):
            if k == 4 and jax.process_index() == 1:
                print("fault", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            state, _ = planned(state, batch(k))
        """,
        timeout_s=90,
    )
    assert job.code not in (0, None), job.output
    assert "rank 1" in job.output and "SIGKILL" in job.output, job.output


@pytest.mark.long
def test_a_state_that_no_rank_can_hold(launch: Run) -> None:
    """Each rank may take three quarters of what the state takes, and has one of four stages."""
    job = launch(
        ["-n", "4"],
        """
        import resource
        import autopar, jax, jax.numpy as jnp, numpy as np, optax

        LAYERS, WIDTH, TX = 32, 2048, optax.adam(1e-5)

        def step(state, x):
            def loss_of(params):
                y = x
                for w in params:
                    y = jnp.tanh(y @ w)
                return jnp.mean(y**2)

            loss, grads = jax.value_and_grad(loss_of)(state["params"])
            updates, opt = TX.update(grads, state["opt"], state["params"])
            return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

        def make(key):
            keys = jax.random.split(key, LAYERS)
            params = [jax.random.normal(k, (WIDTH, WIDTH)) / WIDTH**0.5 for k in keys]
            return {"params": params, "opt": TX.init(params)}

        key = jax.random.key(0)
        size = sum(4 * leaf.size for leaf in jax.tree.leaves(jax.eval_shape(make, key)))
        status = dict(line.split(":", 1) for line in open("/proc/self/status"))
        limit = 1024 * int(status["VmData"].split()[0]) + 3 * size // 4
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        try:
            np.ones(size // 4, np.float32)
        except MemoryError:
            print("too much for a rank", flush=True)
        planned = autopar.parallelize(step, pipeline=autopar.Pipeline(4, microbatches=4))
        x = np.ones((16, WIDTH), np.float32)
        state = autopar.init(make, key, step=planned, batch=x)
        losses = [0.0] * 3
        for k in range(3):
            state, losses[k] = planned(state, x)
        assert losses[2] < losses[1] < losses[0]
        print("trained", flush=True)
        """,
        timeout_s=280,
    )
    assert job.code == 0, job.output
    assert job.output.count("too much for a rank") == job.output.count("trained") == 4, job.output
