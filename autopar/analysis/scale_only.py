"""Finds by how much an untouched update scales a row's leaves, if it does nothing else (`ir.deferred`).

An abstract interpretation of the untouched update. Its values: zero; a leaf times a number, held as `unit + rest` so
that 1 - 1e-9 keeps its digits; a number of the step, the same for all rows; a positive or not negative value; None for
any other. The rules compute with the step's numbers, so the same walk on arrays returns the step's factors. Their
assumptions about these numbers (`0 * x` needs a finite x) are collected and checked in each step.

It is no `Interpreter`: the untouched update has no loops, its values are numbers of the step when it runs on arrays,
and a branch's assumptions must hold only where that branch is taken.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from types import ModuleType
from typing import Any

import jax
import numpy as np

from autopar import jax_compat
from autopar.analysis.primitives import IDENTITIES, SHAPED, those_that
from autopar.ir.deferred import FLOORS, Fading, ScaleOnly
from autopar.ir.program import Atom, Block, Equation, Literal
from autopar.ir.slicing import eliminate_dead
from autopar.jax_types import Dtype, Index, Leaf


@dataclass(frozen=True, slots=True, eq=False)
class RowUpdate:
    """An untouched update of one row, from leaves and the step's numbers to the new leaves."""

    body: Block
    changed: int  #: Number of leaves that it changes, its first inputs.
    read: int  #: Number of leaves that it only reads, the next inputs; the rest are the step's numbers.

    @property
    def dtypes(self) -> list[Dtype]:
        return [v.dtype for v in self.body.inputs[: self.changed]]

    def zeros(self) -> list[np.ndarray]:
        """Returns zeros in place of the step's numbers."""
        return [np.zeros(v.shape, v.dtype) for v in self.body.inputs[self.changed + self.read :]]


# --- values, and rules for zeros, scaled leaves, and numbers ---


@dataclass(frozen=True, slots=True)
class Zero:
    """Zero everywhere."""


@dataclass(frozen=True, slots=True)
class ScaledLeaf:
    """A leaf times (unit + rest), the same for all elements."""

    leaf: int
    unit: int
    rest: Any


@dataclass(frozen=True, slots=True)
class Number:
    """A number that is the same in all rows."""

    value: Leaf
    literal: bool = False


@dataclass(frozen=True, slots=True)
class Sign:
    """A value that is positive or not negative, and never NaN, where the row's elements are finite."""

    positive: bool
    bounded: bool = False  #: It can't be infinite; the square of a large element can.


ScaleValue = Zero | ScaledLeaf | Number | Sign | None


@dataclass(eq=False)
class Assumptions:
    """Collects assumptions of rules. `xp`: NumPy or jax.numpy."""

    xp: ModuleType
    assumed: list[Any] = field(default_factory=list)  #: Conditions on the step's numbers.
    not_negative: set[int] = field(default_factory=set)  #: Leaves in which no element may be negative.

    def assume(self, condition: Any) -> None:
        self.assumed.append(self.xp.all(condition))

    def holds(self) -> Leaf:
        """Returns whether all assumptions hold, bool[]."""
        xp = self.xp
        return xp.all(xp.stack([xp.asarray(a) for a in self.assumed])) if self.assumed else xp.asarray(True)

    def finite(self, number: Number) -> None:
        if not number.literal:
            self.assume(self.xp.isfinite(number.value))


ScaleRule = Callable[[Assumptions, Equation, Sequence[ScaleValue]], ScaleValue]


def is_scalar(number: Number) -> bool:
    return np.size(number.value) == 1


def scalar_of(walk: Assumptions, number: Number) -> Leaf:
    return walk.xp.asarray(number.value).reshape(())


def _add(walk: Assumptions, equation: Equation, values: Sequence[ScaleValue]) -> ScaleValue:
    a, b = values
    if equation.op == "sub":
        b = _neg(walk, equation, [b])
    if isinstance(a, Number):
        a, b = b, a
    if isinstance(b, Number):
        return Number(a.value + b.value, a.literal and b.literal) if isinstance(a, Number) else _plus_number(walk, a, b)
    if isinstance(a, Zero):
        return b
    if isinstance(b, Zero):
        return a
    if isinstance(a, ScaledLeaf) and isinstance(b, ScaledLeaf) and a.leaf == b.leaf:
        return ScaledLeaf(a.leaf, a.unit + b.unit, a.rest + b.rest)
    if isinstance(a, Sign) and isinstance(b, Sign):
        return Sign(a.positive or b.positive)
    return None


