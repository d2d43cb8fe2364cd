"""Sums over the lookups of each entry, taken as early as equations are linear: see `once_per_row`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from autopar.analysis.primitives import Linear, those_that
from autopar.ir.program import Atom, Equation
from autopar.passes.distinct import row_places
from autopar.passes.distinct.entry_forms import WIDE, EntryForms, Form
from autopar.passes.distinct.row_places import Place

_LINEAR = those_that(lambda p: p.elementwise and p.linear in (Linear.TOGETHER, Linear.FIRST)) - {"real", "imag"}


@dataclass(eq=False)
class EntrySums(EntryForms):
    """A block being rewritten, with sums by entries of values that are there by lookups.

    Such a value with its ids and their place in it is a `Form` whose `atom` is the value by lookups. Chains of linear
    equations may be long: they are walked with a stack of our own.
    """

    def summed(self, like: Form) -> Atom:
        """The sums of a value over the lookups of each entry; anything for an entry that has none."""
        for one in self._in_order(like, "sum", self._behind):
            self.made["sum", one] = self._sum(one)
        return self.made["sum", like]

    def has_product(self, like: Form) -> bool:
        """Whether linear equations lead from a product to a value."""
        for one in self._in_order(like, "product", self._through):
            equation = self.producers.get(one.atom)
            inner = self._through(one)
            product = any(self.made["product", a] for a in inner.values())
            is_product = equation is not None and equation.op == "dot_general"
            self.made["product", one] = bool(inner) and (is_product or product)
        return self.made["product", like]

    def _in_order(self, like: Form, kind: str, behind: Callable[[Form], Mapping[int, Form]]) -> list[Form]:
        """What isn't made yet of a value and of those behind it, these first."""
        order: list[Form] = []
        stack = [(like, False)]
        seen: set[tuple[Any, ...]] = set()
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

    def _behind(self, like: Form) -> Mapping[int, Form]:
        """The operands that a sum is made of; none if it is made of the value itself."""
        if self.is_known(like.atom, like):
            return {}
        equation = self.producers.get(like.atom)
        is_narrow = equation is not None and equation.op == "broadcast_in_dim"  # less is scattered ahead of it
        return self._through(like) if is_narrow or self.has_product(like) else {}

    def _sum(self, like: Form) -> Atom:
        ids, place, atom = like.ids, like.place, like.atom
        if self.is_known(atom, like):
            return self.weighted(Form(ids, place, self.by_entries(atom, like)), by_count=True)
        behind = self._behind(like)
        if not behind:
            self.need(atom)
            shape = place.of(atom.shape), place.by_entries(atom.shape, ids.entries)
            return self.expand(_scatter(place, *shape), ids.lookup, (atom, self.inverse(ids)), again=True)
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
        return self.written(equation, ids, place, atoms, self._params(equation, like, behind))

    def _params(self, equation: Equation, like: Form, behind: Mapping[int, Form]) -> Mapping[str, Any]:
        """An equation's parameters on sums by entries."""
        if equation.op == "dot_general":
            return row_places.product_params(equation, {k: one.place for k, one in behind.items()})
        moved = row_places.before(equation, like.place, like.ids.entries) if equation.op in row_places.LINEAR else None
        return equation.params if moved is None else moved[1]

    def _through(self, like: Form) -> Mapping[int, Form]:
        """Operands whose sums by entries give that of a value, if it is made by a linear equation."""
        equation = self.producers.get(like.atom)
        if equation is None or like.atom in self.forms or len(equation.outputs) != 1 or like.atom.dtype not in WIDE:
            return {}
        places = self._places(equation, like)
        inner = {k: Form(like.ids, place, equation.inputs[k]) for k, place in places.items()}
        return inner if all(one.atom.dtype in WIDE for one in inner.values()) else {}

    def _places(self, equation: Equation, like: Form) -> Mapping[int, Place]:
        op, inputs = equation.op, equation.inputs
        if op == "dot_general":
            product = row_places.before_product(equation, like.place)
            return {} if product is None else dict([product])
        if op in row_places.LINEAR:
            moved = row_places.before(equation, like.place, like.ids.entries)
            return {} if moved is None else {0: moved[0]}
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
        return dict.fromkeys(linear, like.place) if whole else {}


@functools.lru_cache(maxsize=256)
def _scatter(place: Place, ids: tuple[int, ...], shape: tuple[int, ...]) -> Callable[..., Any]:
    """A value by lookups -> its sums by entries."""
    return lambda x, i: jnp.zeros(shape, x.dtype).at[place.index(i.reshape(ids))].add(x, mode="promise_in_bounds")
