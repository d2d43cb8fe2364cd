"""What every rank runs in `test_worlds.py`: a state that servers in the ranks keep, which workers train."""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax
import pytest

import autopar
from autopar.backends.global_arrays import local
from autopar.launch.group import everyone
from autopar.servers.messages import Push
from autopar.servers.sessions import CenterSession
from autopar.sync import Async, Elastic
from tests.support.mpi.replica_task import (
    FOLDER,
    RANK,
    RANKS,
    alike,
    make_state,
    minibatch,
    near,
    same,
    some,
    step_of,
)

STEPS = 200 if RANKS > 2 else 30


def trained(step: Any, state: Any, steps: int = STEPS) -> tuple[Any, list[float]]:
    """Trains with delays at random, and now and then a look at a weight."""
    random, losses = np.random.default_rng(RANK), []
    for k in range(steps):
        state, loss = step(state, minibatch(RANK, k))
        losses.append(float(loss))
        if random.random() < 0.2:
            time.sleep(random.exponential(0.004))
        if random.random() < 0.05:
            assert np.isfinite(np.asarray(state["params"]["w"])).all()
    return state, losses


def replayed(step: Any, state: Any, timeline: autopar.Timeline) -> tuple[Any, list[list[float]]]:
    batches = [[minibatch(w, k) for k in range(n)] for w, n in enumerate(timeline.steps)]
    made, results = autopar.replay_timeline(step, state, batches, timeline)
    return made, [[float(loss) for _, loss in each] for each in results]


CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))


def check_replays_have_the_same_bits() -> None:
    for tx, bound in some((optax.sgd(0.1), None), (CLIPPED, 1), (optax.adagrad(0.1), None), (optax.adagrad(0.1), 3)):
        step = autopar.parallelize(step_of(tx), sync=Async(staleness=bound))
        assert autopar.verify(step, make_state(tx), minibatch(RANK, 0), steps=9).ok
        state, losses = trained(step, make_state(tx))
        timeline, made = autopar.timeline(state), autopar.average(state)
        assert timeline.steps.tolist() == [STEPS] * RANKS
        assert alike([timeline.events[0], made["params"]])
        theirs, their_losses = replayed(step, make_state(tx), timeline)
        same(made, theirs)
        assert losses == their_losses[RANK]
        state, _ = step(state, minibatch(RANK, 0))  # servers go on
        assert len(autopar.timeline(state).pushes[0]) == (STEPS + 1) * RANKS


def plain(tx: Any, steps: int) -> Any:
    """The state of plain steps on the minibatches of all workers at once."""
    step, state = jax.jit(step_of(tx)), make_state(tx)
    for k in range(steps):
        parts = [minibatch(w, k) for w in range(RANKS)]
        state, _ = step(state, jax.tree.map(lambda *xs: np.concatenate(xs), *parts))
    return state


def check_no_staleness_is_data_parallelism() -> None:
    for tx in (optax.sgd(0.1), CLIPPED):
        step = autopar.parallelize(step_of(tx), sync=Async(staleness=0))
        state, _ = trained(step, make_state(tx), 8)
        near(autopar.average(state)["params"], plain(tx, 8)["params"])


def check_steps_before() -> None:
    """A warm-up is data parallelism; then servers go on with its state."""
    tx = optax.adagrad(0.1)
    step = autopar.parallelize(step_of(tx), sync=Async(warmup=6))
    state, _ = trained(step, make_state(tx), 6)
    near(autopar.materialize(state["params"]), plain(tx, 6)["params"])
    for k in range(6, 9):
        state, _ = step(state, minibatch(RANK, k))
    made, timeline = autopar.average(state), autopar.timeline(state)
    assert isinstance(state["params"]["w"], autopar.ServedLeaf)
    assert timeline.steps.tolist() == [3] * RANKS
    batches = [[minibatch(w, k) for k in range(6, 9)] for w in range(RANKS)]
    near(autopar.replay_timeline(step, plain(tx, 6), batches, timeline)[0]["params"], made["params"])


