"""States that are saved and restored, and what tells that they are the same."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import autopar
from autopar import jax_compat
from autopar.backends.host.storage import HostRows
from autopar.ir.layout import RowLayout
from autopar.tables.host import HostTable

ROWS, WIDTH = 37, 3
TX = optax.adagrad(0.1)


def make_state(key: Any) -> Any:
    params = {"emb": jax.random.normal(key, (ROWS, WIDTH)), "w": jnp.ones((WIDTH,))}
    return {"params": params, "opt": TX.init(params), "step": jnp.int32(0)}


def train(state: Any, batch: Any) -> Any:
    def loss(params: Any) -> Any:
        return ((params["emb"][batch] @ params["w"]) ** 2).mean()

    value, grads = jax.value_and_grad(loss)(state["params"])
    updates, opt = TX.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt, "step": state["step"] + 1}, value


def batch_of(k: int) -> Any:
    return jnp.arange(k, k + 8, dtype=jnp.int32) % ROWS


def same(found: Any, expected: Any) -> None:
    """Bit for bit, with types and structure."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if isinstance(b, jax.Array) and jax_compat.is_key(b.dtype):
            assert a.dtype == b.dtype
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert type(a) is type(b)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), strict=True)
        if isinstance(b, jax.Array):
            assert jax_compat.is_weak(a) == jax_compat.is_weak(b)


@contextlib.contextmanager
def limited_files(nbytes: int) -> Iterator[None]:
    """To the system the disk is full: files mustn't be longer."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def everything() -> Any:
    return {
        "floats": [jnp.arange(3.0), jnp.float16(2), jnp.full((2, 2), 1.1, jnp.bfloat16), jnp.asarray(0.1)],
        "integers": (jnp.arange(4, dtype=jnp.int8), jnp.array([True, False]), jnp.uint32(7), jnp.ones(3, jnp.int4)),
        "keys": {3: jax.random.key(1), 10: jax.random.split(jax.random.key(2, impl="rbg"), 3)},
        "numpy": [np.arange(3.0), np.array(1 + 2j), np.zeros((2,), jnp.bfloat16.dtype), np.arange(3, dtype=">i4")],
        "numbers": [3, 2.5, float("inf"), True, False, 1j, 1 << 70],
        "nothing": (None, [], {}, jnp.zeros((0, 3)), np.zeros((2, 0)), jax.random.split(jax.random.key(0), 0)),
        "a.b/c": {"d e": jnp.arange(2), "d_e": jnp.arange(3)},
    }


def hosted(value: float) -> Any:
    """A small state with each kind of file."""
    rows = np.full((ROWS, WIDTH), value, np.float32)
    return {"t": HostTable(HostRows.of(rows, 0, RowLayout(ROWS, 1, cyclic=True), 0, "t")), "w": jnp.full(3, value)}


def saved_value(folder: Path) -> float:
    """What the state there was made of; it must be whole."""
    found = autopar.restore(folder)
    values = {float(x) for leaf in jax.tree.leaves(found.state) for x in np.unique(np.asarray(leaf))}
    assert found.position is not None and values == {found.position["value"]}
    return values.pop()


def in_one_process() -> Any:
    return make_state(jax.random.key(0))


def deferred() -> Any:
    @autopar.parallelize(strategy="ps", state_argnums=0)
    def step(table: Any, ids: Any) -> Any:
        loss, grad = jax.value_and_grad(lambda t: (t[ids] ** 2).sum())(table)
        return 0.9 * table - 0.1 * grad, loss

    table, _ = step(jnp.ones((ROWS, WIDTH)), batch_of(0))
    assert isinstance(table, autopar.DeferredTable)
    return table
