"""What every rank runs in `test_worlds.py`: tables that get other numbers of rows, against plain JAX."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import autopar  # first: it makes the ranks JAX's processes

# isort: split
import jax
import numpy as np

from autopar.tables.host import HostTable
from tests.support.resized import Training, alike, batch_in, plainly_resized, train_resized

HOSTS = ("ps", "hosts")


def planning(**options: Any) -> Callable[[Any], Any]:
    return lambda step: autopar.parallelize(step, **options)


def check_tables_on_hosts() -> None:
    state = train_resized("momentum", planning(strategy=HOSTS), (37, 50, 20))
    assert isinstance(state["params"]["item"], HostTable)


def check_dense_parameters_on_hosts() -> None:
    """Along another axis than the one by which ranks share them."""

    def train(weight: Any, x: Any) -> Any:
        return weight - 0.1 * jax.grad(lambda w: ((x @ w) ** 2).mean())(weight), x.sum()

    def made(columns: int) -> Any:
        step = autopar.parallelize(train, strategy={"weight": HOSTS})
        make = functools.partial(jax.random.normal, shape=(7, columns))
        return autopar.init(make, jax.random.key(columns), step=step, batch=np.ones((4, 7), np.float32))

    old, fresh = made(5), made(9)
    assert isinstance(fresh, HostTable)
    expected = np.concatenate([np.asarray(old), np.asarray(fresh)[:, 5:]], 1)
    np.testing.assert_array_equal(np.asarray(autopar.resize(old, fresh)), expected)


def check_tables_over_processes() -> None:
    state = train_resized("adagrad", planning(strategy="ps"), (41, 45))
    assert isinstance(state["params"]["item"], autopar.Table)


def check_tables_at_stages() -> None:
    pipeline = autopar.Pipeline([["params/item"], ["params/w"]], microbatches=2)
    state = train_resized("adagrad", planning(pipeline=pipeline), (41, 50))
    assert isinstance(state["params"]["item"], autopar.StageArray)


def check_restoring() -> None:
    """Onto hosts and onto devices, from hosts."""
    training, key = Training("adagrad"), jax.random.key(0)
    folder = Path(os.environ["XDG_CACHE_HOME"]).parent / "resized"

    def made(rows: int, key: Any, strategy: Any) -> Any:
        step = planning(strategy=strategy)(training.step)
        return autopar.init(training.fresh(rows), key, step=step, batch=batch_in(rows, 0))

    autopar.save(folder, made(37, key, HOSTS))
    state, other = training.make_state(key, 37), jax.random.key(1)
    for rows, strategy in ((50, HOSTS), (21, "ps")):
        fresh = made(rows, other, strategy)
        found, _ = autopar.restore(folder, fresh, resize=True)
        jax.tree.map(alike, found, jax.tree.map(plainly_resized, state, training.make_state(other, rows)))
        assert type(found["params"]["item"]) is type(fresh["params"]["item"])


def check_replicas_are_refused() -> None:
    training = Training("adagrad")
    step = autopar.parallelize(training.step, sync=autopar.sync.Average(every=2))
    state, _ = step(training.make_state(jax.random.key(0), 37), batch_in(37, jax.process_index()))
    fresh = training.make_state(jax.random.key(1), 50)
    try:
        autopar.resize(state, fresh)
    except autopar.StateError as error:
        assert "is an autopar.Replica" in str(error) and "resize autopar.average(state)" in str(error), error
    else:
        raise AssertionError("replicas were resized")
    mean = autopar.average(state)
    expected = jax.tree.map(plainly_resized, mean, fresh)
    found = autopar.resize(mean, fresh)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    planning(sync=autopar.sync.Average(every=2))(training.step)(found, batch_in(50, jax.process_index()))