def _plus_number(walk: Assumptions, value: ScaleValue, number: Number) -> ScaleValue:
    if _is_positive(number):
        if isinstance(value, ScaledLeaf):
            value = _root(walk, value)
        return Sign(positive=True) if isinstance(value, (Zero, Sign)) else None
    if isinstance(value, (Zero, ScaledLeaf)):
        walk.assume(number.value == 0)
        return value
    if isinstance(value, Sign) and not number.literal:  # a divisor's epsilon, most likely
        walk.assume(number.value >= _tiny(number))
        return Sign(positive=True)
    if isinstance(value, Sign):
        walk.assume(number.value >= 0)
        return Sign(value.positive)
    return None


def _tiny(number: Number) -> Leaf:
    dtype = number.value.dtype
    return jax.numpy.finfo(dtype).tiny if jax_compat.is_float(dtype) else 1


def _is_positive(number: Number) -> bool:
    return number.literal and bool(np.all(number.value >= _tiny(number)))


def _neg(walk: Assumptions, equation: Equation, values: Sequence[ScaleValue]) -> ScaleValue:
    (a,) = values
    if isinstance(a, ScaledLeaf):
        return ScaledLeaf(a.leaf, -a.unit, -a.rest)
    if isinstance(a, Number):
        return Number(-a.value, a.literal)
    return a if isinstance(a, Zero) else None


def _mul(walk: Assumptions, equation: Equation, values: Sequence[ScaleValue]) -> ScaleValue:
    a, b = values
    if isinstance(a, Number) and isinstance(b, Number):
        return Number(a.value * b.value, a.literal and b.literal)
    if isinstance(a, Number):
        a, b = b, a
    if isinstance(a, Zero) and isinstance(b, Zero):
        return a
    if isinstance(b, Number):
        if isinstance(a, Zero):
            walk.finite(b)
            return a
        if isinstance(a, ScaledLeaf) and is_scalar(b):
            return ScaledLeaf(a.leaf, 0, (a.unit + a.rest) * scalar_of(walk, b))
        if isinstance(a, Sign):
            walk.assume(b.value > 0)
            walk.finite(b)
            return Sign(positive=False)  # a product of small numbers may be zero
    for zero, other in ((a, b), (b, a)):
        if isinstance(zero, Zero) and isinstance(other, Sign) and other.bounded:
            return zero
    return None


def _div(walk: Assumptions, equation: Equation, values: Sequence[ScaleValue]) -> ScaleValue:
    a, b = values
    if isinstance(b, Number):
        if not (b.literal and np.all(b.value != 0)):
            walk.assume(b.value != 0)
        if isinstance(a, Number):
            return Number(a.value / b.value, a.literal and b.literal)
        if isinstance(a, Zero):
            walk.assume(~walk.xp.isnan(b.value))
            return a
        if isinstance(a, ScaledLeaf) and is_scalar(b):
            return ScaledLeaf(a.leaf, 0, (a.unit + a.rest) / scalar_of(walk, b))
        if isinstance(a, Sign):
            walk.assume(b.value > 0)
            walk.finite(b)
            return Sign(positive=False)
    if isinstance(a, Zero) and isinstance(b, Sign) and b.positive:
        return a
    return None


def _square(walk: Assumptions, equation: Equation, values: Sequence[ScaleValue]) -> ScaleValue:
    (a,) = values
    if isinstance(a, Number):
        return Number(a.value * a.value, a.literal)
    return a if isinstance(a, Zero) else Sign(positive=False) if isinstance(a, (ScaledLeaf, Sign)) else None


def _integer_pow(walk: Assumptions, equation: Equation, values: Sequence[ScaleValue]) -> ScaleValue:
    (a,), y = values, equation.params["y"]
    if y == 1:
        return a
    if isinstance(a, Number):
        return Number(a.value ** float(y), a.literal)
    if y == 2:
        return _square(walk, equation, values)
    return a if isinstance(a, Zero) and y > 0 else None


def _sqrt(walk: Assumptions, equation: Equation, values: Sequence[ScaleValue]) -> ScaleValue:
    (a,) = values
    if isinstance(a, Number):
        return Number(walk.xp.sqrt(a.value), a.literal)
    if isinstance(a, ScaledLeaf):
        return _root(walk, a)
    return Sign(a.positive) if isinstance(a, Sign) else a if isinstance(a, Zero) else None


