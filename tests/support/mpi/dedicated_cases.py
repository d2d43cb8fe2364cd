"""What every worker runs in `test_dedicated.py`: the last ranks of the job are servers, and keep what is trained."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar import kvstore
from autopar.batches.on_demand import MinibatchServer
from autopar.kvstore import KeyServer
from autopar.launch.group import everyone
from autopar.mpi.service import service
from autopar.mpi.world import job, world
from autopar.servers.center import Center
from autopar.servers.server import Server
from autopar.sync import Async, Average, Elastic
from tests.support.mpi.replica_task import RANK, RANKS, alike, make_state, minibatch, same, step_of, trained
from tests.support.mpi.served_cases import replayed

SERVERS = int(os.environ["AUTOPAR_SERVERS"])


@contextmanager
def nothing_kept_here() -> Iterator[None]:
    """Checks that this process makes no server, and answers nobody."""

    def refused(self: Any, *arguments: Any, **options: Any) -> None:
        raise AssertionError(f"{type(self).__name__} in worker {RANK}")

    with pytest.MonkeyPatch.context() as patch:
        for kind in (Server, Center, MinibatchServer, KeyServer):
            patch.setattr(kind, "__init__", refused)
        yield
    assert not any(service()._handlers)


def check_the_job_has_workers_alone() -> None:
    assert jax.process_count() == everyone().size == world().size == RANKS == job().size - SERVERS
    assert world().comm.Get_size() == RANKS and world().rank == job().rank == jax.process_index()
    assert not job().is_server and len(jax.devices()) == RANKS * jax.local_device_count()


def check_servers_keep_the_state() -> None:
    """All of them, or the first one; the numbers are those of a replay in this process."""
    for wanted in (None, 1):
        tx = optax.adam(1e-2)
        step = autopar.parallelize(step_of(tx), sync=Async(servers=wanted))
        with nothing_kept_here():
            state = trained(step, make_state(tx), range(12))
            timeline, made = autopar.timeline(state), autopar.average(state)
        assert len(timeline.events) == len(step.plan.served.servers) == (wanted or SERVERS)
        assert np.isfinite(np.asarray(state["params"]["w"])).all()
        homes = {str(leaf).split(" on ")[1].split(";")[0] for leaf in jax.tree.leaves(state["params"])}
        assert homes == {f"server {n}" for n in range(wanted or SERVERS)}
        assert timeline.steps.tolist() == [12] * RANKS
        same(made, replayed(step, make_state(tx), timeline)[0])
        assert autopar.verify(step, make_state(tx), minibatch(RANK, 0), steps=5).ok


def check_keys_and_types() -> None:
    """Random keys that go on, weak types, and types that exist on workers alone: of 64 bits, of 16."""

    def step(state: Any, x: Any) -> Any:
        key, sub = jax.random.split(state["key"])
        loss, slope = jax.value_and_grad(lambda w: jnp.mean((x @ w.astype(x.dtype)) ** 2))(state["w"])
        wide = state["wide"] * 0.5 + slope.sum()
        return {"w": state["w"] - 0.1 * slope, "key": key, "n": state["n"] + 1, "wide": wide, "sub": sub}, loss

    def start(dtype: Any, impl: str) -> Any:
        key = jax.random.key(1, impl=impl)
        weights = jax.random.normal(key, (4, 2), dtype)
        return {"w": weights, "key": key, "n": jnp.asarray(0), "wide": jnp.ones((), dtype), "sub": key}

    for dtype, impl in ((jnp.bfloat16, "threefry2x32"), (jnp.float64, "rbg")):
        jax.config.update("jax_enable_x64", dtype == jnp.float64)
        batches = [[np.full((3, 4), 0.1 * (w + k), np.float32) for k in range(6)] for w in range(RANKS)]
        planned = autopar.parallelize(step, sync=Async())
        state = start(dtype, impl)
        with nothing_kept_here():
            for x in batches[RANK]:
                state, _ = planned(state, x)
            timeline, made = autopar.timeline(state), autopar.average(state)
        assert made["w"].dtype == dtype and int(made["n"]) >= 6
        same(made, autopar.replay_timeline(planned, start(dtype, impl), batches, timeline)[0])
    jax.config.update("jax_enable_x64", False)


def check_a_centre() -> None:
    tx = optax.adam(1e-2)
    step = autopar.parallelize(step_of(tx), sync=Elastic(alpha=0.4, interval=2))
    with nothing_kept_here():
        state = trained(step, make_state(tx), range(9))
        timeline, made = autopar.timeline(state), autopar.average(state)
    assert len(timeline.events) == SERVERS and timeline.steps.tolist() == [4] * RANKS
    assert step.plan.sync.server_ranks == tuple(range(RANKS, RANKS + SERVERS))
    batches = [[minibatch(w, k) for k in range(9)] for w in range(RANKS)]
    same(made, autopar.replay_timeline(step, make_state(tx), batches, timeline)[0])


def check_keys_with_an_optimizer() -> None:
    """Keys before and behind `set_optimizer`, on all servers; a state of several leaves."""
    tx, ones = optax.adam(0.1), np.ones(3, np.float32)
    with nothing_kept_here():
        store = kvstore.create("sync")
        store.init(["a", "b"], [ones, 2 * ones])
        store.push("a", ones)
        np.testing.assert_array_equal(store.pull("a"), RANKS * ones)
        store.set_optimizer(tx, rescale=1 / RANKS)
        store.init(["c"], [np.ones((2, 2), np.float32)])
        begun = {"a": RANKS * ones, "b": 2 * ones, "c": np.ones((2, 2), np.float32)}
        for name, value in begun.items():
            slots = tx.init(jnp.asarray(value))
            for k in range(4):
                store.push(name, np.full_like(value, RANK + k))
                updates, slots = tx.update(jnp.full_like(value, (RANKS - 1) / 2 + k), slots, value)
                value = value + updates
                np.testing.assert_allclose(store.pull(name), value, rtol=1e-5)
        with pytest.raises(autopar.ArgumentsError, match=r"float16\(3,\) is pushed"):
            store.push("a", ones.astype(np.float16))
        again = kvstore.create("async", servers=1)
        again.init([1], [ones])
        again.set_optimizer(kvstore.elastic(0.5))
        again.push(1, 3 * ones)
        everyone().gather(b"", "all have pushed")
        assert np.ptp(again.pull(1)) == 0 and again.pull(1)[0] > 1


def check_what_cannot_be_sent() -> None:
    def called(x: Any) -> Any:
        return jax.pure_callback(lambda x: np.asarray(x), jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return jax.tree.map(lambda g, p: called(p) - p - 0.1 * g, updates, params), state

    tx = optax.GradientTransformation(lambda _: (), update)
    with pytest.raises(autopar.StepError, match="can't be sent to a dedicated one"):
        autopar.parallelize(step_of(tx), sync=Async())(make_state(tx), minibatch(RANK, 0))
    store = kvstore.create("async")
    store.init(["a"], [np.ones(3, np.float32)])
    with pytest.raises(autopar.ArgumentsError, match="callback"):
        store.set_optimizer(tx)


def check_minibatches_are_dealt() -> None:
    step = autopar.parallelize(step_of(optax.sgd(0.1)), sync=Async())
    with nothing_kept_here():
        batches = autopar.shard({"x": np.arange(40)}, batch_size=2, step=step)
        mine = [np.asarray(batch["x"]).tolist() for batch in batches]
    seen = everyone().values(mine, "minibatches")
    assert sorted(x for own in seen for some in own for x in some) == [*range(40)]


def check_training_without_servers() -> None:
    """The servers have nothing to do."""
    tx = optax.sgd(0.1)
    state = trained(autopar.parallelize(step_of(tx), sync=Average(every=2)), make_state(tx), range(4))
    assert alike(autopar.average(state)["params"])


def check_how_many_there_are() -> None:
    tx, words = optax.sgd(0.1), f"this job has {SERVERS} dedicated server"
    for sync in (Async(servers=SERVERS + 1), Elastic(alpha=0.3, servers=SERVERS + 1)):
        with pytest.raises(autopar.ArgumentsError, match=words):
            autopar.parallelize(step_of(tx), sync=sync)(make_state(tx), minibatch(RANK, 0))
    with pytest.raises(autopar.ArgumentsError, match=words):
        kvstore.create(servers=SERVERS + 1)
