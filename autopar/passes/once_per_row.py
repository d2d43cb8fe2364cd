"""Compute once for each distinct row what depends on the row alone, where a batch looks rows up many times over.

Ids of language and of recommenders are Zipf distributed: 640 lookups may be of 190 rows. What is computed of a row and
of parameters is the same in each lookup of that row, up to where examples meet anything of their own. With `inverse`
the entry of each lookup among the E distinct ones and `count` how often each occurs:

    f(rows[inverse])                               ->  f(rows)[inverse]
    sum_i f(rows[inverse[i]])                      ->  sum_e count[e] f(rows[e])
    zeros.at[inverse].add(f(rows[inverse]))        ->  count * f(rows)
    zeros.at[inverse].add(dy @ w)                  ->  zeros.at[inverse].add(dy) @ w
    einsum("nd,nk->dk", f(rows[inverse]), dy)      ->  einsum("ed,ek->dk", f(rows), zeros.at[inverse].add(dy))

RecD does the first by hand, in a model's code (Zhao et al., Deduplication for recommendation model training, MLSys
2023). Results differ by the rounding of sums in another order. It is done in the program of one device or rank, where
rows have been fetched: their number is a bound that was measured. A block is left alone where that saves nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar import jax_compat
from autopar.ir.expand import expand
from autopar.ir.local import OncePerRow
from autopar.ir.plan import Plan
from autopar.ir.program import ArrayType, Atom, Block, Equation, Literal, Program, Var
from autopar.ir.rules.elementwise import ELEMENTWISE
from autopar.ir.slicing import eliminate_dead
from autopar.ir.work import flops, products
from autopar.passes import row_places
from autopar.passes.row_places import Place

#: What an element that is gathered or scattered costs, in operations of a product.
_MOVED = 64.0
_MOVES = {"lookup": 0, "gather": 0, "aggregate": 3, "scatter-add": 2}
#: The same value in the same place, whatever the operands' places are.
_ELEMENTWISE = ELEMENTWISE - {"sharding_constraint", "random_bits_like"}
#: What sums may be weighted in: counts are exact, and products don't overflow where sums don't.
_WIDE = (np.dtype(np.float32), np.dtype(np.float64))


def once_per_row(program: Program, plan: Plan, devices: int = 1) -> tuple[Program, str]:
    """The program of one device or rank with what depends on single rows computed once for each.

    Args:
      program: Localized.
      plan: What it was made by.
      devices: Of a rank: they share the lookups, but each has all rows.
    """
    if program.local is None or plan.road[0] == "xla":
        return program, "for programs of one device or rank"
    found: list[_Ids] = []
    block = _of_block(program.block, devices, found)
    if block is program.block:
        return program, "nothing to gain, with room for so many rows"
    counts = tuple((ids.entries, ids.lookups) for ids in dict.fromkeys(found))
    before = products(program.block)
    made = OncePerRow(counts, products(block) / before if before else 1.0)
    return dataclasses.replace(program, block=block, once_per_row=made), str(made)


def _of_block(block: Block, devices: int, found: list[_Ids]) -> Block:
    equations = []
    for equation in block.equations:
        bodies = tuple(_of_block(body, devices, found) for body in equation.bodies)
        if any(new is not old for new, old in zip(bodies, equation.bodies, strict=True)):
            equation = dataclasses.replace(equation, bodies=bodies, original=None)
        equations.append(equation)
    if any(new is not old for new, old in zip(equations, block.equations, strict=True)):
        block = Block(block.inputs, tuple(equations), block.outputs)
    every = {key: ids for key, ids in _all_ids(block).items() if ids.entries * devices < ids.lookups}
    if not every:
        return block
    rewritten = [_Rewrite(block, every, backward).run() for backward in (False, True)]
    best = min((block, *rewritten), key=_cost)
    if best is not block:
        found += every.values()
    return best


def _cost(block: Block) -> float:
    """Operations of products; what is gathered and scattered counts as some."""
    total = 0.0
    for e in block.equations:
        total += flops(e)
        if e.op in _MOVES:
            moved = e.outputs[0] if e.op in ("lookup", "gather") else e.inputs[_MOVES[e.op]]
            total += _MOVED * moved.type.size
    return total


@dataclass(frozen=True, slots=True, eq=False)
class _Ids:
    """Lookups of the same ids in fetched rows.

    Attributes:
      lookup: One of them.
      shape: Of the ids: the axes that lookups have of them.
      fetched: Rows that there are to look up.
      clips: Whether ids out of range look up the nearest row; else what the lookup fills in. Either way they have
        entries of their own, the last ones, since no push adds them up.
    """

    lookup: Equation
    shape: tuple[int, ...]
    fetched: int
    clips: bool

    @property
    def lookups(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def entries(self) -> int:
        return self.fetched + (2 if self.clips else 1)


def _all_ids(block: Block) -> dict[tuple[Atom, Atom], _Ids]:
    """(route, index) -> its ids, where rows are looked up as a whole."""
    found: dict[tuple[Atom, Atom], _Ids] = {}
    refused: set[tuple[Atom, Atom]] = set()
    for equation in block.equations:
        if equation.op != "lookup":
            continue
        fetched, route, index = equation.inputs
        ids = _Ids(equation, index.shape[:-1], fetched.shape[equation.params["axis"]], equation.params["clip"])
        other = found.setdefault((route, index), ids)
        if (ids.fetched, ids.clips) != (other.fetched, other.clips) or not _is_whole(equation):
            refused.add((route, index))
    return {key: ids for key, ids in found.items() if key not in refused}


def _is_whole(lookup: Equation) -> bool:
    """Whether each id is one row, whose elements follow the axes of the ids."""
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


@dataclass(frozen=True, slots=True, eq=False)
class _Form:
    """A value by entries: `atom` has one axis, of the entries, at `place` where the value has those of the ids."""

    ids: _Ids
    place: Place
    atom: Atom

    def fits(self, other: _Form) -> bool:
        return self.ids is other.ids and self.place == other.place


@dataclass(eq=False)
class _Rewrite:
    """One block being rewritten. Variables keep their names; those that nobody reads go in the end.

    `backward`: whether sums by entries go through products, too.
    """

    block: Block
    every: Mapping[tuple[Atom, Atom], _Ids]
    backward: bool
    equations: list[Equation] = field(default_factory=list)
    forms: dict[Atom, _Form] = field(default_factory=dict)
    #: What has a value by lookups.
    defined: set[Atom] = field(default_factory=set)
    made: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    producers: dict[Atom, Equation] = field(init=False)

    def __post_init__(self) -> None:
        self.producers = {v: e for e in self.block.equations for v in e.outputs}
        self.defined.update(self.block.inputs)

    def run(self) -> Block:
        """The block with what can be computed by entries computed so."""
        for equation in self.block.equations:
            if not self._rewritten(equation):
                for atom in equation.inputs:
                    self._need(atom)
                self._add(equation)
        for atom in self.block.outputs:
            self._need(atom)
        block, _ = eliminate_dead(Block(self.block.inputs, tuple(self.equations), self.block.outputs))
        return block

    # --- what is written ---

    def _add(self, equation: Equation) -> None:
        self.equations.append(equation)
        self.defined.update(equation.outputs)

    def _expand(self, fun: Callable[..., Any], like: Equation, atoms: Sequence[Atom], output: Var | None = None) -> Var:
        for equation in (made := expand(fun, like, atoms, output)):
            self._add(equation)
        return made[-1].outputs[0]

    def _once(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]

    def _need(self, atom: Atom) -> None:
        """Make sure that a value is there by lookups."""
        form = self.forms.get(atom)
        if form is None or atom in self.defined:
            return
        assert isinstance(atom, Var), "constants have no form"
        like = self.producers[atom]
        if like.op == "lookup":
            self._add(like)
            return
        place, shape = form.place, form.place.of(atom.shape)
        take = lambda x, i: x.at[place.index(i.reshape(shape))].get(mode="promise_in_bounds")  # noqa: E731
        self._expand(take, like, (form.atom, self._inverse(form.ids)), atom)

    def _inverse(self, ids: _Ids) -> Var:
        """The entry of each lookup, int32: what the lookup finds in the numbers of the entries."""

        def make() -> Var:
            like, width = ids.lookup, ids.fetched
            numbers = self._expand(lambda: jax.lax.iota(jnp.int32, width), like, ())
            given = {"axis": 0, "slice_sizes": (1,), "spread": like.params["batch"]}
            found = self._look_up(ids, numbers, like.inputs[2], () if ids.clips else width, given)
            if not ids.clips:
                return found
            last = ids.lookup.params["extent"] - 1

            def apart(found: Any, index: Any) -> Any:
                index = index[..., 0]
                above = index > min(last, jnp.iinfo(index.dtype).max)
                return jnp.where(index < 0, width, jnp.where(above, width + 1, found))

            return self._expand(apart, like, (found, like.inputs[2]))

        return self._once(("inverse", ids), make)

    def _look_up(self, ids: _Ids, fetched: Atom, index: Atom, fill: Any, given: Mapping[str, Any]) -> Var:
        """The lookup of these ids in something else, or of other ones."""
        rank, rest = len(index.shape) - 1, fetched.shape[1:]
        dims = ids.lookup.params["dimension_numbers"]._replace(
            offset_dims=tuple(range(rank, rank + len(rest))), collapsed_slice_dims=(0,), start_index_map=(0,)
        )
        params = {**ids.lookup.params, **given, "dimension_numbers": dims}
        if fill != ():
            params["fill_value"] = fill
        out = Var(ArrayType((*index.shape[:-1], *rest), fetched.dtype))
        route = ids.lookup.inputs[1]
        self._add(dataclasses.replace(ids.lookup, inputs=(fetched, route, index), outputs=(out,), params=params))
        return out

    def _counts(self, ids: _Ids) -> Var:
        """How many lookups each entry has, f32[E]."""
        count = lambda i: jnp.zeros(ids.entries, jnp.float32).at[i.reshape(-1)].add(1.0)  # noqa: E731
        return self._once(("counts", ids), lambda: self._expand(count, ids.lookup, (self._inverse(ids),)))

    def _weighted(self, form: _Form, *, by_count: bool) -> Var:
        """A value by entries, maybe times their counts; zero where there is no lookup, whatever it is there."""

        def weigh(x: Any, c: Any) -> Any:
            c = c.reshape(form.place.beside(x.ndim))
            times = (x * c.astype(jnp.promote_types(x.dtype, c.dtype))).astype(x.dtype) if by_count else x
            return jnp.where(c > 0, times, 0)

        key = ("weighted", form.atom, form.ids, form.place, by_count)
        atoms = (form.atom, self._counts(form.ids))
        return self._once(key, lambda: self._expand(weigh, form.ids.lookup, atoms))

    # --- equations ---

    def _rewritten(self, equation: Equation) -> bool:
        """Whether an equation's result is there by entries, or is computed from values by entries."""
        if equation.op == "lookup":
            ids = self.every.get((equation.inputs[1], equation.inputs[2]))
            return ids is not None and self._looked_up(equation, ids)
        if equation.op == "aggregate":
            return self._aggregate(equation)
        forms = {k: self.forms[a] for k, a in enumerate(equation.inputs) if a in self.forms}
        if equation.op == "reduce_sum" and self._total(equation):
            return True
        if not forms or len(equation.outputs) != 1 or equation.effects or equation.bodies:
            return False
        if equation.op in _ELEMENTWISE:
            return self._elementwise(equation, next(iter(forms.values())))
        if equation.op == "dot_general":
            return any(self._product(equation, k, f) or self._contracted(equation, k, f) for k, f in forms.items())
        (form, *others) = forms.values()
        found = None if others or len(equation.inputs) > 1 else row_places.moved(equation, form.place, form.ids.entries)
        if found is None:
            return False
        self._define(equation, form.ids, found[0], (form.atom,), found[1])
        return True

    def _define(
        self, equation: Equation, ids: _Ids, place: Place, atoms: Sequence[Atom], params: Mapping[str, Any] | None
    ) -> None:
        """The equation on values by entries."""
        old = equation.outputs[0]
        out = Var(dataclasses.replace(old.type, shape=place.by_entries(old.shape, ids.entries)))
        params = equation.params if params is None else params
        self._add(dataclasses.replace(equation, inputs=tuple(atoms), outputs=(out,), params=params))
        self.forms[old] = _Form(ids, place, out)

    def _looked_up(self, lookup: Equation, ids: _Ids) -> bool:
        atom, axis = lookup.inputs[0], lookup.params["axis"]
        if axis:
            atom = self._expand(lambda x: jnp.moveaxis(x, axis, 0), lookup, (atom,))
        if ids.clips:
            ends = np.array([[0], [lookup.params["extent"] - 1]], np.int32)
            index = Literal(ends, ArrayType(ends.shape, ends.dtype))
            given = {"axis": 0, "slice_sizes": (1, *atom.shape[1:]), "batch": None, "spread": None}
            more = self._look_up(ids, atom, index, (), given)
        else:
            fill = lookup.params.get("fill_value")
            fill = jnp.nan if fill is None else fill
            more = self._expand(lambda: jnp.full((1, *atom.shape[1:]), fill, atom.dtype), lookup, ())
        atom = self._expand(lambda *xs: jnp.concatenate(xs), lookup, (atom, more))
        self.forms[lookup.outputs[0]] = _Form(ids, Place(0, len(ids.shape)), atom)
        return True

    def _elementwise(self, equation: Equation, form: _Form) -> bool:
        shape = equation.outputs[0].shape
        atoms = [a if a.shape == () and shape != () else self._by_entries(a, form) for a in equation.inputs]
        if any(a is None for a in atoms):
            return False
        self._define(equation, form.ids, form.place, [a for a in atoms if a is not None], None)
        return True

    def _by_entries(self, atom: Atom, like: _Form) -> Atom | None:
        """A value by the entries of another one, where it is there, or is constant along the ids; else None."""
        form = self.forms.get(atom)
        if form is not None:
            return form.atom if form.fits(like) else None
        return self._once(("constant", atom, like.ids, like.place), lambda: self._constant(atom, like))

    def _constant(self, atom: Atom, like: _Form) -> Atom | None:
        made = self.producers.get(atom)
        if made is None or len(atom.shape) < like.place.at + like.place.rank:
            return None
        if made.op in ("broadcast_in_dim", "full"):
            given = row_places.broadcast(made, like.place, like.ids.entries)
            if given is None:
                return None
            shape, kept, dims = given
            source = made.inputs[0]
            self._need(source)
            spread = lambda x: jax.lax.broadcast_in_dim(x.reshape(kept), shape, dims)  # noqa: E731
            return self._expand(lambda x: spread(jnp.asarray(x, atom.dtype)), made, (source,))
        if made.op not in _ELEMENTWISE or len(made.outputs) != 1:
            return None
        atoms = [a if a.shape == () else self._by_entries(a, like) for a in made.inputs]
        if any(a is None for a in atoms):
            return None
        out = Var(dataclasses.replace(atom.type, shape=like.place.by_entries(atom.shape, like.ids.entries)))
        self._add(dataclasses.replace(made, inputs=tuple(a for a in atoms if a is not None), outputs=(out,)))
        return out

    def _product(self, equation: Equation, k: int, form: _Form) -> bool:
        """A product by entries with what isn't."""
        place = row_places.in_product(equation, k, form.place)
        if place is None:
            return False
        other = equation.inputs[1 - k]
        self._need(other)
        atoms = (form.atom, other) if k == 0 else (other, form.atom)
        self._define(equation, form.ids, place, atoms, row_places.product_params(equation, {k: form.place}))
        return True

    def _contracted(self, equation: Equation, k: int, form: _Form) -> bool:
        """A product that adds up over the ids: one over the entries, each times its count."""
        beside = row_places.contracted_with(equation, k, form.place)
        a, b = equation.inputs[k], equation.inputs[1 - k]
        if beside is None or a.dtype not in _WIDE or b.dtype not in _WIDE:
            return False
        other = self.forms.get(b)
        if other is not None and other.ids is form.ids and other.place == beside:
            light, heavy = (form, other) if form.atom.type.size <= other.atom.type.size else (other, form)
            mine = {light: self._weighted(light, by_count=True), heavy: self._weighted(heavy, by_count=False)}
            left, right = mine[form], mine[other]
        elif self.backward and other is None:
            self._need(b)
            sums = self._summed(b, _Form(form.ids, beside, b))
            left, right = (
                self._weighted(form, by_count=False),
                self._weighted(_Form(form.ids, beside, sums), by_count=False),
            )
        else:
            return False
        atoms = (left, right) if k == 0 else (right, left)
        places = {k: form.place, 1 - k: beside}
        params = row_places.product_params(equation, places)
        self._add(dataclasses.replace(equation, inputs=atoms, params=params))
        return True

    def _total(self, equation: Equation) -> bool:
        """A sum over the ids, maybe over other axes as well."""
        (atom,), axes = equation.inputs, equation.params["axes"]
        form = self.forms.get(atom)
        if atom.dtype not in _WIDE:
            return False
        if form is not None:
            sums = self._weighted(form, by_count=True) if form.place.within(axes) else None
        else:
            form = self._behind(atom, axes) if self.backward else None
            sums = form and self._weighted(_Form(form.ids, form.place, self._summed(atom, form)), by_count=False)
        if form is None or sums is None:
            return False
        params = {**equation.params, "axes": tuple(dict.fromkeys(form.place.moved(d) for d in axes))}
        self._add(dataclasses.replace(equation, inputs=(sums,), params=params))
        return True

    def _behind(self, atom: Atom, axes: Sequence[int]) -> _Form | None:
        """By which ids, and where, the sums of a value over some axes lead back through a product."""
        for ids in self.every.values():
            for place in row_places.places_of(ids.lookups, atom.shape):
                if place.within(axes) and self._has_product(atom, ids, place):
                    return _Form(ids, place, atom)
        return None

    def _aggregate(self, equation: Equation) -> bool:
        """Sums of gradients by rows."""
        base, route, index, updates = equation.inputs
        ids = self.every.get((route, index))
        if ids is None or not _adds_rows(equation, ids):
            return False
        form, place = self.forms.get(updates), Place(0, len(ids.shape))
        if form is not None and form.ids is ids and form.place == place:
            sums = self._weighted(form, by_count=True)
        elif self.backward and form is None and updates.dtype in _WIDE and self._has_product(updates, ids, place):
            sums = self._summed(updates, _Form(ids, place, updates))
            sums = self._weighted(
                _Form(ids, place, sums), by_count=False
            )  # an entry that isn't looked up may be anything
        else:
            return False
        self._need(base)
        self._expand(lambda b, x: b + x[: ids.fetched], equation, (base, sums), equation.outputs[0])
        return True

    # --- sums by entries of values that are there by lookups ---

    def _summed(self, atom: Atom, like: _Form) -> Atom:
        """The sums of a value over the lookups of each entry."""
        return self._once(("summed", atom, like.ids, like.place), lambda: self._sum(atom, like))

    def _sum(self, atom: Atom, like: _Form) -> Atom:
        ids, place = like.ids, like.place
        by_entries = self._by_entries(atom, like)
        if by_entries is not None:
            return self._weighted(_Form(ids, place, by_entries), by_count=True)
        equation = self.producers.get(atom)
        through = None if equation is None else self._through(equation, like)
        narrow = equation is not None and equation.op == "broadcast_in_dim"  # less is scattered ahead of it
        if equation is None or through is None or not (narrow or self._has_product(atom, ids, place)):
            return self._scattered(atom, like)
        inner, params = through
        atoms = [
            self._summed(a, _Form(ids, inner[k], a)) if k in inner else self._beside(equation, a, like)
            for k, a in enumerate(equation.inputs)
        ]
        out = Var(dataclasses.replace(atom.type, shape=place.by_entries(atom.shape, ids.entries)))
        self._add(dataclasses.replace(equation, inputs=tuple(atoms), outputs=(out,), params=params))
        return out

    def _beside(self, equation: Equation, atom: Atom, like: _Form) -> Atom:
        """An operand that isn't summed."""
        if equation.op == "dot_general" or atom.shape == ():
            self._need(atom)
            return atom
        found = self._by_entries(atom, like)
        assert found is not None, "what a sum goes through has the other operands by entries"
        return found

    def _scattered(self, atom: Atom, like: _Form) -> Atom:
        place, shape = like.place, like.place.by_entries(atom.shape, like.ids.entries)
        self._need(atom)

        def add(x: Any, i: Any) -> Any:
            at = place.index(i.reshape(place.of(x.shape)))
            return jnp.zeros(shape, x.dtype).at[at].add(x, mode="promise_in_bounds")

        return self._expand(add, like.ids.lookup, (atom, self._inverse(like.ids)))

    def _has_product(self, atom: Atom, ids: _Ids, place: Place) -> bool:
        """Whether linear equations lead from a product to a value."""
        key = ("product", atom, ids, place)
        return self._once(key, lambda: self._reaches_product(atom, ids, place))

    def _reaches_product(self, atom: Atom, ids: _Ids, place: Place) -> bool:
        equation = self.producers.get(atom)
        if equation is None or atom in self.forms or atom.dtype not in _WIDE or len(equation.outputs) != 1:
            return False
        if any(jax_compat.is_float(a.dtype) and a.dtype not in _WIDE for a in equation.inputs):
            return False
        through = self._through(equation, _Form(ids, place, atom))
        if through is None:
            return False
        inner = through[0].items()
        return equation.op == "dot_general" or any(self._has_product(equation.inputs[k], ids, at) for k, at in inner)

    def _through(self, equation: Equation, like: _Form) -> tuple[Mapping[int, Place], Mapping[str, Any]] | None:
        """Operands whose sums by entries give that of the result, with the places of the ids in them, and the
        equation's parameters by entries; None where it isn't linear in them."""
        if equation.op == "dot_general":
            product = row_places.before_product(equation, like.place)
            if product is None:
                return None
            inner = dict([product])
            return inner, row_places.product_params(equation, inner)
        if equation.op in row_places.LINEAR:
            moved = row_places.before(equation, like.place, like.ids.entries)
            return None if moved is None else ({0: moved[0]}, moved[1])
        linear = self._linear(equation, like)
        return (dict.fromkeys(linear, like.place), equation.params) if linear else None

    def _linear(self, equation: Equation, like: _Form) -> tuple[int, ...]:
        """Operands in which an elementwise equation is linear, if the others are there by entries."""
        op, inputs = equation.op, equation.inputs
        if op in ("add", "add_any", "sub", "neg", "copy", "convert_element_type"):
            linear = tuple(range(len(inputs)))
        elif op in ("mul", "div", "select_n"):
            known = [a.shape == () or self._by_entries(a, like) is not None for a in inputs]
            if op == "select_n":
                linear = tuple(range(1, len(inputs))) if known[0] else ()
            elif op == "mul" and known[0]:
                linear = (1,)
            else:
                linear = (0,) if known[1] else ()
        else:
            return ()
        whole = all(inputs[k].shape == equation.outputs[0].shape for k in linear)
        return linear if whole and all(jax_compat.is_float(inputs[k].dtype) for k in linear) else ()


def _adds_rows(push: Equation, ids: _Ids) -> bool:
    """Whether each id's update is added to one row, in the order of the lookups."""
    numbers, updates, rank = push.params["dimension_numbers"], push.inputs[3], len(ids.shape)
    return (
        push.params["op"] == "scatter-add"
        and push.params["axis"] == 0
        and push.params["position"] == 0
        and not push.params["clip"]
        and jax_compat.is_float(updates.dtype)
        and tuple(numbers.update_window_dims) == tuple(range(rank, len(updates.shape)))
        and tuple(numbers.inserted_window_dims) == (0,)
        and not numbers.operand_batching_dims
        and updates.shape[rank:] == push.inputs[0].shape[1:]
    )
