"""Steps written for one device of several (`axis_name=`): what `jax.pmap` computes, on 4 devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.core import FrozenDict
from jax import lax

import autopar
from tests.support.explained import explained
from tests.support.meshes import mesh_of
from tests.support.pairs import every
from tests.support.per_device import AXIS, TX, State, apply, mean_loss, one_pmean, pmean_of_means, psum_of_means

DEVICES, BATCH, ROWS, WIDTH = 4, 32, 5000, 4

Loss = Callable[[Any, Any], jax.Array]


def weighted_sums(state: State, batch: Any) -> tuple[State, Any]:
    """Sums over examples that count, divided by their number on all devices."""

    def sums(params: Any) -> tuple[jax.Array, jax.Array]:
        errors = (jnp.sum(params["emb"][batch["ids"]] @ params["w"], -1) - batch["y"]) ** 2
        weights = batch["y"] > 0
        return jnp.sum(errors * weights), jnp.sum(weights)

    (total, weight), grads = jax.value_and_grad(sums, has_aux=True)(state["params"])
    weight = lax.psum(weight, AXIS)
    grads = jax.tree.map(lambda g: lax.psum(g, AXIS) / weight, grads)
    return apply(state, grads), lax.psum(total, AXIS) / weight


def each_clips_its_own(state: State, batch: Any) -> tuple[State, Any]:
    loss, grads = jax.value_and_grad(mean_loss)(state["params"], batch)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, 0.1 / norm), grads)
    return apply(state, lax.pmean(grads, AXIS)), lax.pmean(loss, AXIS)


def own_dropout(state: State, batch: Any) -> tuple[State, Any]:
    key = jax.random.fold_in(jax.random.key(3), lax.axis_index(AXIS))

    def loss_of(params: Any) -> jax.Array:
        rows = params["emb"][batch["ids"]]
        rows = rows * jax.random.bernoulli(key, 0.5, rows.shape)
        return jnp.mean((jnp.sum(rows @ params["w"], -1) - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(state["params"])
    return apply(state, lax.pmean(grads, AXIS)), lax.pmean(loss, AXIS)


def local_batch_norm(state: State, batch: Any) -> tuple[State, Any]:
    """Each device normalises by its own examples; the running mean is that of all."""

    def loss_of(params: Any) -> tuple[jax.Array, jax.Array]:
        rows = params["emb"][batch["ids"]]
        mean = rows.mean(0)
        rows = (rows - mean) / jnp.sqrt(rows.var(0) + 1e-3)
        return jnp.mean((jnp.sum(rows @ params["w"], -1) - batch["y"]) ** 2), mean

    (loss, mean), grads = jax.value_and_grad(loss_of, has_aux=True)(state["params"])
    new = apply(state, lax.pmean(grads, AXIS))
    return {**new, "mean": 0.9 * state["mean"] + 0.1 * lax.pmean(mean, AXIS)}, lax.pmean(loss, AXIS)


def own_results(state: State, batch: Any) -> tuple[State, Any]:
    loss, grads = jax.value_and_grad(mean_loss)(state["params"], batch)
    worst = lax.pmax(loss, AXIS) - lax.pmin(loss, AXIS)
    everyone = lax.all_gather(loss, AXIS)
    return apply(state, lax.pmean(grads, AXIS)), {"own": loss, "worst": worst, "all": everyone, "ids": batch["ids"]}


def microbatches(state: State, batch: Any) -> tuple[State, Any]:
    parts = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), batch)

    def body(total: Any, part: Any) -> tuple[Any, jax.Array]:
        loss, grads = jax.value_and_grad(mean_loss)(state["params"], part)
        return jax.tree.map(jnp.add, total, grads), loss

    grads, losses = lax.scan(body, jax.tree.map(jnp.zeros_like, state["params"]), parts)
    grads = jax.tree.map(lambda g: g / 2, lax.pmean(grads, AXIS))
    return apply(state, grads), lax.pmean(losses.mean(), AXIS)


def one_hot(state: State, batch: Any) -> tuple[State, Any]:
    def loss_of(params: Any) -> jax.Array:
        rows = jax.nn.one_hot(batch["ids"], ROWS) @ params["emb"]
        return jnp.mean((jnp.sum(rows @ params["w"], -1) - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(state["params"])
    return apply(state, lax.pmean(grads, AXIS)), lax.pmean(loss, AXIS)


LIFTING = [pmean_of_means, one_pmean, psum_of_means, weighted_sums, own_dropout, local_batch_norm, own_results, one_hot]
LIFTING += [each_clips_its_own, microbatches]


def make_state() -> State:
    rng = np.random.default_rng(0)
    params = {
        "emb": jnp.asarray(rng.normal(size=(ROWS, WIDTH)), jnp.float32),
        "w": jnp.asarray(rng.normal(size=(WIDTH, 3)), jnp.float32),
    }
    return {"params": params, "slots": TX.init(params), "mean": jnp.zeros(WIDTH)}


def make_batch(k: int = 0) -> Any:
    rng = np.random.default_rng(10 + k)
    ids = jnp.asarray(rng.integers(0, ROWS, BATCH), jnp.int32)
    return {"ids": ids.at[:8].set(ids[0]), "y": jnp.asarray(rng.normal(size=BATCH), jnp.float32)}


def by_pmap(step: Any, devices: int, steps: int) -> tuple[Any, Any]:
    run = jax.pmap(step, axis_name=AXIS, devices=jax.devices()[:devices])
    state = jax.tree.map(lambda x: jnp.stack([x] * devices), make_state())
    result = None
    for k in range(steps):
        batch = jax.tree.map(lambda x: x.reshape(devices, -1, *x.shape[1:]), make_batch(k))
        state, result = run(state, batch)
    return jax.tree.map(lambda x: np.asarray(x[0]), state), jax.tree.map(np.asarray, result)


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.long), DEVICES])
@pytest.mark.parametrize("step", every(2, LIFTING), ids=lambda f: f.__name__)
def test_it_is_what_pmap_computes(step: Any, devices: int) -> None:
    options = {"mesh": mesh_of(devices), "axis_name": AXIS}
    planned = autopar.parallelize(step, strategy={"params/emb": "allgather", "**": "auto"}, **options)
    state, result = make_state(), None
    for k in range(2):
        state, result = planned(state, make_batch(k))
    want_state, want = by_pmap(step, devices, 2)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)  # noqa: E731
    jax.tree.map(close, autopar.materialize(state), want_state)

    def compare(mine: Any, theirs: Any) -> None:
        close(mine, theirs if np.shape(mine) == theirs.shape else theirs[0])

    jax.tree.map(compare, result, want)
    assert planned.plan.parameters[0].lifted


@pytest.mark.parametrize("method", ["ps", "allreduce_rows", "allreduce"])
def test_every_method_verifies(method: str) -> None:
    strategy = {"params/emb": method, "**": "auto"}
    planned = autopar.parallelize(
        pmean_of_means, strategy=strategy, mesh=mesh_of(DEVICES), axis_name=AXIS, donate=False
    )
    assert autopar.verify(planned, make_state(), make_batch(), steps=2).ok


def test_static_arguments_by_position_and_by_keyword() -> None:
    def step(state: State, kind: str, batch: Any, *, reduced: str) -> tuple[State, Any]:
        new, told = {"own": own_dropout, "none": pmean_of_means}[kind](state, batch)
        return new, {reduced: told}

    step_of = lambda state, batch: step(state, "none", batch, reduced="mean")  # noqa: E731
    options: dict[str, Any] = {"mesh": mesh_of(DEVICES), "axis_name": AXIS, "donate": False}
    planned = autopar.parallelize(step, static_argnames=("kind", "reduced"), **options)
    _, told = planned(make_state(), "none", make_batch(), reduced="mean")
    np.testing.assert_allclose(told["mean"]["loss"], by_pmap(step_of, DEVICES, 1)[1]["mean"]["loss"][0], rtol=2e-5)


def test_explain_says_what_differs_from_device_to_device() -> None:
    options: Any = {"mesh": mesh_of(DEVICES), "axis_name": AXIS}
    told = explained(autopar.parallelize(own_dropout, **options), make_state(), make_batch())
    assert "each device's number is used" in told and "test_per_device.py" in told
    told = explained(autopar.parallelize(own_results, **options), make_state(), make_batch())
    assert "1/own is each device's own: stacked, [devices, ...]" in told


@pytest.mark.parametrize("empty", [{}, {"a": None, "b": (), "n": {"o": None}}], ids=["", "beside empty nodes"])
def test_a_state_that_differs_from_device_to_device_is_refused(empty: State) -> None:
    def step(state: State, batch: Any) -> tuple[Any, State, Any]:
        new, loss = pmean_of_means(state, batch)
        rows = new["params"]["emb"][batch["ids"]]
        return None, {**new, "mean": 0.9 * state["mean"] + 0.1 * rows.mean(0)}, loss

    planned = autopar.parallelize(step, mesh=mesh_of(DEVICES), axis_name=AXIS)
    with pytest.raises(autopar.StateError, match=r"each device another 'mean'.*pmean\(\.\.\., 'batch'\)"):
        planned({**make_state(), **empty}, make_batch())


def _hollow(state: State) -> Any:
    """The state with nodes that hold no leaves before, between and after its own, frozen and boxed ones among them."""
    params = state["params"]
    boxed = {"emb": nn.Partitioned(params["emb"], (None, None)), "none": None, "w": params["w"]}
    rest = {"slots": (optax.EmptyState(), state["slots"], ()), "mean": [None, state["mean"], {}]}
    return {"a": None, "params": FrozenDict(boxed), **rest, "z": optax.MaskedNode()}


def _filled(hollow: Any) -> State:
    params = hollow["params"]
    return {
        "params": {"emb": params["emb"].unbox(), "w": params["w"]},
        "slots": hollow["slots"][1],
        "mean": hollow["mean"][1],
    }


def _hollow_step(state: Any, nothing: None, batch: Any, *, key: None = None) -> tuple[Any, ...]:
    assert nothing is None and key is None
    new, metrics = own_results(_filled(state), batch)
    return None, {"none": None, **metrics}, (), _hollow(new)


def test_nodes_without_leaves_in_states_batches_and_results(tmp_path: Any) -> None:
    """None, (), empty states of optimizers, FrozenDicts and boxes under every entry point."""
    strategy = {"params/emb*": "ps", "**": "auto"}
    planned = autopar.parallelize(_hollow_step, strategy=strategy, mesh=mesh_of(DEVICES), axis_name=AXIS)
    batch = lambda k: {"a": None, **make_batch(k), "z": ()}  # noqa: E731
    call = lambda made: (made, None, batch(0))  # noqa: E731
    state = autopar.init(lambda: _hollow(make_state()), step=planned, call=call)
    _, metrics, *_, state = planned(state, None, batch(0), key=None)
    autopar.save(tmp_path, state)
    state = autopar.restore(tmp_path, like=state, step=planned, call=call).state
    _, metrics, empty, state = planned(state, None, batch(1), key=None)

    assert jax.tree.structure(state) == jax.tree.structure(_hollow(make_state())) and empty == ()
    want_state, want = by_pmap(own_results, DEVICES, 2)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)  # noqa: E731
    jax.tree.map(close, _filled(autopar.materialize(state)), want_state)
    close(metrics["own"], want["own"])
    assert metrics["none"] is None
    assert "result 1/own is each device's own" in explained(planned, state, None, batch(0), key=None)
    assert autopar.verify(planned, state, None, batch(0), key=None).ok
    assert autopar.plan(planned, state, None, batch(0), key=None).tables


def test_examples_that_cannot_be_shared_equally_are_refused() -> None:
    planned = autopar.parallelize(pmean_of_means, mesh=mesh_of(DEVICES), axis_name=AXIS)
    batch = jax.tree.map(lambda x: x[:30], make_batch())
    with pytest.raises(autopar.ArgumentsError, match=r"batch/ids has 30 examples .*4 devices can't share"):
        planned(make_state(), batch)


def test_what_every_device_has_whole() -> None:
    def step(state: State, batch: Any, ids: jax.Array, *, rate: Any) -> tuple[State, Any]:
        assert batch["ids"].shape == (BATCH // DEVICES,) and ids.shape == (3,)
        new, loss = pmean_of_means(state, batch)
        emb = new["params"]["emb"]
        return {**new, "params": {**new["params"], "emb": emb.at[ids].add(rate)}}, loss

    options: Any = {"mesh": mesh_of(DEVICES), "axis_name": AXIS, "batch_axis": {"ids": None}, "donate": False}
    planned = autopar.parallelize(step, state_argnums=0, **options)
    with pytest.raises(AssertionError) as failed:  # it relies on the size of its shard
        autopar.parallelize(step, **options)(make_state(), make_batch(), jnp.array([1, 2, 3]), rate=0.5)
    assert "state_argnums" in failed.value.__notes__[-1]
    assert autopar.verify(planned, make_state(), make_batch(), jnp.array([1, 2, 3]), rate=0.5).ok


def test_a_step_that_reduces_over_devices_says_so_if_that_is_not_said() -> None:
    with pytest.raises(autopar.StepError, match=r"unbound axis name: batch.*axis_name="):
        autopar.parallelize(pmean_of_means, mesh=mesh_of(DEVICES))(make_state(), make_batch())
    with pytest.raises(autopar.StepError, match=r"axis_name="):
        autopar.parallelize(pmean_of_means, mesh=mesh_of(DEVICES), axis_name="data")(make_state(), make_batch())


def _batch_norm(axis: str | None) -> Callable[[State, Any], tuple[State, Any]]:
    """Normalizes by the device's own examples, or by all."""

    def of_all(x: jax.Array) -> jax.Array:
        return x if axis is None else lax.pmean(x, axis)

    def loss_of(params: Any, batch: Any) -> jax.Array:
        rows = params["emb"][batch["ids"]] @ params["w"]
        mean = of_all(rows.mean(0))
        return jnp.mean(((rows - mean) / jnp.sqrt(of_all(((rows - mean) ** 2).mean(0)) + 1e-3)) ** 3)

    def step(state: State, batch: Any) -> tuple[State, Any]:
        loss, grads = jax.value_and_grad(loss_of)(state["params"], batch)
        return apply(state, lax.pmean(grads, AXIS)), {"loss": lax.pmean(loss, AXIS)}

    return step


