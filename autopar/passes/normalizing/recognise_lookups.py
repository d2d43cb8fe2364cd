"""Lookups that are written as products with a one-hot matrix become gathers, their transposes scatter-adds.

    one_hot(ids, V) @ table  ->  table[ids], a row of zeros where an id is out of range (also a negative one)
    one_hot(ids, V).T @ g    ->  zeros.at[ids].add(g), ids out of range dropped

`one_hot` is what `jax.nn.one_hot` computes, however it was written: ids compared with an iota, as numbers. Only
products with what is made of the state alone are rewritten, and the transposes of products of so many classes: other
one-hot products (the labels of a loss, the experts of a mixture) are no lookups in a table. A sum of products of which
all but one are 0 is exact for finite numbers. A gradient that isn't finite makes NaN of the other rows (0 * inf), which
`_as_product` does, too; only a table that itself holds an infinity or a NaN differs, as looked up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from autopar.analysis.counting import Counting
from autopar.analysis.primitives import IDENTITIES, SHAPED
from autopar.ir.program import Atom, Block, Equation, Program, Var
from autopar.ir.writer import expand

_FILL = jax.lax.GatherScatterMode.FILL_OR_DROP
#: Operations after which a value is still made of the state alone, row by row, so that its product is a lookup.
_KEEPS = (
    IDENTITIES
    | SHAPED
    | frozenset("convert_element_type mul div neg add sub optimization_barrier reduce_precision select_n".split())
)


@dataclass(frozen=True, slots=True)
class OneHot:
    """A one-hot array.

    Attributes:
      ids: What is compared with the classes, before it is repeated.
      dims: Where the ids' axes are in the comparison.
      compared: The shape of the comparison.
      along: Its class axis.
      order: The comparison's axes in the array, which may be transposed.
    """

    ids: Atom
    dims: tuple[int, ...]
    compared: tuple[int, ...]
    along: int
    order: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's own shape."""
        return tuple(self.compared[d] for d in self.order)

    @property
    def axis(self) -> int:
        """The array's class axis."""
        return self.order.index(self.along)

    def expanded(self, ids: Any) -> Any:
        """The ids in the array's shape without the class axis; int32, of 64 bits int64 (what it can't hold is negative
        then, and so still no class)."""
        others = [d for d in range(len(self.compared)) if d != self.along]
        full = [self.compared[d] for d in others]
        ids = ids.astype(jnp.int64 if ids.dtype.itemsize == 8 else jnp.int32)
        if list(ids.shape) != full:
            ids = jax.lax.broadcast_in_dim(ids, full, [others.index(d) for d in self.dims])
        return jax.lax.transpose(ids, [others.index(d) for d in self.order if d != self.along])


@dataclass(frozen=True, slots=True)
class _Facts:
    """Knows what makes the values of a block, and which of them count along an axis."""

    producers: Mapping[Atom, Equation]
    counting: Counting


def recognise_lookups(program: Program, counting: Counting) -> tuple[Program, int]:
    """The program with lookups for one-hot products, and how many products there were.

    Args:
      program: Any program.
      counting: Which of its values count along an axis, as classes do.
    """
    pairs = zip(program.block.inputs, program.inputs, strict=True)
    states = {var for var, input_ in pairs if input_.role in ("state", "table")}
    extents: set[int] = set()
    block, lookups = _lookups(program.block, states, extents, counting)
    if not lookups:
        return program, 0
    block, transposes = _transposes(block, extents, counting)
    return dataclasses.replace(program, block=block), lookups + transposes


def _lookups(block: Block, states: set[Var], extents: set[int], counting: Counting) -> tuple[Block, int]:
    """A block with gathers for products, and how many; `extents` grows by the numbers of rows that are looked up in.

    `states`: its inputs that are made of the state alone.
    """
    facts = _Facts({v: e for e in block.equations for v in e.outputs}, counting)
    pure: set[Atom] = set(states)

    def rewrite(equation: Equation) -> tuple[list[Equation] | None, int]:
        variables = [a for a in equation.inputs if isinstance(a, Var)]
        if equation.op in _KEEPS and variables and all(a in pure for a in variables):
            pure.update(equation.outputs)
        if equation.op == "dot_general":
            made = _lookup(equation, facts, pure, extents)
            return made, int(made is not None)
        return _in_bodies(equation, lambda body: _lookups(body, _inner(equation, body, pure), extents, counting))

    return _rewritten(block, rewrite)


