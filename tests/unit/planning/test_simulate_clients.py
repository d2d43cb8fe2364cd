"""`simulate` of steps with `sync=`: what plans say of bytes and work, stragglers as they were measured, bad input."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.ir.cluster import Device, Link
from autopar.measure.cluster import Cluster
from autopar.sync import Async, Average, Elastic

FREE = Link(0.0, math.inf)
#: Machines of one device, which computes 0.5 GFLOP/s of products; nothing else takes time.
CHALK = Cluster("chalk", 4, 1, Device("chalk", 1e9, 1e9, math.inf), FREE, FREE, 1e9, to_host=FREE)
WIDTH, EXAMPLES = 64, 32
#: Bytes of all weights; and with momentum, what servers keep.
WEIGHTS = 4 * WIDTH * WIDTH * 4
optimizer = optax.sgd(0.1, momentum=0.9)


def step(state: Any, batch: Any) -> Any:
    def loss_fn(params: Any) -> jax.Array:
        x = batch
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    params, slots = state
    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, slots = optimizer.update(grads, slots, params)
    return (optax.apply_updates(params, updates), slots), loss


def make_state() -> Any:
    params = [jnp.eye(WIDTH) for _ in range(4)]
    return params, optimizer.init(params)


def planned(sync: Any) -> autopar.Plan:
    return autopar.plan(autopar.parallelize(step, sync=sync), make_state(), jnp.ones((EXAMPLES, WIDTH)))


def linked(bytes_s: float, machines: int = 4, latency_s: float = 0.0) -> Cluster:
    return dataclasses.replace(CHALK, machines=machines, between=Link(latency_s, bytes_s))


#: The table of docs/replicas.md: c -> minibatches of one worker at full speed that 4 workers did, one c times slower.
MEASURED = {
    "Average()": {1: 2.85, 2: 1.51, 10: 0.29, 100: 0.07},
    "Async(staleness=4)": {1: 3.71, 2: 1.98, 10: 0.52, 100: 0.11},
    "Async()": {1: 3.70, 2: 3.22, 10: 2.85, 100: 2.73},
}


def counted(ends: Any, seconds: float) -> float:
    """Counts minibatches a second of a worker that trains for so long, as `benchmarks replicas.stragglers` does."""
    count = int(np.searchsorted(ends, seconds)) + 1
    return count / ends[count - 1]


@pytest.mark.parametrize("slower", [1, 2, 10, 100])
def test_stragglers_as_they_were_measured(slower: int) -> None:
    """Workers of one machine: the processes of the measurement shared two cores, which the simulation doesn't know, so
    it is above what was measured, by 13% at most."""
    here = dataclasses.replace(CHALK, machines=1, devices=4, inside=Link(1e-5, 1e9))
    options: Any = {"cluster": here, "slow": {3: slower}, "step_s": 0.1}
    free = autopar.simulate(planned(Async()), **options)
    assert free.speedups[0] == pytest.approx(3 + 1 / slower, rel=0.02)
    assert 1 < free.speedups[0] / MEASURED["Async()"][slower] < 1.13
    bounded = autopar.simulate(planned(Async(staleness=4)), **options)
    assert bounded.speedups[0] == pytest.approx(4 / slower, rel=0.02)
    # 12 s were measured, in which the fast ones are 4 steps ahead once.
    found = sum(counted(client.ends, 12.0) for client in bounded.times[0].clients) * 0.1
    assert found == pytest.approx(MEASURED["Async(staleness=4)"][slower], rel=0.09)
    average = autopar.simulate(planned(Average()), **options)
    assert average.speedups[0] == pytest.approx(4 / slower, rel=0.02)


@pytest.mark.parametrize(
    ("bound", "slower", "steps", "measured"),
    [(None, 1, 67, 2.92), (None, 4, 56, 2.92), (4, 4, 22, 1.74), (4, 10, 12, 1.82)],
)
def test_staleness_as_it_was_measured(bound: int | None, slower: int, steps: int, measured: float) -> None:
    """By the timelines of four ranks that trained for 8 s as `python -m benchmarks replicas.stragglers` does."""
    here = dataclasses.replace(CHALK, machines=1, devices=4, inside=Link(1e-5, 1e9))
    options: Any = {"slow": {3: slower}, "step_s": 0.1, "steps": steps, "variation": 0.05}
    found = autopar.simulate(planned(Async(staleness=bound)), cluster=here, **options)
    assert found.times[0].staleness == pytest.approx(measured, rel=0.03)


def test_a_servers_wire() -> None:
    """Of a server for 8 workers, 7 of which are elsewhere: each way carries the bytes that the plan says."""
    made = planned(Async(servers=1))
    (server,) = made.served.servers
    assert server.pull_bytes == server.push_bytes == WEIGHTS
    found = autopar.simulate(made, cluster=linked(1e6), devices=8, servers=1, step_s=1e-3)
    elsewhere = sum(found.times[0].rates[1:])
    assert elsewhere == pytest.approx(1e6 / WEIGHTS, rel=0.02)
    assert found.times[0].limit == "exchanges"
    # Its own worker needs no wire.
    assert found.times[0].rates[0] == pytest.approx(1e3, rel=0.02)
    halves = autopar.simulate(made, cluster=linked(1e6), devices=8, servers=2, step_s=1e-3)
    assert halves.times[0].rates == pytest.approx([2e6 / WEIGHTS / 8] * 8, rel=0.02)


@pytest.mark.parametrize("every", [1, 10])
def test_means_of_replicas(every: int) -> None:
    """2(C-1)/C b bytes, in 2(C-1) messages, behind every k steps."""
    found = autopar.simulate(planned(Average(every=every)), cluster=linked(1e6, latency_s=1e-3), step_s=0.01)
    mean_s = 2 * 3 / 4 * WEIGHTS / 1e6 + 6 * 1e-3
    assert found.times[0].minibatches_s == pytest.approx(4 * every / (every * 0.01 + mean_s))
    late = autopar.simulate(planned(Average(every=20, delay=19)), cluster=linked(1e6), step_s=0.01)
    assert late.speedups[0] == pytest.approx(4) and late.times[0].timeline is None
    alone = autopar.simulate(planned(Average()), cluster=linked(1e6), devices=1, step_s=0.01)
    assert alone.speedups == pytest.approx((1.0,))


def test_clients_of_several_devices() -> None:
    """Each device sends the weights to those of the other clients; a machine's devices share its wire. What a client's
    own step takes has its gradients' exchange in it."""
    made = dataclasses.replace(planned(Average()), devices=2)
    assert made.sync is not None
    cluster = dataclasses.replace(linked(1e6, machines=2), devices=2)
    found = autopar.simulate(made, cluster=cluster, step_s=0.01)
    assert (found.times[0].devices, len(found.times[0].clients)) == (4, 2)
    assert found.times[0].minibatches_s == pytest.approx(2 / (0.01 + 2 * WEIGHTS / 1e6))
    apart = autopar.simulate(made, cluster=linked(1e6), step_s=0.01)
    assert apart.times[0].minibatches_s == pytest.approx(2 / (0.01 + WEIGHTS / 1e6))
    with pytest.raises(autopar.ArgumentsError, match="a client of step has 2 devices; give multiples of them"):
        autopar.simulate(made, cluster=cluster, devices=3)


