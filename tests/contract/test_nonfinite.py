"""Where 0 * x = 0 doesn't hold: a scalar of the step that isn't finite poisons every row in plain JAX, and here."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from tests.support.host_reads import check_rows_that_differ
from tests.support.pairs import diagonal

ROWS, WIDTH = 1300, 4  # more than two blocks of a sweep


def make_step(tx: optax.GradientTransformation, last: float = 1.0) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    params = {"emb": jnp.asarray(rng.normal(size=(ROWS, WIDTH)), jnp.float32), "w": jnp.eye(WIDTH)}
    params["emb"] = params["emb"].at[-1].mul(last)
    state = {"params": params, "opt": tx.init(params)}

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        def loss_fn(p: Any) -> jax.Array:
            return batch["scale"] * jnp.mean(jnp.tanh(p["emb"][batch["ids"]] @ p["w"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        metrics = {"loss": loss, "norm": optax.tree.norm(updates), "count": jnp.sum(updates["emb"] != 0)}
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, metrics

    return step, state


def batch_of(scale: float, last: int) -> dict[str, jax.Array]:
    return {"ids": jnp.array([[1, 2, last], [3, 999, 4]], jnp.int32), "scale": jnp.float32(scale)}


TRANSFORMATIONS = {
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adagrad(0.1)),
    "sgd": lambda: optax.sgd(0.1),
    "injected": lambda: optax.inject_hyperparams(optax.adagrad)(learning_rate=0.1),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adagrad(0.1), 1),
    "zero_nans": lambda: optax.chain(optax.zero_nans(), optax.adagrad(0.1)),
}


@pytest.mark.parametrize(("name", "scale"), diagonal(list(TRANSFORMATIONS), [0.0, 1e30, np.inf, -np.inf, np.nan]))
def test_same_rows_are_poisoned(name: str, scale: float) -> None:
    step, state = make_step(TRANSFORMATIONS[name]())
    planned = autopar.parallelize(step, strategy="ps", donate=False)
    plain = jax.jit(step)
    mine = theirs = state
    # The last row stands for the untouched ones: once it is touched itself, once it isn't.
    for batch in (batch_of(1.0, 7), batch_of(scale, ROWS - 1), batch_of(scale, 7), batch_of(1.0, 9)):
        mine, my_metrics = planned(mine, batch)
        theirs, metrics = plain(theirs, batch)
        for a, b in zip(jax.tree.leaves((mine, my_metrics)), jax.tree.leaves((theirs, metrics)), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
    assert planned.plan is not None
    assert planned.plan.parameters[0].lifted


def test_clip_poisons_all_rows() -> None:
    step, state = make_step(TRANSFORMATIONS["clipped"]())
    new, _ = autopar.parallelize(step, strategy="ps")(state, batch_of(np.nan, 7))
    assert bool(jnp.all(jnp.isnan(new["params"]["emb"])))


@pytest.mark.parametrize("last", [np.inf, np.nan])
def test_a_last_row_that_is_not_finite_hides_nothing(last: float) -> None:
    step, state = make_step(TRANSFORMATIONS["clipped"](), last)
    planned, plain = autopar.parallelize(step, strategy="ps", donate=False), jax.jit(step)
    for scale in (1.0, np.nan):
        mine, _ = planned(state, batch_of(scale, 7))
        theirs, _ = plain(state, batch_of(scale, 7))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), mine, theirs)


def test_poison_inside_a_scan_of_steps() -> None:
    step, state = make_step(TRANSFORMATIONS["clipped"]())

    def many(state: Any, batch: Any) -> tuple[Any, Any]:
        return jax.lax.scan(lambda s, scale: step(s, {"ids": batch["ids"], "scale": scale}), state, batch["scales"])

    for scales in ([1.0, 1.0, 1.0], [1.0, np.inf, 1.0]):
        batch = {"ids": batch_of(1.0, 7)["ids"], "scales": jnp.array(scales, jnp.float32)}
        planned = autopar.parallelize(many, strategy="ps", donate=False)
        mine, _ = planned(state, batch)
        theirs, _ = jax.jit(many)(state, batch)
        assert planned.plan is not None and planned.plan.parameters[0].lifted
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), mine, theirs)
    assert bool(jnp.all(jnp.isnan(theirs["params"]["emb"])))


def rows_step(update: Any) -> Any:
    """A step on `emb` and whatever slots there are, with `update(state, gradient of emb, batch)` for the new state."""

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        loss, g = jax.value_and_grad(lambda e: jnp.mean((e[batch["ids"]] * batch["weight"]) ** 2))(state["emb"])
        new, metrics = update(state, g, batch)
        return {**state, **new}, {"loss": loss, **metrics}

    return step


def check_rows(update: Any, state: Any, weights: tuple[float, ...] = (1.0, 1.0)) -> None:
    """Against plain JAX over some steps; the table must lift."""
    planned, plain = autopar.parallelize(rows_step(update), strategy="ps", donate=False), jax.jit(rows_step(update))
    mine = theirs = state
    for k, weight in enumerate(weights):
        batch = {"ids": jnp.array([[k, SMALL - 1], [3, 3]], jnp.int32), "weight": jnp.float32(weight)}
        (mine, a), (theirs, b) = planned(mine, batch), plain(theirs, batch)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6), (mine, a), (theirs, b))
    assert planned.plan is not None and planned.plan.lifts


SMALL = 40
NUMBERS = jnp.arange(SMALL)
RATES = {
    "log": lambda: jnp.log((SMALL - NUMBERS).astype(jnp.float32)),
    "rsqrt": lambda: jax.lax.rsqrt((SMALL - NUMBERS).astype(jnp.float32)),
    "inverse": lambda: 1 / (SMALL - NUMBERS),
    "root": lambda: jnp.sqrt((SMALL - 1 - NUMBERS).astype(jnp.float32)),
}


def small(**slots: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {"emb": jnp.asarray(rng.normal(size=(SMALL, WIDTH)), jnp.float32), **slots}


@pytest.mark.parametrize("name", RATES)
def test_functions_of_the_row_number_are_taken_at_real_rows(name: str) -> None:
    """There is no row SMALL, where these aren't finite."""

    def update(state: Any, g: jax.Array, batch: Any) -> Any:
        g = g * RATES[name]()[:, None]
        norm = jnp.sqrt(jnp.sum(g**2))
        return {"emb": state["emb"] - g * jnp.minimum(1.0, 0.1 / norm)}, {"norm": norm, "max": jnp.max(g)}

    check_rows(update, small())