def _own_clip(state: State, batch: Any) -> tuple[State, Any]:
    loss, grads = jax.value_and_grad(mean_loss)(state["params"], batch)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda g: g / jnp.maximum(norm, 1.0), grads)
    return apply(state, lax.pmean(grads, AXIS)), {"loss": lax.pmean(loss, AXIS)}


OWN, ADDED = "uses what it reduced over its own examples", "values of 4 devices are added up"


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (pmean_of_means, []),
        (one_pmean, []),
        (_batch_norm(AXIS), []),
        (_batch_norm(None), [OWN]),
        (_own_clip, [OWN]),
        (psum_of_means, [ADDED]),
    ],
    ids=["pmean", "one pmean", "batch norm of all", "own batch norm", "own clip", "psum"],
)
def test_explain_says_where_one_device_would_compute_something_else(step: Any, said: list[str]) -> None:
    planned = autopar.parallelize(step, mesh=mesh_of(DEVICES), axis_name=AXIS)
    told = explained(planned, make_state(), make_batch())
    assert [line for line in (OWN, ADDED) if line in told] == said
    assert not said or "per_device.py" in told


def _noisy(state: State, batch: Any, key: jax.Array, flags: jax.Array) -> tuple[State, Any]:
    key = lax.fori_loop(0, lax.axis_index(AXIS), lambda _, k: jax.random.split(k)[0], key)

    def loss_of(params: Any) -> jax.Array:
        rows = params["emb"][batch["ids"]]
        return jnp.mean(
            (jnp.sum(rows * jax.random.bernoulli(key, 0.5, rows.shape) @ params["w"], -1) - batch["y"]) ** 2
        )

    loss, grads = jax.value_and_grad(loss_of)(state["params"])
    return apply(state, lax.pmean(grads, AXIS)), {"loss": lax.pmean(loss, AXIS), "flags": flags + 1}


