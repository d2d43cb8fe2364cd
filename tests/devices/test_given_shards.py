"""A state that comes in shards stays in shards."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from tests.support.explained import explained
from tests.support.meshes import mesh_of
from tests.support.row_steps import same

V, D = 64, 8
FOUR = mesh_of(4)
IDS = np.arange(16, dtype=np.int32) * 5 % V
TX = optax.adagrad(0.1)


def shapes(leaf: Any) -> set[tuple[int, ...]]:
    leaf = leaf.stored if isinstance(leaf, autopar.Table) else leaf
    return {s.data.shape for s in leaf.addressable_shards}


def by_rows(table: jax.Array, ids: jax.Array) -> Any:
    loss, g = jax.value_and_grad(lambda t: (t[ids] ** 2).mean())(table)
    return table - 0.1 * g, loss


def by_hand(table: jax.Array, ids: jax.Array) -> Any:
    """The lookup is the user's own."""

    def own(t: jax.Array, ids: jax.Array) -> jax.Array:
        n = t.shape[0]
        i = ids - jax.lax.axis_index("x") * n
        there = (i >= 0) & (i < n)
        return jax.lax.psum(jnp.where(there[..., None], t[jnp.clip(i, 0, n - 1)], 0.0), "x")

    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    look = jax.shard_map(own, mesh=mesh, in_specs=(P("x"), P()), out_specs=P())
    loss, g = jax.value_and_grad(lambda t: (look(t, ids) ** 2).mean())(table)
    return table - 0.1 * g, loss