@pytest.mark.parametrize("divides", [False, True])
def test_an_untouched_row_whose_number_is_a_pole(divides: bool) -> None:
    """0 / 0 and 0 * inf in a single row, which isn't the padding row."""
    numbers = (NUMBERS - SMALL // 2).astype(jnp.float32)[:, None]

    def update(state: Any, g: jax.Array, batch: Any) -> Any:
        g = g / numbers if divides else g * (1 / numbers)
        return {"emb": state["emb"] - g}, {"g": g, "sum": jnp.sum(g, 0)}

    check_rows(update, small())


def test_a_special_row_that_is_touched_is_not_taken_for_the_others() -> None:
    """A new last row of an Adagrad without epsilon: 0 / 0 if it were not touched."""

    def update(state: Any, g: jax.Array, batch: Any) -> Any:
        acc = state["acc"] + g * g
        change = g / jnp.sqrt(acc)
        norm = jnp.sqrt(jnp.sum(change**2))
        return {"emb": state["emb"] - change * jnp.minimum(1.0, 1.0 / norm), "acc": acc}, {"norm": norm}

    check_rows(update, small(acc=jnp.full((SMALL, WIDTH), 0.1).at[SMALL - 1].set(0.0)))


HIDING = {
    "by_its_count": lambda state: state["count"] > 0,
    "by_a_mask": lambda state: state["count"] != 0,
    "by_its_number": lambda state: NUMBERS % 2 == 1,
}


@pytest.mark.parametrize("name", HIDING)
def test_a_zero_divisor_that_the_padding_row_hides(name: str) -> None:
    """The norm of an all-masked batch: 0 / 0 on the rows that aren't hidden."""

    def update(state: Any, g: jax.Array, batch: Any) -> Any:
        norm = jnp.sqrt(jnp.sum(g**2))
        g = jnp.where(HIDING[name](state)[:, None], g / norm, 0.0)
        return {"emb": state["emb"] - g}, {}

    count = (NUMBERS % 3).astype(jnp.int32)
    check_rows(update, small(count=count), (1.0, 0.0, 1.0))


def of_rows_that_differ(state: Any, g: jax.Array, batch: Any) -> Any:
    """What hides a gradient is known to each row alone, so the padding row stands for some of them only."""
    hidden = (NUMBERS % 2 == 0)[:, None] | (state["emb"] < -0.5)
    g = jnp.where(hidden, g, g * batch["factor"])
    norm = jnp.sqrt(jnp.sum(g * g))
    metrics = {"norm": norm, "max": jnp.max(g), "nans": jnp.sum(jnp.isnan(g)), "columns": jnp.sum(g, 0), "g": g}
    last = jnp.where(state["last"] > 0, g, 2 * g)
    return {"emb": state["emb"] - g * jnp.minimum(1.0, 0.1 / norm), "last": last}, metrics


@pytest.mark.parametrize("factor", [np.inf, np.nan])
def test_rows_that_differ_on_hosts(factor: float) -> None:
    """Each rank reduces its rows, more than one block of them, and those that the step touches as they are."""
    check_rows_that_differ(factor)


@pytest.mark.parametrize("factor", [np.inf, np.nan])
def test_rows_that_differ(factor: float) -> None:
    """Slots that are constant off the rows, reductions over all rows, and outputs that hold all of them."""
    step, state = rows_step(of_rows_that_differ), small(last=jnp.zeros((SMALL, WIDTH)))
    planned, plain = autopar.parallelize(step, strategy="ps", donate=False), jax.jit(step)
    mine = theirs = state
    for value in (1.0, factor):
        batch = {"ids": jnp.array([[1, SMALL - 1], [3, 3]], jnp.int32), "weight": 1.0, "factor": jnp.float32(value)}
        (mine, a), (theirs, b) = planned(mine, batch), plain(theirs, batch)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6), (mine, a), (theirs, b))
    assert planned.plan is not None and planned.plan.lifts
    assert 0 < np.isnan(b["g"]).sum() < b["g"].size


