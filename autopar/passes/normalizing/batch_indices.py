"""Rewrites gathers and scatters that name each example by its number as batched ones, which keep examples apart.

  h[jnp.arange(n), ids]  ->  the gather of `jax.vmap(lambda h, i: h[i])(h, ids)`

`analysis.counting` knows which index counts along an axis; it is never out of range, so the other indices are clipped,
filled or dropped as before. Top-k mixtures of experts, the last token of a sentence and `put_along_axis` are written
so; batched, they run in microbatches and on single devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

from autopar import jax_compat
from autopar.analysis.counting import Counting
from autopar.ir.program import Equation, Program
from autopar.ir.writer import expand
from autopar.jax_types import Leaf
from autopar.passes.rewriting import Rewriter


@dataclasses.dataclass(frozen=True, slots=True)
class _Names:
    """Names of corresponding dimension numbers of gathers and scatters."""

    gone: str
    mapped: str
    paired: str


_GATHER = _Names("collapsed_slice_dims", "start_index_map", "start_indices_batching_dims")
_SCATTER = _Names("inserted_window_dims", "scatter_dims_to_operand_dims", "scatter_indices_batching_dims")


def batch_indices(program: Program, counting: Counting) -> tuple[Program, int]:
    """Returns the program with such gathers and scatters batched, and their number."""
    return _Batch(counting).run(program)


class _Batch(Rewriter):
    def __init__(self, counting: Counting) -> None:
        super().__init__()
        self._counting = counting

    def rule(self, equation: Equation) -> list[Equation]:
        is_access = equation.op == "gather" or equation.op.startswith("scatter")
        pairs = _counting_pairs(equation, self._counting) if is_access else {}
        self.count += bool(pairs)
        return _without(equation, pairs) if pairs else [equation]


def _names(equation: Equation) -> _Names:
    return _GATHER if equation.op == "gather" else _SCATTER


def _counting_pairs(equation: Equation, counting: Counting) -> dict[int, int]:
    """Maps dimensions of the operand to the axes of the indices along which their index counts completely."""
    numbers, names = equation.params["dimension_numbers"], _names(equation)
    operand, indices = equation.inputs[:2]
    taken = set(getattr(numbers, names.paired))
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
    batched = dict(zip(numbers.operand_batching_dims, getattr(numbers, names.paired), strict=True)) | pairs
    mapped = getattr(numbers, names.mapped)
    kept = [k for k, dim in enumerate(mapped) if dim not in pairs]
    changed = {
        names.gone: tuple(d for d in getattr(numbers, names.gone) if d not in pairs),
        names.mapped: tuple(mapped[k] for k in kept),
        "operand_batching_dims": tuple(sorted(batched)),
        names.paired: tuple(batched[d] for d in sorted(batched)),
    }
    params = {
        **equation.params,
        "dimension_numbers": numbers._replace(**changed),
        "indices_are_sorted": False,
    }

    def access(operand: Leaf, indices: Leaf, *updates: Leaf) -> Leaf:
        return jax_compat.bind(equation.primitive, (operand, _columns(indices, kept), *updates), params)[0]

    return expand(access, equation, equation.inputs, equation.outputs[0])


def _columns(indices: Leaf, kept: Sequence[int]) -> Leaf:
    last = indices.ndim - 1
    columns = [jax.lax.slice_in_dim(indices, k, k + 1, axis=last) for k in kept]
    if len(columns) > 1:
        return jax.lax.concatenate(columns, last)
    return columns[0] if columns else jax.lax.slice_in_dim(indices, 0, 0, axis=last)
