"""Untouched rows whose new value is made of differences that are 0, and of comparisons that hold: they don't move."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar import jax_compat
from tests.support.pairs import named, paired

ROWS, WIDTH = 40, 3
Tree = Mapping[str, Any]
#: (table, slot, gradient, a number of the batch) -> (table, slot)
Update = Callable[[Any, Any, Any, Any], tuple[Any, Any]]


def _ftrl(z: Any, n: Any, g: Any, k: Any) -> tuple[Any, Any]:
    """FTRL-proximal, with sigma as in McMahan et al. (2013)."""
    w = jnp.where(jnp.abs(z) <= 0.1, 0.0, -(z - jnp.sign(z) * 0.1) / ((1.0 + jnp.sqrt(n)) / 0.1 + 0.01))
    sigma = (jnp.sqrt(n + g * g) - jnp.sqrt(n)) / 0.1
    return z + g * k - sigma * w, n + g * g


def _change(t: Any, n: Any, g: Any, k: Any) -> tuple[Any, Any]:
    return t + k * ((t - 0.1 * g) - t), n


def _change_by_adagrad(t: Any, n: Any, g: Any, k: Any) -> tuple[Any, Any]:
    m = n + g * g
    return t + ((t - 0.1 * k * g / jnp.sqrt(m + 1e-3)) - t), m


def _where_the_slot_moved(t: Any, n: Any, g: Any, k: Any) -> tuple[Any, Any]:
    m = n + k * g * g
    return jnp.where(m != n, 0.9 * t - 0.1 * g, t), m


def _largest(t: Any, n: Any, g: Any, k: Any) -> tuple[Any, Any]:
    return jnp.maximum(t - 0.1 * k * g, t), n


def _by_the_row(t: Any, n: Any, g: Any, k: Any) -> tuple[Any, Any]:
    norm = lambda x: jnp.sqrt(jnp.sum(x * x, 1, keepdims=True) + 1.0)  # noqa: E731
    return t - 0.1 * k * g * norm(t) + (norm(n + g * g) - norm(n)), n + g * g


def _in_loops(t: Any, n: Any, g: Any, k: Any) -> tuple[Any, Any]:
    return jax.lax.fori_loop(0, 2, lambda j, c: _ftrl(*c, g, k), (t, n))


UPDATES: Mapping[str, Update] = {
    "ftrl": _ftrl,
    "change": _change,
    "change by Adagrad": _change_by_adagrad,
    "where the slot moved": _where_the_slot_moved,
    "largest": _largest,
    "by the row": _by_the_row,
    "in loops": _in_loops,
}


def _step_of(update: Update) -> Callable[[Tree, Tree], tuple[Tree, Any]]:
    def step(state: Tree, batch: Tree) -> tuple[Tree, Any]:
        loss = lambda t: jnp.sum(jnp.abs(t[batch["ids"]] - 0.1) ** 2)  # noqa: E731
        value, g = jax.value_and_grad(loss)(state["table"])
        table, slot = update(state["table"], state["slot"], g, batch["k"])
        moved = jnp.sum(jnp.abs(table - state["table"]))
        return {"table": table, "slot": slot}, (value, moved)

    return step


def _state(dtype: Any = float) -> Tree:
    rng = np.random.default_rng(0)
    parts = [rng.normal(0, 0.5, (ROWS, WIDTH)) for _ in range(2)]
    table = parts[0] + 1j * parts[1] if np.issubdtype(dtype, np.complexfloating) else parts[0]
    return {"table": jnp.asarray(table, dtype), "slot": jnp.asarray(rng.uniform(0.1, 1, (ROWS, WIDTH)), float)}


def _run(step: Any, state: Tree, numbers: tuple[float, ...]) -> list[Any]:
    seen = []
    for j, k in enumerate(numbers):
        ids = np.random.default_rng(j).integers(0, ROWS, 4)
        state, results = step(state, {"ids": jnp.asarray(ids), "k": jnp.asarray(k, float)})
        seen += [autopar.materialize(results), autopar.materialize(state)]
    return seen


def _check(step: Any, state: Tree, numbers: tuple[float, ...], *, stays: bool = True, strategy: Any = "ps") -> None:
    planned = autopar.parallelize(step, strategy=strategy, donate=False)
    mine, theirs = _run(planned, state, numbers), _run(jax.jit(step), state, numbers)
    assert planned.plan is not None
    if stays:
        assert [(p.lifted, p.log_steps) for p in planned.plan.tables] == [(True, 0)] * len(planned.plan.tables)
        assert not any("read whole" in str(p.reason) for p in planned.plan.tables)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), mine, theirs)


PLACES = {"one device": "ps", "hosts": ("ps", "hosts")}


NUMBERS = {"finite": (1.0, 0.5, 0.0), "NaN": (1.0, np.nan), "inf": (1.0, np.inf)}


@paired({"update": UPDATES, "numbers": NUMBERS, "place": PLACES})
def test_rows_that_do_not_move(update: Update, numbers: tuple[float, ...], place: Any) -> None:
    with jax_compat.enable_x64():
        _check(_step_of(update), _state(), numbers, strategy=place)


# --- what must stay as it is in plain JAX ---


def _without_nan(t: Any, n: Any, g: Any, k: Any) -> tuple[Any, Any]:
    new = t - 0.1 * g * k
    return jnp.where(jnp.isnan(new), 0.0, new), n


def _without_infinities(t: Any, n: Any, g: Any, k: Any) -> tuple[Any, Any]:
    new = t - 0.1 * g * k
    return jnp.where(new - new == 0, new, 0.0), n


def _by_the_ratio(t: Any, n: Any, g: Any, k: Any) -> tuple[Any, Any]:
    """0 / 0 where the slot is 0, as slots often are."""
    m = n + g * g
    return t * (n / m) - 0.1 * g, m


@pytest.mark.parametrize("update", [_without_nan, _without_infinities, _by_the_ratio])
def test_rows_that_are_asked_whether_they_are_finite(update: Update) -> None:
    with jax_compat.enable_x64():
        state = _state()
        table = state["table"].at[-1].set(np.nan).at[-2, 0].set(np.nan)
        slot = state["slot"].at[-3:].set(0.0)
        if update is _without_infinities:
            table = table.at[-3, 1].set(np.inf)
        _check(_step_of(update), {"table": table, "slot": slot}, (1.0, 1.0), stays=False)


# --- complex tables ---


def _conjugate(t: Any, n: Any, g: Any, k: Any) -> tuple[Any, Any]:
    return t - 0.1 * k * jnp.conj(g), n


def _scaled(t: Any, n: Any, g: Any, k: Any) -> tuple[Any, Any]:
    return t - 0.1 * k * jnp.conj(g) / (1 + jnp.abs(g)), n


def _complex_adagrad(t: Any, n: Any, g: Any, k: Any) -> tuple[Any, Any]:
    n = n + g.real**2 + g.imag**2
    return t - 0.1 * k * jnp.conj(g) / jnp.sqrt(n), n


def _apart(t: Any, n: Any, g: Any, k: Any) -> tuple[Any, Any]:
    return t - 0.1 * jax.lax.complex(k * g.real, -g.imag), n + jnp.abs(jnp.conj(g) * g)


def _by_optax(t: Any, n: Any, g: Any, k: Any) -> tuple[Any, Any]:
    change, _ = optax.sgd(0.1).update(k * jnp.conj(g), optax.sgd(0.1).init(t))
    return t + change, n


def _hidden(t: Any, n: Any, g: Any, k: Any) -> tuple[Any, Any]:
    """A row tells by what it holds whether it meets the number."""
    number = jax.lax.complex(k, 0.0)
    return t - 0.1 * g * jnp.where(jnp.abs(t) > 0.9, number, 0.0), n


COMPLEX = {f.__name__: f for f in (_conjugate, _scaled, _complex_adagrad, _apart, _by_optax, _hidden)}


@paired({"update": COMPLEX, "bad": named([1.0, np.nan]), "place": PLACES})
def test_complex_tables(update: Update, bad: float, place: Any) -> None:
    with jax_compat.enable_x64():
        _check(_step_of(update), _state(complex), (1.0, bad), strategy=place)
