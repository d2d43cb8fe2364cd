"""Finds whether untouched rows can differ from each other where a number of the step isn't finite.

A predicate of a row (on its number, its content) may hide a NaN or an infinity from it. Most steps have no such
predicate, or one that the same NaN settles for all (`jnp.where(sum_of_squares > 0, ...)`): there one row tells the
value of all. In this abstract interpretation an *event* is that a number of the step isn't finite, or is zero, or that
such a number has made a loop's carry NaN in an earlier turn.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np

from autopar import jax_compat
from autopar.analysis.interpreter import Interpreter
from autopar.analysis.primitives import ELEMENTWISE, MOVES, PRIMITIVES, Primitive
from autopar.analysis.rules import ALIGNED
from autopar.ir.program import Atom, Block, Equation, Literal, Var
from autopar.ir.rowspace import Const, Free, Row, Value

#: A variable, and what happens to it.
Event = tuple[Var, str]
_NOT_FINITE, _ZERO, _NAN, _CARRIED = "not finite", "zero", "NaN", "carried"
_NOTHING: frozenset[Event] = frozenset()


@dataclass(frozen=True, slots=True)
class NonfiniteOutcome:
    """The outcome of a value at untouched rows. Sets of events are subsets of `events`."""

    own: bool = False  #: Rows may differ from each other at all.
    constant: bool = False  #: It is a constant unless an event happens; `zero`: it is 0.
    zero: bool = False
    events: frozenset[Event] = _NOTHING  #: Events that may affect it.
    nan: frozenset[Event] = _NOTHING  #: Those that make all of it NaN.
    even: frozenset[Event] = _NOTHING  #: Those that leave all rows finite, or make all NaN, at each element of a row.
    alike: frozenset[Event] = _NOTHING  #: Those that leave all rows equal.
    zero_or_nan: frozenset[Event] = _NOTHING  #: Those that leave all of it 0, or make all of it NaN.
    #: Rows that loops carry or slice (inputs of loops' bodies) on which it depends.
    turns: frozenset[Var] = frozenset()

    @property
    def may_differ(self) -> bool:
        """An event may make some untouched rows differ from others."""
        return self.own and not (self.constant and self.events <= self.alike)

    def is_even(self, event: Event) -> bool:
        return event not in self.events or event in self.even

    def is_alike(self, event: Event) -> bool:
        """Returns whether rows are equal after an event."""
        return not self.own or event in self.alike or (self.constant and event not in self.events)


class NonfiniteOutcomes(Interpreter[NonfiniteOutcome]):
    """The outcomes of all values of a block, nested ones included."""

    def __init__(self, block: Block, rows: Mapping[Var, Value], roles: Mapping[Equation, str]) -> None:
        """Takes the `rows` (values) and `roles` of `ir.rowspace.RowFacts`."""
        super().__init__()
        self._rows, self._roles = rows, roles
        self.run(block.equations)

    def of(self, sources: Sequence[tuple[Atom, int]], product: Equation | None = None) -> NonfiniteOutcome:
        """Returns the outcome of a row value, given its row axis, or of the product of two, row by row."""
        outcomes = [self._operand(atom, axis) for atom, axis in sources]
        return outcomes[0] if product is None else replace(_computed(product, outcomes), constant=True, zero=True)

    def keeps_zero(self, sources: Sequence[tuple[Atom, int]]) -> bool:
        """Returns whether a product of two row values, one of them zero, is 0 or NaN in all rows after any event."""
        outcomes = [self._operand(atom, axis) for atom, axis in sources]
        pairs = ((one, other) for one, other in (outcomes, outcomes[::-1]) if one.zero)
        return any(one.events <= one.nan and other.events <= one.nan | other.even for one, other in pairs)

    # --- values ---

    def unknown(self, atom: Atom) -> NonfiniteOutcome:
        """Returns the outcome of a number of the step, or of a leaf's rows."""
        own = atom.shape != ()
        if isinstance(atom, Literal) or isinstance(self._kind(atom), Row) or not jnp.issubdtype(atom.dtype, np.inexact):
            return NonfiniteOutcome(own)
        return NonfiniteOutcome(own, events=frozenset({(atom, _NOT_FINITE)}))

    def _kind(self, atom: Atom) -> Value:
        return self._rows.get(atom) if isinstance(atom, Var) and atom.shape != () else None

    def _operand(self, atom: Atom, axis: int | None) -> NonfiniteOutcome:
        outcome, kind = self.value(atom), self._kind(atom)
        if isinstance(kind, Row):
            return outcome
        if isinstance(kind, Free):
            return replace(outcome, own=axis is not None and axis not in kind.axes - {kind.index_axis})
        return replace(outcome, own=axis is not None and atom.shape != ())

    def _kept(self, var: Var, outcome: NonfiniteOutcome) -> NonfiniteOutcome:
        """Refines an outcome by what analysis knows of its variable."""
        kind = self._kind(var)
        if kind is None:
            return outcome if var.shape == () and not outcome.events else self.unknown(var)
        untouched = kind.untouched if isinstance(kind.untouched, Const) else None
        zero = untouched is not None and untouched.is_zero
        if zero and outcome.events <= outcome.zero_or_nan and not outcome.events <= outcome.nan:
            event = frozenset({(var, _NAN)})
            return NonfiniteOutcome(outcome.own, True, True, event, event, event, event, event, outcome.turns)
        return replace(outcome, constant=untouched is not None, zero=zero)

    # --- equations ---

    def run(self, equations: Sequence[Equation]) -> None:
        super().run([e for e in equations if e.bodies or any(map(self._is_followed, e.outputs))])

    def _is_followed(self, var: Var) -> bool:
        return var in self._rows and (var.shape == () or isinstance(self._rows[var], (Row, Free)))

    def equation(self, equation: Equation, operands: Sequence[NonfiniteOutcome]) -> Sequence[NonfiniteOutcome]:
        results = super().equation(equation, operands)
        return [self._kept(v, outcome) for v, outcome in zip(equation.outputs, results, strict=True)]

    def plain(self, equation: Equation, operands: Sequence[NonfiniteOutcome]) -> Sequence[NonfiniteOutcome]:
        return [self._result(equation, k, var) for k, var in enumerate(equation.outputs)]

    def _result(self, equation: Equation, k: int, var: Var) -> NonfiniteOutcome:
        kind = self._kind(var)
        if isinstance(kind, Row):
            return self._row(equation, k, kind.axis)
        if kind is None and (var.shape != () or equation.op not in ELEMENTWISE):
            return self.unknown(var)
        events = _all(self.value(a).events for a in equation.inputs)
        return NonfiniteOutcome(
            events=events if equation.op in MOVES or not events else frozenset({(var, _NOT_FINITE)})
        )

    def _row(self, equation: Equation, k: int, axis: int) -> NonfiniteOutcome:
        if self._roles.get(equation) == "push":
            base, at = (equation.inputs[1], None) if equation.op == "pad" else (equation.inputs[0], axis)
            return self._operand(base, at)
        if equation.op == "optimization_barrier":
            return self._operand(equation.inputs[k], axis)
        operands = [self._operand(a, axis if equation.op in ALIGNED else None) for a in equation.inputs]
        return _chosen(operands[0], operands[1:]) if equation.op == "select_n" else _computed(equation, operands)

    # --- loops and branches ---

    def join(self, values: Sequence[NonfiniteOutcome], atoms: Sequence[Atom]) -> NonfiniteOutcome:
        """Joins branches; the same one is taken for all rows."""
        return _chosen(NonfiniteOutcome(), values)

    def body(self, equation: Equation, block: Block, operands: Sequence[NonfiniteOutcome]) -> list[NonfiniteOutcome]:
        varies = equation.border.consts
        pairs = enumerate(zip(block.inputs, operands, strict=True))
        return super().body(equation, block, [self._input(v, outcome, k >= varies) for k, (v, outcome) in pairs])

    def _input(self, var: Var, outcome: NonfiniteOutcome, varies: bool) -> NonfiniteOutcome:
        if varies and isinstance(self._kind(var), Row):
            return self._kept(var, replace(outcome, turns=outcome.turns | {var}))
        return self._kept(var, self.unknown(var) if varies else outcome)

    def loop(self, equation: Equation, operands: Sequence[NonfiniteOutcome]) -> Sequence[NonfiniteOutcome]:
        """Starts with the claim that any event makes all of a carry NaN, or keeps it even, until a turn refutes it."""
        inputs = equation.bodies[-1].inputs
        first, count = equation.border.consts, equation.border.carries
        carries = (_carried(v, 2, True, frozenset()) for v in inputs[first : first + count])
        results = super().loop(equation, [*operands[:first], *carries, *operands[first + count :]])
        pairs = enumerate(zip(equation.outputs, results, strict=True))
        return [self._after(equation, k, out, outcome) for k, (out, outcome) in pairs]

    def widen(self, equation: Equation, k: int, carry: NonfiniteOutcome, result: NonfiniteOutcome) -> NonfiniteOutcome:
        """Returns the claim that holds for a carry after a turn and before the first."""
        at = equation.border.consts + k
        var = equation.bodies[-1].inputs[at]
        kind = self._kind(var)
        if not isinstance(kind, Row):
            return carry
        start, end = (self._operand(a, kind.axis) for a in (equation.inputs[at], equation.bodies[-1].outputs[k]))
        claim = min(_claim(carry), _claim(start), _claim(end))
        return _carried(var, claim, True, frozenset())

    def _after(self, equation: Equation, k: int, out: Var, outcome: NonfiniteOutcome) -> NonfiniteOutcome:
        """Returns the outcome of a loop's result: a carry, or a stack, of which some turns at most are NaN."""
        body, kind = equation.bodies[-1], self._kind(out)
        if not isinstance(kind, Row):
            return self.unknown(out)
        first, count = equation.border.consts, equation.border.carries
        ends = [self._operand(body.outputs[k], kind.axis - (k >= count))]
        if k < count:
            ends.append(self._operand(equation.inputs[first + k], kind.axis))
        claim = _claim(outcome) if k < count else min(_claim(ends[0]), 1)
        return _carried(out, claim, any(f.own for f in ends), _turns(ends) - set(body.inputs))


