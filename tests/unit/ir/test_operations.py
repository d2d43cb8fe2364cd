"""Names of operations: ours are nobody else's, so that a primitive of any name passes through a lifted step."""

from __future__ import annotations

import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir  # noqa: TID251 - public, and how users define primitives

import autopar
from autopar.ir.operations import OPERATIONS, PREFIX, plain_name
from autopar.ir.program import ArrayType, Block, Equation, Var
from autopar.ir.verifier import verify_block

ROWS, WIDTH = 64, 8
TYPE = ArrayType((2,), np.dtype(np.float32))


def twice(name: str) -> Primitive:
    """A user's own primitive of that name: 2 x."""
    primitive = Primitive(name)
    primitive.def_impl(lambda x: 2 * x)
    primitive.def_abstract_eval(lambda x: x)
    mlir.register_lowering(primitive, mlir.lower_fun(lambda x: 2 * x, multiple_results=False))
    return primitive


USERS = [twice(plain_name(op)) for op in sorted(OPERATIONS)]


def train(state: dict[str, Any], batch: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Adagrad; among its metrics JAX's generic reduction, and a user's primitives."""

    def loss_of(params: dict[str, Any]) -> Any:
        logits = params["t"][batch["ids"]] @ params["w"]
        return jnp.mean(jnp.square(logits - batch["y"]))

    params = state["params"]
    loss, grads = jax.value_and_grad(loss_of)(params)
    sums = jax.tree.map(lambda s, g: s + g * g, state["sums"], grads)
    new = jax.tree.map(lambda p, g, s: p - 0.1 * g / jnp.sqrt(s), params, grads, sums)
    metric = jax.lax.reduce(batch["y"], np.float32(-np.inf), jnp.logaddexp, (0, 1))
    for primitive in USERS:
        metric = 0.5 * primitive.bind(metric)
    return {"params": new, "sums": sums}, (loss, metric)


def arguments() -> tuple[dict[str, Any], dict[str, Any]]:
    rng = np.random.default_rng(0)
    params = {"t": rng.normal(size=(ROWS, WIDTH)), "w": rng.normal(size=(WIDTH, 3))}
    params = jax.tree.map(jnp.float32, params)
    batch = {"ids": rng.integers(0, ROWS, 4), "y": rng.normal(size=(4, 3)).astype(np.float32)}
    return {"params": params, "sums": jax.tree.map(lambda p: jnp.full_like(p, 0.1), params)}, batch


def test_no_primitive_has_the_name_of_an_operation() -> None:
    gc.unfreeze()  # what tests/conftest.py took out of the collector's sight
    found = {item.name for item in gc.get_objects() if isinstance(item, Primitive)}
    assert {"reduce", "scatter-add", "scan"} < found
    assert not {name for name in found if name.startswith(PREFIX)}
    assert not found & set(OPERATIONS)


@pytest.mark.parametrize("strategy", ["ps", ("ps", "hosts")])
def test_primitives_of_any_name_pass(strategy: Any) -> None:
    step = autopar.parallelize(train, strategy={"params/t": strategy}, donate=False)
    state, batch = arguments()
    new, told = step(state, batch)
    assert step.latest is not None and step.latest.compiled.plan.lifts
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(np.asarray(a), b, rtol=1e-6),
        (autopar.materialize(new), told),
        jax.jit(train)(state, batch),
    )


@pytest.mark.parametrize("op", ["reduce", f"{PREFIX}reduces"])
def test_the_verifier_knows_all_operations(op: str) -> None:
    given, made = Var(TYPE), Var(TYPE)
    with pytest.raises(AssertionError, match="is no operation of autopar and has no primitive"):
        verify_block(Block((given,), (Equation(op, (given,), (made,)),), (made,)), set(), "step")
