"""Batches that the devices don't divide: XLA pads and masks what each has, and nobody computes the whole of it."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from tests.support.explained import explained
from tests.support.meshes import mesh_of

ROWS, WIDTH, BAG, CLASSES, HIDDEN = 101, 4, 3, 7, 32
TX = optax.multi_transform(
    {"adagrad": optax.adagrad(0.1), "adamw": optax.adamw(0.01)}, {"items": "adagrad", "users": "adamw", "net": "adamw"}
)
METHODS = ("ps", "allgather", "allreduce_rows", "allreduce")


@pytest.fixture(autouse=True)
def _float64() -> Any:
    with jax.enable_x64(True), warnings.catch_warnings():
        warnings.simplefilter("error", autopar.SlowPlanWarning)
        yield


def _dense(rng: Any, *shape: int) -> jax.Array:
    return jnp.asarray(0.3 * rng.normal(size=shape))


def _make_state() -> Any:
    rng = np.random.default_rng(0)
    net = {"up": _dense(rng, WIDTH, HIDDEN), "down": _dense(rng, HIDDEN, CLASSES)}
    params = {"items": _dense(rng, ROWS, WIDTH), "users": _dense(rng, ROWS, WIDTH), "net": net}
    return {"params": params, "opt": TX.init(params), "mean": jnp.zeros(HIDDEN), "key": jax.random.key(1)}


def _batch(examples: int) -> Any:
    """Some ids are out of range: of no row."""
    rng = np.random.default_rng(examples)
    bags, users = rng.integers(-2, ROWS + 2, (examples, BAG)), rng.integers(0, ROWS, examples)
    return {"items": bags.astype(np.int32), "users": users, "labels": rng.integers(0, CLASSES, examples)}


def _step(state: Any, batch: Any) -> Any:
    """Bags, batch norm, dropout, and results by example."""
    key, use = jax.random.split(state["key"])

    def loss_of(p: Any) -> Any:
        x = p["items"].at[batch["items"]].get(mode="fill", fill_value=0).sum(1) * p["users"][batch["users"]]
        h = x @ p["net"]["up"]
        mean = h.mean(0)
        h = jax.nn.relu((h - mean) / jnp.sqrt(h.var(0) + 1e-2))
        logits = h * jax.random.bernoulli(use, 0.8, h.shape) @ p["net"]["down"]
        each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
        return each.mean(), (each, logits, mean)

    (loss, (each, logits, mean)), grads = jax.value_and_grad(loss_of, has_aux=True)(state["params"])
    updates, opt = TX.update(grads, state["opt"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    kept = {"params": params, "opt": opt, "mean": 0.9 * state["mean"] + 0.1 * mean, "key": key}
    hits = logits.argmax(1) == batch["labels"]
    return kept, {"loss": loss, "each": each, "logits": logits, "hits": hits, "accuracy": hits.mean()}


def _same(mine: Any, theirs: Any) -> None:
    def check(a: Any, b: Any) -> None:
        if jax.dtypes.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-9, atol=1e-12)

    jax.tree.map(check, autopar.materialize(mine), theirs)


@pytest.mark.parametrize("examples", [254, 3, 1])
@pytest.mark.parametrize("method", METHODS)
def test_plain_numbers(method: str, examples: int) -> None:
    planned, plain = autopar.parallelize(_step, strategy=method, mesh=mesh_of(4)), jax.jit(_step)
    mine, theirs = _make_state(), _make_state()
    for _ in range(3):
        (mine, a), (theirs, b) = planned(mine, _batch(examples)), plain(theirs, _batch(examples))
        _same(a, b)
    _same(mine, theirs)
    assert planned.plan is not None
    assert {t.taken for t in planned.plan.tables} == {method}
    told = f"4 devices don't divide the batch ({examples}): each has {-(-examples // 4)} or fewer, padded and masked"
    assert (told in explained(planned)) == (examples > 1)
    assert ("All devices do the same" in explained(planned)) == (examples == 1)


@pytest.mark.parametrize("method", METHODS)
def test_each_device_does_its_share(method: str) -> None:
    """About that of a batch which they divide: masks take some operations more."""

    def flops(examples: int) -> float:
        planned = autopar.parallelize(_step, strategy=method, mesh=mesh_of(4), donate=False)
        runner: Any = planned.planned_for(_make_state(), _batch(examples)).runner
        return runner.lower().compile().cost_analysis()["flops"]

    assert flops(254) < 1.5 * flops(256)


def test_each_device_asks_for_its_own_rows() -> None:
    state, batch = _make_state(), _batch(6)
    planned = autopar.parallelize(_step, strategy="ps", mesh=mesh_of(4), donate=False)
    plan = autopar.plan(planned, state, batch)
    assert [table.sizes.requested for table in plan.tables] == [2 * BAG, 2]


def _sampled(state: Any, batch: Any) -> Any:
    """Negative samples that all examples share: more of them than examples."""

    def loss_of(p: Any) -> Any:
        users, items, others = p["users"][batch["users"]], p["items"][batch["items"]], p["items"][batch["negatives"]]
        each = jax.nn.softplus(-(users * items).sum(1)) + jax.nn.softplus(users @ others.T).sum(1)
        return (each * batch["weights"]).mean(), each

    (loss, each), grads = jax.value_and_grad(loss_of, has_aux=True)(state["params"])
    updates, opt = TX.update(grads, state["opt"], state["params"])
    return {**state, "params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss, "each": each}


def _samples(examples: int, negatives: int) -> Any:
    rng = np.random.default_rng(examples)
    sizes = {"users": examples, "items": examples, "negatives": negatives}
    return {k: rng.integers(0, ROWS, n) for k, n in sizes.items()} | {"weights": rng.random(examples)}


@pytest.mark.parametrize("method", METHODS)
def test_more_samples_than_examples(method: str) -> None:
    """Those divide, and the examples don't."""
    state, batch = _make_state(), _samples(66, 128)
    planned = autopar.parallelize(_sampled, strategy=method, mesh=mesh_of(4), donate=False)
    _same(planned(state, batch), jax.jit(_sampled)(state, batch))
    assert "4 devices don't divide the batch (66): each has 17 or fewer, padded and masked" in explained(planned)


