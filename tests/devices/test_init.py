"""`init`: a state made share by share is the state that `jax.jit` makes, and the step takes it without a copy."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import AxisType

import autopar
from autopar import jax_compat
from autopar.state.init import Maker
from tests.support.initializers import bits
from tests.support.meshes import mesh_of
from tests.support.pairs import diagonal
from tests.support.row_steps import TX, ids_in, same, step

WIDTH = 3


def maker(rows: int) -> Any:
    def make_state(key: Any, scale: Any = 1.0) -> Any:
        a, b = jax.random.split(key)
        params = {"emb": scale * jax.random.normal(a, (rows, WIDTH)), "w": jax.random.uniform(b, (WIDTH, WIDTH))}
        return {"params": params, "opt": TX.init(params)}

    return make_state


@pytest.mark.parametrize(("rows", "devices"), diagonal([48, 2, 41], [1, 3, 4]))
def test_the_bits_of_a_plain_init(rows: int, devices: int) -> None:
    planned = autopar.parallelize(step, strategy="ps", mesh=mesh_of(devices))
    state = autopar.init(maker(rows), jax.random.key(0), 0.3, step=planned, batch=ids_in(0, rows))
    expected = jax.jit(maker(rows))(jax.random.key(0), 0.3)
    bits(state, expected)
    emb = state["params"]["emb"]
    assert isinstance(emb, autopar.Table) == (devices > 1 and rows % devices != 0)
    for k in range(2):
        (state, a), (expected, b) = planned(state, ids_in(0, rows, k)), jax.jit(step)(expected, ids_in(0, rows, k))
        same((state, a), (expected, b))


@pytest.mark.parametrize(("rows", "impl"), diagonal([41, 48], ["threefry2x32", "rbg"]))
def test_made_whole_and_then_spread(rows: int, impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CPUs under newer versions of JAX, where a shard of an initializer isn't the initializer's shard."""
    planned = autopar.parallelize(step, strategy="ps", mesh=mesh_of(4))
    key, batch = jax.random.key(0, impl=impl), ids_in(0, rows)
    found = {}
    for whole in (False, True):
        monkeypatch.setattr(jax_compat, "rounds_by_shape", lambda whole=whole: whole)
        found[whole] = autopar.init(maker(rows), key, 0.3, step=planned, batch=batch)
    bits(found[True], jax.jit(maker(rows))(key, 0.3))
    same(planned(found[True], batch), jax.jit(step)(jax.jit(maker(rows))(key, 0.3), batch))
    assert jax.tree.map(where, found[True]) == jax.tree.map(where, found[False])


def where(leaf: Any) -> Any:
    stored = leaf.stored if isinstance(leaf, autopar.Table) else leaf
    return stored.sharding, stored.shape


@pytest.mark.parametrize("rows", [40, 41])
def test_the_first_step_copies_nothing(rows: int) -> None:
    """Not even with the batch's shapes alone."""
    planned = autopar.parallelize(step, strategy="ps", mesh=mesh_of(4))
    batch = ids_in(0, rows)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    state = autopar.init(maker(rows), jax.random.key(0), step=planned, batch=shapes)
    before = buffers(state)
    new, _ = planned(state, batch)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert buffers(new) == before


def buffers(state: Any) -> list[list[int]]:
    """Where the table's and its slot's shards are."""
    leaves = [x.stored if isinstance(x, autopar.Table) else x for x in jax.tree.leaves(state)]
    return [[s.data.unsafe_buffer_pointer() for s in x.addressable_shards] for x in leaves if x.size > WIDTH * WIDTH]


@pytest.mark.parametrize("rows", [80_000, 80_001])
def test_no_device_holds_the_table(rows: int) -> None:
    planned = autopar.parallelize(step, strategy="ps", mesh=mesh_of(8))
    make = maker(rows)
    traced = jax_compat.trace(make, (jax.random.key(0),), {})
    # Where XLA rounds shards otherwise, another program makes all on one device first, for the sake of the bits.
    found = Maker.of(planned, "make", traced, ids_in(0, rows), None)
    memory = found.run.lower(jax.random.key(0)).compile().memory_analysis()
    table = rows * WIDTH * 4
    share = table / 8
    assert memory.output_size_in_bytes == pytest.approx(2 * share, rel=0.01)  # with its slot
    assert memory.temp_size_in_bytes < 0.75 * table
    plain = jax.jit(make).lower(jax.random.key(0)).compile().memory_analysis()
    assert plain.output_size_in_bytes > 1.9 * table