def _root(walk: Assumptions, scaled: ScaledLeaf) -> Sign:
    walk.not_negative.add(scaled.leaf)
    walk.assume(scaled.unit + scaled.rest >= 0)
    return Sign(positive=False)


def _rsqrt(walk: Assumptions, equation: Equation, values: Sequence[ScaleValue]) -> ScaleValue:
    (a,) = values
    if isinstance(a, Number):
        return Number(1 / walk.xp.sqrt(a.value), a.literal)
    return Sign(positive=False, bounded=True) if isinstance(a, Sign) and a.positive else None


def _abs(walk: Assumptions, equation: Equation, values: Sequence[ScaleValue]) -> ScaleValue:
    (a,) = values
    if isinstance(a, Number):
        return Number(walk.xp.abs(a.value), a.literal)
    return a if isinstance(a, (Zero, Sign)) else Sign(positive=False) if isinstance(a, ScaledLeaf) else None


def _max(walk: Assumptions, equation: Equation, values: Sequence[ScaleValue]) -> ScaleValue:
    a, b = values
    if isinstance(a, Zero) and isinstance(b, Zero):
        return a
    if a is None or b is None:
        return None  # it may be NaN
    for number in values:
        if isinstance(number, Number) and not number.literal:
            walk.assume(~walk.xp.isnan(number.value))
    if any(v.positive if isinstance(v, Sign) else isinstance(v, Number) and _is_positive(v) for v in values):
        return Sign(positive=True)
    return Sign(positive=False) if any(isinstance(v, (Sign, Zero)) for v in values) else None


def _moved(walk: Assumptions, equation: Equation, values: Sequence[ScaleValue]) -> ScaleValue:
    a = values[0]
    if isinstance(a, Number):
        return _full(walk, equation, values) if is_scalar(a) else None
    return a if not isinstance(a, ScaledLeaf) or keeps_order(equation) else None


def keeps_order(equation: Equation) -> bool:
    """Returns whether an equation that moves axes keeps the elements' order."""
    old, new = (tuple(d for d in x.shape if d != 1) for x in (equation.inputs[0], equation.outputs[0]))
    dims = equation.params.get("broadcast_dimensions", ())
    return old == new and equation.op != "transpose" and list(dims) == sorted(dims)


def _convert(walk: Assumptions, equation: Equation, values: Sequence[ScaleValue]) -> ScaleValue:
    (a,), old, new = values, equation.inputs[0].dtype, equation.outputs[0].dtype
    if isinstance(a, Number) and not jax_compat.is_key(new):
        return Number(walk.xp.asarray(a.value).astype(new), a.literal)
    if isinstance(a, Zero):
        return a
    widens = jax_compat.is_float(old) and jax_compat.is_float(new) and np.dtype(new).itemsize >= np.dtype(old).itemsize
    return a if widens else None


def _sum(walk: Assumptions, equation: Equation, values: Sequence[ScaleValue]) -> ScaleValue:
    a = values[0]
    return a if isinstance(a, Zero) else Sign(positive=False) if isinstance(a, Sign) else None


def _select(walk: Assumptions, equation: Equation, values: Sequence[ScaleValue]) -> ScaleValue:
    which, *cases = values
    if all(isinstance(c, Zero) for c in cases):
        return cases[0]
    if not isinstance(which, Number):
        return None
    if all(isinstance(c, Number) for c in cases):
        return Number(_chosen(walk, which.value, [c.value for c in cases if isinstance(c, Number)]))
    if not is_scalar(which):
        return None
    return one_of(walk, scalar_of(walk, which), cases)


def one_of(walk: Assumptions, index: Index, cases: Sequence[ScaleValue]) -> ScaleValue:
    """Returns one of several values, chosen by a number of the step."""
    if all(isinstance(c, Zero) for c in cases):
        return cases[0]
    if all(isinstance(c, Sign) for c in cases):
        return Sign(all(c.positive for c in cases if isinstance(c, Sign)))
    if all(isinstance(c, Number) for c in cases):
        return Number(_chosen(walk, index, [c.value for c in cases if isinstance(c, Number)]))
    leaves = {c.leaf for c in cases if isinstance(c, ScaledLeaf)}
    if len(leaves) != 1 or not all(isinstance(c, (Zero, ScaledLeaf)) for c in cases):
        return None
    scaled = [c if isinstance(c, ScaledLeaf) else ScaledLeaf(min(leaves), 0, 0.0) for c in cases]
    unit = min(c.unit for c in scaled)
    return ScaledLeaf(scaled[0].leaf, unit, _chosen(walk, index, [c.rest + (c.unit - unit) for c in scaled]))


