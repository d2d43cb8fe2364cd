"""Stages on several ranks: one that is killed in a step, and a state that none can hold."""

from __future__ import annotations

import pytest

from tests.support.mpi.jobs import Run
from tests.support.pairs import long


@pytest.mark.parametrize("pipeline", ["2, microbatches=4", long("2, 'spectrain'")])
def test_a_killed_rank_is_named(launch: Run, pipeline: str) -> None:
    job = launch(
        ["-n", "2"],
        """
        import os, signal
        import autopar, jax, optax
        from tests.support.microbatched import batch, language_model

        step, make = language_model(optax.sgd(0.1))
        planned, state = autopar.parallelize(step, pipeline=autopar.Pipeline(PIPELINE)), make()
        for k in range(6):
            if k == 4 and jax.process_index() == 1:
                print("fault", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            state, _ = planned(state, batch(k))
        """.replace("PIPELINE", pipeline),
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
