"""`pull_whole`: what is looked up and pushed of dense leaves on hosts, and that it changes no result."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from autopar import jax_compat
from autopar.backends.emit import emit
from autopar.ir.program import Input, Output, Program
from autopar.ir.trace import block_of
from autopar.passes.classify import classify
from autopar.passes.normalize import normalize
from autopar.passes.pull_whole import pull_whole

HOSTS = ("ps", "hosts")
SHAPE = (70, 6)
TX = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.01))


def adam(state: Any, x: jax.Array) -> Any:
    """Clipped by a norm; 16-bit products; half of the rows are frozen by a mask."""
    grads = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w.astype(jnp.bfloat16))).astype(jnp.float32))(state["w"])
    updates, opt = TX.update(grads, state["opt"])
    is_trained = jnp.arange(SHAPE[0])[:, None] % 2 == 0
    new = jnp.where(is_trained, state["w"] + updates, state["w"])
    return {"opt": opt, "w": new}, jnp.linalg.norm(new, axis=0)


def normalized() -> tuple[Program, list[jax.Array]]:
    """The step as the passes before have it, and arguments."""
    w = jnp.asarray(np.random.default_rng(0).normal(size=SHAPE), jnp.float32)
    state, x = {"opt": TX.init(w), "w": w}, jnp.ones((4, SHAPE[0]), jnp.bfloat16)
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    inputs = (*(Input(name, "state") for name in names), Input("x", "batch"))
    outputs = (*(Output(name, k) for k, name in enumerate(names)), Output("norms", None))
    block = block_of(jax_compat.trace(adam, (state, x), {}).jaxpr)
    program, _ = classify(normalize(Program(block, inputs, outputs))[0])
    return program, [*(leaf for _, leaf in leaves), x]


@pytest.mark.parametrize("strategy", [{"w": HOSTS}, {"opt/**": HOSTS}], ids=["by name", "by its slots"])
def test_the_leaf_is_pulled_and_its_gradient_is_pushed(strategy: Any) -> None:
    """Slots and norms stay with the owners. Numbers travel as devices read and make them, in 16 bits."""
    program, arguments = normalized()
    pulled, note = pull_whole(program, strategy)
    pairs = zip(pulled.block.inputs, pulled.inputs, strict=True)
    paths = {input_.path for leaf, input_ in pairs if leaf in pulled.pulled}
    assert paths == {"w", "opt/1/0/mu", "opt/1/0/nu"} and note == "; dense, and pulled from hosts: w"
    assert [pulled.inputs[k].path for k, _ in pulled.tables] == ["w"]
    gathers, scatters = ([e for e in pulled.block.equations if e.op == op] for op in ("gather", "scatter-add"))
    assert [e.outputs[0].dtype for e in gathers] == [jnp.bfloat16]
    assert sorted(str(e.outputs[0].dtype) for e in scatters) == ["bfloat16", "uint8"]  # the gradient, the mask
    wanted, found = (emit(p.block)(*arguments) for p in (program, pulled))
    for a, b in zip(wanted, found, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("strategy", [HOSTS, {"**": HOSTS}, {"w": "ps"}, {"w": "auto", "**": HOSTS}], ids=str)
def test_other_strategies_leave_the_program_alone(strategy: Any) -> None:
    program, _ = normalized()
    assert pull_whole(program, strategy) == (program, "")
