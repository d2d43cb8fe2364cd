"""What every rank runs in `test_worlds.py`: servers that keep pieces of large leaves and tables."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.backends.global_arrays import local
from autopar.launch.group import everyone
from autopar.mpi.world import job
from autopar.sync import Async, Elastic
from tests.support.explained import explained
from tests.support.mpi.replica_task import FOLDER, RANK, RANKS, near, same, some
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


def by_row() -> optax.GradientTransformation:
    """Adagrad with one number for each row: no server can update some columns alone."""

    def update(gradients: Any, slots: Any, params: Any = None) -> Any:
        slots = jax.tree.map(lambda s, g: s + jnp.mean(g**2, -1), slots, gradients)
        return jax.tree.map(lambda g, s: -0.1 * g / jnp.sqrt(s + 1e-6)[..., None], gradients, slots), slots

    return optax.GradientTransformation(lambda params: jax.tree.map(lambda p: jnp.zeros(p.shape[:-1]), params), update)


@dataclasses.dataclass(frozen=True)
class Rows:
    """A table of which rows are looked up.

    Attributes:
      tx: What updates it.
      dtype: The table's.
      dense: Whether there is a layer beside it.
      by_rows: Whether rows alone travel; else the optimizer moves all others, too.
      in_pieces: Whether each server keeps some of it.
    """

    tx: optax.GradientTransformation
    dtype: Any = np.float32
    dense: bool = True
    by_rows: bool = True
    in_pieces: bool = True

    def state(self) -> Any:
        """Parameters and slots."""
        params = {"emb": jnp.asarray(np.random.default_rng(0).normal(size=(2000, 24)), self.dtype)}
        params |= {"w": jnp.ones((24, 4)) / 5} if self.dense else {}
        return {"params": params, "opt": self.tx.init(params)}

    def step(self, state: Any, batch: Any) -> Any:
        """Moves the rows of a minibatch."""

        def loss_of(params: Any) -> Any:
            h = jnp.tanh(params["emb"][batch["ids"]].astype(jnp.float32).sum(1))
            return jnp.mean((h @ params["w"] if self.dense else h) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(state["params"])
        updates, opt = self.tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    def check(self, sync: Async, clients: int) -> None:
        """Trains and computes it again; a table alone goes on from a checkpoint with other servers."""
        own, servers = RANK * clients // RANKS, job().servers or RANKS
        step = autopar.parallelize(self.step, sync=dataclasses.replace(sync, clients=clients))
        assert autopar.verify(step, self.state(), ids_of(own, 0), steps=3).ok
        state = self.state()
        for k in range(5):
            state, _ = step(state, ids_of(own, k))
            assert np.asarray(state["params"]["emb"]).shape == (2000, 24)
        plan = step.plan.served
        assert ("params/emb" in plan.by_rows) == self.by_rows
        parts = [server.part_of("params/emb") for server in plan.servers]
        assert sum(parts) == pytest.approx(1)
        assert np.count_nonzero(parts) == (servers if self.in_pieces else 1), parts
        sizes = [server.leaf_bytes for server in plan.servers]
        assert not self.in_pieces or max(sizes) < 1.1 * sum(sizes) / servers, sizes
        text = explained(step)
        if self.by_rows and len(sizes) > 1:
            where = "all servers" if self.in_pieces else f"server {parts.index(1)}, whole"
            assert f"params/emb is on {where}" in text, text
        ranks = [RANKS + n for n in range(job().servers)]
        assert plan.ranks == tuple(ranks[: len(sizes)])
        assert not ranks or f"{', '.join(map(str, ranks))}, which only serve" in text, text
        made, timeline = autopar.average(state), autopar.timeline(state)
        batches = [[ids_of(w, k) for k in range(5)] for w in range(clients)]
        alike_ = same if clients == RANKS else near  # who has devices of other processes has its own order of sums
        alike_(made, autopar.replay_timeline(step, self.state(), batches, timeline)[0])
        if self.dense:
            return
        autopar.save(FOLDER / "rows", state)
        again = autopar.parallelize(self.step, sync=dataclasses.replace(sync, clients=clients, servers=1))
        restored = autopar.restore(FOLDER / "rows", self.state()).state
        same(restored, made)
        restored, _ = again(restored, ids_of(own, 5))
        assert len(again.plan.served.servers) == 1 and not again.plan.served.servers[0].pieces
        assert np.isfinite(np.asarray(autopar.average(restored)["params"]["emb"], np.float32)).all()


def ids_of(client: int, number: int) -> Any:
    return {"ids": np.random.default_rng((client, number)).integers(0, 2000, (8, 3)).astype(np.int32)}


def check_tables_are_kept_by_all() -> None:
    """Each server has some columns of all rows, and of their slots."""
    cases = (
        Rows(optax.adagrad(0.1), jnp.bfloat16),
        Rows(optax.sgd(0.1, momentum=0.9), by_rows=False),
        Rows(by_row(), in_pieces=RANKS == 1),
        Rows(optax.chain(optax.clip_by_global_norm(0.5), optax.adagrad(0.1))),
    )
    for case in some(*cases):
        case.check(Async(), RANKS)


def check_a_table_alone_is_kept_by_all() -> None:
    """And each process of a worker speaks to some of the servers."""
    Rows(optax.sgd(0.1), dense=False).check(Async(staleness=1), max(1, RANKS // 2))
