"""Where the axes of ids are in a value, and what becomes of an equation when one axis of entries takes their place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.analysis.primitives import ELEMENTWISE
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
        """The sizes of these axes."""
        return tuple(shape[self.at : self.at + self.rank])

    def has(self, axis: int) -> bool:
        return self.at <= axis < self.at + self.rank

    @property
    def axes(self) -> range:
        """The axes themselves."""
        return range(self.at, self.at + self.rank)

    def within(self, axes: Sequence[int]) -> bool:
        """Whether all of these axes are among some."""
        return set(self.axes) <= set(axes)

    def by_entries(self, shape: Sequence[int], entries: int) -> tuple[int, ...]:
        """The shape with one axis in their place."""
        return (*shape[: self.at], entries, *shape[self.at + self.rank :])

    def moved(self, axis: int) -> int:
        """The number of an axis after that."""
        return axis if axis < self.at else max(self.at, axis - self.rank + 1)

    def index(self, entries: Any) -> tuple[Any, ...]:
        """An index of a value by entries: these entries, and everything along the other axes."""
        return (*[slice(None)] * self.at, entries)

    def beside(self, rank: int) -> tuple[int, ...]:
        """The shape of one number for each entry, beside a value by entries of so many axes."""
        return (*[1] * self.at, -1, *[1] * (rank - self.at - 1))


def _of_axes(axes: Sequence[int]) -> Place | None:
    """These axes; None if they aren't neighbours in order."""
    place = Place(axes[0], len(axes))
    return place if tuple(axes) == tuple(place.axes) else None


def lookup_places(count: int, shape: Sequence[int]) -> list[Place]:
    """Where a value of this shape may have the axes of so many ids."""
    pairs = ((at, end) for at in range(len(shape)) for end in range(at + 1, len(shape) + 1))
    return [Place(at, end - at) for at, end in pairs if _size(shape[at:end]) == count]


# --- equations of one operand ---

#: Those that are linear.
LINEAR = frozenset({"reshape", "transpose", "squeeze", "broadcast_in_dim", "reduce_sum", "slice", "cumsum"})


def moved(equation: Equation, place: Place, entries: int) -> tuple[Place, PlaceParams] | None:
    """Where an equation of one operand puts its ids, and its parameters by entries; None of any other equation."""
    rule = _RULES.get(equation.op)
    if rule is None or len(equation.inputs) != 1:
        return None
    place_and_params = rule(equation, place, entries)
    return None if place_and_params is None else (place_and_params[0], {**equation.params, **place_and_params[1]})


def before(equation: Equation, place: Place, entries: int) -> tuple[Place, PlaceParams] | None:
    """The same the other way round: where the operand has the ids that the result has at `place`."""
    for inner in lookup_places(_size(place.of(equation.outputs[0].shape)), equation.inputs[0].shape):
        after = moved(equation, inner, entries)
        if after is not None and after[0] == place:
            return inner, after[1]
    return None


def _broadcast(equation: Equation, place: Place, entries: int) -> tuple[Place, PlaceParams] | None:
    dims, shape = equation.params["broadcast_dimensions"], equation.params["shape"]
    new = _of_axes(place.of(dims))
    if new is None or new.of(shape) != place.of(equation.inputs[0].shape):
        return None
    kept = (d for k, d in enumerate(dims) if not (place.has(k) and k > place.at))
    return new, {
        "shape": new.by_entries(shape, entries),
        "broadcast_dimensions": tuple(new.moved(d) for d in kept),
    }


def _reshape(equation: Equation, place: Place, entries: int) -> tuple[Place, PlaceParams] | None:
    old, shape = equation.inputs[0].shape, equation.outputs[0].shape
    before, count = _size(old[: place.at]), _size(place.of(old))
    for new in lookup_places(count, shape):
        if _size(shape[: new.at]) == before:
            return new, {"new_sizes": new.by_entries(shape, entries)}
    return None


def _transpose(equation: Equation, place: Place, entries: int) -> tuple[Place, PlaceParams] | None:
    order = equation.params["permutation"]
    new = Place(order.index(place.at), place.rank)
    if new.of(order) != tuple(place.axes):
        return None
    return new, {"permutation": tuple(dict.fromkeys(map(place.moved, order)))}


