"""The table of reductions: its entries agree with NumPy, and with each other."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.backends.row_backend import reduce_routed
from autopar.ir.reductions import REDUCERS, neutral

TRUTH: dict[str, Any] = {
    "sum": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
}
BITS = [np.int8, np.int32, np.uint8, np.uint32, np.bool_]
FLOATS = [np.float32, jnp.bfloat16, jnp.float8_e4m3fn]
#: Each reduction of each kind of elements. Sums and products of bools are no reductions of JAX's.
CASES = [
    (op, dtype)
    for op in TRUTH
    for dtype in (BITS if op in ("and", "or") else FLOATS + BITS[: 4 if op in ("sum", "prod") else 5])
]


def _values(dtype: Any) -> np.ndarray:
    return np.array([0, 1, 1] if dtype is np.bool_ else [1, 3, 100], np.float32).astype(dtype)


def test_the_table_has_what_the_test_knows() -> None:
    assert list(REDUCERS) == list(TRUTH)


@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_neutral_elements_change_no_result(op: str, dtype: Any) -> None:
    values, nothing = _values(dtype), neutral(op, dtype)
    assert nothing.dtype == values.dtype and nothing.shape == ()
    np.testing.assert_array_equal(TRUTH[op](values, nothing).astype(np.float32), values.astype(np.float32))


@pytest.mark.parametrize(("op", "dtype"), [(op, dtype) for op, dtype in CASES if dtype is not jnp.float8_e4m3fn])
def test_rows_that_a_step_touches_and_the_others(op: str, dtype: Any) -> None:
    """Two routed rows, a padding row of which the table has two more, and room that counts for nothing."""
    rows = np.concatenate([_values(dtype)[1:], np.full(2, 2).astype(dtype)])
    is_row = np.array([True, True, False, False])
    found = reduce_routed({"op": op, "axes": (0,), "axis": 0}, jnp.asarray(rows), jnp.asarray(is_row), 4)
    assert found.dtype == rows.dtype
    np.testing.assert_array_equal(np.asarray(found), TRUTH[op].reduce(rows, dtype=rows.dtype))


@pytest.mark.parametrize("op", ["max", "min", "sum", "prod"])
def test_results_that_are_joined_keep_a_nan(op: str) -> None:
    a, b = np.array([np.nan, 1, 2], np.float32), np.array([1, np.nan, 3], np.float32)
    mine = REDUCERS[op].join(a, b)
    assert isinstance(mine, np.ndarray)
    np.testing.assert_array_equal(mine, TRUTH[op](a, b))
    np.testing.assert_array_equal(REDUCERS[op].join(jnp.asarray(a), jnp.asarray(b)), mine)


def test_bits_of_unsigned_counters() -> None:
    """All rows of what a step adds to them: the touched ones are looked at, the others are 0."""

    def step(state: Any, ids: jax.Array) -> Any:
        table, counts = state
        loss, grad = jax.value_and_grad(lambda t: jnp.sum(jnp.sin(t[ids]) * counts[ids][:, None]))(table)
        added = jnp.zeros_like(counts).at[ids].add(jnp.uint32(3))
        return (table - 0.1 * grad, counts + added), (loss, jax.lax.reduce_and(added, (0,)), jnp.max(added))

    state, ids = (jnp.ones((13, 4)), jnp.zeros(13, jnp.uint32)), jnp.array([1, 2, 2, *range(10)])
    planned = autopar.parallelize(step, strategy="ps", donate=False)
    for batch in (ids, jnp.arange(13)):
        for mine, theirs in zip(planned(state, batch)[1], jax.jit(step)(state, batch)[1], strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-6)
    assert any(e.op == "ap.reduce_rows" for e in planned.planned_for(state, ids).compiled.program.block.equations)
