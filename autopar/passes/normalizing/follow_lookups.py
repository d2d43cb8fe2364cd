"""Rewrites lookups in joined tables as lookups in each of the parts, one of which is selected.

  jnp.concatenate([t, zeros])[i]   ->  jnp.where(i < len(t), t[min(i, len(t) - 1)], zeros[max(i - len(t), 0)])
  jnp.pad(t, ((1, 0), (0, 0)))[i]     the same, of zeros and t

The scatters of their gradients, of which a slice is taken for each part, become scatters into each.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from autopar import jax_compat
from autopar.analysis.primitives import ELEMENTWISE
from autopar.ir.program import ArrayType, Atom, Block, Equation, Literal, Program, Var
from autopar.ir.writer import expand
from autopar.jax_types import Array, Index, Leaf
from autopar.passes.rewriting import INTEGERS, UNORDERED, LookupRewriter, Rewriter

_FILL = jax.lax.GatherScatterMode.FILL_OR_DROP
_SCATTERS = frozenset({"scatter", "scatter-add", "scatter_add", "scatter-mul", "scatter-min", "scatter-max"})


def follow_joins(program: Program) -> tuple[Program, int]:
    """Returns the program with such lookups and scatters in the parts, and their number."""
    return _JoinFollower(program).run(program)


@dataclass(frozen=True)
class _Layout:
    """The axis along which parts are joined, and the number of rows of each."""

    axis: int
    sizes: tuple[int, ...]

    @property
    def starts(self) -> tuple[int, ...]:
        return tuple(int(n) for n in np.cumsum((0, *self.sizes[:-1])))

    def ids(self, index: Index, column: int, is_clipped: bool) -> list[Leaf]:
        """Returns index vectors into each part, out of range if they mean another part's row, or none."""
        row = _wide(index[..., column])
        row = jnp.clip(row, 0, sum(self.sizes) - 1) if is_clipped else row
        spans = list(zip(self.starts, self.sizes, strict=True))
        rows = (jnp.where((row >= start) & (row < start + size), row - start, size) for start, size in spans)
        return [_with(index, column, own) for own in rows]


