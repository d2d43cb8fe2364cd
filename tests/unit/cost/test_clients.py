"""Clients in time: closed forms of stragglers, wires and servers; steps by hand; nothing is lost or doubled."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

from autopar.cost.client_times import ClientLoad, Served, ServerLoad, simulate_averages, simulate_served
from autopar.ir.cluster import ClusterSpec, Device, Link
from autopar.servers.timeline import Timeline

STEP = 0.1


def machines(count: int, devices: int = 1, bytes_s: float = math.inf, latency_s: float = 0.0) -> ClusterSpec:
    """Machines whose devices have links like those between machines; without more words links take no time."""
    link = Link(latency_s, bytes_s)
    return ClusterSpec("chalk", count, devices, Device("chalk", 1e9, 1e9, 1e9), link, link, 1e9)


def everywhere(count: int, **options: Any) -> Served:
    """A server in each worker's process, at no cost."""
    servers = [ServerLoad(n, 1e6, 1e6) for n in range(count)]
    return Served(**{"servers": servers, "cluster": machines(count), "devices": range(count), **options})


def apart(workers: int, servers: int, cluster: ClusterSpec, **sizes: float) -> Served:
    """Servers that are on other machines than workers."""
    loads = [ServerLoad(workers + n, **{"pull_bytes": 0.0, "push_bytes": 0.0, **sizes}) for n in range(servers)]
    return Served(loads, cluster, range(workers))


def throughput(run: Any) -> float:
    """In minibatches of a worker that nobody disturbs."""
    return STEP * sum(run.rates)


@pytest.mark.parametrize("slower", [1, 2, 10, 100])
def test_stragglers_have_closed_forms(slower: int) -> None:
    """Whoever waits for nobody does (n-1) + 1/c, whoever waits for the slowest n/c (Zhang et al., table 3)."""
    load = ClientLoad(4, STEP, 200, {3: slower})
    free, bounded = (simulate_served(load, everywhere(4, bound=bound)) for bound in (None, 4))
    elastic = simulate_served(load, everywhere(4, every=8))
    average = simulate_averages(load, means_s=[0.0], due=lambda step: [0])
    assert throughput(free) == pytest.approx(3 + 1 / slower)
    assert throughput(elastic) == pytest.approx(3 + 1 / slower)
    assert throughput(bounded) == pytest.approx(4 / slower)
    assert throughput(average) == pytest.approx(4 / slower)
    # Behind the bound's first steps nobody is ahead by more than it, and the slow one alone never waits.
    assert max(c.minibatches for c in bounded.clients) - bounded.clients[3].minibatches <= 5
    assert bounded.clients[3].waiting == average.clients[3].waiting == 0
    assert average.clients[0].waiting == pytest.approx(1 - 1 / slower)
    assert sum(c.waiting for c in free.clients) == 0


@pytest.mark.parametrize(("slower", "waits", "free"), [(2, 5.71, 10.63), (10, 1.52, 10.42), (100, 0.16, 10.38)])
def test_stragglers_of_sixteen_gpus(slower: int, waits: float, free: float) -> None:
    """Speed-ups that Zhang et al. measured (table 3): SYNC-DDL and ADPSGD, one of 16 GPUs slower. What exchanges take
    is fitted to those without a slow one, 8.70 and 10.88."""
    load = ClientLoad(16, STEP, 50, {15: slower})
    average = simulate_averages(load, means_s=[(16 / 8.70 - 1) * STEP], due=lambda step: [0])
    assert throughput(average) == pytest.approx(waits, rel=0.03)
    served = everywhere(16, servers=[ServerLoad(0, 0.0, 0.0)], receive_s=(16 / 10.88 - 1) * STEP)
    assert throughput(simulate_served(load, served)) == pytest.approx(free, rel=0.02)


def test_several_stragglers() -> None:
    load = ClientLoad(5, STEP, 200, {0: 4.0, 3: 2.5})
    assert throughput(simulate_served(load, everywhere(5))) == pytest.approx(3 + 1 / 4 + 1 / 2.5)
    assert throughput(simulate_served(load, everywhere(5, bound=2))) == pytest.approx(5 / 4)


@pytest.mark.parametrize(("pull", "push"), [(1e6, 5e5), (5e5, 1e6), (1e6, 1e6)])
@pytest.mark.parametrize("servers", [1, 2, 4])
def test_where_wires_are_the_limit(servers: int, pull: float, push: float) -> None:
    """Of workers without end, each way of a server's wire carries bandwidth / bytes; servers divide them."""
    cluster = machines(64, bytes_s=1e8)
    served = apart(32, servers, cluster, pull_bytes=pull / servers, push_bytes=push / servers)
    run = simulate_served(ClientLoad(32, 1e-3, 100), served)
    assert sum(run.rates) == pytest.approx(1e8 / (max(pull, push) / servers), rel=0.01)