def test_a_center() -> None:
    """Weights travel each way beside a step of every k."""
    made = planned(Elastic(0.2, interval=4))
    cluster = linked(1e6, machines=2)
    found = autopar.simulate(made, cluster=cluster, servers=1, step_s=0.01)
    # 0.066 s each way, of which the worker's own server needs none.
    assert found.times[0].rates[0] == pytest.approx(100)
    assert found.times[0].rates[1] == pytest.approx(4 / (3 * 0.01 + 2 * WEIGHTS / 1e6))
    assert found.times[0].timeline.workers == 2 and "elastic averaging" in str(found)


def test_what_a_step_takes_by_itself() -> None:
    """Its products at half of the device's rate; servers update what they keep, one push after the other."""
    flops = 3 * 4 * 2 * EXAMPLES * WIDTH * WIDTH - 2 * EXAMPLES * WIDTH * WIDTH  # nothing is derived by the batch
    for sync in (Average(), Async()):
        assert autopar.simulate(planned(sync), cluster=CHALK).step_s == pytest.approx(flops / 0.5e9)
    slow_memory = dataclasses.replace(CHALK, device=dataclasses.replace(CHALK.device, memory_bytes_s=1e6))
    found = autopar.simulate(planned(Async()), cluster=slow_memory, devices=8, servers=1, step_s=1e-3)
    update_s = (2 * 2 * WEIGHTS + WEIGHTS) / 1e6  # weights and momentum read and written, gradients read
    assert found.times[0].minibatches_s == pytest.approx(1 / update_s, rel=0.01)
    alone = autopar.simulate(planned(Average()), cluster=slow_memory, devices=1)
    served = autopar.simulate(planned(Async()), cluster=slow_memory, devices=1)
    assert alone.step_s > served.step_s > flops / 0.5e9


