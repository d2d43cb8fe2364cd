"""Averaging with neighbours in a ring: who with whom, by hand, and in a thousand orders of messages."""

from __future__ import annotations

from collections import deque

import jax.numpy as jnp
import numpy as np
import pytest

from autopar.errors import AutoparError, StabilityWarning
from autopar.ir.topology import Ring
from autopar.servers.center import Center, Neighbor
from autopar.servers.messages import Exchange, Kept, Pulled, Read, Stepped
from autopar.servers.timeline import Timeline
from autopar.sync import ADPSGD, DPSGD, Hybrid, stable_slope


@pytest.mark.parametrize("count", [2, 4, 10])
def test_all_have_a_partner_in_every_turn(count: int) -> None:
    ring = Ring(count)
    for turn in range(5):
        partners = [ring.neighbors(c, turn)[0] for c in range(count)]
        assert all(partners[other] == c for c, other in enumerate(partners))
        assert all(ring.is_active(c) != ring.is_active(other) for c, other in enumerate(partners))
        assert count == 2 or all(ring.neighbors(c, turn + 1)[0] != other for c, other in enumerate(partners))


def test_changes_come_to_all() -> None:
    """All weights but one are 0: in so many turns they are the same, to the last bit."""
    for count in (2, 4, 6, 8, 16):
        ring, x = Ring(count), np.eye(count)[0]
        for turn in range(ring.rounds):
            assert turn != ring.rounds // 2 or count < 6 or np.ptp(x) > 2**-15
            x = np.array([(x[c] + x[ring.neighbors(c, turn)[0]]) / 2 for c in range(count)])
        assert np.ptp(x) < 2**-22


def sent(neighbor: Neighbor, message: Exchange | Stepped) -> float:
    ((_, reply),) = neighbor.take(message)
    assert isinstance(reply, Pulled)
    return float(reply.values[0])


def test_by_hand() -> None:
    """A step from 0 to 1/2, while which a neighbour with 2 asks: both have 1, and the step's half is added."""
    neighbor = Neighbor({7: jnp.zeros(())}, 2)
    assert sent(neighbor, Exchange(0, 0, [np.float32(2)])) == 1  # how far the other one is to move down
    assert float(neighbor.leaves[7]) == 1
    assert sent(neighbor, Stepped(1, 0, [np.float32(0.5)])) == 1.5
    assert sent(neighbor, Stepped(1, 1, [np.float32(2.5)])) == 2.5  # nobody asked meanwhile
    with pytest.raises(AutoparError, match="exchange 0 where 1 is next"):
        neighbor.take(Exchange(0, 0, [np.float32(0)]))


def events_of(neighbor: Center) -> np.ndarray:
    ((_, kept),) = neighbor.take(Read(0))
    assert isinstance(kept, Kept)
    return kept.events


def test_a_step_has_seen_all_messages_before_it_began() -> None:
    """Which count from 0 and are the step's own staleness: a step sees the one before it, whatever came meanwhile."""
    neighbor = Neighbor({7: jnp.zeros(())}, 2)
    for message in (Exchange(0, 0, [2.0]), Stepped(1, 0, [0.5]), Stepped(1, 1, [2.5]), Exchange(0, 1, [1.0])):
        neighbor.take(message)
    neighbor.take(Stepped(1, 2, [3.0]))  # it began with three messages behind it, and one came meanwhile
    assert events_of(neighbor).tolist() == [[0, 0, 0], [1, 0, 0], [1, 1, 2], [0, 1, 3], [1, 2, 3]]
    assert Timeline(2, None, [events_of(neighbor)], ring=True).staleness.tolist() == [0, 1, 0, 0, 1]


def run(seed: int, clients: int, steps: int) -> tuple[list[float], list[float]]:
    """Clients whose messages arrive in an order of chance, and whose steps take times of chance: their weights at the
    beginning and at the end. A step changes nothing."""
    ring, random = Ring(clients), np.random.default_rng(seed)
    x = random.normal(size=clients).astype(np.float32).tolist()
    first, done = list(x), [0] * clients
    neighbors = {c: Neighbor({0: jnp.float32(x[c])}, clients) for c in ring.passives}
    sending: dict[int, deque[tuple[int, Exchange]]] = {c: deque() for c in range(clients) if ring.is_active(c)}

    def begin(c: int) -> None:
        if ring.is_active(c) and done[c] < steps:
            message = Exchange(c, ring.number(c, done[c]), [np.float32(x[c])])
            sending[c].append((ring.neighbors(c, done[c])[0], message))

    for c in range(clients):
        begin(c)
    while waiting := [c for c in range(clients) if done[c] < steps]:
        c = int(random.choice(waiting))  # an active one waits for its message alone, and a passive one for nothing
        if ring.is_active(c):
            passive, message = sending[c].popleft()
            x[c] = np.float32(x[c]) - np.float32(sent(neighbors[passive], message))
        else:
            x[c] = sent(neighbors[c], Stepped(c, done[c], [np.float32(x[c])]))
        done[c] += 1
        begin(c)
    now = [float(neighbors[c].leaves[0]) if c in neighbors else float(x[c]) for c in range(clients)]
    events = [events_of(neighbors[c]) for c in ring.passives]
    timeline = Timeline(clients, None, events, ring=True)
    assert timeline.steps.tolist() == [steps] * clients and (timeline.staleness >= 0).all()
    return first, now


def test_no_order_of_messages_is_a_deadlock_and_all_conserve_the_sum() -> None:
    for seed in range(1000):
        clients = (2, 4, 6)[seed % 3]
        first, now = run(seed, clients, 3 + seed % 5)
        assert abs(sum(now) - sum(first)) < 1e-5
    first, now = run(0, 4, 60)
    assert np.ptp(now) < 1e-3 * np.ptp(first)


def slope_of(delay: int, slope: float) -> float:
    """How large a quadratic's weight is after many steps by gradients that are late."""
    x = [1.0] * (delay + 1)
    for _ in range(4000):
        x.append(x[-1] - slope * x[-1 - delay])
        if abs(x[-1]) > 1e6:
            break
    return max(map(abs, x[-20:]))


@pytest.mark.parametrize("delay", [0, 1, 2, 5])
def test_slopes_are_stable_up_to_what_is_said(delay: int) -> None:
    most = stable_slope(delay)
    assert slope_of(delay, 0.97 * most) < 1e-3
    assert slope_of(delay, 1.03 * most) > 1e3


def test_clients_come_together_up_to_what_is_said() -> None:
    """What clients differ by under `Hybrid`, x_i' = mean - eta h x_i, and what is common to them."""
    for share, is_together in ((0.95, True), (1.05, False)):
        x = np.array([1.0, -0.5, 0.25, -0.75])
        for _ in range(2000):
            x = x.mean() - share * stable_slope(Hybrid().delay) * x
        assert (np.ptp(x) < 1e-3) == is_together


def test_rates_that_diverge_are_told() -> None:
    Hybrid().check_stable(0.9)
    DPSGD().check_stable(1.9)
    for sync, slope, most in ((Hybrid(), 1.1, "1"), (ADPSGD(), 1.1, "1"), (DPSGD(), 2.1, "2")):
        with pytest.warns(StabilityWarning, match=rf"eta h is {slope:.3g}.* below {most} only"):
            sync.check_stable(slope)
