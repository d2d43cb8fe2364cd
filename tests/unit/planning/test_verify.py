"""`verify` finds what is wrong, and only that."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.planning.verify import compare_runs, compared_values, replayed
from tests.support.pairs import diagonal
from tests.zoo import MODELS, OPTIMIZERS


def mutated(step: Any, tx: optax.GradientTransformation, factor: float) -> Any:
    """The zoo's step with one gradient scaled: done by wrapping the optimizer."""
    del step
    return optax.GradientTransformation(
        tx.init, lambda g, s, p=None: tx.update(jax.tree.map(lambda x: x * jnp.float32(factor), g), s, p)
    )


@pytest.mark.parametrize(("optimizer", "model"), diagonal(["sgd", "adagrad"], ["two_tower", "lstm_lm"]))
def test_a_gradient_that_is_one_percent_wrong_fails(model: str, optimizer: str) -> None:
    tx = OPTIMIZERS[optimizer].make()
    right = MODELS[model].make(tx)
    wrong = MODELS[model].make(mutated(None, tx, 1.01))
    entry = autopar.parallelize(right.step, strategy="ps", donate=False).planned_for(right.state, right.batches(0))
    bad = autopar.parallelize(wrong.step, strategy="ps", donate=False).planned_for(wrong.state, wrong.batches(0))
    batches = [jax.tree.leaves((right.state, right.batches(i))) for i in range(20)]
    assert compare_runs(entry, batches).ok
    found = compare_runs(entry, batches, run=bad.run)
    states = {i.path for i in entry.compiled.analysed.inputs if i.role == "state"}
    wrong_leaves = {leaf.path for leaf in found.leaves if not leaf.ok} & states
    assert set(right.tables) <= wrong_leaves, str(found)


def step(state: dict[str, Any], batch: jax.Array) -> tuple[dict[str, Any], jax.Array]:
    loss, grad = jax.value_and_grad(lambda t: jnp.mean(jnp.tanh(t[batch]) ** 2))(state["table"])
    return {"table": state["table"] - 0.5 * grad}, loss


def example() -> tuple[dict[str, Any], jax.Array]:
    return {"table": jax.random.normal(jax.random.key(0), (50, 3))}, jnp.array([1, 4, 4, 7])


def test_verify_returns_a_report_and_donates_nothing() -> None:
    planned = autopar.parallelize(step, strategy="ps")
    state, batch = example()
    report = autopar.verify(planned, state, batch, steps=3)
    assert report.ok and "all agree" in repr(report) and "table" in str(report)
    assert not state["table"].is_deleted()


def test_verify_raises_with_the_leaf_that_differs() -> None:
    planned = autopar.parallelize(step, strategy="ps")
    state, batch = example()
    entry = planned.planned_for(state, batch)
    run = entry.run
    entry.run = lambda *xs: [run(*xs)[0] + jnp.float32(1e-3), *run(*xs)[1:]]
    with pytest.raises(autopar.VerificationError, match="WRONG .*table"):
        autopar.verify(planned, state, batch)


def complex_step(state: dict[str, Any], ids: jax.Array) -> tuple[dict[str, Any], jax.Array]:
    """Real and complex numbers in turn, and loops that carry both."""

    def loss_fn(p: dict[str, Any]) -> jax.Array:
        z = p["z"][ids] * jnp.exp(1j * p["w"][ids])
        (carried, total), _ = jax.lax.scan(lambda c, x: ((c[0] * x, c[1] + jnp.abs(c[0]).sum()), None), (z[0], 0.1), z)
        return (jnp.abs(z * 1.7) ** 2).mean() + (p["w"][ids] * z.real).sum() + (total + carried.imag).sum()

    grads = jax.grad(loss_fn)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * jnp.conj(g), state, grads), jnp.fft.fft(state["z"][0])


def complex_example() -> tuple[dict[str, Any], jax.Array]:
    parts = jax.random.normal(jax.random.key(0), (3, 50, 3))
    return {"z": jax.lax.complex(parts[0], parts[1]), "w": parts[2]}, jnp.array([1, 4, 4, 7])


@pytest.mark.parametrize("strategy", ["ps", "allreduce"])
def test_complex_leaves_have_the_same_tolerance(strategy: Any) -> None:
    """Of rounding they may be off, in either part, of 1% of the change in one part they may not."""
    entry = autopar.parallelize(complex_step, strategy=strategy).planned_for(*complex_example())
    batches = [jax.tree.leaves(complex_example())] * 3
    k = next(k for k, out in enumerate(entry.compiled.analysed.outputs) if out.path.endswith("z"))

    def changed(by: Any) -> Any:
        def run(*leaves: Any) -> list[Any]:
            outs = list(entry.plain(*leaves))
            outs[k] = by(outs[k], leaves[-2])
            return outs

        return compare_runs(entry, batches, run=run)

    assert compare_runs(entry, batches).ok
    assert changed(lambda new, old: new + 1e-7 - 1e-7j).ok
    for factor in (0.01, 0.01j):
        found = changed(lambda new, old, by=factor: new + by * jnp.abs(new - old).max())
        assert "z" in {leaf.path for leaf in found.leaves if not leaf.ok}, str(found)


def test_a_replay_compares_imaginary_parts() -> None:
    assert compared_values(np.array([1 + 2j]), np.array([1 + 3j])) == (2.0, 1.0)


def test_lazy_is_compared_with_the_lazy_oracle() -> None:
    case = MODELS["multi_hot"].make(OPTIMIZERS["adam"].make())
    lazy = autopar.parallelize(case.step, sparse="lazy", strategy="ps", donate=False)
    assert autopar.verify(lazy, case.state, case.batches(0), steps=4).ok
    assert lazy.plan is not None and any(p.lifted for p in lazy.plan.parameters)
    exact = autopar.parallelize(case.step, donate=False)
    state_lazy = state_exact = case.state
    for k in range(3):
        state_lazy, _ = lazy(state_lazy, case.batches(k))
        state_exact, _ = exact(state_exact, case.batches(k))
    pairs = zip(jax.tree.leaves(state_lazy), jax.tree.leaves(state_exact), strict=True)
    assert any(not np.allclose(a, b) for a, b in pairs), "lazy Adam is another function"


def test_a_step_that_is_no_function_of_its_arguments() -> None:
    counter = itertools.count(1)

    def impure(state: dict[str, Any], batch: jax.Array) -> tuple[dict[str, Any], jax.Array]:
        new, loss = step(state, batch)
        return new, loss * next(counter)

    with pytest.raises(autopar.StepError, match=r"isn't a function of its arguments.*test_verify\.py"):
        autopar.verify(autopar.parallelize(impure), *example())


def test_a_replay_may_err_only_where_programs_do_not_repeat_their_bits(
    monkeypatch: pytest.MonkeyPatch, environment: Callable[..., None]
) -> None:
    """On GPUs scatters add by atomics."""
    rounding, lost_push = 3e-6, 0.1
    assert replayed("w", 1.0, 0.0).ok and not replayed("w", 1.0, rounding).ok
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert replayed("w", 1.0, rounding).ok and not replayed("w", 1.0, lost_push).ok
    environment(XLA_FLAGS="--xla_gpu_deterministic_ops=true")
    assert not replayed("w", 1.0, rounding).ok
