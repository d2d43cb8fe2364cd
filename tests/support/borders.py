"""Lookups with operations on rows behind them, and the bytes of a row that travel once owners run these."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

ROWS, WIDTH, EXAMPLES, LENGTH = 400, 32, 16, 3
Look = Callable[[Any, Any], Any]


def _bf16(rows: Any) -> Any:
    return rows.astype(jnp.bfloat16)


def _spliced(t: Any, i: Any) -> Any:
    """Overlapping slices, whose gradients are added up before they are sent."""
    return jnp.concatenate([t[i][..., :8], jnp.tanh(t[i][..., 4:12])], -1)


def _halves(t: Any, i: Any) -> Any:
    """A sum of halves, which both get the same gradient."""
    return t[i][..., :16] + t[i][..., 16:]


def _written(t: Any, i: Any) -> Any:
    return jnp.concatenate([t[:, :4][i], t[i + 1][..., :4]], -1)


def _doubled(t: Any) -> Any:
    """Rows that are wider ahead of their lookup."""
    return jnp.concatenate([t, jnp.tanh(t)], 1)


def _twice(t: Any, i: Any) -> Any:
    """Two lookups of wide rows and one of the table: all need its rows alone."""
    return _doubled(t)[i] * _doubled(t)[i + 1] + jnp.tile(t[i], 2)


#: (lookup, bytes of a row that are looked up, of gradients that are sent). All of a row are 128 bytes.
MOVED: Mapping[str, tuple[Look, int, int]] = {
    "slice": (lambda t, i: t[i][..., :8], 32, 32),
    "slice in the middle": (lambda t, i: jnp.tanh(t[i][..., 3:11]), 32, 32),
    "two slices": (lambda t, i: t[i][..., :8] * t[i][..., 12:20], 64, 64),
    "the same slice twice": (lambda t, i: t[i][..., :8] * t[i + 1][..., :8], 32, 32),
    "slices of two lookups": (lambda t, i: t[i][..., :8] * jnp.tile(t[i + 1][..., 8:12], 2), 48, 48),
    "overlapping slices": (_spliced, 64, 128),
    "halves": (_halves, 64, 64),
    "slice, written twice": (_written, 16, 32),
    "cast": (lambda t, i: _bf16(t[i]).astype(jnp.float32), 64, 128),
    "scaled, cast": (lambda t, i: _bf16(t[i] * 3.0).astype(jnp.float32), 64, 128),
    "slice, cast": (lambda t, i: _bf16(t[i][..., :8]).astype(jnp.float32), 16, 32),
    "cast, slice": (lambda t, i: _bf16(t[i])[..., :8].astype(jnp.float32), 16, 32),
    "sum": (lambda t, i: t[i].sum(-1), 4, 4),
    "kept sum": (lambda t, i: t[i].sum(-1, keepdims=True), 4, 4),
    "mean of a slice": (lambda t, i: t[i][..., 2:6].mean(-1), 4, 4),
    "reshaped, slice": (lambda t, i: t[i].reshape(*i.shape, 4, 8)[..., 1, :], 32, 32),
    "sums of heads": (lambda t, i: jnp.tanh(t[i].reshape(*i.shape, 4, 8).sum(-1)), 16, 16),
    "one id": (lambda t, i: t[i[:, 0]][:, :8], 32, 32),
    "filled": (lambda t, i: jnp.nan_to_num(jnp.take(t, 3 * i, axis=0)[..., :8]), 32, 32),
    "filled with 2": (lambda t, i: t.at[3 * i].get(mode="fill", fill_value=2.0)[..., :8], 32, 32),
    "filled with 0": (lambda t, i: t.at[3 * i].get(mode="fill", fill_value=0).sum(-1), 4, 4),
    "clipped": (lambda t, i: t.at[3 * i - ROWS].get(mode="clip")[..., :8], 32, 32),
    "no gradient": (lambda t, i: t[i][..., :8] * (lax.stop_gradient(t[i]) ** 2).sum(-1, keepdims=True), 36, 32),
    "count": (lambda t, i: t[i][..., :8] * (t[i] > 0).sum(-1, keepdims=True), 36, 32),
    "widened ahead": (lambda t, i: _bf16(t).astype(jnp.float32)[i], 64, 128),
    "widened ahead, slice": (lambda t, i: _bf16(t).astype(jnp.float32)[i][..., :8], 32, 32),
    "doubled ahead": (lambda t, i: _doubled(t)[i], 128, 256),
    "doubled ahead, twice": (_twice, 128, 640),
    "doubled ahead, one id": (lambda t, i: _doubled(t)[i[:, 0]], 128, 256),
    "doubled ahead, slice": (lambda t, i: _doubled(t)[i][..., 28:36], 32, 32),
    "doubled ahead, filled": (lambda t, i: jnp.nan_to_num(jnp.take(_doubled(t), 3 * i, axis=0)), 128, 256),
    "doubled ahead, filled with 0": (lambda t, i: _doubled(t).at[3 * i].get(mode="fill", fill_value=0), 128, 256),
    "doubled ahead, filled with 2": (lambda t, i: _doubled(t).at[3 * i].get(mode="fill", fill_value=2.0), 256, 256),
    "doubled ahead, clipped": (lambda t, i: _doubled(t).at[3 * i - ROWS].get(mode="clip"), 128, 256),
    "max": (lambda t, i: lax.stop_gradient(t[i]).max(-1) * t[i][..., 0], 8, 4),
}
#: Those of which rows travel as they are, and why.
KEPT: Mapping[str, Look] = {
    "all columns": lambda t, i: jnp.tanh(t[i]),
    "a slice, and all": lambda t, i: jnp.concatenate([t[i][..., :8], t[i + 1]], -1),
    "norm": lambda t, i: jnp.linalg.norm(t[i] + 1.0, axis=-1),  # its gradient reads rows
    "filled with 3, sum": lambda t, i: t.at[3 * i].get(mode="fill", fill_value=0.1).sum(-1) * t[i, 0],
    "joined ids": lambda t, i: t[i].reshape(len(i), -1)[..., 4:80],
}


def ids_of(seed: int) -> np.ndarray:
    """Returns ids, some of them often."""
    return (np.random.default_rng(seed).zipf(1.3, (EXAMPLES, LENGTH)) % (ROWS - 1)).astype(np.int32)


def step_of(look: Look, tx: optax.GradientTransformation = optax.sgd(0.1)) -> Callable[[Any, Any], Any]:  # noqa: B008
    def loss_of(p: Any, i: Any) -> Any:
        x = look(p["emb"], i)
        return jnp.mean(jnp.tanh(x * p["w"]) ** 2)

    def step(state: Any, i: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(state["params"], i)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    return step


def start(tx: optax.GradientTransformation = optax.sgd(0.1)) -> Any:  # noqa: B008
    table = np.random.default_rng(1).normal(size=(ROWS, WIDTH)).astype(np.float32)
    params = {"emb": jnp.asarray(table), "w": jnp.asarray(np.float32(0.7))}
    return {"params": params, "opt": tx.init(params)}
