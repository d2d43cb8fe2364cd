"""Values of a block whose lookups are written as entries, one for each distinct row: see `once_per_row`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar import jax_compat
from autopar.ir.expand import expand
from autopar.ir.program import ArrayType, Atom, Block, Equation, Literal, Var
from autopar.ir.writer import Writer
from autopar.passes.distinct import row_places
from autopar.passes.distinct.row_places import Place

#: What sums may be weighted in: counts are exact, and products don't overflow where sums don't.
WIDE = (np.dtype(np.float32), np.dtype(np.float64))


@dataclass(frozen=True, slots=True, eq=False)
class Ids:
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


@dataclass(frozen=True, slots=True)
class Form:
    """A value by entries: `atom` has one axis, of the entries, at `place` where the value has those of the ids."""

    ids: Ids
    place: Place
    atom: Atom

    def fits(self, other: Form) -> bool:
        return self.ids is other.ids and self.place == other.place


def all_ids(block: Block) -> dict[tuple[Atom, Atom], Ids]:
    """(route, index) -> its ids, where rows are looked up as a whole."""
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


@dataclass(eq=False)
class EntryForms(Writer):
    """A block being rewritten. Variables keep their names; those that nobody reads go in the end.

    Attributes:
      block: As it was.
      every: (route, index) -> the ids whose lookups are by entries.
      forms: Values that are there by entries.
      defined: Values that are there by lookups.
      made: What is made once, by what it is.
      producers: The old equations by their results.
      constant: The axes along which old values are constant, as bits; those without any are missing.
    """

    block: Block
    every: Mapping[tuple[Atom, Atom], Ids]
    forms: dict[Atom, Form] = field(default_factory=dict)
    defined: set[Atom] = field(default_factory=set)
    made: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    producers: dict[Atom, Equation] = field(init=False)
    constant: dict[Atom, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.producers = {v: e for e in self.block.equations for v in e.outputs}
        self.defined.update(self.block.inputs)
        for equation in self.block.equations:
            bits = row_places.constant_axes(equation, self.constant)
            if bits:
                self.constant[equation.outputs[0]] = bits

    # --- what is written ---

    def append(self, equation: Equation) -> None:
        super().append(equation)
        self.defined.update(equation.outputs)

    def expand(
        self,
        fun: Callable[..., Any],
        like: Equation,
        atoms: Sequence[Atom],
        output: Var | None = None,
        *,
        again: bool = False,
    ) -> Var:
        """See `ir.expand`."""
        made = expand(fun, like, atoms, output, again=again)
        self.extend(made)
        return made[-1].outputs[0]

    def once(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]

    def need(self, atom: Atom) -> None:
        """Make sure that a value is there by lookups."""
        form = self.forms.get(atom)
        if form is None or atom in self.defined:
            return
        assert isinstance(atom, Var), "constants have no form"
        like = self.producers[atom]
        if like.op == "ap.lookup":
            self.append(like)
            return
        take = _take(form.place, form.place.of(atom.shape))
        self.expand(take, like, (form.atom, self.inverse(form.ids)), atom, again=True)

    def inverse(self, ids: Ids) -> Var:
        """The entry of each lookup, int32: what the lookup finds in the numbers of the entries."""

        def make() -> Var:
            like, width = ids.lookup, ids.fetched
            numbers = self.expand(lambda: jax.lax.iota(jnp.int32, width), like, ())
            params: dict[str, Any] = {"slice_sizes": (1,), "spread": like.params["batch"]}
            params |= {} if ids.clips else {"fill_value": width}
            looked_up = self._look_up(ids, numbers, like.inputs[2], params)
            if not ids.clips:
                return looked_up
            last = ids.lookup.params["extent"] - 1

            def apart(place: Any, index: Any) -> Any:
                index = index[..., 0]
                above = index > min(last, jnp.iinfo(index.dtype).max)
                return jnp.where(index < 0, width, jnp.where(above, width + 1, place))

            return self.expand(apart, like, (looked_up, like.inputs[2]))

        return self.once(("inverse", ids), make)

    def _look_up(self, ids: Ids, fetched: Atom, index: Atom, how: Mapping[str, Any]) -> Var:
        """The lookup of these ids, or of others, in something whose rows lead. `how`: parameters that differ."""
        rank, rest = len(index.shape) - 1, fetched.shape[1:]
        dims = ids.lookup.params["dimension_numbers"]._replace(
            offset_dims=tuple(range(rank, rank + len(rest))), collapsed_slice_dims=(0,), start_index_map=(0,)
        )
        params = {**ids.lookup.params, "axis": 0, **how, "dimension_numbers": dims}
        out = Var(ArrayType((*index.shape[:-1], *rest), fetched.dtype))
        route = ids.lookup.inputs[1]
        self.append(dataclasses.replace(ids.lookup, inputs=(fetched, route, index), outputs=(out,), params=params))
        return out

    def counts(self, ids: Ids) -> Var:
        """How many lookups each entry has, int32[E]."""
        count = lambda i: jnp.zeros(ids.entries, jnp.int32).at[i.reshape(-1)].add(1)  # noqa: E731
        return self.once(("counts", ids), lambda: self.expand(count, ids.lookup, (self.inverse(ids),)))

    def weighted(self, form: Form, *, by_count: bool) -> Var:
        """A value by entries, maybe times their counts; zero where there is no lookup, whatever it is there."""
        atoms = (form.atom, self.counts(form.ids))
        make = lambda: self.expand(_weigh(form.place, by_count), form.ids.lookup, atoms, again=True)  # noqa: E731
        return self.once(("weighted", form, by_count), make)

    def define(
        self, equation: Equation, ids: Ids, place: Place, atoms: Sequence[Atom], params: Mapping[str, Any]
    ) -> None:
        """From here on an equation's result is there by entries: `atoms` and `params` are its own there."""
        old = equation.outputs[0]
        self.forms[old] = Form(ids, place, self.written(equation, ids, place, atoms, params))

    def written(
        self, equation: Equation, ids: Ids, place: Place, atoms: Sequence[Atom], params: Mapping[str, Any]
    ) -> Var:
        """Adds the equation on values by entries."""
        old = equation.outputs[0]
        out = Var(dataclasses.replace(old.type, shape=place.by_entries(old.shape, ids.entries)))
        self.append(dataclasses.replace(equation, inputs=tuple(atoms), outputs=(out,), params=params))
        return out

    def look_up_all(self, lookup: Equation, ids: Ids) -> None:
        """The rows that there are to look up, and what ids out of range look up, as a lookup's value by entries."""
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
        self.forms[lookup.outputs[0]] = Form(ids, Place(0, len(ids.shape)), atom)

    def is_known(self, atom: Atom, like: Form) -> bool:
        """Whether a value is there by the entries of another one, or is constant along its ids."""
        form = self.forms.get(atom)
        if form is not None:
            return form.fits(like)
        bits = row_places.place_along(atom, self.constant)
        return all(bits >> d & 1 for d in like.place.axes)

    def by_entries(self, atom: Atom, like: Form) -> Atom:
        """Such a value."""
        form, ids, place = self.forms.get(atom), like.ids, like.place
        if form is not None:
            return form.atom
        shape = place.by_entries(atom.shape, ids.entries)
        make = lambda: self.expand(_first(place, shape), ids.lookup, (atom,), again=True)  # noqa: E731
        return self.once(("constant", atom, ids, place), make)


# Functions that are expanded many times, one for each set of arguments, so that each is traced once.


@functools.lru_cache(maxsize=256)
def _take(place: Place, shape: tuple[int, ...]) -> Callable[..., Any]:
    """A value by entries -> by lookups."""
    return lambda x, i: x.at[place.index(i.reshape(shape))].get(mode="promise_in_bounds")


@functools.lru_cache(maxsize=256)
def _weigh(place: Place, by_count: bool) -> Callable[..., Any]:
    """A value by entries, their counts -> its product with them, or itself; zero where they are."""

    def weigh(x: Any, count: Any) -> Any:
        count = count.reshape(place.beside(x.ndim))
        wide = jnp.promote_types(x.dtype, jnp.float32)
        return jnp.where(count > 0, (x * count.astype(wide)).astype(x.dtype) if by_count else x, 0)

    return weigh


@functools.lru_cache(maxsize=256)
def _first(place: Place, shape: tuple[int, ...]) -> Callable[..., Any]:
    """A value that is constant along the ids -> by entries."""

    def first(x: Any) -> Any:
        starts = tuple(slice(0, 1) if d == place.at else 0 if place.has(d) else slice(None) for d in range(x.ndim))
        return jnp.broadcast_to(x[starts], shape)

    return first
