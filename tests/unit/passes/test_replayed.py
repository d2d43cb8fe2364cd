"""Tables all of whose rows would have to be replayed: "auto" leaves them dense on one device, unless they are large."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.cost.model import SMALL_DEFERRED_BYTES


@pytest.mark.parametrize(
    ("kind", "strategy", "lifted"),
    [
        ("average", "auto", False),
        ("average", "ps", True),
        ("l2", "auto", False),
        ("adamw", "auto", True),
        ("bfloat16 momentum", "auto", True),
        ("bfloat16 table", "auto", False),
        ("masked gradient", "auto", True),
        ("gradient where", "auto", True),
        ("frozen row", "auto", True),
    ],
)
def test_what_would_be_replayed_in_vain(kind: str, strategy: str, lifted: bool) -> None:
    tx = optax.adamw(0.05, mu_dtype=jnp.bfloat16 if kind == "bfloat16 momentum" else None)

    def step(state: Any, ids: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            penalty = 1e-3 * jnp.sum(params["t"] ** 2) if kind == "l2" else 0.0
            table = params["t"]
            if kind == "frozen row":
                table = jnp.where(jnp.arange(len(table))[:, None] == 3, jax.lax.stop_gradient(table), table)
            return jnp.mean((table[ids] @ params["w"]) ** 2) + penalty

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        if kind == "masked gradient":
            grads["t"] = grads["t"] * (jnp.arange(len(grads["t"])) != 3)[:, None]
        if kind == "gradient where":
            grads["t"] = jnp.where(jnp.arange(len(grads["t"]))[:, None] == 3, 0.0, grads["t"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        average = jax.tree.map(lambda e, p: 0.9 * e + 0.1 * p, state["average"], params) if "average" in state else {}
        return {"params": params, "opt": opt, **({"average": average} if average else {})}, loss

    dtype = jnp.bfloat16 if kind == "bfloat16 table" else jnp.float32
    params = {"t": jnp.ones((SMALL_DEFERRED_BYTES // 20, 4), dtype), "w": jnp.ones((4, 2))}
    state = {"params": params, "opt": tx.init(params)}
    if kind == "average":
        state["average"] = jax.tree.map(jnp.copy, params)
    theirs = jax.tree.map(jnp.copy, state)
    planned, plain = autopar.parallelize(step, strategy=strategy), jax.jit(step)
    for k in range(3):
        ids = np.arange(8, dtype=np.int32) * 3 + k
        state, _ = planned(state, ids)
        theirs, _ = plain(theirs, ids)
    assert planned.plan is not None
    (table,) = planned.plan.tables
    assert table.lifted is lifted
    if not lifted and kind == "average":
        assert "would have to be replayed: the dense update is faster" in table.reason
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), autopar.materialize(state), theirs)


def test_a_loop_of_too_many_steps_is_told_how_many_it_may_have() -> None:
    tx = optax.adam(0.05)

    def step(state: Any, ids: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((p["t"][ids] @ p["w"]) ** 2))(state["params"])
        updates, opt = tx.update(grads, state["opt"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    def planned(steps: int) -> Any:
        several = autopar.parallelize(lambda state, ids: jax.lax.scan(step, state, ids))
        return autopar.plan(several, state, np.zeros((steps, 8), np.int32)).table("params/t")

    params = {"t": jnp.ones((200_000, 32)), "w": jnp.ones((32, 2))}
    state = {"params": params, "opt": tx.init(params)}
    table = planned(100)
    allowed = re.match(r"(\d+) steps a call, or strategy='ps'", table.remedy)
    assert not table.lifted and "100 steps in a loop are too many" in table.reason and allowed is not None
    assert planned(int(allowed[1])).lifted and not planned(int(allowed[1]) + 1).lifted
