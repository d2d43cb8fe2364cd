"""Learning rates for large batches, by the figures of Zhang et al. (section 4)."""

from __future__ import annotations

import doctest
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar import learning_rates

SPEECH = {"learning_rate": 0.1, "steps_per_epoch": 40}


def rates(rate: Any, *epochs: float) -> list[float]:
    return [float(rate(round(40 * epoch))) for epoch in epochs]


def test_figures_of_the_paper() -> None:
    rate = autopar.large_batch_schedule(256, 2560, **SPEECH)
    np.testing.assert_allclose(rates(rate, 0, 2.5, 5, 10 - 1 / 40), [0.1, 0.325, 0.55, 1 - 0.9 / 400], rtol=1e-6)
    later = [2 ** (-k / 2) for k in range(1, 7)]
    np.testing.assert_allclose(rates(rate, *range(10, 16)), later, rtol=1e-6)  # epochs 11 to 16
    np.testing.assert_allclose(rates(rate, *np.arange(11, 17) - 1 / 40), later, rtol=1e-6)


def test_the_baseline_is_the_same_batch() -> None:
    """0.1 in 10 epochs, and less from the 11th on."""
    rate = autopar.large_batch_schedule(256, 256, **SPEECH)
    np.testing.assert_allclose(rates(rate, 0, 5, 9.9, 10, 11), [0.1, 0.1, 0.1, 0.1 / 2**0.5, 0.05], rtol=1e-6)


def test_other_phases() -> None:
    rate = autopar.large_batch_schedule(64, 32, **SPEECH, warmup_epochs=0.5, constant_epochs=2, decay=0.1)
    expected = [0.1, 0.075, 0.05, 0.05, 0.005, 0.0005]
    np.testing.assert_allclose(rates(rate, 0, 0.25, 0.5, 2.475, 2.5, 3.5), expected, rtol=1e-6)
    cold = autopar.large_batch_schedule(32, 64, **SPEECH, warmup_epochs=0, constant_epochs=1)
    np.testing.assert_allclose(rates(cold, 0, 0.975, 1), [0.2, 0.2, 0.2 / 2**0.5], rtol=1e-6)


def test_a_client_counts_its_own_steps() -> None:
    """Two clients of 2 examples each: a batch of 4, and half as many steps an epoch."""
    rate = autopar.large_batch_schedule(2, 4, learning_rate=0.25, steps_per_epoch=1, warmup_epochs=1)
    tx = optax.sgd(rate)

    @autopar.parallelize(sync=autopar.sync.Average())
    def step(state: Any, x: jax.Array) -> Any:
        loss, slope = jax.value_and_grad(lambda w: jnp.mean(x @ w))(state[0])
        updates, slots = tx.update(slope, state[1])
        return (state[0] + updates, slots), loss

    start = jnp.zeros(1)
    minibatches = [[jnp.ones((2, 1))] * 2] * 2
    *_, last = autopar.replay(step, (start, tx.init(start)), minibatches)
    np.testing.assert_allclose(last[0][0][0], [-(0.25 + 0.5 / 2**0.5)], rtol=1e-6)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"base_batch": 0}, r"base_batch=0\): give a whole number, 1 or more"),
        ({"batch": 2.5}, r"batch=2.5\): give a whole number"),
        ({"steps_per_epoch": True}, r"steps_per_epoch=True\): give a whole number"),
        ({"learning_rate": 0}, r"learning_rate=0\): give a number above 0"),
        ({"learning_rate": float("nan")}, r"learning_rate=nan\): give a number above 0"),
        ({"warmup_epochs": -1}, r"warmup_epochs=-1\): give a number of epochs"),
        ({"constant_epochs": "1"}, r"constant_epochs='1'\): give a number of epochs"),
        ({"decay": 1.5}, r"decay=1.5\): give a factor above 0 and up to 1"),
    ],
)
def test_what_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(autopar.ArgumentsError, match=message):
        autopar.large_batch_schedule(**{"base_batch": 256, "batch": 2560, **SPEECH, **wrong})


def test_the_example() -> None:
    found = doctest.testmod(learning_rates)
    assert found.attempted > 0 and not found.failed
