"""Functions whose partitioning is tested."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def start_of(x: jax.Array) -> jax.Array:
    """A 6 that is computed: one that is known is folded into the program."""
    return (6.5 + 0.1 * jnp.tanh(x.ravel()[0])).astype(jnp.int32)


def convolution(dims: str = "HW", **options: Any) -> Callable[..., jax.Array]:
    """Of a batch of images with channels last."""
    numbers = (f"N{dims}C", f"{dims}IO", f"N{dims}C")
    given = {"window_strides": (1,) * len(dims), "padding": [(1, 1)] * len(dims), **options}
    return lambda x, w: lax.conv_general_dilated(x, w, dimension_numbers=numbers, **given)


def window(reduce: Any, start: float, sizes: Sequence[int], strides: Sequence[int], padding: Any) -> Callable[..., Any]:
    return lambda x: lax.reduce_window(x, start, reduce, sizes, strides, padding)


IDS = jnp.asarray(np.random.default_rng(0).integers(0, 8, (8,)), jnp.int32)
#: A function, and its operands' shapes.
Case = tuple[Callable[..., Any], Sequence[tuple[int, ...]]]


def by_example(fun: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Gradients of a kernel for each example."""
    return jax.vmap(jax.grad(lambda w, x: jnp.sum(jnp.sin(fun(x[None], w)))), (None, 0))


def counted(x: jax.Array) -> jax.Array:
    """0, 1, 2, as the first three of what is found: int[3]."""
    return jnp.nonzero(x.reshape(-1) < 99, size=3)[0]


def joined(op: str, x: jax.Array, ids: jax.Array, updates: jax.Array) -> jax.Array:
    return getattr(x.at[ids], op)(updates, unique_indices=True)


