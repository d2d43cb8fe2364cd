"""Reductions over all rows of a gradient inside of checkpoints, branches and loops, where some rows hide a factor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import autopar

V, D = 40, 3
FACTORS = jnp.arange(1.0, 3.0)


def metrics(g: jax.Array, t: jax.Array, factor: jax.Array) -> dict[str, jax.Array]:
    """Of rows that differ by their number and by what they hold, and of rows that are alike."""
    hidden = (jnp.arange(V) % 2 == 0)[:, None] | (t < -0.5)
    h = jnp.where(hidden, g, g * factor)
    return {
        "nans": jnp.sum(jnp.isnan(h)),
        "divided": jnp.sum(jnp.isnan(jnp.where(hidden, g, g / factor))),
        "norm": jnp.sqrt(jnp.sum(jnp.where(jnp.isnan(h), 1.0, h * h))),
        "product": jnp.where(jnp.isnan(h), 2.0, h).T @ jnp.tanh(t),
        "largest": jnp.max(jnp.where(jnp.isnan(h), t, h)),
        "alike": jnp.sum(g / factor),
    }


def _none(g: jax.Array, t: jax.Array, factor: jax.Array) -> dict[str, jax.Array]:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(metrics, g, t, factor))


def _in_loop(of: Callable[..., Any], g: jax.Array, t: jax.Array, factor: jax.Array) -> Any:
    return lax.scan(lambda c, k: (c, of(g * k, t, factor)), 0, FACTORS)[1]


NESTINGS: dict[str, Callable[[jax.Array, jax.Array, jax.Array], Any]] = {
    "nothing": metrics,
    "checkpoint": jax.checkpoint(metrics),
    "branch": lambda g, t, f: lax.cond(t[0, 0] > -99, metrics, _none, g, t, f),
    "loop": lambda g, t, f: _in_loop(metrics, g, t, f),
    "branch in a loop": lambda g, t, f: lax.scan(
        lambda c, k: (c, lax.cond(k > 1, metrics, _none, g * k, t, f)), 0, FACTORS
    )[1],
    "loop in a checkpoint": jax.checkpoint(lambda g, t, f: _in_loop(metrics, g, t, f)),
    "behind a loop": lambda g, t, f: metrics(lax.scan(lambda c, k: (c * k * f, None), g, FACTORS)[0], t, f),
}


def carried(g: jax.Array, t: jax.Array, factor: jax.Array) -> Any:
    """Of what a loop carries: nothing has all rows as they are at a turn."""
    return lax.scan(lambda c, k: (c * factor, metrics(c, t, factor)), g, FACTORS)[1]


def carried_alike(g: jax.Array, t: jax.Array, factor: jax.Array) -> Any:
    """The same, but one untouched row is like any other."""
    return lax.scan(lambda c, k: (c * factor, jnp.sum(jnp.isnan(c * factor))), g, FACTORS)[1]


def _over_steps(update: Callable[..., Any]) -> Callable[..., Any]:
    """Steps in a loop that carries a table and a slot: (gradient, table, slot, factor) -> (table, slot, metric)."""

    def nested(g: jax.Array, t: jax.Array, factor: jax.Array) -> Any:
        def turn(carry: Any, k: jax.Array) -> Any:
            *carry, told = update(g * k, *carry, factor * k)
            return tuple(carry), told

        return lax.scan(turn, (t, jnp.full_like(t, 0.1)), FACTORS)[1]

    return nested


def _clipped(g: jax.Array, factor: jax.Array) -> jax.Array:
    norm = optax.tree.norm(g * factor)
    return jnp.where(norm < 0.1, g, g / norm * 0.1)


def _adagrad(g: jax.Array, t: jax.Array, slot: jax.Array, factor: jax.Array) -> Any:
    g = _clipped(g, factor)
    slot = slot + g * g
    change = g * jnp.where(slot > 0, lax.rsqrt(slot + 1e-7), 0.0)
    return t - change, slot, (optax.tree.norm(change), jnp.sum(change != 0), jnp.sum(jnp.isnan(change)))


def _masked(g: jax.Array, t: jax.Array, slot: jax.Array, factor: jax.Array) -> Any:
    g = jnp.where(jnp.arange(V)[:, None] % 2 == 0, g, g * factor)
    return t - g, slot + jnp.where(slot > 0.05, g, 0.0), jnp.sum(jnp.isnan(jnp.where(slot > 0.05, g, 0.0)))


def _by_slot(g: jax.Array, t: jax.Array, slot: jax.Array, factor: jax.Array) -> Any:
    """What a row holds shows or hides a factor of an earlier turn."""
    told = jnp.sum(jnp.isnan(g * slot))
    return t, jnp.where(t > 0, slot * factor, slot), told


#: Steps in a loop -> whether the table can be lifted.
STEPS = {"adagrad": (_over_steps(_adagrad), True), "masked": (_over_steps(_masked), False)}
STEPS["by the slot"] = _over_steps(_by_slot), False


def make_step(nested: Callable[..., Any], tx: optax.GradientTransformation) -> Callable[..., Any]:
    def step(state: Any, batch: Any) -> Any:
        t, slots = state
        loss, g = jax.value_and_grad(lambda t: jnp.sum(jnp.sin(t[batch["ids"]]) ** 2))(t)
        update, slots = tx.update(g, slots, t)
        return (t + update, slots), (loss, nested(g, t, batch["factor"]))

    return step


def check(nested: Callable[..., Any], tx: optax.GradientTransformation | None = None, **options: Any) -> Any:
    """Against plain JAX, with factors that are finite and that aren't; the planned step."""
    tx = tx or optax.sgd(0.1)
    step = make_step(nested, tx)
    planned, plain = autopar.parallelize(step, donate=False, **options), jax.jit(step)
    t = jnp.asarray(np.random.default_rng(0).normal(size=(V, D)), jnp.float32)
    for factor in (1.0, np.inf, 0.0, np.nan):
        batch = {"ids": jnp.array([1, V - 1, 3, 1]), "factor": jnp.float32(factor)}
        mine, theirs = planned((t, tx.init(t)), batch), plain((t, tx.init(t)), batch)
        close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)  # noqa: E731
        jax.tree.map(close, autopar.materialize(mine), theirs)
    return planned
