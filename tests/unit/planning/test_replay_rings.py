"""Replays of averaging with neighbours, by hand, in a process that trains alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.sync import ADPSGD, DPSGD, Hybrid, Replicated

ONE, TWO = jnp.ones((1, 1)), 2 * jnp.ones((1, 1))


def planned(sync: Replicated) -> Any:
    def step(w: jax.Array, x: jax.Array) -> Any:
        return w - 0.1 * jax.grad(lambda w: ((x @ w - 1) ** 2).mean())(w), w.sum()

    return autopar.parallelize(step, sync=sync)


@pytest.mark.parametrize(
    ("sync", "wanted"),
    [
        (DPSGD(), [0.3, 0.3, 0.3, 0.3]),  # each with the one of its pair: steps of 0.2 and 0.4
        (Hybrid(), [0.2, 0.4, 0.2, 0.4]),  # the mean of weights before the step
    ],
)
def test_all_at_once(sync: Replicated, wanted: list[float]) -> None:
    ((first),) = autopar.replay(planned(sync), jnp.zeros(1), [[ONE, TWO, ONE, TWO]])
    np.testing.assert_allclose([float(w[0]) for w, _ in first], wanted, rtol=1e-6)


def test_odd_rings_are_refused() -> None:
    with pytest.raises(autopar.ArgumentsError, match=r"3 clients make an odd ring.*Give clients= an even number"):
        next(autopar.replay(planned(DPSGD()), jnp.zeros(1), [[ONE, TWO, ONE]]))


def test_messages_are_replayed_of_a_timeline() -> None:
    """The first exchange comes before its passive client's step, the second one behind it."""
    step = planned(ADPSGD())
    with pytest.raises(autopar.ArgumentsError, match=r"autopar\.replay_timeline"):
        next(autopar.replay(step, jnp.zeros(1), [[ONE, TWO]]))
    events = np.array([[0, 0, 0], [1, 0, 0], [1, 1, 2], [0, 1, 3]])
    done = autopar.Timeline(workers=2, bound=None, events=[events], ring=True)
    end, results = autopar.replay_timeline(step, jnp.zeros(1), [[ONE] * 2, [TWO] * 2], done)
    np.testing.assert_allclose([[float(value) for _, value in own] for own in results], [[0, 0.2], [0, 0.4]], rtol=1e-6)
    np.testing.assert_allclose(float(end[0]), (0.34 + 0.16 + 0.34) / 2, rtol=1e-6)


def test_an_exchange_with_who_is_no_neighbour_yet_is_told() -> None:
    events = [np.array([[2, 0, 0]]), np.zeros((0, 3), np.int64)]
    done = autopar.Timeline(workers=4, bound=None, events=events, ring=True)
    with pytest.raises(autopar.TimelineError, match=r"none of \[\[2, 0\]\] can have come next"):
        autopar.replay_timeline(planned(ADPSGD()), jnp.zeros(1), [[ONE]] * 4, done)