class _JoinFollower(LookupRewriter):
    """Rewrites blocks."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.joined: dict[Atom, tuple[_Layout, tuple[Atom, ...]]] = {}  #: Joined value -> its layout and parts.
        self.layouts: dict[tuple[int, ...], _Layout] = {}  #: Shape of a joined value -> its layout.

    def rule(self, equation: Equation) -> list[Equation]:
        op, (operand, *_) = equation.op, (*equation.inputs, None)
        if op in ELEMENTWISE:
            return [equation, *self._elementwise(equation)]
        if op == "concatenate":
            if any(a in self.pure for a in equation.inputs):
                self._join(equation, equation.params["dimension"], equation.inputs)
        elif op in ("slice", "pad") and operand in self.joined:
            part = self._part(equation)
            if part is not None:
                self.env[equation.outputs[0]] = part
        elif op == "pad" and operand in self.pure:
            return self._pad(equation)
        elif op == "split" and operand in self.joined:
            layout, parts = self.joined[operand]
            if layout == _Layout(equation.params["axis"], tuple(equation.params["sizes"])):
                self.env.update(zip(equation.outputs, parts, strict=True))
        elif op == "gather" and operand in self.joined:
            return self._gather(equation)
        elif op in _SCATTERS:
            return self._scatter(equation)
        return [equation]

    def _join(self, equation: Equation, axis: int, parts: tuple[Atom, ...]) -> None:
        sizes = tuple(a.shape[axis] for a in parts)
        if 0 not in sizes and len(sizes) > 1 and not jax_compat.is_key(parts[0].dtype):
            layout = _Layout(axis, sizes)
            self.joined[equation.outputs[0]] = layout, parts
            self.layouts.setdefault(equation.outputs[0].shape, layout)

    def _pad(self, equation: Equation) -> list[Equation]:
        """Joins rows of one number to the ends of a table."""
        (table, number), padding = equation.inputs, equation.params["padding_config"]
        axes = [d for d, sizes in enumerate(padding) if tuple(sizes) != (0, 0, 0)]
        if len(axes) != 1 or padding[axes[0]][2] or min(padding[axes[0]]) < 0:
            return [equation]
        made: list[Equation] = []
        parts: list[Atom] = [table]
        for size, at in ((padding[axes[0]][0], 0), (padding[axes[0]][1], len(parts))):
            if size:
                shape = (*table.shape[: axes[0]], size, *table.shape[axes[0] + 1 :])
                made += expand(lambda x, shape=shape: jnp.broadcast_to(x, shape), equation, (number,))
                parts.insert(at if at == 0 else len(parts), made[-1].outputs[0])
        self._join(equation, axes[0], tuple(parts))
        return [equation, *made]

    def _part(self, equation: Equation) -> Atom | None:
        """Returns the part that a slice, or a negative pad, takes."""
        layout, parts = self.joined[equation.inputs[0]]
        shape, params = equation.inputs[0].shape, equation.params
        if equation.op == "slice":
            if params["strides"] is not None and any(n != 1 for n in params["strides"]):
                return None
            taken = list(zip(params["start_indices"], params["limit_indices"], strict=True))
        else:
            if any(low > 0 or high > 0 or inner for low, high, inner in params["padding_config"]):
                return None
            taken = [(-low, n + high) for (low, high, _), n in zip(params["padding_config"], shape, strict=True)]
        if any(one != (0, n) for d, (one, n) in enumerate(zip(taken, shape, strict=True)) if d != layout.axis):
            return None
        spans = zip(layout.starts, layout.sizes, parts, strict=True)
        return next((part for start, n, part in spans if tuple(taken[layout.axis]) == (start, start + n)), None)

    def _elementwise(self, equation: Equation) -> list[Equation]:
        """Returns the equation on each of the parts of its operands."""
        joined = {a: self.joined[a] for a in equation.inputs if a in self.joined}
        layouts = {layout for layout, _ in joined.values()}
        if len(layouts) != 1 or not self.is_known(equation, joined):
            return []
        (layout,) = layouts
        made, parts = list[Equation](), list[Atom]()
        for k in range(len(layout.sizes)):
            forms = {a: own[k] for a, (_, own) in joined.items()}
            made += self.again(equation, forms, next(iter(forms.values())).shape)
            parts.append(made[-1].outputs[0])
        self.joined[equation.outputs[0]] = layout, tuple(parts)
        return made

    def _gather(self, equation: Equation) -> list[Equation]:
        layout, parts = self.joined[equation.inputs[0]]
        numbers, out = equation.params["dimension_numbers"], equation.outputs[0]
        is_clipped = "FILL" not in str(equation.params["mode"])
        column = _id_column(equation, layout, numbers.start_index_map, numbers.collapsed_slice_dims, is_clipped)
        if column is None:
            return [equation]
        self.count += 1
        params = {**equation.params, **UNORDERED, "mode": _FILL}
        params |= {"fill_value": 0} if is_clipped else {}  # there is no such id
        examples = tuple(d for d in range(len(out.shape)) if d not in numbers.offset_dims)

        def access(index: Index, *parts: Leaf) -> Leaf:
            found = None
            for part, own in zip(parts, layout.ids(index, column, is_clipped), strict=True):
                rows = jax_compat.bind(equation.primitive, (part, own), params)[0]
                is_own = jax.lax.broadcast_in_dim(own[..., column] < part.shape[layout.axis], out.shape, examples)
                found = rows if found is None else jnp.where(is_own, rows, found)
            return found

        return expand(access, equation, (equation.inputs[1], *parts), out)

    def _scatter(self, equation: Equation) -> list[Equation]:
        operand, index, updates = equation.inputs
        layout = self.joined[operand][0] if operand in self.joined else self.layouts.get(operand.shape)
        if layout is None or (operand not in self.joined and operand not in self.uniform):
            return [equation]
        numbers, is_clipped = equation.params["dimension_numbers"], "CLIP" in str(equation.params["mode"])
        mapped = numbers.scatter_dims_to_operand_dims
        column = _id_column(equation, layout, mapped, numbers.inserted_window_dims, is_clipped)
        if column is None:
            return [equation]
        self.count += 1
        params, shape = {**equation.params, **UNORDERED, "mode": _FILL}, list(operand.shape)
        made, parts = list[Equation](), list[Atom]()
        for k, size in enumerate(layout.sizes):
            shape[layout.axis] = size

            def access(part: Leaf, index: Index, updates: Leaf, k: int = k, to: Sequence[int] = (*shape,)) -> Leaf:
                own = layout.ids(index, column, is_clipped)[k]
                return jax_compat.bind(equation.primitive, (jnp.broadcast_to(part, to), own, updates), params)[0]

            part = self.joined[operand][1][k] if operand in self.joined else self.uniform[operand]
            made += expand(access, equation, (part, index, updates))
            parts.append(made[-1].outputs[0])
        out = equation.outputs[0]
        self.joined[out] = layout, tuple(parts)
        return [*made, *expand(lambda *parts: jnp.concatenate(parts, layout.axis), equation, parts, out)]


def _id_column(
    equation: Equation, layout: _Layout, mapped: Sequence[int], gone: Sequence[int], is_clipped: bool
) -> int | None:
    """Returns the column of the index vectors that counts along the joined axis; None if it can't be followed."""
    if layout.axis not in mapped or layout.axis not in gone or str(equation.inputs[1].dtype) not in INTEGERS:
        return None
    return None if is_clipped and len(mapped) > 1 else mapped.index(layout.axis)  # others would be clipped, too


