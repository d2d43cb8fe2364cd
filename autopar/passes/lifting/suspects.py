"""What may turn untouched rows into something that isn't finite, beside the step's scalars: see `lift_rows`.

`0 * x = 0` needs a finite x, `0 / x = 0` needs an x that isn't 0. A row that shows it may be hidden in the padding row
by a predicate of its own, so the values themselves are watched: at the padding row where they are the same for all
rows, all of them where they depend on the rows' numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from autopar.analysis.primitives import ELEMENTWISE, MOVES, those_that
from autopar.analysis.rules import ALIGNED
from autopar.ir.program import Atom, Equation, Literal
from autopar.ir.rowspace import Const, Free, Row
from autopar.passes.lifting.scope import Scope

#: A divisor that is made of a zero by these is zero.
_KEEPS_ZERO = those_that(lambda p: p.keeps_zero)
#: Not finite at zero -> which operand.
_POLES = {"div": 1, "rsqrt": 0, "log": 0, "pow": 0, "rem": 1}


def find_suspects(scope: Scope, equations: Sequence[Equation], family: int) -> tuple[list[Atom], list[Atom]]:
    """Values that must be finite, and values that must not be zero, for the untouched rows to stay as they are.

    Args:
      scope: The outermost block, in which they are all known.
      equations: What is computed for the untouched rows.
      family: The family.
    """
    finite: dict[Atom, None] = {}
    nonzero: dict[Atom, None] = {}
    for equation in equations:
        place = next((r for v in equation.outputs if (r := scope.lifting.row(v)) is not None), None)
        if place is None or equation.op not in ALIGNED:
            continue
        for atom in equation.inputs:
            is_free = isinstance(scope.lifting.facts.value(atom), Free)
            if atom.shape != () and (is_free or isinstance(atom, Literal)) and not _is_finite(scope, atom):
                finite[_watched(scope, atom, place.axis, family)] = None
        if equation.op in _POLES:
            for atom in _zero_factors(scope, equation.inputs[_POLES[equation.op]]):
                nonzero[_watched(scope, atom, place.axis, family)] = None
    return list(finite), list(nonzero)


def _is_finite(scope: Scope, atom: Atom) -> bool:
    """Whether a value can't be anything else: an integer, a mask, or made of literals alone."""
    if not jnp.issubdtype(atom.dtype, np.inexact):
        return True
    if isinstance(atom, Literal):
        return bool(np.all(np.isfinite(np.asarray(atom.value))))
    made = scope.producers.get(_unspread(scope, atom))
    if made is not None and made.op == "convert_element_type" and made.inputs[0].dtype == bool:
        return True
    value = scope.lifting.facts.value(atom)
    off = value.off if isinstance(value, Free) else None
    return isinstance(off, Const) and bool(np.all(np.isfinite(np.asarray(off.value)))) and _is_literal(scope, atom)


def _unspread(scope: Scope, atom: Atom) -> Atom:
    """A value with the same elements, each as few times as possible: what is broadcast."""
    made = scope.producers.get(atom)
    while made is not None and made.op in ("broadcast_in_dim", "reshape") and made.inputs[0].shape != ():
        atom = made.inputs[0]
        made = scope.producers.get(atom)
    return atom


def _is_literal(scope: Scope, atom: Atom) -> bool:
    """Whether a value is made of literals, each of its elements in the same way: its constant is then what it is."""
    waiting, seen = [atom], set[Atom]()
    while waiting:
        value = waiting.pop()
        if isinstance(value, Literal) or value in seen:
            continue
        seen.add(value)
        equation = scope.producers.get(value)
        if equation is None or equation.op not in ELEMENTWISE | MOVES:
            return False
        waiting += equation.inputs
    return True


def _zero_factors(scope: Scope, atom: Atom) -> list[Atom]:
    """Lists the factors that make a divisor zero and are no table's rows."""
    if isinstance(atom, Literal):
        return [] if np.all(np.asarray(atom.value)) else [atom]
    value = scope.lifting.facts.value(atom)
    if not isinstance(value, Row):
        return [atom]
    equation = scope.producers.get(atom)
    if equation is None or equation.op not in _KEEPS_ZERO:
        return []
    return [factor for a in equation.inputs for factor in _zero_factors(scope, a)]


def _watched(scope: Scope, atom: Atom, axis: int, family: int) -> Atom:
    """A value that is no table's rows: all of it, or the padding row of what is alike in all rows."""
    value = scope.lifting.facts.value(atom)
    if atom.shape != () and isinstance(value, Free) and axis in value.axes - {value.index_axis}:
        return scope.padding(scope.at_rows(atom, axis, family), axis, family)
    return scope.get(_unspread(scope, atom))
