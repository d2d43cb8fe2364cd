"""Sums over the lookups of each entry, taken as early as equations are linear: see `once_per_row`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from autopar import jax_compat
from autopar.ir.program import Atom, Equation, Var
from autopar.passes import row_places
from autopar.passes.entry_forms import WIDE, EntryForms, Form, Ids
from autopar.passes.row_places import Place


@dataclass(eq=False)
class EntrySums(EntryForms):
    """A block being rewritten, with sums of values that are there by lookups."""

    def summed(self, atom: Atom, like: Form) -> Atom:
        """The sums of a value over the lookups of each entry."""
        return self.once(("summed", atom, like.ids, like.place), lambda: self._sum(atom, like))

    def _sum(self, atom: Atom, like: Form) -> Atom:
        ids, place = like.ids, like.place
        by_entries = self.by_entries(atom, like)
        if by_entries is not None:
            return self.weighted(Form(ids, place, by_entries), by_count=True)
        equation = self.producers.get(atom)
        through = None if equation is None else self._through(equation, like)
        narrow = equation is not None and equation.op == "broadcast_in_dim"  # less is scattered ahead of it
        if equation is None or through is None or not (narrow or self.has_product(atom, ids, place)):
            return self._scattered(atom, like)
        inner, params = through
        atoms = [
            self.summed(a, Form(ids, inner[k], a)) if k in inner else self._beside(equation, a, like)
            for k, a in enumerate(equation.inputs)
        ]
        out = Var(dataclasses.replace(atom.type, shape=place.by_entries(atom.shape, ids.entries)))
        self.add(dataclasses.replace(equation, inputs=tuple(atoms), outputs=(out,), params=params))
        return out

    def _beside(self, equation: Equation, atom: Atom, like: Form) -> Atom:
        """An operand that isn't summed."""
        if equation.op == "dot_general" or atom.shape == ():
            self.need(atom)
            return atom
        found = self.by_entries(atom, like)
        assert found is not None, "what a sum goes through has the other operands by entries"
        return found

    def _scattered(self, atom: Atom, like: Form) -> Atom:
        place, shape = like.place, like.place.by_entries(atom.shape, like.ids.entries)
        self.need(atom)

        def add(x: Any, i: Any) -> Any:
            at = place.index(i.reshape(place.of(x.shape)))
            return jnp.zeros(shape, x.dtype).at[at].add(x, mode="promise_in_bounds")

        return self.expand(add, like.ids.lookup, (atom, self.inverse(like.ids)))

    def has_product(self, atom: Atom, ids: Ids, place: Place) -> bool:
        """Whether linear equations lead from a product to a value."""
        key = ("product", atom, ids, place)
        return self.once(key, lambda: self._reaches_product(atom, ids, place))

    def _reaches_product(self, atom: Atom, ids: Ids, place: Place) -> bool:
        equation = self.producers.get(atom)
        if equation is None or atom in self.forms or atom.dtype not in WIDE or len(equation.outputs) != 1:
            return False
        if any(jax_compat.is_float(a.dtype) and a.dtype not in WIDE for a in equation.inputs):
            return False
        through = self._through(equation, Form(ids, place, atom))
        if through is None:
            return False
        inner = through[0].items()
        return equation.op == "dot_general" or any(self.has_product(equation.inputs[k], ids, at) for k, at in inner)

    def _through(self, equation: Equation, like: Form) -> tuple[Mapping[int, Place], Mapping[str, Any]] | None:
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

    def _linear(self, equation: Equation, like: Form) -> tuple[int, ...]:
        """Operands in which an elementwise equation is linear, if the others are there by entries."""
        op, inputs = equation.op, equation.inputs
        if op in ("add", "add_any", "sub", "neg", "copy", "convert_element_type"):
            linear = tuple(range(len(inputs)))
        elif op in ("mul", "div", "select_n"):
            known = [a.shape == () or self.by_entries(a, like) is not None for a in inputs]
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
