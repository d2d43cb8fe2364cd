"""Rewrites lookups that are written as products with a one-hot matrix as gathers, their transposes as scatter-adds.

  one_hot(ids, V) @ table  ->  table[ids], a row of zeros where an id is out of range (also a negative one)
  one_hot(ids, V).T @ g    ->  zeros.at[ids].add(g), ids out of range dropped

`one_hot` is what `jax.nn.one_hot` computes, however it is written: ids compared with an iota, as numbers. Only products
with functions of the state alone are rewritten, and transposes of products with as many classes: other one-hot products
(the labels of a loss, the experts of a mixture) are no lookups in a table. A sum of products of which all but one are 0
is exact for finite numbers. A non-finite gradient makes NaN of the other rows (0 * inf), and so does `_as_product`;
only a table that itself holds an infinity or a NaN differs, by being looked up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from autopar.analysis.counting import Counting
from autopar.analysis.primitives import IDENTITIES, SHAPED
from autopar.ir.program import Atom, Equation, Literal, Program
from autopar.ir.writer import expand
from autopar.jax_types import Dtype, Leaf
from autopar.passes.rewriting import LookupRewriter, Rewriter

_FILL = jax.lax.GatherScatterMode.FILL_OR_DROP
#: Operations that keep a value a function of the state alone, row by row, so that its product is a lookup.
_KEEPS = (
    IDENTITIES
    | SHAPED
    | frozenset("convert_element_type mul div neg add sub optimization_barrier reduce_precision select_n".split())
)
#: Operations between a comparison and a product that leave a one-hot array one.
_PLACES = IDENTITIES | {"convert_element_type", "transpose"}


@dataclass(frozen=True, slots=True)
class OneHot:
    """A one-hot array."""

    ids: Atom  #: The ids that are compared with the classes, before they are repeated.
    dims: tuple[int, ...]  #: The ids' axes in the comparison.
    compared: tuple[int, ...]  #: The shape of the comparison.
    along: int  #: Its class axis.
    order: tuple[int, ...]  #: The comparison's axes in the array, which may be transposed.

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.compared[d] for d in self.order)

    @property
    def axis(self) -> int:
        return self.order.index(self.along)

    def expanded(self, ids: Leaf) -> Leaf:
        """Returns the ids in the array's shape without the class axis, as int32 or, of 64 bits, int64.

        An unsigned id that it can't hold becomes negative, and so still is no class.
        """
        others = [d for d in range(len(self.compared)) if d != self.along]
        full = [self.compared[d] for d in others]
        ids = ids.astype(jnp.int64 if ids.dtype.itemsize == 8 else jnp.int32)
        if list(ids.shape) != full:
            ids = jax.lax.broadcast_in_dim(ids, full, [others.index(d) for d in self.dims])
        return jax.lax.transpose(ids, [others.index(d) for d in self.order if d != self.along])


def recognise_lookups(program: Program, counting: Counting) -> tuple[Program, int]:
    """Returns the program with lookups for one-hot products, and their number. `counting`: finds the classes."""
    lookups = _Lookups(program, counting)
    program, count = lookups.run(program)
    if not count:
        return program, 0
    program, transposes = _Transposes(lookups.extents, counting).run(program)
    return program, count + transposes


class _Lookups(LookupRewriter):
    """Rewrites products as gathers. `extents`: the numbers of rows of the tables."""

    keeps = _KEEPS

    def __init__(self, program: Program, counting: Counting) -> None:
        super().__init__(program)
        self.counting = counting
        self.extents: set[int] = set()

    def rule(self, equation: Equation) -> list[Equation]:
        written = self._lookup(equation) if equation.op == "dot_general" else None
        self.count += written is not None
        return [equation] if written is None else written

    def _lookup(self, equation: Equation) -> list[Equation] | None:
        contract, batch = equation.params["dimension_numbers"]
        for k in (0, 1):
            table, hot = equation.inputs[1 - k], equation.inputs[k]
            if table not in self.pure or any(batch) or len(contract[k]) != 1:
                continue
            one_hot = _one_hot(hot, self.made, self.counting)
            if one_hot is None or one_hot.axis != contract[k][0]:
                continue
            rows, dtype = contract[1 - k][0], equation.outputs[0].dtype
            self.extents.add(table.shape[rows])

            def look(
                table: Leaf, ids: Leaf, one_hot: OneHot = one_hot, rows: int = rows, k: int = k, dtype: Dtype = dtype
            ) -> Leaf:
                ids = one_hot.expanded(ids)
                start = ids.ndim if k == 0 else 0  # the axes of the left operand lead in the result
                numbers = jax.lax.GatherDimensionNumbers(tuple(range(start, start + table.ndim - 1)), (rows,), (rows,))
                sizes = [1 if d == rows else size for d, size in enumerate(table.shape)]
                return jax.lax.gather(table, ids[..., None], numbers, sizes, mode=_FILL, fill_value=0).astype(dtype)

            return expand(look, equation, (table, one_hot.ids), equation.outputs[0])
        return None


class _Transposes(Rewriter):
    """Rewrites products of gradients with one-hot matrices of as many classes as scatter-adds."""

    def __init__(self, extents: set[int], counting: Counting) -> None:
        super().__init__()
        self.extents, self.counting = extents, counting

    def rule(self, equation: Equation) -> list[Equation]:
        written = self._push(equation) if equation.op == "dot_general" else None
        self.count += written is not None
        return [equation] if written is None else written

    def _push(self, equation: Equation) -> list[Equation] | None:
        """Returns the scatter-add in place of a product that contracts all axes of a one-hot array but its classes."""
        contract, batch = equation.params["dimension_numbers"]
        for k in (0, 1):
            one_hot = _one_hot(equation.inputs[k], self.made, self.counting)
            if one_hot is None or any(batch) or one_hot.shape[one_hot.axis] not in self.extents:
                continue
            along, grad = contract[k], equation.inputs[1 - k]
            if sorted(along) != [d for d in range(len(one_hot.shape)) if d != one_hot.axis]:
                continue
            order = [contract[1 - k][list(along).index(d)] for d in sorted(along)]
            dtype = equation.outputs[0].dtype

            def push(
                grad: Leaf, ids: Leaf, hot: Any = one_hot, order: Any = order, k: int = k, dtype: Dtype = dtype
            ) -> Leaf:
                ids = hot.expanded(ids)
                rest = [d for d in range(grad.ndim) if d not in order]
                extent = hot.shape[hot.axis]
                is_exact = jnp.issubdtype(dtype, jnp.integer)
                # Products of floats accumulate in float32 at least.
                wide = dtype if is_exact else jnp.promote_types(dtype, jnp.float32)
                window = range(ids.ndim, ids.ndim + len(rest))
                updates = jax.lax.transpose(grad, (*order, *rest)).astype(wide)
                rows = jax.lax.scatter_add(
                    jnp.zeros((extent, *(grad.shape[d] for d in rest)), wide),
                    ids[..., None],
                    updates if is_exact else jnp.where(jnp.isinf(updates), jnp.nan, updates),
                    jax.lax.ScatterDimensionNumbers(tuple(window), (0,), (0,)),
                    mode=_FILL,
                )
                rows = rows if is_exact else _as_product(rows, ids, updates, extent).astype(dtype)
                return rows if k == 0 else jax.lax.transpose(rows, (*range(1, rows.ndim), 0))

            return expand(push, equation, (grad, one_hot.ids), equation.outputs[0])
        return None


def _as_product(rows: Leaf, ids: Leaf, updates: Leaf, extent: int) -> Leaf:
    """Adds the NaN of a product to sums of rows: a non-finite element of one id, times 0, is NaN in all other rows.

    If one id has all such elements of a column, its own row is their sum. All other rows are NaN, even one whose own
    sum overflows; to tell the two apart, infinite elements are added up as NaN.

    Args:
      rows: [V, ...], the sums, with NaN for infinite elements.
      ids: [...], out of range for no row.
      updates: [*ids, ...], the terms of the sums.
      extent: V.
    """
    axes = tuple(range(ids.ndim))
    bad = ~jnp.isfinite(updates)
    of_rows = jax.lax.broadcast_in_dim(jnp.where((ids >= 0) & (ids < extent), ids, extent), updates.shape, axes)
    first = jnp.where(bad, of_rows, extent).min(axes, initial=extent)
    last = jnp.where(bad, of_rows, -1).max(axes, initial=-1)
    total = jnp.where(bad, updates, 0).sum(axes)
    none, one_id = last < 0, (first == last) & (last < extent)
    # 0 times 1 or NaN: lifting assumes 0 for untouched rows, and checks it.
    factor = jnp.where(none, 1.0, jnp.nan).astype(rows.dtype)
    spread = jnp.where(jnp.isnan(rows) & one_id, total, rows + (rows * 0) * factor)
    return jnp.where(jnp.isinf(rows) & none, rows, spread)


# --- one-hot arrays ---


def _one_hot(atom: Atom, made: Mapping[Atom, Equation], counting: Counting) -> OneHot | None:
    """Returns a description of a one-hot array; None of any other."""
    equation, orders = made.get(atom), []
    while equation is not None and (equation.op in _PLACES or _is_choice(equation, made)):
        orders += [equation.params["permutation"]] if equation.op == "transpose" else []
        equation = made.get(equation.inputs[0])
    if equation is None or equation.op != "eq":
        return None
    shape = equation.outputs[0].shape
    order = tuple(range(len(shape)))
    for permutation in reversed(orders):
        order = tuple(order[d] for d in permutation)
    for ids, classes in (equation.inputs, equation.inputs[::-1]):
        if not jnp.issubdtype(ids.dtype, jnp.integer):
            return None
        axis = counting.axis(classes)
        if axis is None or classes.shape[axis] != shape[axis]:
            continue
        found = _without(ids, axis, made)
        if found is not None:
            return OneHot(*found, shape, axis, order)
    return None


def _is_choice(equation: Equation, made: Mapping[Atom, Equation]) -> bool:
    """Returns whether an equation is `jnp.where(matches, 1, 0)`."""

    def number(atom: Atom) -> object:
        maker = made.get(atom)
        source = maker.inputs[0] if maker is not None and maker.op == "broadcast_in_dim" else atom
        return source.value if isinstance(source, Literal) and source.shape == () else None

    return equation.op == "select_n" and [number(a) for a in equation.inputs[1:]] == [0, 1]


def _without(ids: Atom, axis: int, producers: Mapping[Atom, Equation]) -> tuple[Atom, tuple[int, ...]] | None:
    equation = producers.get(ids)
    if equation is None or equation.op != "broadcast_in_dim":
        return None
    source, dims = equation.inputs[0], equation.params["broadcast_dimensions"]
    return None if axis in dims else (source, tuple(map(int, dims)))
