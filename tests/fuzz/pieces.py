"""What the programs of `make fuzz` are made of besides `tests.support.ingredients`: by name, first the plainest.

Scripts are put together from the text of these tables (`script.py`): a piece is an expression, and names nothing but
JAX's modules, Optax's, constants of the skeleton and functions of these modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from tests.support import bad_ingredients, ingredients
from tests.support.ingredients import ROWS

Pieces = Mapping[str, Any]

#: How a table is stored, and looked at as [ROWS, columns].
STORED: Pieces = {
    "rows": (lambda t: t, lambda t: t),
    "columns": (lambda t: t.T, lambda t: t.T),
    "three axes": (lambda t: t[:, :, None], lambda t: t[:, :, 0]),
    "rows in the middle": (lambda t: t[None, :, :, None], lambda t: t[0, :, :, 0]),
    "one number a row": (lambda t: t[:, 0], lambda t: t[:, None]),
}

# --- (params, table) -> what is looked up ---

CHAIN: Pieces = {
    **bad_ingredients.CHAIN,
    "bfloat16": lambda p, t: t.astype(jnp.bfloat16).astype(t.dtype),
    "float32": lambda p, t: t.astype(jnp.float32),
    "half of it held": lambda p, t: 0.5 * t + 0.5 * lax.stop_gradient(t),
    "rounded, straight through": lambda p, t: t + lax.stop_gradient(jnp.round(t * 8) / 8 - t),
    "rows within a ball": lambda p, t: t * jnp.minimum(1.0, 0.5 / jnp.sqrt(jnp.sum(t * t, 1, keepdims=True) + 1e-12)),
    "a row before": lambda p, t: jnp.concatenate([jnp.zeros((1, t.shape[1]), t.dtype), t]),
    "rows of ones behind": lambda p, t: jnp.pad(t, ((0, 2), (0, 0)), constant_values=1),
    "without its first row": lambda p, t: t[1:],
    "upside down": lambda p, t: jnp.flip(t, 0),
    "rolled": lambda p, t: jnp.roll(t, 1, 0),
    "each row, and its negative": lambda p, t: jnp.stack([t, -t], 1).reshape(-1, t.shape[1]),
    "two tables, one after the other": lambda p, t: jnp.concatenate([t, jnp.sin(t)]),
    "less another table": lambda p, t: t - 0.3 * t[::-1],
    "dropout of rows": lambda p, t: jnp.where(jax.random.bernoulli(jax.random.key(3), 0.8, t.shape[:1])[:, None], t, 0),
    "dropout": lambda p, t: jnp.where(jax.random.bernoulli(jax.random.key(4), 0.8, t.shape), t / 0.8, 0),
    "padding row set": lambda p, t: t.at[0].set(0),
    "a number for each row": lambda p, t: t + jnp.asarray(np.sin(np.arange(len(t))))[:, None],
    "columns summed up": lambda p, t: jnp.cumsum(t, 1),
    "columns sorted": lambda p, t: jnp.sort(t, 1),
    "jitted": lambda p, t: jax.jit(lambda u: u * u + u)(t),
    "where finite": lambda p, t: jnp.where(jnp.isfinite(t), t, 0),
}

# --- (table, ids[n]) -> [n, WIDTH] ---


@jax.custom_vjp
def _halved(t: Any, i: Any) -> Any:
    return jnp.take(t, i, axis=0, mode="clip")


_halved.defvjp(
    lambda t, i: (jnp.take(t, i, axis=0, mode="clip"), (jnp.zeros_like(t), i)),
    lambda kept, g: (kept[0].at[kept[1]].add(g / 2, mode="clip"), np.zeros(kept[1].shape, jax.dtypes.float0)),
)


def _unique(t: Any, i: Any) -> Any:
    rows, places = jnp.unique(i, size=i.size, return_inverse=True, fill_value=0)
    return t[rows][places.reshape(-1)]


def _carried(t: Any, i: Any) -> Any:
    """Rows summed up, from the start of each group of three."""

    def body(c: Any, x: Any) -> Any:
        row, first = x
        c = jnp.where(first, row, c + row)
        return c, c

    return lax.scan(body, jnp.zeros_like(t[0]), (t[i], jnp.arange(len(i)) % 3 == 0))[1]


def _of_elements(t: Any, i: Any) -> Any:
    elements = t.reshape(-1, 1)
    return lax.map(lambda k: elements[k % len(t) * t.shape[1] + jnp.arange(t.shape[1]), 0], i)


def _carried_in_a_group(t: Any, i: Any) -> Any:
    return lax.scan(lambda g, k: (g.at[0, k].multiply(0.5), g[0, k] + g[0, i[0]]), t.reshape(1, *t.shape), i)[1]


def _of_a_group(t: Any, i: Any) -> Any:
    group = jnp.tanh(t.reshape(1, *t.shape))
    h = lax.cond(i[0] > 1, lambda g: g[0, i], lambda g: g[0 * i, i[::-1]] * 2, group)
    return h + jax.checkpoint(lambda g: jnp.sin(g[0, i]))(group) + lax.map(lambda k: group[0, k], i)


LOOKUPS: Pieces = {
    **bad_ingredients.LOOKUPS,
    # Operations behind a lookup, which owners may run (`passes.place_border`).
    "a column of rows": lambda t, i: t[i][:, -1:] * jnp.ones((1, t.shape[1])),
    "sums of filled rows": lambda t, i: (
        t.at[i].get(mode="fill", fill_value=0).sum(-1)[:, None] * jnp.ones((1, t.shape[1]))
    ),
    "cast rows": lambda t, i: (3 * t[i]).astype(jnp.float32).astype(t.dtype),
    "parts of rows": lambda t, i: jnp.concatenate([t[i][:, :1], jnp.tanh(t[i[::-1]])[:, 1:]], -1),
    "zeros where out of range": lambda t, i: t.at[i].get(mode="fill", fill_value=0),
    "wrap": lambda t, i: jnp.take(t, i, axis=0, mode="wrap"),
    "NaN where out of range": lambda t, i: jnp.nan_to_num(jnp.take(t, i, axis=0), nan=0.1),
    "promised": lambda t, i: t.at[jnp.clip(i, 0, len(t) - 1)].get(mode="promise_in_bounds"),
    "one-hot, compared": lambda t, i: (i[:, None] == jnp.arange(len(t))).astype(t.dtype) @ t,
    "one-hot, contracted": lambda t, i: jnp.einsum("nv,vd->nd", jax.nn.one_hot(i, len(t), dtype=t.dtype), t),
    "smoothed": lambda t, i: (0.9 * jax.nn.one_hot(i, len(t), dtype=t.dtype) + 0.1 / len(t)) @ t,
    "a bag": lambda t, i: jnp.ones((len(i), 1)) * (jax.nn.one_hot(i, len(t), dtype=t.dtype).sum(0) @ t),
    "mapped": lambda t, i: lax.map(lambda k: t[k], i),
    "counted loop": lambda t, i: lax.fori_loop(0, len(i), lambda j, c: c + t[i[j]] * (j + 1), jnp.zeros((len(i), 1))),
    "in a switch": lambda t, i: lax.switch(i[0] % 3, [lambda: t[i], lambda: t[i] * 2, lambda: t[i[::-1]]]),
    "a branch without": lambda t, i: lax.cond(i[0] > 1, lambda t: t[i], lambda t: 0 * t[: len(i)], t),
    "gradient of its own": lambda t, i: _halved(t, i),
    "by distinct ids": lambda t, i: _unique(t, i),
    "sorted and back": lambda t, i: t[jnp.sort(i)][jnp.argsort(jnp.argsort(i))],
    "flat": lambda t, i: t.reshape(-1)[(i % len(t))[:, None] * t.shape[1] + jnp.arange(t.shape[1])],
    "in groups of one": lambda t, i: t.reshape(len(t), 1, -1)[i, 0] + t.reshape(1, *t.shape)[0 * i, i],
    "of elements": lambda t, i: _of_elements(t, i),
    "of a group": lambda t, i: _of_a_group(t, i),
    "carried in a group": lambda t, i: _carried_in_a_group(t, i),
    "side by side": lambda t, i: jax.vmap(lambda own, i: own[i])(t.reshape(1, *t.shape), i[None])[0],
    "in the order of a column": lambda t, i: t[i[jnp.argsort(lax.stop_gradient(t[i, 0]), stable=True)]],
    "largest columns": lambda t, i: t[i] * t[i, jnp.argmax(t[i], 1)][:, None],
    "largest columns, mapped": lambda t, i: lax.map(lambda k: t[k] * t[k, jnp.argmax(t[k])], i),
    "along an axis": lambda t, i: jnp.take_along_axis(t, (i % len(t))[:, None], axis=0),
    "quotient and remainder": lambda t, i: t[jnp.abs(i) // 4] * t[i % 4],
    "summed by segments": lambda t, i: jax.ops.segment_sum(t[i], jnp.arange(len(i)) // 2, num_segments=len(i)),
    "rows of neighbours": lambda t, i: t[jnp.stack([i, i + 1], 1) % len(t)].sum(1),
    "groups summed up": lambda t, i: _carried(t, i),
    "rematerialised scan": lambda t, i: lax.scan(
        jax.checkpoint(lambda c, k: (c + t[k].sum(), t[k] * jnp.tanh(c))), jnp.zeros((), t.dtype), i
    )[1],
    "ids carried": lambda t, i: lax.scan(lambda c, k: ((c + k) % len(t), t[c]), jnp.zeros((), i.dtype), i)[1],
    "loop in a loop": lambda t, i: lax.map(
        lambda k: lax.fori_loop(0, 2, lambda j, c: c + t[(k + j) % len(t)], jnp.zeros_like(t[0])), i
    ),
    "masked": lambda t, i: jnp.where((i % 2 == 0)[:, None], t[jnp.where(i % 2 == 0, i, 0)], 0),
    "jitted": lambda t, i: jax.jit(lambda t, i: t[i])(t, i),
    "prefix sums": lambda t, i: lax.associative_scan(jnp.add, t[i]),
    "twice": lambda t, i: t[i][::-1] + 0.5 * lax.stop_gradient(t[i]) * t[(i + 1) % len(t)],
}

# --- the same, of bags: each id's are six ---


def _bag(i: Any, t: Any) -> Any:
    return (i[:, None] * 5 + jnp.arange(6)) % len(t)


def _far_bag(i: Any, t: Any) -> Any:
    """Some are out of range."""
    return i[:, None] * 2 + jnp.arange(6) - 4


def _halves_of_bags(t: Any, i: Any) -> Any:
    rows = t[_bag(i, t)]
    return rows[:, :2].sum(1) - 2 * rows[:, 2:].mean(1)


def _two_sums_of_bags(t: Any, i: Any) -> Any:
    rows = t[_bag(i, t)]
    return rows.sum(1) * (rows * jnp.cos(1.0 * _bag(i, t))[..., None]).sum(1)


BAGS: Pieces = {
    "index": lambda t, i: t[i],
    "sum": lambda t, i: t[_bag(i, t)].sum(1),
    "mean, clipped": lambda t, i: jnp.take(t, _far_bag(i, t), axis=0, mode="clip").mean(1),
    "out of range": lambda t, i: t[_far_bag(i, t)].sum(1),
    "filled": lambda t, i: t.at[_far_bag(i, t)].get(mode="fill", fill_value=0.25).sum(1),
    "masked": lambda t, i: (t[_bag(i, t)] * (_bag(i, t) % 3 > 0)[..., None]).sum(1),
    "where": lambda t, i: jnp.where((_far_bag(i, t) % 2 == 0)[..., None], t[_far_bag(i, t)], 2.0).sum(1),
    "weighted": lambda t, i: jnp.einsum("bld,bl->bd", t[_bag(i, t)], jnp.cos(1.0 * _bag(i, t))),
    "a product": lambda t, i: (jnp.sin(1.0 * _far_bag(i, t))[:, None] @ t.at[_far_bag(i, t)].get(mode="clip"))[:, 0],
    "halves": lambda t, i: _halves_of_bags(t, i),
    "two sums": lambda t, i: _two_sums_of_bags(t, i),
    "beside single rows": lambda t, i: t[_bag(i, t)].sum(1) * t[i],
    "segments": lambda t, i: jax.ops.segment_sum(
        t[_bag(i, t).reshape(-1)], jnp.arange(6 * len(i)) // 6, num_segments=len(i)
    ),
    "segments of any length": lambda t, i: jax.ops.segment_sum(
        t[_bag(i, t).reshape(-1)], _bag(i, t).reshape(-1) % (len(i) + 1), num_segments=len(i)
    ),
    "mapped": lambda t, i: jax.vmap(lambda ids: t[ids].sum(0))(_bag(i, t)),
    "of two axes": lambda t, i: t[_bag(i, t).reshape(-1, 2, 3)].sum(2).mean(1),
    "half of it held": lambda t, i: lax.stop_gradient(t[_bag(i, t)]).sum(1) + t[_bag(i, t)].mean(1),
    "largest": lambda t, i: t[_bag(i, t)].max(1),
}

ID_KINDS: Pieces = {
    **ingredients.ID_KINDS,
    "of a list": lambda i, k: jnp.asarray(np.arange(13) * 5 % ROWS)[i],
    "clipped": lambda i, k: jnp.clip(i, 0, ROWS - 1),
    "hashed": lambda i, k: (i.astype(jnp.uint32) * jnp.uint32(2654435761) >> 5).astype(jnp.int32) % ROWS,
    "some -1": lambda i, k: jnp.where(i % 3 == 0, -1, i % ROWS),
    "some one too far": lambda i, k: jnp.where(i % 3 == 0, ROWS, i % ROWS),
    "some far off": lambda i, k: jnp.where(i % 2 == 0, i + 2**20, i),
    "some the smallest integer": lambda i, k: jnp.where(i % 2 == 0, jnp.iinfo(jnp.int32).min, i),
    "two": lambda i, k: (i > 1).astype(jnp.int16),
    "searched": lambda i, k: jnp.searchsorted(jnp.arange(ROWS) * 1.0, i * 0.7),
    "distinct": lambda i, k: jnp.unique(i, size=i.size, fill_value=0),
    "of floats": lambda i, k: i.astype(jnp.float32).astype(jnp.int32),
    "counted": lambda i, k: (jnp.arange(i.size) + k) % ROWS,
    "64 bits": lambda i, k: i.astype(int),
}

AFTER: Pieces = {
    **ingredients.AFTER,
    "dropout": lambda h: jnp.where(jax.random.bernoulli(jax.random.key(1), 0.7, h.shape), h / 0.7, 0),
    "layer norm": lambda h: (h - h.mean(1, keepdims=True)) / jnp.sqrt(h.var(1, keepdims=True) + 1e-3),
    "batch norm": lambda h: (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-2),
    "mean": lambda h: jnp.broadcast_to(h.mean(0), h.shape),
    "maximum": lambda h: jnp.broadcast_to(h.max(0), h.shape),
    "best": lambda h: jnp.broadcast_to(h[jnp.argmax(h[:, 0])], h.shape),
    "recurrent": lambda h: lax.scan(lambda c, x: (jnp.tanh(c * 0.5 + x),) * 2, jnp.zeros(h.shape[1:]), h)[1],
    "clipped": lambda h: jnp.clip(h, -0.4, 0.4),
    "of unit length": lambda h: h / jnp.linalg.norm(h, axis=1, keepdims=True),
    "factorisation machine": lambda h: jnp.broadcast_to(h.sum(0) ** 2 - (h**2).sum(0), h.shape),
    "sign, straight through": lambda h: h + lax.stop_gradient(jnp.sign(h) - h),
    "segments": lambda h: jax.ops.segment_sum(h, jnp.arange(len(h)) % 3, num_segments=len(h)),
}

LOSSES: Pieces = {
    **ingredients.LOSSES,
    "sum": lambda h, y: jnp.sum(h * y),
    "maximum": lambda h, y: jnp.max(h) + jnp.mean(jnp.max(h * y, axis=0)),
    "log sum": lambda h, y: jax.nn.logsumexp(h - y),
    "contrast": lambda h, y: -jnp.mean(jnp.diag(jax.nn.log_softmax(h @ (h + y).T))),
    "absolute": lambda h, y: jnp.mean(jnp.abs(h - y)),
    "hinge": lambda h, y: jnp.mean(jnp.maximum(0, 1 - h * jnp.sign(y))),
    "labels": lambda h, y: optax.softmax_cross_entropy_with_integer_labels(h, jnp.argmax(y, 1)).mean(),
    "norm": lambda h, y: jnp.linalg.norm(h - y),
    "at most 5": lambda h, y: jnp.minimum(jnp.sum((h - y) ** 2), 5.0),
}

WHERE: Pieces = bad_ingredients.WHERE

# --- (loss, params, ids[PARTS, n], (y[PARTS, n, WIDTH], number[PARTS])) -> (loss, gradients) ---


def _part(k: Any, ids: Any, y: Any) -> Any:
    return jax.tree.map(lambda x: x[k], (ids, y))


def _pull(loss: Any, params: Any, ids: Any, y: Any) -> Any:
    value, back = jax.vjp(lambda p: loss(p, *_part(0, ids, y)), params)
    return value, back(jnp.ones((), value.dtype))[0]


def _counted_loop(loss: Any, params: Any, ids: Any, y: Any) -> Any:
    def body(k: Any, c: Any) -> Any:
        return jax.tree.map(jnp.add, c, jax.value_and_grad(loss)(params, *_part(k, ids, y)))

    return lax.fori_loop(0, len(ids), body, (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)))


def _one_after_the_other(loss: Any, params: Any, ids: Any, y: Any) -> Any:
    parts = [jax.value_and_grad(loss)(params, *_part(k, ids, y)) for k in range(len(ids))]
    return jax.tree.map(lambda *x: sum(x) / len(x), *parts)


def _stacked(loss: Any, params: Any, ids: Any, y: Any) -> Any:
    return jax.tree.map(lambda x: x.mean(0), lax.map(lambda part: jax.value_and_grad(loss)(params, *part), (ids, y)))


def _private(loss: Any, params: Any, ids: Any, y: Any) -> Any:
    """Each part's gradient within a ball."""
    values, grads = jax.vmap(lambda i, y: jax.value_and_grad(loss)(params, i, y))(ids, y)
    scale = jnp.minimum(1.0, 0.5 / (jax.vmap(optax.global_norm)(grads) + 1e-9))
    return values.mean(), jax.tree.map(lambda g: jnp.tensordot(scale, g, 1), grads)