@pytest.mark.parametrize("state_argnums", [None, 0])
@pytest.mark.parametrize("devices", [2, DEVICES])
def test_a_key_is_no_batch_of_its_words(devices: int, state_argnums: Any) -> None:
    """`jax.random.PRNGKey` is a uint32[2], and so are two examples: what is used as a key is one."""
    key, flags = jax.random.PRNGKey(3), jnp.arange(devices, dtype=jnp.uint32)
    options: Any = {"mesh": mesh_of(devices), "axis_name": AXIS, "state_argnums": state_argnums, "strategy": "ps"}
    planned = autopar.parallelize(_noisy, **options)
    state, result = planned(make_state(), make_batch(), key, flags)

    each = lambda tree: jax.tree.map(lambda x: jnp.stack([x] * devices), tree)  # noqa: E731
    shared = jax.tree.map(lambda x: x.reshape(devices, -1), (make_batch(), flags))
    run = jax.pmap(_noisy, axis_name=AXIS, devices=jax.devices()[:devices])
    want, theirs = run(each(make_state()), shared[0], each(key), shared[1])
    first = jax.tree.map(lambda x: np.asarray(x[0]), want)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)  # noqa: E731
    jax.tree.map(close, autopar.materialize(state), first)
    np.testing.assert_array_equal(result["flags"], theirs["flags"])
    assert "key is a key: every device has the same" in str(
        autopar.explain(planned, make_state(), make_batch(), key, flags)
    )