def check_rows_alone_travel() -> None:
    step = autopar.parallelize(step_of(optax.adagrad(0.1)), sync=Async())
    step(make_state(optax.adagrad(0.1)), minibatch(RANK, 0))
    plan = step.plan.served
    assert plan.by_rows == ("params/emb",) and len(plan.servers) == min(RANKS, 3)
    emb = next(server for server in plan.servers if "params/emb" in server.leaves)
    assert emb.leaves == ("opt/0/sum_of_squares/emb", "params/emb")
    assert emb.pull_bytes + emb.push_bytes < emb.leaf_bytes / 3


def check_a_worker_with_fewer_steps_holds_up_nobody() -> None:
    tx = optax.sgd(0.1)
    step = autopar.parallelize(step_of(tx), sync=Async(staleness=1))
    state, _ = trained(step, make_state(tx), 4 + 6 * RANK)
    made, timeline = autopar.average(state), autopar.timeline(state)
    assert timeline.steps.tolist() == [4 + 6 * w for w in range(RANKS)]
    same(made, replayed(step, make_state(tx), timeline)[0])


def check_the_bound_holds_after_a_rest() -> None:
    """Workers have done different numbers of steps before it; whoever is late then is waited for."""
    tx = optax.sgd(0.1)
    step = autopar.parallelize(step_of(tx), sync=Async(staleness=1))
    state, _ = trained(step, make_state(tx), 3 + 4 * RANK)
    before = len(autopar.timeline(state).pushes[0])
    time.sleep(0.3 if RANK == RANKS - 1 else 0)
    for k in range(8):
        state, _ = step(state, minibatch(RANK, k))
    timeline = autopar.timeline(state)  # it checks the bound, counted since the rest
    later = timeline.pushes[0][before:, 0].tolist()
    assert len(later) == 8 * RANKS
    assert max(later[: later.index(RANKS - 1)].count(w) for w in range(RANKS)) <= 2


def check_loops_of_several_epochs_under_a_bound() -> None:
    """A worker that has no minibatch left is waited for by nobody, whatever it does next."""
    step = autopar.parallelize(step_of(optax.sgd(0.1)), sync=Async(staleness=1))
    state = make_state(optax.sgd(0.1))
    for epoch in range(3):
        for batch in autopar.shard({"k": np.arange(11)}, batch_size=1, step=step, shuffle=epoch):
            state, _ = step(state, minibatch(0, int(batch["k"][0])))
            time.sleep(0.01 * RANK)
    assert autopar.timeline(state).steps.sum() == 33


def check_runs_at_random() -> None:
    """Twenty in `make test-all`: other bounds, numbers of steps and delays, with and without a rest between."""
    tx, random = optax.sgd(0.1), np.random.default_rng(5)
    steps = {bound: autopar.parallelize(step_of(tx), sync=Async(staleness=bound)) for bound in (None, 1, 2, 5)}
    for _ in range(20 if RANKS > 2 else 0):
        step = list(steps.values())[random.integers(4)]
        counts = random.integers(1, 12, (2, RANKS))
        pauses = random.exponential(0.004, RANKS)
        state = make_state(tx)
        for part in range(2):
            for k in range(int(counts[0, RANK] * part), int(counts[: part + 1, RANK].sum())):
                state, _ = step(state, minibatch(RANK, k))
                time.sleep(pauses[RANK])
            if random.integers(2):
                autopar.average(state)
        timeline, made = autopar.timeline(state), autopar.average(state)
        assert timeline.steps.tolist() == counts.sum(0).tolist()
        same(made, replayed(step, make_state(tx), timeline)[0])


def check_checkpoints() -> None:
    """What is saved has all pushes, and another job of servers goes on with it."""
    tx = optax.adam(1e-2)
    step = autopar.parallelize(step_of(tx), sync=Async())
    state, _ = trained(step, make_state(tx), 5)
    autopar.save(FOLDER / "served", state)
    restored = autopar.restore(FOLDER / "served", make_state(tx)).state
    same(restored, autopar.average(state))
    assert int(restored["opt"][0].count) == 5 * RANKS
    state, _ = trained(step, restored, 3)
    assert int(autopar.average(state)["opt"][0].count) == 8 * RANKS