def test_where_a_workers_own_wire_is_the_limit() -> None:
    """However many servers there are: in a step pulls, then pushes pass it."""
    served = apart(1, 8, machines(64, bytes_s=1e8), pull_bytes=1e6, push_bytes=1e6)
    run = simulate_served(ClientLoad(1, 0.0, 100), served)
    assert sum(run.rates) == pytest.approx(1 / (8e6 / 1e8 + 8e6 / 1e8), rel=0.1)


def test_where_servers_are_the_limit() -> None:
    """Updates and answers come one after the other."""
    run = simulate_served(ClientLoad(8, 1e-3, 200), apart(8, 1, machines(16), read_s=1e-3, update_s=4e-3))
    assert sum(run.rates) == pytest.approx(1 / 5e-3)
    assert all(client.exchange_s > 5 * client.computing_s for client in run.clients)


def test_one_worker_by_hand() -> None:
    """A step: its own, then push and next pull one behind the other on the wire, the update, an answer."""
    cluster = machines(2, bytes_s=1e8, latency_s=2e-3)
    served = apart(1, 1, cluster, pull_bytes=1e6, push_bytes=2e6, read_s=3e-3, update_s=5e-3)
    run = simulate_served(ClientLoad(1, STEP, 50), served)
    push, pull = 2e6 / 1e8 + 2e-3, 1e6 / 1e8 + 2e-3
    assert sum(run.rates) == pytest.approx(1 / (STEP + push + 5e-3 + 3e-3 + pull))
    first = 2e-3 + 3e-3 + pull + STEP + push + 5e-3
    assert run.clients[0].ends[0] == pytest.approx(first)


def test_copies_are_waited_for() -> None:
    served = Served([ServerLoad(0, 0.0, 0.0)], machines(1), [0], receive_s=0.02, send_s=0.03)
    run = simulate_served(ClientLoad(1, STEP, 50), served)
    assert sum(run.rates) == pytest.approx(1 / 0.15)
    assert run.clients[0].waiting == pytest.approx(0.05 / 0.15)


def test_a_workers_own_server_needs_no_wire() -> None:
    """On its machine the devices' links carry messages, and not the machines' wire."""
    alone = Served([ServerLoad(0, 1e9, 1e9)], machines(1, bytes_s=1.0), [0])
    assert throughput(simulate_served(ClientLoad(1, STEP, 20), alone)) == pytest.approx(1)
    cluster = machines(1, 2, bytes_s=1.0)
    quick = ClusterSpec(**{**{k: getattr(cluster, k) for k in cluster.__slots__}, "inside": Link(0.0, math.inf)})
    beside = Served([ServerLoad(1, 1e9, 1e9)], quick, [0])
    assert throughput(simulate_served(ClientLoad(1, STEP, 20), beside)) == pytest.approx(1)


def test_devices_of_a_machine_share_its_wire() -> None:
    """Two workers of a machine pull half as fast as two of two machines, of servers enough."""
    rates = []
    for each in (1, 2):
        cluster = machines(8, each, bytes_s=1e8)
        servers = [ServerLoad(each * 4 + each * n, 1e6, 0.0) for n in range(2)]
        rates.append(sum(simulate_served(ClientLoad(2, 0.0, 50), Served(servers, cluster, [0, 1])).rates))
    assert rates[0] == pytest.approx(2 * rates[1], rel=0.02)


@pytest.mark.parametrize("bound", [None, 0, 1, 3])
@pytest.mark.parametrize("servers", [1, 3])
def test_nothing_is_lost_or_doubled(bound: int | None, servers: int) -> None:
    """Each push is applied once by each server, in its worker's order, of a version that the bound allows; `Timeline`
    checks the latter."""
    cluster = machines(3, 2, bytes_s=1e8, latency_s=1e-4)
    loads = [ServerLoad(n, 1e6, 5e5, 1e-3, 2e-3) for n in range(servers)]
    load = ClientLoad(6, 5e-3, 60, {1: 3.0, 4: 1.5}, variation=0.5)
    run = simulate_served(load, Served(loads, cluster, range(6), bound))
    wanted = {(w, step): 1 for w, client in enumerate(run.clients) for step in range(client.minibatches)}
    for events in run.events:
        assert Counter((w, step) for w, step, _ in events) == wanted
    timeline = Timeline(6, bound, [np.array(events) for events in run.events])
    assert list(timeline.steps) == [client.minibatches for client in run.clients]
    assert timeline.steps.sum() >= 6 * 60
    if bound is not None:
        assert timeline.staleness.max() <= (2 * bound + 1) * 5