def _with_noise(make: Any) -> Any:
    def step(table: jax.Array, ids: jax.Array, key: jax.Array) -> Any:
        noise = jax.random.normal(make(key, ids), (4,))
        loss, grads = jax.value_and_grad(lambda t: jnp.mean(jnp.sin(t[ids] + noise) ** 2))(table)
        return table - 0.1 * lax.pmean(grads, AXIS), lax.pmean(loss, AXIS)

    return step


@pytest.mark.parametrize(
    ("make", "axis"),
    [
        (lambda key, ids: jnp.where(ids[0] >= 0, key, key + 1), 0),
        (lambda key, ids: jnp.stack([key[0] + 1, key[1]]), 0),
        (lambda key, ids: key ^ key[0], {"key": None}),
        (lambda key, ids: jnp.stack([key[0], jnp.uint32(5)]), {"key": 0}),
    ],
    ids=["selected", "taken apart", "unclear, a key", "unclear, examples"],
)
def test_words_of_a_key_are_followed_or_asked_for(make: Any, axis: Any) -> None:
    step, key, ids = _with_noise(make), jax.random.PRNGKey(3), jnp.arange(16)
    options: Any = {"mesh": mesh_of(2), "axis_name": AXIS}
    if axis != 0:
        with pytest.raises(autopar.ArgumentsError, match=r"key is uint32.*batch_axis=\{'key': None\} for a key"):
            autopar.parallelize(step, **options)(jnp.ones((24, 4)), ids, key)
    _, loss = autopar.parallelize(step, batch_axis=axis, **options)(jnp.ones((24, 4)), ids, key)
    shards, along = (key.reshape(2, 1), 0) if axis == {"key": 0} else (key, None)
    plain = jax.vmap(step, (None, 0, along), axis_name=AXIS)(jnp.ones((24, 4)), ids.reshape(2, -1), shards)[1]
    np.testing.assert_allclose(loss, plain[0], rtol=1e-6)