def _wide(ids: Leaf) -> Leaf:
    return ids.astype(np.int64 if ids.dtype.itemsize == 8 else np.int32)


def _with(index: Index, column: int, ids: Leaf) -> Leaf:
    parts = [_wide(index[..., k])[..., None] if k != column else ids[..., None] for k in range(index.shape[-1])]
    return jnp.concatenate(parts, -1)


# --- sums of padded pieces that don't overlap: the gradient of an array that is cut into slices ---
#
#   pad(a, ...) + pad(b, ...) + pad(c, ...) + pad(d, ...)  ->  concatenate([a, b, c, d, 0])[indices]
#
# The pairs of a recommender's features are often written as `concatenate([dots[:, i, i + 1 :] for i in range(n)], 1)`.
# XLA on CPUs adds up n arrays of n x n then; a gather reads each element once (26 features, 512 examples: 0.16 ms, 3.7
# before).


#: Fewer pieces are added up as fast.
_FEWEST = 4
_ADDS = ("add", "add_any")


def join_pads(program: Program) -> tuple[Program, int]:
    """Returns the program with such sums joined, and their number. Gradients of the state stay as they are: their pads
    say which rows a table's lookups read."""
    states = {v.shape for v, input_ in program.named_inputs if input_.role != "batch"}
    return _Join(states).run(program)


