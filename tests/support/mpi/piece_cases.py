"""What every rank runs in `test_worlds.py`: servers that keep pieces of large leaves."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.backends.across import local
from autopar.launch.group import everyone
from autopar.mpi.world import job
from autopar.sync import Async, Elastic
from tests.support.mpi.replica_task import FOLDER, RANK, RANKS, near, same
from tests.support.mpi.served_cases import CLIPPED


def large_state() -> Any:
    """A matrix that would make one server busy, and a small leaf."""
    params = {"w": jnp.ones((256, 96)) / 9, "b": jnp.zeros(96)}
    return {"params": params, "opt": CLIPPED.init(params)}


def large_step(state: Any, batch: Any) -> Any:
    loss, grads = jax.value_and_grad(lambda p: jnp.mean((batch["x"] @ p["w"] + p["b"]) ** 2))(state["params"])
    updates, opt = CLIPPED.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss


def large_batch(client: int, number: int) -> Any:
    return {"x": np.random.default_rng(100 * client + number).normal(size=(8, 256)).astype(np.float32)}


def check_large_leaves_are_kept_by_all() -> None:
    """And each process of a worker speaks to some of the servers."""
    for clients in sorted({RANKS, max(1, RANKS // 2)}):
        own = RANK * clients // RANKS
        step = autopar.parallelize(large_step, sync=Async(clients=clients))
        assert autopar.verify(step, large_state(), large_batch(own, 0), steps=3).ok
        state = large_state()
        for k in range(5):
            state, _ = step(state, large_batch(own, k))
            assert np.asarray(state["params"]["w"]).shape == (256, 96)
        sizes = [server.leaf_bytes for server in step.plan.served.servers]
        assert len(sizes) == RANKS and max(sizes) < 1.1 * sum(sizes) / RANKS, sizes
        assert RANKS == 1 or all("params/w[" in str(server.leaves) for server in step.plan.served.servers)
        made, timeline = autopar.average(state), autopar.timeline(state)
        batches = [[large_batch(w, k) for k in range(5)] for w in range(clients)]
        alike_ = same if clients == RANKS else near  # who has devices of other processes has its own order of sums
        alike_(made, autopar.replay_timeline(step, large_state(), batches, timeline)[0])


def check_large_weights_of_a_centre_are_kept_by_all() -> None:
    """In pieces; a checkpoint has them whole, for any number of servers."""
    for clients in sorted({RANKS, max(1, RANKS // 2)}):
        own, sync = RANK * clients // RANKS, Elastic(alpha=0.4, interval=2, clients=clients)
        step = autopar.parallelize(large_step, sync=sync)
        assert autopar.verify(step, large_state(), large_batch(own, 0), steps=5).ok
        state = large_state()
        for k in range(6):
            state, _ = step(state, large_batch(own, k))
        made, timeline, sizes = autopar.average(state), autopar.timeline(state), step.plan.sync.server_bytes
        assert len(sizes) == len(timeline.events) == (job().servers or RANKS)
        assert max(sizes) < 1.1 * sum(sizes) / len(sizes), sizes
        assert sum(sizes) == sum(x.nbytes for x in jax.tree.leaves(made["params"]))
        batches = [[large_batch(w, k) for k in range(6)] for w in range(clients)]
        theirs, _ = autopar.replay_timeline(step, large_state(), batches, timeline)
        (same if clients == RANKS else near)(made, theirs)
        autopar.save(FOLDER / f"large{clients}", state)
        for servers in (None, 1):
            again = autopar.parallelize(large_step, sync=dataclasses.replace(sync, servers=servers))
            restored = autopar.restore(
                FOLDER / f"large{clients}", large_state(), step=again, batch=large_batch(own, 0)
            ).state
            same(restored, state)
            same(autopar.average(restored)["params"], made["params"])
        own = {name: np.asarray(local(x)) for name, x in autopar.materialize(state["params"]).items()}
        all_ = {name: everyone().values(x.tolist(), "weights")[:: RANKS // clients] for name, x in own.items()}
        with pytest.warns(autopar.StateWarning, match="their mean is restored"):
            mean = autopar.restore(FOLDER / f"large{clients}", large_state()).state
        near(mean["params"], {name: np.mean(np.array(xs), 0) for name, xs in all_.items()})