def test_a_flax_state_in_several_arguments() -> None:
    """`call` says where the parts of what is made go; what isn't an array comes from around the function."""
    model = nn.Embed(41, 4)
    tx = optax.adagrad(0.1)

    def make(key: Any) -> TrainState:
        return TrainState.create(apply_fn=model.apply, params=model.init(key, jnp.zeros(2, jnp.int32)), tx=tx)

    def train(scale: Any, state: TrainState, ids: Any) -> Any:
        loss, g = jax.value_and_grad(lambda p: scale * jnp.mean(model.apply(p, ids) ** 2))(state.params)
        return state.apply_gradients(grads=g), loss

    planned = autopar.parallelize(train, strategy="ps", mesh=mesh_of(4))
    scale, ids = jnp.float32(2.0), jnp.arange(8)
    state = autopar.init(make, jax.random.key(3), step=planned, call=lambda made: (scale, made, ids))
    expected = jax.jit(make)(jax.random.key(3))
    assert isinstance(state.params["params"]["embedding"], autopar.Table)
    same(planned(scale, state, ids), train(scale, expected, ids))
    assert len(planned._planned) == 1, "the first call has the plan that the state was made for"


def test_several_states_and_a_named_one() -> None:
    def two(params: Any, opt: Any, batch: Any) -> Any:
        new, metrics = step({"params": params, "opt": opt}, batch)
        return new["params"], new["opt"], metrics

    planned = autopar.parallelize(two, strategy="ps", mesh=mesh_of(4))
    batch = ids_in(0, 41)
    made = autopar.init(
        maker(41), jax.random.key(0), step=planned, call=lambda made: (made["params"], made["opt"], batch)
    )
    bits(made, jax.jit(maker(41))(jax.random.key(0)))
    assert sum(isinstance(x, autopar.Table) for x in jax.tree.leaves(made)) == 2

    turned = autopar.parallelize(lambda b, s: step(s, b), strategy="ps", mesh=mesh_of(4), state_argnums=1)
    state = autopar.init(maker(41), jax.random.key(0), step=turned, batch=batch)
    bits(state, made)


def test_a_mesh_with_two_axes_and_a_key_on_another_device() -> None:
    kinds = (AxisType.Auto, AxisType.Auto)
    mesh = jax.make_mesh((2, 3), ("model", "batch"), axis_types=kinds, devices=jax.devices()[:6])
    planned = autopar.parallelize(step, strategy="ps", mesh=mesh, data_axis="batch")
    batch = {"ids": ids_in(0, 41)["ids"][:6]}
    key = jax.device_put(jax.random.key(0), jax.devices()[7])
    state = autopar.init(maker(41), key, np.float32(0.5), step=planned, batch=batch)
    expected = jax.jit(maker(41))(jax.random.key(0), np.float32(0.5))
    bits(state, expected)
    same(planned(state, batch), jax.jit(step)(expected, batch))


def test_what_init_refuses() -> None:
    planned = autopar.parallelize(step, mesh=mesh_of(4))
    key, batch = jax.random.key(0), ids_in(0, 41)
    with pytest.raises(autopar.ArgumentsError, match="a step that parallelize returned, not a function"):
        autopar.init(maker(41), key, step=step, batch=batch)  # type: ignore[arg-type]
    with pytest.raises(autopar.ArgumentsError, match="what step is called with: batch=..., or"):
        autopar.init(maker(41), key, step=planned)
    with pytest.raises(autopar.ArgumentsError, match="call gives a tuple of the step's arguments, not a dict"):
        autopar.init(maker(41), key, step=planned, call=lambda made: made)
    with pytest.raises(autopar.ArgumentsError, match="step can't be traced with what make_state returns.*KeyError"):
        autopar.init(maker(41), key, step=planned, batch={"words": batch["ids"]})
    with pytest.raises(autopar.ArgumentsError, match=r"(?s)isn't a function from arrays to arrays.*init\(lambda key"):
        autopar.init(lambda model: model, object(), step=planned, batch=batch)
    evaluate = autopar.parallelize(lambda s, b: jnp.sum(s["params"]["emb"][b["ids"]]), mesh=mesh_of(4))
    with pytest.raises(autopar.StateError, match="nothing that make_state returns is state of <lambda>"):
        autopar.init(maker(41), key, step=evaluate, batch=batch)
    third = autopar.parallelize(lambda a, b, s: s, mesh=mesh_of(4), state_argnums=2)
    with pytest.raises(autopar.ArgumentsError, match="has its state in argument 2.*call=lambda made"):
        autopar.init(maker(41), key, step=third, batch=batch)
