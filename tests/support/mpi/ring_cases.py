"""What every rank runs in `test_worlds.py`: clients that average with their neighbours in a ring at any time."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar import jax_compat
from autopar.launch.group import everyone
from autopar.servers.center import Neighbor, NeighborSpec
from autopar.servers.messages import Exchange
from autopar.sync import ADPSGD, DPSGD
from tests.support.mpi.replica_task import (
    FOLDER,
    RANK,
    RANKS,
    ROWS,
    WIDTH,
    alike,
    make_state,
    minibatch,
    near,
    same,
    some,
    step_of,
)
from tests.support.mpi.served_cases import trained

STEPS = 200 if RANKS > 2 else 30
#: Of each client: some do more.
COUNTS = [STEPS - 3 * c for c in range(RANKS)]


def expected(tx: Any, timeline: autopar.Timeline) -> list[Any]:
    """All clients' states at the end, by a second program of the algorithm: plain steps, and means as they came."""
    step, states, done = jax.jit(step_of(tx)), [make_state(tx) for _ in range(RANKS)], [0] * RANKS
    began = [state["params"] for state in states]  # what a client's step under way was given
    now = list(began)  # what its weights are meanwhile
    todo = [[tuple(event) for event in events[:, :2].tolist()] for events in timeline.events]

    def end(c: int) -> None:
        """The step changes what was made of its weights meanwhile."""
        state, _ = step({**states[c], "params": began[c]}, minibatch(c, done[c]))
        weights = jax.tree.map(lambda x, new, old: x + (new - old), now[c], state["params"], began[c])
        states[c] = {**state, "params": weights}
        began[c], now[c], done[c] = weights, weights, done[c] + 1

    while any(todo):
        for n, events in enumerate(todo):
            passive = 2 * n + 1
            while events:
                c, k = events[0]
                if c != passive:
                    left = done[c] % 2 == 1
                    whose = (c - 1 if left else c + 1) % RANKS
                    if whose != passive or k != (done[c] if RANKS == 2 else done[c] // 2):
                        break
                    mean = jax.tree.map(lambda x, y: (x + y) / 2, now[c], now[passive])
                    now[c] = now[passive] = mean
                events.pop(0)
                end(c)
    return [{**state, "params": now[c]} for c, state in enumerate(states)]


def check_replays_have_the_same_bits() -> None:
    """By rows but for Adam, whose rows move when nobody looks them up."""
    for name, tx in some(("sgd", optax.sgd(0.1)), ("adam", optax.adam(1e-2)), ("adagrad", optax.adagrad(0.1))):
        step = autopar.parallelize(step_of(tx), sync=ADPSGD(), strategy="ps")
        assert autopar.verify(step, make_state(tx), minibatch(RANK, 0), steps=9).ok
        assert step.plan.sync.by_rows == (() if name == "adam" else ("params/emb",))
        state, losses = trained(step, make_state(tx), COUNTS[RANK])
        timeline, made, own = autopar.timeline(state), autopar.average(state), autopar.materialize(state)
        assert timeline.steps.tolist() == COUNTS
        batches = [[minibatch(c, k) for k in range(n)] for c, n in enumerate(COUNTS)]
        theirs, results = autopar.replay_timeline(step, make_state(tx), batches, timeline)
        same(made, theirs)
        same(own, results[RANK][-1][0])
        assert losses == [float(loss) for _, loss in results[RANK]]
        assert alike(made["params"]) and not np.array_equal(made["params"]["w"], own["params"]["w"])
        state, _ = step(state, minibatch(RANK, 0))  # they go on


@jax_compat.enable_x64()
def check_weights_are_those_of_the_algorithm() -> None:
    tx = optax.adagrad(0.1)
    step = autopar.parallelize(step_of(tx), sync=ADPSGD(), strategy="ps")
    state, _ = trained(step, make_state(tx), 20 + RANK)
    theirs = expected(tx, autopar.timeline(state))
    assert state["params"]["w"].dtype == np.float64
    near(
        autopar.average(state)["params"],
        jax.tree.map(lambda *xs: sum(xs) / RANKS, *[x["params"] for x in theirs]),
        1e-6,
    )


def check_no_rate_conserves_the_sum() -> None:
    """Averaging alone moves no mean, and brings clients together."""

    def step(w: jax.Array, batch: Any) -> Any:
        return w - batch["rate"] * jax.grad(lambda w: jnp.mean((batch["x"] @ w - batch["y"]) ** 2))(w), None

    for sync in (ADPSGD(), DPSGD()):
        planned = autopar.parallelize(step, sync=sync)
        random, w = np.random.default_rng(RANK), jnp.ones((16, 8))
        batch = {
            "x": random.normal(size=(4, 16)).astype(np.float32),
            "y": random.normal(size=(4, 8)).astype(np.float32),
        }
        for _ in range(4):
            w, _ = planned(w, {**batch, "rate": np.float32(0.1)})
        before, own = autopar.average(w), np.asarray(w)
        for _ in range(40):
            w, _ = planned(w, {**batch, "rate": np.float32(0)})
            time.sleep(0.002 * RANK)
        after = autopar.average(w)
        np.testing.assert_allclose(after, before, rtol=1e-6, atol=1e-6)
        assert np.abs(own - before).max() > 1e-2 or RANKS == 2  # where both have the mean
        assert np.abs(np.asarray(w) - after).max() < 1e-3


def check_checkpoints() -> None:
    """What neighbours have sent is part of it; and who begins from the mean is told."""
    tx = optax.adagrad(0.1)
    step = autopar.parallelize(step_of(tx), sync=ADPSGD(), strategy="ps")
    state, _ = trained(step, make_state(tx), 5 + RANK)
    mean = autopar.average(state)
    autopar.save(FOLDER / "ring", state)
    again = autopar.restore(FOLDER / "ring", make_state(tx), step=step, batch=minibatch(RANK, 0)).state
    assert isinstance(again["params"]["w"], autopar.Replica)
    same(autopar.average(again), mean)
    again, _ = trained(step, again, 2)
    assert again["params"]["w"].pending.steps == 7 + RANK
    if RANK == 0:  # whose folder it is
        own_steps = next((FOLDER / "ring").glob("version-*/rows/own_steps*/c*"))
        data = own_steps.read_bytes()
        own_steps.unlink()
    everyone().gather(b"", "a file is gone")
    with pytest.raises(autopar.DamagedCheckpointError, match="own_steps.*is missing"):
        autopar.restore(FOLDER / "ring", make_state(tx), step=step, batch=minibatch(RANK, 0))
    if RANK == 0:
        own_steps.write_bytes(data)
    everyone().gather(b"", "it is back")
    with pytest.warns(autopar.StateWarning, match="their mean is restored"):
        whole = autopar.restore(FOLDER / "ring", make_state(tx)).state
    near(whole["params"], mean["params"])


def check_runs_at_random() -> None:
    """Twenty in `make test-all`: other numbers of steps and delays, with and without a rest between."""
    tx, random = optax.sgd(0.1), np.random.default_rng(5)  # of whose table only rows are sent
    step = autopar.parallelize(step_of(tx), sync=ADPSGD(), strategy="ps")
    for _ in range(20 if RANKS > 2 else 1):
        counts, pauses = random.integers(1, 12, (2, RANKS)), random.exponential(0.004, RANKS)
        state = make_state(tx)
        for part in range(2):
            for k in range(int(counts[0, RANK] * part), int(counts[: part + 1, RANK].sum())):
                state, _ = step(state, minibatch(RANK, k))
                time.sleep(pauses[RANK])
            if random.integers(2):
                autopar.average(state)
        batches = [[minibatch(c, k) for k in range(n)] for c, n in enumerate(counts.sum(0).tolist())]
        theirs, _ = autopar.replay_timeline(step, make_state(tx), batches, autopar.timeline(state))
        same(autopar.average(state), theirs)


def check_what_a_user_puts_in_place_is_averaged() -> None:
    """A table in place of a replica may differ in any row, and so may one that was restored."""

    def step(state: Any, ids: jax.Array) -> Any:
        gradients = jax.grad(lambda state: ((state["w"][ids] * state["b"]) ** 2).sum())(state)
        return jax.tree.map(lambda p, g: p - 0.01 * g, state, gradients), None

    planned = autopar.parallelize(step, sync=ADPSGD(), strategy="ps")
    state, ids = {"b": jnp.ones(WIDTH), "w": jnp.ones((ROWS, WIDTH))}, np.arange(6, dtype=np.int32)
    for _ in range(3):
        state, _ = planned(state, ids)
    state, _ = planned({**state, "w": jnp.asarray(autopar.materialize(state["w"])).at[100].add(RANK)}, ids)
    assert planned.plan.sync.by_rows == ("w",)
    for restores in (False, True):
        if restores:
            autopar.save(FOLDER / "placed", state)
            state = autopar.restore(FOLDER / "placed", state, step=planned, batch=ids).state
        for _ in range(30):
            state, _ = planned(state, ids)
            time.sleep(0.002)
        everyone().values(None, "steps")
        row = np.asarray(autopar.average(state)["w"])[100]
        np.testing.assert_allclose(row, 1 + (RANKS - 1) / 2, rtol=1e-6)
    np.testing.assert_allclose(np.asarray(state["w"])[100], row, rtol=0.05)
    np.testing.assert_array_equal(np.asarray(state["w"])[101:], 1)


def check_minibatches_are_given_to_whoever_is_free() -> None:
    step = autopar.parallelize(step_of(optax.sgd(0.1)), sync=ADPSGD())
    mine = []
    for batch in autopar.shard({"x": np.arange(200)}, batch_size=4, step=step):
        mine += np.asarray(batch["x"]).tolist()
        time.sleep(0.2 if RANK == 0 else 0.002)  # far longer than others may wait for a core
    all_ = everyone().values(mine, "minibatches")
    assert sorted(x for own in all_ for x in own) == [*range(200)]
    assert len(all_[0]) < min(map(len, all_[1:]))


def check_clients_of_several_processes() -> None:
    """Within a client data parallelism, on all devices of its processes."""
    tx, count = optax.adagrad(0.1), max(1, RANKS // 2)
    client = RANK // (RANKS // count)
    step = autopar.parallelize(step_of(tx), sync=ADPSGD(clients=count))
    assert autopar.verify(step, make_state(tx), minibatch(client, 0), steps=5).ok
    state, _ = trained_by(step, make_state(tx), client)
    assert alike(autopar.average(state)["params"])


def trained_by(step: Any, state: Any, client: int) -> tuple[Any, float]:
    loss = 0.0
    for k in range(8):
        state, loss = step(state, minibatch(client, k))
    return state, float(loss)


class OneSided(Neighbor):
    """The active client's weights become the mean, and the passive one's stay."""

    def take(self, message: Any) -> Any:
        before = self._leaves
        replies = super().take(message)
        self._leaves = before if isinstance(message, Exchange) else self._leaves
        return replies


class MixedVersions(Neighbor):
    """The mean is of one leaf as it is, and of the others as they were a message before."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._older = self._leaves

    def take(self, message: Any) -> Any:
        before = self._leaves
        if isinstance(message, Exchange):
            self._leaves = [*before[:1], *self._older[1:]]
        self._older = before
        return super().take(message)


def check_what_must_fail() -> None:
    for kind in (OneSided, MixedVersions):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(NeighborSpec, "handler", lambda spec, kind=kind: spec.made(kind).take)
            step = autopar.parallelize(step_of(optax.sgd(0.1)), sync=ADPSGD())
            with pytest.raises(autopar.VerificationError, match="params"):
                autopar.verify(step, make_state(optax.sgd(0.1)), minibatch(RANK, 0), steps=20)


def check_what_is_refused() -> None:
    tx = optax.sgd(0.1)
    state, batch = make_state(tx), minibatch(RANK, 0)
    with pytest.raises(autopar.ArgumentsError, match="donate"):
        autopar.parallelize(step_of(tx), sync=ADPSGD(), donate=False)(state, batch)
    with pytest.raises(autopar.ArgumentsError, match="tables on hosts"):
        autopar.parallelize(step_of(tx), sync=ADPSGD(), strategy=("ps", "hosts"))(state, batch)
    one = dataclasses.replace(ADPSGD(), clients=1)
    alone, _ = autopar.parallelize(step_of(tx), sync=one)(state, minibatch(0, 0))
    assert alone["params"]["w"].shape == state["params"]["w"].shape


def check_odd_rings_are_refused() -> None:
    """On three ranks."""
    if RANKS % 2:
        for sync in (ADPSGD(), DPSGD()):
            with pytest.raises(autopar.ArgumentsError, match=r"3 clients make an odd ring.* even number"):
                autopar.parallelize(step_of(optax.sgd(0.1)), sync=sync)
