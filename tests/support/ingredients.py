"""What random train steps are made of, by name: equations on a table, lookups, losses, gradients, optimizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

ROWS, WIDTH, IDS, PARTS = 11, 3, 4, 2
Tree = Any


# --- the table before it is looked up: rows stay rows ---

CHAIN: Mapping[str, Callable[[Tree, jax.Array], jax.Array]] = {
    "scaled by a scalar": lambda p, t: t * p["scale"],
    "cast": lambda p, t: t.astype(jnp.float16).astype(jnp.float32),
    "tanh": lambda p, t: jnp.tanh(t),
    "leaky": lambda p, t: jnp.where(t > 0, t, 0.1 * t),
    "padding row masked": lambda p, t: t * (jnp.arange(ROWS) != 0)[:, None],
    "mask from outside": lambda p, t: jnp.where(jnp.asarray(np.arange(ROWS) % 3 > 0)[:, None], t, 0.0),
    "normalised": lambda p, t: t / jnp.sqrt(jnp.sum(t * t, axis=1, keepdims=True) + 1e-3),
    "centred": lambda p, t: t - t.mean(axis=1, keepdims=True),
    "softmax over columns": lambda p, t: jax.nn.softmax(t, axis=1),
    "projected": lambda p, t: t @ p["w"],
    "reshaped": lambda p, t: (t.reshape(ROWS, 1, WIDTH) + jnp.arange(3.0)).reshape(ROWS, WIDTH),
    "transposed twice": lambda p, t: (t.T * jnp.array([[0.5], [1.5], [1.0]])).T,
    "clipped": lambda p, t: jnp.clip(t, -0.9, 0.9),
    "columns swapped": lambda p, t: jnp.concatenate([t[:, 1:], t[:, :1]], axis=1),
    "checkpointed": lambda p, t: jax.checkpoint(jnp.sin)(t),
}

# --- lookups: (table, ids[n]) -> [n, WIDTH] ---

LOOKUPS: Mapping[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "index": lambda t, i: t[i],
    "fill": lambda t, i: t.at[i].get(mode="fill", fill_value=0.5),
    "clip": lambda t, i: t.at[i].get(mode="clip"),
    "take": lambda t, i: jnp.take(t, i, axis=0, mode="clip"),
    "columns too": lambda t, i: t[i, jnp.abs(i) % WIDTH][:, None] * jnp.ones((1, WIDTH)),
    "of the transpose": lambda t, i: t.T[:, i].T,
    "one row": lambda t, i: jnp.broadcast_to(t[i[0]], (len(i), WIDTH)),
    "dynamic slice": lambda t, i: lax.dynamic_slice_in_dim(t, i[1], len(i)),
    "static rows": lambda t, i: t[2 : 2 + len(i)],
    "every other row": lambda t, i: t[1 : 2 * len(i) : 2],
    "vmapped": lambda t, i: jax.vmap(lambda k: t[k])(i),
    "one-hot": lambda t, i: jax.nn.one_hot(i % ROWS, ROWS) @ t,
    "in a checkpoint": lambda t, i: jax.checkpoint(lambda t: jnp.sin(t[i]))(t),
    "in a branch": lambda t, i: lax.cond(i[0] > 2, lambda: t[i], lambda: 2 * t[i[::-1]]),
    "two dimensions": lambda t, i: t[i.reshape(2, -1)].reshape(len(i), WIDTH),
}

#: What is done to the ids of the batch, which reach from -ROWS - 3 to ROWS + 3.
ID_KINDS: Mapping[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "as they are": lambda i, k: i,
    "modulo": lambda i, k: i % ROWS,
    "by the step": lambda i, k: (i + 3 * k) % ROWS,
    "masked": lambda i, k: jnp.where(i < 5, i, 0),
    "bytes": lambda i, k: jnp.abs(i).astype(jnp.uint8),
    "sorted": lambda i, k: jnp.sort(i),
    "shifted": lambda i, k: jnp.pad(i[:-1], (1, 0)),
    "sampled": lambda i, k: jax.random.randint(jax.random.fold_in(jax.random.key(5), k), i.shape, 0, ROWS),
    "all equal": lambda i, k: jnp.full_like(i, 4),
}

#: What is done to the rows that were looked up: `[n, WIDTH]` stays `[n, WIDTH]`.
AFTER: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "nothing": lambda h: h,
    "first dropped": lambda h: jnp.concatenate([h[1:], h[:1] * 2]),
    "padded": lambda h: jnp.pad(h[:-1], ((1, 0), (0, 0))),
    "one column": lambda h: h - h[:, :1],
    "one position": lambda h: h * jnp.tanh(h[2]),
    "some positions": lambda h: h[jnp.array([3, 0, 0, 1])],
    "dynamic position": lambda h: h + lax.dynamic_index_in_dim(h, jnp.argmax(h[:, 0]), 0),
    "summed up": lambda h: jnp.cumsum(h, axis=0),
    "sorted": lambda h: jnp.sort(h, axis=0),
    "attention": lambda h: jax.nn.softmax(h @ h.T, axis=-1) @ h,
    "halves": lambda h: jnp.concatenate([part * (k + 1) for k, part in enumerate(jnp.split(h, 2))][::-1]),
    "set": lambda h: h.at[0].set(h[1]),
}

LOSSES: Mapping[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "square": lambda h, y: jnp.mean((h - y) ** 2),
    "logistic": lambda h, y: jnp.mean(jnp.logaddexp(0.0, -h * jnp.sign(y))),
    "softmax": lambda h, y: -jnp.mean(jnp.sum(jax.nn.log_softmax(h) * jax.nn.softmax(y), axis=1)),
}


# --- gradients: (loss, params, ids[PARTS, IDS], labels of each part) -> (loss, gradients) ---


def _first(parts: Tree) -> Tree:
    return jax.tree.map(lambda x: x[0], parts)


def _direct(loss: Any, params: Tree, ids: jax.Array, y: Tree) -> tuple[jax.Array, Tree]:
    return jax.value_and_grad(loss)(params, *_first((ids, y)))


def _remat(loss: Any, params: Tree, ids: jax.Array, y: Tree) -> tuple[jax.Array, Tree]:
    return jax.value_and_grad(jax.checkpoint(loss))(params, *_first((ids, y)))


def _microbatches(loss: Any, params: Tree, ids: jax.Array, y: Tree) -> tuple[jax.Array, Tree]:
    def body(carry: Tree, part: Any) -> tuple[Tree, None]:
        return jax.tree.map(jnp.add, carry, jax.value_and_grad(loss)(params, *part)), None

    zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
    return lax.scan(body, zeros, (ids, y))[0]


def _loop(loss: Any, params: Tree, ids: jax.Array, y: Tree, wrap: Any = lambda body: body) -> tuple[Any, Tree]:
    def total(params: Tree) -> jax.Array:
        def body(carry: jax.Array, part: Any) -> tuple[jax.Array, None]:
            return carry * 0.5 + loss(params, *part), None

        return lax.scan(wrap(body), jnp.zeros(()), (ids, y))[0]

    return jax.value_and_grad(total)(params)


def _remat_loop(loss: Any, params: Tree, ids: jax.Array, y: Tree) -> tuple[jax.Array, Tree]:
    return _loop(loss, params, ids, y, jax.checkpoint)


GRADIENTS = {
    "direct": _direct,
    "remat": _remat,
    "microbatches": _microbatches,
    "loop": _loop,
    "remat in a loop": _remat_loop,
}

# --- optimizers: (param, grad, slot, step, norm of all grads) -> (param, slot) ---


def _adagrad(p: jax.Array, g: jax.Array, s: jax.Array, step: jax.Array, norm: jax.Array) -> tuple[Any, Any]:
    s = s + g * g
    return p - 0.1 * g / (jnp.sqrt(s) + 1e-3), s


def _row_adagrad(p: jax.Array, g: jax.Array, s: jax.Array, step: jax.Array, norm: jax.Array) -> tuple[Any, Any]:
    """One accumulator a row."""
    s = s + jnp.mean(g * g, axis=-1)
    return p - 0.1 * g * lax.rsqrt(s + 1e-3)[..., None], s


def _clipped(p: jax.Array, g: jax.Array, s: jax.Array, step: jax.Array, norm: jax.Array) -> tuple[Any, Any]:
    return p - 0.3 * g * jnp.minimum(1.0, 0.05 / norm), s


def _scheduled(p: jax.Array, g: jax.Array, s: jax.Array, step: jax.Array, norm: jax.Array) -> tuple[Any, Any]:
    rate = jnp.where(step < 1, 0.2, 0.4 / jnp.sqrt(1.0 + step))
    return p - rate * jnp.clip(g, -0.05, 0.05), s


def _guarded(p: jax.Array, g: jax.Array, s: jax.Array, step: jax.Array, norm: jax.Array) -> tuple[Any, Any]:
    fine = jnp.isfinite(norm) & (norm > 1e-9)
    return jnp.where(fine, p - 0.1 * g, p), jnp.where(fine, s + jnp.abs(g), s)


def _last_gradient(p: jax.Array, g: jax.Array, s: jax.Array, step: jax.Array, norm: jax.Array) -> tuple[Any, Any]:
    """A slot that is zero on the rows that the last step didn't touch."""
    return p - 0.1 * jnp.where(g * s < 0, 0.5 * g, g), g


def _poisoned(p: jax.Array, g: jax.Array, s: jax.Array, step: jax.Array, norm: jax.Array) -> tuple[Any, Any]:
    """The second step's scale is infinite: untouched rows become NaN in plain JAX, and so they must here."""
    return p + g * (0.1 / (step.astype(jnp.float32) - 1.0)), s


def _momentum(p: jax.Array, g: jax.Array, s: jax.Array, step: jax.Array, norm: jax.Array) -> tuple[Any, Any]:
    s = 0.9 * s + g
    return p - 0.1 * s, s


OPTIMIZERS = {
    "sgd": lambda p, g, s, step, norm: (p - 0.1 * g, s),
    "adagrad": _adagrad,
    "row-wise adagrad": _row_adagrad,
    "clipped by global norm": _clipped,
    "scheduled": _scheduled,
    "guarded": _guarded,
    "last gradient": _last_gradient,
    "poisoned": _poisoned,
    "momentum": _momentum,
}
#: Move every row at every step: untouched ones are deferred.
DEFERRED = {"momentum"}