class _Join(Rewriter):
    def __init__(self, states: set[tuple[int, ...]]) -> None:
        super().__init__()
        self._states = states
        self._pads: dict[Atom, Sequence[Equation]] = {}  #: Sum -> what it consists of.

    def block(self, block: Block) -> Block:
        uses = block.uses()
        makers: dict[Atom, Equation] = {e.outputs[0]: e for e in block.equations if e.op in (*_ADDS, "pad")}
        partial = {a for e in block.equations if e.op in _ADDS for a in e.inputs if uses[a] == 1 and a in makers}

        found: dict[Atom, list[Equation] | None] = {}  # what a sum consists of, if these are pads alone
        for total, equation in makers.items():
            if equation.op == "pad":
                found[total] = [equation] if _is_pad(equation) else None
                continue
            parts = [
                found.get(a) if a in partial or makers.get(a, equation).op == "pad" else None for a in equation.inputs
            ]
            pads = [e for part in parts for e in part or ()]
            found[total] = None if None in parts else pads
            if None not in parts and len(pads) >= _FEWEST and total.shape not in self._states:
                for a in equation.inputs:
                    self._pads.pop(a, None)
                self._pads[total] = pads
        return super().block(block)

    def rule(self, equation: Equation) -> list[Equation]:
        if equation.op not in _ADDS or (pads := self._pads.get(equation.outputs[0])) is None:
            return [equation]
        shape = equation.outputs[0].shape
        found = _indices(shape, pads)
        if found is None:
            return [equation]
        first, last, numbers = found
        self.count += 1

        def joined(*pieces: Array) -> Array:
            flat = [x.reshape(*x.shape[:first], -1, *x.shape[last:]) for x in pieces]
            zero = jnp.zeros((*shape[:first], 1, *shape[last:]), flat[0].dtype)
            return jnp.take(jax.lax.concatenate([*flat, zero], first), numbers, axis=first, mode="clip").reshape(shape)

        return expand(joined, equation, [e.inputs[0] for e in pads], equation.outputs[0])


def _is_pad(equation: Equation) -> bool:
    """Returns whether a pad only puts zeros around its operand."""
    around, value = equation.params["padding_config"], equation.inputs[1]
    is_zero = isinstance(value, Literal) and not np.any(np.asarray(value.value))
    return is_zero and all(low >= 0 and high >= 0 and not inner for low, high, inner in around)


def _indices(shape: Sequence[int], pads: Sequence[Equation]) -> tuple[int, int, np.ndarray] | None:
    """Returns the axes that are padded, from the first one to before the last, and for each element along these its
    number among those of all pieces, one behind the other; that of a zero elsewhere. None if pieces overlap, or the
    first axis is padded, along which examples lie."""
    padded = [d for d in range(len(shape)) if any(tuple(e.params["padding_config"][d][:2]) != (0, 0) for e in pads)]
    if not padded or padded[0] == 0:
        return None
    first, last = padded[0], padded[-1] + 1
    sizes = [e.inputs[0].shape[first:last] for e in pads]
    end = sum(int(np.prod(size)) for size in sizes)
    numbers, start = np.full(shape[first:last], end, np.int32), 0
    for e, size in zip(pads, sizes, strict=True):
        pairs = zip(e.params["padding_config"][first:last], size, strict=True)
        part = numbers[tuple(slice(low, low + n) for (low, _, _), n in pairs)]
        if np.any(part != end):
            return None
        part[...] = np.arange(start, start + part.size).reshape(part.shape)
        start += part.size
    return first, last, numbers.reshape(-1)


# --- lookups behind a reshape that evenly splits or merges a table's rows: lookups in the table itself ---
#
#   t.reshape(500, 600, D)[i, j]       ->  t[600 * i + j]
#   t.reshape(2 * V, D // 2)[i]        ->  t.reshape(V, 2, D // 2)[i // 2, i % 2]
#   t.reshape(V // 2, 2 * D)[i]        ->  t[2 * i + [0, 1]]
#
# The scatters of their gradients, into zeros of the reshaped form, are rewritten, too: both shapes are products of
# common factors (V // 2, 2, D in the last case). Indices out of range stay so. Tables enter and leave loops,
# checkpoints and branches in their own shape.


def follow_reshapes(program: Program) -> tuple[Program, int]:
    """Returns the program with such lookups and scatters in the tables themselves, and their number."""
    return _ReshapeFollower(program).run(program)


