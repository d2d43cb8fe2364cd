"""What every rank runs in `test_worlds.py`: replicas, a client for each rank or for some of them."""

from __future__ import annotations

import functools
import os
import signal
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar import jax_compat
from autopar.backends.clients import Clients
from autopar.backends.global_arrays import local
from autopar.launch.group import everyone
from autopar.sync import ADPSGD, DPSGD, Average, Hybrid
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
    trained,
)
from tests.support.pickled import assert_no_part_is_pickled
from tests.support.rates import RATES

autopar.api.rates_of = lambda *_, **__: RATES
OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)
STEPS = 12


def expected(
    tx: Any,
    every: int,
    outer: Any = None,
    order: Sequence[Sequence[str]] = (("b", "emb", "w"),),
    delay: int = 0,
    pairs: bool = False,
) -> list[Any]:
    """The weights of all clients, by a second program of the algorithm: one client after the other, plain steps."""
    step, clients = jax.jit(step_of(tx)), range(RANKS)
    states = [make_state(tx) for _ in clients]
    anchor = dict(states[0]["params"])
    opt = [outer.init({name: anchor[name] for name in names}) for names in order] if outer else []
    late: list[tuple[int, str, Any, list[Any]]] = []

    def merge(k: int) -> None:
        for due, name, new, sent in late:
            if due == k:
                for state, old in zip(states, sent, strict=True):
                    state["params"][name] = new + (state["params"][name] - old)
        late[:] = [way for way in late if way[0] > k]

    for k in range(STEPS):
        states = [step(state, minibatch(c, k))[0] for c, state in enumerate(states)]
        merge(k)
        for n, names in enumerate(order):
            if (k + 1 - n * every // len(order)) % every:
                continue
            now = {name: [state["params"][name] for state in states] for name in names}
            mean = {name: sum(values) / RANKS for name, values in now.items()}
            if pairs:  # clients 0 and 1, 2 and 3, ... behind steps 2, 4, ..., and 1 and 2, ..., behind others
                for c, state in enumerate(states):
                    other = (c + (1 if c % 2 == (k + 1) % 2 else -1)) % RANKS
                    state["params"] |= {name: (now[name][c] + now[name][other]) / 2 for name in names}
                continue
            if outer:
                moved = {name: anchor[name] - mean[name] for name in names}
                updates, opt[n] = outer.update(moved, opt[n], {name: anchor[name] for name in names})
                mean = {name: anchor[name] + updates[name] for name in names}
                anchor |= mean
            late += [(k + delay, name, mean[name], now[name]) for name in names]
        merge(k)
    return [state["params"] for state in states]


def check_every_step_by_sgd_is_data_parallelism() -> None:
    tx = optax.sgd(0.1)
    state = trained(autopar.parallelize(step_of(tx), sync=Average()), make_state(tx), range(STEPS))
    plain, theirs = jax.jit(step_of(tx)), make_state(tx)
    for k in range(STEPS):
        parts = [minibatch(c, k) for c in range(RANKS)]
        theirs, _ = plain(theirs, jax.tree.map(lambda *xs: np.concatenate(xs), *parts))
    assert isinstance(state["params"]["w"], autopar.Replica)
    near(autopar.average(state)["params"], theirs["params"])
    assert alike(state["params"])


@jax_compat.enable_x64()
def check_means_and_outer_steps() -> None:
    """Local SGD, DiLoCo and its streaming form, and means beside the gradient; with slots, deferred rows among them,
    that stay each client's own."""
    adam = optax.adam(1e-2)
    fragments = (("emb",), ("w",), ("b",))  # by their bytes
    for tx, sync, order in some(
        (optax.adagrad(0.1), Average(every=3), None),
        (adam, Average(every=4), None),
        (adam, Average(every=4, outer=OUTER), None),
        (optax.sgd(0.1), Average(every=6, outer=OUTER, fragments=3), fragments),
        (optax.sgd(0.1), Average(every=6, fragments=3, delay=2), fragments),
        (optax.sgd(0.1), Hybrid(), None),
        (adam, Hybrid(), None),
        *[(adam, DPSGD(), None)] * (RANKS % 2 == 0),
        (adam, Average(every=6, outer=OUTER, fragments=3, delay=1), fragments),
    ):
        step = autopar.parallelize(step_of(tx), sync=sync)
        state = trained(step, make_state(tx), range(STEPS))
        assert step.plan is not None and step.plan.sync is not None
        assert order is None or step.plan.sync.fragments == tuple(
            tuple(f"params/{name}" for name in names) for names in order
        )
        theirs = expected(
            tx, sync.period, sync.outer, order or (("b", "emb", "w"),), sync.delay, sync.partners == "pairs"
        )
        assert state["params"]["w"].dtype == np.float64
        near(state["params"], theirs[RANK], 1e-6)
        if not sync.delay:  # else a mean is on its way, which counts as merged
            near(autopar.average(state["params"]), jax.tree.map(lambda *xs: sum(xs) / RANKS, *theirs), 1e-6)


def check_a_step_is_compiled_once() -> None:
    """Not once more for a state of which means have made a part."""
    tx, compiled = optax.adam(0.01), []
    step = autopar.parallelize(step_of(tx), sync=Average(every=2), strategy="allreduce")
    state = trained(step, make_state(tx), range(2))
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compiled.append(event))
    trained(step, state, range(2, 6))
    jax.monitoring.clear_event_listeners()
    assert not [event for event in compiled if "backend_compile" in event]