def _transposes(block: Block, extents: set[int], counting: Counting) -> tuple[Block, int]:
    """A block with scatter-adds for products of gradients with one-hot matrices of so many classes."""
    facts = _Facts({v: e for e in block.equations for v in e.outputs}, counting)

    def rewrite(equation: Equation) -> tuple[list[Equation] | None, int]:
        if equation.op == "dot_general":
            made = _push(equation, facts, extents)
            return made, int(made is not None)
        return _in_bodies(equation, lambda body: _transposes(body, extents, counting))

    return _rewritten(block, rewrite)


def _rewritten(block: Block, rewrite: Callable[[Equation], tuple[list[Equation] | None, int]]) -> tuple[Block, int]:
    equations: list[Equation] = []
    total = 0
    for equation in block.equations:
        made, count = rewrite(equation)
        equations += [equation] if made is None else made
        total += count
    return block.with_equations(equations), total


def _in_bodies(equation: Equation, rewrite: Callable[[Block], tuple[Block, int]]) -> tuple[list[Equation] | None, int]:
    made = [rewrite(body) for body in equation.bodies]
    return [equation.with_bodies([body for body, _ in made])], sum(count for _, count in made)


def _inner(equation: Equation, body: Block, pure: set[Atom]) -> set[Var]:
    skipped = len(equation.inputs) - len(body.inputs)
    if equation.op not in ("scan", "remat", "cond") or skipped < 0:
        return set()
    sequences = equation.params["num_consts"] + equation.params["num_carry"] if equation.op == "scan" else None
    pairs = list(zip(body.inputs, equation.inputs[skipped:], strict=True))[:sequences]
    return {v for v, a in pairs if a in pure}


def _lookup(equation: Equation, facts: _Facts, pure: set[Atom], extents: set[int]) -> list[Equation] | None:
    """The lookup in place of `one_hot @ table`."""
    contract, batch = equation.params["dimension_numbers"]
    for k in (0, 1):
        table, hot = equation.inputs[1 - k], equation.inputs[k]
        if table not in pure or any(batch) or len(contract[k]) != 1:
            continue
        one_hot = _one_hot(hot, facts)
        if one_hot is None or one_hot.axis != contract[k][0]:
            continue
        rows, dtype = contract[1 - k][0], equation.outputs[0].dtype
        extents.add(table.shape[rows])

        def look(table: Any, ids: Any, one_hot: Any = one_hot, rows: int = rows, k: int = k, dtype: Any = dtype) -> Any:
            ids = one_hot.expanded(ids)
            start = ids.ndim if k == 0 else 0  # the axes of the left operand lead in the result
            numbers = jax.lax.GatherDimensionNumbers(tuple(range(start, start + table.ndim - 1)), (rows,), (rows,))
            sizes = [1 if d == rows else size for d, size in enumerate(table.shape)]
            return jax.lax.gather(table, ids[..., None], numbers, sizes, mode=_FILL, fill_value=0).astype(dtype)

        return expand(look, equation, (table, one_hot.ids), equation.outputs[0])
    return None