@pytest.mark.parametrize("factor", [1.0, np.inf, np.nan])
def test_touched_rows_of_an_output_with_all_rows(factor: float) -> None:
    """One column isn't finite: in the others the touched rows have their own values, and all others the constant."""

    def step(state: Any, batch: Any) -> Any:
        by_column = jnp.where(jnp.arange(WIDTH) == 1, batch["factor"], 1.0)

        def add(total: jax.Array, ids: jax.Array) -> tuple[jax.Array, None]:
            return total + jax.grad(lambda t: jnp.sum(t[ids] ** 2))(state["emb"]) * by_column, None

        g, _ = jax.lax.scan(add, jnp.zeros_like(state["emb"]), batch["ids"])
        return {"emb": state["emb"] - 0.1 * g}, {"g": g}

    planned = autopar.parallelize(step, strategy="ps", donate=False)
    batch = {"ids": jnp.array([[1, SMALL - 1], [3, 3]], jnp.int32), "factor": jnp.float32(factor)}
    found, wanted = planned(small(), batch), jax.jit(step)(small(), batch)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6), found, wanted)
    assert planned.plan is not None and planned.plan.lifts
    assert np.count_nonzero(np.asarray(wanted[1]["g"])[[1, 3, SMALL - 1], 0]) == 3