def _chosen(walk: Assumptions, index: Index, numbers: Sequence[Leaf]) -> Leaf:
    chosen = numbers[-1]
    for k in range(len(numbers) - 2, -1, -1):
        chosen = walk.xp.where(index == k, numbers[k], chosen)
    return chosen


def _full(walk: Assumptions, equation: Equation, values: Sequence[ScaleValue]) -> ScaleValue:
    (a,) = values
    zero = isinstance(a, Number) and a.literal and not np.any(a.value) and equation.outputs[0].shape != ()
    return Zero() if zero else a


SCALE_RULES: Mapping[str, ScaleRule] = {
    **dict.fromkeys(
        those_that(lambda p: p.elementwise and p.keeps_zero),
        lambda walk, e, values: values[0] if isinstance(values[0], Zero) else None,
    ),
    "add": _add,
    "add_any": _add,
    "sub": _add,
    "neg": _neg,
    "mul": _mul,
    "div": _div,
    "square": _square,
    "integer_pow": _integer_pow,
    "sqrt": _sqrt,
    "rsqrt": _rsqrt,
    "abs": _abs,
    "max": _max,
    **dict.fromkeys(SHAPED, _moved),
    "convert_element_type": _convert,
    "reduce_sum": _sum,
    "select_n": _select,
    "ap.full": _full,
    **dict.fromkeys(IDENTITIES, lambda walk, e, values: values[0]),
}


@dataclass(eq=False)
class ScaleOnlyWalk(Assumptions):
    """Interprets an untouched update. A subclass may wrap values to know more of each."""

    def run(self, body: Block, inputs: Sequence[Leaf]) -> list[Leaf]:
        env: dict[Atom, Any] = dict(zip(body.inputs, inputs, strict=True))

        def read(atom: Atom) -> Leaf:
            if isinstance(atom, Literal):
                key = jax_compat.is_key(atom.dtype)
                return self.wrap(None if key else Number(np.asarray(atom.value), literal=True))
            return env[atom]

        for equation in body.equations:
            values = [read(a) for a in equation.inputs]
            if equation.op == "cond":
                env.update(zip(equation.outputs, self._cond(equation, values), strict=True))
            else:
                env.update(dict.fromkeys(equation.outputs, self.apply(equation, values)))
        return [read(a) for a in body.outputs]

    def wrap(self, value: ScaleValue) -> Leaf:
        return value

    def unknown(self) -> Any:
        """Returns the wrapped value of which nothing is known."""
        return None

    def unwrap(self, wrapped: Leaf) -> ScaleValue:
        return wrapped

    def apply(self, equation: Equation, values: Sequence[Leaf]) -> Any:
        rule = SCALE_RULES.get(equation.op)
        if rule is None or len(equation.outputs) != 1 or equation.bodies:
            return None
        return rule(self, equation, values)

    def choose(self, index: Index, cases: Sequence[Any]) -> Any:
        """Returns one of several values, chosen by a number of the step."""
        return one_of(self, index, cases)

    def _cond(self, equation: Equation, values: Sequence[Leaf]) -> list[Leaf]:
        """Interprets each branch by itself; its assumptions need hold only where it is taken."""
        which, operands = self.unwrap(values[0]), values[1:]
        if not isinstance(which, Number) or not is_scalar(which):
            return [self.unknown()] * len(equation.outputs)
        index = scalar_of(self, which)
        branches: list[list[Any]] = []
        for k, body in enumerate(equation.bodies):
            walk = replace(self, assumed=[], not_negative=set())
            branches.append(walk.run(body, operands))
            self.assumed += [(index != k) | condition for condition in walk.assumed]
            self.not_negative |= walk.not_negative
        return [self.choose(index, cases) for cases in zip(*branches, strict=True)]