class _ReshapeFollower(LookupRewriter):
    """Rewrites blocks."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.shapes = {var.shape for var in self.pure if isinstance(var.type, ArrayType)}  #: Shapes of the states.
        self.views: dict[Atom, Atom] = {}  #: Reshaped value -> the value in its table's shape.
        self.tables: dict[Shape, Shape] = {}  #: Reshaped shape -> its table's.
        self.joined: dict[Atom, Equation] = {}  #: Result of a concatenation, which may be an index -> the equation.

    def nested(self, equation: Equation) -> list[Equation]:
        if equation.op not in ("scan", "remat", "cond"):
            return [equation.with_bodies([self.block(body) for body in equation.bodies])]
        apart: set[int] = set()
        while True:
            before = {name: copy.copy(value) for name, value in vars(self).items()}
            made = self._crossed(equation, apart)
            if not isinstance(made, int):
                return made
            vars(self).update(before)
            apart.add(made)

    def _crossed(self, equation: Equation, apart: Set[int]) -> list[Equation] | int:
        """Moves tables across an equation's border in their own shape, or returns a carry that doesn't end in that
        shape. `equation`: a scan, remat or cond. `apart`: carries that stay unchanged."""
        is_scan, border = equation.op == "scan", equation.border
        skipped, consts, carry = border.head, border.consts, border.carries
        operands, outputs = list(equation.inputs), list(equation.outputs)
        views, ahead, behind = dict[int, Atom](), list[Equation](), list[Equation]()
        for k, atom in enumerate(equation.inputs[skipped:][: consts + carry]):
            if k - consts not in apart:
                view, made = self._in_table(atom, equation) if k >= consts else (self.views.get(atom), [])
                if view is not None:
                    operands[skipped + k] = views[k] = view
                    ahead += made
        bodies = [self._body(equation, body, views, consts + carry) for body in equation.bodies]
        for k, out in enumerate(equation.outputs[: carry if is_scan else None]):
            forms = [self._in_table(body.outputs[k], equation) for body in bodies]
            shapes = {None if view is None else view.shape for view, _ in forms}
            if is_scan and consts + k in views and shapes != {views[consts + k].shape}:
                return k
            is_viewed = consts + k in views if is_scan else any(body.outputs[k] in self.views for body in bodies)
            if all(body.outputs[k] in self.pure for body in bodies):
                self.pure.add(out)
            if is_viewed and len(shapes) == 1 and None not in shapes:
                bodies = [_ending(body, k, *form) for body, form in zip(bodies, forms, strict=True)]
                outputs[k] = view = Var(replace(out.type, shape=shapes.pop()))
                behind += _reshaped(equation, view, out)
                self.views[out] = view
                self.pure.add(view)
        if not views and not behind:
            return [equation.with_bodies(bodies)]
        ours = {"inputs": tuple(operands), "outputs": tuple(outputs), "bodies": tuple(bodies), "original": None}
        return [*ahead, replace(equation, **ours), *behind]

    def _body(self, equation: Equation, body: Block, views: Mapping[int, Atom], known: int) -> Block:
        """Returns a nested block with tables in their own shape.

        `equation`: the equation that has it. `views`: number of an input -> an operand in the shape of its table.
        `known`: number of leading inputs that aren't slices of sequences.
        """
        inputs, start = list(body.inputs), list[Equation]()
        operands = equation.inputs[equation.border.head :]
        self.pure.update(v for v, a in zip(inputs[:known], operands, strict=False) if a in self.pure)
        for k, view in views.items():
            inputs[k] = Var(replace(body.inputs[k].type, shape=view.shape))
            start += _reshaped(equation, inputs[k], body.inputs[k])
            self.views[body.inputs[k]] = inputs[k]
            self.pure.add(inputs[k])
        return self.block(Block(tuple(inputs), (*start, *body.equations), body.outputs) if views else body)

    def rule(self, equation: Equation) -> list[Equation]:
        op = equation.op
        if op in ELEMENTWISE:
            return [equation, *self._elementwise(equation)]
        if op == "concatenate":
            self.joined[equation.outputs[0]] = equation
        elif op == "reshape":
            return self._reshape(equation)
        elif op == "gather" and equation.inputs[0] in self.views:
            return self._access(equation, self.views[equation.inputs[0]], ()) or [equation]
        elif op.startswith("scatter"):
            return self._scatter(equation)
        elif op in ("dynamic_slice", "dynamic_update_slice"):
            return self._sliced(equation)
        return [equation]

    def _reshape(self, equation: Equation) -> list[Equation]:
        (operand,), (out,) = equation.inputs, equation.outputs
        table = self.views.get(operand, operand)
        if table is not operand and table.shape == out.shape:
            self.env[out] = table
            return []
        is_apart = table.shape[:1] != out.shape[:1] and bool(table.shape) and 0 not in table.shape
        if table in self.pure and is_apart and not jax_compat.is_key(table.dtype):
            if common_factors(table.shape, out.shape) is not None:
                self.views[out] = table
                self.tables.setdefault(out.shape, table.shape)
        return [equation] if table is operand else _reshaped(equation, table, out)

    def _elementwise(self, equation: Equation) -> list[Equation]:
        """Returns the equation in the shape of the table whose reshaped values it takes."""
        shapes = {self.views[a].shape for a in equation.inputs if a in self.views}
        if len(shapes) != 1 or not self.is_known(equation, self.views):
            return []
        return self._viewed(equation, self.again(equation, self.views, shapes.pop()))

    def _viewed(self, equation: Equation, made: list[Equation]) -> list[Equation]:
        self.views[equation.outputs[0]] = made[-1].outputs[0]
        self.pure.add(made[-1].outputs[0])
        return made

    def _scatter(self, equation: Equation) -> list[Equation]:
        view, made = self._in_table(equation.inputs[0], equation)
        scattered = None if view is None else self._access(equation, view, equation.inputs[2:])
        if scattered is None:
            return [equation]
        back = _reshaped(equation, scattered[-1].outputs[0], equation.outputs[0])
        return [*made, *self._viewed(equation, scattered), *back]

    def _sliced(self, equation: Equation) -> list[Equation]:
        """Rewrites a dynamic slice of single indices (`t[i]` of one id), or an update, by a gather or scatter.

        An update by several axes, as the gradient of `t[i, j]` of one element is, becomes a scatter in any case, since
        that has a rule for rows.
        """
        operand, out, before = equation.inputs[0], equation.outputs[0], self.count
        is_read = equation.op == "dynamic_slice"
        part = out.shape if is_read else equation.inputs[1].shape
        axes = tuple(d for d, (taken, size) in enumerate(zip(part, operand.shape, strict=True)) if taken != size)
        is_element = not is_read and len(axes) > 1 and operand in self.uniform and operand.shape in self.shapes
        is_followed = is_element or self._in_table(operand, equation)[0] is not None
        if not is_followed or not axes or any(part[d] != 1 for d in axes):
            return [equation]
        windows, sizes = tuple(range(len(part) - len(axes))), [n for d, n in enumerate(part) if d not in axes]

        def access(operand: Leaf, *rest: Leaf) -> Leaf:
            starts = rest[-len(part) :]
            starts = [jnp.clip(starts[d], 0, operand.shape[d] - 1).astype(np.int32) for d in axes]
            index = jnp.concatenate([start[None] for start in starts])
            if is_read:
                numbers = jax.lax.GatherDimensionNumbers(windows, axes, axes)
                return jax.lax.gather(operand, index, numbers, part, mode="clip").reshape(part)
            numbers = jax.lax.ScatterDimensionNumbers(windows, axes, axes)
            return jax.lax.scatter(operand, index, rest[0].reshape(sizes), numbers, mode="clip")

        made = [e for one in expand(access, equation, equation.inputs, out) for e in self.rule(one)]
        if self.count == before and not is_element:
            return [equation]
        self.count = max(self.count, before + 1)
        return made

    def _in_table(self, atom: Atom, equation: Equation) -> tuple[Atom | None, list[Equation]]:
        if atom in self.views or atom not in self.uniform or atom.shape not in self.tables:
            return self.views.get(atom), []
        shape = self.tables[atom.shape]
        made = expand(lambda x: jnp.broadcast_to(x, shape), equation, (self.uniform[atom],))
        return made[-1].outputs[0], made

    def _access(self, equation: Equation, view: Atom, updates: Sequence[Atom]) -> list[Equation] | None:
        """Returns the gather or scatter in the table itself; None if it isn't of single indices and whole windows.
        `view`: its operand in the shape of the table. `updates`: those of a scatter."""
        operand, indices = equation.inputs[:2]
        factors = common_factors(view.shape, operand.shape)
        picked = Picked.of(equation)
        if factors is None or picked is None or str(indices.dtype) not in INTEGERS:
            return None
        indexed = {f for d in picked.indexed for f in factors.reshaped[d]}
        if not indexed.intersection(factors.table[0]) or factors.fine[0] > np.iinfo(np.int32).max:
            return None
        self.count += 1
        joined = self.joined.get(indices)
        is_last = joined is not None and joined.params["dimension"] == len(indices.shape) - 1
        parts = joined.inputs if joined is not None and is_last else (indices,)  # columns may depend on rows

        def access(table: Leaf, *rest: Leaf) -> Leaf:
            return accessed(equation, factors, picked, table, rest[: len(parts)], *rest[len(parts) :])

        return expand(access, equation, (view, *parts, *updates), None if updates else equation.outputs[0])


def _reshaped(equation: Equation, atom: Atom, out: Var) -> list[Equation]:
    return expand(lambda x: jnp.reshape(x, out.shape), equation, (atom,), out)


def _ending(body: Block, k: int, output: Atom | None, made: Sequence[Equation]) -> Block:
    assert output is not None, "there is one"
    return Block(body.inputs, (*body.equations, *made), (*body.outputs[:k], output, *body.outputs[k + 1 :]))


# --- gathers from a reshaped table, and scatters into it, by the common factors of both shapes ---

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Factors:
    """The common factors of two shapes."""

    sizes: Shape
    #: For each axis of either shape, the factors that it is a product of.
    table: tuple[Shape, ...]
    reshaped: tuple[Shape, ...]

    @property
    def fine(self) -> Shape:
        """The table's shape with rows whole and other axes in factors."""
        return (math.prod(self.sizes[f] for f in self.table[0]), *(self.sizes[f] for f in self.others))

    @property
    def others(self) -> Shape:
        return tuple(f for axis in self.table[1:] for f in axis)


