"""`microbatches=`: the plain step's numbers, whatever the batch is divided into; or an error with the line."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.planning.verify import compare_runs
from tests.support.explained import explained
from tests.support.microbatched import EXAMPLES, batch, difference, language_model
from tests.support.pairs import diagonal
from tests.zoo import MODELS, OPTIMIZERS

CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))


@pytest.fixture(autouse=True)
def _float64() -> Any:
    with jax.enable_x64(True):
        yield


KINDS = {"plain": {}, "tied dropout": {"tied": True, "dropout": 0.2}, "remat": {"remat": True}}


@pytest.mark.parametrize(("options", "count"), diagonal(KINDS, [2, 3, EXAMPLES]))
def test_the_same_numbers(options: dict[str, Any], count: int) -> None:
    step, make = language_model(CLIPPED, **options)
    assert difference(autopar.parallelize(step, microbatches=count), step, make) < 1e-12


def test_an_update_that_runs_in_a_branch() -> None:
    step, make = language_model(optax.MultiSteps(CLIPPED, 2))
    assert difference(autopar.parallelize(step, microbatches=3), step, make, steps=4) < 1e-12


@pytest.mark.parametrize("tx", [optax.adagrad(0.1), optax.adam(1e-2), optax.sgd(0.1, momentum=0.9)])
def test_tables_on_their_touched_rows(tx: optax.GradientTransformation) -> None:
    step, make = language_model(tx)
    planned = autopar.parallelize(step, microbatches=3, strategy="ps")
    assert difference(planned, step, make) < 1e-12
    assert planned.plan is not None and planned.plan.lifts and planned.plan.microbatches == 3


def test_a_state_that_is_carried_along_with_the_examples() -> None:
    def step(state: Any, given: jax.Array) -> tuple[Any, jax.Array]:
        def loss_of(w: jax.Array) -> tuple[jax.Array, jax.Array]:
            hidden = jnp.tanh(state["hidden"] @ w + given)
            return jnp.mean(hidden**2), hidden

        (loss, hidden), grad = jax.value_and_grad(loss_of, has_aux=True)(state["w"])
        return {"w": state["w"] - 0.1 * grad, "hidden": hidden}, loss

    state = {"w": jnp.eye(4), "hidden": jnp.zeros((6, 4))}
    given = jax.random.normal(jax.random.key(0), (6, 4))
    planned = autopar.parallelize(step, microbatches=3, donate=False)
    for _ in range(2):
        expected, actual = jax.jit(step)(state, given), planned(state, given)
        for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-14)
        state = expected[0]


@pytest.mark.parametrize(("model", "strategy"), diagonal(["transformer_tied", "multi_hot"], ["allreduce", "ps"]))
def test_models(model: str, strategy: str) -> None:
    """Against the float64 oracle, as the contract says."""
    case = MODELS[model].make(OPTIMIZERS["clipped"].make())
    entry = autopar.parallelize(case.step, microbatches=2, strategy=strategy).planned_for(case.state, case.batches(0))
    found = compare_runs(entry, [jax.tree.leaves((case.state, case.batches(k))) for k in range(4)])
    assert found.ok, str(found)


def test_sums_of_small_floats_are_kept_in_float32() -> None:
    """4096 gradients of 1 in bfloat16, whose sums end at 256 if each is rounded."""

    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        grad = jax.grad(lambda w: jnp.sum(w * x))(w)
        return w - grad, grad

    x = jnp.ones(4096, jnp.bfloat16)
    _, grad = autopar.parallelize(step, microbatches=4096, donate=False)(jnp.ones((), jnp.bfloat16), x)
    assert grad.dtype == jnp.bfloat16 and float(grad) == 4096


def test_activations_of_one_microbatch_live_at_a_time() -> None:
    def step(ws: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        def loss_of(ws: Any) -> jax.Array:
            y = x
            for w in ws:
                y = jnp.tanh(y @ w)
            return jnp.mean(y**2)

        loss, grads = jax.value_and_grad(loss_of)(ws)
        return [w - g for w, g in zip(ws, grads, strict=True)], loss

    ws, x = [jnp.eye(16)] * 12, jnp.ones((4096, 16))
    sizes = [
        autopar.parallelize(step, microbatches=m).lower(ws, x).compile().memory_analysis().temp_size_in_bytes
        for m in (1, 8)
    ]
    assert sizes[1] < sizes[0] / 3


def _refused(loss_of: Any, **options: Any) -> str:
    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, grad = jax.value_and_grad(loss_of)(w, x)
        return w - grad, loss

    with pytest.raises(autopar.AutoparError) as error:
        autopar.parallelize(step, **options)(jnp.eye(4), jnp.ones((6, 4)))
    return str(error.value)


def test_examples_that_depend_on_one_another_are_refused_with_their_line() -> None:
    def batch_norm(w: jax.Array, x: jax.Array) -> jax.Array:
        h = x @ w
        return jnp.mean(jnp.tanh(h - h.mean(0)))

    def pairs(w: jax.Array, x: jax.Array) -> jax.Array:
        h = x @ w
        return jnp.mean(h @ h.T)

    def loop(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda total, part: (total + jnp.tanh(part @ w).sum(), None), 0.0, x.reshape(3, 2, 4))[0]

    said = _refused(loop, microbatches=2)
    assert "meet those of other microbatches" in said and "test_microbatches.py:" in said
    said = _refused(batch_norm, microbatches=2)
    assert "depend on a sum over all" in said and "test_microbatches.py:" in said
    said = _refused(pairs, microbatches=2)
    assert "meet those of other microbatches" in said and "test_microbatches.py:" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"microbatches": 4}, "doesn't divide the batch: x has 6 examples along axis 0"),
        ({"microbatches": 2, "batch_axis": {"x": None}}, "nothing in the batch has examples"),
        ({"microbatches": 0}, "give a whole number, 1 or more"),
        ({"microbatches": True}, "give a whole number"),
    ],
)
def test_what_cannot_be_divided(options: dict[str, Any], said: str) -> None:
    assert said in _refused(lambda w, x: jnp.mean(x @ w), **options)


def test_what_is_printed_of_sums(capsys: pytest.CaptureFixture[str]) -> None:
    """Once, of the whole batch."""

    def loss_of(w: jax.Array, x: jax.Array) -> jax.Array:
        loss = jnp.sum(jnp.tanh(x @ w))
        jax.debug.print("loss {}", loss)
        return loss

    def printing(w: jax.Array, x: jax.Array) -> jax.Array:
        jax.debug.print("{}", x @ w)
        return jnp.mean(x @ w)

    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, grad = jax.value_and_grad(loss_of)(w, x)
        return w - grad, loss

    _, loss = autopar.parallelize(step, microbatches=2, donate=False)(jnp.eye(4), jnp.ones((6, 4)))
    jax.effects_barrier()
    assert capsys.readouterr().out.split() == ["loss", str(loss)]
    said = _refused(printing, microbatches=2)
    assert "debug_print has an effect" in said and "return what it tells" in said and "test_microbatches.py:" in said


def test_a_plan_says_so(tmp_path: Any) -> None:
    step, make = language_model(CLIPPED)
    plan = autopar.plan(autopar.parallelize(step, microbatches=3), make(), batch(0))
    plan.save(tmp_path / "plan.json")
    assert autopar.Plan.load(tmp_path / "plan.json").microbatches == 3
    assert "3 microbatches" in explained(autopar.parallelize(step, microbatches=3), make(), batch(0))
