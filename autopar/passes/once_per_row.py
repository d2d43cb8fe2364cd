"""Computes functions of single rows once for each distinct row, where a batch looks rows up many times.

Ids of language and of recommenders are Zipf distributed: 640 lookups may be of 190 rows. A function of a row and of
parameters is the same in each lookup of that row, up to where examples meet anything of their own. With `inverse` the
entry of each lookup among the E distinct ones and `count` how often each occurs:

  f(rows[inverse])                               ->  f(rows)[inverse]
  sum_i f(rows[inverse[i]])                      ->  sum_e count[e] f(rows[e])
  zeros.at[inverse].add(f(rows[inverse]))        ->  count * f(rows)
  zeros.at[inverse].add(dy @ w)                  ->  zeros.at[inverse].add(dy) @ w
  einsum("nd,nk->dk", f(rows[inverse]), dy)      ->  einsum("ed,ek->dk", f(rows), zeros.at[inverse].add(dy))

RecD does the first by hand, in a model's code (Zhao et al., Deduplication for recommendation model training, MLSys
2023). Results differ by the rounding of sums in another order, and NaN and infinity may swap where a factor
(`w`) isn't finite. It runs in a rank's own program, with tables on hosts, where the number of fetched rows is a
measured bound. A block in which it saves nothing stays unchanged; bodies of loops and checkpoints are blocks of their
own, with lookups of their own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np

from autopar import jax_compat
from autopar.analysis.batch import SUMMED, result_axis
from autopar.analysis.primitives import (
    CUMULATIVE,
    PLACED_ELEMENTWISE,
    PRIMITIVES,
    SHAPED,
    Linear,
    constant_along,
    constant_axes,
    fits,
    those_that,
)
from autopar.analysis.work import flops, products
from autopar.ir.local import OncePerRow
from autopar.ir.program import ArrayType, Atom, Block, Equation, Literal, Program, Var
from autopar.ir.program_plan import ProgramPlan
from autopar.ir.reductions import REDUCTION_PRIMITIVES
from autopar.ir.slicing import eliminate_dead
from autopar.ir.writer import Writer, expand
from autopar.jax_types import Index, Leaf, Params, Pytree

#: Cost of a gathered or scattered element, in operations of a product.
_MOVED = 64.0
_LINEAR = those_that(lambda p: p.elementwise and p.linear in (Linear.TOGETHER, Linear.FIRST)) - {"real", "imag"}
_GATHERS = frozenset({"ap.lookup", "gather"})
#: Scatter operation -> its operand of updates.
_SCATTERS = {"ap.aggregate": 3, "scatter-add": 2}


def once_per_row(program: Program, bound: ProgramPlan) -> tuple[Program, str]:
    """Returns the program of one device with functions of single rows computed once for each.

    `program`: localized by `bound`.
    """
    if not bound.on_hosts:
        return program, "for a rank's own program, with tables on hosts"
    distinct: list[Ids] = []
    block = _of_block(program.block, distinct)
    if block is program.block:
        return program, "nothing to gain, compiled for so many rows"
    counts = tuple((ids.entries, ids.lookups) for ids in dict.fromkeys(distinct))
    before = products(program.block)
    made = OncePerRow(counts, products(block) / before if before else 1.0)
    return replace(program, block=block, once_per_row=made), str(made)


def _of_block(block: Block, distinct: list[Ids]) -> Block:
    block = block.with_equations(
        [e.with_bodies([_of_block(body, distinct) for body in e.bodies]) for e in block.equations]
    )
    every = {key: ids for key, ids in all_ids(block).items() if ids.entries < ids.lookups}
    if not every:
        return block
    rewritten = [_Rewrite(block, every, backward).run() for backward in (False, True)]
    best = min((block, *rewritten), key=_cost)
    if best is not block:
        distinct += every.values()
    return best


def _cost(block: Block) -> float:
    """Counts operations of products, with gathered and scattered elements as some."""
    total = 0.0
    for e in block.equations:
        total += flops(e)
        if e.op in _GATHERS:
            total += _MOVED * e.outputs[0].type.size
        elif e.op in _SCATTERS:
            total += _MOVED * e.inputs[_SCATTERS[e.op]].type.size
    return total


def adds_rows(push: Equation, ids: Ids) -> bool:
    """Returns whether each id's update is added to one row, in the order of the lookups."""
    numbers, updates, rank = push.params["dimension_numbers"], push.inputs[3], len(ids.shape)
    return (
        push.params["op"] == "scatter-add"
        and push.params["axis"] == 0
        and push.params["position"] == 0
        and jax_compat.is_float(updates.dtype)
        and tuple(numbers.update_window_dims) == tuple(range(rank, len(updates.shape)))
        and tuple(numbers.inserted_window_dims) == (0,)
        and not numbers.operand_batching_dims
        and push.inputs[0].shape == (ids.fetched, *updates.shape[rank:])
    )


