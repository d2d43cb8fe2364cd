"""What random train steps are made of where something isn't finite: where the batch's number (infinite, NaN or 0, and 1
in a step where nothing is to happen) enters a step, and what it may be lost or spread in. Added to `ingredients`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tests.support import ingredients
from tests.support.ingredients import WIDTH, Tree


@jax.custom_vjp
def _back(x: jax.Array, bad: jax.Array) -> jax.Array:
    """Times the number in the backward pass only."""
    return x


_back.defvjp(lambda x, bad: (x, bad), lambda bad, g: (g * bad, jnp.zeros_like(bad)))


def _odd_rows(x: jax.Array) -> jax.Array:
    return (jnp.arange(x.shape[0]) % 2 == 1).reshape(-1, *(1,) * (x.ndim - 1)) if x.ndim else jnp.zeros((), bool)


def _last_column(g: jax.Array, bad: jax.Array) -> jax.Array:
    return g * jnp.ones(g.shape[-1:]).at[-1].set(bad) if g.ndim else g


def _in_scan(x: jax.Array, bad: jax.Array) -> jax.Array:
    return lax.scan(lambda c, factor: (c * factor, None), x, jnp.stack([jnp.ones(()), bad]))[0]


#: What is made of (the value, the number, the parameter whose gradient the value is).
Change = Callable[[Any, jax.Array, jax.Array], jax.Array]
#: (part of the step, what is done to it).
WHERE: Mapping[str, tuple[str, Change]] = {
    "nowhere": ("", lambda x, bad, p: x),
    "loss": ("loss", lambda x, bad, p: x * bad),
    "loss divided": ("loss", lambda x, bad, p: x / bad),
    "loss added": ("loss", lambda x, bad, p: x + bad),
    "loss in a branch": ("loss", lambda x, bad, p: lax.cond(jnp.isfinite(bad), lambda: x, lambda: x * bad)),
    "one label": ("labels", lambda x, bad, p: x.at[0, 1].set(bad)),
    "one example": ("rows", lambda x, bad, p: x.at[1].multiply(bad)),
    "rows": ("rows", lambda x, bad, p: x * bad),
    "rows, backward": ("rows", lambda x, bad, p: _back(x, bad)),
    "table": ("table", lambda x, bad, p: x * bad),
    "table added": ("table", lambda x, bad, p: x + bad),
    "table by rows": ("table", lambda x, bad, p: jnp.where(_odd_rows(x), x * bad, x)),
    "table by columns": ("table", lambda x, bad, p: x * jnp.ones((WIDTH,)).at[1].set(bad)),
    "table in a branch": ("table", lambda x, bad, p: lax.cond(jnp.isfinite(bad), lambda: x, lambda: x * bad)),
    "table in a scan": ("table", lambda x, bad, p: _in_scan(x, bad)),
    "table in a checkpoint": ("table", lambda x, bad, p: jax.checkpoint(jnp.multiply)(x, bad)),
    "table, backward": ("table", lambda x, bad, p: _back(x, bad)),
    "table, backward, by rows": ("table", lambda x, bad, p: jnp.where(_odd_rows(x), _back(x, bad), x)),
    "table, backward in a branch": (
        "table",
        lambda x, bad, p: lax.cond(bad == 1, lambda x: x, lambda x: _back(x, bad), x),
    ),
    "table, backward in a checkpoint": ("table", lambda x, bad, p: jax.checkpoint(_back)(2 * x, bad)),
    "gradient": ("gradient", lambda x, bad, p: x * bad),
    "gradient divided": ("gradient", lambda x, bad, p: x / bad),
    "gradient by rows": ("gradient", lambda x, bad, p: jnp.where(_odd_rows(x), x * bad, x)),
    "gradient by what a row holds": ("gradient", lambda x, bad, p: jnp.where(p > 0.2, x * bad, x)),
    "gradient by columns": ("gradient", lambda x, bad, p: _last_column(x, bad)),
    "gradient in a branch": ("gradient", lambda x, bad, p: lax.cond(jnp.isfinite(bad), lambda: x, lambda: x * bad)),
    "gradient in a scan": ("gradient", lambda x, bad, p: _in_scan(x, bad)),
    "gradient plus 0 times it": ("gradient", lambda x, bad, p: x + 0.0 * bad * x),
    "gradient to a power": ("gradient", lambda x, bad, p: jnp.sign(x) * jnp.abs(x) ** bad),
    "gradient clipped": ("gradient", lambda x, bad, p: jnp.clip(x, -bad, bad)),
}

CHAIN: Mapping[str, Callable[[Tree, jax.Array], jax.Array]] = {
    **ingredients.CHAIN,
    "divided by its norm": lambda p, t: t / jnp.linalg.norm(t, axis=1, keepdims=True),
}

LOOKUPS: Mapping[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    **ingredients.LOOKUPS,
    "squared": lambda t, i: jnp.einsum("bd,bd,be->be", t[i], t[i], t[i]),
    "in a scan": lambda t, i: lax.scan(lambda c, k: (c + t[k].sum(), t[k] + c), jnp.zeros(()), i)[1],
    "in a vmapped branch": lambda t, i: jax.vmap(lambda k: lax.cond(k > 3, lambda: t[k], lambda: -t[k]))(i),
}

#: Of the gradient of a table, all of whose rows it reads, and the table.
Metric = Callable[[jax.Array, jax.Array], jax.Array]
METRICS: Mapping[str, Metric] = {
    "none": lambda g, p: jnp.zeros(()),
    "maximum": lambda g, p: jnp.max(g),
    "sum of squares": lambda g, p: jnp.sum(g * g),
    "how many aren't 0": lambda g, p: jnp.sum(g != 0),
    "how many are NaN": lambda g, p: jnp.sum(jnp.isnan(g)),
    "whether one is NaN": lambda g, p: jnp.any(jnp.isnan(g)),
    "product with the table": lambda g, p: jnp.where(jnp.isnan(g), 2.0, g).T @ p,
}
#: How a metric is computed, given the batch's number as well.
WITHIN: Mapping[str, Callable[[Metric, jax.Array, jax.Array, jax.Array], jax.Array]] = {
    "nothing": lambda metric, g, p, bad: metric(g, p),
    "a checkpoint": lambda metric, g, p, bad: jax.checkpoint(metric)(g, p),
    "a branch": lambda metric, g, p, bad: lax.cond(bad > 1e9, metric, lambda g, p: metric(2 * g, p), g, p),
    "a loop": lambda metric, g, p, bad: lax.scan(lambda c, k: (c, metric(g * k, p)), 0, jnp.arange(1.0, 3.0))[1],
    "a loop that carries it": lambda metric, g, p, bad: lax.scan(
        lambda c, k: (c * k, metric(c, p)), g, jnp.stack([bad, bad])
    )[1],
}


def hidden(g: jax.Array, p: jax.Array, bad: jax.Array) -> jax.Array:
    """Times the number, but for some rows by their number and others by what they hold."""
    return jnp.where(_odd_rows(g) | (p > 0.2), g, g * bad)


# --- optimizers: (param, grad, slot, step, norm of all grads) -> (param, slot) ---


def _zero_nans(p: jax.Array, g: jax.Array, s: jax.Array, step: jax.Array, norm: jax.Array) -> tuple[Any, Any]:
    return p - 0.1 * jnp.where(jnp.isnan(g), 0.0, g), jnp.isnan(g).astype(jnp.float32)


def _counted_rate(p: jax.Array, g: jax.Array, s: jax.Array, step: jax.Array, norm: jax.Array) -> tuple[Any, Any]:
    """Rows are hidden until a gradient has reached them."""
    return p - 0.1 * jnp.where(s > 0, g / norm, 0.0), jnp.where(g != 0, s + 1, s)


OPTIMIZERS = {
    **ingredients.OPTIMIZERS,
    "last gradient only": lambda p, g, s, step, norm: (p - 0.1 * g, g),
    "running maximum": lambda p, g, s, step, norm: (p - 0.1 * g, jnp.maximum(s, jnp.abs(g))),
    "counting": lambda p, g, s, step, norm: (p - 0.1 * g, jnp.where(g != 0, s + 1, s)),
    "zero nans": _zero_nans,
    "counted rate": _counted_rate,
    "sign": lambda p, g, s, step, norm: (p - 0.1 * jnp.sign(g), s + g * g),
    "scaled slot": lambda p, g, s, step, norm: (p - 0.1 * g, g * p),
    "slot only": lambda p, g, s, step, norm: (p, g / norm),
}
