"""Rewrites gathers and scatters that name each example by its number as batched ones, which keep examples apart.

  h[jnp.arange(n), ids]  ->  the gather of `jax.vmap(lambda h, i: h[i])(h, ids)`

`analysis.counting` knows which index counts along an axis; it is never out of range, so the other indices are clipped,
filled or dropped as before. Top-k mixtures of experts, the last token of a sentence and `put_along_axis` are written
so; batched, they run in microbatches and on single devices.

An index that counts along columns, for which all others are the same, becomes a slice:

  table[ids[..., None], jnp.arange(columns)]  ->  table[ids]

Indices that are constants and keep to each example's own part of an array are batched, too:

  h.ravel()[jnp.arange(n)[:, None] * k + columns]                    ->  h.reshape(n, k)[:, columns]
  jax.ops.segment_sum(h.reshape(n * k, d), jnp.repeat(arange(n), k))  ->  a scatter of [n, k, d]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from autopar import jax_compat
from autopar.analysis.counting import Constants, Counting
from autopar.ir.program import Atom, Block, Equation, Program
from autopar.ir.writer import expand
from autopar.jax_types import Leaf
from autopar.passes.rewriting import Rewriter


@dataclass(frozen=True, slots=True)
class _Names:
    """Names of corresponding dimension numbers of gathers and scatters."""

    gone: str
    mapped: str
    batching: str


_GATHER = _Names("collapsed_slice_dims", "start_index_map", "start_indices_batching_dims")
_SCATTER = _Names("inserted_window_dims", "scatter_dims_to_operand_dims", "scatter_indices_batching_dims")


def batch_indices(program: Program, counting: Counting) -> tuple[Program, int]:
    """Returns the program with such gathers and scatters batched, and their number."""
    sizes = {v.shape[0] for v, i in program.named_inputs if i.role == "batch" and v.shape and v.shape[0] > 1}
    return _Batch(program.block, counting, sorted(sizes, reverse=True)).run(program)


class _Batch(Rewriter):
    """Batches accesses. `sizes`: how many examples there may be."""

    def __init__(self, block: Block, counting: Counting, sizes: Sequence[int]) -> None:
        super().__init__()
        self._counting, self._constants, self._sizes = counting, Constants(block), sizes
        self._inputs = frozenset(block.inputs)

    def rule(self, equation: Equation) -> list[Equation]:
        if equation.op != "gather" and not equation.op.startswith("scatter"):
            return [equation]
        pairs = _counting_pairs(equation, self._counting)
        part = None if pairs else self._own_part(equation)
        self.count += bool(pairs) or part is not None
        if part is not None:
            return _in_parts(equation, part)
        for dim, axis in pairs.items():
            if len(pairs) == 1 and self._is_alike(equation, dim, axis):
                return _sliced(equation, dim, axis) or _without(equation, pairs)
        return _without(equation, pairs) if pairs else [equation]

    def _is_alike(self, equation: Equation, dim: int, axis: int) -> bool:
        """Returns whether the index of every dimension but `dim` is the same along an axis of the indices."""
        mapped = getattr(equation.params["dimension_numbers"], _names(equation).mapped)
        kept = [k for k, d in enumerate(mapped) if d != dim]
        return bool(kept) and all(self._is_repeated(equation.inputs[1], axis, k) for k in kept)

    def _is_repeated(self, indices: Atom, axis: int, column: int) -> bool:
        """Returns whether a component of index vectors is broadcast along an axis."""
        made, last = self.made.get(indices), len(indices.shape) - 1
        if made is None:
            return False
        if made.op == "concatenate" and made.params["dimension"] == last:
            ends = np.cumsum([a.shape[last] for a in made.inputs])
            part = int(np.searchsorted(ends, column, side="right"))
            return self._is_repeated(made.inputs[part], axis, column - int(ends[part]) + made.inputs[part].shape[last])
        if made.op != "broadcast_in_dim":
            return False
        (operand, *_), dims = made.inputs, made.params["broadcast_dimensions"]
        if axis not in dims or operand.shape[dims.index(axis)] == 1:
            return True
        return last not in dims and self._is_repeated(operand, dims.index(axis), 0)

    def _own_part(self, equation: Equation) -> _OwnPart | None:
        """Returns a dimension of an array of examples, each with a part of it, in which each reads its own one."""
        numbers, names = equation.params["dimension_numbers"], _names(equation)
        operand, indices = equation.inputs[:2]
        if operand in self._inputs:  # rows of a table, if anything
            return None
        taken, axes = getattr(numbers, names.batching), range(len(indices.shape) - 1)
        for column, dim in enumerate(getattr(numbers, names.mapped)):
            for count, axis in ((n, a) for n in self._sizes for a in axes if a not in taken):
                (size, rest), (each, more) = divmod(operand.shape[dim], count), divmod(indices.shape[axis], count)
                if rest or more or not size or not each or dim not in getattr(numbers, names.gone):
                    continue
                known = self._constants.value(indices)
                if known is None:
                    return None
                part = _OwnPart(dim, column, axis, count, size, each)
                if part.holds(known[..., column]):
                    return part
        return None


@dataclass(frozen=True, slots=True)
class _OwnPart:
    """Examples' parts of a dimension of an operand."""

    dim: int  #: The dimension.
    column: int  #: The component of index vectors that has it.
    axis: int  #: The axis of the indices that has `each` for each of `count` examples, in order.
    count: int
    size: int  #: The elements of an example's part.
    each: int

    def holds(self, index: np.ndarray) -> bool:
        """Returns whether each example's indices are within its own part."""
        examples = np.arange(self.count * self.each) // self.each
        expected = examples.reshape([-1 if d == self.axis else 1 for d in range(index.ndim)])
        return bool(np.all(index // self.size == expected))


def _names(equation: Equation) -> _Names:
    return _GATHER if equation.op == "gather" else _SCATTER


def _counting_pairs(equation: Equation, counting: Counting) -> dict[int, int]:
    """Maps dimensions of the operand to the axes of the indices along which their index counts completely."""
    numbers, names = equation.params["dimension_numbers"], _names(equation)
    operand, indices = equation.inputs[:2]
    taken = set(getattr(numbers, names.batching))
    pairs: dict[int, int] = {}
    for dim, axis in zip(getattr(numbers, names.mapped), counting.columns(indices), strict=False):
        if axis is None or dim not in getattr(numbers, names.gone) or axis in taken:
            continue
        if operand.shape[dim] == indices.shape[axis] > 1:
            pairs[int(dim)] = axis
            taken.add(axis)
    return pairs


def _without(equation: Equation, pairs: dict[int, int]) -> list[Equation]:
    """Returns the equation with indices that count along axes as batching dimensions."""
    numbers, names = equation.params["dimension_numbers"], _names(equation)
    batched = dict(zip(numbers.operand_batching_dims, getattr(numbers, names.batching), strict=True)) | pairs
    mapped = getattr(numbers, names.mapped)
    kept = [k for k, dim in enumerate(mapped) if dim not in pairs]
    changed = {
        names.gone: tuple(d for d in getattr(numbers, names.gone) if d not in pairs),
        names.mapped: tuple(mapped[k] for k in kept),
        "operand_batching_dims": tuple(sorted(batched)),
        names.batching: tuple(batched[d] for d in sorted(batched)),
    }
    params = {**equation.params, "dimension_numbers": numbers._replace(**changed), "indices_are_sorted": False}

    def access(operand: Leaf, indices: Leaf, *updates: Leaf) -> Leaf:
        return jax_compat.bind(equation.primitive, (operand, _columns(indices, kept), *updates), params)[0]

    return expand(access, equation, equation.inputs, equation.outputs[0])


def _sliced(equation: Equation, dim: int, axis: int) -> list[Equation] | None:
    """Returns the equation with all of a dimension in place of an index that counts along an axis of the indices; None
    if its results would have their axes in another order."""
    numbers, names = equation.params["dimension_numbers"], _names(equation)
    operand, values = equation.inputs[0], (equation.outputs[0] if equation.op == "gather" else equation.inputs[2])
    window = "offset_dims" if equation.op == "gather" else "update_window_dims"
    old, mapped, gone = (getattr(numbers, name) for name in (window, names.mapped, names.gone))
    at = [d for d in range(len(values.shape)) if d not in old][axis]
    before = [d for d in range(dim) if d not in gone and d not in numbers.operand_batching_dims]
    new = tuple(sorted((*old, at)))
    if new.index(at) != len(before):
        return None
    kept = [k for k, d in enumerate(mapped) if d != dim]
    changed = {
        window: new,
        names.gone: tuple(d for d in gone if d != dim),
        names.mapped: tuple(mapped[k] for k in kept),
        names.batching: tuple(a - (a > axis) for a in getattr(numbers, names.batching)),
    }
    params = {**equation.params, "dimension_numbers": numbers._replace(**changed), "indices_are_sorted": False}
    if equation.op == "gather":
        sizes = equation.params["slice_sizes"]
        params["slice_sizes"] = (*sizes[:dim], operand.shape[dim], *sizes[dim + 1 :])

    def access(operand: Leaf, indices: Leaf, *updates: Leaf) -> Leaf:
        once = jax.lax.index_in_dim(_columns(indices, kept), 0, axis, keepdims=False)
        return jax_compat.bind(equation.primitive, (operand, once, *updates), params)[0]

    return expand(access, equation, equation.inputs, equation.outputs[0])


def _columns(indices: Leaf, kept: Sequence[int]) -> Leaf:
    last = indices.ndim - 1
    columns = [jax.lax.slice_in_dim(indices, k, k + 1, axis=last) for k in kept]
    if len(columns) > 1:
        return jax.lax.concatenate(columns, last)
    return columns[0] if columns else jax.lax.slice_in_dim(indices, 0, 0, axis=last)


def _in_parts(equation: Equation, part: _OwnPart) -> list[Equation]:
    """Returns the equation with an axis of the operand, and one of the indices, for the examples."""
    numbers, names = equation.params["dimension_numbers"], _names(equation)
    dim, axis, count = part.dim, part.axis, part.count
    is_gather = equation.op == "gather"
    window = numbers.offset_dims if is_gather else numbers.update_window_dims
    values = equation.outputs[0] if is_gather else equation.inputs[2]
    outer = [d for d in range(len(values.shape)) if d not in window][axis]  # of the indices' axis
    mapped = getattr(numbers, names.mapped)
    kept = [k for k in range(len(mapped)) if k != part.column]

    def of_operand(d: int) -> int:
        return d + (d > dim)

    pairs = zip(numbers.operand_batching_dims, getattr(numbers, names.batching), strict=True)
    batched = {of_operand(d): at + (at > axis) for d, at in pairs} | {dim: axis}
    window = tuple(d + (d > outer) for d in window)
    changed = {
        "offset_dims" if is_gather else "update_window_dims": window,
        names.gone: tuple(sorted([dim + 1, *(of_operand(d) for d in getattr(numbers, names.gone) if d != dim)])),
        names.mapped: (*(of_operand(mapped[k]) for k in kept), dim + 1),
        "operand_batching_dims": tuple(sorted(batched)),
        names.batching: tuple(batched[d] for d in sorted(batched)),
    }
    params = {**equation.params, "dimension_numbers": numbers._replace(**changed), "indices_are_sorted": False}
    if is_gather:
        sizes = equation.params["slice_sizes"]
        params["slice_sizes"] = (*sizes[:dim], 1, 1, *sizes[dim + 1 :])

    def access(operand: Leaf, indices: Leaf, *updates: Leaf) -> Leaf:
        operand = _split(operand, dim, count, part.size)
        indices = _split(indices, axis, count, part.each)
        example = jax.lax.broadcasted_iota(indices.dtype, (*indices.shape[:-1], 1), axis)
        own = _columns(indices, [part.column]) - example * jnp.asarray(part.size, indices.dtype)
        indices = jax.lax.concatenate([_columns(indices, kept), own], indices.ndim - 1) if kept else own
        updates = tuple(_split(x, outer, count, part.each) for x in updates)
        (result,) = jax_compat.bind(equation.primitive, (operand, indices, *updates), params)
        return result.reshape(equation.outputs[0].shape)

    return expand(access, equation, equation.inputs, equation.outputs[0])


def _split(x: Leaf, axis: int, *sizes: int) -> Leaf:
    return x.reshape((*x.shape[:axis], *sizes, *x.shape[axis + 1 :]))
