"""Pieces of a step behind its gradients: optimizers, writes into new tables, results, guards (`pieces.py`)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from tests.fuzz.pieces import Pieces
from tests.support import bad_ingredients
from tests.support.ingredients import ROWS, WIDTH

# --- optimizers: (leaf, gradient, slot, step, norm of all gradients) -> (leaf, slot) ---


def _by_optax(made: Any, p: Any, g: Any, s: Any) -> Any:
    change, s = made.update(g, s, p)
    return p + change, s


def _adam(p: Any, g: Any, s: Any, step: Any, norm: Any) -> Any:
    m, v, t = 0.9 * s[0] + 0.1 * g, 0.99 * s[1] + 0.01 * g * g, step + 1.0
    return p - 0.1 * (m / (1 - 0.9**t)) / (jnp.sqrt(v / (1 - 0.99**t)) + 1e-2), (m, v)


def _averaged(p: Any, g: Any, s: Any, step: Any, norm: Any) -> Any:
    p = p - 0.1 * g
    return p, 0.95 * s + 0.05 * p


def _fading_counts(p: Any, g: Any, s: Any, step: Any, norm: Any) -> Any:
    s = jnp.where(g != 0, 1.0, 0.5 * s)
    return p * jnp.where(s > 0.2, 1.0, 0.99) - 0.1 * g, s


def _ftrl(p: Any, g: Any, s: Any, step: Any, norm: Any) -> Any:
    n = s + g * g
    return p - 0.1 * g - 0.1 * (jnp.sqrt(n) - jnp.sqrt(s)) * p, n


OPTIMIZERS: Pieces = {
    **bad_ingredients.OPTIMIZERS,
    "shrinking": lambda p, g, s, step, norm: (p * (1 - 0.02 / (1 + step)) - 0.1 * g, s),
    "adam": _adam,
    "averaged": _averaged,
    "ftrl": _ftrl,
    "fading counts": _fading_counts,
    "optax.adam": lambda p, g, s, step, norm: _by_optax(optax.adam(0.1, eps=1e-2), p, g, s),
    "optax.adamw": lambda p, g, s, step, norm: _by_optax(optax.adamw(0.1, eps=1e-2, weight_decay=0.1), p, g, s),
    "optax.amsgrad": lambda p, g, s, step, norm: _by_optax(optax.amsgrad(0.1, eps=1e-2), p, g, s),
    "optax.nesterov": lambda p, g, s, step, norm: _by_optax(optax.sgd(0.1, momentum=0.9, nesterov=True), p, g, s),
    "optax.rmsprop": lambda p, g, s, step, norm: _by_optax(optax.rmsprop(0.1, eps=1e-2, centered=True), p, g, s),
    "optax.adagrad": lambda p, g, s, step, norm: _by_optax(optax.adagrad(0.1), p, g, s),
    "optax.lion": lambda p, g, s, step, norm: _by_optax(optax.lion(0.01, weight_decay=0.1), p, g, s),
    "optax.adadelta": lambda p, g, s, step, norm: _by_optax(optax.adadelta(0.5, eps=1e-2), p, g, s),
}
SLOTS: Pieces = {
    "": jnp.zeros_like,
    "row-wise adagrad": lambda p: jnp.zeros(p.shape[:-1], p.dtype),
    "counted rate": lambda p: (
        jnp.zeros_like(p) + (jnp.arange(p.shape[0]) % 3 == 0).reshape(-1, *[1] * (p.ndim - 1)).astype(p.dtype)
    ),
    "adam": lambda p: (jnp.zeros_like(p), jnp.zeros_like(p)),
    "averaged": lambda p: p * 1,
    "optax.adam": lambda p: optax.adam(0.1).init(p),
    "optax.adamw": lambda p: optax.adamw(0.1).init(p),
    "optax.amsgrad": lambda p: optax.amsgrad(0.1).init(p),
    "optax.nesterov": lambda p: optax.sgd(0.1, momentum=0.9, nesterov=True).init(p),
    "optax.rmsprop": lambda p: optax.rmsprop(0.1, centered=True).init(p),
    "optax.adagrad": lambda p: optax.adagrad(0.1).init(p),
    "optax.lion": lambda p: optax.lion(0.01).init(p),
    "optax.adadelta": lambda p: optax.adadelta(0.5).init(p),
}

#: (table after the update, before it, its gradient, ids, step) -> table: writes that a step makes besides.
WRITES: Pieces = {
    "set": lambda new, old, g, i, k: new.at[i].set(0.25),
    "added": lambda new, old, g, i, k: new.at[i].add(0.05),
    "at most": lambda new, old, g, i, k: new.at[i].min(0.3),
    "at least": lambda new, old, g, i, k: new.at[i].max(0.1),
    "multiplied": lambda new, old, g, i, k: new.at[i].multiply(0.9),
    "applied": lambda new, old, g, i, k: new.at[i].apply(jnp.tanh),
    "set, some dropped": lambda new, old, g, i, k: new.at[jnp.where(i % 2 == 0, len(new), i)].set(0.5, mode="drop"),
    "added, some dropped": lambda new, old, g, i, k: new.at[jnp.where(i % 3 == 0, len(new) + 7, i)].add(
        old[i] * 0.1, mode="drop"
    ),
    "added, clipped": lambda new, old, g, i, k: new.at[i].add(0.1, mode="clip"),
    "rows of before": lambda new, old, g, i, k: new.at[i].set(0.5 * old[i]),
    "other rows": lambda new, old, g, i, k: new.at[(i + 1) % len(new)].multiply(0.5),
    "rows of unit length": lambda new, old, g, i, k: new.at[i % len(new)].set(
        (new / jnp.linalg.norm(new, axis=1, keepdims=True))[i % len(new)]
    ),
    "all rows of unit length": lambda new, old, g, i, k: new / jnp.linalg.norm(new, axis=1, keepdims=True),
    "rows within a ball": lambda new, old, g, i, k: (
        new * jnp.minimum(1.0, 0.6 / jnp.sqrt(jnp.sum(new * new, 1, keepdims=True) + 1e-12))
    ),
    "padding row": lambda new, old, g, i, k: new.at[0].set(0),
    "last rows": lambda new, old, g, i, k: new.at[-2:].multiply(0.5),
    "clipped": lambda new, old, g, i, k: jnp.clip(new, -0.8, 0.8),
    "one column": lambda new, old, g, i, k: new.at[i, 0].set(1.0),
    "touched rows again": lambda new, old, g, i, k: jnp.where(jnp.any(g != 0, 1, keepdims=True), 0.9 * new, new),
    "untouched rows": lambda new, old, g, i, k: jnp.where(jnp.any(g != 0, 1, keepdims=True), new, 0.9 * new),
    "its change added": lambda new, old, g, i, k: old + 0.5 * (new - old),
    "where it moved": lambda new, old, g, i, k: jnp.where(new != old, 0.9 * new, new),
    "by the row's number": lambda new, old, g, i, k: jnp.where((jnp.arange(len(new)) % 4 == 1)[:, None], old, new),
    "one row by the step": lambda new, old, g, i, k: new.at[k % len(new)].set(0.0),
    "rolled": lambda new, old, g, i, k: jnp.roll(new, 1, 0),
    "two rows swapped": lambda new, old, g, i, k: new.at[jnp.array([0, 1])].set(new[jnp.array([1, 0])]),
    "every other step": lambda new, old, g, i, k: jnp.where(k % 2 == 0, new, old),
    "in a branch": lambda new, old, g, i, k: lax.cond(k > 0, lambda t: t.at[i].set(0.25), lambda t: t, new),
    "in a loop": lambda new, old, g, i, k: lax.fori_loop(0, len(i), lambda j, t: t.at[i[j]].add(0.01), new),
}

#: (table after the step, before it, its gradient, ids) -> what the step returns besides.
RESULTS: Pieces = {
    "doubled": lambda new, old, g, i: new * 2,
    "plus 0": lambda new, old, g, i: new + 0.0,
    "the table": lambda new, old, g, i: new,
    "the old one": lambda new, old, g, i: old,
    "the gradient": lambda new, old, g, i: g,
    "the change": lambda new, old, g, i: new - old,
    "sines summed": lambda new, old, g, i: jnp.sin(new).sum(1),
    "norms": lambda new, old, g, i: jnp.linalg.norm(new, axis=1),
    "norms before": lambda new, old, g, i: jnp.sqrt(jnp.sum(old * old, axis=1)),
    "norms of gradients": lambda new, old, g, i: jnp.sum(g * g, axis=1),
    "best columns": lambda new, old, g, i: jnp.argmax(new, axis=1),
    "best row": lambda new, old, g, i: jnp.argmax(new.sum(1)),
    "signs": lambda new, old, g, i: new > 0,
    "smaller floats": lambda new, old, g, i: new.astype(jnp.float32),
    "mean": lambda new, old, g, i: new.mean(),
    "largest": lambda new, old, g, i: (new.max(), jnp.max(jnp.abs(g))),
    "column means": lambda new, old, g, i: new.mean(0),
    "touched": lambda new, old, g, i: jnp.any(g != 0, axis=1),
    "how many touched": lambda new, old, g, i: jnp.sum(jnp.any(g != 0, axis=1)),
    "softmax of rows": lambda new, old, g, i: jax.nn.softmax(new.sum(1)),
    "covariance": lambda new, old, g, i: new.T @ new,
    "scores": lambda new, old, g, i: new[i] @ new.T,
    "rows": lambda new, old, g, i: new[i],
    "rows before": lambda new, old, g, i: old[i],
    "rows of the gradient": lambda new, old, g, i: g[i],
    "other rows": lambda new, old, g, i: new[(i + 1) % len(new)],
    "first rows": lambda new, old, g, i: new[:3] + 1,
    "transposed": lambda new, old, g, i: new.T,
    "sorted": lambda new, old, g, i: jnp.sort(new, axis=0),
    "set in the result": lambda new, old, g, i: new.at[i].set(0.0),
    "counts": lambda new, old, g, i: jnp.zeros(len(new), jnp.int32).at[i].add(1),
    "scale of rows": lambda new, old, g, i: jnp.where(new > 0, new, 0.1 * new) / (1 + jnp.abs(old)),
    "table and slot of ones": lambda new, old, g, i: jnp.concatenate([new, jnp.ones_like(new)], 1),
    "in a loop": lambda new, old, g, i: lax.scan(lambda c, x: (c + x.sum(), c * x), jnp.zeros(()), new)[1],
    "distinct ids": lambda new, old, g, i: jnp.unique(i, size=3, fill_value=0),
}

#: What a state holds besides: (from the table at the start, from (kept, new, old, gradient, ids, step)).
KEPT: Pieces = {
    "average": (lambda t: t * 1, lambda s, new, old, g, i, k: 0.9 * s + 0.1 * new),
    "mean of all": (lambda t: t * 1, lambda s, new, old, g, i, k: (s * (k + 1.0) + new) / (k + 2.0)),
    "table before": (lambda t: t * 1, lambda s, new, old, g, i, k: old),
    "same table": (lambda t: t * 1, lambda s, new, old, g, i, k: new),
    "target": (lambda t: t * 1, lambda s, new, old, g, i, k: jnp.where(k % 3 == 2, new, s)),
    "target in a branch": (lambda t: t * 1, lambda s, new, old, g, i, k: lax.cond(k % 2 == 1, lambda: new, lambda: s)),
    "counts": (lambda t: jnp.zeros(len(t), jnp.int32), lambda s, new, old, g, i, k: s.at[i].add(1)),
    "last step": (lambda t: jnp.full(len(t), -1, jnp.int32), lambda s, new, old, g, i, k: s.at[i].set(k)),
    "latest": (lambda t: jnp.zeros(len(t), jnp.int32), lambda s, new, old, g, i, k: s.at[i].max(k)),
    "waiting": (
        lambda t: jnp.zeros(len(t), jnp.int32),
        lambda s, new, old, g, i, k: jnp.maximum(s.at[jnp.clip(i, 0, len(s) - 1)].set(5) - 1, 0),
    ),
    "ever touched": (lambda t: jnp.zeros(len(t), bool), lambda s, new, old, g, i, k: s | jnp.any(g != 0, 1)),
    "how often": (
        lambda t: jnp.zeros(len(t)),
        lambda s, new, old, g, i, k: 0.9 * s + 0.1 * jnp.any(g != 0, 1),
    ),
    "norms": (lambda t: jnp.zeros(len(t)), lambda s, new, old, g, i, k: s.at[i].set(jnp.sum(new * new, 1)[i])),
    "all norms": (lambda t: jnp.zeros(len(t)), lambda s, new, old, g, i, k: jnp.sum(new * new, 1)),
    "sum of gradients": (lambda t: jnp.zeros(t.shape[1:]), lambda s, new, old, g, i, k: s + g.sum(0)),
}

#: What a step closes over: (what the k-th step does, with that: (the table after the update, before it) -> table).
#: Steps that differ in it alone take turns ("step, other constants").
CLOSED: Pieces = {
    "nothing": (lambda k: (), lambda c, new, old: new),
    "a decay": (lambda k: jnp.asarray(0.1 + 0.2 * k), lambda c, new, old: new * (1 - c)),
    "a decay of NumPy": (lambda k: np.float32(0.25 + k), lambda c, new, old: new - 0.1 * c * new),
    "a limit": (lambda k: jnp.asarray(0.3 + 0.3 * k), lambda c, new, old: jnp.clip(new, -c, c)),
    "columns": (lambda k: jnp.cos(jnp.arange(WIDTH) + k), lambda c, new, old: new * c[: new.shape[1]]),
    "a matrix": (
        lambda k: jnp.eye(WIDTH) + jnp.sin(jnp.arange(WIDTH * WIDTH) + k).reshape(WIDTH, WIDTH) / 10,
        lambda c, new, old: new @ c[: new.shape[1], : new.shape[1]],
    ),
    "rows that stay": (
        lambda k: jnp.arange(ROWS) % 3 == k,
        lambda c, new, old: jnp.where(c[:, None], old, new),
    ),
    "rows that stay, by number": (
        lambda k: jnp.asarray([0, ROWS // 2][k:]),
        lambda c, new, old: new.at[c].set(old[c]),
    ),
    "a table": (lambda k: jnp.sin(jnp.arange(ROWS) + k), lambda c, new, old: new + 0.1 * c[:, None]),
    "factors of rows": (lambda k: 1 - jnp.arange(ROWS) % (3 + k) / 10, lambda c, new, old: new * c[:, None]),
}

#: (new state, old, loss, step) -> state
GUARDS: Pieces = {
    "none": lambda new, old, value, k: new,
    "by the loss": lambda new, old, value, k: lax.cond(value < 3.0, lambda: new, lambda: old),
    "where finite": lambda new, old, value, k: jax.tree.map(
        lambda a, b: jnp.where(jnp.isfinite(value), a, b), new, old
    ),
    "every other step": lambda new, old, value, k: lax.cond(k % 2 == 0, lambda: new, lambda: {**old, "step": k + 1}),
    "params only": lambda new, old, value, k: {
        **new,
        "params": lax.cond(k % 2 == 0, lambda: new["params"], lambda: old["params"]),
    },
}