def _sometimes(loss: Any, params: Any, ids: Any, y: Any) -> Any:
    zeros = lambda p: (jnp.zeros(()), jax.tree.map(jnp.zeros_like, p))  # noqa: E731
    return lax.cond(ids[0].sum() > 0, lambda p: jax.value_and_grad(loss)(p, *_part(0, ids, y)), zeros, params)


def _penalised(loss: Any, params: Any, ids: Any, y: Any) -> Any:
    part = _part(0, ids, y)
    return jax.value_and_grad(lambda p: loss(p, *part) + 0.1 * jnp.sum(jax.grad(loss)(p, *part)["bias"] ** 2))(params)


@jax.custom_vjp
def _small_gradients(x: Any) -> Any:
    return x


_small_gradients.defvjp(lambda x: (x, ()), lambda kept, g: (jnp.clip(g, -0.01, 0.01),))


def _clipped_within(loss: Any, params: Any, ids: Any, y: Any) -> Any:
    return jax.value_and_grad(lambda p: loss(jax.tree.map(_small_gradients, p), *_part(0, ids, y)))(params)


def _decayed(loss: Any, params: Any, ids: Any, y: Any) -> Any:
    return jax.value_and_grad(lambda p: loss(p, *_part(0, ids, y)) + 1e-2 * jnp.sum(p["table0"] ** 2))(params)