def check_all_plan_by_one_minibatch() -> None:
    """The first client's, whatever the others' need; on clients of several devices this gives capacities."""
    tx = optax.adagrad(0.1)
    step = autopar.parallelize(step_of(tx), sync=Average(every=3), strategy="ps")
    bound = step.planned_for(make_state(tx), minibatch(RANK, 0)).compiled.bound
    assert alike([str(family.bounds) for family in bound.families])


def check_states_that_come_in_shards() -> None:
    """Over a client's devices, or over all: they stay so on clients that have several, else there is a warning."""
    tx, several = optax.adagrad(0.1), jax.local_device_count() > 1

    def placed(x: Any, mesh: Mesh) -> Any:
        spec = P(*[None] * (x.ndim - 1), "data") if x.ndim else P()
        return jax.device_put(np.asarray(x), NamedSharding(mesh, spec))

    for sync, devices in (
        (Average(every=2), jax.devices()),
        (DPSGD(), jax.local_devices()),
        (ADPSGD(), jax.local_devices()),
    ):
        state, mesh = make_state(tx), Mesh(np.array(devices), ("data",))
        shards = jax.tree.map(functools.partial(placed, mesh=mesh), {k: state[k] for k in ("params", "opt")})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", autopar.SlowPlanWarning)
            mine = trained(autopar.parallelize(step_of(tx), sync=sync), state | shards, range(3))
        if not sync.is_asynchronous:
            theirs = trained(autopar.parallelize(step_of(tx), sync=sync), make_state(tx), range(3))
            near(mine["params"], theirs["params"])
        told = [str(w.message) for w in caught if "came in shards" in str(w.message)]
        if several:
            found = {x.data.shape for x in mine["params"]["w"].own.addressable_shards}
            if sync.is_asynchronous:
                assert len(told) == 1 and "sync=autopar.sync.Average" in told[0], told
            else:
                assert found == {(WIDTH, WIDTH // jax.local_device_count())} and not told
        else:
            assert len(told) == (len(devices) > 1), told
            assert sync.is_asynchronous or all("Clients that have several devices each" in text for text in told)


def check_replays_have_the_same_bits() -> None:
    for tx, sync in some(
        (optax.sgd(0.1), Average()),
        (optax.adamw(1e-2), Average(every=2, outer=OUTER)),
        (optax.adagrad(0.1), Average(every=4, outer=OUTER, fragments=2, delay=1)),
        *[(optax.adagrad(0.1), DPSGD())] * (RANKS % 2 == 0),
        (optax.adagrad(0.1), Hybrid()),
    ):
        step = autopar.parallelize(step_of(tx), sync=sync)
        assert autopar.verify(step, make_state(tx), minibatch(RANK, 0), steps=9).ok
        state = trained(step, make_state(tx), range(STEPS))
        minibatches = [[minibatch(c, k) for c in range(RANKS)] for k in range(STEPS)]
        *_, last = autopar.replay(step, make_state(tx), minibatches)
        same(state, last[RANK][0])


def check_random_keys_of_minibatches() -> None:
    """Each client's own, in a step with a third argument."""

    def step(w: jax.Array, x: jax.Array, key: jax.Array) -> Any:
        grad = jax.grad(lambda w: jnp.mean((x @ w * jax.random.bernoulli(key, 0.5, (6, 2))) ** 2))(w)
        return w - 0.1 * grad, x.sum()

    planned = autopar.parallelize(step, sync=Average(every=2), batch_argnums=(1, 2))
    arguments = jnp.ones((3, 2)), np.ones((6, 3), np.float32), jax.random.key(RANK)
    assert autopar.verify(planned, *arguments, steps=4).ok


class WrongClients(Clients):
    """Takes other means than it should: "own"; "old", those of the turn before; "alone", the last client does."""

    wrong, last = "", ()

    def mean(self, arrays: Any, *whose: Any) -> Any:
        means, before = super().mean(arrays, *whose), self.last
        if arrays:
            object.__setattr__(self, "last", means)
        if self.wrong == "own" or (self.wrong == "alone" and self.own == self.count - 1):
            return [2 * x for x in arrays]
        return before if self.wrong == "old" and before and arrays else means


def check_touched_rows_are_sent() -> None:
    """Of tables whose other rows no step moves; also after a checkpoint between two means, and by other shapes."""
    folder = FOLDER / "rows"

    def mixed(step: Any, state: Any) -> Any:
        """Some more steps, one of which has fewer examples."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", autopar.RecompileWarning)
            state, _ = step(trained(step, state, range(5, 7)), jax.tree.map(lambda x: x[:3], minibatch(RANK, 7)))
        return trained(step, state, range(8, 11))

    for tx, sync, lifted in some(
        (optax.adagrad(0.1), Average(every=4, outer=OUTER, fragments=2, delay=1), True),
        (optax.adagrad(0.1), Hybrid(), True),
        *[(optax.adagrad(0.1), DPSGD(), True)] * (RANKS % 2 == 0),
        (optax.adamw(1e-2), Average(every=3), False),
        (optax.adagrad(0.1), Average(every=3), True),
    ):
        step = autopar.parallelize(step_of(tx), sync=sync, strategy="ps")
        state, sent = make_state(tx), list[int]()
        clients = step.planned_for(state, minibatch(RANK, 0)).runner.clients
        object.__setattr__(clients, "mean", functools.partial(_counting, clients.mean, sent))
        assert step.plan.sync.by_rows == (("params/emb",) if lifted else ())
        half = trained(step, state, range(5))
        autopar.save(folder, half)
        restored, _ = autopar.restore(folder, half, step=step, batch=minibatch(RANK, 0))
        whole = mixed(step, half)
        dense = autopar.parallelize(step_of(tx), sync=sync, strategy="allreduce")
        near(
            whole["params"], mixed(dense, trained(dense, make_state(tx), range(5)))["params"], 1e-4 if lifted else 1e-3
        )
        first = sent[:3] if sync.partners == "pairs" else sent  # where neighbours' rows differ ever after
        assert (max(first) < ROWS * WIDTH) == lifted, sent
        if not sync.delay:
            same(mixed(step, restored), whole)
        assert autopar.verify(step, make_state(tx), minibatch(RANK, 0), steps=6).ok


def _counting(mean: Any, sent: list[int], arrays: Any, *whose: Any) -> Any:
    """Notes the elements of the largest array of which a mean is taken."""
    sent.extend(x.size for x in arrays)
    return mean(arrays, *whose)


def check_what_a_replay_notices() -> None:
    """A mean of one's own, an old one, or an outer step of one client alone."""
    tx = optax.sgd(0.1)
    for wrong in some("own", "old", "alone"):
        step = autopar.parallelize(step_of(tx), sync=Average(every=2, outer=OUTER))
        runner = step.planned_for(make_state(tx), minibatch(RANK, 0)).runner
        right = runner.clients
        runner.clients = WrongClients(right.grid, right.own, right.devices, right.processes)
        object.__setattr__(runner.clients, "wrong", wrong)
        with pytest.raises(autopar.VerificationError, match="sequential replay"):
            autopar.verify(step, make_state(tx), minibatch(RANK, 0), steps=6)


def check_checkpoints() -> None:
    """On as many clients the replicas go on, bit for bit; on others their mean does."""
    tx, folder = optax.adam(1e-2), FOLDER / "replicas"
    for sync in some(Average(every=4), Average(every=4, outer=OUTER, fragments=2)):
        step = autopar.parallelize(step_of(tx), sync=sync)
        whole = trained(step, make_state(tx), range(10))
        half = trained(step, make_state(tx), range(6))
        autopar.save(folder, half, position={"batch": 6})
        found, position = autopar.restore(folder, half, step=step, batch=minibatch(RANK, 0))
        assert position == {"batch": 6} and isinstance(found["params"]["w"], autopar.Replica)
        same(found, half)
        same(trained(step, found, range(6, 10)), whole)
        mean = autopar.average(half)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            alone, _ = autopar.restore(folder, jax.eval_shape(lambda: make_state(tx)))
        assert any(f"replicas of {RANKS} clients" in str(w.message) for w in told)
        near(alone["params"], mean["params"])
        assert alike(alone["params"])
        one = autopar.parallelize(step_of(tx), sync=Average(every=4, clients=1))
        with pytest.warns(autopar.StateWarning, match="their mean is restored"):
            fewer, _ = autopar.restore(folder, half, step=one, batch=minibatch(0, 0))
        near(fewer["params"], mean["params"])
        trained(one, fewer, range(2), client=0)
    other = autopar.parallelize(step_of(tx), sync=Average(every=4, outer=OUTER))
    with pytest.raises(autopar.CheckpointError, match="another outer optimizer or other fragments"):
        autopar.restore(folder, half, step=other, batch=minibatch(RANK, 0))
    late = autopar.parallelize(step_of(tx), sync=Average(every=4, delay=2))
    half = trained(late, make_state(tx), range(5))
    autopar.save(folder, half)  # merges what is on its way
    found, _ = autopar.restore(folder, half, step=late, batch=minibatch(RANK, 0))
    near(autopar.average(found["params"]), autopar.average(half["params"]), 1e-4)
    assert np.abs(np.asarray(found["params"]["w"]) - np.asarray(half["params"]["w"])).max() > 1e-4
    assert found["params"]["w"].pending.steps == 5


def check_minibatches() -> None:
    """Every example of an epoch is one client's; a position is good for other numbers of clients."""
    tx = optax.sgd(0.1)
    step = autopar.parallelize(step_of(tx), sync=Average(every=2))
    examples, group = np.arange(7 * RANKS * 5 + 2), everyone()

    def batches() -> Any:
        return autopar.shard({"x": examples}, batch_size=5, shuffle=3, epochs=2, last="drop", step=step)

    mine = [np.asarray(batch["x"]).tolist() for batch in batches()]
    assert len(mine) == 14
    epoch = sorted(x for own in group.values(mine[:7], "seen") for batch in own for x in batch)
    assert len(set(epoch)) == len(epoch) == 7 * RANKS * 5
    going = batches()
    for _ in range(3):
        next(going)
    assert going.state() == {"epoch": 0, "batch": 3 * RANKS, "seed": 3, "sources": 1, "batch_size": 5}
    again = batches()
    again.restore(going.state())
    assert np.asarray(next(again)["x"]).tolist() == mine[3]
    again.restore({**going.state(), "batch": 1})
    seen = sorted(x for own in group.values(np.asarray(next(again)["x"]).tolist(), "seen") for x in own)
    order = np.random.default_rng((3, 0, 0)).permutation(len(examples))
    assert seen == sorted(order[5 : 5 * (RANKS + 1)].tolist())


def check_an_interrupt_ends_all_loops_before_the_same_minibatch() -> None:
    step = autopar.parallelize(step_of(optax.sgd(0.1)), sync=Average(every=2))
    batches = autopar.shard({"x": np.arange(3000 * RANKS)}, batch_size=1, step=step)
    seen = 0
    with pytest.raises(KeyboardInterrupt):
        for _ in batches:
            seen += 1
            if RANK == 0 and seen == 3:
                os.kill(os.getpid(), signal.SIGINT)
    assert 3 <= seen < 3000 and batches.state()["batch"] == seen * RANKS
    assert alike(np.array(seen))


def check_clients_of_several_processes() -> None:
    """One client of all processes is data parallelism, in whole batches."""
    tx = optax.sgd(0.1)
    step = autopar.parallelize(step_of(tx), sync=Average(every=2, clients=1))
    state = trained(step, make_state(tx), range(3), client=0)
    near(autopar.materialize(state["params"]), trained(jax.jit(step_of(tx)), make_state(tx), range(3), 0)["params"])
    if RANKS == 4:  # two clients of two processes each
        step, client = autopar.parallelize(step_of(tx), sync=Average(every=2, clients=2)), RANK // 2
        state = trained(step, make_state(tx), range(4), client)
        plain = [trained(jax.jit(step_of(tx)), make_state(tx), range(2), c) for c in range(2)]
        mean = jax.tree.map(lambda a, b: (a + b) / 2, *(x["params"] for x in plain))
        plain = [trained(jax.jit(step_of(tx)), {**x, "params": mean}, range(2, 4), c) for c, x in enumerate(plain)]
        mean = jax.tree.map(lambda a, b: (a + b) / 2, *(x["params"] for x in plain))
        near(autopar.average(state["params"]), mean)
        batches = autopar.shard({"x": np.arange(40)}, batch_size=10, step=step)
        mine = [np.asarray(local(batch["x"])).tolist() for batch in batches]
        assert mine == [np.arange(10 * k, 10 * k + 10).tolist() for k in (client, client + 2)], mine
    for text, count in (("1", 1), ("machines", 1), (str(RANKS), RANKS)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AUTOPAR_CLIENTS", text)
            said = autopar.parallelize(step_of(tx), sync=Average(every=2))
            chosen = autopar.parallelize(step_of(tx), sync=Average(every=2, clients=RANKS))
        assert said.clients is not None and said.clients.count == count
        assert chosen.clients is not None and chosen.clients.count == RANKS
    with pytest.raises(autopar.ArgumentsError, match=f"don't divide {RANKS} processes"):
        autopar.parallelize(step_of(tx), sync=Average(clients=RANKS + 1))


def check_what_is_refused() -> None:
    tx = optax.sgd(0.1)
    step = autopar.parallelize(step_of(tx), sync=Average())
    differing = make_state(tx)
    differing["params"]["w"] = differing["params"]["w"] + RANK
    with pytest.raises(autopar.ArgumentsError, match=r"params/w isn't the same array on process 1"):
        step(differing, minibatch(RANK, 0))
    step = autopar.parallelize(step_of(tx), sync=Average(every=2 + RANK))
    with pytest.raises(autopar.AutoparError, match="has sync=Average"):
        step(make_state(tx), minibatch(RANK, 0))
    step = autopar.parallelize(step_of(tx), sync=Average(every=3, delay=1))
    state = trained(step, make_state(tx), range(2))
    assert_no_part_is_pickled(state["params"]["w"], RANK)
    with pytest.raises(autopar.StateError, match="replicas that became ordinary arrays"):
        step(autopar.materialize(state), minibatch(RANK, 2))
    with pytest.raises(autopar.StepError, match="was given replicas"):
        autopar.parallelize(step_of(tx))(state, minibatch(0, 2))
    with pytest.raises(autopar.StepError, match="replicas are of another sync="):
        autopar.parallelize(step_of(tx), sync=Average(every=3, outer=OUTER))(state, minibatch(RANK, 2))
    trained(step, autopar.average(state), range(2, 4))
