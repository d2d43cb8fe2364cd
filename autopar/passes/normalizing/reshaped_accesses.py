"""Gathers from a reshaped table, and scatters into it, in the table itself: by the factors that both shapes have."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar import jax_compat
from autopar.ir.program import Equation
from autopar.passes.normalizing.rewriter import UNORDERED

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Factors:
    """The factors that two shapes have in common.

    Attributes:
      sizes: The factors.
      table, reshaped: For each axis of either shape, the factors that it is a product of.
    """

    sizes: Shape
    table: tuple[Shape, ...]
    reshaped: tuple[Shape, ...]

    @property
    def fine(self) -> Shape:
        """The table's shape with its rows whole and its other axes in factors."""
        return (math.prod(self.sizes[f] for f in self.table[0]), *(self.sizes[f] for f in self.others))

    @property
    def others(self) -> Shape:
        """The factors of the table's other axes."""
        return tuple(f for axis in self.table[1:] for f in axis)


@functools.lru_cache(maxsize=256)
def common_factors(table: Shape, reshaped: Shape) -> Factors | None:
    """The factors of two shapes of one size; None where they don't divide each other evenly."""
    sizes: list[int] = []
    groups: tuple[list[list[int]], list[list[int]]] = ([[] for _ in table], [[] for _ in reshaped])
    left, i, j = [[*table], [*reshaped]], 0, 0
    while i < len(table) and j < len(reshaped):
        a, b = left[0][i], left[1][j]
        if max(a, b) % min(a, b):
            return None
        size = min(a, b)
        if size > 1:
            groups[0][i].append(len(sizes))
            groups[1][j].append(len(sizes))
            sizes.append(size)
        left[0][i], left[1][j] = a // size, b // size
        i, j = i + (a == size), j + (b == size)
    return Factors(tuple(sizes), *(tuple(map(tuple, group)) for group in groups))


@dataclass(frozen=True)
class Places:
    """What a gather or scatter takes: a single place along each indexed axis of its operand, all of the others.

    Attributes:
      indexed: Axes of the operand, in the order of the components of the indices.
      paired: Axes of the operand along which it takes the place that an id has along an axis of the indices, and that.
      windows: The others.
      inner: The axes of the result (or the updates) that those are.
    """

    indexed: Shape
    paired: tuple[tuple[int, int], ...]
    windows: Shape
    inner: Shape

    @staticmethod
    def of(equation: Equation) -> Places | None:
        """None of one that takes something else."""
        numbers, shape = equation.params["dimension_numbers"], equation.inputs[0].shape
        paired = numbers.operand_batching_dims
        if equation.op == "gather":
            indexed, gone, inner = numbers.start_index_map, numbers.collapsed_slice_dims, numbers.offset_dims
            batching = numbers.start_indices_batching_dims
            sizes = [equation.params["slice_sizes"][d] for d in range(len(shape)) if d not in (*gone, *paired)]
        else:
            indexed, gone = numbers.scatter_dims_to_operand_dims, numbers.inserted_window_dims
            inner, batching = numbers.update_window_dims, numbers.scatter_indices_batching_dims
            sizes = [equation.inputs[2].shape[d] for d in inner]
        windows = tuple(d for d in range(len(shape)) if d not in (*gone, *paired))
        if set(indexed) != set(gone) or sizes != [shape[d] for d in windows]:
            return None
        pairs = tuple((int(d), int(axis)) for d, axis in zip(paired, batching, strict=True))
        return Places(tuple(map(int, indexed)), pairs, windows, tuple(map(int, inner)))


