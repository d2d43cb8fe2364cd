"""Clients of a ring in time: closed forms of stragglers, delays that spread, exchanges by hand, shared wires."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from autopar.cost.client_times import (
    ClientLoad,
    Pairs,
    Served,
    ServerLoad,
    simulate_averages,
    simulate_pairs,
    simulate_served,
)
from autopar.ir.cluster import Link
from autopar.ir.topology import Ring
from tests.unit.cost.test_clients import STEP, machines, throughput


def pairs(count: int, size: float = 0.0, devices: int = 1, **links: Any) -> Pairs:
    return Pairs(Ring(count), machines(count * devices, **links), devices, lambda step: size)


def neighbors(count: int, size: float = 0.0, update_s: float = 0.0, **options: Any) -> Served:
    """A ring of clients that are on machines of their own."""
    ring = Ring(count)
    servers = [ServerLoad(c, size, size, update_s=update_s) for c in ring.passives]
    return Served(
        **{"servers": servers, "cluster": machines(count), "devices": range(count), "topology": ring, **options}
    )


@pytest.mark.parametrize("slower", [1, 2, 10, 100])
@pytest.mark.parametrize("slow", [2, 3])
def test_stragglers_have_closed_forms(slow: int, slower: int) -> None:
    """Whoever waits for partners has n/c, as delays spread; whoever waits for nobody (n-1) + 1/c."""
    load = ClientLoad(4, STEP, 200, {slow: slower})
    tied, free = simulate_pairs(load, pairs(4)), simulate_served(load, neighbors(4))
    assert throughput(tied) == pytest.approx(4 / slower, rel=0.02)
    assert throughput(free) == pytest.approx(3 + 1 / slower, rel=0.02)
    assert sum(client.waiting for client in free.clients) == 0
    # The slow one is waited for, and its partners' partners wait for these.
    assert [client.waiting == 0 for client in tied.clients] == [slower == 1 or c == slow for c in range(4)]
    assert all(client.exchange_s == 0 for client in tied.clients)


@pytest.mark.parametrize(
    ("slower", "free", "tied", "off"), [(2, 10.63, 5.83, 1.38), (10, 10.42, 1.47, 1.1), (100, 10.38, 0.16, 1.02)]
)
def test_the_table_of_zhang_et_al(slower: int, free: float, tied: float, off: float) -> None:
    """Table 3, 16 GPUs, what is beside gradients being fitted to the speed-ups without a straggler, 10.88 and 9.26.
    Their HYBRID hides less than it could, as NCCL's means compete with gradients for the GPUs (section 5.2)."""
    load = ClientLoad(16, STEP, 100, {15: slower})
    copies = neighbors(16, receive_s=(16 / 10.88 - 1) * STEP)
    assert throughput(simulate_served(load, copies)) == pytest.approx(free, rel=0.02)
    beside = simulate_averages(load, means_s=[16 / 9.26 * STEP], due=lambda step: [0], delay=1)
    assert 0.99 < throughput(beside) / tied < off


def test_delays_spread_along_the_ring() -> None:
    """Client 0 takes 3 s a step, all others 1 s. Partners are 0 and 3, 1 and 2 first, then 0 and 1, 2 and 3."""
    run = simulate_pairs(ClientLoad(4, 1.0, 4, {0: 3.0}), pairs(4))
    assert [client.ends[:4] for client in run.clients] == [[3, 6, 9, 12], [1, 6, 7, 12], [1, 4, 7, 10], [3, 4, 9, 10]]
    assert run.clients[3].slowest_s >= 2 + 4, "for client 0 in steps 1 and 3"
    # Four links away the first delay comes in step 4: by 7 in step 1, 6 in step 2, 5 in step 3.
    far = simulate_pairs(ClientLoad(8, 1.0, 4, {0: 3.0}), pairs(8)).clients[4]
    assert far.ends[:4] == [1, 2, 3, 6]


def test_partners_wait_less_than_all_for_all() -> None:
    """Where steps vary, by a third: the slowest of two costs less than the slowest of 16."""
    load = ClientLoad(16, STEP, 400, variation=0.3)
    free = throughput(simulate_served(load, neighbors(16)))
    average = throughput(simulate_averages(load, means_s=[0.0], due=lambda step: [0]))
    assert 1.1 * average < throughput(simulate_pairs(load, pairs(16))) < 0.9 * free
    assert free == pytest.approx(16, rel=0.02)


def test_weights_of_partners_travel_behind_each_step() -> None:
    """0.2 s of bytes and 0.05 s of latency, both ways at once."""
    run = simulate_pairs(ClientLoad(2, STEP, 50), pairs(2, size=20.0, bytes_s=100.0, latency_s=0.05))
    assert throughput(run) == pytest.approx(2 * STEP / (STEP + 0.25))
    assert run.clients[0].exchange_s == pytest.approx(0.25 * run.clients[0].minibatches)
    assert run.clients[0].hidden_s == run.clients[0].slowest_s == 0


