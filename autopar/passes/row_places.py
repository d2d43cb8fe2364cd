"""Follows the axes of ids in values, and rewrites an equation for one axis of entries in their place."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.analysis.batch_rules import SUMMED, place_axes
from autopar.analysis.primitives import CUMULATIVE, ELEMENTWISE, PRIMITIVES, SHAPED, Linear
from autopar.ir.program import Atom, Equation
from autopar.ir.reductions import REDUCTION_PRIMITIVES

PlaceParams = Mapping[str, Any]

#: The same value in the same place, whatever the operands' places are.
PLACED_ELEMENTWISE = ELEMENTWISE - {"sharding_constraint", "random_bits_like"}


@dataclass(frozen=True, slots=True)
class Place:
    """`rank` neighbouring axes, from `at` on, which run over ids in their order."""

    at: int
    rank: int

    def of(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the sizes of these axes."""
        return tuple(shape[self.at : self.at + self.rank])

    def has(self, axis: int) -> bool:
        return self.at <= axis < self.at + self.rank

    @property
    def axes(self) -> range:
        """The axes themselves."""
        return range(self.at, self.at + self.rank)

    def within(self, axes: Sequence[int]) -> bool:
        """Returns whether all of these axes are among some."""
        return set(self.axes) <= set(axes)

    def by_entries(self, shape: Sequence[int], entries: int) -> tuple[int, ...]:
        """Returns the shape with one axis in their place."""
        return (*shape[: self.at], entries, *shape[self.at + self.rank :])

    def moved(self, axis: int) -> int:
        """Returns the number of an axis after that."""
        return axis if axis < self.at else max(self.at, axis - self.rank + 1)

    def index(self, entries: Any) -> tuple[Any, ...]:
        """Returns an index of a value by entries: these entries, and everything along the other axes."""
        return (*[slice(None)] * self.at, entries)

    def beside(self, rank: int) -> tuple[int, ...]:
        """Returns the shape of one number for each entry, beside a value by entries of so many axes."""
        return (*[1] * self.at, -1, *[1] * (rank - self.at - 1))


def _of_axes(axes: Sequence[int | None]) -> Place | None:
    if axes[0] is None or axes[0] == SUMMED:
        return None
    place = Place(axes[0], len(axes))
    return place if list(axes) == list(place.axes) else None


def lookup_places(count: int, shape: Sequence[int]) -> list[Place]:
    """Returns where a value of this shape may have the axes of so many ids."""
    pairs = ((at, end) for at in range(len(shape)) for end in range(at + 1, len(shape) + 1))
    return [Place(at, end - at) for at, end in pairs if _size(shape[at:end]) == count]


# --- equations of one operand ---

_FOLLOWED = SHAPED | CUMULATIVE | REDUCTION_PRIMITIVES.keys() | {"slice", "argmax", "argmin"}
#: Those that are linear.
LINEAR = frozenset(op for op in _FOLLOWED if PRIMITIVES[op].linear is Linear.FIRST)


def moved(equation: Equation, place: Place, entries: int) -> tuple[Place, PlaceParams] | None:
    """Returns where an equation of one operand puts its ids, and its parameters by entries; None of any other one."""
    if equation.op not in _FOLLOWED or len(equation.inputs) != 1:
        return None
    old, shape = equation.inputs[0].shape, equation.outputs[0].shape
    if equation.op == "reshape":
        before = _size(old[: place.at])
        places = lookup_places(_size(place.of(old)), shape)
        new = next((one for one in places if _size(shape[: one.at]) == before), None)
    else:
        new = _of_axes([place_axes(equation, 0, axis) for axis in place.axes])
        new = None if new is None or new.of(shape) != place.of(old) else new
    if new is None:
        return None
    by_entries = (_by_entries(equation, name, place, new, entries) for name in equation.params)
    return new, dict(zip(equation.params, by_entries, strict=True))


def _by_entries(equation: Equation, name: str, old: Place, new: Place, entries: int) -> Any:
    """Returns a parameter with one axis, of the entries, in place of the ids' axes."""
    value: Any = equation.params[name]
    primitive = PRIMITIVES[equation.op]
    if name == primitive.sizes:
        return new.by_entries(value, entries)
    if name in ("start_indices", "strides"):
        return None if value is None else new.by_entries(value, 0 if name == "start_indices" else 1)
    if name == "broadcast_dimensions":
        return tuple(dict.fromkeys(map(new.moved, value)))
    if name == "permutation" or name == primitive.along:
        rank = len(equation.inputs[0].shape)
        axes = value if isinstance(value, tuple) else (value,)
        axes = tuple(dict.fromkeys(old.moved(axis % rank) for axis in axes))
        return axes if isinstance(value, tuple) else axes[0]
    return value


