"""A training whose table gets other numbers of rows on the way, planned and plain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.backends.global_arrays import local

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


def train_resized(optimizer: str, planned_for: Callable[[Any], Any], sizes: Sequence[int], steps: int = 3) -> Any:
    """Train some steps with each number of rows; the plain training beside it is the truth.

    Args:
      optimizer: Its name.
      planned_for: From the step to the planned one.
      sizes: Numbers of rows, one after the other.
      steps: With each of them.
    """
    both = _Both(optimizer, planned_for, sizes[0])
    both.train(steps)
    for rows in sizes[1:]:
        fresh, plain_fresh = both.fresh(rows)
        both.go_on(autopar.resize(both.state, fresh), plain_fresh)
        both.train(steps)
    return both.state


def restore_resized(folder: Path, planned_for: Callable[[Any], Any], saved: int, rows: int) -> Any:
    """Save a training's state, and go on from it with another number of rows."""
    both = _Both("adamw", planned_for, saved)
    both.train(3)
    autopar.save(folder, both.state, position={"batch": 3})
    fresh, plain_fresh = both.fresh(rows)
    state, position = autopar.restore(folder, fresh, resize=True)
    assert position == {"batch": 3}
    both.go_on(state, plain_fresh)
    both.train(3)
    return both.state


class _Both:
    """The planned training and the plain one."""

    def __init__(self, optimizer: str, planned_for: Callable[[Any], Any], rows: int) -> None:
        self._training = training = Training(optimizer)
        self._planned, self._plain = planned_for(training.step), jax.jit(training.step)
        self._key, self._batches, self._rows = jax.random.key(0), 0, rows
        self.state = autopar.init(training.fresh(rows), self._key, step=self._planned, batch=batch_in(rows, 0))
        self._truth = training.make_state(self._key, rows)

    def fresh(self, rows: int) -> tuple[Any, Any]:
        """States of another size, of which the user hears that it is compiled for."""
        self._key, self._rows = jax.random.key(rows), rows
        with pytest.warns(autopar.RecompileWarning, match="/item was"):
            fresh = autopar.init(self._training.fresh(rows), self._key, step=self._planned, batch=batch_in(rows, 0))
        return fresh, self._training.make_state(self._key, rows)

    def go_on(self, resized: Any, plain_fresh: Any) -> None:
        self._truth = jax.tree.map(plainly_resized, self._truth, plain_fresh)
        self.state = resized
        jax.tree.map(alike, self.state, self._truth)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            batch = batch_in(self._rows, self._batches)
            self._batches += 1
            self.state, loss = self._planned(self.state, batch)
            self._truth, expected = self._plain(self._truth, batch)
            np.testing.assert_allclose(np.asarray(local(loss)), expected, rtol=1e-5)


def alike(a: Any, b: Any) -> None:
    """Arrays and tables, of this process or of several, but for roundings."""
    a, b = (np.asarray(local(autopar.materialize(x))) for x in (a, b))
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
