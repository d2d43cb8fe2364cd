"""Arguments that stay the same are brought to the devices once, and go with the array that they were made of."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar.backends import served
from autopar.backends.devices import StageDevice
from autopar.run import devices, hosts, kept_placements
from tests.support.meshes import mesh_of

V, W = 64, 5
FOUR = mesh_of(4)
IDS = np.arange(16, dtype=np.int32) * 3 % V
AXES = {"vectors": None, "ids": 0}


def step(table: jax.Array, vectors: jax.Array, ids: jax.Array) -> Any:
    loss, g = jax.value_and_grad(lambda t: ((t[ids] * vectors[ids, :3]) ** 2).mean())(table)
    return table - 0.1 * g, loss


def evaluate(vectors: jax.Array, ids: jax.Array) -> jax.Array:
    return vectors[ids].sum(1)


def vectors_of(seed: int = 0) -> jax.Array:
    return jax.device_put(np.random.default_rng(seed).normal(size=(V, W)).astype(np.float32))


def kept() -> int:
    """Returns how many arrays of the vectors' shape there are on several devices."""
    gc.collect()
    return sum(x.shape == (V, W) and len(x.devices()) > 1 for x in jax.live_arrays() if not x.is_deleted())


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the arrays that a step has brought to its devices."""
    shapes = []
    place = devices.place_array

    def counted(value: Any, *args: Any, **options: Any) -> jax.Array:
        shapes.append(value.shape)
        return place(value, *args, **options)

    monkeypatch.setattr(devices, "place_array", counted)
    return shapes


@pytest.fixture
def every_byte_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_placements, "_BYTES", 1)


@pytest.fixture
def warned() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", autopar.SlowPlanWarning)
        yield caught


@pytest.mark.parametrize("given", [None, P(), P("data")], ids=["on one device", "on each", "in shards"])
@pytest.mark.parametrize("batch_axis", [0, AXES], ids=["spread", "whole"])
def test_each_is_placed_once(given: P | None, batch_axis: Any, placed: list[tuple[int, ...]]) -> None:
    vectors = vectors_of() if given is None else jax.device_put(vectors_of(), NamedSharding(FOUR, given))
    planned = autopar.parallelize(step, mesh=FOUR, strategy="ps", state_argnums=0, batch_axis=batch_axis)
    mine, theirs = jnp.ones((V, 3)), jnp.ones((V, 3))
    for k in range(4):
        ids = (IDS + k) % V
        (mine, a), (theirs, b) = planned(mine, vectors, ids), jax.jit(step)(theirs, vectors, ids)
        np.testing.assert_allclose(a, b, rtol=1e-6)
    np.testing.assert_allclose(mine, theirs, rtol=1e-6)
    assert placed.count((V, W)) <= 1


def test_other_arrays_are_placed_anew_and_some_are_kept(placed: list[tuple[int, ...]]) -> None:
    """Those of the last calls; a list of many batches isn't kept as a whole."""
    several = [vectors_of(k) for k in range(7)]
    planned = autopar.parallelize(evaluate, mesh=FOUR, batch_axis=AXES)
    for vectors in (*several, *several[-3:], several[0]):
        np.testing.assert_allclose(planned(vectors, IDS), evaluate(vectors, IDS), rtol=1e-5)
    assert placed.count((V, W)) == 8
    del vectors
    assert kept() == 4
    del several[3:6]
    assert kept() == 2
    del several
    assert kept() == 0


def test_steps_share_what_is_placed(placed: list[tuple[int, ...]]) -> None:
    vectors, table = vectors_of(), jnp.ones((V, 3))
    train = autopar.parallelize(step, mesh=FOUR, strategy="ps", state_argnums=0, batch_axis=AXES)
    read = autopar.parallelize(evaluate, mesh=FOUR, batch_axis=AXES)
    for _ in range(2):
        table, _ = train(table, vectors, IDS)
        read(vectors, IDS)
    assert placed.count((V, W)) == 1 and kept() == 1
    del train, read
    assert kept() == 0, "no step keeps it"