def before(equation: Equation, place: Place, entries: int) -> tuple[Place, PlaceParams] | None:
    """Returns where the operand has the ids that the result has at `place`, and the parameters: undoes `moved`."""
    for inner in lookup_places(_size(place.of(equation.outputs[0].shape)), equation.inputs[0].shape):
        after = moved(equation, inner, entries)
        if after is not None and after[0] == place:
            return inner, after[1]
    return None


def _size(shape: Sequence[int]) -> int:
    return int(np.prod(shape, dtype=np.int64))


def constant_axes(equation: Equation, known: Mapping[Atom, int]) -> int:
    """Returns the axes along which the result of an equation is constant, as bits. `known`: of what it reads.

    Unlike `analysis.batch`, which says what fits a guess, this holds: random bits and closed-over arrays are
    constant along no axis.
    """
    if len(equation.outputs) != 1:
        return 0
    out, op = equation.outputs[0], equation.op
    every = (1 << len(out.shape)) - 1
    if op == "ap.full":
        return every
    if op == "iota":
        return every & ~(1 << equation.params["dimension"])
    if op == "broadcast_in_dim":
        operand, dims = equation.inputs[0], equation.params["broadcast_dimensions"]
        sizes = enumerate(zip(dims, operand.shape, strict=True))
        varying = (to for k, (to, size) in sizes if size > 1 and not known.get(operand, 0) >> k & 1)
        return functools.reduce(lambda bits, to: bits & ~(1 << to), varying, every)
    if op in PLACED_ELEMENTWISE and all(fits(a.shape, out.shape) for a in equation.inputs):
        bits = (place_along(a, known) for a in equation.inputs if a.shape)
        return functools.reduce(lambda a, b: a & b, bits, every) if out.shape else 0
    return 0


def place_along(atom: Atom, known: Mapping[Atom, int]) -> int:
    """Returns the axes along which a value is constant, those of size 1 among them."""
    return functools.reduce(
        lambda bits, d: bits | (atom.shape[d] == 1) << d, range(len(atom.shape)), known.get(atom, 0)
    )


def fits(shape: Sequence[int], result: Sequence[int]) -> bool:
    """Returns whether an operand of an elementwise equation is a scalar, or has the axes of the result (some may be
    1)."""
    same = len(shape) == len(result)
    return not shape or (same and all(a in (1, b) for a, b in zip(shape, result, strict=True)))


# --- products ---


def in_product(equation: Equation, k: int, place: Place) -> Place | None:
    """Returns where ids of operand k are in a product; None if it adds up over them, or pairs them with the other's."""
    contract, batch = equation.params["dimension_numbers"]
    if any(place.has(d) for d in (*contract[k], *batch[k])):
        return None
    return _of_axes([place_axes(equation, k, axis) for axis in place.axes])


def before_product(equation: Equation, place: Place) -> tuple[int, Place] | None:
    """Returns the operand of a product that the ids come from, and where they are in it: undoes `in_product`."""
    for k in (0, 1):
        for at in range(len(equation.inputs[k].shape) - place.rank + 1):
            inner = Place(at, place.rank)
            if in_product(equation, k, inner) == place:
                return k, inner
    return None


def contracted_with(equation: Equation, k: int, place: Place) -> Place | None:
    """Returns where the other operand of a product has the ids that it adds up over; None where it doesn't."""
    contract, _ = equation.params["dimension_numbers"]
    pairs = dict(zip(contract[k], contract[1 - k], strict=True))
    return _of_axes([pairs.get(axis) for axis in place.axes])


def product_params(equation: Equation, places: Mapping[int, Place]) -> PlaceParams:
    """Returns a product's parameters where some operands are by entries."""
    renumbered = tuple(
        tuple(tuple(dict.fromkeys(map(places[k].moved, dims[k]))) if k in places else tuple(dims[k]) for k in (0, 1))
        for dims in equation.params["dimension_numbers"]
    )
    return {**equation.params, "dimension_numbers": renumbered}
