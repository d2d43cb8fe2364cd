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
2023). Results differ by the rounding of sums in another order, and NaN and infinity may change places where a factor
(`w`) isn't finite. It is done in a rank's own program, with tables on hosts: the number of rows that it fetches is a
bound that was measured. A block is left alone where that saves nothing; bodies of loops and checkpoints are blocks by
themselves, and take part with lookups of their own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopar import jax_compat
from autopar.analysis.local import OncePerRow
from autopar.analysis.work import flops, products
from autopar.ir.bound_plan import BoundPlan
from autopar.ir.program import Atom, Block, Equation, Program
from autopar.ir.slicing import eliminate_dead
from autopar.passes.distinct import row_places
from autopar.passes.distinct.entry_forms import WIDE, Form, Ids, all_ids
from autopar.passes.distinct.entry_sums import EntrySums
from autopar.passes.distinct.row_places import Place

#: What an element that is gathered or scattered costs, in operations of a product.
_MOVED = 64.0
_GATHERS = frozenset({"ap.lookup", "gather"})
#: Operand that is scattered.
_SCATTERS = {"ap.aggregate": 3, "scatter-add": 2}


def once_per_row(program: Program, bound: BoundPlan) -> tuple[Program, str]:
    """The program of one device with what depends on single rows computed once for each.

    Args:
      program: Localized.
      bound: What it was made by.
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
    return dataclasses.replace(program, block=block, once_per_row=made), str(made)


def _of_block(block: Block, distinct: list[Ids]) -> Block:
    block = block.with_equations(
        [e.with_bodies([_of_block(body, distinct) for body in e.bodies]) for e in block.equations]
    )
    every = {key: ids for key, ids in all_ids(block).items() if ids.entries < ids.lookups}
    if not every:
        return block
    rewritten = [_Rewrite(block, every, backward=backward).run() for backward in (False, True)]
    best = min((block, *rewritten), key=_cost)
    if best is not block:
        distinct += every.values()
    return best


def _cost(block: Block) -> float:
    """Operations of products; what is gathered and scattered counts as some."""
    total = 0.0
    for e in block.equations:
        total += flops(e)
        if e.op in _GATHERS:
            total += _MOVED * e.outputs[0].type.size
        elif e.op in _SCATTERS:
            total += _MOVED * e.inputs[_SCATTERS[e.op]].type.size
    return total


@dataclass(eq=False)
class _Rewrite(EntrySums):
    """The rules. `backward`: whether sums by entries go through products, too."""

    backward: bool = False

    def run(self) -> Block:
        """The block with what can be computed by entries computed so."""
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
        """Whether an equation's result is there by entries, or is computed from values by entries."""
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
        if equation.op in row_places.PLACED_ELEMENTWISE:
            return self._elementwise(equation, next(iter(forms.values())))
        if equation.op == "dot_general":
            return any(self._product(equation, k, f) or self._contracted(equation, k, f) for k, f in forms.items())
        (form, *others) = forms.values()
        moved = None if others or len(equation.inputs) > 1 else row_places.moved(equation, form.place, form.ids.entries)
        if moved is None:
            return False
        place, params = moved
        self.define(equation, form.ids, place, (form.atom,), params)
        return True

    def _elementwise(self, equation: Equation, form: Form) -> bool:
        shape = equation.outputs[0].shape
        if form.ids.lookups != math.prod(form.place.of(shape)):  # the ids' axes are 1 here, and are spread
            return False
        if not all(
            row_places.fits(a.shape, shape) and (not a.shape or self.is_known(a, form)) for a in equation.inputs
        ):
            return False
        atoms = [self.by_entries(a, form) if a.shape else a for a in equation.inputs]
        self.define(equation, form.ids, form.place, atoms, equation.params)
        return True

    def _product(self, equation: Equation, k: int, form: Form) -> bool:
        """A product by entries with what isn't."""
        place = row_places.in_product(equation, k, form.place)
        if place is None:
            return False
        other = equation.inputs[1 - k]
        self.need(other)
        atoms = (form.atom, other) if k == 0 else (other, form.atom)
        self.define(equation, form.ids, place, atoms, row_places.product_params(equation, {k: form.place}))
        return True

    def _contracted(self, equation: Equation, k: int, form: Form) -> bool:
        """A product that adds up over the ids: one over the entries, each times its count."""
        beside = row_places.contracted_with(equation, k, form.place)
        a, b = equation.inputs[k], equation.inputs[1 - k]
        if beside is None or a.dtype not in WIDE or b.dtype not in WIDE:
            return False
        other = self.forms.get(b)
        if other is not None and other.ids is form.ids and other.place == beside:
            is_lighter = form.atom.type.size <= other.atom.type.size  # one of them is enough
            mine, theirs = self.weighted(form, by_count=is_lighter), self.weighted(other, by_count=not is_lighter)
        elif self.backward and other is None:
            self.need(b)
            sums = Form(form.ids, beside, self.summed(Form(form.ids, beside, b)))
            mine, theirs = self.weighted(form, by_count=False), self.weighted(sums, by_count=False)
        else:
            return False
        atoms = (mine, theirs) if k == 0 else (theirs, mine)
        params = row_places.product_params(equation, {k: form.place, 1 - k: beside})
        self.append(dataclasses.replace(equation, inputs=atoms, params=params))
        return True

    def _total(self, equation: Equation) -> bool:
        """A sum over the ids, maybe over other axes as well."""
        (atom,), axes = equation.inputs, equation.params["axes"]
        form = self.forms.get(atom)
        if atom.dtype not in WIDE:
            return False
        if form is not None:
            sums = self.weighted(form, by_count=True) if form.place.within(axes) else None
        else:
            form = self._leading_back(atom, axes) if self.backward else None
            sums = form and self.weighted(Form(form.ids, form.place, self.summed(form)), by_count=False)
        if form is None or sums is None:
            return False
        params = {**equation.params, "axes": tuple(dict.fromkeys(form.place.moved(d) for d in axes))}
        self.append(dataclasses.replace(equation, inputs=(sums,), params=params))
        return True

    def _leading_back(self, atom: Atom, axes: Sequence[int]) -> Form | None:
        """By which ids, and where, the sums of a value over some axes lead back through a product."""
        for ids in self.every.values():
            for place in row_places.lookup_places(ids.lookups, atom.shape):
                form = Form(ids, place, atom)
                if place.within(axes) and self.has_product(form):
                    return form
        return None

    def _aggregate(self, equation: Equation) -> bool:
        """Sums of gradients by rows."""
        base, route, index, updates = equation.inputs
        ids = self.every.get((route, index))
        if ids is None or not _adds_rows(equation, ids):
            return False
        form, place = self.forms.get(updates), Place(0, len(ids.shape))
        lookups = Form(ids, place, updates)
        if form is not None and form.fits(lookups):
            sums = self.weighted(form, by_count=True)
        elif self.backward and form is None and self.has_product(lookups):
            sums = self.weighted(Form(ids, place, self.summed(lookups)), by_count=False)
        else:
            return False
        self.need(base)
        self.expand(lambda b, x: b + x[: ids.fetched], equation, (base, sums), equation.outputs[0])
        return True


def _adds_rows(push: Equation, ids: Ids) -> bool:
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
        and push.inputs[0].shape == (ids.fetched, *updates.shape[rank:])
    )
