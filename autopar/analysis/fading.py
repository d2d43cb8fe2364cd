"""Bounds how far a row that is nearly scale-only still moves: what a small momentum does (see `ir.deferred.Fading`).

`analysis.scale_only` says what becomes of a row some of whose leaves are zero. Here they needn't be. The same walk
carries with each value how far it may be from what it would be then: for each of these leaves a number, *reach*, so
that it is at most reach times the leaf's element in the same place. m / (sqrt(v) + 1e-8) is within 1e8 |m| of zero,
say, and within 1e4 |m| where v is at least 1e-8: reaches are computed for several such *floors*. Whatever isn't known
to be bounded so isn't bounded.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np

from autopar import jax_compat
from autopar.analysis.primitives import IDENTITIES
from autopar.analysis.scale_only import (
    Number,
    ScaledLeaf,
    ScaleOnlyWalk,
    ScaleValue,
    Sign,
    Zero,
    keeps_order,
    leaves_of,
)
from autopar.ir.deferred import FLOORS, Fading, ScaleOnly
from autopar.ir.program import Block, Equation
from autopar.ir.slicing import eliminate_dead


@dataclass(frozen=True, slots=True)
class Near:
    """A value, and how far it is from it.

    Attributes:
      value: What it would be if the leaves in question were zero.
      reach: For each of these leaves that enter: at most so many times its element is added to it. None: unknown.
      least: No element is smaller, by floor; of values that no such leaf enters.
    """

    value: ScaleValue
    reach: Mapping[int, Any] | None
    least: Any = 0.0

    @property
    def steady(self) -> bool:
        """Returns whether it is what it would be."""
        return self.reach is not None and not self.reach


@dataclass(eq=False)
class FadingWalk(ScaleOnlyWalk):
    """The walk of `analysis.scale_only`, with what is near.

    Attributes:
      floors: What no element of a leaf falls below, [F].
    """

    floors: Mapping[int, Any] = field(default_factory=dict)

    def of(self, value: ScaleValue) -> Near:
        return Near(value, {})

    def unknown(self) -> Near:
        return Near(None, None)

    def known(self, kept: Near) -> ScaleValue:
        return kept.value

    def apply(self, equation: Equation, values: Sequence[Near]) -> Near:
        value = super().apply(equation, [v.value for v in values])
        if all(v.steady for v in values):
            return Near(value, {}, _least(self, equation, values) if isinstance(value, Sign) else 0.0)
        rule = _REACH.get(equation.op)
        if value is None or rule is None or any(v.reach is None for v in values):
            return Near(value, None)
        return Near(value, rule(self, equation, values))

    def choose(self, index: Any, cases: Sequence[Near]) -> Near:
        value = super().choose(index, [c.value for c in cases])
        if value is None:
            return Near(value, None)
        least = reduce(self.xp.minimum, (_least_of(self, c) for c in cases), np.inf)
        return Near(value, _largest(self, cases), least)


# --- what values are at least ---


def _least_of(walk: FadingWalk, near: Near) -> Any:
    if isinstance(near.value, Number):
        return walk.xp.min(near.value.value)
    if isinstance(near.value, ScaledLeaf) and near.value.leaf in walk.floors:
        return walk.floors[near.value.leaf] * walk.xp.maximum(near.value.unit + near.value.rest, 0)
    return near.least


def _least(walk: FadingWalk, equation: Equation, values: Sequence[Near]) -> Any:
    """Returns the least of a result that isn't negative, or zero where that isn't known."""
    xp, op = walk.xp, equation.op
    least = [_least_of(walk, v) for v in values]
    numbers = [v for v in values if isinstance(v.value, Number)]
    if op in ("add", "add_any"):
        return xp.maximum(least[0] + least[1], 0)
    if op == "mul" and len(numbers) == 1:  # the walk takes for granted that the number is more than zero
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


# --- how far values are from what they would be ---

_Reach = Mapping[int, Any] | None


def _merged(values: Sequence[Near], join: Callable[[Any, Any], Any]) -> _Reach:
    merged: dict[int, Any] = {}
    for near in values:
        for leaf, reach in (near.reach or {}).items():
            merged[leaf] = join(merged[leaf], reach) if leaf in merged else reach
    return merged


def _largest(walk: FadingWalk, values: Sequence[Near]) -> _Reach:
    return None if any(v.reach is None for v in values) else _merged(values, walk.xp.maximum)


def _times(walk: FadingWalk, near: Near, number: Any) -> _Reach:
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
    if by.steady and isinstance(by.value, Sign) and by.value.positive:
        return {leaf: reach / by.least for leaf, reach in (near.reach or {}).items()}
    return None


def _moved(walk: FadingWalk, equation: Equation, values: Sequence[Near]) -> _Reach:
    return values[0].reach if keeps_order(equation) else None


def _converted(walk: FadingWalk, equation: Equation, values: Sequence[Near]) -> _Reach:
    old, new = equation.inputs[0].dtype, equation.outputs[0].dtype
    wide = all(jax_compat.is_float(d) and np.dtype(d).itemsize >= 4 for d in (old, new))
    return values[0].reach if wide else None


_SAME = IDENTITIES | {"broadcast_in_dim", "reshape", "squeeze", "ap.full", "convert_element_type"}
_REACH: Mapping[str, Callable[[FadingWalk, Equation, Sequence[Near]], _Reach]] = {
    **dict.fromkeys(("add", "add_any", "sub", "max"), lambda walk, e, values: _merged(values, operator.add)),
    "mul": _product,
    "div": _quotient,
    **dict.fromkeys(("broadcast_in_dim", "reshape", "squeeze"), _moved),
    "convert_element_type": _converted,
    "select_n": lambda walk, e, values: _largest(walk, values[1:]) if values[0].steady else None,
    # Their slope is at most one.
    **dict.fromkeys(
        IDENTITIES | {"neg", "abs", "tanh", "sin", "atan"},
        lambda walk, e, values: values[0].reach,
    ),
}


# --- a family's ---


def find_fading(body: Block, changed: int, read: int, scale_only: ScaleOnly) -> Fading | None:
    """Returns what is to be written down so that replaying can stop early; None if it can't."""
    if not scale_only.zero:
        return None
    elements = [tuple(d for d in v.shape if d != 1) for v in body.inputs[:changed]]
    floors = tuple(
        k for k in scale_only.scaled if k in scale_only.not_negative and all(elements[k] == e for e in elements)
    )
    numbers = [np.zeros(v.shape, v.dtype) for v in body.inputs[changed + read :]]
    with np.errstate(all="ignore"):
        near = _near(body, changed, read, scale_only, floors, numbers, np)
        own = _own(body, changed, read, scale_only, numbers, np)
    if own is None or any(near[k].reach is None for k in scale_only.scaled):
        return None
    pairs = tuple((k, leaf) for k in scale_only.scaled for leaf in sorted(near[k].reach))
    if any(elements[k] != elements[leaf] for k, leaf in pairs):
        return None
    return Fading(scale_only.zero, pairs, floors, tuple(body.inputs[k].dtype for k in scale_only.zero))