def test_a_state_that_is_carried_with_the_examples() -> None:
    def step(state: Any, batch: Any) -> Any:
        def loss_of(w: jax.Array) -> Any:
            def turn(h: jax.Array, x: jax.Array) -> Any:
                h = jnp.tanh(h @ w + x)
                return h, (h**2).mean(1)

            h, told = jax.lax.scan(turn, state["h"], jnp.swapaxes(batch["x"], 0, 1))
            return told.mean(), (h, told)

        (loss, (h, told)), slope = jax.value_and_grad(loss_of, has_aux=True)(state["w"])
        return {"w": state["w"] - 0.1 * slope, "h": h}, (loss, told)

    rng = np.random.default_rng(2)
    state, batch = {"w": _dense(rng, WIDTH, WIDTH), "h": _dense(rng, 6, WIDTH)}, {"x": rng.normal(size=(6, 5, WIDTH))}
    planned = autopar.parallelize(step, mesh=mesh_of(4), donate=False)
    mine, theirs = (planned(state, batch), jax.jit(step)(state, batch))
    _same(mine, theirs)
    _same(planned(mine[0], batch), jax.jit(step)(theirs[0], batch))
    assert len(planned.planned_for(state, batch).compiled.bound.uneven) == 2


def test_products_are_divided_as_well() -> None:
    mesh = jax.make_mesh((3, 2), ("data", "tensor"), devices=jax.devices()[:6])
    state, batch = _make_state(), _batch(7)
    planned = autopar.parallelize(_step, mesh=mesh, donate=False, strategy={"params/net/**": "tensor"})
    _same(planned(state, batch), jax.jit(_step)(state, batch))
    bound = planned.planned_for(state, batch).compiled.bound
    assert bound.uneven and bound.tensors