GRADIENTS: Pieces = {
    **ingredients.GRADIENTS,
    "pulled back": _pull,
    "counted loop": _counted_loop,
    "one after the other": _one_after_the_other,
    "stacked": _stacked,
    "private": _private,
    "sometimes": _sometimes,
    "penalised": _penalised,
    "clipped within": _clipped_within,
    "decayed": _decayed,
}

#: (gradient of a table, the table, norm of all gradients, ids) -> gradient
TRANSFORMS: Pieces = {
    "by the norm": lambda g, p, norm, i: g * jnp.minimum(1.0, 0.3 / (norm + 1e-12)),
    "values clipped": lambda g, p, norm, i: jnp.clip(g, -0.02, 0.02),
    "rows clipped": lambda g, p, norm, i: (
        g * jnp.minimum(1.0, 0.05 / jnp.sqrt(jnp.sum(g * g, 1, keepdims=True) + 1e-12))
    ),
    "no NaN": lambda g, p, norm, i: jnp.nan_to_num(g, nan=0.0),
    "centred": lambda g, p, norm, i: g - g.mean(1, keepdims=True),
    "sign": lambda g, p, norm, i: 0.01 * jnp.sign(g),
    "weight decay": lambda g, p, norm, i: g + 0.01 * p,
    "bfloat16": lambda g, p, norm, i: g.astype(jnp.bfloat16).astype(g.dtype),
    "by the leaf's norm": lambda g, p, norm, i: g / (jnp.sqrt(jnp.sum(g * g)) + 1e-3),
    "by the largest": lambda g, p, norm, i: g / jnp.maximum(1.0, 10 * jnp.max(jnp.abs(g))),
    "by the mean": lambda g, p, norm, i: g / (jnp.mean(jnp.abs(g)) + 1e-2),
    "first row frozen": lambda g, p, norm, i: jnp.where((jnp.arange(len(g)) == 0)[:, None], 0, g),
    "noise": lambda g, p, norm, i: g + 1e-3 * jax.random.normal(jax.random.key(8), g.shape, g.dtype),
    "noise on touched rows": lambda g, p, norm, i: (
        g + jnp.where(jnp.any(g != 0, 1, keepdims=True), 1e-3 * jax.random.normal(jax.random.key(8), g.shape), 0)
    ),
    "within the row's size": lambda g, p, norm, i: (
        g
        * jnp.minimum(
            1.0, 0.1 * jnp.linalg.norm(p, axis=1, keepdims=True) / (jnp.linalg.norm(g, axis=1, keepdims=True) + 1e-9)
        )
    ),
    "large ones": lambda g, p, norm, i: jnp.where(jnp.abs(g) >= 0.5 * jnp.max(jnp.abs(g)), g, 0),
    "by how often": lambda g, p, norm, i: (
        g / jnp.maximum(1.0, jnp.zeros(len(g)).at[jnp.clip(i, 0, len(g) - 1)].add(1.0))[:, None]
    ),
    "in a branch": lambda g, p, norm, i: lax.cond(norm > 0.2, lambda g: g * (0.2 / norm), lambda g: g * 1.0, g),
}
