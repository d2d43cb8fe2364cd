"""What every rank runs in `test_worlds.py`: means of replicas on their way while steps are computed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.backends import clients, global_arrays
from autopar.sync import Average, Hybrid
from tests.support.mpi.replica_task import RANK, make_state, minibatch, step_of, trained

#: Takes a second for some 100,000 turns. What a thread dispatches on CPUs, JAX runs in order: this holds up what comes
#: next.
hold = jax.jit(lambda x, turns=250_000: jax.lax.fori_loop(0, turns, lambda _, y: (x @ y) / len(x), x))


def check_means_run_beside_steps() -> None:
    """A late mean is held up, and steps that don't read it are not; nor is a mean of `Hybrid` by a held up gradient."""
    tx, long = optax.sgd(0.1), jnp.ones((64, 64))
    held: list[jax.Array] = []

    def watched(run: Any, arrays: Any) -> Any:
        def late(*arrays: Any) -> Any:
            held.append(hold(long))
            return run(*arrays)

        made = dispatched(late if sync.delay else run, arrays)
        means.extend(made)
        return made

    dispatched, means = clients._dispatched, []
    for sync, steps in ((Average(every=4, delay=2), 5), (Hybrid(), 1)):
        step = autopar.parallelize(step_of(tx), sync=sync)
        state = jax.block_until_ready(trained(step, make_state(tx), range(4)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(clients, "_dispatched", watched)
            held[:] = [] if sync.delay else [hold(long)]
            means.clear()
            for k in range(steps):
                state, loss = step(state, minibatch(RANK, k))
            jax.block_until_ready(loss if sync.delay else means)
            assert held and means and not held[0].is_ready(), f"{sync}: a step waits for a mean, or a mean for a step"
        jax.block_until_ready((state, means))


def check_other_programs_exchange_beside_a_mean() -> None:
    """One rank is late with each mean; what both exchange meanwhile is not taken for it."""
    step = autopar.parallelize(step_of(optax.sgd(0.1)), sync=Average(every=4, delay=2))
    state = trained(step, make_state(optax.sgd(0.1)), range(4))
    all_ = jax.sharding.NamedSharding(jax.sharding.Mesh(np.array(jax.devices()), "x"), jax.sharding.PartitionSpec("x"))
    ids = np.arange(36, dtype=np.int32)
    global_arrays.local(global_arrays.place_array(ids, all_))
    for k in range(4, 24):
        if k % 4 == 2 and RANK == k // 4 % 2:
            clients._thread().submit(hold, jnp.ones((64, 64)), 50_000)
        state, _ = step(state, minibatch(RANK, k))
        np.testing.assert_array_equal(np.asarray(global_arrays.local(global_arrays.place_array(ids, all_))), ids)
    jax.block_until_ready(state)
