"""Steps of Equinox and Haiku, as they are found."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.integrations import equinox as aeqx
from tests.support.explained import explained

ROWS = 5000


def batches(count: int = 3) -> list[dict[str, jax.Array]]:
    rng = np.random.default_rng(0)
    return [
        {"ids": jnp.asarray(rng.integers(0, ROWS, 8)), "y": jnp.asarray(rng.normal(size=8), jnp.float32)}
        for _ in range(count)
    ]


def check_same(mine: Any, plain: Any) -> None:
    a, b = (jax.tree.leaves(autopar.materialize(x)) for x in (mine, plain))
    for x, y in zip(a, b, strict=True):
        if hasattr(x, "shape"):
            np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6)
        else:
            assert x is y


@pytest.mark.parametrize(
    "tx",
    [pytest.param(optax.adagrad(0.1), id="adagrad", marks=pytest.mark.long), pytest.param(optax.adam(0.1), id="adam")],
)
def test_equinox(tx: Any) -> None:
    eqx = pytest.importorskip("equinox")

    class Model(eqx.Module):
        emb: Any
        mlp: Any
        activation: Any
        scale: float
        width: int = eqx.field(static=True)

        def __init__(self, key: jax.Array) -> None:
            self.width = 4
            self.scale = 0.5
            self.activation = jnp.tanh
            self.emb = eqx.nn.Embedding(ROWS, self.width, key=key)
            self.mlp = eqx.nn.MLP(self.width, "scalar", 8, 1, activation=jax.nn.gelu, key=key)

        def __call__(self, i: jax.Array) -> jax.Array:
            return self.mlp(self.activation(self.emb(i)) * self.scale)

    def step(model: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, Any]:
        def loss_fn(model: Any) -> jax.Array:
            return jnp.mean((jax.vmap(model)(batch["ids"]) - batch["y"]) ** 2)

        loss, grads = eqx.filter_value_and_grad(loss_fn)(model)
        updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), opt_state, loss

    planned, jitted = aeqx.parallelize(step, strategy="ps"), eqx.filter_jit(step)
    model, plain = Model(jax.random.key(0)), Model(jax.random.key(0))
    slots, plain_slots = (tx.init(eqx.filter(m, eqx.is_array)) for m in (model, plain))
    for batch in batches():
        model, slots, loss = planned(model, slots, batch)
        plain, plain_slots, other = jitted(plain, plain_slots, batch)
        np.testing.assert_allclose(loss, other, rtol=1e-5)
        read = autopar.materialize(model)
        np.testing.assert_allclose(jax.vmap(read)(batch["ids"]), jax.vmap(plain)(batch["ids"]), rtol=1e-4, atol=1e-5)
    check_same(autopar.materialize((model, slots)), (plain, plain_slots))
    assert isinstance(model, Model) and model.activation is jnp.tanh and model.scale == 0.5
    assert [p.path for p in planned.plan.parameters if p.lifted] == ["model/emb/weight"]
    assert autopar.verify(planned, model, slots, batches(1)[0]).ok
    assert "model/emb/weight: sparse" in explained(planned)
    assert "stablehlo" in planned.lower(model, slots, batches(1)[0]).as_text()


def test_an_equinox_module_of_arrays_needs_no_integration() -> None:
    eqx = pytest.importorskip("equinox")

    def step(emb: Any, ids: jax.Array) -> tuple[Any, jax.Array]:
        loss, grads = eqx.filter_value_and_grad(lambda m: jnp.sum(jax.vmap(m)(ids) ** 2))(emb)
        return eqx.apply_updates(emb, jax.tree.map(lambda g: -0.1 * g, grads)), loss

    planned = autopar.parallelize(step)
    emb = eqx.nn.Embedding(ROWS, 4, key=jax.random.key(0))
    assert autopar.verify(planned, emb, jnp.array([1, 2, 2])).ok
    assert planned.plan.parameters[0].lifted


def test_leaves_that_are_no_arrays_are_static() -> None:
    def step(model: Any, ids: jax.Array, *, sign: str) -> tuple[Any, Any]:
        grads = jax.grad(lambda t: model["f"](t[ids]).sum())(model["t"])
        return {**model, "t": model["t"] - (0.1 if sign == "-" else -0.1) * grads}, {"sign": sign, "sum": ids.sum()}

    planned = aeqx.parallelize(step, strategy="ps")
    table, ids = jnp.ones((ROWS, 2)), jnp.array([3, 5])
    model, told = planned({"t": table, "f": jnp.sin}, ids, sign="-")
    assert told["sign"] == "-" and model["f"] is jnp.sin and planned.plan.parameters[0].lifted
    np.testing.assert_allclose(model["t"][3], 1 - 0.1 * np.cos(1), rtol=1e-6)
    with pytest.warns(autopar.RecompileWarning, match="no array"):
        model, _ = planned(model, ids, sign="+")
    np.testing.assert_allclose(model["t"][4], 1)
    with pytest.raises(autopar.ArgumentsError, match="static as it is"):
        aeqx.parallelize(step, static_argnames="sign")
    with pytest.raises(autopar.ArgumentsError, match="must be hashable"):
        planned({"t": table, "f": {1, 2}}, ids, sign="-")


def check_haiku_style(init: Any, apply: Any, path: str) -> None:
    """A step of a pair (init, apply), its state a NamedTuple-like tuple of params, slots and key."""
    tx = optax.adagrad(0.1)

    def step(state: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
        params, slots, key = state
        key, own = jax.random.split(key)
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((apply(p, own, batch["ids"]) - batch["y"]) ** 2))(params)
        updates, slots = tx.update(grads, slots)
        return (optax.apply_updates(params, updates), slots, key), {"loss": loss}

    first = batches(1)[0]
    params = init(jax.random.key(0), first["ids"])
    state = (params, tx.init(params), jax.random.key(1))
    planned = autopar.parallelize(step, donate=False)
    assert autopar.verify(planned, state, first, steps=2).ok
    assert [p.path for p in planned.plan.parameters if p.lifted] == [path]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("style", ["ARRAY_INDEX", "ONE_HOT"])
def test_haiku(style: str) -> None:
    hk = pytest.importorskip("haiku")

    @hk.transform
    def model(ids: jax.Array) -> jax.Array:
        x = hk.dropout(hk.next_rng_key(), 0.2, hk.Embed(ROWS, 4, lookup_style=style, name="words")(ids))
        return hk.Linear(1)(x)[..., 0]

    check_haiku_style(model.init, model.apply, "0/words/embeddings")


def test_a_pair_of_init_and_apply() -> None:
    def init(key: jax.Array, ids: jax.Array) -> Any:
        return {"words": {"embeddings": jax.random.normal(key, (ROWS, 4))}, "linear": {"w": jnp.ones(4)}}

    def apply(params: Any, key: jax.Array, ids: jax.Array) -> jax.Array:
        x = params["words"]["embeddings"][ids]
        return (x * jax.random.bernoulli(key, 0.8, x.shape)) @ params["linear"]["w"]

    check_haiku_style(init, apply, "0/words/embeddings")
