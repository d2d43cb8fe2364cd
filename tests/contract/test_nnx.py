"""Steps of flax.nnx that change their objects in place: the same as under `nnx.jit`."""

from __future__ import annotations

import functools
import types
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import autopar
from autopar.integrations import nnx as anx
from tests.support.explained import explained
from tests.support.nnx_steps import ROWS, Model, arrays, batches, check_same, loss_of, objects, train_step


@pytest.mark.parametrize("tx", [optax.adagrad(0.1), optax.adam(0.1)], ids=["adagrad", "adam"])
def test_objects_have_the_values_that_nnx_jit_gives_them(tx: Any) -> None:
    mine, plain = objects(tx), objects(tx)
    held = mine[0].emb.embedding
    step, jitted = anx.parallelize(train_step, strategy="ps"), nnx.jit(train_step)
    for batch in batches():
        np.testing.assert_allclose(step(*mine, batch), jitted(*plain, batch), rtol=1e-5)
        check_same(mine, plain)
    assert mine[0].emb.embedding is held
    assert step.plan.parameters[0].path == "model/emb/embedding" and step.plan.parameters[0].lifted
    assert len(step.steps) == 1


@pytest.mark.parametrize("tx", [optax.adagrad(0.1), optax.adam(0.1)], ids=["adagrad", "adam"])
def test_explain_verify_lower(tx: Any) -> None:
    step, mine, batch = anx.parallelize(train_step, strategy="ps"), objects(tx), batches(1)[0]
    before = arrays(*mine)
    assert autopar.verify(step, *mine, batch, steps=2).ok
    assert "model/emb/embedding: sparse" in explained(step, *mine, batch)
    assert "nnx_steps.py" in explained(step)
    assert "stablehlo" in step.lower(*mine, batch).as_text()
    assert step.__wrapped__ is train_step
    for path, value in arrays(*mine).items():
        np.testing.assert_array_equal(value, before[path])


def test_eager_reads_are_never_stale() -> None:
    tx = optax.adam(0.1)
    mine, plain = objects(tx), objects(tx)
    step, jitted = anx.parallelize(train_step, strategy="ps"), nnx.jit(train_step)
    for batch in batches():
        step(*mine, batch)
        jitted(*plain, batch)
        assert isinstance(mine[0].emb.embedding.get_raw_value(), autopar.DeferredTable)
        everything = jnp.arange(ROWS)
        for model in (mine[0], plain[0]):
            model.eval()
        np.testing.assert_allclose(mine[0](everything), plain[0](everything), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(mine[0].emb.embedding[7], plain[0].emb.embedding[7], rtol=1e-5)
        for model in (mine[0], plain[0]):
            model.train()


def test_other_transforms_read_tables_and_materialize_makes_arrays_of_them() -> None:
    mine = objects(optax.adam(0.1))
    step, (first, second, _) = anx.parallelize(train_step, strategy="ps"), batches()
    step(*mine, first)
    predict = nnx.jit(lambda model, ids: model.emb(ids))
    table = mine[0].emb.embedding.get_raw_value()
    found = predict(mine[0], first["ids"])
    assert isinstance(mine[0].emb.embedding.get_raw_value(), jax.Array)  # nnx.jit puts back what it was given
    mine[0].emb.embedding.set_raw_value(table)
    assert isinstance(table, autopar.DeferredTable) and float(table.at[0].set(7)[0, 0]) == 7
    with pytest.raises(AttributeError, match=r"table\[\.\.\.\].*materialize"):
        table.addressable_shards  # noqa: B018
    np.testing.assert_array_equal(mine[0].emb.embedding * 2, np.asarray(mine[0].emb.embedding) * 2)
    anx.materialize(*mine)
    assert isinstance(mine[0].emb.embedding.get_raw_value(), jax.Array)
    np.testing.assert_allclose(predict(mine[0], first["ids"]), found)
    step(*mine, second)
    assert isinstance(mine[0].emb.embedding.get_raw_value(), autopar.DeferredTable)


def test_evaluation_returns_no_object() -> None:
    model, _, metrics = objects(optax.sgd(0.1))
    model.eval()

    @anx.parallelize
    def evaluate(model: Any, metrics: Any, batch: Any) -> jax.Array:
        metrics.update(values=loss_of(model, batch))
        return model(batch["ids"])

    batch = batches(1)[0]
    where = model.emb.embedding[...].unsafe_buffer_pointer()
    np.testing.assert_allclose(evaluate(model, metrics, batch), model(batch["ids"]), rtol=1e-5)
    assert model.emb.embedding[...].unsafe_buffer_pointer() == where
    np.testing.assert_allclose(metrics.compute(), loss_of(model, batch), rtol=1e-6)
    assert [o.path for o in evaluate.latest.compiled.analysed.outputs if "emb" in o.path] == []


def test_two_models_of_one_form() -> None:
    def step(model: Any, target: Any, batch: Any) -> jax.Array:
        wanted = target.emb(batch["ids"])
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m.emb(batch["ids"]) - wanted) ** 2))(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), grads))
        return loss

    mine, plain = (Model(0), Model(1)), (Model(0), Model(1))
    planned, jitted = anx.parallelize(step), nnx.jit(step)
    for batch in batches():
        np.testing.assert_allclose(planned(*mine, batch), jitted(*plain, batch), rtol=1e-5)
    check_same(mine, plain)


