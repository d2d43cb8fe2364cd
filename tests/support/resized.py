"""A training whose table gets other numbers of rows on the way, planned and plain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import autopar
from autopar.backends.across import local

WIDTH = 3
OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "adamw": lambda: optax.adamw(0.05, weight_decay=0.1),
    "adagrad": lambda: optax.adagrad(0.1, initial_accumulator_value=0.3),
    "momentum": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9)),
}


class Training:
    """Steps on a table and a layer behind it, of as many rows as there are at the time."""

    def __init__(self, optimizer: str) -> None:
        self.tx = OPTIMIZERS[optimizer]()

    def make_state(self, key: Any, rows: int) -> Any:
        a, b = jax.random.split(key)
        params = {"item": jax.random.normal(a, (rows, WIDTH)), "w": jax.random.normal(b, (WIDTH, WIDTH))}
        return {"params": params, "opt": self.tx.init(params), "step": jnp.int32(0)}

    def step(self, state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            return jnp.mean(jnp.tanh(params["item"][batch["ids"]] @ params["w"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt = self.tx.update(grads, state["opt"], state["params"])
        new = {"params": optax.apply_updates(state["params"], updates), "opt": opt, "step": state["step"] + 1}
        return new, loss

    def fresh(self, rows: int) -> Any:
        """A function that makes a state of this size."""
        return lambda key: self.make_state(key, rows)


def batch_in(rows: int, seed: int) -> dict[str, Any]:
    return {"ids": np.random.default_rng(seed).integers(0, rows, (8, 2), np.int32)}


def plainly_resized(old: Any, fresh: Any) -> Any:
    """What `autopar.resize` is to do, in NumPy."""
    if np.shape(old) == np.shape(fresh):
        return old
    kept = min(len(old), len(fresh))
    return jnp.concatenate([old[:kept], fresh[kept:]])


def train_resized(optimizer: str, planned_for: Callable[[Any], Any], sizes: Sequence[int], steps: int = 4) -> Any:
    """Train some steps with each number of rows; the plain training beside it is the truth.

    Args:
      optimizer: Its name.
      planned_for: From the step to the planned one.
      sizes: Numbers of rows, one after the other.
      steps: With each of them.
    """
    training = Training(optimizer)
    planned, plain = planned_for(training.step), jax.jit(training.step)
    mine: Any = None
    truth: Any = None
    for n, rows in enumerate(sizes):
        key = jax.random.key(n)
        fresh = autopar.init(training.fresh(rows), key, step=planned, batch=batch_in(rows, 0))
        mine = fresh if mine is None else autopar.resize(mine, fresh)
        plain_fresh = training.make_state(key, rows)
        truth = plain_fresh if truth is None else jax.tree.map(plainly_resized, truth, plain_fresh)
        for k in range(steps):
            mine, loss = planned(mine, batch_in(rows, 100 * n + k))
            truth, expected = plain(truth, batch_in(rows, 100 * n + k))
            np.testing.assert_allclose(np.asarray(local(loss)), expected, rtol=1e-5)
        jax.tree.map(alike, mine, truth)
    return mine


def alike(a: Any, b: Any) -> None:
    """Arrays and tables, of this process or of several, but for roundings."""
    a, b = (np.asarray(local(autopar.materialize(x))) for x in (a, b))
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


def restore_resized(
    folder: Path, planned_for: Callable[[Any], Any], saved: int, rows: int, optimizer: str = "adamw"
) -> Any:
    """Save a training's state, and go on from it with another number of rows."""
    training, key = Training(optimizer), jax.random.key(0)
    planned, plain = planned_for(training.step), jax.jit(training.step)
    mine = autopar.init(training.fresh(saved), key, step=planned, batch=batch_in(saved, 0))
    truth = training.make_state(key, saved)
    for k in range(3):
        (mine, _), (truth, _) = planned(mine, batch_in(saved, k)), plain(truth, batch_in(saved, k))
    autopar.save(folder, mine, position={"batch": 3})
    key = jax.random.key(1)
    fresh = autopar.init(training.fresh(rows), key, step=planned, batch=batch_in(rows, 0))
    mine, position = autopar.restore(folder, fresh, resize=True)
    assert position == {"batch": 3}
    truth = jax.tree.map(plainly_resized, truth, training.make_state(key, rows))
    jax.tree.map(alike, mine, truth)
    for k in range(3):
        (mine, _), (truth, _) = planned(mine, batch_in(rows, k)), plain(truth, batch_in(rows, k))
    jax.tree.map(alike, mine, truth)
    return mine
