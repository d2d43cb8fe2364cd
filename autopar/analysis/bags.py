"""Finds bags: looked-up rows of which a step reads weighted sums alone, and whose gradients come from those.

    e = table[ids]
    e.sum(1)   (e * mask[..., None]).sum(1)   jnp.where(mask[..., None], e, 0).mean(1)   jnp.einsum("bld,bl->bd", e, w)
    jax.ops.segment_sum(e, segments, bags)

Weights must not depend on columns. A weight whose own gradient the step wants reads the rows themselves, so that these
are no bags. A lookup that isn't added up by bags is taken as one of bags of a single row each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np

from autopar.analysis.primitives import constant_along, constant_axes
from autopar.analysis.values import Numbering, atom_key
from autopar.ir.program import Atom, Block, Equation
from autopar.ir.slicing import needed_equations
from autopar.ir.writer import ZeroWriter
from autopar.jax_types import Array, Index

#: Dtypes that are added up at owners; XLA adds smaller floats in others.
_ADDED = (np.dtype(np.float32), np.dtype(np.float64))


@dataclass(frozen=True, slots=True)
class Factor:
    """Multiplies, divides or selects rows by an atom that is constant along the columns."""

    op: str  #: "mul", "div"; "keep", "drop": the row stays where `atom` holds, or where it doesn't.
    atom: Atom
    fill: Atom | None = None  #: In place of rows that don't stay.
    order: tuple[int, ...] | None = None  #: The atom has the ids' axes alone: which of its axes each of them is.

    @property
    def key(self) -> Hashable:
        return self.op, atom_key(self.atom), self.order

    def by_ids(self, value: Array, rank: int) -> Array:
        """Returns the factor of each id; without axes if it is the same for all."""
        if self.order is not None:
            return value.transpose(self.order)
        return value[(..., *[0] * (value.ndim - rank))] if value.ndim else value


@dataclass(frozen=True, slots=True)
class Bags:
    """Rows that are added up by bags, or to which bags' cotangents go."""

    index: Atom  #: The lookup's or push's index vectors, [*ids, 1].
    #: The slices and reshapes that make the ids of the bags of those of the lookup, with their sizes.
    moves: tuple[tuple[Index, ...], ...]
    ids: tuple[int, ...]  #: The axes that the ids of the bags have; a value of them has these, and then a row's.
    #: What happens to each row, in this order.
    selects: tuple[Factor, ...]
    weights: tuple[Factor, ...]
    axes: frozenset[int]  #: Those of `ids` that are added up; of cotangents, along which these are constant.
    value: Atom  #: The sums, [*bags, *row], or the cotangents.
    #: Cotangents without `axes`: which of their axes each of the bags' and the row's is. None: they have the axes of
    #: all ids.
    order: tuple[int, ...] | None = None
    #: Index vectors, [*ids, 1], of the bag of each id; others than those of `segment_count` bags are of none. Then
    #: `axes` are all. None: an id's bag is its place in the other axes.
    segments: Atom | None = None
    segment_count: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        if self.segments is not None:
            return (self.segment_count,)
        return tuple(size for d, size in enumerate(self.ids) if d not in self.axes)

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def length(self) -> int:
        """Returns the most ids that a bag has."""
        return math.prod(self.ids[d] for d in self.axes)

    @property
    def placed(self) -> int:
        """Returns the number of ids in all bags."""
        return math.prod(self.ids)

    @property
    def places(self) -> Hashable:
        """Equal where `by_bags` and `moved` do the same."""
        return self.index, self.moves, self.ids, self.axes, self.segments is None

    @property
    def key(self) -> Hashable:
        """Equal for the same ids and weights."""
        weights = tuple(factor.key for factor in self.weights)
        return self.index, self.moves, self.ids, self.segments, self.segment_count, weights

    def by_bags(self, value: Array) -> Array:
        """Returns a value of the ids as [bags, ids of each], with segments as [ids]; one number is that of all."""
        if self.segments is not None:
            return jnp.broadcast_to(value, self.ids).reshape(-1)
        bags = [d for d in range(len(self.ids)) if d not in self.axes]
        value = jnp.broadcast_to(value, self.ids).transpose((*bags, *sorted(self.axes)))
        return value.reshape(self.count, self.length)

    def moved(self, value: Array) -> Array:
        """Returns a value of the lookup's ids as one of the bags'."""
        for op, *args in self.moves:
            value = value.reshape(args[0]) if op == "reshape" else value[tuple(slice(*ends) for ends in args[0])]
        return value