def check_what_is_refused() -> None:
    tx = optax.sgd(0.1)
    step = autopar.parallelize(step_of(tx), sync=Async())
    old, _ = step(make_state(tx), minibatch(RANK, 0))
    new, _ = step(old, minibatch(RANK, 1))
    with pytest.raises(autopar.DonatedStateError):
        np.asarray(old["params"]["w"])
    with pytest.raises(autopar.DonatedStateError):
        step(old, minibatch(RANK, 2))
    less = jax.tree.map(lambda x: x[:3], minibatch(RANK, 2))
    with pytest.raises(autopar.StepError, match="minibatches of one shape"), pytest.warns(autopar.RecompileWarning):
        step(new, less)
    with pytest.raises(autopar.StepError, match=r"autopar.average\(state\)"):
        autopar.parallelize(step_of(tx))(new, minibatch(RANK, 2))
    start = make_state(tx)
    start["params"]["b"] += RANK
    with pytest.raises(autopar.AutoparError, match="params/b"):
        step(start, minibatch(RANK, 0))
    with pytest.raises(autopar.ArgumentsError, match="servers of Async"):
        autopar.parallelize(step_of(tx), sync=Async(), strategy=("ps", "hosts"))
    everyone().gather(b"", "all were refused")


def check_elastic_replays_have_the_same_bits() -> None:
    """Replicas, exchanges at random moments, the centre; tables by their rows within a worker."""
    for tx, interval in some((optax.sgd(0.1), 1), (optax.adam(1e-2), 3), (optax.adagrad(0.1), 4)):
        step = autopar.parallelize(step_of(tx), sync=Elastic(alpha=0.9 / RANKS, interval=interval))
        assert autopar.verify(step, make_state(tx), minibatch(RANK, 0), steps=9).ok
        mine = STEPS - 5 * RANK
        state, losses = trained(step, make_state(tx), mine)
        timeline, made, own = autopar.timeline(state), autopar.average(state), autopar.materialize(state)
        assert timeline.steps.tolist() == [(STEPS - 5 * w - 1) // interval for w in range(RANKS)]
        batches = [[minibatch(w, k) for k in range(STEPS - 5 * w)] for w in range(RANKS)]
        theirs, results = autopar.replay_timeline(step, make_state(tx), batches, timeline)
        same(made, theirs)
        same(own, results[RANK][-1][0])
        assert losses == [float(loss) for _, loss in results[RANK]]
        assert not np.array_equal(made["params"]["w"], own["params"]["w"])
        state, _ = step(state, minibatch(RANK, 0))


def check_elastic_checkpoints() -> None:
    tx = optax.adam(1e-2)
    step = autopar.parallelize(step_of(tx), sync=Elastic(alpha=0.3, interval=2))
    state, _ = trained(step, make_state(tx), 5)
    center = autopar.average(state)["params"]
    autopar.save(FOLDER / "elastic", state)
    again = autopar.restore(FOLDER / "elastic", make_state(tx), step=step, batch=minibatch(RANK, 0)).state
    same(again, state)
    same(autopar.average(again)["params"], center)
    state, _ = trained(step, again, 2)
    assert int(np.asarray(state["opt"][0].count)) == 7


def check_minibatches_are_given_to_whoever_is_free() -> None:
    """Each once an epoch, in the order of a seed; more to a faster worker; a position from which others go on."""
    step = autopar.parallelize(step_of(optax.sgd(0.1)), sync=Async())
    source = {"x": np.arange(400)}
    batches = autopar.shard(source, batch_size=4, step=step, epochs=2, shuffle=3)
    mine = []
    for batch in batches:
        mine.append(np.asarray(batch["x"]).tolist())
        time.sleep(0.2 if RANK == 0 else 0.002)  # far longer than others may wait for a core
    all_ = everyone().values(mine, "minibatches")
    assert sorted(x for own in all_ for some in own for x in some) == sorted(2 * [*range(400)])
    assert len(all_[0]) < min(map(len, all_[1:]))
    assert batches.state()["epoch"] == 2
    batches.restore({**batches.state(), "epoch": 1, "batch": 95})
    rest = everyone().values([np.asarray(batch["x"]).tolist() for batch in batches], "the rest")
    assert sum(map(len, rest)) == 5


def check_an_interrupt_ends_all_loops() -> None:
    """Whoever has a minibatch then uses it; nobody gets another one; the position is exact."""
    step = autopar.parallelize(step_of(optax.sgd(0.1)), sync=Elastic(alpha=0.5))
    batches = autopar.shard({"x": np.arange(9000)}, batch_size=1, step=step)
    before = 0
    for _ in range(2):
        seen = 0
        with pytest.raises(KeyboardInterrupt):
            for _ in batches:
                seen += 1
                time.sleep(0.001 * RANK)
                if RANK == 0 and seen == 3:
                    os.kill(os.getpid(), signal.SIGINT)
        counts = everyone().values(seen, "how many")
        assert sum(counts) < 4500
        made = everyone().values(batches.state()["batch"], "positions")
        assert len(set(made)) == 1
        assert made[0] - before == sum(counts)
        before = made[0]


def check_workers_of_several_processes() -> None:
    """Within a worker data parallelism, on all devices of its processes; servers and centre between workers."""
    tx, count = optax.adagrad(0.1), max(1, RANKS // 2)
    worker = RANK // (RANKS // count)
    elastic = Elastic(alpha=0.5, interval=3, clients=count)
    for sync, strategy in ((Async(clients=count), "auto"), (elastic, "allreduce"), (elastic, "ps")):
        step = autopar.parallelize(step_of(tx), sync=sync, strategy=strategy)
        assert autopar.verify(step, make_state(tx), minibatch(worker, 0), steps=5).ok
        state = make_state(tx)
        for k in range(8):
            state, loss = step(state, minibatch(worker, k))
        timeline, made = autopar.timeline(state), autopar.average(state)
        assert alike([float(loss)]) == (count == 1) and alike(made["params"])
        batches = [[minibatch(w, k) for k in range(8)] for w in range(count)]
        theirs, results = autopar.replay_timeline(one_device_step(tx, sync), make_state(tx), batches, timeline)
        near(made["params"], theirs["params"], 1e-4)
        np.testing.assert_allclose(float(loss), float(results[worker][-1][1]), rtol=1e-4)
        batches = autopar.shard({"x": np.arange(64)}, batch_size=4, step=step)
        mine = [np.asarray(local(batch["x"])).tolist() for batch in batches]
        seen = everyone().values(mine, "minibatches")
        each = RANKS // count
        assert all(seen[w * each] == seen[w * each + n] for w in range(count) for n in range(each))
        assert sorted(x for own in seen[::each] for some in own for x in some) == [*range(64)]


def one_device_step(tx: Any, sync: Any) -> Any:
    """The step in this process alone."""
    mesh = jax.make_mesh((1,), ("data",), devices=jax.local_devices()[:1])
    return autopar.parallelize(step_of(tx), sync=dataclasses.replace(sync, clients=None), mesh=mesh)


def check_what_must_fail() -> None:
    """A worker that pushes twice its gradient, and one that moves twice as far, or alone."""
    tx, last = optax.sgd(0.1), RANK == RANKS - 1
    start, batch = make_state(tx), minibatch(RANK, 0)
    with pytest.MonkeyPatch.context() as patch:
        if last:
            patch.setattr(Push, "__init__", _doubled(Push.__init__))
        with pytest.raises(autopar.VerificationError, match="params"):
            autopar.verify(autopar.parallelize(step_of(tx), sync=Async()), start, batch, steps=4)
    for factor in (0.0, 2.0):
        with pytest.MonkeyPatch.context() as patch:
            step = autopar.parallelize(step_of(tx), sync=Elastic(alpha=0.4, interval=2))
            if last:
                receive = CenterSession.receive
                patch.setattr(CenterSession, "receive", functools.partialmethod(_moved, receive, factor))
            with pytest.raises(autopar.VerificationError, match="params"):
                autopar.verify(step, start, batch, steps=4)


def _doubled(init: Callable[..., None]) -> Callable[..., None]:
    def double(self: Push, worker: int, step: int, values: Sequence[Any]) -> None:
        init(self, worker, step, [2 * x if np.issubdtype(x.dtype, np.floating) else x for x in values])

    return double


def _moved(self: CenterSession, receive: Callable[..., Any], factor: float, server: int | None) -> Any:
    return [[np.float32(factor) * x for x in part] for part in receive(self, server)]