GROUPS: Mapping[str, Mapping[str, Case]] = {
    # Of these XLA gets none wrong yet, nor of "indices", "convolutions" and "factors".
    "shapes": {
        "reshape": (lambda x: x.reshape(32), [(8, 4)]),
        "reshape, split": (lambda x: x.reshape(4, 2, 4), [(8, 4)]),
        "reshape, transposed": (lambda x: lax.reshape(x, (4, 8), (1, 0)), [(8, 4)]),
        "transpose": (lambda x: x.transpose(2, 0, 1), [(4, 8, 4)]),
        "concatenate": (lambda x, y: jnp.concatenate([x, y], 0), [(8, 4), (4, 4)]),
        "stack": (lambda x, y: jnp.stack([x, y], 1), [(8, 4), (8, 4)]),
        "reverse": (lambda x: jnp.flip(x), [(8, 4)]),
        "roll": (lambda x: jnp.roll(x, 3, 0), [(8, 4)]),
        "tile": (lambda x: jnp.tile(x, (3, 2)), [(8, 4)]),
        "diagonal": (jnp.diagonal, [(8, 8)]),
    },
    "slices": {
        "slice": (lambda x: x[1:7:2, 1:], [(8, 4)]),
        "dynamic slice": (lambda x: lax.dynamic_slice(x, (start_of(x), start_of(x)), (4, 2)), [(8, 4)]),
        "update": (lambda x, y: lax.dynamic_update_slice(x, y, (start_of(x), start_of(x))), [(8, 4), (4, 2)]),
        "update, row": (lambda x, y: lax.dynamic_update_slice(x, y, (start_of(x) + 5, 0)), [(8, 4), (1, 4)]),
        "row": (lambda x: lax.dynamic_index_in_dim(x, start_of(x) + 5, 0), [(8, 4)]),
        "pad": (lambda x: jnp.pad(x, ((1, 2), (0, 3))), [(8, 4)]),
        "pad, inside": (lambda x: lax.pad(x, 0.0, ((0, 0, 1), (1, 2, 2))), [(8, 4)]),
        "pad, with two values": (lambda x: jnp.pad(x, 1) + jnp.pad(x, 1, constant_values=5.0), [(8, 4)]),
        "pad, shifted": (lambda x: lax.pad(x, 0.0, ((1, -1, 0), (-1, 1, 0))), [(8, 4)]),
        "pad, cut inside": (lambda x: lax.pad(x, 0.0, ((2, -1, 2), (-1, 3, 1))), [(8, 4)]),
    },
    "reductions": {
        "sum": (lambda x: x.sum(0), [(8, 4)]),
        "product": (lambda x: x.prod(0), [(8, 4)]),
        "maximum": (lambda x: x.max(0), [(8, 4)]),
        "argmax": (lambda x: jnp.argmax(x, 0), [(8, 4)]),
        "function": (lambda x: lax.reduce(x, jnp.float32(1.5), lambda a, b: a + jnp.abs(b), (0,)), [(8, 4)]),
        "NaN": (lambda x: jnp.where(x > 1, jnp.nan, x).max(0) + jnp.where(x < -1, jnp.nan, x).min(1).sum(), [(8, 4)]),
        "NaN, small": (lambda x: jnp.where(x > 1, jnp.nan, x).astype(jnp.bfloat16).min(1).astype(float), [(8, 4)]),
        "parity": (lambda x: lax.reduce_xor(x > 0, (0,)), [(8, 4)]),
        "bits": (lambda x: lax.reduce_or((x * 9).astype(jnp.int32), (0,)), [(8, 4)]),
        "cumsum": (lambda x: jnp.cumsum(x, 0), [(8, 4)]),
        "cummax": (lambda x: lax.cummax(x, 0, reverse=True), [(8, 4)]),
        "cumulative": (lambda x: lax.cumsum(x, 0) + lax.cumprod(x, 0) * lax.cummin(x, 0), [(8, 4)]),
        "softmax": (lambda x: jax.nn.softmax(x, 0), [(8, 4)]),
        "sort": (lambda x: jnp.sort(x, 0), [(8, 4)]),
        "top_k": (lambda x: lax.top_k(x, 3)[0], [(8, 4)]),
        "product of matrices": (lambda x, y: x @ y, [(8, 4), (4, 8)]),
        "batched product": (lambda x, y: jnp.einsum("bij,bjk->bik", x, y), [(4, 8, 4), (4, 4, 8)]),
    },
    "indices": {
        "gather": (lambda x: x[IDS], [(8, 4)]),
        "gather, short numbers": (lambda x: x.at[IDS.astype(jnp.uint8)].get(mode="clip"), [(8, 4)]),
        "gather, short signed numbers": (lambda x: x.at[IDS.astype(jnp.int16)].get(mode="promise_in_bounds"), [(8, 4)]),
        "gather, along": (lambda x: jnp.take_along_axis(x, IDS.reshape(2, 4), 0), [(8, 4)]),
        "scatter": (lambda x, y: x.at[IDS].add(y), [(8, 4), (8, 4)]),
        "scatter, short numbers": (lambda x, y: x.at[IDS.astype(jnp.int8)].add(y, mode="clip"), [(8, 4), (8, 4)]),
        "scatter, set": (lambda x, y: x.at[jnp.array([5, 0, 3, 9])].set(y, mode="drop"), [(8, 4), (4, 4)]),
        "scatter, batched": (jax.vmap(lambda x, y: x.at[IDS].max(y)), [(4, 8, 4), (4, 8, 4)]),
        "scatter, NaN": (lambda x, y: x.at[IDS[:3]].max(jnp.where(y > 0, jnp.nan, y)), [(8, 4), (3, 4)]),
        "scatter, NaN below": (lambda x, y: jnp.where(x > 1, jnp.nan, x).at[IDS].min(y), [(8, 4), (8, 4)]),
        "scatter, NaN of zeros": (lambda x: jnp.zeros((8, 4)).at[IDS].max(jnp.where(x > 1, jnp.nan, x)), [(8, 4)]),
        "segments": (lambda x: jax.ops.segment_sum(x, IDS, 8), [(8, 4)]),
    },
    # Numbers that the devices don't divide.
    "uneven": {
        **{
            f"scatter, {op}": (
                lambda x, y, op=op: getattr(jnp.ones(8).at[counted(y)], op)(x[:3], unique_indices=True),
                [(4,), (8,)],
            )
            for op in ("add", "multiply", "max", "min")
        },
        **{
            f"scatter, {op} at known places": (
                lambda x, op=op: getattr(jnp.ones(8).at[jnp.arange(3) + 2], op)(x[:3], unique_indices=True),
                [(4,)],
            )
            for op in ("add", "multiply", "max", "min")
        },
        "scatter, seven": (lambda x: jnp.ones(9).at[jnp.arange(7) + 1].add(x[:7]), [(8,)]),
        "convolution with itself": (lambda x: jnp.convolve(x[:3], x[:3], "same"), [(4,)]),
        "scatter, rows": (lambda x, y: x.at[counted(y) + 2].add(y[:3], mode="clip"), [(8, 4), (8, 4)]),
        "scatter, elsewhere": (lambda x, y: x.at[counted(y) - 8].add(x[:3], mode="drop"), [(8,), (8,)]),
        "scatter, batched": (lambda x, y: jax.vmap(lambda x: x.at[counted(y)].add(x[:3]))(x), [(3, 4), (8,)]),
        "scatters": (
            lambda x, y: joined("add", jnp.ones(8), counted(y), x[:3]) * joined("mul", jnp.ones(8), counted(y), x[:3]),
            [(4,), (8,)],
        ),
        "segments": (lambda x, y: jax.ops.segment_max(x[:3], counted(y), 3), [(4,), (8,)]),
        "convolution": (lambda x, y: jnp.convolve(x[:3], x[counted(y)], "same"), [(4,), (8,)]),
        "convolution, counted": (lambda x, y: jnp.convolve(x[counted(y)], x[:3], "same"), [(4,), (8,)]),
    },
    "windows": {
        "mean": (window(lax.add, 0.0, (1, 3, 3), (1, 2, 2), "SAME"), [(4, 8, 8)]),
        "maximum": (window(lax.max, -jnp.inf, (1, 3, 3), (1, 2, 2), "SAME"), [(4, 8, 8)]),
        "overlapping": (window(lax.max, -jnp.inf, (3, 2), (1, 2), ((1, 1), (0, 0))), [(8, 8)]),
        "steps of one": (window(lax.max, -jnp.inf, (3, 3), (1, 1), "VALID"), [(8, 8)]),
        "running": (window(lax.add, 0.0, (1, 4), (1, 1), ((0, 0), (3, 0))), [(8, 8)]),
    },
    "convolutions": {
        "1": (convolution("W"), [(8, 8, 4), (3, 4, 8)]),
        "2": (convolution(), [(8, 8, 8, 4), (3, 3, 4, 8)]),
        "strides": (convolution(window_strides=(2, 2)), [(8, 8, 8, 4), (3, 3, 4, 8)]),
        "dilated": (convolution(lhs_dilation=(2, 2), rhs_dilation=(1, 2)), [(8, 4, 4, 4), (3, 3, 4, 8)]),
    },
    "groups": {
        "depthwise": (convolution(feature_group_count=8), [(8, 8, 8, 8), (3, 3, 1, 8)]),
        "two": (convolution(feature_group_count=2, window_strides=(2, 1)), [(8, 8, 8, 8), (3, 3, 4, 8)]),
        "of the batch": (convolution(batch_group_count=2), [(8, 8, 8, 4), (3, 3, 4, 8)]),
        "kernels by example": (
            jax.vmap(lambda x, w: convolution()(x[None], w)[0]),
            [(8, 4, 4, 4), (8, 3, 3, 4, 4)],
        ),
    },
    "gradients by example": {
        "1": (by_example(convolution("W")), [(3, 4, 8), (8, 8, 4)]),
        "2": (by_example(convolution(rhs_dilation=(2, 2))), [(3, 3, 4, 8), (8, 8, 8, 4)]),
        "3": (by_example(convolution("DHW")), [(2, 2, 2, 3, 4), (4, 3, 3, 3, 3)]),
        "strides": (by_example(convolution(window_strides=(2, 2))), [(3, 3, 4, 8), (8, 8, 8, 4)]),
        "transposed": (
            by_example(lambda x, w: lax.conv_transpose(x, w, (2, 2), "SAME")),
            [(3, 3, 4, 8), (8, 4, 4, 4)],
        ),
        "depthwise": (by_example(convolution(feature_group_count=4)), [(3, 3, 1, 8), (8, 4, 4, 4)]),
    },
    "factors": {
        "cholesky": (lambda x: jnp.linalg.cholesky(x @ x.mT + 9 * jnp.eye(4)), [(8, 4, 4)]),
        "solve": (lambda x, y: jnp.linalg.solve(x + 9 * jnp.eye(4), y), [(4, 4), (4, 8)]),
        "qr": (lambda x: jnp.linalg.qr(x)[1], [(8, 4)]),
    },
}