def find_scale_only(update: RowUpdate) -> ScaleOnly | None:
    """Finds the fewest leaves that must be zero for the update to only scale the others; None if it never does."""
    dtypes = update.dtypes
    if not all(map(jax_compat.is_float, dtypes)):
        return None
    # A product of the factors would miss the rounding of short floats in each step: these must be zero.
    short = {k for k, dtype in enumerate(dtypes) if _is_short(dtype)}
    if len(short) == update.changed:
        return None
    choices = (itertools.combinations(range(update.changed), n) for n in range(len(short), update.changed + 1))
    zeros = filter(short.issubset, itertools.chain.from_iterable(choices))
    return next((found for zero in zeros if (found := _scale_only(update, zero)) is not None), None)


def _is_short(dtype: Dtype) -> bool:
    return np.dtype(dtype).itemsize < 4


def _scale_only(update: RowUpdate, zero: tuple[int, ...]) -> ScaleOnly | None:
    """Returns how the update scales a row whose leaves `zero` are zero; None if it does something else."""
    walk = ScaleOnlyWalk(np)
    with np.errstate(all="ignore"):
        outputs = walk.run(update.body, _inputs(update, zero, update.zeros()))
    scaled = tuple(k for k in range(update.changed) if k not in zero)
    if not all(isinstance(outputs[k], Zero) for k in zero):
        return None
    if not all(isinstance(v := outputs[k], ScaledLeaf) and v.leaf == k and v.unit in (0, 1) for k in scaled):
        return None
    near_one = tuple(isinstance(v := outputs[k], ScaledLeaf) and v.unit == 1 for k in scaled)
    dtypes = tuple(update.dtypes[k] for k in scaled)
    return ScaleOnly(zero, scaled, dtypes, near_one, tuple(sorted(walk.not_negative)))


def factors(update: RowUpdate, scale_only: ScaleOnly, numbers: Sequence[Leaf], xp: ModuleType) -> list[Leaf]:
    """Returns a step's factors in the order of `ScaleOnly.scaled` (less one if near one), then whether they hold.

    `numbers`: the step's. `xp`: NumPy or jax.numpy.
    """
    walk = ScaleOnlyWalk(xp)
    outputs = walk.run(update.body, _inputs(update, scale_only.zero, numbers))
    factors_ = []
    for k, dtype, near_one in zip(scale_only.scaled, scale_only.dtypes, scale_only.near_one, strict=True):
        value = outputs[k]
        assert isinstance(value, ScaledLeaf) and value.leaf == k and value.unit == near_one, (
            "as it was when it was planned"
        )
        rest = xp.asarray(value.rest, dtype).reshape(())
        walk.assume(xp.isfinite(rest) & (rest > -1 if near_one else True))
        factors_.append(rest)
    return [*factors_, walk.holds()]


def _inputs(update: RowUpdate, zero: Sequence[int], numbers: Sequence[Leaf]) -> list[ScaleValue]:
    """Returns the update's inputs for a walk in which the leaves `zero` are zero."""
    dtypes = enumerate(update.dtypes)
    changed = [Zero() if k in zero else ScaledLeaf(k, 1, np.zeros((), dtype)) for k, dtype in dtypes]
    # Leaves that are only read may hold anything: they aren't checked for finiteness.
    return [*changed, *[None] * update.read, *map(Number, numbers)]


# --- bounds on how far a nearly scale-only row still moves, by a small momentum, say (`ir.deferred.Fading`) ---
#
# The walk above assumes that some leaves are zero. Here they are only small: with each value the walk carries a bound
# on how far it is from its value if they were zero. For each of these leaves the bound is a number, the *reach*, times
# the leaf's element at the same index. m / (sqrt(v) + 1e-8), say, is within 1e8 |m| of zero, and within 1e4 |m| where v
# is at least 1e-8: reaches are computed for several such *floors*.


@dataclass(frozen=True, slots=True)
class Near:
    """A value of which some leaves are small, and a bound on what they change."""

    value: ScaleValue  #: The value if these leaves were zero.
    reach: Mapping[int, Any] | None  #: Such a leaf -> the bound, in multiples of its element; None: unknown.
    least: Any = 0.0  #: Lower bounds of all elements, [F], of values that no such leaf changes.

    @property
    def is_exact(self) -> bool:
        """It equals `value`."""
        return self.reach is not None and not self.reach