def _claim(outcome: NonfiniteOutcome) -> int:
    return 2 if outcome.events <= outcome.nan else int(outcome.events <= outcome.even)


def _carried(var: Var, claim: int, own: bool, turns: frozenset[Var]) -> NonfiniteOutcome:
    event = frozenset({(var, _CARRIED)})
    nan, even = event if claim > 1 else _NOTHING, event if claim else _NOTHING
    return NonfiniteOutcome(own, events=event, nan=nan, even=even, alike=nan, turns=turns)


def _computed(equation: Equation, operands: Sequence[NonfiniteOutcome]) -> NonfiniteOutcome:
    """Returns the outcome of a result that is computed row by row."""
    op, known = equation.op, PRIMITIVES.get(equation.op, Primitive())
    keeps_nan = known.keeps_nan and all(jax_compat.is_float(a.dtype) for a in (*equation.inputs, *equation.outputs))
    may_be_poles = operands[1:] if op == "div" else () if keeps_nan else operands
    zeros = frozenset((var, _ZERO) for o in may_be_poles for var, what in o.events if what == _NOT_FINITE)
    events = _all(o.events for o in operands) | zeros
    own = any(o.own for o in operands)
    turns = _turns(operands)
    alike = frozenset(e for e in events if all(o.is_alike(e) for o in operands))
    if known.moves and not known.keeps_nan:
        data = operands[:1] if op in ("dynamic_slice", "gather") else operands
        nan, zero_or_nan = (functools.reduce(frozenset.intersection, sets) for sets in _sets(data))
        even = frozenset(e for e in events - zeros if all(o.is_even(e) for o in operands))
        return NonfiniteOutcome(own, False, False, events - zeros, nan, even, alike, zero_or_nan, turns)
    if not keeps_nan:
        decided = _all(o.nan for o in operands) if known.compares else _NOTHING
        return NonfiniteOutcome(own, events=events, alike=alike | decided, turns=turns)
    nan = _all(o.nan for o in operands)
    even = frozenset(e for e in events - zeros if all(o.is_even(e) for o in operands))
    touched = [o for o in operands if o.events]
    zero_or_nan = nan | frozenset(e for e in events if all(o.zero and e in o.zero_or_nan for o in touched))
    if op in ("mul", "dot_general") or (op == "div" and operands[0].zero):
        for zero, other in (operands, operands[::-1])[: 2 - (op == "div")]:
            if zero.zero:
                made_nan, made_even = _times_zero(op, zero, other)
                nan, even, alike = nan | made_nan, even | made_even, alike | made_even
                zero_or_nan |= frozenset(e for e in made_even if op != "dot_general" and _is_of_all(e))
    return NonfiniteOutcome(own, False, False, events, nan, even | nan, alike | nan, zero_or_nan | nan, turns)