def test_staleness_of_workers_that_are_equally_fast() -> None:
    """N - 1, once all have begun; a bound of 0 has a round of all pushes behind each round of pulls."""
    run = simulate_served(ClientLoad(5, STEP, 200, variation=0.05), everywhere(5))
    late = Timeline(5, None, [np.array(events) for events in run.events]).staleness
    assert late.mean() == pytest.approx(4, abs=0.05)
    rounds = simulate_served(ClientLoad(5, STEP, 50, variation=0.3), everywhere(5, bound=0)).events[0]
    assert [version for _, _, version in rounds] == [5 * (k // 5) for k in range(len(rounds))]


def test_slow_workers_are_stale() -> None:
    """Of one that takes c times as long, the others apply c pushes each meanwhile."""
    run = simulate_served(ClientLoad(4, STEP, 200, {3: 10.0}, variation=0.01), everywhere(4))
    pushes = np.array(run.events[0])
    late = np.arange(len(pushes)) - pushes[:, 2]
    assert late[pushes[:, 0] == 3].mean() == pytest.approx(3 * 10, rel=0.05)
    assert late[pushes[:, 0] == 0].mean() == pytest.approx(2.1, rel=0.05)


def test_a_center_is_hidden_behind_steps_that_are_longer() -> None:
    """The exchange runs beside the step; what it takes longer is waited for, every k steps."""
    for size, longer in ((1e6, 0.0), (8e6, 0.06)):
        served = Served([ServerLoad(1, size, size)], machines(2, bytes_s=1e8), [0], every=4)
        run = simulate_served(ClientLoad(1, STEP, 100), served)
        assert sum(run.rates) == pytest.approx(4 / (4 * STEP + longer))
        assert [step for _, step, _ in run.events[0]] == list(range(len(run.events[0])))
        assert len(run.events[0]) == (run.clients[0].minibatches - 1) // 4


@pytest.mark.parametrize(("every", "parts"), [(1, 1), (4, 1), (6, 3)])
def test_means_by_hand(every: int, parts: int) -> None:
    """All wait for the slowest, and for the wires, every k steps: C k / (k c t + the means of all fragments)."""
    distance = every // parts
    load = ClientLoad(4, STEP, 100, {2: 3.0})
    run = simulate_averages(
        load,
        means_s=[0.05] * parts,
        due=lambda step: [n for n in range(parts) if (step - n * distance) % every == 0],
        every=every,
    )
    assert sum(run.rates) == pytest.approx(4 * every / (every * 3 * STEP + parts * 0.05))
    assert {client.minibatches for client in run.clients} == {-(-100 // (2 * every)) * 2 * every}


@pytest.mark.parametrize(("mean_s", "longer"), [(0.15, 0.0), (0.2, 0.0), (0.5, 0.3)])
def test_a_delayed_mean_is_hidden(mean_s: float, longer: float) -> None:
    """Behind d steps; what it takes longer is waited for."""
    run = simulate_averages(
        ClientLoad(4, STEP, 100),
        means_s=[mean_s],
        due=lambda step: [0] if step % 4 == 0 else [],
        every=4,
        delay=2,
    )
    assert sum(run.rates) == pytest.approx(4 * 4 / (4 * STEP + longer))


def test_steps_vary_alike_in_all_modes() -> None:
    """As gamma's distribution, by worker; all wait for the slowest one of each step."""
    load = ClientLoad(8, STEP, 4000, {1: 2.0}, variation=0.3)
    drawn = np.array([list(itertools.islice(load.seconds(w), 4000)) for w in range(8)])
    assert drawn.mean(1) == pytest.approx(STEP * np.array([1, 2, *[1] * 6]), rel=0.03)
    assert drawn.std(1) / drawn.mean(1) == pytest.approx(0.3, rel=0.06)
    assert np.array_equal(drawn[3], list(itertools.islice(load.seconds(3), 4000)))
    run = simulate_averages(load, means_s=[0.0], due=lambda step: [0])
    assert run.clients[0].ends[-1] == pytest.approx(drawn.max(0).sum())
    free = simulate_served(load, everywhere(8))
    assert throughput(free) == pytest.approx(7.5, rel=0.03)


def test_rates_of_few_steps() -> None:
    """Of one that has done less than two periods: over all of its time."""
    run = simulate_averages(ClientLoad(1, STEP, 1), means_s=[], due=lambda step: [])
    client = run.clients[0]
    assert client.rate(0.15, 1) == pytest.approx(1 / STEP) and client.rate(0.05, 1) == 0.0
    assert client.rate(math.inf, 8) == pytest.approx(1 / STEP)
