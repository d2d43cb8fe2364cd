"""Gathers and scatters by numbers of examples: batched, and the same to the last bit, out of range as well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.analysis.counting import Counting
from autopar.backends.emit import emit
from autopar.ir.program import Block, Input, Program
from autopar.ir.trace import block_of
from autopar.passes.normalizing.batch_indices import batch_indices

N, M, D = 5, 4, 3
H = np.random.default_rng(0).normal(size=(N, M, D)).astype(np.float32)
#: Some of them out of range, on both sides.
IDS = np.array([[0, 3], [-1, 2], [9, 1], [-9, 0], [2, 4]], np.int32)
ROWS = jnp.arange(N)


def _in_scan(h: Any, i: Any) -> Any:
    return jax.lax.scan(lambda c, _: (c.at[ROWS, i[:, 0]].add(c[ROWS, i[:, 1]]), c[ROWS, i[:, 0]]), h, None, length=2)


BATCHED: dict[str, Callable[[Any, Any], Any]] = {
    "one for each": lambda h, i: h[ROWS, i[:, 0]],
    "several for each": lambda h, i: h[ROWS[:, None], i],
    "the last": lambda h, i: h[ROWS, -1],
    "of numpy": lambda h, i: h[np.arange(N), i[:, 0]],
    "of a wide dtype": lambda h, i: h[jnp.arange(N, dtype=jnp.uint8)[:, None], i],
    "all": lambda h, i: h[ROWS],
    "two that count": lambda h, i: h[ROWS[:, None], i[:, :1] % M, jnp.arange(D)],
    "filled": lambda h, i: h.at[ROWS[:, None], i].get(mode="fill", fill_value=7),
    "clipped": lambda h, i: h.at[ROWS[:, None], i].get(mode="clip"),
    "set": lambda h, i: h.at[ROWS, i[:, 0]].set(7.0),
    "added": lambda h, i: h.at[ROWS[:, None], i].add(h[:, :2]),
    "multiplied, dropped": lambda h, i: h.at[ROWS[:, None], i].mul(3.0, mode="drop"),
    "put": lambda h, i: jnp.put_along_axis(h[..., 0], i % M, 3.0, axis=1, inplace=False),
    "in a scan": _in_scan,
    "gradient": lambda h, i: jax.grad(lambda h: jnp.sum(jnp.sin(h[ROWS[:, None], i])))(h),
    "of a transposed": lambda h, i: h.swapaxes(0, 1)[i[:, 0], ROWS],
}
#: An index that counts beside others that are the same for all that it counts.
SLICED: dict[str, Callable[[Any, Any], Any]] = {
    "columns": lambda h, i: h[:, 0][i[..., None], jnp.arange(D)],
    "columns first": lambda h, i: h[:, 0][i[:, 0], jnp.arange(D)[:, None]],
    "of the middle": lambda h, i: h[i[:, :1] % N, jnp.arange(M)],
    "beside two": lambda h, i: h[i[..., None] % N, i[..., None] % M, jnp.arange(D)],
    "filled": lambda h, i: h[:, 0].at[i[..., None], jnp.arange(D)].get(mode="fill", fill_value=7),
    "added": lambda h, i: h[:, 0].at[i[..., None], jnp.arange(D)].add(h[:, :2], mode="drop"),
    "gradient": lambda h, i: jax.grad(lambda h: jnp.sum(jnp.sin(h[:, 0][i[..., None], jnp.arange(D)])))(h),
}
K = M * D
COLUMNS = np.array([5, 0, 11, 5])
#: Constants that keep to each example's own part, of `h` or of `h` and `i` laid out otherwise.
OWN_PARTS: dict[str, Callable[[Any, Any], Any]] = {
    "columns of all": lambda h, i: h.ravel()[ROWS[:, None] * K + COLUMNS],
    "rows of all": lambda h, i: h.reshape(-1, D)[ROWS * M + 2],
    "taken": lambda h, i: jnp.take(h, ROWS[:, None] * K + COLUMNS, mode="clip"),
    "counted from the end": lambda h, i: h.ravel()[ROWS[:, None] * K + COLUMNS - N * K],
    "repeated": lambda h, i: jnp.sin(h[:, 0])[jnp.repeat(ROWS, 3)],
    "several of each": lambda h, i: h.reshape(-1, D)[np.repeat(np.arange(N), 3) * M + np.tile([3, 0, 1], N)],
    "segments": lambda h, i: jax.ops.segment_sum(h.reshape(-1, D), jnp.repeat(ROWS, M), N),
    "sorted segments": lambda h, i: jax.ops.segment_sum(
        h.reshape(-1, D), np.repeat(np.arange(N), M), N, indices_are_sorted=True
    ),
    "the largest of segments": lambda h, i: jax.ops.segment_max(h.reshape(-1, D), jnp.repeat(ROWS, M), N),
    "two for each": lambda h, i: jnp.zeros((2 * N, D)).at[np.arange(N * M) // 2].add(h.reshape(-1, D)),
    "set": lambda h, i: (h + 1).ravel().at[ROWS[:, None] * K + COLUMNS[:3]].set(i[:, :1] * jnp.ones(3)),
    "beside other indices": lambda h, i: (h + 1).reshape(-1, D)[
        ROWS[:, None] * M + np.array([1, 3]), ROWS[:, None] * 0
    ],
    "gradient of columns": lambda h, i: jax.grad(lambda h: jnp.sin(h.ravel()[ROWS[:, None] * K + COLUMNS]).sum())(h),
    "along another axis": lambda h, i: jnp.stack([h.ravel(), -h.ravel()])[:, ROWS[:, None] * K + COLUMNS],
}
NOT_OWN_PARTS: dict[str, Callable[[Any, Any], Any]] = {
    "of the next": lambda h, i: jnp.sin(h).ravel()[ROWS[:, None] * K + COLUMNS + 1],
    "of one before": lambda h, i: jnp.sin(h).reshape(-1, D)[ROWS[::-1] * M],
    "in another order": lambda h, i: jax.ops.segment_sum(h.reshape(-1, D), np.tile(np.arange(N), M), N),
    "of the batch": lambda h, i: jnp.sin(h).ravel()[ROWS[:, None] * K + i],
    "of an input": lambda h, i: h[jnp.repeat(ROWS, 3)],
}
NOT_BATCHED: dict[str, Callable[[Any, Any], Any]] = {
    "fewer": lambda h, i: h[ROWS[1:], i[1:, 0]],
    "from one": lambda h, i: h[(ROWS + 1) % N, i[:, 0]],
    "reversed": lambda h, i: h[ROWS[::-1], i[:, 0]],
    "along another axis": lambda h, i: h[jnp.arange(4)[:, None] % 2, i[:4]],
    "by the same": lambda h, i: h[ROWS[:, None] * 0, i],
    "begins anew": lambda h, i: jnp.zeros((300, 2))[jnp.arange(300).astype(jnp.uint8), 1],
}


def _made(fun: Callable[[Any, Any], Any]) -> tuple[Block, Block, int]:
    block = block_of(jax.make_jaxpr(fun)(H, IDS))
    inputs = (Input("h", "batch"), Input("i", "batch"))
    program, count = batch_indices(Program(block, inputs, ()), Counting(block))
    return block, program.block, count


@pytest.mark.parametrize("name", [*BATCHED, *OWN_PARTS])
def test_batched(name: str) -> None:
    block, new, count = _made((BATCHED | OWN_PARTS)[name])
    accesses = [e for e in new.walk() if e.op == "gather" or e.op.startswith("scatter")]
    assert count == len(accesses) and all(e.params["dimension_numbers"].operand_batching_dims for e in accesses)
    for a, b in zip(emit(block)(H, IDS), emit(new)(H, IDS), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", SLICED)
def test_sliced(name: str) -> None:
    block, new, count = _made(SLICED[name])
    accesses = [e for e in new.walk() if e.op == "gather" or e.op.startswith("scatter")]
    assert count == len(accesses) and not any(e.params["dimension_numbers"].operand_batching_dims for e in accesses)
    assert all(e.inputs[1].shape[:-1] in (IDS.shape, (N,)) for e in accesses)
    for a, b in zip(emit(block)(H, IDS), emit(new)(H, IDS), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", [*NOT_BATCHED, *NOT_OWN_PARTS])
def test_what_does_not_count(name: str) -> None:
    block, new, count = _made((NOT_BATCHED | NOT_OWN_PARTS)[name])
    assert count == 0 and new is block