# --- the axes of ids in a value, and equations in which one axis of entries replaces them ---


@dataclass(frozen=True, slots=True)
class IdAxes:
    """`rank` adjacent axes, from `at` on, which run over ids in their order."""

    at: int
    rank: int

    @property
    def axes(self) -> range:
        return range(self.at, self.at + self.rank)

    def of(self, shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(shape[self.at : self.at + self.rank])

    def by_entries(self, shape: Sequence[int], entries: int) -> tuple[int, ...]:
        """Returns the shape of a value by entries."""
        return (*shape[: self.at], entries, *shape[self.at + self.rank :])

    def renumbered(self, axes: Iterable[int]) -> tuple[int, ...]:
        """Returns the numbers of axes in a value by entries."""
        return tuple(dict.fromkeys(axis if axis < self.at else max(self.at, axis - self.rank + 1) for axis in axes))

    def index(self, entries: Leaf) -> tuple[Index, ...]:
        """Returns an index of entries, with full slices along the other axes."""
        return (*[slice(None)] * self.at, entries)

    def beside(self, rank: int) -> tuple[int, ...]:
        """Returns a shape with one number for each entry, for broadcasting over a value by entries of this rank."""
        return (*[1] * self.at, -1, *[1] * (rank - self.at - 1))


def _of_axes(axes: Sequence[int | None]) -> IdAxes | None:
    if axes[0] is None or axes[0] == SUMMED:
        return None
    id_axes = IdAxes(axes[0], len(axes))
    return id_axes if list(axes) == list(id_axes.axes) else None


def possible_axes(count: int, shape: Sequence[int]) -> list[IdAxes]:
    """Returns where a value of this shape may have the axes of `count` ids."""
    pairs = ((at, end) for at in range(len(shape)) for end in range(at + 1, len(shape) + 1))
    return [IdAxes(at, end - at) for at, end in pairs if _size(shape[at:end]) == count]


# --- equations of one operand ---

_FOLLOWED = SHAPED | CUMULATIVE | REDUCTION_PRIMITIVES.keys() | {"slice", "argmax", "argmin"}
#: The linear ones.
_LINEAR_MOVES = frozenset(op for op in _FOLLOWED if PRIMITIVES[op].linear is Linear.FIRST)


def axes_after(equation: Equation, id_axes: IdAxes) -> IdAxes | None:
    """Returns the ids' axes in the result of an equation of one operand; None for any other equation."""
    if equation.op not in _FOLLOWED or len(equation.inputs) != 1:
        return None
    old, shape = equation.inputs[0].shape, equation.outputs[0].shape
    if equation.op == "reshape":
        ahead = _size(old[: id_axes.at])
        found = possible_axes(_size(id_axes.of(old)), shape)
        return next((one for one in found if _size(shape[: one.at]) == ahead), None)
    new = _of_axes([result_axis(equation, 0, axis) for axis in id_axes.axes])
    return None if new is None or new.of(shape) != id_axes.of(old) else new


def axes_before(equation: Equation, id_axes: IdAxes) -> IdAxes | None:
    """Returns the ids' axes in the operand, from those in the result; inverts `axes_after`."""
    found = possible_axes(_size(id_axes.of(equation.outputs[0].shape)), equation.inputs[0].shape)
    return next((inner for inner in found if axes_after(equation, inner) == id_axes), None)


def params_by_entries(
    equation: Equation, operand_axes: Mapping[int, IdAxes], id_axes: IdAxes, entries: int
) -> Mapping[str, Leaf]:
    """Returns the parameters of an equation by entries. `operand_axes`: operand by entries -> the ids' axes. `id_axes`:
    the ids' axes in the result. `entries`: their number."""
    params = dict(equation.params)
    if equation.op == "dot_general":
        params["dimension_numbers"] = tuple(
            tuple(operand_axes[k].renumbered(dims[k]) if k in operand_axes else tuple(dims[k]) for k in (0, 1))
            for dims in params["dimension_numbers"]
        )
    elif equation.op in _FOLLOWED:
        primitive, rank = PRIMITIVES[equation.op], len(equation.inputs[0].shape)
        for name, value in equation.params.items():
            if name == primitive.sizes:
                params[name] = id_axes.by_entries(value, entries)
            elif name in ("start_indices", "strides"):
                params[name] = None if value is None else id_axes.by_entries(value, 0 if name == "start_indices" else 1)
            elif name == "broadcast_dimensions":
                params[name] = id_axes.renumbered(value)
            elif name == "permutation" or name == primitive.along:
                axes = operand_axes[0].renumbered(d % rank for d in (value if isinstance(value, tuple) else (value,)))
                params[name] = axes if isinstance(value, tuple) else axes[0]
    return params


def _size(shape: Sequence[int]) -> int:
    return int(np.prod(shape, dtype=np.int64))


# --- products ---


def in_product(equation: Equation, k: int, id_axes: IdAxes) -> IdAxes | None:
    """Returns the axes of operand k's ids in a product; None if it sums over them, or pairs them with the other's."""
    contract, batch = equation.params["dimension_numbers"]
    if not {*contract[k], *batch[k]}.isdisjoint(id_axes.axes):
        return None
    return _of_axes([result_axis(equation, k, axis) for axis in id_axes.axes])


def before_product(equation: Equation, id_axes: IdAxes) -> tuple[int, IdAxes] | None:
    """Returns the operand of a product that has the ids, and their axes in it; inverts `in_product`."""
    for k in (0, 1):
        for at in range(len(equation.inputs[k].shape) - id_axes.rank + 1):
            inner = IdAxes(at, id_axes.rank)
            if in_product(equation, k, inner) == id_axes:
                return k, inner
    return None


def contracted_with(equation: Equation, k: int, id_axes: IdAxes) -> IdAxes | None:
    """Returns the ids' axes in the other operand of a product that sums over them; None if it doesn't."""
    contract, _ = equation.params["dimension_numbers"]
    pairs = dict(zip(contract[k], contract[1 - k], strict=True))
    return _of_axes([pairs.get(axis) for axis in id_axes.axes])


# --- values of a block whose lookups are written as entries, one for each distinct row ---
#: Dtypes of weighted sums, in which counts are exact and products don't overflow where sums don't.
WIDE = (np.dtype(np.float32), np.dtype(np.float64))


@dataclass(frozen=True, slots=True, eq=False)
class Ids:
    """Lookups of the same ids in fetched rows."""

    lookup: Equation  #: One of them.
    shape: tuple[int, ...]  #: The axes that lookups have of the ids.
    fetched: int  #: Number of rows to look up.
    #: Ids out of range look up the nearest row, rather than a fill value. Either way they have entries of their own,
    #: the last ones, since no push adds them up.
    clips: bool

    @property
    def lookups(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def entries(self) -> int:
        return self.fetched + (2 if self.clips else 1)


@dataclass(frozen=True, slots=True)
class Form:
    """A value by entries: `atom` has one axis of entries where the value has `id_axes`."""

    ids: Ids
    id_axes: IdAxes
    atom: Atom

    def fits(self, other: Form) -> bool:
        return self.ids is other.ids and self.id_axes == other.id_axes


def all_ids(block: Block) -> dict[tuple[Atom, Atom], Ids]:
    """Maps (route, index) to its ids, for lookups of whole rows."""
    by_route: dict[tuple[Atom, Atom], Ids] = {}
    refused: set[tuple[Atom, Atom]] = set()
    for equation in block.equations:
        if equation.op != "ap.lookup":
            continue
        fetched, route, index = equation.inputs
        ids = Ids(equation, index.shape[:-1], fetched.shape[equation.params["axis"]], equation.params["clip"])
        other = by_route.setdefault((route, index), ids)
        same = all(equation.params[k] == other.lookup.params[k] for k in ("clip", "extent", "batch", "spread"))
        if not same or ids.fetched != other.fetched or not _is_whole(equation):
            refused.add((route, index))
    return {key: ids for key, ids in by_route.items() if key not in refused}


def _is_whole(lookup: Equation) -> bool:
    """Returns whether each id is one row, whose elements follow the axes of the ids."""
    p = lookup.params
    fetched, _, index = lookup.inputs
    numbers, axis, rank = p["dimension_numbers"], p["axis"], len(index.shape) - 1
    sizes = tuple(1 if d == axis else size for d, size in enumerate(fetched.shape))
    ends = tuple(range(rank, rank + len(fetched.shape) - 1))
    known = jax_compat.is_float(fetched.dtype) or p.get("fill_value") is not None
    return (
        index.shape[-1] == 1
        and p["position"] == 0
        and tuple(numbers.offset_dims) == ends
        and tuple(numbers.collapsed_slice_dims) == (axis,)
        and not numbers.operand_batching_dims
        and tuple(p["slice_sizes"]) == sizes
        and (p["clip"] or known)
    )


@dataclass(eq=False)
class _Rewrite(Writer):
    """Rewrites a block. Variables keep their names; unread ones are removed in the end."""

    block: Block  #: The old block.
    every: Mapping[tuple[Atom, Atom], Ids]  #: (route, index) -> the ids whose lookups are by entries.
    backward: bool  #: Sums by entries go through products, too.
    forms: dict[Atom, Form] = field(default_factory=dict)  #: Value that is computed by entries -> its form.
    defined: set[Atom] = field(default_factory=set)  #: Values that are computed by lookups.
    made: dict[tuple[Pytree, ...], Pytree] = field(default_factory=dict)  #: Key -> a value that is computed once.
    producers: dict[Atom, Equation] = field(init=False)  #: Value -> its old equation.
    #: Old value -> the axes along which it is constant, as bits, if there are any.
    constant: dict[Atom, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.producers = self.block.makers()
        self.defined.update(self.block.inputs)
        for equation in self.block.equations:
            bits = constant_axes(equation, self.constant)
            if bits:
                self.constant[equation.outputs[0]] = bits

    def run(self) -> Block:
        for equation in self.block.equations:
            if not self._rewritten(equation):
                for atom in equation.inputs:
                    self.need(atom)
                self.append(equation)
        for atom in self.block.outputs:
            self.need(atom)
        block, _ = eliminate_dead(Block(self.block.inputs, tuple(self.equations), self.block.outputs))
        return block

    def _rewritten(self, equation: Equation) -> bool:
        """Rewrites an equation by entries, or from operands by entries; returns whether it did."""
        if equation.op == "ap.lookup":
            ids = self.every.get((equation.inputs[1], equation.inputs[2]))
            if ids is not None:
                self.look_up_all(equation, ids)
            return ids is not None
        if equation.op == "ap.aggregate":
            return self._aggregate(equation)
        forms = {k: self.forms[a] for k, a in enumerate(equation.inputs) if a in self.forms}
        if equation.op == "reduce_sum" and self._total(equation):
            return True
        if not forms or len(equation.outputs) != 1 or equation.effects or equation.bodies:
            return False
        if equation.op in PLACED_ELEMENTWISE:
            return self._elementwise(equation, next(iter(forms.values())))
        if equation.op == "dot_general":
            return any(self._product(equation, k, f) or self._contracted(equation, k, f) for k, f in forms.items())
        form = forms.get(0)
        id_axes = None if form is None else axes_after(equation, form.id_axes)
        if form is None or id_axes is None:
            return False
        self.define(equation, form.ids, id_axes, (form.atom,), {0: form.id_axes})
        return True

    def _elementwise(self, equation: Equation, form: Form) -> bool:
        shape = equation.outputs[0].shape
        if form.ids.lookups != math.prod(form.id_axes.of(shape)):  # the ids' axes are 1 here, and broadcast
            return False
        if not all(fits(a.shape, shape) and (not a.shape or self.is_known(a, form)) for a in equation.inputs):
            return False
        atoms = [self.by_entries(a, form) if a.shape else a for a in equation.inputs]
        self.define(equation, form.ids, form.id_axes, atoms, {})
        return True

    def _product(self, equation: Equation, k: int, form: Form) -> bool:
        """Writes a product by entries with an operand that isn't."""
        id_axes = in_product(equation, k, form.id_axes)
        if id_axes is None:
            return False
        other = equation.inputs[1 - k]
        self.need(other)
        atoms = (form.atom, other) if k == 0 else (other, form.atom)
        self.define(equation, form.ids, id_axes, atoms, {k: form.id_axes})
        return True

    def _contracted(self, equation: Equation, k: int, form: Form) -> bool:
        """Writes a product that sums over the ids as one over the entries, each times its count."""
        beside = contracted_with(equation, k, form.id_axes)
        a, b = equation.inputs[k], equation.inputs[1 - k]
        if beside is None or a.dtype not in WIDE or b.dtype not in WIDE:
            return False
        other = self.forms.get(b)
        if other is not None and other.ids is form.ids and other.id_axes == beside:
            is_lighter = form.atom.type.size <= other.atom.type.size  # one of them is enough
            mine, theirs = self.weighted(form, by_count=is_lighter), self.weighted(other, by_count=not is_lighter)
        elif self.backward and other is None:
            self.need(b)
            sums = Form(form.ids, beside, self.summed(Form(form.ids, beside, b)))
            mine, theirs = self.weighted(form, by_count=False), self.weighted(sums, by_count=False)
        else:
            return False
        atoms = (mine, theirs) if k == 0 else (theirs, mine)
        params = params_by_entries(equation, {k: form.id_axes, 1 - k: beside}, form.id_axes, form.ids.entries)
        self.append(replace(equation, inputs=atoms, params=params))
        return True

    def _total(self, equation: Equation) -> bool:
        """Writes a sum over the ids, maybe over other axes as well."""
        (atom,), axes = equation.inputs, equation.params["axes"]
        form = self.forms.get(atom)
        if atom.dtype not in WIDE:
            return False
        if form is not None:
            sums = self.weighted(form, by_count=True) if {*form.id_axes.axes} <= {*axes} else None
        else:
            form = self._leading_back(atom, axes) if self.backward else None
            sums = form and self.weighted(Form(form.ids, form.id_axes, self.summed(form)), by_count=False)
        if form is None or sums is None:
            return False
        params = params_by_entries(equation, {0: form.id_axes}, form.id_axes, form.ids.entries)
        self.append(replace(equation, inputs=(sums,), params=params))
        return True

    def _leading_back(self, atom: Atom, axes: Sequence[int]) -> Form | None:
        for ids in self.every.values():
            for id_axes in possible_axes(ids.lookups, atom.shape):
                form = Form(ids, id_axes, atom)
                if {*id_axes.axes} <= {*axes} and self.has_product(form):
                    return form
        return None

    def _aggregate(self, equation: Equation) -> bool:
        """Writes sums of gradients by rows."""
        base, route, index, updates = equation.inputs
        ids = self.every.get((route, index))
        if ids is None or equation.params["clip"] or not adds_rows(equation, ids):
            return False
        form, id_axes = self.forms.get(updates), IdAxes(0, len(ids.shape))
        lookups = Form(ids, id_axes, updates)
        if form is not None and form.fits(lookups):
            sums = self.weighted(form, by_count=True)
        elif self.backward and form is None and self.has_product(lookups):
            sums = self.weighted(Form(ids, id_axes, self.summed(lookups)), by_count=False)
        else:
            return False
        self.need(base)
        self.expand(lambda b, x: b + x[: ids.fetched], equation, (base, sums), equation.outputs[0])
        return True

    # --- written equations ---

    def append(self, equation: Equation) -> None:
        super().append(equation)
        self.defined.update(equation.outputs)

    def expand(
        self,
        fun: Callable[..., Pytree],
        like: Equation,
        atoms: Sequence[Atom],
        output: Var | None = None,
        *,
        again: bool = False,
    ) -> Var:
        """Expands a function of arrays into equations (`ir.writer.expand`)."""
        made = expand(fun, like, atoms, output, again=again)
        self.extend(made)
        return made[-1].outputs[0]

    def once(self, key: tuple[Hashable, ...], make: Callable[[], Pytree]) -> Leaf:
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]

    def need(self, atom: Atom) -> None:
        """Makes sure that a value is computed by lookups."""
        form = self.forms.get(atom)
        if form is None or atom in self.defined:
            return
        assert isinstance(atom, Var), "constants have no form"
        like = self.producers[atom]
        if like.op == "ap.lookup":
            self.append(like)
            return
        take = _take(form.id_axes, form.id_axes.of(atom.shape))
        self.expand(take, like, (form.atom, self.inverse(form.ids)), atom, again=True)

    def inverse(self, ids: Ids) -> Var:
        """Returns the entry of each lookup, int32, by looking up the numbers of the entries."""

        def make() -> Var:
            like, width = ids.lookup, ids.fetched
            numbers = self.expand(lambda: jax.lax.iota(jnp.int32, width), like, ())
            params: dict[str, object] = {"slice_sizes": (1,), "spread": like.params["batch"]}
            params |= {} if ids.clips else {"fill_value": width}
            looked_up = self._look_up(ids, numbers, like.inputs[2], params)
            if not ids.clips:
                return looked_up
            last = ids.lookup.params["extent"] - 1

            def apart(position: Leaf, index: Index) -> Leaf:
                index = index[..., 0]
                above = index > min(last, jnp.iinfo(index.dtype).max)
                return jnp.where(index < 0, width, jnp.where(above, width + 1, position))

            return self.expand(apart, like, (looked_up, like.inputs[2]))

        return self.once(("inverse", ids), make)

    def _look_up(self, ids: Ids, fetched: Atom, index: Atom, how: Params) -> Var:
        """Returns the lookup of these ids, or others, in an array whose rows lead. `how`: parameters that differ."""
        rank, rest = len(index.shape) - 1, fetched.shape[1:]
        dims = ids.lookup.params["dimension_numbers"]._replace(
            offset_dims=tuple(range(rank, rank + len(rest))), collapsed_slice_dims=(0,), start_index_map=(0,)
        )
        params = {**ids.lookup.params, "axis": 0, **how, "dimension_numbers": dims}
        out = Var(ArrayType((*index.shape[:-1], *rest), fetched.dtype))
        route = ids.lookup.inputs[1]
        self.append(replace(ids.lookup, inputs=(fetched, route, index), outputs=(out,), params=params))
        return out

    def counts(self, ids: Ids) -> Var:
        """Returns the number of lookups of each entry, int32[E]."""
        count = lambda i: jnp.zeros(ids.entries, jnp.int32).at[i.reshape(-1)].add(1)  # noqa: E731
        return self.once(("counts", ids), lambda: self.expand(count, ids.lookup, (self.inverse(ids),)))

    def weighted(self, form: Form, *, by_count: bool) -> Var:
        """Returns a value by entries, maybe times their counts; always zero for entries without lookups."""
        atoms = (form.atom, self.counts(form.ids))
        make = lambda: self.expand(_weigh(form.id_axes, by_count), form.ids.lookup, atoms, again=True)  # noqa: E731
        return self.once(("weighted", form, by_count), make)

    def define(
        self, equation: Equation, ids: Ids, id_axes: IdAxes, atoms: Sequence[Atom], operand_axes: Mapping[int, IdAxes]
    ) -> None:
        """Defines an equation's result by entries; arguments as of `written`."""
        self.forms[equation.outputs[0]] = Form(ids, id_axes, self.written(equation, ids, id_axes, atoms, operand_axes))

    def written(
        self, equation: Equation, ids: Ids, id_axes: IdAxes, atoms: Sequence[Atom], operand_axes: Mapping[int, IdAxes]
    ) -> Var:
        """Writes the equation on `atoms`; `id_axes`: in its result, `operand_axes`: in operands by entries."""
        (old,), params = equation.outputs, params_by_entries(equation, operand_axes, id_axes, ids.entries)
        out = Var(replace(old.type, shape=id_axes.by_entries(old.shape, ids.entries)))
        self.append(replace(equation, inputs=tuple(atoms), outputs=(out,), params=params))
        return out

    def look_up_all(self, lookup: Equation, ids: Ids) -> None:
        """Defines a lookup's value by entries: all rows, and the values for ids out of range."""
        atom, axis = lookup.inputs[0], lookup.params["axis"]
        if axis:
            atom = self.expand(lambda x: jnp.moveaxis(x, axis, 0), lookup, (atom,))
        if ids.clips:
            dtype = np.dtype(lookup.inputs[2].dtype)
            ends = np.array([[0], [min(lookup.params["extent"] - 1, np.iinfo(dtype).max)]], dtype)
            index = Literal(ends, ArrayType(ends.shape, ends.dtype))
            params = {"slice_sizes": (1, *atom.shape[1:]), "batch": None, "spread": None}
            more = self._look_up(ids, atom, index, params)
        else:
            fill = lookup.params.get("fill_value")
            fill = jnp.nan if fill is None else fill
            more = self.expand(lambda: jnp.full((1, *atom.shape[1:]), fill, atom.dtype), lookup, ())
        atom = self.expand(lambda *xs: jnp.concatenate(xs), lookup, (atom, more))
        self.forms[lookup.outputs[0]] = Form(ids, IdAxes(0, len(ids.shape)), atom)

    def is_known(self, atom: Atom, like: Form) -> bool:
        """Returns whether a value is computed by the entries of another one, or is constant along its ids."""
        form = self.forms.get(atom)
        if form is not None:
            return form.fits(like)
        bits = constant_along(atom, self.constant)
        return all(bits >> d & 1 for d in like.id_axes.axes)

    def by_entries(self, atom: Atom, like: Form) -> Atom:
        """Returns a value by entries, in the form of another."""
        form, ids, id_axes = self.forms.get(atom), like.ids, like.id_axes
        if form is not None:
            return form.atom
        shape = id_axes.by_entries(atom.shape, ids.entries)
        make = lambda: self.expand(_first(id_axes, shape), ids.lookup, (atom,), again=True)  # noqa: E731
        return self.once(("constant", atom, ids, id_axes), make)

    # --- sums over the lookups of each entry, taken as early as equations are linear ---
    #
    # A value by lookups, with its ids and their axes in it, is a `Form` whose `atom` is that value. Chains of linear
    # equations may be long, so they are walked with an explicit stack.

    def summed(self, like: Form) -> Atom:
        """Returns the sums of a value over the lookups of each entry; anything for an entry that has none."""
        for one in self._in_order(like, "sum", self._after):
            self.made["sum", one] = self._sum(one)
        return self.made["sum", like]

    def has_product(self, like: Form) -> bool:
        """Returns whether linear equations lead from a product to a value."""
        for one in self._in_order(like, "product", self._through):
            equation = self.producers.get(one.atom)
            inner = self._through(one)
            product = any(self.made["product", a] for a in inner.values())
            is_product = equation is not None and equation.op == "dot_general"
            self.made["product", one] = bool(inner) and (is_product or product)
        return self.made["product", like]

    def _in_order(self, like: Form, kind: str, behind: Callable[[Form], Mapping[int, Form]]) -> list[Form]:
        """Returns a value and those behind it that aren't computed yet, the latter first."""
        order: list[Form] = []
        stack = [(like, False)]
        seen: set[tuple[Hashable, ...]] = set()
        while stack:
            one, is_ready = stack.pop()
            key = (kind, one)
            if is_ready:
                order.append(one)
            elif key not in self.made and key not in seen:
                seen.add(key)
                stack.append((one, True))
                stack += [(inner, False) for inner in behind(one).values()]
        return order

    def _after(self, like: Form) -> Mapping[int, Form]:
        if self.is_known(like.atom, like):
            return {}
        equation = self.producers.get(like.atom)
        is_narrow = equation is not None and equation.op == "broadcast_in_dim"  # its operand is smaller to scatter
        return self._through(like) if is_narrow or self.has_product(like) else {}

    def _sum(self, like: Form) -> Atom:
        ids, id_axes, atom = like.ids, like.id_axes, like.atom
        if self.is_known(atom, like):
            return self.weighted(Form(ids, id_axes, self.by_entries(atom, like)), by_count=True)
        behind = self._after(like)
        if not behind:
            self.need(atom)
            shape = id_axes.of(atom.shape), id_axes.by_entries(atom.shape, ids.entries)
            return self.expand(_scatter(id_axes, *shape), ids.lookup, (atom, self.inverse(ids)), again=True)
        equation = self.producers[atom]
        atoms = []
        for k, a in enumerate(equation.inputs):
            if k in behind:
                atoms.append(self.made["sum", behind[k]])
            elif equation.op == "dot_general" or a.shape == ():
                self.need(a)
                atoms.append(a)
            else:
                atoms.append(self.by_entries(a, like))
        return self.written(equation, ids, id_axes, atoms, {k: one.id_axes for k, one in behind.items()})

    def _through(self, like: Form) -> Mapping[int, Form]:
        equation = self.producers.get(like.atom)
        if equation is None or like.atom in self.forms or len(equation.outputs) != 1 or like.atom.dtype not in WIDE:
            return {}
        operand_axes = self._operand_axes(equation, like)
        inner = {k: Form(like.ids, id_axes, equation.inputs[k]) for k, id_axes in operand_axes.items()}
        return inner if all(one.atom.dtype in WIDE for one in inner.values()) else {}

    def _operand_axes(self, equation: Equation, like: Form) -> Mapping[int, IdAxes]:
        op, inputs = equation.op, equation.inputs
        if op == "dot_general":
            product = before_product(equation, like.id_axes)
            return {} if product is None else dict([product])
        if op in _LINEAR_MOVES:
            id_axes = axes_before(equation, like.id_axes)
            return {} if id_axes is None else {0: id_axes}
        known = [a.shape == () or self.is_known(a, like) for a in inputs]
        if op in _LINEAR:
            linear = range(len(inputs))
        elif op == "mul" and any(known):
            linear = [1] if known[0] else [0]
        elif op == "div" and known[1]:
            linear = [0]
        elif op == "select_n" and known[0]:
            linear = range(1, len(inputs))
        else:
            return {}
        whole = all(inputs[k].shape == equation.outputs[0].shape for k in linear)
        return dict.fromkeys(linear, like.id_axes) if whole else {}


# --- functions that are expanded many times, cached by their arguments, so that each is traced once ---


@functools.lru_cache(maxsize=256)
def _take(id_axes: IdAxes, shape: tuple[int, ...]) -> Callable[..., Leaf]:
    return lambda x, i: x.at[id_axes.index(i.reshape(shape))].get(mode="promise_in_bounds")


@functools.lru_cache(maxsize=256)
def _weigh(id_axes: IdAxes, by_count: bool) -> Callable[..., Leaf]:
    """Returns a function that weights a value by entries, or zeroes entries without lookups."""

    def weigh(x: Leaf, count: Leaf) -> Leaf:
        count = count.reshape(id_axes.beside(x.ndim))
        wide = jnp.promote_types(x.dtype, jnp.float32)
        return jnp.where(count > 0, (x * count.astype(wide)).astype(x.dtype) if by_count else x, 0)

    return weigh


@functools.lru_cache(maxsize=256)
def _first(id_axes: IdAxes, shape: tuple[int, ...]) -> Callable[..., Leaf]:

    def first(x: Leaf) -> Leaf:
        starts = tuple(
            slice(0, 1) if d == id_axes.at else 0 if d in id_axes.axes else slice(None) for d in range(x.ndim)
        )
        return jnp.broadcast_to(x[starts], shape)

    return first


@functools.lru_cache(maxsize=256)
def _scatter(id_axes: IdAxes, ids: tuple[int, ...], shape: tuple[int, ...]) -> Callable[..., Leaf]:
    return lambda x, i: jnp.zeros(shape, x.dtype).at[id_axes.index(i.reshape(ids))].add(x, mode="promise_in_bounds")