@dataclass(eq=False)
class FadingWalk(ScaleOnlyWalk):
    """Also bounds what small leaves change. `floors`: leaf -> lower bounds of its elements, [F]."""

    floors: Mapping[int, Any] = field(default_factory=dict)

    def wrap(self, value: ScaleValue) -> Near:
        return Near(value, {})

    def unknown(self) -> Near:
        return Near(None, None)

    def unwrap(self, wrapped: Near) -> ScaleValue:
        return wrapped.value

    def apply(self, equation: Equation, values: Sequence[Near]) -> Near:
        value = super().apply(equation, [v.value for v in values])
        if all(v.is_exact for v in values):
            return Near(value, {}, _least(self, equation, values) if isinstance(value, Sign) else 0.0)
        rule = _REACH.get(equation.op)
        if value is None or rule is None or any(v.reach is None for v in values):
            return Near(value, None)
        return Near(value, rule(self, equation, values))

    def choose(self, index: Index, cases: Sequence[Near]) -> Near:
        value = super().choose(index, [c.value for c in cases])
        if value is None:
            return Near(value, None)
        least = reduce(self.xp.minimum, (_least_of(self, c) for c in cases), np.inf)
        return Near(value, _largest(self, cases), least)


# --- lower bounds of values ---


def _least_of(walk: FadingWalk, near: Near) -> Leaf:
    if isinstance(near.value, Number):
        return walk.xp.min(near.value.value)
    if isinstance(near.value, ScaledLeaf) and near.value.leaf in walk.floors:
        return walk.floors[near.value.leaf] * walk.xp.maximum(near.value.unit + near.value.rest, 0)
    return near.least


def _least(walk: FadingWalk, equation: Equation, values: Sequence[Near]) -> Leaf:
    """Returns a lower bound of a result that isn't negative; zero if unknown."""
    xp, op = walk.xp, equation.op
    least = [_least_of(walk, v) for v in values]
    numbers = [v for v in values if isinstance(v.value, Number)]
    if op in ("add", "add_any"):
        return xp.maximum(least[0] + least[1], 0)
    if op == "mul" and len(numbers) == 1:  # the walk assumes that the number is positive
        return least[0] * least[1]
    if op == "div" and isinstance(by := values[1].value, Number):
        return least[0] / xp.max(by.value)
    if op == "sqrt":
        return xp.sqrt(least[0])
    if op == "max":
        return xp.maximum(xp.maximum(least[0], least[1]), 0)
    if op == "square" or (op == "integer_pow" and equation.params["y"] == 2):
        return least[0] * least[0]
    return least[0] if op in _SAME else 0.0


# --- reaches of results ---

_Reach = Mapping[int, Any] | None


def _merged(values: Sequence[Near], join: Callable[[Any, Any], Any]) -> _Reach:
    merged: dict[int, Any] = {}
    for near in values:
        for leaf, reach in (near.reach or {}).items():
            merged[leaf] = join(merged[leaf], reach) if leaf in merged else reach
    return merged


def _largest(walk: FadingWalk, values: Sequence[Near]) -> _Reach:
    return None if any(v.reach is None for v in values) else _merged(values, walk.xp.maximum)


def _times(walk: FadingWalk, near: Near, number: Leaf) -> _Reach:
    by = walk.xp.max(walk.xp.abs(number))
    return {leaf: reach * by for leaf, reach in (near.reach or {}).items()}


def _product(walk: FadingWalk, equation: Equation, values: Sequence[Near]) -> _Reach:
    for near, other in (values, values[::-1]):
        if isinstance(other.value, Number):
            return _times(walk, near, other.value.value)
    return None


def _quotient(walk: FadingWalk, equation: Equation, values: Sequence[Near]) -> _Reach:
    near, by = values
    if isinstance(by.value, Number):
        return _times(walk, near, 1 / by.value.value)
    if by.is_exact and isinstance(by.value, Sign) and by.value.positive:
        return {leaf: reach / by.least for leaf, reach in (near.reach or {}).items()}
    return None


def _converted(walk: FadingWalk, equation: Equation, values: Sequence[Near]) -> _Reach:
    old, new = equation.inputs[0].dtype, equation.outputs[0].dtype
    wide = all(jax_compat.is_float(d) and np.dtype(d).itemsize >= 4 for d in (old, new))
    return values[0].reach if wide else None