def fading_numbers(
    body: Block, changed: int, read: int, scale_only: ScaleOnly, fading: Fading, values: Sequence[Any], xp: Any
) -> list[Any]:
    """Returns a step's factor of each leaf that fades (NaN: not known), and each pair's reaches, [F]."""
    own = _own(body, changed, read, scale_only, values, xp)
    assert own is not None, "as it was when it was planned"
    near = _near(body, changed, read, scale_only, fading.floors, values, xp)
    reaches = [(near[k].reach[leaf], body.inputs[k].dtype) for k, leaf in fading.pairs]
    factors = [xp.asarray(x, dtype).reshape(()) for x, dtype in zip(own, fading.dtypes, strict=True)]
    return [*factors, *(xp.broadcast_to(xp.asarray(x, dtype), (len(FLOORS),)) for x, dtype in reaches)]


def _near(
    body: Block, changed: int, read: int, scale_only: ScaleOnly, floors: Sequence[int], values: Sequence[Any], xp: Any
) -> list[Any]:
    """Returns the new rows of changed leaves, nearly."""
    leaves = [
        Near(Zero(), {k: np.ones((), v.dtype)})
        if k in scale_only.zero
        else Near(ScaledLeaf(k, 1, np.zeros((), v.dtype)), {})
        for k, v in enumerate(body.inputs[:changed])
    ]
    walk = FadingWalk(xp, floors={k: np.asarray(FLOORS, body.inputs[k].dtype) for k in floors})
    return walk.run(body, [*leaves, *[Near(None, None)] * read, *(Near(Number(v), {}) for v in values)])[:changed]


def _own(
    body: Block, changed: int, read: int, scale_only: ScaleOnly, values: Sequence[Any], xp: Any
) -> list[Any] | None:
    """Returns what leaves that fade are multiplied by, whatever finite rows hold; None if they aren't."""
    alone, _ = eliminate_dead(dataclasses.replace(body, outputs=tuple(body.outputs[k] for k in scale_only.zero)))
    walk = ScaleOnlyWalk(xp)
    outputs = walk.run(alone, [*leaves_of(body, changed, read, ()), *map(Number, values)])
    if not walk.not_negative <= set(scale_only.not_negative):
        return None
    good = walk.holds()
    own = []
    for k, value in zip(scale_only.zero, outputs, strict=True):
        if isinstance(value, Zero):
            value = ScaledLeaf(k, 0, np.zeros((), body.inputs[k].dtype))
        if not isinstance(value, ScaledLeaf) or value.leaf != k:
            return None
        own.append(xp.where(good, value.unit + value.rest, np.nan))
    return own