def test_leaves_of_other_sizes_stay_whole() -> None:
    """What all examples share isn't spread because of a batch that devices don't divide."""

    def step(state: Any, batch: Any) -> Any:
        slope = jax.grad(lambda w: jnp.sum(batch["scale"] * ((batch["x"] @ w) ** 2).mean(0)))(state["w"])
        return {"w": state["w"] - 0.1 * slope}, slope

    rng = np.random.default_rng(3)
    state, batch = {"w": _dense(rng, WIDTH, 3)}, {"x": rng.normal(size=(10, WIDTH)), "scale": rng.normal(size=3)}
    planned = autopar.parallelize(step, mesh=mesh_of(4), donate=False)
    _same(planned(state, batch), jax.jit(step)(state, batch))
    entry = planned.planned_for(state, batch)
    assert [entry.compiled.analysed.inputs[k].path for k in entry.compiled.bound.uneven] == ["batch/x"]


@pytest.mark.parametrize("method", METHODS)
def test_padding_stays_apart(method: str) -> None:
    """What isn't finite where there is no example, as of an inverse, reaches nothing."""

    def step(state: Any, batch: Any) -> Any:
        def loss_of(p: Any) -> Any:
            rows = p["items"][batch["users"]] / batch["scale"][:, None]
            rows = rows / jnp.linalg.norm(rows, axis=1, keepdims=True)
            h = jnp.log(batch["scale"])[:, None] * rows @ p["w"]
            return h.var() + h.max() + (h.T @ rows).sum(), (h.sum(1), h.argmax(), jnp.sort(h, 0), jnp.cumsum(h, 0))

        (loss, told), grads = jax.value_and_grad(loss_of, has_aux=True)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), (loss, told)

    rng = np.random.default_rng(4)
    state = {"items": _dense(rng, ROWS, WIDTH), "w": _dense(rng, WIDTH, WIDTH)}
    batch = {"users": rng.integers(1, ROWS, 9), "scale": rng.uniform(1, 2, 9)}
    planned = autopar.parallelize(step, mesh=mesh_of(4), donate=False, strategy=method)
    _same(planned(state, batch), jax.jit(step)(state, batch))


def test_convolutions() -> None:
    """Of images whose sizes the devices don't divide either: each device has its examples' part of the kernel's sum."""

    def step(w: jax.Array, batch: Any) -> Any:
        def loss_of(w: jax.Array) -> Any:
            h = jax.lax.conv_general_dilated(batch["x"], w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            pooled = jax.lax.reduce_window(h, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
            return (pooled**2).mean(), pooled

        (loss, pooled), slope = jax.value_and_grad(loss_of, has_aux=True)(w)
        return w - 0.1 * slope, (loss, pooled)

    rng = np.random.default_rng(5)
    w, batch = _dense(rng, 3, 3, 2, 4), {"x": rng.normal(size=(6, 7, 7, 2))}
    planned = autopar.parallelize(step, mesh=mesh_of(4), donate=False, state_argnums=(0,))
    _same(planned(w, batch), jax.jit(step)(w, batch))
    assert "all of it" not in explained(planned, w, batch, verbose=True)


def test_check_counts_the_padding_of_what_is_gathered() -> None:
    """Pairs of all examples: 3 of 10 examples on each of 4 devices are gathered, so 12."""

    @autopar.parallelize(mesh=mesh_of(4), donate=False)
    def step(w: jax.Array, x: jax.Array) -> Any:
        def loss_of(w: jax.Array) -> jax.Array:
            z = x @ w
            return jax.nn.logsumexp(z @ z.T, axis=1).mean()

        loss, grad = jax.value_and_grad(loss_of)(w)
        return w - 0.1 * grad, loss

    found = autopar.check(step, jnp.ones((5, 3)), jnp.linspace(0, 1, 50).reshape(10, 5))
    assert "DIFFERS" not in str(found)
    (gathered,) = (row for row in found.rows if row.collective == "all-gather")
    assert gathered.compiled and gathered.compiled % (3 * 3 * 8) == 0
