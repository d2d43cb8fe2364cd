"""Sharded rows: layouts, Tables, capacities that a batch exceeds."""

from __future__ import annotations

import re
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.backends.background import beside
from autopar.backends.devices import Mapped
from autopar.backends.sharded import ShardedRows
from autopar.ir.layout import RowLayout
from tests.support.compilations import compilations, finish
from tests.support.explained import explained
from tests.support.meshes import mesh_of
from tests.support.pairs import diagonal
from tests.support.row_steps import WIDTH, ids_in, make_state, same, step


def asking(rows: int) -> dict[str, Any]:
    """A batch of which each of 4 devices asks each of 4 owners for so many of 4000 rows."""
    ids = (np.arange(4)[:, None] * 1000 + np.arange(100) % rows).reshape(-1)
    return {"ids": np.tile(ids, (4, 1)).reshape(16, 100).astype(np.int32)}


@pytest.mark.parametrize("rows", [3, 40, 41])  # fewer than the devices, a multiple, neither
def test_steps_on_sharded_rows(rows: int) -> None:
    planned, plain = autopar.parallelize(step, strategy="ps", mesh=mesh_of(4)), jax.jit(step)
    mine, theirs = make_state(rows), make_state(rows)
    for k in range(3):
        (mine, a), (theirs, b) = planned(mine, ids_in(0, rows, k)), plain(theirs, ids_in(0, rows, k))
        same((mine, a), (theirs, b))
    emb = mine["params"]["emb"]
    assert isinstance(emb, autopar.Table) == (rows != 40)
    share = -(-rows // 4)
    stored = emb.stored if isinstance(emb, autopar.Table) else emb
    assert [s.data.shape for s in stored.addressable_shards] == [(share, WIDTH)] * 4


def test_frequent_rows_are_distributed_cyclically() -> None:
    """All ids of the example are on the first device's shard if rows lie as they are."""
    planned = autopar.parallelize(step, strategy="ps", mesh=mesh_of(4))
    new, _ = planned(make_state(400), ids_in(0, 60, length=20))
    assert isinstance(new["params"]["emb"], autopar.Table)
    (table,) = planned.plan.tables
    assert table.cyclic and table.tight and table.capacity <= 16
    (imbalance,) = re.findall(r"the busiest message is ([\d.]*\d)", table.reason)
    assert 1 <= float(imbalance) < 1.6, "nearly 4 if rows lay as they are"


def test_tables_read_like_arrays() -> None:
    state = make_state(41)
    planned = autopar.parallelize(step, strategy="ps", mesh=mesh_of(4))
    new, _ = planned(state, ids_in(0, 41))
    emb, expected = new["params"]["emb"], step(make_state(41), ids_in(0, 41))[0]["params"]["emb"]
    assert (emb.shape, emb.dtype, emb.ndim, len(emb), emb.nbytes) == ((41, WIDTH), jnp.float32, 2, 41, 41 * WIDTH * 4)
    for read in (np.asarray(emb), jnp.asarray(emb), emb[:], emb.materialize()):
        np.testing.assert_allclose(read, expected, rtol=1e-5)
    np.testing.assert_allclose(emb[40, 1], expected[40, 1], rtol=1e-5)
    ordinary = autopar.materialize(new)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(ordinary))
    same(jax.jit(lambda s: s)(new), ordinary)
    expected = step(ordinary, ids_in(3, 30))[0]
    same(planned(ordinary, ids_in(3, 30))[0], expected)


@pytest.mark.parametrize("donate", [True, False])
def test_a_batch_that_exceeds_the_capacity_is_run_without_limits(donate: bool) -> None:
    """Planned on ids that all owners shard; then all ids are one owner's."""
    planned = autopar.parallelize(step, strategy="ps", mesh=mesh_of(4), donate=donate)
    plain = jax.jit(step)
    mine, theirs = make_state(400), make_state(400)
    even, unequal = ids_in(0, 400, length=20), ids_in(0, 90, 1, length=20)
    planned.planned_for(mine, even)
    small = planned.plan.tables[0].capacity
    # Whether it was exceeded is known when a step has run, which nobody waits for.
    with pytest.warns(autopar.CapacityWarning, match="with the same result; capacities grow"):
        for batch in (even, unequal, even, even):
            (mine, a), (theirs, b) = planned(mine, batch), plain(theirs, batch)
            same((mine, a), (theirs, b))
    assert planned.plan.tables[0].capacity > small


