"""Runs a gradient program once for each microbatch, in a loop that carries the sums, so that one part's activations
live.

Sums of 16-bit floats are kept in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from autopar import jax_compat
from autopar.ir.reductions import REDUCERS, neutral
from autopar.jax_types import Array, Params


@dataclass(frozen=True)
class Microbatch:
    """Microbatch `number` (int32[]) of `count` (M). N devices divide each device's own examples, so that none
    travels."""

    number: Array
    count: int

    def share(self, value: Array, axis: int) -> Array:
        """Returns this microbatch's part of a value of the whole batch."""
        if self.count == 1:
            return value
        size = value.shape[axis] // self.count
        parted = value.reshape(*value.shape[:axis], self.count, size, *value.shape[axis + 1 :])
        return jax.lax.dynamic_index_in_dim(parted, self.number, axis, keepdims=False)

    def once(self, value: Array) -> Array:
        """Returns the value for the first microbatch, zeros for the others."""
        return jnp.where(self.number == 0, value, jnp.zeros_like(value))


def run_microbatches(
    params: Params,
    gradient: Callable[[Microbatch, Sequence[Array]], Sequence[Array]],
    operands: Sequence[Array],
    *,
    unrolled: bool,
) -> list[Array]:
    """Returns the joined results of all microbatches.

    `params`: of an `ap.microbatches` equation. `count`: M. `axes`: for each operand the axis of its examples, None for
    values that all microbatches share. `joins`: for each result a reduction's name, or the axis of its examples.
    `unrolled`: the loop is unrolled; all activations may then live at a time.
    """
    count, joins = params["count"], params["joins"]
    shapes = jax.eval_shape(lambda n: _one(params, gradient, operands, Microbatch(n, count)), jnp.int32(0))
    start = tuple(
        jnp.broadcast_to(neutral(join, jax_compat.sum_dtype(x.dtype)), x.shape)
        for x, join in zip(shapes, joins, strict=True)
        if isinstance(join, str)
    )

    # Reduced results are carried, results by example are stacked.
    def turn(sums: tuple[Array, ...], number: Array) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        results = _one(params, gradient, operands, Microbatch(number, count))
        parts = iter(x for x, join in zip(results, joins, strict=True) if isinstance(join, str))
        names = [join for join in joins if isinstance(join, str)]
        joined = tuple(
            REDUCERS[name].join(total, x.astype(total.dtype)) for name, total, x in zip(names, sums, parts, strict=True)
        )
        return joined, tuple(x for x, join in zip(results, joins, strict=True) if not isinstance(join, str))

    sums, stacked = jax.lax.scan(turn, start, jnp.arange(count, dtype=jnp.int32), unroll=unrolled)
    reduced, rows = iter(sums), iter(stacked)
    return [
        next(reduced).astype(shape.dtype) if isinstance(join, str) else _unparted(next(rows), join)
        for shape, join in zip(shapes, joins, strict=True)
    ]


def _one(
    params: Params,
    gradient: Callable[[Microbatch, Sequence[Array]], Sequence[Array]],
    operands: Sequence[Array],
    microbatch: Microbatch,
) -> tuple[Array, ...]:
    parts = [
        x if axis is None else microbatch.share(jnp.asarray(x), axis)
        for x, axis in zip(operands, params["axes"], strict=True)
    ]
    return tuple(map(jnp.asarray, gradient(microbatch, parts)))


def _unparted(parts: Array, along: int) -> Array:
    """Joins parts, [M, ...] -> the examples of all microbatches along their axis, in the batch's order."""
    count, *shape = parts.shape
    moved = jnp.moveaxis(parts, 0, along)
    return moved.reshape(*shape[:along], count * shape[along], *shape[along + 1 :])
