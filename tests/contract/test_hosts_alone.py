"""Tables in the memory of one process: states and arguments that are awkward, against `jax.jit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.cost.model import SMALL_DEFERRED_BYTES
from benchmarks.hosts import AROUND, timed

V, D, B = 37, 4, 8


def table(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32)


def ids(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, V, (B, 3)).astype(np.int32)


def hosted(step: Callable[..., Any]) -> Any:
    return autopar.parallelize(step, strategy=("ps", "hosts"))


def agree(mine: Any, theirs: Any) -> None:
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6)


def update(state: Any, batch: Any) -> Any:
    """A dense slot, and an accumulator of rows, besides."""
    used = {"t": state["t"], "w": state["w"]}
    loss, grads = jax.value_and_grad(lambda s: ((s["t"][batch["ids"]] @ s["w"]) ** 2).mean())(used)
    new = {k: used[k] - 0.1 * grads[k] for k in used}
    new["ema"] = 0.9 * state["ema"] + 0.1 * state["w"]
    new["acc"] = state["acc"] + grads["t"] ** 2
    return new, loss + 0 * batch["x"].sum()


def test_a_counter_that_ids_depend_on() -> None:
    """Its new value is made before the rows are known, and so before the step is run for good."""

    def step(state: Any, batch: Any) -> Any:
        count = state["count"] + 1
        some = (batch["ids"] + count) % V
        loss, grad = jax.value_and_grad(lambda t: (t[some] ** 2).mean())(state["t"])
        return {"t": state["t"] - 0.1 * grad, "count": count}, loss

    planned, mine = hosted(step), {"t": table(V, D), "count": jnp.int32(0)}
    theirs = jax.tree.map(jnp.copy, mine)
    for i in range(3):
        mine, _ = planned(mine, {"ids": ids(i)})
        theirs, _ = jax.jit(step)(theirs, {"ids": ids(i)})
    agree(mine, theirs)


def test_leaves_that_are_the_same_buffer() -> None:
    w, t = table(D, 2), table(V, D)
    theirs = {"t": t, "w": w, "ema": w, "acc": t}
    mine = {"t": jnp.copy(t), "w": jnp.copy(w)}
    mine |= {"ema": mine["w"], "acc": mine["t"]}
    batch = {"ids": ids(), "x": jnp.ones((B,))}
    planned = hosted(update)
    for _ in range(2):
        mine, _ = planned(mine, batch)
        theirs, _ = jax.jit(update)(theirs, batch)
    agree(mine, theirs)
    theirs = {**jax.tree.map(np.asarray, mine), "acc": np.asarray(mine["t"])}
    mine, _ = planned({**mine, "acc": mine["t"]}, batch)  # one HostTable as two leaves
    agree(mine, jax.jit(update)(theirs, batch)[0])


def test_a_call_that_fails_leaves_tables_as_they_were() -> None:
    planned, batch = hosted(update), {"ids": ids(), "x": jnp.ones((B,))}
    state, _ = planned({"t": table(V, D), "w": table(D, 2), "ema": table(D, 2), "acc": jnp.zeros((V, D))}, batch)
    before = np.asarray(state["t"])
    gone = jnp.ones((B,))
    gone.delete()
    with pytest.raises(autopar.DonatedStateError):
        planned(state, {"ids": ids(1), "x": gone})
    np.testing.assert_array_equal(np.asarray(state["t"]), before)


def test_a_table_among_the_results() -> None:
    def step(t: jax.Array, some: jax.Array) -> Any:
        grad = jax.grad(lambda t: (t[some] ** 2).mean())(t)
        return t - 0.1 * grad, (t - 0.1 * grad, grad.sum())

    t = table(V, D)
    theirs = jax.jit(step)(t, ids())
    mine = hosted(step)(jnp.copy(t), ids())
    assert isinstance(mine[1][0], jax.Array)
    agree(mine, theirs)


def by_heads(t: jax.Array, some: jax.Array) -> Any:
    """Rows are reshaped, each half by itself."""
    grad = jax.grad(lambda t: (jnp.take(t, some, axis=0, mode="fill", fill_value=0) ** 2).sum())(t)
    halves = grad.reshape(V, 2, D // 2)
    return t - (halves / (1 + jnp.sqrt((halves**2).sum(-1, keepdims=True)))).reshape(V, D), grad.sum()


def test_rows_that_are_reshaped() -> None:
    """In a first batch without any row, too."""
    planned, mine, theirs = hosted(by_heads), table(V, D), table(V, D)
    for some in (np.full((B, 3), V + 1, np.int32), ids(1)):
        mine, _ = planned(mine, some)
        theirs, _ = jax.jit(by_heads)(theirs, some)
    agree(mine, theirs)


def test_slots_that_the_untouched_rows_read() -> None:
    """A last gradient is constant off the rows, and a rate of each row is only read: a sweep reads all of both."""

    def step(state: Any, batch: Any) -> Any:
        grad = batch["scale"] * jax.grad(lambda t: (t[batch["ids"]] ** 2).mean())(state["t"])
        grad = jnp.where(state["last"] > 0.5, 0.0, grad)
        new = state["t"] - state["rate"][:, None] * grad * jnp.sign(state["last"])
        return {**state, "t": new, "last": grad}, batch["scale"]

    theirs = {"t": table(V, D), "last": table(V, D), "rate": jnp.linspace(0.1, 0.2, V)}
    planned, mine = hosted(step), jax.tree.map(jnp.copy, theirs)
    for k, scale in enumerate((1.0, np.inf, 1.0)):
        batch = {"ids": ids(k), "scale": np.float32(scale)}
        mine, _ = planned(mine, batch)
        theirs, _ = jax.jit(step)(theirs, batch)
        agree(mine, theirs)


@pytest.mark.parametrize("method", ["ps", "auto", "allreduce"])
def test_rows_that_wait_on_the_device_beside_tables_on_hosts(method: str) -> None:
    tx = optax.adamw(0.05, weight_decay=0.1)

    def step(state: Any, some: jax.Array) -> Any:
        params, opt = state
        loss, grads = jax.value_and_grad(lambda s: ((s["t"][some] * s["u"][some // 2]) ** 2).mean())(params)
        updates, opt = tx.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), loss

    planned = autopar.parallelize(step, strategy={"0/t": ("ps", "hosts"), "0/u": method})
    params = {"t": table(V, D), "u": table(SMALL_DEFERRED_BYTES // (3 * 4 * D) + 1, D)}
    mine, theirs = (jax.tree.map(jnp.copy, (params, tx.init(params))) for _ in range(2))
    if method == "ps":
        with pytest.raises(autopar.StrategyError, match="0/u can't be trained with 'ps' on devices beside"):
            planned(mine, ids(0))
        return
    for i in range(4):
        mine, _ = planned(mine, ids(i))
        theirs, _ = jax.jit(step)(theirs, ids(i))
    assert isinstance(mine[0]["u"], autopar.HostTable) == (method == "auto")
    agree(autopar.materialize(mine), theirs)


@pytest.mark.parametrize("method", ["ps", "allgather", "allreduce_rows", "allreduce", "auto"])
def test_tables_on_the_device_beside_tables_on_hosts(method: str) -> None:
    def step(state: Any, some: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(lambda s: ((s["t"][some] * s["u"][some // 2]) ** 2).mean())(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss

    planned = autopar.parallelize(step, strategy={"t": ("ps", "hosts"), "u": method})
    mine = {"t": table(V, D), "u": table(V + 3, D)}
    theirs = jax.tree.map(jnp.copy, mine)
    for i in range(2):
        mine, _ = planned(mine, ids(i))
        theirs, _ = jax.jit(step)(theirs, ids(i))
    assert isinstance(mine["t"], autopar.HostTable) and isinstance(mine["u"], jax.Array)
    agree(autopar.materialize(mine), theirs)


@pytest.mark.parametrize("shape", [(V,), (V, D)])
def test_rows_that_are_picked(shape: tuple[int, ...]) -> None:
    """As of an array: of tables with one number a row, too."""

    def step(t: jax.Array, some: jax.Array) -> jax.Array:
        return t - 0.1 * jax.grad(lambda t: (t[some] ** 2).sum())(t)

    theirs = np.asarray(jax.jit(step)(table(*shape), ids()))
    mine = hosted(step)(table(*shape), ids())
    for picked in (3, -1, np.array([4, 0]), np.array([[1], [2]]), (5, ...), slice(2, 4)):
        np.testing.assert_allclose(mine[picked], theirs[picked], rtol=1e-5)


def test_leaves_with_one_new_value() -> None:
    """Gradients of two weights that nothing reads are one array of zeros, which isn't donated twice."""

    def step(state: Any, ids: jax.Array) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            return jnp.mean(jnp.tanh(params["t"][ids] * params["w"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
        params |= {k: params[k] - old for k, old in state["grads"].items()}
        return {"params": params, "grads": {k: grads[k] for k in state["grads"]}}, loss

    params = {"t": jnp.ones((300, 4)), **{k: jnp.ones(4) for k in ("w", "u", "v")}}
    state = {"params": params, "grads": {"u": jnp.ones(4), "v": jnp.ones(4)}}
    planned = autopar.parallelize(step, strategy=("ps", "hosts"))
    for k in range(3):
        state, _ = planned(state, np.array([1, 2, 3 + k], np.int32))
    assert not np.asarray(state["grads"]["u"]).any() and not np.asarray(state["grads"]["v"]).any()


def test_stages_of_many_tables_are_timed() -> None:
    """As `python -m benchmarks hosts` does."""

    def step(tables: Any, batch: Any) -> Any:
        def loss(tables: Any) -> Any:
            return sum((t[i] ** 2).mean() for t, i in zip(tables, batch, strict=True))

        value, grads = jax.value_and_grad(loss)(tables)
        return jax.tree.map(lambda t, g: t - 0.1 * g, tables, grads), value

    planned, tables, batch = hosted(step), [table(V, D) for _ in range(26)], [ids(k) for k in range(26)]
    for _ in range(2):
        tables, _ = planned(tables, batch)
    with timed(planned.latest.runner) as times:
        tables, _ = planned(tables, batch)
        times.finish(60.0)
    ran = [name[3:].split()[0] for name, seconds in times.seconds.items() if seconds[0] and name != AROUND]
    assert [name for name in ran if name != "device"] == ["route", "pull", "sweep", "commit"]
    assert sum(sum(seconds) for seconds in times.seconds.values()) == pytest.approx(60)