class Shared(nnx.Module):
    """One embedding under two names."""

    def __init__(self) -> None:
        self.left = nnx.Embed(ROWS, 4, rngs=nnx.Rngs(0))
        self.right = self.left

    def __call__(self, ids: jax.Array) -> jax.Array:
        return jnp.sum(self.left(ids) * self.right(ids[::-1]), -1)


def test_shared_references() -> None:
    tx = optax.adagrad(0.1)
    mine, plain = objects(tx, Shared()), objects(tx, Shared())
    step, jitted = anx.parallelize(train_step, strategy="ps"), nnx.jit(train_step)
    for batch in batches():
        np.testing.assert_allclose(step(*mine, batch), jitted(*plain, batch), rtol=1e-5)
    check_same(mine, plain)
    assert mine[0].left is mine[0].right
    assert [p.path for p in step.plan.parameters if p.lifted] == ["model/left/embedding"]


def test_one_object_in_two_arguments_and_in_a_container() -> None:
    def step(nodes: Any, emb: Any, batch: Any) -> jax.Array:
        model, optimizer = nodes["model"], nodes["optimizer"]
        assert emb is model.emb
        loss, grads = nnx.value_and_grad(loss_of)(model, batch)
        optimizer.update(model, grads)
        return loss

    mine, plain = objects(optax.adagrad(0.1)), objects(optax.adagrad(0.1))
    planned = anx.parallelize(step)
    for batch in batches():
        a = planned({"model": mine[0], "optimizer": mine[1]}, mine[0].emb, batch=batch)
        b = nnx.jit(step)({"model": plain[0], "optimizer": plain[1]}, plain[0].emb, batch=batch)
        np.testing.assert_allclose(a, b, rtol=1e-5)
    check_same(mine, plain)
    assert planned.plan.parameters[0].lifted


class Counting(nnx.Module):
    """Its structure changes in the first call: a static attribute, a Variable; and it holds an array of its own."""

    def __init__(self) -> None:
        self.emb = nnx.Embed(ROWS, 4, rngs=nnx.Rngs(0))
        self.mode = "new"
        self.calls = nnx.data(jnp.zeros((), jnp.int32))

    def __call__(self, ids: jax.Array) -> jax.Array:
        self.mode = "used"
        self.seen = nnx.Intermediate(jnp.max(ids))
        self.calls = self.calls + 1
        return jnp.sum(self.emb(ids), -1)


def test_structure_that_changes_in_the_step() -> None:
    def step(model: Any, batch: Any) -> tuple[jax.Array, Any]:
        emb = model.emb.embedding
        loss, grads = jax.value_and_grad(lambda t: jnp.mean(t[batch["ids"]] ** 2))(emb[...])
        emb[...] -= 0.1 * grads
        model(batch["ids"])
        return loss, {"model": model, "extra": nnx.Param(loss)}

    mine, plain = Counting(), Counting()
    planned, jitted = anx.parallelize(step), nnx.jit(step)
    for k, batch in enumerate(batches()):
        if k == 1:
            with pytest.warns(autopar.RecompileWarning, match="structure"):
                loss, returned = planned(mine, batch)
        else:
            loss, returned = planned(mine, batch)
        other, _ = jitted(plain, batch)
        np.testing.assert_allclose(loss, other, rtol=1e-5)
        assert returned["model"] is mine and isinstance(returned["extra"], nnx.Param)
        assert mine.mode == "used" and int(mine.calls) == k + 1 and int(mine.seen[...]) == int(plain.seen[...])
        np.testing.assert_allclose(mine.emb.embedding[...], plain.emb.embedding[...], rtol=1e-5)
    assert planned.plan.parameters[0].lifted


@pytest.mark.parametrize("option", [{"static_argnums": 1}, {"static_argnames": "kind"}])
def test_static_arguments_methods_and_a_bare_variable(option: dict[str, Any]) -> None:
    def step(scale: Any, kind: str, ids: jax.Array) -> jax.Array:
        scale[...] += 1.0 if kind == "up" else -1.0
        return ids * scale[...]

    planned = anx.parallelize(step, **option)
    scale = nnx.Param(jnp.array(2.0))
    np.testing.assert_allclose(planned(scale, "up", jnp.ones(2)), [3, 3])
    with pytest.warns(autopar.RecompileWarning, match="static"):
        planned(scale, kind="down", ids=jnp.ones(2))
    assert float(scale[...]) == 2.0