def test_an_array_that_is_gone_is_an_error() -> None:
    """Deleted, or given away to another function, which may have taken the buffer that both have."""
    read = autopar.parallelize(evaluate, mesh=FOUR, batch_axis=AXES)
    for give_away in (lambda x: x.delete(), jax.jit(lambda x: x + 1, donate_argnums=0)):
        vectors = vectors_of()
        read(vectors, IDS)
        give_away(vectors)
        with pytest.raises(autopar.DonatedStateError):
            read(vectors, IDS)
        other = vectors_of(1)
        np.testing.assert_allclose(read(other, IDS), evaluate(other, IDS), rtol=1e-5)
        del vectors, other
        assert kept() == 0


def test_a_state_that_was_evaluated_elsewhere_is_updated_in_place() -> None:
    """The evaluation's placement goes when a step takes the state."""
    train = autopar.parallelize(lambda t, ids: (t - evaluate(t, ids).mean(), ids.sum()), mesh=FOUR)
    read = autopar.parallelize(evaluate, mesh=mesh_of(2), batch_axis=AXES)
    state, _ = train(vectors_of(), IDS)
    for _ in range(2):
        np.testing.assert_allclose(read(state, IDS), evaluate(np.asarray(state), IDS), rtol=1e-5)
        old, (state, _) = state, train(state, IDS)
        assert old.is_deleted() and kept() == 1


def test_a_result_that_is_an_argument_may_be_given_away() -> None:
    def keeps(table: jax.Array, vectors: jax.Array, ids: jax.Array) -> Any:
        return table - 0.1 * vectors[ids].sum(), vectors

    train = autopar.parallelize(keeps, mesh=FOUR, state_argnums=0, batch_axis=AXES)
    vectors = vectors_of()
    mine = vectors_of(1)
    for _ in range(3):
        theirs, _ = jax.jit(keeps)(np.asarray(mine), vectors, IDS)
        mine, again = train(mine, vectors, IDS)
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(again, vectors)
        mine = again  # which the next step updates in place


@pytest.mark.usefixtures("every_byte_counts")
def test_a_numpy_array_may_change_and_is_told_of_where_it_does_not(warned: list[warnings.WarningMessage]) -> None:
    read = autopar.parallelize(evaluate, mesh=FOUR, batch_axis={**AXES, "vectors": None})
    vectors, ids = np.asarray(vectors_of()).copy(), jnp.asarray(IDS)
    for k in range(5):
        vectors[:, 0] = k
        np.testing.assert_allclose(read(vectors, ids), evaluate(vectors, ids), rtol=1e-5)
        read(vectors.copy(), ids)
    assert not warned
    for _ in range(6):
        read(vectors, ids)
    (told,) = (str(w.message) for w in warned)
    assert "vectors (1.2 KiB) was the same in 3 calls" in told and "vectors = jax.numpy.asarray" in told