def by_rows(state: Any, ids: Any) -> Any:
    loss, g = jax.value_and_grad(lambda p: jnp.mean((p["emb"][ids] @ p["w"]) ** 2))(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, g), loss


def table_plan(sync: Any) -> autopar.Plan:
    """A table of 100,000 rows of 64 bytes, 100 of which a minibatch looks up, and 1 kB of other weights."""
    state = {"emb": jnp.ones((100_000, 16)), "w": jnp.eye(16)}
    return autopar.plan(autopar.parallelize(by_rows, sync=sync), state, jnp.arange(100))


def test_rows_of_tables_are_what_servers_update() -> None:
    made = table_plan(Async())
    assert made.served.by_rows == ("emb",)
    memory = dataclasses.replace(CHALK, device=dataclasses.replace(CHALK.device, memory_bytes_s=1e6))
    found = autopar.simulate(made, cluster=memory, devices=4, servers=1, step_s=1e-4)
    pushed = made.served.servers[0].push_bytes
    assert found.times[0].minibatches_s == pytest.approx(1e6 / (2 * (6400 + 1024) + pushed), rel=0.01)
    assert autopar.simulate(made, cluster=memory, devices=1).step_s > 0


def test_columns_of_tables_are_updated_by_rows() -> None:
    """A server that keeps half of the columns does half of the work."""
    made = table_plan(Async())
    whole = made.served.servers[0]
    halved = {name: getattr(whole, name) // 2 for name in ("leaf_bytes", "pull_bytes", "push_bytes")}
    half = dataclasses.replace(whole, leaves=("emb[:, 0:8]",), pieces={"emb": 0.5}, **halved)
    cut = dataclasses.replace(made, served=dataclasses.replace(made.served, servers=(half, half)))
    memory = dataclasses.replace(CHALK, device=dataclasses.replace(CHALK.device, memory_bytes_s=1e6))
    found, like = (
        autopar.simulate(plan, cluster=memory, devices=4, servers=2, step_s=1e-4).times[0] for plan in (cut, made)
    )
    assert found.minibatches_s == pytest.approx(like.minibatches_s, rel=0.01)


@pytest.mark.parametrize(("every", "rows"), [(1, 400), (10, 4000), (1000, 100_000)])
def test_means_of_rows_that_clients_have_touched(every: int, rows: int) -> None:
    """Of 4 clients, at most; a plan of one client, which sends nothing, doesn't have them."""
    made = table_plan(Average(every=every))
    assert made.sync.by_rows == () and made.sync.mean_bytes == 6_400_000 + 1024
    mean_s = 2 * 3 / 4 * (64 * rows + 1024) / 1e6
    of_four = dataclasses.replace(made.sync, clients=4, by_rows=("emb",), mean_bytes=64 * rows + 1024)
    for plan in (made, dataclasses.replace(made, sync=of_four)):
        found = autopar.simulate(plan, cluster=linked(1e6), step_s=1e-3)
        assert found.times[0].minibatches_s == pytest.approx(4 * every / (every * 1e-3 + mean_s))
    whole = dataclasses.replace(made, sync=dataclasses.replace(of_four, by_rows=()))
    found = autopar.simulate(whole, cluster=linked(1e6), step_s=1e-3)
    assert found.times[0].minibatches_s == pytest.approx(4 * every / (every * 1e-3 + 1.5 * 6.401024))


def test_what_was_simulated_can_be_replayed() -> None:
    """Servers of the library do in this order what was simulated of them, and a bound holds."""
    training = autopar.parallelize(step, sync=Async(staleness=2))
    made = autopar.plan(training, make_state(), jnp.ones((EXAMPLES, WIDTH)))
    found = autopar.simulate(made, cluster=linked(1e8), slow={1: 3.0}, step_s=0.01, steps=10, variation=0.2)
    (time,) = found.times
    assert len(time.timeline.events) == 4 and list(time.timeline.steps) == [c.minibatches for c in time.clients]
    own = [[np.full((EXAMPLES, WIDTH), k + w, np.float32) for k in range(n)] for w, n in enumerate(time.timeline.steps)]
    (params, _), results = autopar.replay_timeline(training, make_state(), own, time.timeline)
    assert [len(each) for each in results] == list(time.timeline.steps)
    assert all(np.isfinite(w).all() for w in params)


def test_what_is_printed() -> None:
    made = planned(Async(staleness=4))
    found = autopar.simulate(made, cluster=linked(1e8), slow={3: 10}, step_s=0.1)
    text = str(found)
    assert "step on chalk (chalk), simulated: staleness at most 4; worker 3 takes 10 times as long" in text
    assert "A worker's own step takes 100 ms;" in text and "slower clients" in text
    assert len(text.splitlines()) == 3 + 1 + 1 + 4
    several = autopar.simulate(made, cluster=linked(1e8), devices=(1, 2, 16), step_s=0.1)
    assert [t.devices for t in several.times] == [1, 2, 16]
    assert several.speedups == pytest.approx((1, 2, 16), rel=0.1) and len(str(several).splitlines()) == 3 + 3
    assert several.times[0].staleness == 0 < several.times[1].staleness < several.times[2].staleness
    # As many servers as workers, as in the plan; each has weights of its own, of which there are four.
    assert [len(t.timeline.events) for t in several.times] == [1, 2, 8]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"slow": {4: 2.0}}, "slow: there is no worker 4; there are 4, from 0"),
        ({"slow": {"rank 3": 2.0}}, "there is no worker 'rank 3'"),
        ({"slow": {3: 2.0}, "devices": (2, 4)}, "slow: there is no worker 3; there are 2, from 0"),
        ({"slow": {3: 0.5}}, "slow={3: 0.5}: give how many times as long"),
        ({"slow": {3: math.inf}}, "slow={3: inf}"),
        ({"slow": {3: math.nan}}, "slow={3: nan}"),
        ({"slow": {3: "10"}}, "slow={3: '10'}"),
        ({"slow": [3]}, "slow=[3]: give a mapping from workers to factors, such as {3: 10.0}"),
        ({"step_s": 0.0}, "step_s=0.0: give seconds, more than 0"),
        ({"step_s": math.nan}, "step_s=nan"),
        ({"servers": 0}, "servers=0: give a whole number, 1 or more"),
        ({"servers": 5}, "servers=5 of 4 processes: give as many at most"),
        ({"steps": 1.5}, "steps=1.5: give a whole number, 1 or more"),
        ({"devices": 10_000, "servers": 8}, "10000 workers and 8 servers are too many"),
        ({"variation": math.inf}, "variation 0 or more"),
        ({"methods": "psx"}, "there is no 'psx'"),
        ({"cluster": None}, "simulate needs to know the devices"),
    ],
)
def test_bad_input_is_told(options: Any, said: str) -> None:
    with pytest.raises(autopar.ArgumentsError, match=re.escape(said)):
        autopar.simulate(planned(Async()), **{"cluster": CHALK, **options})


def test_a_step_that_takes_no_time() -> None:
    made = dataclasses.replace(planned(Async()), work=type(planned(Async()).work)())
    with pytest.raises(autopar.ArgumentsError, match="is predicted to take no time on .*: give step_s=, in seconds"):
        autopar.simulate(made, cluster=CHALK)


def test_arguments_of_clients_need_clients() -> None:
    made = autopar.plan(autopar.parallelize(step), make_state(), jnp.ones((EXAMPLES, WIDTH)), cluster=CHALK)
    for options in ({"slow": {0: 2.0}}, {"step_s": 0.1}, {"servers": 1}, {"steps": 10}):
        with pytest.raises(autopar.ArgumentsError, match="are of clients, and the plan of step has none"):
            autopar.simulate(made, **options)
