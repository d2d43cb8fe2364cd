"""Where the batch goes and what is constant, by brute force: what is claimed of a program is tried on numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopar import jax_compat
from autopar.analysis.batch import follow_batch, is_uniform, uniform_axes
from autopar.ir.program import Block, Literal
from autopar.ir.trace import block_of

N, M = 6, 4
RNG = np.random.default_rng(0)
W, IDS = RNG.normal(size=(M, N)).astype(np.float32), RNG.integers(0, N, (3, 2), np.int32)


def traced(fun: Callable[..., Any], *operands: Any) -> Block:
    shapes = tuple(jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype) for x in operands)
    return block_of(jax_compat.trace(fun, shapes, {}).jaxpr)


def segment(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def take(x: jax.Array, ids: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x, ids, axis=1)


#: Function, operand, its batch axis, that of the result (None: there is none).
FOLLOWED: dict[str, tuple[Callable[..., Any], np.ndarray, int, int | None]] = {
    "elementwise": (lambda x: jnp.tanh(x) * 2 + jnp.ones((M, N)), segment(M, N), 1, 1),
    "broadcast": (lambda x: jnp.broadcast_to(x[None, :, None], (3, N, 2)), segment(N), 0, 1),
    "transpose": (lambda x: x.transpose(2, 0, 1), segment(2, N, M), 1, 2),
    "squeeze": (lambda x: lax.squeeze(x, (0,)), segment(1, N, M), 1, 0),
    "sum of others": (lambda x: x.sum((0, 2)), segment(2, N, M), 1, 0),
    "sum": (lambda x: x.sum(1), segment(2, N, M), 1, None),
    "argmax": (lambda x: jnp.argmax(x, 0), segment(2, N, M), 1, 0),
    "dot, left": (lambda x: jnp.tensordot(x, W, [[0], [0]]), segment(M, N, 2), 1, 0),
    "dot, right": (lambda x: W.T @ x, segment(M, N), 1, 1),
    "dot, batched": (lambda x: jnp.einsum("anb,anc->nabc", x, x), segment(2, N, 3), 1, 0),
    "dot, contracted": (lambda x: W @ x, segment(N, M), 0, None),
    "gather by ids": (lambda x: jnp.asarray(W)[:, x], RNG.integers(0, N, (2, N), np.int32), 1, 2),
    "gather, window": (lambda x: x[jnp.asarray(IDS)], segment(N, N, 3), 1, 2),
    "gather of examples": (lambda x: x[jnp.asarray(IDS)], segment(N, M), 0, None),
    "gather, batched": (lambda x: take(x, jnp.zeros((N, 2), jnp.int32)), segment(N, M), 0, 0),
    "slice": (lambda x: x[1:3], segment(M, N), 1, 1),
    "slice of examples": (lambda x: x[:, 1:3], segment(M, N), 1, None),
    "dynamic slice": (lambda x: lax.dynamic_slice(x, (1, 0), (2, N)), segment(M, N), 1, 1),
    "update": (lambda x: lax.dynamic_update_slice(x, jnp.ones((1, N)), (2, 0)), segment(M, N), 1, 1),
    "pad": (lambda x: jnp.pad(x, ((1, 2), (0, 0))), segment(M, N), 1, 1),
    "concatenate": (lambda x: jnp.concatenate([x, 2 * x]), segment(M, N), 1, 1),
    "concatenate examples": (lambda x: jnp.concatenate([x, 2 * x], 1), segment(M, N), 1, None),
    "stack": (lambda x: jnp.stack([x, x + 1], 1), segment(M, N), 1, 2),
    "split": (lambda x: jnp.split(x, 2)[1], segment(M, N), 1, 1),
    "split examples": (lambda x: jnp.split(x, 2, 1)[1], segment(M, N), 1, None),
    "tile": (lambda x: jnp.tile(x, (3, 1)), segment(M, N), 1, 1),
    "sort": (lambda x: jnp.sort(x, 0), segment(M, N), 1, 1),
    "sort examples": (lambda x: jnp.sort(x, 1), segment(M, N), 1, None),
    "cumsum": (lambda x: jnp.cumsum(x, 0), segment(M, N), 1, 1),
    "rev": (lambda x: x[::-1], segment(M, N), 1, 1),
    "rev examples": (lambda x: x[:, ::-1], segment(M, N), 1, None),
    "scan": (lambda x: lax.scan(lambda a, b: (a + b, a * b), x[0], x), segment(M, N), 1, 0),
    "scan over examples": (lambda x: lax.scan(lambda a, b: (a + b, a * b), x[0], x), segment(N, M), 0, None),
    "convolution": (
        lambda x: lax.conv_general_dilated(x, jnp.ones((3, 2, 5)), (1,), "SAME", None, None, ("NWC", "WIO", "NWC")),
        segment(N, M, 2),
        0,
        0,
    ),
    "cond": (lambda x: lax.cond(x[0, 0] > 0, lambda x: 2 * x, lambda x: x - 1, x), segment(M, N), 1, 1),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_examples_are_followed(name: str) -> None:
    """Changing the order of the examples changes it in the result, along the axis that is claimed."""
    fun, x, axis, expected = FOLLOWED[name]
    block = traced(fun, x)
    axes = {block.inputs[0]: axis}
    follow_batch(block.equations, axes, devices=1)
    found = [None if isinstance(a, Literal) else axes.get(a) for a in block.outputs]
    assert found[0] == expected
    order = RNG.permutation(N)
    before, after = (jax.tree.leaves(fun(jnp.asarray(a))) for a in (x, np.take(x, order, axis)))
    for a, b, at in zip(before, after, found, strict=True):
        if at is not None and name != "cond":  # its condition reads one example
            np.testing.assert_allclose(np.take(np.asarray(a), order, at), b, rtol=1e-5)


#: Function of a [M, N] array, and the axes along which its result is known to be constant.
CONSTANT: dict[str, tuple[Callable[..., Any], set[int]]] = {
    "operand": (lambda x: x + 1, set()),
    "broadcast": (lambda x: jnp.broadcast_to(x[:, None, :], (M, 3, N)) * 2, {1}),
    "zeros": (lambda x: jnp.zeros((M, N)) + 1, {0, 1}),
    "iota": (lambda x: lax.broadcasted_iota(jnp.int32, (M, N), 0), {1}),
    "bias": (lambda x: jnp.broadcast_to(x[0].reshape(1, N), (M, N)), {0}),
    "sum": (lambda x: jnp.broadcast_to(x.sum(0), (M, N)), {0}),
    "both": (lambda x: jnp.broadcast_to(x[0], (M, N)) * x, set()),
    "product": (lambda x: jnp.broadcast_to(x[0], (3, N)) @ x.T, {0}),
    "tile": (lambda x: jnp.tile(x[0], (3, 1)), {0}),
    "tile of more": (lambda x: jnp.tile(x, (3, 1)), set()),
    "transpose": (lambda x: jnp.broadcast_to(x[0], (3, N)).T, {1}),
    "merged": (lambda x: jnp.broadcast_to(x[0], (3, N)).reshape(3 * N), set()),
    "split up": (lambda x: jnp.broadcast_to(x[0], (3, N)).reshape(3, 2, N // 2), {0}),
    "scan": (lambda x: lax.scan(lambda a, b: (a * b[0], a), jnp.ones((2, 3)), x)[0], {0, 1}),
    "scan that fills": (lambda x: lax.scan(lambda a, b: (a + b, a), jnp.zeros(N), x)[0], set()),
    "cond": (lambda x: lax.cond(x[0, 0] > 0, lambda: jnp.ones((2, 3)), lambda: jnp.zeros((2, 3))), {0, 1}),
    "cond of more": (lambda x: lax.cond(x[0, 0] > 0, lambda x: x, jnp.zeros_like, x), set()),
}


@pytest.mark.parametrize("name", CONSTANT)
def test_constant_axes(name: str) -> None:
    fun, expected = CONSTANT[name]
    x = segment(M, N)
    block = traced(fun, x)
    (out,), value = block.outputs, np.asarray(fun(jnp.asarray(x)))
    found = {d for d in range(value.ndim) if is_uniform(uniform_axes(block), out, d)}
    assert found == expected
    for axis in found:
        np.testing.assert_array_equal(value, np.broadcast_to(np.take(value, [0], axis), value.shape))