def _push(equation: Equation, facts: _Facts, extents: set[int]) -> list[Equation] | None:
    """The scatter-add in place of a product that contracts all axes of a one-hot array but its classes."""
    contract, batch = equation.params["dimension_numbers"]
    for k in (0, 1):
        one_hot = _one_hot(equation.inputs[k], facts)
        if one_hot is None or any(batch) or one_hot.shape[one_hot.axis] not in extents:
            continue
        along, grad = contract[k], equation.inputs[1 - k]
        if sorted(along) != [d for d in range(len(one_hot.shape)) if d != one_hot.axis]:
            continue
        order = [contract[1 - k][list(along).index(d)] for d in sorted(along)]
        dtype = equation.outputs[0].dtype

        def push(grad: Any, ids: Any, hot: Any = one_hot, order: Any = order, k: int = k, dtype: Any = dtype) -> Any:
            ids = hot.expanded(ids)
            rest = [d for d in range(grad.ndim) if d not in order]
            extent = hot.shape[hot.axis]
            wide = jnp.promote_types(dtype, jnp.float32)  # a product adds up in float32 at least
            window = range(ids.ndim, ids.ndim + len(rest))
            updates = jax.lax.transpose(grad, (*order, *rest)).astype(wide)
            rows = jax.lax.scatter_add(
                jnp.zeros((extent, *(grad.shape[d] for d in rest)), wide),
                ids[..., None],
                jnp.where(jnp.isinf(updates), jnp.nan, updates),
                jax.lax.ScatterDimensionNumbers(tuple(window), (0,), (0,)),
                mode=_FILL,
            )
            rows = _as_product(rows, ids, updates, extent).astype(dtype)
            return rows if k == 0 else jax.lax.transpose(rows, (*range(1, rows.ndim), 0))

        return expand(push, equation, (grad, one_hot.ids), equation.outputs[0])
    return None


def _as_product(rows: Any, ids: Any, updates: Any, extent: int) -> Any:
    """Sums of rows with the NaN of a product: an infinite or NaN element of one id, times 0, is NaN in all other rows.

    Where one id alone has all such elements of a column, its own row is what they add up to. All other rows are NaN,
    also one whose own sum overflows: so that the two differ, infinite elements are added up as NaN.

    Args:
      rows: [V, ...], the sums, with NaN for infinite elements.
      ids: [...], out of range for no row.
      updates: [*ids, ...], what was added up.
      extent: V.
    """
    axes = tuple(range(ids.ndim))
    bad = ~jnp.isfinite(updates)
    of_rows = jax.lax.broadcast_in_dim(jnp.where((ids >= 0) & (ids < extent), ids, extent), updates.shape, axes)
    first = jnp.where(bad, of_rows, extent).min(axes, initial=extent)
    last = jnp.where(bad, of_rows, -1).max(axes, initial=-1)
    total = jnp.where(bad, updates, 0).sum(axes)
    none, one_id = last < 0, (first == last) & (last < extent)
    # 0 times 1 or NaN: what lifts the table counts on 0, and watches that it is 0.
    factor = jnp.where(none, 1.0, jnp.nan).astype(rows.dtype)
    spread = jnp.where(jnp.isnan(rows) & one_id, total, rows + (rows * 0) * factor)
    return jnp.where(jnp.isinf(rows) & none, rows, spread)


# --- one-hot arrays ---


def _one_hot(atom: Atom, facts: _Facts) -> OneHot | None:
    """What a one-hot array is made of; None of anything else."""
    equation, converted, orders = facts.producers.get(atom), False, []
    while equation is not None and equation.op in ("convert_element_type", "transpose"):
        converted = converted or equation.op == "convert_element_type"
        orders += [equation.params["permutation"]] if equation.op == "transpose" else []
        equation = facts.producers.get(equation.inputs[0])
    if equation is None or equation.op != "eq" or not converted:
        return None
    shape = equation.outputs[0].shape
    order = tuple(range(len(shape)))
    for permutation in reversed(orders):
        order = tuple(order[d] for d in permutation)
    for ids, classes in (equation.inputs, equation.inputs[::-1]):
        if not jnp.issubdtype(ids.dtype, jnp.integer):
            return None
        axis = facts.counting.axis(classes)
        if axis is None or classes.shape[axis] != shape[axis]:
            continue
        place = _without(ids, axis, facts.producers)
        if place is not None:
            return OneHot(*place, shape, axis, order)
    return None


def _without(ids: Atom, axis: int, producers: Mapping[Atom, Equation]) -> tuple[Atom, tuple[int, ...]] | None:
    """Ids that are repeated along an axis, before they are, and where their axes are."""
    equation = producers.get(ids)
    if equation is None or equation.op != "broadcast_in_dim":
        return None
    source, dims = equation.inputs[0], equation.params["broadcast_dimensions"]
    return None if axis in dims else (source, tuple(map(int, dims)))
