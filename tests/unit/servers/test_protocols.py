"""One protocol, three drivers: what a clock makes of it a recorded timeline repeats, and no order is a deadlock."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import jax.numpy as jnp
import numpy as np
import pytest

from autopar.cost.client_times import ClientLoad, Served, ServerLoad, simulate_served
from autopar.errors import TimelineError
from autopar.ir.topology import Ring
from autopar.planning.local_clients import Messages, RecordedOrder, run_clients
from autopar.protocols import Receive, Send, Want
from autopar.servers.center import Center, Neighbor
from autopar.servers.messages import Message
from autopar.servers.sessions import message
from autopar.servers.timeline import Timeline
from tests.unit.cost.test_clients import machines
from tests.unit.servers.test_ring import events_of

CLIENTS, INTERVAL = 4, 3
ZERO = np.zeros((), np.float32)


def served(way: str) -> Served:
    """Servers whose links and updates take time, so that messages meet."""
    ring = Ring(CLIENTS) if way == "ring" else None
    places = range(2) if ring is None else ring.passives
    loads = [ServerLoad(n, 1e6, 1e6, update_s=2e-3) for n in places]
    every = 0 if ring is not None else INTERVAL
    return Served(loads, machines(CLIENTS, bytes_s=1e9), range(CLIENTS), every=every, topology=ring)


def servers(way: str) -> Sequence[Center]:
    if way == "ring":
        return [Neighbor({0: jnp.asarray(ZERO)}, CLIENTS) for _ in range(CLIENTS // 2)]
    return [Center({0: jnp.asarray(ZERO)}, 0.5, CLIENTS) for _ in range(2)]


def client(step: Callable[[int, int], Iterator[Want]], number: int, steps: int) -> Messages:
    """Sends nothing but zeros."""
    for k in range(steps):
        for want in step(number, k):
            if isinstance(want, Send):
                asked = range(2) if want.server is None else [want.server]
                yield {n: message(number, want, [ZERO]) for n in asked}
            elif isinstance(want, Receive):
                yield None


@pytest.mark.parametrize("way", ["elastic", "ring"])
def test_what_a_clock_makes_is_repeated(way: str) -> None:
    load = ClientLoad(CLIENTS, 5e-3, 12, {2: 1.7}, variation=0.4)
    run, there = simulate_served(load, served(way)), servers(way)
    recorded = RecordedOrder(Timeline(CLIENTS, None, run.events, ring=way == "ring"))
    clients = [client(served(way).step, c, each.minibatches) for c, each in enumerate(run.clients)]
    run_clients(clients, there, recorded)
    recorded.check_done()
    assert sum(len(events) for events in run.events) > 20
    for kept, events in zip(there, run.events, strict=True):
        np.testing.assert_array_equal(events_of(kept), events)


@pytest.mark.parametrize("way", ["elastic", "ring"])
def test_a_timeline_with_more_or_less_than_clients_do_is_told(way: str) -> None:
    run = simulate_served(ClientLoad(CLIENTS, 5e-3, 8), served(way))
    done = Timeline(CLIENTS, None, run.events, ring=way == "ring")
    for more, message_ in ((INTERVAL, "clients .* have more minibatches"), (-INTERVAL, "can have come next")):
        clients = [client(served(way).step, c, each.minibatches + more) for c, each in enumerate(run.clients)]
        recorded = RecordedOrder(done)
        with pytest.raises(TimelineError, match=message_):
            run_clients(clients, servers(way), recorded)
            recorded.check_done()


@pytest.mark.parametrize("way", ["elastic", "ring"])
def test_no_order_of_messages_is_a_deadlock(way: str) -> None:
    for seed in range(10):
        random, there = np.random.default_rng(seed), servers(way)
        steps = random.integers(1, 12, CLIENTS).tolist() if way == "elastic" else [9] * CLIENTS

        def choose(messages: Sequence[tuple[int, Message]], random: np.random.Generator = random) -> int:
            return int(random.integers(len(messages)))

        run_clients([client(served(way).step, c, n) for c, n in enumerate(steps)], there, choose)
        done = Timeline(CLIENTS, None, [events_of(each) for each in there], ring=way == "ring")
        counts = steps if way == "ring" else [(n - 1) // INTERVAL for n in steps]
        assert done.steps.tolist() == counts
