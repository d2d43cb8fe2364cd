"""Products with one-hot matrices that are lookups: the same function as `jax.jit`'s, or left as they are."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar

ROWS, WIDTH = 300, 3
IDS = np.array([5, 7, 7, 9, 200, 299, 0, 5], np.int32)

#: (example, column, value) of the gradient of the looked-up rows; or another id of an example.
SPOILT = {
    "nothing": [],
    "one": [(0, 1, np.inf)],
    "one row twice": [(0, 1, np.inf), (7, 1, np.inf)],
    "one row, opposite": [(0, 1, np.inf), (7, 1, -np.inf)],
    "two rows": [(0, 1, np.inf), (3, 1, np.inf), (2, 2, -np.inf)],
    "nan": [(2, 0, np.nan)],
    "an overflow": [(1, 1, 3e38), (2, 1, 3e38)],
    "an overflow beside one": [(0, 1, np.inf), (1, 1, 3e38), (2, 1, 3e38)],
    "an overflow beside no row": [(1, 1, 3e38), (2, 1, 3e38), (3, 1, np.inf), (3, None, -1)],
    "no row": [(3, 2, np.inf), (3, None, ROWS + 5)],
    "a negative id": [(3, 2, np.inf), (3, None, -1)],
}


def _batch(name: str) -> dict[str, np.ndarray]:
    ids, scale = IDS.copy(), np.random.default_rng(1).normal(size=(len(IDS), WIDTH)).astype(np.float32)
    for example, column, value in SPOILT[name]:
        if column is None:
            ids[example] = value
        else:
            scale[example, column] = value
    return {"ids": ids, "scale": scale}


def _step(tx: Any) -> Any:
    def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        def loss_of(table: jax.Array) -> jax.Array:
            return jnp.sum(jax.nn.one_hot(batch["ids"], ROWS) @ table * batch["scale"])

        loss, grads = jax.value_and_grad(loss_of)(state["table"])
        updates, slots = tx.update(grads, state["slots"])
        return {"table": optax.apply_updates(state["table"], updates), "slots": slots}, loss

    return step


@pytest.mark.parametrize(
    ("tx", "method"),
    [(optax.sgd(0.1), "ps"), (optax.sgd(0.1), ("ps", "hosts")), (optax.adam(0.1), "ps")],
    ids=["sgd", "sgd on hosts", "adam"],
)
def test_gradients_that_are_not_finite_spread_as_in_a_product(tx: Any, method: Any) -> None:
    """0 * inf is NaN in all rows but the one that has the infinity."""
    step = _step(tx)
    planned, plain = autopar.parallelize(step, strategy={"table": method}, donate=False), jax.jit(step)
    table = jnp.asarray(np.random.default_rng(0).normal(size=(ROWS, WIDTH)), jnp.float32)
    for name in SPOILT:
        mine = theirs = {"table": table, "slots": tx.init(table)}
        for batch in (_batch(name), _batch("nothing")):
            (mine, _), (theirs, _) = planned(mine, batch), plain(theirs, batch)
        close = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)  # noqa: E731
        jax.tree.map(close, autopar.materialize(mine), theirs)
    assert planned.plan is not None and planned.plan.parameters[0].lifted


def _compared(ids: Any, rows: int) -> Any:
    """A one-hot matrix whose classes are counted in the ids' own type."""
    return (ids[:, None] == jax.lax.broadcasted_iota(ids.dtype, (1, rows), 1)).astype(jnp.float32)


#: Ids, the number of rows, whether the product is a lookup.
KINDS = {
    "uint8 that wraps": (np.array([1, 44, 255, 0], np.uint8), 300, False),
    "int8 that wraps": (np.array([1, -100, 127, -1], np.int8), 300, False),
    "uint8": (np.array([1, 44, 255, 0], np.uint8), 256, True),
    "int8": (np.array([1, -100, 127, -1], np.int8), 128, True),
    "uint32": (np.array([1, 2**32 - 1, 2**31, 7], np.uint32), 300, True),
    "uint64": (np.array([1, 2**32 + 7, 2**64 - 1, 7], np.uint64), 300, True),
    "int64": (np.array([1, 2**32 + 7, -(2**32) + 7, 7], np.int64), 300, True),
}


@pytest.mark.parametrize("name", KINDS)
def test_ids_of_all_types(name: str) -> None:
    ids, rows, is_lookup = KINDS[name]

    def step(table: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, grads = jax.value_and_grad(lambda t: jnp.sum((_compared(ids, rows) @ t) ** 2))(table)
        return table - 0.1 * grads, loss

    with jax.enable_x64(ids.dtype.itemsize == 8):
        table = jnp.asarray(np.random.default_rng(0).normal(size=(rows, WIDTH)), jnp.float32)
        planned = autopar.parallelize(step, strategy="ps", donate=False)
        (mine, loss), (theirs, want) = planned(table, ids), jax.jit(step)(table, ids)
        np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=2e-6)
        np.testing.assert_allclose(loss, want, rtol=2e-5)
        assert planned.plan is not None and planned.plan.lifts == is_lookup


def test_sums_of_integers_are_exact() -> None:
    """Beyond 2^24, where floats of 32 bits round."""

    def step(state: Any, batch: Any) -> Any:
        hot = (batch["ids"][:, None] == jnp.arange(ROWS)).astype(jnp.int32)
        grad = jax.grad(lambda table: jnp.sum(jnp.sin(hot.astype(jnp.float32) @ table)))(state["table"])
        counts = state["counts"] + jnp.einsum("bv,bd->vd", hot, batch["counts"])
        return {"table": state["table"] - 0.1 * grad, "counts": counts}

    state = {"table": jnp.ones((ROWS, WIDTH)), "counts": jnp.zeros((ROWS, 2), jnp.int32)}
    counts = np.random.default_rng(0).integers(2**24, 2**26, (len(IDS), 2)).astype(np.int32)
    planned = autopar.parallelize(step, strategy="ps", donate=False)
    made, wanted = (fun(state, {"ids": IDS, "counts": counts}) for fun in (planned, jax.jit(step)))
    np.testing.assert_array_equal(made["counts"], wanted["counts"])
    np.testing.assert_allclose(autopar.materialize(made["table"]), wanted["table"], rtol=1e-6)
    assert planned.plan.lifts


def test_a_choice_between_complex_numbers_is_none() -> None:
    def step(table: Any, ids: Any) -> Any:
        return table - jax.grad(lambda t: jnp.sum((jnp.where(ids[:, None] == jnp.arange(ROWS), 1j, 0.0) @ t).imag))(
            table
        )

    table = jnp.ones((ROWS, WIDTH))
    np.testing.assert_allclose(autopar.parallelize(step, donate=False)(table, IDS), jax.jit(step)(table, IDS))
