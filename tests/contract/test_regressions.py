"""Steps on which autopar was wrong, crashed, or took what it should not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import autopar
from tests.support.explained import explained

ROWS, WIDTH = 12, 3
IDS = jnp.array([1, 2, 3])
Step = Callable[..., Any]


def table(width: int = WIDTH, rows: int = ROWS, dtype: Any = np.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=(rows, width)), dtype)


def grad(t: jax.Array, ids: jax.Array) -> jax.Array:
    return jax.grad(lambda t: jnp.sum(t[ids].astype(jnp.float32) ** 2))(t)


def agree(step: Step, *args: Any) -> None:
    planned = autopar.parallelize(step, strategy="ps", donate=False)
    mine, theirs = planned(*args), jax.jit(step)(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), mine, theirs)
    assert planned.plan is not None and planned.plan.lifts


def test_barrier_over_the_gradients_of_two_tables() -> None:
    def step(s: Any, ids: jax.Array) -> Any:
        g = jax.grad(lambda p: jnp.sum(p["a"][ids] ** 2) + jnp.sum(p["b"][ids] ** 2))(s)
        return jax.tree.map(lambda p, g: p - 0.1 * g, s, jax.lax.optimization_barrier(g)), 0.0

    agree(step, {"a": table(), "b": table(2)}, IDS)


def test_barrier_keeps_its_operands_apart() -> None:
    constant = table()

    def step(t: jax.Array, ids: jax.Array) -> Any:
        a, b = jax.lax.optimization_barrier((constant * ids.sum(), jnp.full((ROWS, WIDTH), 0.1)))
        return t - b * grad(t, ids), a.sum()

    agree(step, table(), IDS)


def test_norm_of_the_updated_table_in_an_earlier_slot() -> None:
    def step(s: Any, ids: jax.Array) -> Any:
        g = grad(s["table"], ids)
        new = s["table"] - 0.1 * g
        return {"acc": s["acc"] + g * g / jnp.linalg.norm(new), "table": new}, 0.0

    agree(step, {"acc": jnp.zeros((ROWS, WIDTH)), "table": table()}, IDS)  # acc stays dense


def test_reductions_of_predicates() -> None:
    def step(t: jax.Array, ids: jax.Array) -> Any:
        g = grad(t, ids)
        return t - 0.1 * g, (jnp.max(g != 0), jnp.min(g == 0), jnp.any(g != 0), jnp.all(g == 0), jnp.prod(g + 1))

    agree(step, table(), IDS)


def test_float8_rounding_of_a_table() -> None:
    def step(t: jax.Array, ids: jax.Array) -> Any:
        rounded = jax.grad(lambda t: jnp.sum(t.astype(jnp.float8_e4m3fn).astype(jnp.float32)[ids] ** 2))(t)
        return t - 0.1 * rounded, 0.0

    agree(step, table(), IDS)


def test_a_key_that_is_closed_over() -> None:
    key = jax.random.key(0)

    def step(t: jax.Array, other: jax.Array, ids: jax.Array) -> Any:
        return t - 0.1 * grad(t, ids), jax.random.normal(jnp.where(ids[0] > 3, other, key))

    agree(step, table(), jax.random.key(1), IDS)


def test_integers_that_numpy_would_wrap() -> None:
    def step(t: jax.Array, ids: jax.Array) -> Any:
        mask = jnp.where(jnp.full((ROWS * WIDTH,), 300.0).astype(jnp.int8).reshape(ROWS, WIDTH) > 100, 1.0, 0.0)
        return t - 0.1 * jax.grad(lambda t: jnp.sum((t * mask)[ids] ** 2))(t), 0.0

    agree(step, table(), IDS)


def test_a_zero_that_a_nan_went_through() -> None:
    def step(t: jax.Array, ids: jax.Array, k: jax.Array) -> Any:
        return t - 0.1 * grad(t, ids) + (jnp.zeros(ROWS * WIDTH) * k).reshape(ROWS, WIDTH), 0.0

    agree(step, table(), IDS, jnp.float32(np.nan))


def test_float16_with_more_rows_than_it_can_count() -> None:
    def step(s: Any, ids: jax.Array) -> Any:
        g = jax.grad(lambda s: jnp.sum(((s["t"] + s["b"])[ids] ** 2).astype(jnp.float32)))(s)
        return jax.tree.map(lambda p, g: p - jnp.float16(0.1) * g, s, g), 0.0

    agree(step, {"t": jnp.ones((70_000, 2), jnp.float16), "b": jnp.ones((2,), jnp.float16)}, IDS)


@pytest.mark.parametrize("form", ["vector", "mask"])
def test_poison_that_the_last_row_does_not_show(form: str) -> None:
    weights = np.abs(np.random.default_rng(1).normal(size=(ROWS, 1))).astype(np.float32)
    mask = (np.arange(ROWS) < ROWS - 1)[:, None]

    def step(t: jax.Array, ids: jax.Array, scale: jax.Array) -> Any:
        if form == "vector":
            return t - 0.1 * grad(t, ids) * (weights * scale), 0.0
        return jnp.where(mask, t - 0.1 * scale * grad(t, ids), t), 0.0

    agree(step, table(), IDS, jnp.float32(np.nan))


def test_a_table_that_lifts_beside_one_that_is_deferred() -> None:
    def step(s: Any, ids: jax.Array) -> Any:
        g = jax.grad(lambda s: jnp.sum((s["a"] + s["b"])[ids] ** 2))(s)
        return {"a": s["a"] - 0.1 * g["a"], "b": 0.9 * s["b"] - 0.1 * g["b"]}, 0.0

    state = {"a": table(), "b": table() + 1}
    agree(step, state, IDS)
    told = autopar.explain(autopar.parallelize(step, strategy={"a": "allgather"}), state, IDS)
    assert [(r.path, r.action) for r in told.rows] == [(k, "sparse, others deferred") for k in "ab"]
    assert all("until they are read" in r.reason for r in told.rows)  # they are one family


def train(s: Any, batch: Any, train: bool = True) -> Any:
    if not train:
        return jnp.sum(s["t"][batch["ids"]]) * s["temperature"]
    loss, g = jax.value_and_grad(lambda t: jnp.sum(t[batch["ids"]] ** 2))(s["t"])
    return {"t": s["t"] - 0.1 * g, "temperature": s["temperature"]}, loss


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("keyword", [True, False])
def test_evaluation_by_a_flag_donates_nothing(first: bool, keyword: bool) -> None:
    step = autopar.parallelize(train, static_argnums=-1)
    state, batch = {"t": table(), "temperature": jnp.float32(2)}, {"ids": IDS}
    with pytest.warns(autopar.RecompileWarning):
        for training in (first, not first, first, not first):
            out = step(state, batch, train=training) if keyword else step(state, batch, training)
            if training:
                assert state["t"].is_deleted()
                state = out[0]
            assert not state["t"].is_deleted() and not state["temperature"].is_deleted()


def test_a_batch_that_is_handed_back_is_no_state() -> None:
    def step(s: Any, b: Any) -> Any:
        return {"t": s["t"] - 0.1 * grad(s["t"], b["ids"])}, {"batch": {**b, "w": b["w"] / b["w"].sum()}}

    batch = {"ids": IDS, "w": jnp.ones(4)}
    autopar.parallelize(step)({"t": table()}, batch)
    assert not batch["ids"].is_deleted() and not batch["w"].is_deleted()


def test_gradients_with_weight_decay_are_no_state() -> None:
    def gradients(params: Any, ids: jax.Array) -> Any:
        return jax.tree.map(lambda g, p: g + 0.1 * p, {"t": grad(params["t"], ids)}, params), ids.sum()

    params = {"t": table()}
    autopar.parallelize(gradients, state_argnums=None)(params, IDS)
    assert not params["t"].is_deleted()


def test_one_key_in_two_leaves() -> None:
    key = jax.random.key(0)

    def step(s: Any, ids: jax.Array) -> Any:
        return {"t": s["t"] - 0.1 * grad(s["t"], ids), "k": jax.random.split(s["k"])[0], "l": s["l"]}, 0.0

    new, _ = autopar.parallelize(step)({"t": table(), "k": key, "l": key}, IDS)
    assert new["t"].shape == (ROWS, WIDTH)


def test_a_method_as_a_step() -> None:
    class Trainer:
        rate = 0.1

        @autopar.parallelize(static_argnums=0, strategy="ps")
        def step(self, t: jax.Array, ids: jax.Array) -> Any:
            return t - self.rate * grad(t, ids), ids.sum()

    new, _ = Trainer().step(table(), IDS)
    np.testing.assert_allclose(new, table() - 0.1 * grad(table(), IDS), rtol=1e-5)


def test_a_callback_inside_a_loop_that_makes_ids_runs_once() -> None:
    calls = []

    def sample(i: Any) -> Any:
        calls.append(1)
        return (np.asarray(i) + len(calls)) % ROWS

    def step(t: jax.Array, ids: jax.Array) -> Any:
        def loss(t: jax.Array) -> jax.Array:
            def body(c: jax.Array, i: jax.Array) -> Any:
                n = io_callback(sample, jax.ShapeDtypeStruct(i.shape, i.dtype), i, ordered=True)
                return c + jnp.sum(t[i] * t[n]), None

            return jax.lax.scan(body, jnp.float32(0), ids)[0]

        value, g = jax.value_and_grad(loss)(t)
        return t - 0.1 * g, value

    planned = autopar.parallelize(step, strategy="ps", donate=False)
    planned(table(), IDS)
    jax.effects_barrier()
    assert len(calls) == len(IDS)
    assert "a callback inside a loop" in explained(planned)


def test_rows_written_back_have_the_type_of_plain_jax() -> None:
    weak = jnp.full((ROWS, WIDTH), 0.5)
    new, _ = autopar.parallelize(lambda t, i: (t - grad(t, i), i.sum()), strategy="ps", donate=False)(weak, IDS)
    assert (new * jnp.bfloat16(2)).dtype == jnp.float32


def test_several_hashes_of_one_table() -> None:
    """The axis of the hashes is indexed by a constant, the rows by data."""

    def step(t: jax.Array, ids: jax.Array) -> Any:
        hashes = jnp.stack([ids % 11, (ids * 7 + 1) % 11, (ids * 5 + 3) % 11])
        g = jax.grad(lambda t: jnp.sum(t[jnp.arange(3)[:, None], hashes] ** 2))(t)
        return t - 0.1 * g, ids.sum()

    planned = autopar.parallelize(step, strategy="ps", donate=False)
    t = jnp.asarray(np.random.default_rng(0).normal(size=(3, 11, 2)), jnp.float32)
    np.testing.assert_allclose(planned(t, IDS)[0], step(t, IDS)[0], rtol=1e-5, atol=1e-6)
    assert planned.plan is not None and planned.latest.compiled.bound.families[0].bounds.rows == 10


def test_metrics_that_look_up_by_their_own_rows() -> None:
    def step(t: jax.Array, ids: jax.Array) -> Any:
        g = grad(t, ids)
        norms, sizes = jnp.linalg.norm(g, axis=1), jnp.abs(t).sum(1)
        return t - 0.1 * g, (norms[jnp.argmax(norms)], sizes[jnp.argmin(sizes)])

    agree(step, table(), IDS)


def test_a_target_copied_by_a_cond() -> None:
    def step(s: Any, ids: jax.Array) -> Any:
        new = s["t"] - 0.1 * grad(s["t"], ids)
        target = jax.lax.cond(s["k"] % 2 == 0, lambda: new, lambda: s["target"])
        return {"t": new, "target": target, "k": s["k"] + 1}, target[ids].sum()

    agree(step, {"t": table(), "target": table() + 1, "k": jnp.int32(0)}, IDS)


def test_a_table_that_goes_through_a_cond_in_a_loop() -> None:
    def step(t: jax.Array, ids: jax.Array) -> Any:
        def loss(t: jax.Array) -> jax.Array:
            def body(c: jax.Array, i: jax.Array) -> Any:
                rows = jax.lax.cond(ids.sum() > 3, lambda: t[i] * 2, lambda: t[i + 1])
                return c + jnp.sum(rows**2), None

            return jax.lax.scan(body, jnp.float32(0), ids)[0]

        value, g = jax.value_and_grad(loss)(t)
        return t - 0.1 * g, value

    agree(step, table(), IDS)


def test_a_reshape_that_transposes() -> None:
    """`lax.reshape` with `dimensions` (and `order="F"`): rows become columns, though the shape says nothing of it."""

    def step(t: jax.Array, ids: jax.Array) -> Any:
        return t - 0.1 * jax.lax.reshape(grad(t, ids), t.shape, (1, 0)), t[ids].sum()

    planned = autopar.parallelize(step, strategy="ps", donate=False)
    square = table(ROWS, ROWS)
    np.testing.assert_allclose(planned(square, IDS)[0], step(square, IDS)[0], rtol=1e-5, atol=1e-6)


def test_a_sum_over_all_gradients_of_rows_that_a_checkpoint_reads_again() -> None:
    """In a loop that carries the table: what other rows are follows from zeros, and not from the table."""

    def step(state: Any, ids: jax.Array) -> Any:
        def turn(_: Any, state: Any) -> Any:
            t, kept = state

            def loss(t: jax.Array) -> jax.Array:
                rounded = t.astype(jnp.bfloat16).astype(jnp.float32)

                @jax.checkpoint
                def body(c: jax.Array, i: jax.Array) -> Any:
                    return c + rounded[i].sum(), rounded[i] * jnp.tanh(c)

                return jnp.mean(jax.lax.scan(body, jnp.float32(0), ids)[1] ** 2)

            g = jax.grad(loss)(t)
            return t - 0.1 * g, kept + g.sum(0)

        return jax.lax.fori_loop(0, 2, turn, state), ids.sum()

    agree(step, (table(), jnp.zeros(WIDTH)), IDS)
