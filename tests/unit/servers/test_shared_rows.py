"""A passive client's table, averaged with its neighbours' by rows: by hand, and against whole tables in a ring."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import jax_compat
from autopar.ir.topology import Ring
from autopar.servers.center import SharedRows
from autopar.sync import ADPSGD

ROWS, RATE = 40, 0.25
NONE = np.zeros(0, np.int64), np.zeros((0, 1), np.float32)


def test_by_hand() -> None:
    table = SharedRows(np.zeros((6, 1), np.float32), (0, 2))
    indices, moves = table.exchange(0, np.array([1, 4]), np.array([[2.0], [0.0]], np.float32))
    assert (indices.tolist(), moves.tolist(), table.rows[1]) == ([1], [[1]], [1])  # the other one has not changed
    indices, moves = table.exchange(2, *NONE)  # has 0 in the row that the first exchange moved
    assert (indices.tolist(), moves.tolist(), table.rows[1]) == ([1], [[-0.5]], [0.5])
    indices, rows = table.step(np.array([1, 3]), np.array([[0.25], [4.0]], np.float32))  # began with 0
    assert (indices.tolist(), rows.tolist(), table.rows[3]) == ([1], [[0.75]], [4])
    indices, moves = table.exchange(0, *NONE)  # had 1 and 0
    assert (indices.tolist(), moves.tolist()) == ([1, 3], [[0.125], [-2]])
    assert table.exchange(0, *NONE)[0].size == 0


def step(w: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    loss, gradient = jax.value_and_grad(lambda w: ((w[ids] - ids[:, None]) ** 2).sum())(w)
    return w - RATE * gradient, loss


def messages(random: np.random.Generator, clients: int, steps: int) -> list[tuple[int, int, int]]:
    """Who comes next, with which message, to whom: in an order of chance."""
    ring, done, found = Ring(clients), [0] * clients, []
    while waiting := [c for c in range(clients) if done[c] < steps]:
        c = int(random.choice(waiting))
        passive = ring.neighbors(c, done[c])[0] if ring.is_active(c) else c
        found.append((c, ring.number(c, done[c]) if ring.is_active(c) else done[c], passive))
        done[c] += 1
    return found


def whole(order: list[tuple[int, int, int]], batches: list[list[np.ndarray]]) -> list[np.ndarray]:
    """All clients' tables, averaged whole."""
    began = [np.zeros((ROWS, 1)) for _ in batches]
    now, done = list(began), [0] * len(batches)
    for c, _, passive in order:
        if c != passive:
            now[c] = now[passive] = (now[c] + now[passive]) / 2
        ids = batches[c][done[c]]
        gradient = np.zeros((ROWS, 1))
        np.add.at(gradient, ids, 2 * (began[c][ids] - ids[:, None]))
        began[c] = now[c] = now[c] - RATE * gradient
        done[c] += 1
    return now


@jax_compat.enable_x64()
def test_rows_are_averaged_as_whole_tables_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the same order. No exchange names a row that nobody has ever touched."""
    named: set[int] = set()
    exchange = SharedRows.exchange

    def watched(table: SharedRows, neighbor: int, indices: np.ndarray, values: np.ndarray) -> Any:
        made = exchange(table, neighbor, indices, values)
        named.update(indices.tolist(), made[0].tolist())
        return made

    monkeypatch.setattr(SharedRows, "exchange", watched)
    for seed, clients in enumerate((2, 4, 6)):
        random = np.random.default_rng(seed)
        batches = [[random.integers(0, ROWS // 2, 3) for _ in range(15)] for _ in range(clients)]
        order = messages(random, clients, 15)
        events = [np.array([[c, k, 0] for c, k, p in order if p == passive]) for passive in Ring(clients).passives]
        timeline = autopar.Timeline(workers=clients, bound=None, events=events, ring=True)
        planned, start = autopar.parallelize(step, sync=ADPSGD(), strategy="ps"), jnp.zeros((ROWS, 1), jnp.float64)
        end, results = autopar.replay_timeline(planned, start, batches, timeline)
        wanted = whole(order, batches)
        np.testing.assert_allclose(end, sum(wanted) / clients, rtol=1e-12, atol=1e-12)
        for c in range(0, clients, 2):  # a passive one's table moves on behind its last step
            np.testing.assert_allclose(results[c][-1][0], wanted[c], rtol=1e-12, atol=1e-12)
    assert named and max(named) < ROWS // 2
