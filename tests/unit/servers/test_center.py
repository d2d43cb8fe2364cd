"""Elastic averaging: by hand, and stable up to the alpha that theory says."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.errors import ArgumentsError, AutoparError, StabilityWarning
from autopar.run.replicas import slope_of
from autopar.servers.center import Center
from autopar.servers.messages import Exchange, Pulled, Read
from autopar.sync import Elastic, stable_alpha


def exchange(center: Center, worker: int, step: int, x: float) -> float:
    """How far the weight of a worker is to move."""
    ((to, reply),) = center.take(Exchange(worker, step, [np.asarray(x, np.float32)]))
    assert to == worker and isinstance(reply, Pulled)
    return float(reply.values[0])


def by_hand(move: Callable[[Center, int, int, float], float]) -> tuple[list[float], float]:
    """Two workers in turn, two rounds: x = c = 0, g = -1, eta = 1, alpha = 1/2."""
    center, x = Center({0: jnp.zeros(())}, 0.5, 2), [0.0, 0.0]
    for step in range(2):
        for worker in range(2):
            x[worker] += 1 - move(center, worker, step, x[worker])
    return x, float(center.leaves[0])


def test_by_hand() -> None:
    assert by_hand(exchange) == ([1.5, 1.75], 0.75)


def test_a_move_by_two_snapshots_is_another_function() -> None:
    """Figure 8 of MXNET-MPI: the worker moves by a centre that has moved already."""

    def twice(center: Center, worker: int, step: int, x: float) -> float:
        exchange(center, worker, step, x)
        return 0.5 * (x - float(center.leaves[0]))

    assert by_hand(twice)[0] != [1.5, 1.75]


def test_what_a_worker_loses_the_centre_gains() -> None:
    random = np.random.default_rng(0)
    center = Center({3: jnp.asarray(random.normal(size=5), jnp.float32)}, 0.3, 2)
    before, x = np.asarray(center.leaves[3]), random.normal(size=5).astype(np.float32)
    ((_, reply),) = center.take(Exchange(1, 0, [x]))
    assert isinstance(reply, Pulled)
    np.testing.assert_array_equal(np.asarray(center.leaves[3]), before + reply.values[0])
    ((_, kept),) = center.take(Read(0))
    assert kept.events.tolist() == [[1, 0, 0]]
    with pytest.raises(AutoparError, match="exchange 0 where 1 is next"):
        center.take(Exchange(1, 0, [x]))


def _in_turn(alpha: float, slope: float, clients: int) -> float:
    """How large a quadratic's weights are after many rounds, one worker after the other."""
    x, c = np.ones(clients), 0.5
    for _ in range(3000):
        for k in range(clients):
            e = alpha * (x[k] - c)
            x[k], c = x[k] - slope * x[k] - e, c + e
        if abs(c) > 1e6:
            break
    return float(max(abs(c), *np.abs(x)))


def _at_once(alpha: float, slope: float, clients: int) -> float:
    x, c = np.linspace(0.5, 1.5, clients), 0.5
    for _ in range(3000):
        e = alpha * (x - c)
        x, c = x - slope * x - e, c + e.sum()
        if abs(c) > 1e6:
            break
    return float(max(abs(c), *np.abs(x)))


@pytest.mark.parametrize("slope", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("clients", [2, 4])
def test_alpha_is_stable_up_to_what_is_said(slope: float, clients: int) -> None:
    most = stable_alpha(2 * slope, 0.5, clients)
    assert _in_turn(0.99 * most, slope, 1) < 1 < _in_turn(1.01 * most, slope, 1)
    assert _in_turn(0.99 * most, slope, clients) < 1  # each exchange contracts, in whichever order
    most = stable_alpha(2 * slope, 0.5, clients, synchronous=True)
    assert _at_once(0.99 * most, slope, clients) < 1 < _at_once(1.01 * most, slope, clients)


def test_a_warning_has_the_numbers() -> None:
    Elastic(0.6).check_stable(1.0)
    with pytest.warns(StabilityWarning, match=r"eta h = 1 .* = 0\.667"):
        Elastic(0.7).check_stable(1.0)
    with pytest.warns(StabilityWarning, match="smaller learning rate"):
        Elastic(0.1).check_stable(2.2)
    assert Elastic(0.6, learning_rate=0.5, curvature=2.0).slope == 1.0 and Elastic(0.6, curvature=2.0).slope is None


@pytest.mark.parametrize("tx", [optax.sgd(0.1), optax.sgd(0.1, momentum=0.9)])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_slope_of_a_step_is_eta_h(tx: optax.GradientTransformation, sign: int) -> None:
    """Of a quadratic with eigenvalues 1 to 5, and one that has the largest in size below 0."""
    axes = jnp.linalg.qr(jax.random.normal(jax.random.key(1), (5, 5)))[0]
    hessian = axes @ jnp.diag(jnp.arange(1.0, 6) if sign > 0 else jnp.array([-7.0, 1, 2, 3, 4])) @ axes.T

    def step(w: jax.Array) -> list[jax.Array]:
        state = tx.init(w)
        updates, _ = tx.update(hessian @ w, state, w)
        return [jnp.zeros(()), w + updates]

    assert slope_of(step, [jnp.ones(5)], {0: 1}) == pytest.approx(0.5 if sign > 0 else 0.4, rel=0.02)


def test_it_is_measured_before_the_first_step() -> None:
    def step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        loss, slope = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(state["w"])
        return {"w": state["w"] - 0.5 * slope}, loss

    state, x = {"w": jnp.ones(2)}, jnp.diag(jnp.array([1.0, 1.3]))  # eta h = 0.5 * 1.3**2
    for alpha, expected in (
        (0.8, pytest.warns(StabilityWarning, match=r"eta h = 0\.84.* = 0\.73")),
        (0.7, nullcontext()),
    ):
        planned = autopar.parallelize(step, sync=Elastic(alpha, curvature="measure"))
        with expected:
            planned(jax.tree.map(jnp.copy, state), x)
    assert "alpha is 0.7; it isn't known" in " ".join(str(autopar.explain(planned)).split())


@pytest.mark.parametrize("options", [{"alpha": 0}, {"alpha": 1.0}, {"alpha": 0.5, "interval": 0}])
def test_what_makes_no_sense_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(ArgumentsError, match="give a"):
        Elastic(**options)  # type: ignore[arg-type]
