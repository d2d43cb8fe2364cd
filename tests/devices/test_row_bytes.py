"""The plan counts the rows that travel as they are sent: a few columns, a cast, what a step makes of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar
from autopar.cost.exchange import step_terms
from autopar.cost.rates import NO_TIME

ROWS, WIDTH = 4000, 16
IDS = np.random.default_rng(0).integers(0, ROWS - 1, (32, 4))
Look = Callable[[Any, Any], Any]


def _half(t: Any) -> Any:
    return t.astype(jnp.bfloat16)


def _scanned(t: Any, i: Any) -> Any:
    """Its gradient goes through tanh in each turn, so that four are sent."""
    return lax.scan(lambda c, k: (c, jnp.tanh(t)[k]), 0.0, i.T)[1]


def _recomputed(t: Any, i: Any) -> Any:
    return jax.checkpoint(lambda t: jnp.sin(jnp.tanh(t)[i]))(t)


#: (lookup, bytes of a row that are looked up, of gradients that are sent)
LOOKS: dict[str, tuple[Look, int, int]] = {
    "all columns": (lambda t, i: t[i], 64, 64),
    "a few columns": (lambda t, i: t[:, :4][i], 16, 16),
    "cast": (lambda t, i: _half(t)[i], 32, 32),
    "two of the same": (lambda t, i: jnp.concatenate([t[i], t[i + 1]], 1), 64, 64),
    "two slices": (lambda t, i: jnp.concatenate([t[:, :4][i], t[:, 4:6][i + 1]], -1), 24, 24),
    "a slice, and all": (lambda t, i: jnp.concatenate([t[:, :4][i], t[i + 1]], -1), 80, 80),
    "projected": (lambda t, i: (t @ jnp.ones((WIDTH, 2)))[i], 8, 8),
    "wider": (lambda t, i: jnp.concatenate([t, t * 2], 1)[i], 64, 128),
    "without a gradient, too": (lambda t, i: t[i] * lax.stop_gradient(jnp.tanh(t)[i]), 64, 64),
    "scanned": (_scanned, 64, 4 * 64),
    "recomputed": (_recomputed, 64, 64),
}
#: Compiled, by method.
CHECKED = {
    "ps": ("a few columns", "cast", "a slice, and all", "scanned", "recomputed"),
    "allgather": ("cast",),
    "allreduce_rows": ("a slice, and all",),
    "allreduce": ("a few columns",),
}


def _planned(look: Look, method: str, dtype: Any = jnp.float32) -> tuple[Any, Any, Any]:
    """A step, its state, and the sizes of its table."""

    def step(p: Any, i: Any) -> Any:
        value, g = jax.value_and_grad(lambda p: jnp.mean(jnp.tanh(look(p["emb"], i)).astype(float) ** 2))(p)
        return {"emb": p["emb"] - 0.1 * g["emb"]}, value

    planned, state = autopar.parallelize(step, strategy=method), {"emb": jnp.ones((ROWS, WIDTH), dtype)}
    return planned, state, autopar.plan(planned, state, IDS).table("emb").sizes


@pytest.mark.parametrize("name", LOOKS)
def test_bytes_of_a_row_are_those_that_travel(name: str) -> None:
    look, looked_up, gradient = LOOKS[name]
    *_, sizes = _planned(look, "ps")
    assert (sizes.row_bytes, sizes.sent_gradient) == (looked_up, gradient)


@pytest.mark.parametrize(("method", "name"), [(method, name) for method in CHECKED for name in CHECKED[method]])
def test_what_is_looked_up_is_what_is_sent(method: str, name: str) -> None:
    planned, state, sizes = _planned(LOOKS[name][0], method)
    check = autopar.check(planned, state, IDS)
    assert check.ok, str(check)
    op = {"ps": "all-to-all", "allgather": "all-gather"}.get(method, "all-reduce")
    told = sum(row.planned or 0 for row in check.rows if row.collective == op and row.what != "sums over examples")
    assert told == sum(t.sent for t in step_terms(NO_TIME, sizes)[method] if t.collective == op) > 0


@pytest.mark.parametrize("method", ["ps", "allreduce_rows"])
def test_small_floats_travel_as_they_are(method: str) -> None:
    """On CPUs XLA would widen them to float32; where it adds them up it does."""
    planned, state, sizes = _planned(lambda t, i: t[i], method, jnp.bfloat16)
    check = autopar.check(planned, state, IDS)
    assert check.ok, str(check)
    assert (sizes.row_bytes, sizes.sent_gradient, sizes.reduced) == (32, 32, (64,))


def test_rows_of_small_floats_arrive_bit_by_bit() -> None:
    def step(p: Any, i: Any) -> Any:
        value, g = jax.value_and_grad(lambda p: jnp.sum(p["emb"][i].astype(jnp.float32) ** 2))(p)
        return {"emb": p["emb"] - g["emb"]}, value

    table = jnp.asarray(np.random.default_rng(1).normal(size=(ROWS, WIDTH)), jnp.bfloat16)
    table = table.at[IDS[0, 0]].set(jnp.nan).at[IDS[1, 0]].set(-0.0).at[IDS[2, 0]].set(jnp.inf)
    theirs, _ = jax.jit(step)({"emb": table}, IDS[:, :1])
    for method in ("ps", "allgather"):
        mine, _ = autopar.parallelize(step, strategy=method, donate=False)({"emb": table}, IDS[:, :1])
        np.testing.assert_array_equal(np.asarray(mine["emb"], np.float32), np.asarray(theirs["emb"], np.float32))


@pytest.mark.parametrize("dtype", ["float4_e2m1fn", "float8_e4m3fn"])
def test_smaller_floats_travel_too(dtype: str) -> None:
    """Two of 4 bits would be one of 8."""

    def step(p: Any, i: Any) -> Any:
        value, g = jax.value_and_grad(lambda p: jnp.sum(p["emb"].astype(dtype)[i].astype(float)))(p)
        return {"emb": p["emb"] - g["emb"]}, value

    state = {"emb": jnp.ones((ROWS, WIDTH))}
    mine, theirs = autopar.parallelize(step, strategy="ps", donate=False)(state, IDS), jax.jit(step)(state, IDS)
    np.testing.assert_array_equal(mine[0]["emb"], theirs[0]["emb"])