class Owner(nnx.Module):
    """A step that is a method."""

    def __init__(self) -> None:
        self.emb = nnx.Embed(ROWS, 4, rngs=nnx.Rngs(0))

    @anx.parallelize
    def train(self, ids: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda emb: jnp.sum(emb(ids) ** 2))(self.emb)
        nnx.update(self.emb, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(self.emb), grads))
        return loss


def test_a_method() -> None:
    owner = Owner()
    first = float(owner.train(jnp.array([1, 2])))
    assert float(owner.train(jnp.array([1, 2]))) < first


def test_objects_and_arrays_in_one_argument_are_refused() -> None:
    step = anx.parallelize(lambda both: both["x"])
    with pytest.raises(autopar.ArgumentsError, match=r"holds nnx objects and something else.*argument of its own"):
        step({"model": Shared(), "x": jnp.ones(2)})


def test_options_are_checked_when_the_step_is_made() -> None:
    with pytest.raises(autopar.ArgumentsError, match="sparse="):
        anx.parallelize(train_step, sparse="never")


def test_an_old_copy_says_that_it_is_gone() -> None:
    mine = objects(optax.adagrad(0.1))
    step, batch = anx.parallelize(train_step), batches(1)[0]
    copy = nnx.clone(mine[0])  # another object, the same arrays
    step(*mine, batch)
    with pytest.raises(autopar.DonatedStateError, match="donate=False"):
        step(copy, *mine[1:], batch)
    kept = anx.parallelize(train_step, donate=False)
    copy = nnx.clone(mine[0])
    kept(*mine, batch)
    kept(copy, *mine[1:], batch)


def test_inside_nnx_jit() -> None:
    tx = optax.adagrad(0.1)
    mine, plain = objects(tx), objects(tx)
    step = anx.parallelize(train_step, strategy="ps")
    outer = nnx.jit(lambda model, optimizer, metrics, batch: step(model, optimizer, metrics, batch))
    for batch in batches():
        np.testing.assert_allclose(outer(*mine, batch), nnx.jit(train_step)(*plain, batch), rtol=1e-5)
    check_same(mine, plain)


@pytest.mark.parametrize("how", ["split", "update", "objects"])
def test_tables_of_objects_get_other_numbers_of_rows(how: str) -> None:
    """Objects are resized as they are, or by their states; the module's static number of rows goes along."""

    def plainly(old: Any, fresh: Any) -> Any:
        return old if old.shape == fresh.shape else jnp.concatenate([old[: len(fresh)], fresh[len(old) :]])

    def resized(old: Any, fresh: Any, resize: Any) -> Any:
        if how == "objects" and resize is autopar.resize:
            return resize(old, fresh)
        graph, values = nnx.split(fresh)
        if how == "update":
            nnx.update(fresh, resize(nnx.state(old), values))
            return fresh
        return nnx.merge(graph, resize(nnx.state(old), values))

    step, jitted = anx.parallelize(train_step, strategy="ps"), nnx.jit(train_step)
    found = []
    for planned, resize in ((step, autopar.resize), (jitted, functools.partial(jax.tree.map, plainly))):
        mine = objects(optax.adam(0.1))
        planned(*mine, batches(1)[0])
        larger = Model()
        larger.emb = nnx.Embed(ROWS + 500, 4, rngs=nnx.Rngs(1))
        mine = resized(mine, objects(optax.adam(0.1), larger), resize)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", autopar.RecompileWarning)
            for batch in batches():
                planned(*mine, batch | {"ids": batch["ids"] + 499})
        assert mine[0].emb.num_embeddings == ROWS + 500
        found.append(mine)
    check_same(*found)


def test_a_bound_method_is_to_be_given_its_object() -> None:
    bound = types.MethodType(train_step, objects(optax.sgd(0.1))[0])
    with pytest.raises(
        autopar.ArgumentsError, match=r"train_step is bound to an object.*parallelize\(train_step\), called"
    ):
        anx.parallelize(bound)


def test_a_step_of_objects_under_autopar_parallelize_is_named() -> None:
    model, optimizer, _ = objects(optax.sgd(0.1))

    @autopar.parallelize
    def changes(model: Any, optimizer: Any, batch: Any) -> Any:
        loss, grads = nnx.value_and_grad(loss_of)(model, batch)
        optimizer.update(model, grads)
        return loss

    with pytest.warns(autopar.StateWarning, match="'optimizer', an optimizer of flax.nnx, and returns no state"):
        changes(model, optimizer, batches(1)[0])