def test_partners_on_a_machine_need_no_wire_between_machines() -> None:
    """Of two machines with two clients each: every second exchange is within a machine, and both clients of a machine
    share the wire in the others. Clients of two devices send the weights from each."""
    cluster = dataclasses.replace(machines(2, 2, bytes_s=100.0), inside=Link(0.0, math.inf))
    run = simulate_pairs(ClientLoad(4, STEP, 50), Pairs(Ring(4), cluster, 1, lambda step: 20.0))
    assert throughput(run) == pytest.approx(4 * 2 * STEP / (2 * STEP + 2 * 0.2))
    apart = simulate_pairs(ClientLoad(2, STEP, 50), Pairs(Ring(2), cluster, 2, lambda step: 20.0))
    assert throughput(apart) == pytest.approx(2 * STEP / (STEP + 2 * 0.2))
    growing = simulate_pairs(ClientLoad(2, STEP, 8), Pairs(Ring(2), machines(2, bytes_s=100.0), 1, lambda step: step))
    assert growing.clients[0].ends[:3] == pytest.approx([0.11, 0.23, 0.36])


@pytest.mark.parametrize(("size", "exchange_s"), [(1.0, 0.06), (20.0, 0.44)])
def test_an_exchange_runs_beside_the_step(size: float, exchange_s: float) -> None:
    """An active client's step ends when both have: bytes and 0.02 s of latency each way. The passive one goes on."""
    served = neighbors(2, size, cluster=machines(2, bytes_s=100.0, latency_s=0.02))
    active, passive = simulate_served(ClientLoad(2, STEP, 100), served).clients
    assert active.ends[:3] == pytest.approx([n * max(STEP, exchange_s) for n in (1, 2, 3)])
    assert passive.ends[:3] == pytest.approx([STEP, 2 * STEP, 3 * STEP])
    assert active.hidden_s / active.minibatches == pytest.approx(min(STEP, exchange_s))
    assert active.exchange_s / active.minibatches == pytest.approx(max(0.0, exchange_s - STEP))
    assert active.slowest_s == passive.slowest_s == passive.exchange_s == 0


def test_a_passive_client_does_one_thing_at_a_time() -> None:
    """An exchange and what its own step changed take 0.3 s each: asked for at 0, 0.1 (the step) and 0.3, they are done
    one after the other."""
    run = simulate_served(ClientLoad(2, STEP, 2), neighbors(2, update_s=0.3))
    assert run.events[0][:3].tolist() == [[0, 0, 0], [1, 0, 0], [0, 1, 2]]
    active, passive = run.clients
    assert (active.ends[0], passive.ends[0]) == pytest.approx((0.3, 0.6))
    assert active.ends[1] == pytest.approx(0.9)


def test_neighbors_are_asked_in_turn() -> None:
    """Each passive client is asked by both of its neighbours; exchanges are counted for each pair."""
    run = simulate_served(ClientLoad(6, STEP, 10, {4: 2.0}), neighbors(6))
    for c, events in zip(Ring(6).passives, run.events, strict=True):
        numbers = {w: [step for worker, step, _ in events if worker == w] for w, _, _ in events}
        assert set(numbers) == {c, (c - 1) % 6, (c + 1) % 6}
        assert all(found == list(range(len(found))) for found in numbers.values())
        # A step is of the version that the client's step before made, an exchange of the last one.
        own = [0, *(n + 1 for n, event in enumerate(events) if event[0] == c)]
        assert [given for worker, _, given in events if worker == c] == own[:-1]
        assert all(given == n for n, (worker, _, given) in enumerate(events) if worker != c)


@pytest.mark.parametrize("mean_s", [0.03, 0.25])
def test_a_mean_beside_the_gradient(mean_s: float) -> None:
    """A step takes what is longer; what is shorter is hidden."""
    load = ClientLoad(4, STEP, 100)
    run = simulate_averages(load, means_s=[mean_s], due=lambda step: [0], delay=1)
    assert throughput(run) == pytest.approx(4 * STEP / max(STEP, mean_s))
    client = run.clients[0]
    means = client.minibatches - 1  # the last one is on its way
    assert client.hidden_s == pytest.approx(means * min(STEP, mean_s))
    assert client.exchange_s == pytest.approx(means * max(0.0, mean_s - STEP))
    behind = simulate_averages(load, means_s=[mean_s], due=lambda step: [0])
    assert behind.clients[0].hidden_s == 0