def test_a_trace_that_fails_names_what_may_be_a_key() -> None:
    """A share that must be one, and a key beside it that can't be halved."""

    def step(table: jax.Array, ids: jax.Array, own: jax.Array, key: jax.Array) -> Any:
        assert own.shape == (1,)
        return _with_noise(lambda key, _: key)(table, ids, key)

    planned = autopar.parallelize(step, mesh=mesh_of(2), axis_name=AXIS, state_argnums=0)
    with pytest.raises(TypeError) as failed:
        planned(jnp.ones((24, 4)), jnp.arange(16), jnp.arange(2, dtype=jnp.uint32), jax.random.PRNGKey(3))
    notes = " ".join(failed.value.__notes__)
    assert "batch_axis={'own': None}" in notes and "its part of own, key" in notes


@pytest.mark.parametrize("stacked", ["batch", "key"])
def test_what_pmap_would_take_stacked_is_named(stacked: str) -> None:
    def step(w: Any, batch: Any, key: Any) -> Any:
        noise = jax.random.normal(key, w.shape)
        slope = jax.grad(lambda w: jnp.mean((batch @ w + noise.sum()) ** 2))(w)
        return w - jax.lax.pmean(slope, AXIS)

    batch, key = jnp.ones((8, 3)), jax.random.key(0)
    if stacked == "batch":
        batch = batch.reshape(2, 4, 3).swapaxes(1, 2)
    else:
        key = jax.random.split(key, 2)
    with pytest.raises((TypeError, ValueError)) as failed:
        autopar.parallelize(step, mesh=mesh_of(2), axis_name=AXIS)(jnp.ones(3), batch, key)
    assert f"All leaves of {stacked} have 2 along their first axis" in failed.value.__notes__[-1]


def test_another_axis_name_is_named() -> None:
    planned = autopar.parallelize(lambda w, b: w - jax.lax.pmean((b * w).sum(), "i"), mesh=mesh_of(2), axis_name="j")
    with pytest.raises(autopar.StepError, match=r"another axis than its axis_name='j' \(.*axis name: i"):
        planned(jnp.ones(()), jnp.ones(8))