@pytest.mark.parametrize("options", [{}, {"batch_axis": {"ids": None}}, {"strategy": {"table": "ps"}}])
@pytest.mark.parametrize("step", [by_rows, by_hand])
def test_tables(step: Any, options: Any) -> None:
    table = jax.random.normal(jax.random.key(0), (V, D))
    mine, theirs = jax.device_put(table, NamedSharding(FOUR, P("data"))), table
    planned = autopar.parallelize(step, state_argnums=0, mesh=FOUR, **options)
    for k in range(3):
        (mine, a), (theirs, b) = planned(mine, (IDS + k) % V), jax.jit(step)(theirs, (IDS + k) % V)
        same((mine, a), (theirs, b))
        assert shapes(mine) == {(V // 4, D)}


def test_a_lookup_by_hand_gathers_nothing() -> None:
    rows = 10 * V
    mine = jax.device_put(jnp.ones((rows, D)), NamedSharding(FOUR, P("data")))
    planned = autopar.parallelize(by_hand, state_argnums=0, mesh=FOUR)
    text = planned.lower(mine, IDS).compile().as_text()
    assert f"f32[{rows},{D}]" not in text and f"f32[{rows // 4},{D}]" in text
    told = explained(planned)
    assert "table: sparse, ps" in told and "In shards, as they came: table" in told
    assert "planned like the rest of the step, each of its devices an element of an axis" in told


def _net(state: Any, batch: Any) -> Any:
    def loss_fn(params: Any) -> jax.Array:
        return jnp.mean((jnp.tanh(batch["x"] @ params["w"] + params["b"]) @ params["v"] - 1) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    updates, opt = TX.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss


def _state(mesh: Any, **specs: P) -> Any:
    params = {"w": jax.random.normal(jax.random.key(0), (D, 12)), "b": jnp.zeros(12), "v": jnp.ones((12, 3))}
    state = {"params": params, "opt": TX.init(params)}
    placed = {k: jax.device_put(x, NamedSharding(mesh, specs.get(k, P()))) for k, x in params.items()}
    return jax.tree.map(np.asarray, state), {"params": placed, "opt": TX.init(placed)}


def _batch(examples: int, seed: int = 0) -> Any:
    return {"x": np.random.default_rng(seed).normal(size=(examples, D)).astype(np.float32)}


@pytest.mark.filterwarnings("ignore::autopar.RecompileWarning")
def test_dense_parameters() -> None:
    """Along the axis along which they came, their slots with them; also for other shapes of the batch."""
    theirs, mine = _state(FOUR, w=P(None, "data"), v=P("data"))
    planned = autopar.parallelize(_net, mesh=FOUR)
    for examples in (8, 8, 16, 16):
        batch = _batch(examples)
        (mine, a), (theirs, b) = planned(mine, batch), jax.jit(_net)(theirs, batch)
        same((mine, a), (theirs, b))
        for tree in (mine["params"], mine["opt"][0].sum_of_squares):
            found = {k: shapes(x) for k, x in tree.items()}
            assert found == {"w": {(D, 3)}, "b": {(12,)}, "v": {(3, 3)}}
    assert planned.plan.sharded


def test_what_the_strategy_says_counts() -> None:
    _, mine = _state(FOUR, w=P(None, "data"))
    mine, _ = autopar.parallelize(_net, mesh=FOUR, strategy="allreduce")(mine, _batch(8))
    assert shapes(mine["params"]["w"]) == {(D, 12)}


def test_two_axes_of_another_mesh() -> None:
    """The same devices: they have a shard each."""
    two = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    theirs, mine = _state(two, w=P("a", "b"))
    (mine, a), (theirs, b) = autopar.parallelize(_net, mesh=FOUR)(mine, _batch(8)), jax.jit(_net)(theirs, _batch(8))
    same((mine, a), (theirs, b))
    assert shapes(mine["params"]["w"]) == {(D // 4, 12)}


TWO = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
DIVIDED = {"w": P(None, "model"), "b": P("model"), "v": P("model")}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "Say tensor_axis='model': weights"),
        ({"sync": autopar.sync.Average(every=2, clients=1)}, "Say tensor_axis='model': weights"),
        ({"tensor_axis": "model", "strategy": "allreduce"}, None),
    ],
)
def test_what_cannot_stay_is_told_of(options: Any, told: str | None) -> None:
    """Of shards over another axis of the mesh, unless the strategy says so."""
    theirs, mine = _state(TWO, **DIVIDED)
    planned = autopar.parallelize(_net, mesh=TWO, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", autopar.SlowPlanWarning)
        new, a = planned(mine, _batch(8))
    found = [str(w.message) for w in caught if "each of 4 devices has all of it" in str(w.message)]
    assert len(found) == (told is not None) and (told is None or told in found[0]), found
    same((autopar.materialize(new), a), jax.jit(_net)(theirs, _batch(8)))


@pytest.mark.parametrize("options", [{}, {"sync": autopar.sync.Average(every=2, clients=1)}], ids=["", "sync"])
def test_shards_over_a_tensor_axis_stay(options: Any) -> None:
    """Though nothing is known of the devices, by which "auto" would divide products."""
    theirs, mine = _state(TWO, **DIVIDED)
    planned = autopar.parallelize(_net, mesh=TWO, tensor_axis="model", **options)
    for k in range(3):
        (mine, a), (theirs, b) = planned(mine, _batch(8, k)), jax.jit(_net)(theirs, _batch(8, k))
        same((autopar.materialize(mine), a), (theirs, b))
        for tree in (mine["params"], mine["opt"][0].sum_of_squares):
            found = {k: shapes(getattr(x, "own", x)) for k, x in tree.items()}
            assert found == {"w": {(D, 6)}, "b": {(6,)}, "v": {(6, 3)}}
    assert "In shards, as they came: params/b, params/v, params/w" in explained(planned)


def test_shards_over_both_axes_are_told_of() -> None:
    theirs, mine = _state(TWO, w=P("data", "model"))
    planned = autopar.parallelize(_net, mesh=TWO, tensor_axis="model")
    with pytest.warns(autopar.SlowPlanWarning, match=r"params/w .*came in shards.*data axis 'data' alone.*P\('data'\)"):
        (mine, a) = planned(mine, _batch(8))
    same((mine, a), jax.jit(_net)(theirs, _batch(8)))


def test_replicas_of_a_client_stay_in_shards() -> None:
    theirs, mine = _state(FOUR, w=P(None, "data"), v=P("data"))
    planned = autopar.parallelize(_net, mesh=FOUR, sync=autopar.sync.Average(every=2, clients=1))
    for k in range(3):
        (mine, a), (theirs, b) = planned(mine, _batch(8, k)), jax.jit(_net)(theirs, _batch(8, k))
        same((autopar.materialize(mine), a), (theirs, b))
        found = {k: shapes(x.own) for k, x in mine["params"].items()}
        assert found == {"w": {(D, 3)}, "b": {(12,)}, "v": {(3, 3)}}


def test_shards_whose_state_servers_keep_are_told_of() -> None:
    theirs, mine = _state(FOUR, w=P(None, "data"))
    planned = autopar.parallelize(_net, mesh=FOUR, sync=autopar.sync.Async(staleness=1, clients=1))
    with pytest.warns(autopar.SlowPlanWarning, match=r"params/w .*came in shards.*servers keep all of it.*Average"):
        new, a = planned(mine, _batch(8))
    same((autopar.materialize(new), a), jax.jit(_net)(theirs, _batch(8)))


def test_leaves_that_are_carried_with_the_examples_are_no_parameters() -> None:
    def carries(state: Any, x: jax.Array) -> Any:
        w, h = state
        h = jnp.tanh(h + x @ w)
        loss, g = jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(h + x @ w)) ** 2))(w)
        return (w - 0.1 * g, h), loss

    theirs = (np.ones((D, D), np.float32), np.zeros((16, D), np.float32))
    mine = jax.device_put(theirs, (NamedSharding(FOUR, P()), NamedSharding(FOUR, P("data"))))
    planned = autopar.parallelize(carries, mesh=FOUR)
    for k in range(2):
        x = _batch(16, k)["x"]
        (mine, a), (theirs, b) = planned(mine, x), jax.jit(carries)(theirs, x)
        same((mine, a), (theirs, b))
    assert shapes(mine[1]) == {(4, D)} and not planned.plan.sharded
