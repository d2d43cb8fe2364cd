"""Elementwise primitives: row-parallel by nature; what matters is what they make of the untouched rows.

`fold` is the off-row algebra: constants fold (with NumPy), zero absorbs in products and is neutral in sums, one is
neutral in products. `0 * x = 0` holds for finite x only: the lifted step checks a row of its own for what it can't
know here (see `passes.lift_rows`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from autopar import jax_compat
from autopar.analysis.primitives import ELEMENTWISE, MOVES, PRIMITIVES
from autopar.analysis.rules.table import ALIGNED, RULES, Analysis, Mixes
from autopar.ir.program import Equation, Literal
from autopar.ir.rowspace import UNKNOWN, Const, Free, Off, Row, Same, Value

_INEXACT = frozenset({"div", "rem", "pow", "integer_pow"})
_IDENTITIES = ELEMENTWISE & MOVES


def fold(equation: Equation, offs: Sequence[Off]) -> Off:
    """What the result is off the touched rows, from what the operands are there."""
    op = equation.op
    if op in _INEXACT and not jnp.issubdtype(equation.outputs[0].dtype, np.inexact):
        return UNKNOWN  # integers divide and overflow in XLA's own way
    special = _SPECIAL.get(op)
    if special is not None:
        return special(equation, offs)
    if op in _IDENTITIES:
        return offs[0]
    known = _constants(equation, offs) or (_combined(equation, offs) if op in _ALGEBRA else UNKNOWN)
    return _of_equals(equation, offs) if known == UNKNOWN and op in _OF_EQUALS else known


def _as(equation: Equation, value: Any) -> Any:
    return np.asarray(value).astype(equation.outputs[0].dtype)


def is_zero(off: Off) -> bool:
    """Whether it is the constant zero."""
    return isinstance(off, Const) and off.is_zero


def _constants(equation: Equation, offs: Sequence[Off]) -> Const | None:
    folded = PRIMITIVES[equation.op].fold
    if folded is None or not all(isinstance(o, Const) for o in offs):
        return None
    with np.errstate(all="ignore"):
        return Const(_as(equation, folded(*(np.asarray(o.value) for o in offs if isinstance(o, Const)))))


#: Of two operands' constants, by operand: those that are the result whatever the other operand is, and those of which
#: the other operand is the result. -1 has all bits set.
_ALGEBRA: Mapping[str, tuple[tuple[int | None, int | None], tuple[int | None, int | None]]] = {
    "mul": ((0, 0), (1, 1)),
    "add": ((None, None), (0, 0)),
    "add_any": ((None, None), (0, 0)),
    "sub": ((None, None), (None, 0)),
    "div": ((0, None), (None, 1)),
    "and": ((0, 0), (-1, -1)),
    "or": ((-1, -1), (0, 0)),
}


def _combined(equation: Equation, offs: Sequence[Off]) -> Off:
    """Where one of two operands is a constant."""
    absorbing, neutral = _ALGEBRA[equation.op]
    for off, number in zip(offs, absorbing, strict=True):
        if number is not None and _is_all(off, number):
            return Const(_as(equation, number))
    for off, number, other in zip(offs, neutral, offs[::-1], strict=True):
        if number is not None and _is_all(off, number):
            return other
    return UNKNOWN


#: What two equal operands give; None: the operand.
_OF_EQUALS: Mapping[str, int | None] = {
    "sub": 0,
    "xor": 0,
    **dict.fromkeys(("ne", "lt", "gt"), 0),
    **dict.fromkeys(("eq", "le", "ge"), 1),
    **dict.fromkeys(("max", "min", "and", "or"), None),
}


def _of_equals(equation: Equation, offs: Sequence[Off]) -> Off:
    """Returns what an equation of two operands is off the touched rows, if they are the same function of the row there.
    One value with itself is left alone: `x != x` and `x - x` ask whether it is a NaN or an infinity."""
    one, other = equation.inputs
    if one is other or offs[0] != offs[1] or isinstance(offs[0], Const) or offs[0] == UNKNOWN:
        return UNKNOWN
    number = _OF_EQUALS[equation.op]
    return offs[0] if number is None else Const(_as(equation, number))


def _is_all(off: Off, number: int) -> bool:
    if not isinstance(off, Const):
        return False
    value = np.asarray(off.value)
    return bool(np.all(value == np.asarray(number).astype(value.dtype)))


def _convert(equation: Equation, offs: Sequence[Off]) -> Off:
    (off,), new = offs, equation.outputs[0].dtype
    if isinstance(off, Const):
        with np.errstate(all="ignore"):
            value = np.asarray(off.value)
            if np.iscomplexobj(value) and not np.issubdtype(new, np.complexfloating):
                return Const(np.zeros((), new)) if off.is_zero else UNKNOWN
            converted = value.astype(new)
            kept = jnp.issubdtype(new, np.inexact) or bool(converted.astype(value.dtype) == value)
            return Const(converted) if kept or converted.dtype == np.bool_ else UNKNOWN
    if isinstance(off, Same) and (new == off.dtype or _holds(new, off.dtype)):
        return off  # widening is exact, and narrowing back to the leaf's own dtype undoes it
    return UNKNOWN


def _holds(wide: Any, narrow: Any) -> bool:
    """Whether every value of one float dtype is a value of another."""
    both_float = jax_compat.is_float(wide) and jax_compat.is_float(narrow)
    return both_float and jax_compat.holds_floats(wide, narrow)


def _integer_pow(equation: Equation, offs: Sequence[Off]) -> Off:
    off = offs[0]
    if not isinstance(off, Const):
        return UNKNOWN
    with np.errstate(all="ignore"):
        return Const(_as(equation, np.asarray(off.value) ** float(equation.params["y"])))


def _select(equation: Equation, offs: Sequence[Off]) -> Off:
    which, *cases = offs
    if isinstance(which, Const) and np.ndim(which.value) == 0:
        return cases[int(which.value)]
    return cases[0] if all(c == cases[0] and c != UNKNOWN for c in cases) else UNKNOWN


def _clamp(equation: Equation, offs: Sequence[Off]) -> Off:
    if all(isinstance(o, Const) for o in offs):
        low, x, high = (np.asarray(o.value) for o in offs if isinstance(o, Const))
        return Const(_as(equation, np.minimum(np.maximum(x, low), high)))
    return UNKNOWN


_SPECIAL: Mapping[str, Callable[[Equation, Sequence[Off]], Off]] = {
    "convert_element_type": _convert,
    "integer_pow": _integer_pow,
    "select_n": _select,
    "clamp": _clamp,
}


def off_of(atom: Any, value: Value, axis: int) -> Off:
    """Returns what an operand is off the rows that lie along `axis`."""
    if isinstance(value, Row):
        return value.off
    if isinstance(value, Free) and (atom.shape == () or axis in value.axes):
        return value.off
    if isinstance(atom, Literal) and atom.shape == () and not jax_compat.is_key(atom.dtype):
        return Const(np.asarray(atom.value))
    return UNKNOWN


def elementwise(equation: Equation, values: Sequence[Value], analysis: Analysis) -> Sequence[Value]:
    """Rows meet rows along one axis; everything else is restricted to them."""
    rows = [v for v in values if isinstance(v, Row)]
    if not rows:
        return [_free(equation, values)]
    if len({r.axis for r in rows}) > 1:
        raise Mixes(f"{equation.op} of values whose rows lie along different axes")
    axis = rows[0].axis
    offs = [off_of(a, v, axis) for a, v in zip(equation.inputs, values, strict=True)]
    return [Row(axis, analysis.unite(rows), fold(equation, offs))]


def _free(equation: Equation, values: Sequence[Value]) -> Value:
    """The result of operands that belong to no family."""
    axes = set(range(len(equation.outputs[0].shape)))
    index_axis: int | None = None
    offs: list[Off] = []
    for atom, value in zip(equation.inputs, values, strict=True):
        if isinstance(value, Free):
            if atom.shape != ():
                axes &= value.axes
            if value.index_axis is not None:
                if index_axis not in (None, value.index_axis):
                    return None
                index_axis = value.index_axis
            offs.append(value.off)
        elif atom.shape == ():
            offs.append(off_of(atom, value, 0))
        else:
            return None
    off = fold(equation, offs)
    if not axes and not isinstance(off, Const):
        return None
    return Free(frozenset(axes), off, index_axis)


for _op in ELEMENTWISE:
    RULES[_op] = elementwise
    ALIGNED.add(_op)