def _sets(outcomes: Sequence[NonfiniteOutcome]) -> tuple[list[frozenset[Event]], list[frozenset[Event]]]:
    return [f.nan for f in outcomes], [f.zero_or_nan if f.zero else f.nan for f in outcomes]


def _times_zero(op: str, zero: NonfiniteOutcome, other: NonfiniteOutcome) -> tuple[frozenset[Event], frozenset[Event]]:
    """Returns events that make zero times (or by) a value NaN, and those that make it 0 or NaN in all rows."""
    free = frozenset(e for e in other.events if e not in zero.events)
    if other.own:
        return _NOTHING, free & other.even
    numbers = frozenset(e for e in free if e[1] == _NOT_FINITE)
    free |= frozenset((var, _ZERO) for var, _ in numbers) if op == "div" else _NOTHING
    bad = _ZERO if op == "div" else _NOT_FINITE
    return frozenset(e for e in free if e[1] == bad and e[0].shape == () and op != "dot_general"), free


def _is_of_all(event: Event) -> bool:
    var, what = event
    return var.shape == () or what in (_NAN, _CARRIED)


def _chosen(which: NonfiniteOutcome, cases: Sequence[NonfiniteOutcome]) -> NonfiniteOutcome:
    """Returns the outcome of a choice among cases for each row."""
    events = which.events | _all(c.events for c in cases)
    nan = frozenset(e for e in events if all(e in c.nan for c in cases))
    alike = frozenset(e for e in events if which.is_alike(e) and all(c.is_alike(e) for c in cases))
    untouched = frozenset(e for e in events if not any(e in c.events for c in cases))
    even = frozenset(e for e in events if which.is_alike(e) and all(c.is_even(e) for c in cases))
    own = which.own or any(c.own for c in cases)
    zeros = all(c.zero for c in cases)
    decided = frozenset(e for e in events if zeros and all(e not in c.events or e in c.zero_or_nan for c in cases))
    zero_or_nan, turns = nan | (decided & alike), _turns((which, *cases))
    return NonfiniteOutcome(own, False, False, events, nan, even | nan | untouched, alike | nan, zero_or_nan, turns)


def _turns(outcomes: Iterable[NonfiniteOutcome]) -> frozenset[Var]:
    return frozenset[Var]().union(*(f.turns for f in outcomes))


def _all(sets: Iterable[frozenset[Event]]) -> frozenset[Event]:
    return _NOTHING.union(*sets)