def most_uses(bags: Sequence[Bags]) -> int:
    """Returns in how many bags a looked-up id is at most."""
    counts: dict[Atom, np.ndarray] = {}
    for one in bags:
        shape = one.index.shape[:-1]
        places = one.moved(np.arange(math.prod(shape)).reshape(shape)).ravel()
        counts[one.index] = counts.get(one.index, 0) + np.bincount(places, minlength=math.prod(shape))
    return int(max(found.max() for found in counts.values()))


@dataclass(frozen=True, slots=True)
class BagPair:
    """Bags of a lookup, and those whose cotangents are its gradient; None: it has none."""

    sums: Bags
    cotangents: Bags | None


def find_bags(
    finder: BagFinder, lookups: Sequence[tuple[Atom, Atom]], pushes: Sequence[tuple[Atom, Atom]]
) -> list[BagPair] | None:
    """Returns the bags by which rows are looked up; None if their gradients don't correspond to lookups.

    `finder`: knows the block. `lookups`: (index, result) of lookups of whole rows; a result has the axes of the ids
    ahead of those of a row. `pushes`: (index, updates) of additions to whole rows.
    """
    for index, value in (*lookups, *pushes):
        columns = math.prod(value.shape[len(index.shape) - 1 :])
        if value.dtype not in _ADDED or columns < 2:  # a sum of one column is as long as what tells of its rows
            return None
    pairs: list[BagPair] = []
    for index in dict.fromkeys(index for index, _ in lookups):
        results, updates = ([v for i, v in of if i is index] for of in (lookups, pushes))
        rows, gradients = (
            [Bags(index, (), tuple(index.shape[:-1]), (), (), frozenset(), v) for v in of] for of in (results, updates)
        )
        matched = _matched(finder.sums(rows), finder.cotangents(gradients), has_gradients=bool(pushes))
        if matched is None:
            matched = _matched(rows, gradients, has_gradients=bool(pushes))
        if matched is None:
            return None
        pairs += matched
    beside = [factor.atom for pair in pairs for factor in (*pair.sums.selects, *pair.sums.weights)]
    beside += [pair.sums.segments for pair in pairs if pair.sums.segments is not None]
    behind = {v for e in needed_equations(finder.block.equations, beside) for v in e.outputs} if beside else set()
    known = {index for index, _ in pushes} <= {index for index, _ in lookups}
    return pairs if pairs and known and behind.isdisjoint(value for _, value in lookups) else None


def is_plain_access(equation: Equation) -> bool:
    """Returns whether an equation looks up, or adds to, whole rows by their numbers, the rows first."""
    if equation.op not in ("gather", "scatter-add"):
        return False
    rank, ids = len(equation.inputs[0].shape), len(equation.inputs[1].shape) - 1
    dims = tuple(range(ids, ids + rank - 1))
    if equation.op == "scatter-add":
        return equation.params["dimension_numbers"] == jax.lax.ScatterDimensionNumbers(dims, (0,), (0,))
    whole = equation.params["slice_sizes"] == (1, *equation.inputs[0].shape[1:])
    return whole and equation.params["dimension_numbers"] == jax.lax.GatherDimensionNumbers(dims, (0,), (0,))


def _matched(
    sums: Sequence[Bags] | None, cotangents: Sequence[Bags] | None, *, has_gradients: bool
) -> list[BagPair] | None:
    """Pairs sums with cotangents of the same ids and weights, one by one; None if some have no partner."""
    if sums is None or cotangents is None or any(0 in bags.ids for bags in (*sums, *cotangents)):
        return None
    if not has_gradients:
        return [BagPair(bags, None) for bags in sums]
    rest, pairs = [*cotangents], list[BagPair]()
    for bags in sums:
        left_out = {factor.key for factor in bags.selects}  # their rows get no gradient, either
        others = (o for o in rest if o.key == bags.key and bags.axes <= o.axes)
        other = next((o for o in others if left_out <= {factor.key for factor in o.selects}), None)
        if other is None or (other.order is not None and other.axes != bags.axes):
            return None
        rest.remove(other)
        pairs.append(BagPair(bags, replace(other, axes=bags.axes)))
    return None if rest else pairs