@functools.lru_cache(maxsize=256)
def common_factors(table: Shape, reshaped: Shape) -> Factors | None:
    """Returns the factors of two shapes of one size; None if they don't divide each other evenly."""
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
class Picked:
    """The elements that a gather or scatter takes: one index along each indexed axis of its operand, all of the
    others."""

    indexed: Shape  #: Axes of the operand, in the order of the components of the indices.
    batching: tuple[tuple[int, int], ...]  #: (axis of the operand, axis of the indices along which it runs).
    windows: Shape  #: The other axes of the operand.
    inner: Shape  #: Their axes in the result (or the updates).

    @staticmethod
    def of(equation: Equation) -> Picked | None:
        """Returns what an equation takes; None if it doesn't take whole rows."""
        numbers, shape = equation.params["dimension_numbers"], equation.inputs[0].shape
        batched = numbers.operand_batching_dims
        if equation.op == "gather":
            indexed, gone, inner = numbers.start_index_map, numbers.collapsed_slice_dims, numbers.offset_dims
            batching = numbers.start_indices_batching_dims
            sizes = [equation.params["slice_sizes"][d] for d in range(len(shape)) if d not in (*gone, *batched)]
        else:
            indexed, gone = numbers.scatter_dims_to_operand_dims, numbers.inserted_window_dims
            inner, batching = numbers.update_window_dims, numbers.scatter_indices_batching_dims
            sizes = [equation.inputs[2].shape[d] for d in inner]
        windows = tuple(d for d in range(len(shape)) if d not in (*gone, *batched))
        if set(indexed) != set(gone) or sizes != [shape[d] for d in windows]:
            return None
        pairs = tuple((int(d), int(axis)) for d, axis in zip(batched, batching, strict=True))
        return Picked(tuple(map(int, indexed)), pairs, windows, tuple(map(int, inner)))


