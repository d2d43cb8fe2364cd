"""Lookups behind a reshape that splits a table's rows, or merges them, evenly become lookups in the table itself.

    t.reshape(500, 600, D)[i, j]       ->  t[600 * i + j]
    t.reshape(2 * V, D // 2)[i]        ->  t.reshape(V, 2, D // 2)[i // 2, i % 2]
    t.reshape(V // 2, 2 * D)[i]        ->  t[2 * i + [0, 1]]

and so do the scatters of their gradients, whose zeros are in the reshaped form: both forms are told in the factors that
they have in common (V // 2, 2, D of the last). What is out of range stays so.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar import jax_compat
from autopar.analysis.primitives import ELEMENTWISE
from autopar.ir.expand import expand
from autopar.ir.program import Atom, Block, Equation, Program, Var

Shape = tuple[int, ...]
_UNORDERED = {"indices_are_sorted": False, "unique_indices": False}
#: Of ids: others don't hold a table's numbers of rows, or wrap around.
_INTEGERS = frozenset("int8 int16 int32 int64 uint8 uint16".split())


def follow_reshapes(program: Program) -> tuple[Program, int]:
    """The program with such lookups and scatters in the tables themselves, and how many there were."""
    pairs = zip(program.block.inputs, program.inputs, strict=True)
    walk = _Walk({var for var, input_ in pairs if input_.role in ("state", "table")})
    block = walk.block(program.block)
    return (dataclasses.replace(program, block=block), walk.count) if walk.count else (program, 0)


@dataclass(frozen=True)
class _Factors:
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
def _factors(table: Shape, reshaped: Shape) -> _Factors | None:
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
    return _Factors(tuple(sizes), *(tuple(map(tuple, group)) for group in groups))


class _Walk:
    """Rewrites blocks.

    Attributes:
      pure: Values that are made of states alone, element by element, and those into which something is scattered.
      views: Reshaped value -> the same in the shape of its table.
      tables: Reshaped shape -> that of its table.
      uniform: Value -> the scalar that all its elements are.
      env: Value -> what takes its place.
      count: Lookups and scatters that were rewritten.
    """

    def __init__(self, pure: set[Var]) -> None:
        self.pure: set[Atom] = set(pure)
        self.views: dict[Atom, Atom] = {}
        self.tables: dict[Shape, Shape] = {}
        self.uniform: dict[Atom, Atom] = {}
        self.env: dict[Atom, Atom] = {}
        self.count = 0

    def block(self, block: Block) -> Block:
        equations: list[Equation] = []
        for equation in block.equations:
            inputs = tuple(self.env.get(a, a) for a in equation.inputs)
            if any(a is not b for a, b in zip(inputs, equation.inputs, strict=True)):
                equation = dataclasses.replace(equation, inputs=inputs)
            equation = equation.with_bodies([self._body(equation, body) for body in equation.bodies])
            equations += self._rewritten(equation)
        outputs = tuple(self.env.get(a, a) for a in block.outputs)
        same = all(a is b for a, b in zip(outputs, block.outputs, strict=True))
        return block.with_equations(equations) if same else Block(block.inputs, tuple(equations), outputs)

    def _body(self, equation: Equation, body: Block) -> Block:
        """A nested block; of what a loop carries nothing is known."""
        skipped = len(equation.inputs) - len(body.inputs)
        if equation.op in ("scan", "remat", "cond") and skipped >= 0:
            fixed = equation.params["num_consts"] if equation.op == "scan" else None
            pairs = list(zip(body.inputs, equation.inputs[skipped:], strict=True))[:fixed]
            self.pure.update(v for v, a in pairs if a in self.pure)
        return self.block(body)

    def _rewritten(self, equation: Equation) -> list[Equation]:
        """The equation, or what takes its place; values in the shapes of their tables besides."""
        variables = [a for a in equation.inputs if isinstance(a, Var)]
        op = equation.op
        if op in ELEMENTWISE:
            if variables and all(a in self.pure for a in variables):
                self.pure.update(equation.outputs)
            return [equation, *self._elementwise(equation)]
        if op == "broadcast_in_dim" and equation.inputs[0].shape == ():
            self.uniform[equation.outputs[0]] = equation.inputs[0]
        elif op == "reshape":
            return self._reshape(equation)
        elif op == "gather" and equation.inputs[0] in self.views:
            return self._access(equation, self.views[equation.inputs[0]], ()) or [equation]
        elif op.startswith("scatter"):
            return self._scatter(equation)
        return [equation]

    def _reshape(self, equation: Equation) -> list[Equation]:
        (operand,), (out,) = equation.inputs, equation.outputs
        table = self.views.get(operand, operand)
        if table is not operand and table.shape == out.shape:
            self.env[out] = table
            return []
        is_apart = table.shape[:1] != out.shape[:1] and bool(table.shape) and 0 not in table.shape
        if table in self.pure and is_apart and not jax_compat.is_key(table.dtype):
            if _factors(table.shape, out.shape) is not None:
                self.views[out] = table
                self.tables.setdefault(out.shape, table.shape)
        return [equation] if table is operand else expand(lambda x: jnp.reshape(x, out.shape), equation, (table,), out)

    def _elementwise(self, equation: Equation) -> list[Equation]:
        """The equation once more, in the shape of the table whose reshaped values it takes."""
        shapes = {self.views[a].shape for a in equation.inputs if a in self.views}
        known = (a.shape == () or a in self.views or a in self.uniform for a in equation.inputs)
        if len(shapes) != 1 or not all(known):
            return []
        (shape,) = shapes
        atoms = [self.views.get(a, self.uniform.get(a, a)) for a in equation.inputs]
        params = {**equation.params, "sharding": None} if "sharding" in equation.params else equation.params

        def again(*operands: Any) -> Any:
            operands = tuple(
                jnp.broadcast_to(x, shape) if a.shape else x for x, a in zip(operands, equation.inputs, strict=True)
            )
            return jax_compat.bind(equation.primitive, operands, params)[0]

        return self._viewed(equation, expand(again, equation, atoms))

    def _viewed(self, equation: Equation, made: list[Equation]) -> list[Equation]:
        self.views[equation.outputs[0]] = made[-1].outputs[0]
        self.pure.add(made[-1].outputs[0])
        return made

    def _scatter(self, equation: Equation) -> list[Equation]:
        operand = equation.inputs[0]
        if operand in self.views:
            view, made = self.views[operand], []
        elif operand in self.uniform and operand.shape in self.tables:
            shape = self.tables[operand.shape]
            made = expand(lambda x: jnp.broadcast_to(x, shape), equation, (self.uniform[operand],))
            view = made[-1].outputs[0]
        else:
            return [equation]
        scattered = self._access(equation, view, equation.inputs[2:])
        if scattered is None:
            return [equation]
        out = equation.outputs[0]
        back = expand(lambda x: jnp.reshape(x, out.shape), equation, (scattered[-1].outputs[0],), out)
        return [*made, *self._viewed(equation, scattered), *back]

    def _access(self, equation: Equation, view: Atom, updates: Sequence[Atom]) -> list[Equation] | None:
        """The gather or scatter in the table itself; None where it isn't of single places and whole windows.

        Args:
          equation: The gather or scatter.
          view: Its operand in the shape of the table.
          updates: Of a scatter.
        """
        operand, indices = equation.inputs[:2]
        factors = _factors(view.shape, operand.shape)
        places = _Places.of(equation)
        if factors is None or places is None or str(indices.dtype) not in _INTEGERS:
            return None
        picked = {f for d in places.indexed for f in factors.reshaped[d]}
        if not picked.intersection(factors.table[0]) or factors.fine[0] > np.iinfo(np.int32).max:
            return None
        self.count += 1
        access = functools.partial(_accessed, equation, factors, places)
        return expand(access, equation, (view, indices, *updates), None if updates else equation.outputs[0])


@dataclass(frozen=True)
class _Places:
    """What a gather or scatter takes: a single place along each indexed axis of its operand, all of the others.

    Attributes:
      indexed: Axes of the operand, in the order of the components of the indices.
      windows: The others.
      inner: The axes of the result (or the updates) that those are.
    """

    indexed: Shape
    windows: Shape
    inner: Shape

    @staticmethod
    def of(equation: Equation) -> _Places | None:
        """None of one that takes something else."""
        numbers, shape = equation.params["dimension_numbers"], equation.inputs[0].shape
        if numbers.operand_batching_dims:
            return None
        if equation.op == "gather":
            indexed, gone, inner = numbers.start_index_map, numbers.collapsed_slice_dims, numbers.offset_dims
            sizes = [equation.params["slice_sizes"][d] for d in range(len(shape)) if d not in gone]
        else:
            indexed, gone = numbers.scatter_dims_to_operand_dims, numbers.inserted_window_dims
            inner = numbers.update_window_dims
            sizes = [equation.inputs[2].shape[d] for d in inner]
        windows = tuple(d for d in range(len(shape)) if d not in gone)
        if set(indexed) != set(gone) or sizes != [shape[d] for d in windows]:
            return None
        return _Places(tuple(map(int, indexed)), windows, tuple(map(int, inner)))


def _accessed(
    equation: Equation, factors: _Factors, places: _Places, table: Any, indices: Any, updates: Any = None
) -> Any:
    """The gather's result, or the scatter's in the shape of the table."""
    sizes, shape, batch = factors.sizes, equation.inputs[0].shape, indices.shape[:-1]
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
        params = {"dimension_numbers": numbers, "slice_sizes": tuple(slices), **_UNORDERED}
        found = jax_compat.bind(equation.primitive, (fine, index), {**equation.params, **params})[0]
        back = [len(batch) + by_factor.index(k) for k in range(len(taken))]
        found = jnp.transpose(found, (*range(len(batch)), *back))
        return jnp.transpose(jnp.reshape(found, (*batch, *(shape[d] for d in places.windows))), order)
    moved = jnp.transpose(updates, [order.index(d) for d in axes])
    moved = jnp.reshape(moved, (*batch, *(sizes[f] for f in taken)))
    moved = jnp.transpose(moved, (*range(len(batch)), *(len(batch) + k for k in by_factor)))
    numbers = jax.lax.ScatterDimensionNumbers(window, tuple(sorted(gone)), gone)
    params = {"dimension_numbers": numbers, **_UNORDERED}
    made = jax_compat.bind(equation.primitive, (fine, index, moved), {**equation.params, **params})[0]
    return jnp.reshape(made, table.shape)


def _index(
    equation: Equation, factors: _Factors, places: _Places, indices: Any, rows: Sequence[int]
) -> tuple[Any, list[int]]:
    """Index vectors of rows and of factors of other axes, [*ids, *rows, 1 + columns]; and those factors.

    Args:
      equation: The gather or scatter.
      factors: Of its operand and the table.
      places: What it takes.
      indices: [*ids, axes], its own.
      rows: Factors by which rows lie beside each other that are taken together.
    """
    sizes, shape, mode = factors.sizes, equation.inputs[0].shape, str(equation.params["mode"])
    indices = indices.astype(np.int64 if indices.dtype.itemsize == 8 else np.int32)
    parts = {d: indices[..., k] for k, d in enumerate(places.indexed)}
    within = functools.reduce(jnp.logical_and, ((part >= 0) & (part < shape[d]) for d, part in parts.items()))
    lead = indices.ndim - 1
    ids: dict[int, Any] = {}
    for d, part in parts.items():
        left = jnp.clip(part, 0, shape[d] - 1).reshape(*part.shape, *[1] * len(rows))
        for f in reversed(factors.reshaped[d]):
            ids[f], left = left % sizes[f], left // sizes[f]
    for k, f in enumerate(rows):
        ids[f] = jax.lax.broadcasted_iota(indices.dtype, [sizes[f] if d == k else 1 for d in range(len(rows))], k)
    row = functools.reduce(lambda row, f: row * sizes[f] + ids[f], factors.table[0], np.zeros((), indices.dtype))
    is_clipped = "CLIP" in mode or (equation.op == "gather" and "FILL" not in mode)
    if not is_clipped:  # no row
        row = jnp.where(within.reshape(*within.shape, *[1] * len(rows)), row, factors.fine[0])
    columns = [f for f in factors.others if f in ids]
    full = (*indices.shape[:lead], *(sizes[f] for f in rows))
    return jnp.stack([jnp.broadcast_to(x, full) for x in (row, *(ids[f] for f in columns))], -1), columns