@dataclass(eq=False)
class BagFinder:
    """Follows rows forward to sums, and their gradients back to cotangents."""

    block: Block
    constant: dict[Atom, int] = field(default_factory=dict)  #: Value -> axes along which it is constant, as bits.
    made: ZeroWriter = field(default_factory=ZeroWriter)  #: Knows what makes each value, and which are zero.
    first: dict[Atom, Atom] = field(default_factory=dict)  #: Value -> an equal one that is computed earlier.
    uses: dict[Atom, list[tuple[Equation | None, int]]] = field(default_factory=dict)  #: By an operand's number.

    def __post_init__(self) -> None:
        numbering = Numbering()
        self.made.extend(self.block.equations)
        for equation in self.block.equations:
            named = replace(equation, inputs=tuple(self.first.get(a, a) for a in equation.inputs))
            self.first.update(zip(equation.outputs, numbering.find(named) or (), strict=False))
            bits = constant_axes(equation, self.constant)
            if bits:
                self.constant[equation.outputs[0]] = bits
            for k, atom in enumerate(equation.inputs):
                self.uses.setdefault(atom, []).append((equation, k))
        for atom in self.block.outputs:
            self.uses.setdefault(atom, []).append((None, 0))

    def sums(self, rows: Sequence[Bags]) -> list[Bags] | None:
        """Returns all sums that looked-up rows are read for; None if they are read for anything else."""
        return _walked(rows, self._uses)

    def cotangents(self, updates: Sequence[Bags]) -> list[Bags] | None:
        """Returns the cotangents that updates are made of; None if they are made of anything else."""
        return _walked(updates, self._made)

    # --- forward ---

    def _uses(self, bags: Bags) -> tuple[list[Bags], list[Bags]] | None:
        ends, further = list[Bags](), list[Bags]()
        for equation, k in self.uses.get(bags.value, ()):
            if equation is None:
                return None
            added = self._added(equation, k, bags)
            after = None if added is not None else self._after(equation, k, bags)
            if added is not None:
                ends.append(added)
            elif after is not None:
                further.append(after)
            else:
                return None
        return ends, further

    def _added(self, equation: Equation, k: int, bags: Bags) -> Bags | None:
        """Returns the bags that an equation adds up."""
        op, rank = equation.op, len(bags.ids)
        (out, *_) = equation.outputs
        if op == "reduce_sum":
            axes = frozenset(equation.params["axes"])
            return replace(bags, axes=axes, value=out) if axes and max(axes) < rank else None
        if op == "scatter-add":
            (base, segments, _), is_rows = equation.inputs, is_plain_access(equation)
            added = k == 2 and is_rows and len(segments.shape) == rank + 1 and self.made.is_zero(base)
            return self._jagged(bags, equation, segments, out) if added else None
        if op != "dot_general" or out.dtype != bags.value.dtype:
            return None
        (own, of_weight), (batch, batch_of_weight) = (
            (dims[k], dims[1 - k]) for dims in equation.params["dimension_numbers"]
        )
        weight = equation.inputs[1 - k]
        axes_of = dict(zip((*batch, *own), (*batch_of_weight, *of_weight), strict=True))
        is_all = sorted(axes_of) == [*range(rank)] and len(weight.shape) == rank
        if not own or not is_all or list(batch) != sorted(batch) or weight.dtype != bags.value.dtype:
            return None
        factor = self._named("mul", weight, order=tuple(axes_of[d] for d in range(rank)))
        return replace(bags, weights=(*bags.weights, factor), axes=frozenset(own), value=out)

    def _jagged(self, bags: Bags, equation: Equation, segments: Atom, value: Atom) -> Bags | None:
        """Returns the bags that segments make, if ids out of range are in none."""
        if equation.params["mode"] == jax.lax.GatherScatterMode.CLIP:
            return None
        own, axes = self.first.get(segments, segments), frozenset(range(len(bags.ids)))
        return replace(bags, axes=axes, value=value, segments=own, segment_count=value.shape[0])

    def _after(self, equation: Equation, k: int, bags: Bags) -> Bags | None:
        """Returns what an equation makes of rows, each by itself."""
        op, rank, (out, *_) = equation.op, len(bags.ids), equation.outputs
        row, moves = bags.value.shape[rank:], not (bags.selects or bags.weights)
        if op == "copy":
            return replace(bags, value=out)
        if op == "slice" and moves:
            p = equation.params
            starts, ends = tuple(p["start_indices"]), tuple(p["limit_indices"])
            if p["strides"] is None and starts[rank:] == (0,) * len(row) and ends[rank:] == row:
                return self._moved(bags, ("slice", tuple(zip(starts, ends, strict=True))[:rank]), out, rank)
        if op == "reshape":
            return self._reshaped(equation, bags, out)
        factor = self._factor(equation, k, bags)
        return None if factor is None else _with(bags, factor, out)

    def _reshaped(self, equation: Equation, bags: Bags, value: Atom) -> Bags | None:
        row, ids = bags.value.shape[len(bags.ids) :], len(value.shape) - len(bags.value.shape) + len(bags.ids)
        plain = equation.params.get("dimensions") is None and not (bags.selects or bags.weights)
        if not plain or ids < 0 or value.shape[ids:] != row:
            return None
        return self._moved(bags, ("reshape", value.shape[:ids]), value, ids)

    def _moved(self, bags: Bags, move: tuple[Index, ...], value: Atom, rank: int) -> Bags:
        return replace(bags, moves=(*bags.moves, move), ids=tuple(value.shape[:rank]), value=value)

    def _factor(self, equation: Equation, k: int, bags: Bags) -> Factor | None:
        """Returns by what an equation multiplies, divides or selects operand k, if by the same in all columns."""
        op, inputs, rank = equation.op, equation.inputs, len(bags.ids)
        if op == "mul" and self._is_by_ids(inputs[1 - k], rank):
            return self._named("mul", inputs[1 - k])
        if op == "div" and k == 0 and self._is_by_ids(inputs[1], rank):
            return self._named("div", inputs[1])
        if op == "select_n" and k in (1, 2) and len(inputs) == 3:
            which, other = inputs[0], inputs[3 - k]
            if which.dtype == np.dtype(bool) and self._is_by_ids(which, rank) and self._is_by_ids(other, rank):
                return self._named("keep" if k == 2 else "drop", which, other)
        return None

    def _named(self, op: str, atom: Atom, fill: Atom | None = None, order: tuple[int, ...] | None = None) -> Factor:
        return Factor(op, self.first.get(atom, atom), fill, order)

    def _is_by_ids(self, atom: Atom, rank: int) -> bool:
        """Returns whether a value is the same in all columns."""
        bits = constant_along(atom, self.constant)
        return all(bits >> d & 1 for d in range(rank, len(atom.shape)))

    # --- backward ---

    def _made(self, bags: Bags) -> tuple[list[Bags], list[Bags]] | None:
        """Returns the cotangents that a value is, or the values that it is made of."""
        bits, equation = self.constant.get(bags.value, 0), self.made.producers.get(bags.value)
        axes = frozenset(d for d in range(len(bags.ids)) if bits >> d & 1)
        before = None if equation is None else self._before(equation, bags)
        # What is alike in a whole bag may be a product with weights that are.
        if equation is not None and before is not None and (not axes or equation.op in ("mul", "div", "select_n")):
            return [], before
        if axes:
            return [replace(bags, axes=axes)], []
        end = None if equation is None else self._of_segments(equation, bags) or self._outer(equation, bags)
        return None if end is None else ([end], [])

    def _of_segments(self, equation: Equation, bags: Bags) -> Bags | None:
        """Returns the cotangents that are looked up by segments."""
        if not is_plain_access(equation) or equation.op != "gather" or equation.params["fill_value"] not in (0, None):
            return None
        value, segments = equation.inputs
        is_filled = equation.params["mode"] == jax.lax.GatherScatterMode.FILL_OR_DROP
        if len(segments.shape) != len(bags.ids) + 1 or (is_filled and equation.params["fill_value"] is None):
            return None
        return self._jagged(bags, equation, segments, value)

    def _before(self, equation: Equation, bags: Bags) -> list[Bags] | None:
        op, inputs, rank = equation.op, equation.inputs, len(bags.ids)
        row, moves = bags.value.shape[rank:], not (bags.selects or bags.weights)
        if op == "copy" or (op in ("add", "add_any") and all(a.shape == bags.value.shape for a in inputs)):
            return [replace(bags, value=a) for a in inputs]
        if op == "reshape":
            moved = self._reshaped(equation, bags, inputs[0])
            return None if moved is None else [moved]
        if op == "concatenate" and moves and equation.params["dimension"] < rank:
            return self._parts(bags, inputs, equation.params["dimension"])
        if op == "pad" and moves and self.made.is_zero(inputs[1]):
            padding = equation.params["padding_config"]
            ends = [(low, low + n) for (low, _, _), n in zip(padding, inputs[0].shape, strict=True)]
            kept = all(low >= 0 and high >= 0 and not inner for low, high, inner in padding)
            if kept and inputs[0].shape[rank:] == row:
                return [self._moved(bags, ("slice", tuple(ends[:rank])), inputs[0], rank)]
        for k in range(len(inputs)):
            factor = self._factor(equation, k, bags) if inputs[k].shape == bags.value.shape else None
            if factor is not None and (factor.fill is None or self.made.is_zero(factor.fill)):
                made = _with(bags, factor, inputs[k])
                return None if made is None else [made]
        return None

    def _parts(self, bags: Bags, parts: Sequence[Atom], axis: int) -> list[Bags]:
        made, start = list[Bags](), 0
        for part in parts:
            ends = [(0, n) for n in bags.ids]
            ends[axis] = start, start + part.shape[axis]
            made.append(self._moved(bags, ("slice", tuple(ends)), part, len(bags.ids)))
            start += part.shape[axis]
        return made

    def _outer(self, equation: Equation, bags: Bags) -> Bags | None:
        """Returns the cotangents in an outer product with weights, maybe transposed."""
        order: Sequence[int] = range(len(bags.value.shape))  # of each of the value's axes that of the product
        if equation.op == "transpose" and equation.inputs[0] in self.made.producers:
            order, equation = equation.params["permutation"], self.made.producers[equation.inputs[0]]
        if equation.op != "dot_general" or equation.outputs[0].dtype != bags.value.dtype:
            return None
        contract, batch = equation.params["dimension_numbers"]
        if contract[0]:
            return None
        free = [[d for d in range(len(a.shape)) if d not in batch[k]] for k, a in enumerate(equation.inputs)]
        axes_of: tuple[dict[int, int], dict[int, int]] = ({}, {})  # axis of the product -> axis of an operand
        for n, dims in enumerate(zip(*batch, strict=True)):
            axes_of[0][n], axes_of[1][n] = dims
        start = len(batch[0])
        for k in (0, 1):
            axes_of[k].update((start + n, d) for n, d in enumerate(free[k]))
            start += len(free[k])
        rank = len(bags.ids)
        for k in (0, 1):  # the weights
            own, others = ([mine.get(axis) for axis in order] for mine in (axes_of[k], axes_of[1 - k]))
            weight, value = equation.inputs[k], equation.inputs[1 - k]
            is_weight = None not in own[:rank] and own[rank:] == [None] * (len(order) - rank)
            if is_weight and None not in others[rank:] and weight.dtype == value.dtype == bags.value.dtype:
                factor = self._named("mul", weight, order=tuple(d for d in own if d is not None))
                axes = frozenset(d for d in range(rank) if others[d] is None)
                order_ = tuple(d for d in others if d is not None)
                return replace(bags, weights=(*bags.weights, factor), axes=axes, value=value, order=order_)
        return None


def _walked(starts: Sequence[Bags], step: Callable[[Bags], tuple[list[Bags], list[Bags]] | None]) -> list[Bags] | None:
    """Returns the ends of all walks; a step returns ends, and what is to be followed further, or None."""
    waiting, ends = [*starts], list[Bags]()
    while waiting:
        found = step(waiting.pop())
        if found is None:
            return None
        ends += found[0]
        waiting += found[1]
    return ends


def _with(bags: Bags, factor: Factor, value: Atom) -> Bags | None:
    """Adds a factor; None for a select behind weights, where 0 times infinity may be NaN."""
    if factor.op in ("mul", "div"):
        return replace(bags, weights=(*bags.weights, factor), value=value)
    return None if bags.weights else replace(bags, selects=(*bags.selects, factor), value=value)