def accessed(
    equation: Equation, factors: Factors, picked: Picked, table: Leaf, indices: Sequence[Leaf], updates: Leaf = None
) -> Leaf:
    """Returns the gather's result, or the scatter's in the shape of the table."""
    sizes, shape, batch = factors.sizes, equation.inputs[0].shape, indices[0].shape[:-1]
    taken = [f for d in picked.windows for f in factors.reshaped[d]]  # factors that are taken whole
    rows = [f for f in taken if f in factors.table[0]]  # those of adjacent rows
    rest = [f for f in taken if f not in rows]
    index, columns = _index(equation, factors, picked, indices, rows)
    fine = jnp.reshape(table, factors.fine)
    gone = (0, *(1 + factors.others.index(f) for f in columns))
    lead = len(batch) + len(rows)
    window = tuple(range(lead, lead + len(rest)))
    axes = range(len(batch) + len(picked.inner))
    outer = [d for d in axes if d not in picked.inner]
    order = [len(batch) + picked.inner.index(d) if d in picked.inner else outer.index(d) for d in axes]
    by_factor = [taken.index(f) for f in (*rows, *rest)]
    if updates is None:
        numbers = jax.lax.GatherDimensionNumbers(window, tuple(sorted(gone)), gone)
        slices = [1 if d in gone else n for d, n in enumerate(fine.shape)]
        params = {"dimension_numbers": numbers, "slice_sizes": tuple(slices), **UNORDERED}
        found = jax_compat.bind(equation.primitive, (fine, index), {**equation.params, **params})[0]
        back = [len(batch) + by_factor.index(k) for k in range(len(taken))]
        found = jnp.transpose(found, (*range(len(batch)), *back))
        return jnp.transpose(jnp.reshape(found, (*batch, *(shape[d] for d in picked.windows))), order)
    moved = jnp.transpose(updates, [order.index(d) for d in axes])
    moved = jnp.reshape(moved, (*batch, *(sizes[f] for f in taken)))
    moved = jnp.transpose(moved, (*range(len(batch)), *(len(batch) + k for k in by_factor)))
    numbers = jax.lax.ScatterDimensionNumbers(window, tuple(sorted(gone)), gone)
    params = {"dimension_numbers": numbers, **UNORDERED}
    made = jax_compat.bind(equation.primitive, (fine, index, moved), {**equation.params, **params})[0]
    return jnp.reshape(made, table.shape)


