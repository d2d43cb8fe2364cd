"""Warnings of plans that a small change of the step, or of its batch, would make many times faster."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from tests.support.meshes import mesh_of
from tests.support.settings import set_options

ROWS, WIDTH = 4000, 4
TX = optax.adamw(0.1)


def _step(metric: Any) -> Any:
    def train_step(state: Any, batch: Any) -> Any:
        def loss_fn(table: jax.Array) -> jax.Array:
            rows = table[batch["ids"]]
            scores = rows @ table.T if metric == "softmax" else rows
            return -jax.nn.log_softmax(scores).mean()

        loss, gradient = jax.value_and_grad(loss_fn)(state["emb"])
        updates, opt = TX.update(gradient, state["opt"], state["emb"])
        table = optax.apply_updates(state["emb"], updates)
        return {"emb": table, "opt": opt}, (loss, metric(table) if callable(metric) else loss)

    return train_step


def _told(metric: Any, examples: int, slow_bytes: int = 1, **options: Any) -> list[str]:
    """Returns what is said of a step, by default of any number of bytes."""
    table = jnp.ones((ROWS, WIDTH))
    step = autopar.parallelize(_step(metric), **options)
    set_options(step, slow_bytes=slow_bytes)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", autopar.SlowPlanWarning)
        state = {"emb": table, "opt": TX.init(table)}
        for _ in range(2):
            state, _ = step(state, {"ids": np.arange(examples, dtype=np.int32)})
    return [str(w.message) for w in caught]


def test_a_metric_that_makes_a_table_dense() -> None:
    (told,) = _told(jnp.linalg.norm, 8)
    assert f"all {ROWS} rows of emb" in told and "at most 8 rows" in told and "test_slow_plans.py:" in told
    assert "compute it apart from the step" in told


@pytest.mark.parametrize(("metric", "examples"), [(None, 8), ("softmax", 8), (jnp.linalg.norm, ROWS // 2)])
def test_nothing_to_change(metric: Any, examples: int) -> None:
    assert _told(metric, examples, strategy="ps" if metric is None else "auto") == []


def test_small_tables_are_dense_without_a_word() -> None:
    assert _told(jnp.linalg.norm, 8, slow_bytes=64 << 20) == []


def _frozen(state: Any, ids: Any) -> Any:
    return (state[0], state[1] + 1.0), state[0][ids].sum()


def _written(state: Any, ids: Any) -> Any:
    return (state[0].at[ids].set(state[1]), state[1] + 1.0), ids.sum()


@pytest.mark.parametrize("step", [_frozen, _written])
def test_a_table_without_an_update_is_spread_where_it_is_named(step: Any) -> None:
    ids = np.arange(8, dtype=np.int32) * 3

    def run(strategy: Any) -> tuple[Any, list[str], str]:
        planned: Any = autopar.parallelize(step, strategy=strategy, state_argnums=0, mesh=mesh_of(4))
        set_options(planned, slow_bytes=1)
        state = (jnp.arange(4.0 * ROWS).reshape(ROWS, WIDTH), jnp.ones(()))
        text = planned.lower(state, ids).compile().as_text()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", autopar.SlowPlanWarning)
            (table, _), loss = planned(state, ids)
        (wanted, _), other = jax.jit(step)((jnp.arange(4.0 * ROWS).reshape(ROWS, WIDTH), jnp.ones(())), ids)
        np.testing.assert_array_equal(autopar.materialize(table), wanted)
        np.testing.assert_allclose(loss, other)
        return table, [str(w.message) for w in caught], text

    table, told, text = run({"0": "ps", "**": "auto"})
    assert {shard.data.shape for shard in table.addressable_shards} == {(ROWS // 4, WIDTH)}
    assert told == [] and f"f32[{ROWS},{WIDTH}]" not in text
    _, told, _ = run("ps")
    assert (step is _frozen) == any("leaves 0," in text and "{'0': 'ps', '**': 'auto'}" in text for text in told)


@pytest.mark.parametrize("sync", [None, autopar.sync.Average(every=1)])
@pytest.mark.parametrize("examples", [66, 64])
def test_devices_that_do_not_divide_a_batch_do_their_share(examples: int, sync: Any) -> None:
    assert _told(None, examples, mesh=mesh_of(4), strategy="allreduce", sync=sync) == []


def test_values_of_all_examples_that_every_device_needs() -> None:
    def step(w: jax.Array, x: jax.Array) -> Any:
        value, slope = jax.value_and_grad(lambda w: jnp.sort(x @ w, axis=0)[:3].sum())(w)
        return w - 0.1 * slope, value

    planned = autopar.parallelize(step, mesh=mesh_of(4))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", autopar.SlowPlanWarning)
        planned(jnp.ones((4, 2)), np.random.default_rng(0).normal(size=(1 << 21, 4)).astype(np.float32))
    told = [str(w.message) for w in caught]
    assert any("16.0 MiB of all examples for sort (" in text and "test_slow_plans.py:" in text for text in told), told