_SAME = IDENTITIES | {"broadcast_in_dim", "reshape", "squeeze", "ap.full", "convert_element_type"}
_REACH: Mapping[str, Callable[[FadingWalk, Equation, Sequence[Near]], _Reach]] = {
    **dict.fromkeys(("add", "add_any", "sub", "max"), lambda walk, e, values: _merged(values, operator.add)),
    "mul": _product,
    "div": _quotient,
    **dict.fromkeys(
        ("broadcast_in_dim", "reshape", "squeeze"), lambda walk, e, values: values[0].reach if keeps_order(e) else None
    ),
    "convert_element_type": _converted,
    "select_n": lambda walk, e, values: _largest(walk, values[1:]) if values[0].is_exact else None,
    # Their slope is at most one.
    **dict.fromkeys(IDENTITIES | {"neg", "abs", "tanh", "sin", "atan"}, lambda walk, e, values: values[0].reach),
}


# --- the findings for a family ---


def find_fading(update: RowUpdate, scale_only: ScaleOnly) -> Fading | None:
    """Finds which leaves fade and what they move, so that replaying can stop early; None if it can't."""
    dtypes = update.dtypes
    if not scale_only.zero or any(_is_short(dtypes[k]) for k in scale_only.zero):
        return None  # short floats needn't get smaller: 0.999 x may be rounded to x
    elements = [tuple(d for d in v.shape if d != 1) for v in update.body.inputs[: update.changed]]
    floors = tuple(
        k for k in scale_only.scaled if k in scale_only.not_negative and all(elements[k] == e for e in elements)
    )
    with np.errstate(all="ignore"):
        near = _new_leaves(update, scale_only, floors, update.zeros(), np)
        fades = _fading_factors(update, scale_only, update.zeros(), np)
    if fades is None or any(near[k].reach is None for k in scale_only.scaled):
        return None
    pairs = tuple((k, leaf) for k in scale_only.scaled for leaf in sorted(near[k].reach))
    if any(elements[k] != elements[leaf] for k, leaf in pairs):
        return None
    return Fading(scale_only.zero, pairs, floors, tuple(dtypes[k] for k in scale_only.zero))


def fading_numbers(
    update: RowUpdate, scale_only: ScaleOnly, fading: Fading, numbers: Sequence[Leaf], xp: ModuleType
) -> list[Leaf]:
    """Returns a step's factor of each fading leaf (NaN: unknown), then each pair's reaches, [F]."""
    fades = _fading_factors(update, scale_only, numbers, xp)
    assert fades is not None, "as it was when it was planned"
    near = _new_leaves(update, scale_only, fading.floors, numbers, xp)
    reaches = [(near[k].reach[leaf], update.dtypes[k]) for k, leaf in fading.pairs]
    factors = [xp.asarray(x, dtype).reshape(()) for x, dtype in zip(fades, fading.dtypes, strict=True)]
    return [*factors, *(xp.broadcast_to(xp.asarray(x, dtype), (len(FLOORS),)) for x, dtype in reaches)]


def _new_leaves(
    update: RowUpdate, scale_only: ScaleOnly, floors: Sequence[int], numbers: Sequence[Leaf], xp: ModuleType
) -> list[Leaf]:
    """Returns the changed leaves after the update, as `Near`s."""
    dtypes = update.dtypes
    leaves = [
        Near(Zero(), {k: np.ones((), dtype)})
        if k in scale_only.zero
        else Near(ScaledLeaf(k, 1, np.zeros((), dtype)), {})
        for k, dtype in enumerate(dtypes)
    ]
    walk = FadingWalk(xp, floors={k: np.asarray(FLOORS, dtypes[k]) for k in floors})
    inputs = [*leaves, *[Near(None, None)] * update.read, *(Near(Number(x), {}) for x in numbers)]
    return walk.run(update.body, inputs)[: update.changed]


def _fading_factors(
    update: RowUpdate, scale_only: ScaleOnly, numbers: Sequence[Leaf], xp: ModuleType
) -> list[Leaf] | None:
    """Returns the factors of fading leaves in rows of any finite numbers; None if such rows aren't scaled."""
    body = update.body
    alone, _ = eliminate_dead(replace(body, outputs=tuple(body.outputs[k] for k in scale_only.zero)))
    walk = ScaleOnlyWalk(xp)
    outputs = walk.run(alone, _inputs(update, (), numbers))
    if not walk.not_negative <= set(scale_only.not_negative):
        return None
    holds, fades = walk.holds(), []
    for k, value in zip(scale_only.zero, outputs, strict=True):
        if isinstance(value, Zero):
            value = ScaledLeaf(k, 0, np.zeros((), update.dtypes[k]))
        if not isinstance(value, ScaledLeaf) or value.leaf != k:
            return None
        fades.append(xp.where(holds, value.unit + value.rest, np.nan))
    return fades