@pytest.mark.parametrize("cyclic", [True, False])
@pytest.mark.parametrize("asked", [0, 1, 7, 8, 9, 30])  # of a capacity of 8
def test_ids_tell_every_device_the_longest_message(asked: int, cyclic: bool) -> None:
    """Device 2 asks owner 1 for so many rows, and others for fewer; all devices know it, and none other is told."""
    mesh, layout = mesh_of(4), RowLayout(160, 4, cyclic=cyclic)
    backend, capacity = ShardedRows(Mapped(mesh, "data"), layout, 8), 8
    loads = np.full((4, 4), min(3, asked))
    loads[2, 1] = asked
    ids = [layout.row(np.concatenate([40 * k + np.arange(n) for k, n in enumerate(row)])) for row in loads]
    padded = np.concatenate([np.pad(x, (0, 40 - len(x)), constant_values=160) for x in ids]).astype(np.int32)
    params = {"requested": 160, "rows": 4 * 33}

    def learnt(ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        route = backend.route(params, ids)
        return backend.load({}, route)[None], route.rows

    found, rows = Mapped(mesh, "data").local(learnt, [0], (0, 0), jnp.asarray(padded))
    assert found.tolist() == [asked] * 4
    if asked <= capacity:
        owned = [np.unique(np.concatenate([np.arange(n) for n in column])).astype(int) for column in loads.T]
        expected = np.concatenate([np.pad(x, (0, 33 - len(x)), constant_values=40) for x in owned])
        np.testing.assert_array_equal(rows, expected)


def test_what_exceeds_a_capacity_is_compiled_beside_the_steps() -> None:
    """Once there were some: the first call compiles the step alone. That changes no bit."""
    planned, whole = (autopar.parallelize(step, strategy="ps", mesh=mesh_of(4)) for _ in range(2))
    mine, theirs = make_state(4000), make_state(4000)
    whole.lower(theirs, asking(20)).compile()

    def train(*sizes: int) -> None:
        nonlocal mine, theirs
        for size in sizes:
            (mine, a), (theirs, b) = planned(mine, asking(size)), whole(theirs, asking(size))
            jax.tree.map(np.testing.assert_array_equal, (mine, a), (theirs, b))

    train(20)
    with compilations() as later:
        train(*(2 + k % 18 for k in range(33)))
        finish()
        train(20, 20, 50)
    assert (later.here, later.beside) == (0, 1)


def test_capacities_grow_at_once_to_what_the_batches_need() -> None:
    """The first batch asks for a few rows only; a second compilation is enough for all others."""
    planned = autopar.parallelize(step, strategy="ps", mesh=mesh_of(4))
    plain, mine, theirs = jax.jit(step), make_state(4000), make_state(4000)
    batches = [ids_in(0, 8, length=100), *(ids_in(0, 4000, seed, length=100) for seed in range(1, 6))]
    with pytest.warns(autopar.CapacityWarning, match="capacities grow from 16 to 72 ") as told:
        for batch in batches:
            (mine, _), (theirs, _) = planned(mine, batch), plain(theirs, batch)
            same(jax.block_until_ready(mine), theirs)
    assert len(told) == 1


@pytest.mark.parametrize("slow", [False, True])
def test_larger_capacities_are_compiled_before_a_batch_needs_them(slow: bool) -> None:
    """A step that needs them while other programs are compiled doesn't wait for these, but compiles them itself."""
    planned, plain = autopar.parallelize(step, strategy="ps", mesh=mesh_of(4)), jax.jit(step)
    mine, theirs = make_state(4000), make_state(4000)

    def train(*sizes: int) -> None:
        nonlocal mine, theirs
        for size in sizes:
            (mine, a), (theirs, b) = planned(mine, asking(size)), plain(theirs, asking(size))
            same(jax.block_until_ready((mine, a)), (theirs, b))

    train(20, 20, 28)
    first = planned.latest
    assert first is not None and first.larger is None and planned.plan.tables[0].capacity == 32
    with compilations() as near:
        gate = threading.Event()
        other = beside("what takes its time", gate.wait) if slow else None
        train(30, 20)
        assert first.larger is not None
        if not slow:
            finish()
            assert first.larger.is_done()
        else:
            assert not first.larger.is_done()
        how = "the step is compiled again" if slow else "the step was compiled beside the ones before"
        with pytest.warns(autopar.CapacityWarning, match=how) as told:
            train(50, 50, 20)
        assert other is None or not other.is_done()
        gate.set()
    assert (near.here > 0, near.beside > 0) == (slow, not slow)
    assert "(50 of params/emb, not 32)" in str(told[0].message) and "from 32 to 56 (" in str(told[0].message)
    assert planned.latest is first.larger.wait()


def test_larger_capacities_that_were_compiled_may_be_too_small() -> None:
    planned, plain = autopar.parallelize(step, strategy="ps", mesh=mesh_of(4)), jax.jit(step)
    mine, theirs = make_state(4000), make_state(4000)
    with pytest.warns(
        autopar.CapacityWarning, match=r"80 of params/emb, not 32\).*from 32 to 96 .* compiled again"
    ) as told:
        for size in (20, 30, 20, 80, 80, 20):
            (mine, a), (theirs, b) = planned(mine, asking(size)), plain(theirs, asking(size))
            same(jax.block_until_ready((mine, a)), (theirs, b))
    assert len(told) == 1


def test_shapes_alone_give_the_safe_capacity() -> None:
    planned = autopar.parallelize(step, strategy="ps", mesh=mesh_of(4))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (make_state(400), ids_in(0, 400)))
    (table,) = autopar.plan(planned, *shapes).tables
    assert not table.tight and table.capacity == 10