def _index(
    equation: Equation, factors: Factors, picked: Picked, indices: Sequence[Leaf], rows: Sequence[int]
) -> tuple[Leaf, list[int]]:
    """Returns index vectors of rows and of factors of other axes, [*ids, *rows, 1 + columns]; and those factors.

    `indices`: the equation's own in parts, [*ids, axes] each. `rows`: factors of adjacent rows that are taken together.
    """
    sizes, shape, mode = factors.sizes, equation.inputs[0].shape, str(equation.params["mode"])
    dtype = np.dtype(np.int64 if indices[0].dtype.itemsize == 8 else np.int32)
    components = (part[..., k].astype(dtype) for part in indices for k in range(part.shape[-1]))
    parts, lead = dict(zip(picked.indexed, components, strict=True)), indices[0].shape[:-1]
    parts |= {d: jax.lax.broadcasted_iota(dtype, lead, axis) for d, axis in picked.batching}
    is_clipped = "CLIP" in mode or (equation.op == "gather" and "FILL" not in mode)
    ids: dict[int, Leaf] = {}
    outside: list[Leaf] = []  # flags of ids that mean no row
    for d, part in parts.items():
        part = part.reshape(*part.shape, *[1] * len(rows))
        left = jnp.clip(part, 0, shape[d] - 1)
        for f in reversed(factors.reshaped[d]):
            ids[f], left = left % sizes[f], left // sizes[f]
        is_outside = (part < 0) | (part >= shape[d])
        first = next(iter(factors.reshaped[d]), None)
        if not is_clipped and first in factors.others:  # a column, on which rows don't depend
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