def test_no_table_is_copied_for_the_watch() -> None:
    """Neither for the sweep, nor for a slot that is filled, nor for reductions that read the old rows."""

    def update(state: Any, g: jax.Array, batch: Any) -> Any:
        new, metrics = of_rows_that_differ(state, g, batch)
        return new, {k: metrics[k] for k in ("norm", "max", "nans", "columns")}

    step = autopar.parallelize(rows_step(update), strategy="ps")
    batch = {"ids": jnp.array([[1, SMALL - 1], [3, 3]], jnp.int32), "weight": 1.0, "factor": jnp.float32(1)}
    text = step.lower(small(last=jnp.zeros((SMALL, WIDTH))), batch).compile().as_text()
    assert text.count("while(") >= 5
    assert not [line for line in text.splitlines() if f"= f32[{SMALL},{WIDTH}]" in line and " copy(" in line]


ONE_HOT = {
    "product": lambda t, ids: jax.nn.one_hot(ids, SMALL) @ t,
    "einsum": lambda t, ids: jnp.einsum("...v,vd->...d", jax.nn.one_hot(ids, SMALL), t),
    "in a checkpoint": lambda t, ids: jax.checkpoint(lambda t: jax.nn.one_hot(ids, SMALL) @ t)(t),
}


@pytest.mark.parametrize("name", ONE_HOT)
def test_one_hot_products_poison_columns(name: str) -> None:
    """0 times a gradient that isn't finite is added to every row, as the product of the matrices does it."""

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        def loss(t: jax.Array) -> jax.Array:
            return jnp.sum(jnp.tanh(ONE_HOT[name](t, batch["ids"]) + t[batch["ids"]]) * batch["weights"])

        g = jax.grad(loss)(state["emb"])
        return {"emb": state["emb"] - 0.1 * g, "last": jnp.where(state["last"] > 0, 2 * g, g)}, jnp.max(g)

    planned, plain = autopar.parallelize(step, strategy="ps", donate=False), jax.jit(step)
    mine = theirs = small(last=jnp.zeros((SMALL, WIDTH)))
    for bad in (1.0, np.inf):
        weights = jnp.ones((2, 2, WIDTH)).at[0, :, 1].set(bad)
        batch = {"ids": jnp.array([[1, SMALL - 1], [3, 3]], jnp.int32), "weights": weights}
        (mine, a), (theirs, b) = planned(mine, batch), plain(theirs, batch)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6), (mine, a), (theirs, b))
    assert planned.plan is not None and planned.plan.lifts
    assert np.isnan(theirs["emb"]).sum(0).tolist() == [0, SMALL, 0, 0]


def test_a_row_that_is_not_finite_by_itself_is_left_alone() -> None:
    """The exception of docs/accuracy.md: plain JAX multiplies it by 0, and so its gradient is NaN."""

    def step(state: Any, ids: jax.Array) -> tuple[Any, Any]:
        params, opt = state
        grads = jax.grad(lambda t: jnp.sum(jax.nn.softmax(t, axis=1)[ids] ** 2))(params)
        updates, opt = tx.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), jnp.sum(jnp.isnan(grads))

    tx = optax.apply_if_finite(optax.sgd(0.1), 5)
    params = small()["emb"].at[20].set(np.nan)
    ids = jnp.array([1, 2, 3])
    (mine, my_opt), nans = autopar.parallelize(step, strategy="ps", donate=False)((params, tx.init(params)), ids)
    (theirs, opt), their_nans = jax.jit(step)((params, tx.init(params)), ids)
    assert (int(nans), int(their_nans)) == (0, WIDTH)
    assert (int(my_opt.total_notfinite), int(opt.total_notfinite)) == (0, 1)
    assert np.array_equal(theirs, params, equal_nan=True) and not np.array_equal(mine[:4], params[:4])
    assert np.isnan(mine[20]).all() and np.isfinite(np.delete(mine, 20, 0)).all()