def _without_some(name: str, equation: Equation, place: Place, entries: int) -> tuple[Place, PlaceParams] | None:
    """An equation without the axes that a parameter names."""
    gone = [d % len(equation.inputs[0].shape) for d in equation.params[name]]
    if any(map(place.has, gone)):
        return None
    new = Place(place.at - sum(d < place.at for d in gone), place.rank)
    return new, {name: tuple(map(place.moved, gone))}


def _cumulative(equation: Equation, place: Place, entries: int) -> tuple[Place, PlaceParams] | None:
    axis = equation.params["axis"]
    return None if place.has(axis) else (place, {"axis": place.moved(axis)})


def _slice(equation: Equation, place: Place, entries: int) -> tuple[Place, PlaceParams] | None:
    p, shape = equation.params, equation.inputs[0].shape
    starts, ends, steps = p["start_indices"], p["limit_indices"], p["strides"]
    if place.of(equation.outputs[0].shape) != place.of(shape):
        return None
    if steps is not None:
        steps = (*steps[: place.at], 1, *steps[place.at + place.rank :])
    starts = (*starts[: place.at], 0, *starts[place.at + place.rank :])
    return place, {"start_indices": starts, "limit_indices": place.by_entries(ends, entries), "strides": steps}


def _size(shape: Sequence[int]) -> int:
    return int(np.prod(shape, dtype=np.int64))


_RULES: Mapping[str, Callable[[Equation, Place, int], tuple[Place, PlaceParams] | None]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": functools.partial(_without_some, "dimensions"),
    "transpose": _transpose,
    "slice": _slice,
    **dict.fromkeys((*REDUCTION_PRIMITIVES, "argmax", "argmin"), functools.partial(_without_some, "axes")),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _cumulative),
}


def constant_axes(equation: Equation, known: Mapping[Atom, int]) -> int:
    """The axes along which the result of an equation is constant, as bits. `known`: of what it reads.

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
    """The axes along which a value is constant, those of size 1 among them."""
    return functools.reduce(
        lambda bits, d: bits | (atom.shape[d] == 1) << d, range(len(atom.shape)), known.get(atom, 0)
    )


def fits(shape: Sequence[int], result: Sequence[int]) -> bool:
    """Whether an operand of an elementwise equation is a scalar, or has the axes of the result (some may be 1)."""
    same = len(shape) == len(result)
    return not shape or (same and all(a in (1, b) for a, b in zip(shape, result, strict=True)))


# --- products ---


def in_product(equation: Equation, k: int, place: Place) -> Place | None:
    """Where ids of operand k are in a product that neither adds up over them nor pairs them with the other's."""
    contract, batch = equation.params["dimension_numbers"]
    if any(place.has(d) for d in (*contract[k], *batch[k])):
        return None
    before = len(batch[k]) + (len(_free(equation, 0)) if k == 1 else 0)
    return Place(before + _free(equation, k).index(place.at), place.rank)


def before_product(equation: Equation, place: Place) -> tuple[int, Place] | None:
    """The operand of a product that the ids come from, and where they are in it: the inverse of `in_product`."""
    _, batch = equation.params["dimension_numbers"]
    start = len(batch[0])
    for k in (0, 1):
        free = _free(equation, k)
        axes = free[place.at - start :][: place.rank] if place.at >= start else []
        places = _of_axes(axes) if len(axes) == place.rank else None
        if places is not None:
            return k, places
        start += len(free)
    return None


def contracted_with(equation: Equation, k: int, place: Place) -> Place | None:
    """Where the other operand of a product has the ids that it adds up over; None where it doesn't."""
    contract, _ = equation.params["dimension_numbers"]
    pairs = dict(zip(contract[k], contract[1 - k], strict=True))
    return _of_axes([pairs[d] for d in place.axes]) if place.within(contract[k]) else None


def product_params(equation: Equation, places: Mapping[int, Place]) -> PlaceParams:
    """A product's parameters where some operands are by entries."""
    contract, batch = equation.params["dimension_numbers"]
    renumber = lambda dims: tuple(  # noqa: E731
        tuple(dict.fromkeys(places[k].moved(d) for d in dims[k])) if k in places else tuple(dims[k]) for k in (0, 1)
    )
    return {**equation.params, "dimension_numbers": (renumber(contract), renumber(batch))}


def _free(equation: Equation, k: int) -> list[int]:
    contract, batch = equation.params["dimension_numbers"]
    return [d for d in range(len(equation.inputs[k].shape)) if d not in contract[k] and d not in batch[k]]
