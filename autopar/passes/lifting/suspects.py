"""What may turn untouched rows into something that isn't finite, beside the step's scalars: see `lift_rows`.

`0 * x = 0` needs a finite x, `0 / x = 0` needs an x that isn't 0. A row that shows it may be hidden in the padding row
by a predicate of its own, so the values themselves are watched, as far as they are the same for all rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar import jax_compat
from autopar.analysis.primitives import ELEMENTWISE, MOVES, those_that
from autopar.analysis.rules import ALIGNED
from autopar.ir.program import Atom, Equation, Literal, Var
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
            is_free = isinstance(scope.lifting.facts.value(atom), Free) and atom.shape != ()
            if is_free and isinstance(atom, Var) and not _is_finite(scope, atom):
                finite[_padding(scope, atom, place.axis, family)] = None
        if equation.op in _POLES:
            for atom in _zero_factors(scope, equation.inputs[_POLES[equation.op]]):
                dense = atom.shape == () or not isinstance(scope.lifting.facts.value(atom), Free)
                nonzero[scope.get(atom) if dense else _padding(scope, atom, place.axis, family)] = None
    return list(finite), list(nonzero)


def _is_finite(scope: Scope, atom: Atom) -> bool:
    """Whether a value can't be anything else: no float, or made of literals alone."""
    if not jax_compat.is_float(atom.dtype):
        return True
    value = scope.lifting.facts.value(atom)
    off = value.off if isinstance(value, Free) else None
    return isinstance(off, Const) and bool(np.all(np.isfinite(np.asarray(off.value)))) and _is_literal(scope, atom)


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
    """What makes a divisor zero for all rows: factors that are no rows."""
    if isinstance(atom, Literal):
        return []
    value = scope.lifting.facts.value(atom)
    if not isinstance(value, Row):
        return [atom]
    equation = scope.producers.get(atom)
    if equation is None or equation.op not in _KEEPS_ZERO:
        return []
    return [factor for a in equation.inputs for factor in _zero_factors(scope, a)]


def _padding(scope: Scope, atom: Atom, axis: int, family: int) -> Atom:
    """A value that is the same for all rows, at the padding row."""
    rows = scope.at_rows(atom, axis, family)
    return scope.padding(rows, axis, family)
