"""A centre in pieces: balanced over servers, put together again, and exchanged piece by piece as a timeline says."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.cost.client_times import Served
from autopar.ir.served import center_shares
from autopar.planning import simulate_clients
from autopar.servers.sessions import CenterParts
from autopar.sync import Elastic
from tests.unit.planning.test_simulate_clients import CHALK, by_rows

#: Of a matrix that has nearly all bytes, whose pieces aren't of as many elements each.
SERVERS, SHAPE = 3, (130, 131)
ALPHA = 0.25


def test_shares_are_balanced_and_all_there() -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        sizes = [8 * int(n) for n in random.integers(0, 40_000, random.integers(1, 9))]
        sizes[0] += 1 << 20
        shares = center_shares(sizes, servers := int(random.integers(1, 9)))
        assert center_shares(sizes, len(shares)) == shares
        filled = [sum(span.nbytes for span in share) for share in shares]
        small = max((n for n in sizes if n < 1 << 16), default=0)
        assert len(filled) == servers and max(filled) <= 1.1 * sum(sizes) / servers + small
        for k, size in enumerate(sizes):
            spans = sorted((span.start, span.stop) for share in shares for span in share if span.weight == k)
            assert [0, *(stop for _, stop in spans)] == [*(start for start, _ in spans), size]
    assert center_shares([60_000, 4, 4], 5) == center_shares([60_000, 4, 4], 3)  # nothing is cut that is small


def test_pieces_make_the_whole_again() -> None:
    random = np.random.default_rng(0)
    weights = {
        4: jnp.asarray(random.normal(size=(520, 131)), jnp.bfloat16),
        1: jnp.asarray(random.normal(size=SHAPE), jnp.float32),
        7: jnp.ones(()),
    }
    parts = CenterParts(weights, 5)
    assert parts.count == 5
    some = [parts.of(n, weights) for n in range(5)]
    made = parts.joined(some)
    assert [*made] == [*weights]
    for k, x in weights.items():
        np.testing.assert_array_equal(made[k], np.asarray(x), strict=True)
    there = [np.asarray(x) for x in weights.values()]
    for share in some:
        assert any(x.nbytes > 1000 for x in share)
        assert all(any(np.shares_memory(x, whole) for whole in there) for x in share), "nothing is copied"


@autopar.parallelize(sync=Elastic(ALPHA, interval=1))
def step(state: Any, x: jax.Array) -> Any:
    loss, g = jax.value_and_grad(lambda p: jnp.mean((x @ p["w"] + p["b"]) ** 2))(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, g), loss


def start() -> Any:
    random = np.random.default_rng(1)
    return {"b": jnp.zeros(SHAPE[1]), "w": jnp.asarray(random.normal(size=SHAPE) / 10, jnp.float32)}


#: Of each worker its minibatches; and of each server which worker's exchange came: each has both of a round.
BATCHES = [
    [np.random.default_rng((w, k)).normal(size=(8, SHAPE[0])).astype(np.float32) for k in range(4)] for w in (0, 1)
]
ORDERS = [0, 1, 0, 1, 0, 1], [1, 0, 1, 0, 1, 0], [0, 1, 1, 0, 0, 1]


def replayed(orders: Sequence[Sequence[int]]) -> Any:
    """The centre, and each worker's last state."""
    events = [np.array([(w, order[:n].count(w), n) for n, w in enumerate(order)]) for order in orders]
    made, results = autopar.replay_timeline(step, start(), BATCHES, autopar.Timeline(2, None, events))
    return jax.tree.map(np.asarray, (made, *(autopar.materialize(own[-1][0]) for own in results)))


def test_pieces_in_one_order_have_the_bits_of_the_whole() -> None:
    order = ORDERS[2]
    jax.tree.map(np.testing.assert_array_equal, replayed([order]), replayed([order] * SERVERS))


def test_pieces_are_exchanged_each_in_its_servers_order() -> None:
    weights = start()
    sizes = [weights["b"].nbytes, weights["w"].nbytes]
    shares = center_shares(sizes, SERVERS)
    assert all(any(span.weight == 1 for span in share) for share in shares)
    flat = np.concatenate([np.zeros(SHAPE[1]), np.asarray(weights["w"], np.float64).reshape(-1)])
    begin = [0, SHAPE[1]]  # of each weight among all elements
    center, workers = flat.copy(), [flat.copy(), flat.copy()]
    gradient = jax.jit(jax.grad(lambda p, x: jnp.mean((x @ p["w"] + p["b"]) ** 2)))
    for k in range(4):
        moves = [np.zeros_like(flat), np.zeros_like(flat)]
        for share, order in zip(shares, ORDERS, strict=True) if k else ():
            for w in order[2 * k - 2 : 2 * k]:
                for span in share:
                    some = slice(begin[span.weight] + span.start // 4, begin[span.weight] + span.stop // 4)
                    moves[w][some] = ALPHA * (workers[w][some] - center[some])
                    center[some] += moves[w][some]
        for w, x in enumerate(workers):
            g = gradient({"b": x[: SHAPE[1]], "w": x[SHAPE[1] :].reshape(SHAPE)}, BATCHES[w][k])
            workers[w] = x - 0.1 * np.concatenate([g["b"], np.asarray(g["w"]).reshape(-1)]) - moves[w]
    found = replayed(ORDERS)
    for expected, tree in zip([center, *workers], found, strict=True):
        np.testing.assert_allclose(np.concatenate([tree["b"], tree["w"].reshape(-1)]), expected, rtol=0, atol=2e-6)
    assert not np.allclose(replayed([ORDERS[0]] * SERVERS)[0]["w"], found[0]["w"], rtol=0, atol=1e-4)


def test_a_timeline_of_more_servers_than_there_can_be() -> None:
    events = [np.zeros((0, 3), np.int64)] * 3
    small = {"b": jnp.zeros(2), "w": jnp.zeros((3, 2))}
    with pytest.raises(autopar.TimelineError, match="step has 2 servers at most, not 3"):
        autopar.replay_timeline(step, small, [[np.ones((1, 3))]], autopar.Timeline(1, None, events))


def test_what_is_simulated_and_explained_is_what_servers_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Served] = []
    real = simulate_clients.simulate_served
    monkeypatch.setattr(
        simulate_clients, "simulate_served", lambda load, served: seen.append(served) or real(load, served)
    )
    plan = autopar.plan(step, start(), BATCHES[0][0])
    assert plan.sync is not None and plan.sync.server_bytes == (sum(plan.sync.fragment_bytes),)
    autopar.simulate(plan, cluster=dataclasses.replace(CHALK, machines=SERVERS), step_s=0.1)
    sizes = [x.nbytes for x in jax.tree.leaves(start())]
    filled = [sum(span.nbytes for span in share) for share in center_shares(sizes, SERVERS)]
    assert [server.pull_bytes for server in seen[0].servers] == filled
    assert max(filled) < 1.1 * sum(sizes) / SERVERS
    assert "Servers keep 67.0 KiB of the centre" in " ".join(str(autopar.explain(step, start(), BATCHES[0][0])).split())


def test_tables_are_said_to_be_exchanged_whole() -> None:
    planned = autopar.parallelize(by_rows, sync=Elastic(0.2))
    told = str(autopar.explain(planned, {"emb": jnp.ones((100_000, 16)), "w": jnp.eye(16)}, jnp.arange(100)))
    assert "Tables are exchanged whole, 6.1 MiB: emb." in " ".join(told.split())