def accessed(
    equation: Equation, factors: Factors, places: Places, table: Any, indices: Sequence[Any], updates: Any = None
) -> Any:
    """The gather's result, or the scatter's in the shape of the table."""
    sizes, shape, batch = factors.sizes, equation.inputs[0].shape, indices[0].shape[:-1]
    taken = [f for d in places.windows for f in factors.reshaped[d]]  # factors that are taken whole
    rows = [f for f in taken if f in factors.table[0]]  # those by which rows lie beside each other
    rest = [f for f in taken if f not in rows]
    index, columns = _index(equation, factors, places, indices, rows)
    fine = jnp.reshape(table, factors.fine)
    gone = (0, *(1 + factors.others.index(f) for f in columns))
    lead = len(batch) + len(rows)
    window = tuple(range(lead, lead + len(rest)))
    axes = range(len(batch) + len(places.inner))
    outer = [d for d in axes if d not in places.inner]
    order = [len(batch) + places.inner.index(d) if d in places.inner else outer.index(d) for d in axes]
    by_factor = [taken.index(f) for f in (*rows, *rest)]
    if updates is None:
        numbers = jax.lax.GatherDimensionNumbers(window, tuple(sorted(gone)), gone)
        slices = [1 if d in gone else n for d, n in enumerate(fine.shape)]
        params = {"dimension_numbers": numbers, "slice_sizes": tuple(slices), **UNORDERED}
        found = jax_compat.bind(equation.primitive, (fine, index), {**equation.params, **params})[0]
        back = [len(batch) + by_factor.index(k) for k in range(len(taken))]
        found = jnp.transpose(found, (*range(len(batch)), *back))
        return jnp.transpose(jnp.reshape(found, (*batch, *(shape[d] for d in places.windows))), order)
    moved = jnp.transpose(updates, [order.index(d) for d in axes])
    moved = jnp.reshape(moved, (*batch, *(sizes[f] for f in taken)))
    moved = jnp.transpose(moved, (*range(len(batch)), *(len(batch) + k for k in by_factor)))
    numbers = jax.lax.ScatterDimensionNumbers(window, tuple(sorted(gone)), gone)
    params = {"dimension_numbers": numbers, **UNORDERED}
    made = jax_compat.bind(equation.primitive, (fine, index, moved), {**equation.params, **params})[0]
    return jnp.reshape(made, table.shape)


def _index(
    equation: Equation, factors: Factors, places: Places, indices: Sequence[Any], rows: Sequence[int]
) -> tuple[Any, list[int]]:
    """Index vectors of rows and of factors of other axes, [*ids, *rows, 1 + columns]; and those factors.

    Args:
      equation: The gather or scatter.
      factors: Of its operand and the table.
      places: What it takes.
      indices: Its own in parts, [*ids, axes] each.
      rows: Factors by which rows lie beside each other that are taken together.
    """
    sizes, shape, mode = factors.sizes, equation.inputs[0].shape, str(equation.params["mode"])
    dtype = np.dtype(np.int64 if indices[0].dtype.itemsize == 8 else np.int32)
    components = (part[..., k].astype(dtype) for part in indices for k in range(part.shape[-1]))
    parts, lead = dict(zip(places.indexed, components, strict=True)), indices[0].shape[:-1]
    parts |= {d: jax.lax.broadcasted_iota(dtype, lead, axis) for d, axis in places.paired}
    is_clipped = "CLIP" in mode or (equation.op == "gather" and "FILL" not in mode)
    ids: dict[int, Any] = {}
    outside: list[Any] = []  # which ids mean no row
    for d, part in parts.items():
        part = part.reshape(*part.shape, *[1] * len(rows))
        left = jnp.clip(part, 0, shape[d] - 1)
        for f in reversed(factors.reshaped[d]):
            ids[f], left = left % sizes[f], left // sizes[f]
        is_outside = (part < 0) | (part >= shape[d])
        first = next(iter(factors.reshaped[d]), None)
        if not is_clipped and first in factors.others:  # a column alone: the rows don't depend on it
            ids[first] = jnp.where(is_outside, sizes[first], ids[first])
        elif not is_clipped:
            outside.append(is_outside)
    for k, f in enumerate(rows):
        ids[f] = jax.lax.broadcasted_iota(dtype, [sizes[f] if d == k else 1 for d in range(len(rows))], k)
    row = functools.reduce(lambda row, f: row * sizes[f] + ids[f], factors.table[0], np.zeros((), dtype))
    for is_outside in outside:
        row = jnp.where(is_outside, factors.fine[0], row)
    columns = [f for f in factors.others if f in ids]
    full = (*lead, *(sizes[f] for f in rows))
    joined = [jnp.broadcast_to(x, full)[..., None] for x in (row, *(ids[f] for f in columns))]
    return jnp.concatenate(joined, -1), columns