@pytest.mark.usefixtures("every_byte_counts")
def test_on_hosts(warned: list[warnings.WarningMessage], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a process with several devices."""
    whole, shapes = hosts._Arguments._whole, []

    def counted(self: Any, k: int, along: Any, leaf: Any) -> Any:
        shapes.append(leaf.shape)
        return whole(self, k, along, leaf)

    monkeypatch.setattr(hosts._Arguments, "_whole", counted)
    planned = autopar.parallelize(step, strategy=("ps", "hosts"), state_argnums=0, batch_axis=AXES)
    vectors, mine, theirs = vectors_of(), jnp.ones((V, 3)), jnp.ones((V, 3))
    for k, given in enumerate([vectors] * 3 + [np.array(vectors)] * 3):
        (mine, a), (theirs, b) = planned(mine, given, IDS + k), jax.jit(step)(theirs, given, IDS + k)
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert shapes.count((V, W)) == 1 + 3
    assert ["vectors" in str(w.message) for w in warned] == [True]
    del vectors, given
    assert kept() == 0


def layers(state: Any, vectors: jax.Array, ids: jax.Array) -> Any:
    """Each layer reads the vectors."""

    def loss_fn(weights: Any) -> jax.Array:
        h = vectors[ids]
        for name in sorted(weights):
            h = jnp.tanh(h @ weights[name]) + vectors[(ids + 1) % V]
        return (h**2).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), loss


def weights() -> Any:
    return {name: jnp.eye(W) + 0.1 for name in "abcd"}


def in_stages(schedule: str, step: Any = layers, **options: Any) -> Any:
    pipeline = autopar.Pipeline(2, schedule, microbatches=2 if schedule == "1f1b" else None, **options)
    return autopar.parallelize(step, pipeline=pipeline, state_argnums=0, batch_axis=AXES)


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the arrays that stages were given."""
    shapes, put_ = [], StageDevice.put

    def counted(self: StageDevice, value: Any, axis: int | None = None) -> Any:
        shapes.append(value.shape)
        return put_(self, value, axis)

    monkeypatch.setattr(StageDevice, "put", counted)
    return shapes


@pytest.mark.usefixtures("every_byte_counts")
@pytest.mark.parametrize("schedule", ["1f1b", "stash"])
def test_in_stages(schedule: str, put: list[Any], warned: list[warnings.WarningMessage]) -> None:
    """Each of two stages is given them once; NumPy's in each call."""
    planned, vectors, mine, theirs = in_stages(schedule), vectors_of(), weights(), weights()
    given = np.array(vectors)
    for k in range(8):
        given[0] = k
        mine, a = planned(mine, vectors if k < 4 else given, IDS)
        theirs, b = jax.jit(layers)(theirs, vectors if k < 4 else given, IDS)
        if schedule == "1f1b":
            np.testing.assert_allclose(a, b, rtol=1e-5)
        assert put.count((V, W)) == 2 * max(1, k - 2)
    assert not warned
    for _ in range(3):
        mine, _ = planned(mine, given, IDS)
    (told,) = (str(w.message) for w in warned)
    assert "vectors" in told and "jax.numpy.asarray" in told


@pytest.mark.parametrize("schedule", ["1f1b", "stash"])
def test_stages_let_go_of_what_is_gone(schedule: str) -> None:
    planned, vectors, state = in_stages(schedule), vectors_of(), weights()
    for _ in range(3):
        state, _ = planned(state, vectors, IDS)
    autopar.drain(state)
    del vectors
    gc.collect()
    assert not [x for x in jax.live_arrays() if x.shape == (V, W) and not x.is_deleted()]


@pytest.mark.filterwarnings("ignore:Some donated buffers")  # of the leaf that a new array replaces
def test_stages_return_arguments_that_may_be_given_away() -> None:
    """As a result, and as the new state."""

    def swaps(state: Any, vectors: jax.Array, ids: jax.Array) -> Any:
        new, loss = layers(state["layers"], vectors, ids)
        return {"layers": new, "last": vectors}, loss + state["last"].sum()

    planned, vectors, others = in_stages("1f1b", swaps), vectors_of(), vectors_of(1)
    mine, theirs = ({"layers": weights(), "last": jnp.ones((V, W))} for _ in range(2))
    for given in (vectors, vectors, others, vectors, mine["last"], vectors):
        (theirs, b) = jax.jit(swaps)(theirs, np.asarray(given), IDS)
        (mine, a) = planned(mine, given, IDS)
        np.testing.assert_allclose(a, b, rtol=1e-5)
        np.testing.assert_array_equal(mine["last"], theirs["last"])
    assert not vectors.is_deleted()


@pytest.mark.usefixtures("every_byte_counts")
def test_a_worker_of_servers(monkeypatch: pytest.MonkeyPatch, warned: list[warnings.WarningMessage]) -> None:
    """On several devices; on one nothing is placed."""
    shapes, place = [], served.place_array

    def counted(value: Any, *args: Any, **options: Any) -> jax.Array:
        shapes.append(value.shape)
        return place(value, *args, **options)

    monkeypatch.setattr(served, "place_array", counted)
    planned = autopar.parallelize(
        layers, sync=autopar.sync.Async(staleness=1), mesh=FOUR, state_argnums=0, batch_axis=AXES
    )
    vectors, mine, theirs = vectors_of(), weights(), weights()
    given = np.array(vectors)
    for k in range(8):
        given[0] = k
        mine, a = planned(mine, vectors if k < 4 else given, IDS + k)
        theirs, b = jax.jit(layers)(theirs, vectors if k < 4 else given, IDS + k)
        np.testing.assert_allclose(a, b, rtol=1e-5)
        assert shapes.count((V, W)) == max(1, k - 2)
    assert not [w for w in warned if w.category is autopar.SlowPlanWarning]
    for _ in range(3):
        mine, _ = planned(mine, given, IDS + k)
    (told,) = (str(w.message) for w in warned if w.category is autopar.SlowPlanWarning)
    assert "vectors" in told and "jax.numpy.asarray" in told
    del vectors
    assert kept() == 0