@pytest.mark.parametrize("method", ["ps", "allgather", "allreduce_rows", "auto"])
def test_batches_that_the_devices_do_not_divide(method: str) -> None:
    planned = autopar.parallelize(step, strategy=method, mesh=mesh_of(3))
    state, batch = make_state(400), ids_in(0, 400)
    same(planned(state, batch), step(make_state(400), batch))
    assert "devices don't divide the batch" in explained(planned)


@pytest.mark.parametrize(("method", "scale"), diagonal(["ps", "allgather", "allreduce_rows"], [np.inf, np.nan, 0.0]))
def test_poison_reaches_all_rows(method: str, scale: float) -> None:
    def poisoned(state: Any, batch: Any) -> Any:
        new, metrics = step(state, {"ids": batch["ids"]})
        g = metrics["g"] * batch["scale"]
        g = g / jnp.sqrt(jnp.sum(g**2))
        return {**new, "params": {**new["params"], "emb": state["params"]["emb"] - g}}, metrics

    planned = autopar.parallelize(poisoned, strategy=method, mesh=mesh_of(4), donate=False)
    batch = {**ids_in(0, 41), "scale": np.float32(scale)}
    same(planned(make_state(41), batch), jax.jit(poisoned)(make_state(41), batch))


def test_a_materialized_state_outlives_the_state() -> None:
    planned = autopar.parallelize(step, strategy="ps", mesh=mesh_of(4))
    state, _ = planned(make_state(41), ids_in(0, 41))  # a Table, and dense leaves on every device
    assert any(isinstance(x, autopar.Table) for x in jax.tree.leaves(state))
    best = autopar.materialize(state)
    kept = jax.tree.map(np.array, best)
    dense = [
        (x.sharding, y.sharding)
        for x, y in zip(*map(jax.tree.leaves, (state, best)), strict=True)
        if x is not y and isinstance(x, jax.Array)
    ]
    assert dense and all(a == b for a, b in dense)
    state, _ = planned(state, ids_in(0, 41, 1))
    same(best, kept)
    jax.jit(lambda t: jax.tree.map(lambda x: x + 1, t), donate_argnums=0)(best)
    planned(state, ids_in(0, 41, 2))
