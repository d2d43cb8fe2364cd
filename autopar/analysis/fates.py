"""Whether untouched rows can differ from each other where a number of the step isn't finite.

A row may hide by a predicate of its own (its number, what it holds) what a NaN or an infinity does to others. Most
steps have no such predicate, or one that the same NaN settles for all (`jnp.where(sum_of_squares > 0, ...)`): there
one row tells what all are. An abstract interpretation of the row equations: an *event* is that a number of the step
isn't finite, or is zero, or that what a loop carries has been made NaN by such a number in an earlier turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autopar import jax_compat
from autopar.analysis.rules import ALIGNED
from autopar.analysis.rules.elementwise import ELEMENTWISE
from autopar.ir.program import Atom, Block, Equation, Literal, Var
from autopar.ir.rowspace import Const, Free, Row, Value

#: A variable, and what is the matter with it.
Event = tuple[Var, str]
_NOT_FINITE, _ZERO, _NAN, _CARRIED = "not finite", "zero", "NaN", "carried"
#: NaN in, NaN out; of finite operands finite (a row by itself is not the step's doing).
_MOVES = frozenset({"broadcast_in_dim", "reshape", "transpose", "squeeze", "copy", "copy_p", "convert_element_type"})
_KEEPS_NAN = frozenset(
    "mul div add add_any sub neg abs sign sqrt rsqrt cbrt square integer_pow exp exp2 expm1 log log1p tanh sin cos "
    "logistic floor ceil round max min clamp copy copy_p stop_gradient reduce_precision convert_element_type "
    "broadcast_in_dim reshape transpose squeeze reduce_sum reduce_max reduce_min reduce_prod cumsum dot_general".split()
)
_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge", "is_finite"})
_NOTHING: frozenset[Event] = frozenset()


@dataclass(frozen=True, slots=True)
class Fate:
    """Of a value at untouched rows.

    Attributes:
      own: Whether rows may differ from each other at all.
      zero: Whether it is 0 everywhere unless an event happens; `constant`: whether it is a constant.
      events: What may happen to it.
      nan: Of these, which make all of it NaN.
      even: Which leave all rows finite, or make all NaN, at each place of a row.
      alike: Which leave all rows like each other.
      zero_or_nan: Which leave all of it 0, or make all of it NaN.
      turns: Rows that loops carry, or that are those of a turn (inputs of loops' bodies), of which it is made.
    """

    own: bool = False
    constant: bool = False
    zero: bool = False
    events: frozenset[Event] = _NOTHING
    nan: frozenset[Event] = _NOTHING
    even: frozenset[Event] = _NOTHING
    alike: frozenset[Event] = _NOTHING
    zero_or_nan: frozenset[Event] = _NOTHING
    turns: frozenset[Var] = frozenset()

    @property
    def may_differ(self) -> bool:
        """Whether an event may make some untouched rows something else than others."""
        return self.own and not (self.constant and self.events <= self.alike)

    def is_even(self, event: Event) -> bool:
        return event not in self.events or event in self.even

    def is_alike(self, event: Event) -> bool:
        """Whether rows are like each other after an event."""
        return not self.own or event in self.alike or (self.constant and event not in self.events)


@dataclass(eq=False)
class Fates:
    """The fates of all row values of a block, and of those in it.

    `values`, `roles`: what analysis has found (`ir.rowspace.RowFacts`).
    """

    block: Block
    values: Mapping[Var, Value]
    roles: Mapping[Equation, str]
    _found: dict[Var, Fate] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._block(self.block)

    def of(self, sources: Sequence[tuple[Atom, int]], product: Equation | None = None) -> Fate:
        """That of a row value, given where its rows lie, or of the product of two, row by row."""
        fates = [self._fate(atom, axis) for atom, axis in sources]
        return fates[0] if product is None else replace(_computed(product, fates), constant=True, zero=True)

    def keeps_zero(self, sources: Sequence[tuple[Atom, int]]) -> bool:
        """Whether a product of two row values, one of which is zero, is 0 or NaN in all rows whatever happens."""
        fates = [self._fate(atom, axis) for atom, axis in sources]
        pairs = ((one, other) for one, other in (fates, fates[::-1]) if one.zero)
        return any(one.events <= one.nan and other.events <= one.nan | other.even for one, other in pairs)

    def _fate(self, atom: Atom, axis: int | None) -> Fate:
        """That of an operand whose rows lie along `axis`, if it has rows."""
        if isinstance(atom, Literal):
            return Fate(own=atom.shape != () and axis is not None)
        if atom.shape == () and atom in self._found:
            return self._found[atom]
        value = None if atom.shape == () else self.values.get(atom)
        if isinstance(value, (Row, Free)) and atom in self._found:
            found = self._found[atom]
            if isinstance(value, Row) or axis is None:
                return found
            return replace(found, own=axis not in value.axes - {value.index_axis})
        if isinstance(value, Row):
            return Fate(own=True)  # a leaf
        own = axis is not None and atom.shape != ()
        return Fate(own=own, events=_NOTHING if atom.dtype == np.bool_ else frozenset({(atom, _NOT_FINITE)}))

    # --- equations ---

    def _block(self, block: Block) -> None:
        for equation in block.equations:
            if equation.op == "scan":
                self._loop(equation)
            elif equation.op in ("remat", "cond"):
                self._branches(equation)
            else:
                self._equation(equation)

    def _keep(self, var: Var, fate: Fate) -> None:
        value = self.values.get(var)
        if isinstance(value, (Row, Free)) and var.shape != ():
            off = value.off if isinstance(value.off, Const) else None
            zero = off is not None and off.is_zero
            if zero and fate.events <= fate.zero_or_nan and not fate.events <= fate.nan:
                event = frozenset({(var, _NAN)})
                fate = Fate(fate.own, True, True, event, event, event, event, event, fate.turns)
            self._found[var] = replace(fate, constant=off is not None, zero=zero)
        elif var.shape == () and not fate.events and not fate.own:
            self._found[var] = fate

    def _equation(self, equation: Equation) -> None:
        for k, var in enumerate(equation.outputs):
            value = self.values.get(var)
            if isinstance(value, Free) or (var.shape == () and equation.op in ELEMENTWISE):
                moved = equation.op in _MOVES
                events = _all(self._fate(a, None).events for a in equation.inputs)
                self._keep(var, Fate(events=events if moved or not events else frozenset({(var, _NOT_FINITE)})))
            elif isinstance(value, Row):
                self._keep(var, self._row(equation, k, value.axis))

    def _row(self, equation: Equation, k: int, axis: int) -> Fate:
        if self.roles.get(equation) == "push":
            return (
                self._fate(equation.inputs[0], axis) if equation.op != "pad" else self._fate(equation.inputs[1], None)
            )
        if equation.op == "optimization_barrier":
            return self._fate(equation.inputs[k], axis)
        aligned = equation.op in ALIGNED
        operands = [self._fate(a, axis if aligned else None) for a in equation.inputs]
        if equation.op == "select_n":
            return _chosen(operands[0], operands[1:])
        return _computed(equation, operands)

    def _branches(self, equation: Equation) -> None:
        """Which branch is taken is the same for all rows."""
        operands = equation.inputs[len(equation.inputs) - len(equation.bodies[0].inputs) :]
        for body in equation.bodies:
            for var, atom in zip(body.inputs, operands, strict=True):
                self._give(var, atom, 0)
            self._block(body)
        for k, out in enumerate(equation.outputs):
            value = self.values.get(out)
            if isinstance(value, (Row, Free)):
                axis = value.axis if isinstance(value, Row) else None
                self._keep(out, _chosen(Fate(), [self._fate(body.outputs[k], axis) for body in equation.bodies]))

    def _give(self, var: Var, atom: Atom, stacked: int) -> None:
        """An input of a nested block is what is given for it."""
        value = self.values.get(var)
        if isinstance(value, Row):
            self._keep(var, self._fate(atom, value.axis + stacked))
        elif isinstance(value, Free):
            self._keep(var, self._fate(atom, None))

    def _loop(self, equation: Equation) -> None:
        """Carries are taken to be even, or all NaN if something has happened, until a turn shows that they aren't."""
        consts, count = equation.params["num_consts"], equation.params["num_carry"]
        (body,) = equation.bodies
        carries = {k: r.axis for k in range(count) if isinstance(r := self.values.get(body.inputs[consts + k]), Row)}
        claims = dict.fromkeys(carries, 2)
        while True:
            for k, (var, atom) in enumerate(zip(body.inputs, equation.inputs, strict=True)):
                self._give(var, atom, int(k >= consts + count))
                if k >= consts and isinstance(self.values.get(var), Free):
                    self._keep(var, Fate(events=frozenset({(var, _NOT_FINITE)})))
                if k >= consts + count and isinstance(self.values.get(var), Row):
                    found = self._found[var]
                    self._found[var] = replace(found, turns=found.turns | {var})
            for k, claim in claims.items():
                var = body.inputs[consts + k]
                self._keep(var, _carried(var, claim, True, frozenset({var})))
            self._block(body)
            held = {k: min(claim, self._holds(equation, k, carries[k])) for k, claim in claims.items()}
            if held == claims:
                break
            claims = held
        for k, out in enumerate(equation.outputs):
            if isinstance(self.values.get(out), (Row, Free)):
                self._keep(out, self._after(equation, k, claims.get(k)))

    def _after(self, equation: Equation, k: int, claim: int | None) -> Fate:
        """A result of a loop: a carry, of which this is claimed, or what was stacked, NaN at some turns at most."""
        (body,) = equation.bodies
        out = equation.outputs[k]
        value = self.values.get(out)
        axis = value.axis - (claim is None) if isinstance(value, Row) else None
        last = self._fate(body.outputs[k], axis)
        first = Fate() if claim is None else self._fate(equation.inputs[equation.params["num_consts"] + k], axis)
        if claim is None:
            claim = int(last.events <= last.even) if last.events else 2
        return _carried(out, claim, last.own or first.own, (first.turns | last.turns) - set(body.inputs))

    def _holds(self, equation: Equation, k: int, axis: int) -> int:
        """What can be claimed of a carry after a turn, and before the first."""
        consts, body = equation.params["num_consts"], equation.bodies[0]
        fates = self._fate(equation.inputs[consts + k], axis), self._fate(body.outputs[k], axis)
        if all(f.events <= f.nan for f in fates):
            return 2
        return int(all(f.events <= f.even for f in fates))


def _carried(var: Var, claim: int, own: bool, turns: frozenset[Var]) -> Fate:
    """What has come about in some turns: all NaN if anything (2), even (1), or nothing that can be said."""
    event = frozenset({(var, _CARRIED)})
    nan, even = event if claim > 1 else _NOTHING, event if claim else _NOTHING
    return Fate(own, events=event, nan=nan, even=even, alike=nan, turns=turns)


def _computed(equation: Equation, operands: Sequence[Fate]) -> Fate:
    """Row by row from operands."""
    op = equation.op
    keeps_nan = op in _KEEPS_NAN and all(jax_compat.is_float(a.dtype) for a in (*equation.inputs, *equation.outputs))
    may_be_poles = operands[1:] if op == "div" else () if keeps_nan else operands
    zeros = frozenset((var, _ZERO) for o in may_be_poles for var, what in o.events if what == _NOT_FINITE)
    events = _all(o.events for o in operands) | zeros
    own = any(o.own for o in operands)
    turns = _turns(operands)
    alike = frozenset(e for e in events if all(o.is_alike(e) for o in operands))
    if not keeps_nan:
        settled = _all(o.nan for o in operands) if op in _COMPARISONS else _NOTHING
        return Fate(own, events=events, alike=alike | settled, turns=turns)
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
    return Fate(own, False, False, events, nan, even | nan, alike | nan, zero_or_nan | nan, turns)


def _times_zero(op: str, zero: Fate, other: Fate) -> tuple[frozenset[Event], frozenset[Event]]:
    """Events that make zero times (or by) something NaN, and those that make it 0 in all rows or NaN in all of them."""
    free = frozenset(e for e in other.events if e not in zero.events)
    if other.own:
        return _NOTHING, free & other.even
    numbers = frozenset(e for e in free if e[1] == _NOT_FINITE)
    free |= frozenset((var, _ZERO) for var, _ in numbers) if op == "div" else _NOTHING
    bad = _ZERO if op == "div" else _NOT_FINITE
    return frozenset(e for e in free if e[1] == bad and e[0].shape == () and op != "dot_general"), free


def _is_of_all(event: Event) -> bool:
    """Whether an event concerns all places of a row."""
    var, what = event
    return var.shape == () or what in (_NAN, _CARRIED)


def _chosen(which: Fate, cases: Sequence[Fate]) -> Fate:
    """One of some cases, for each row."""
    events = which.events | _all(c.events for c in cases)
    nan = frozenset(e for e in events if all(e in c.nan for c in cases))
    alike = frozenset(e for e in events if which.is_alike(e) and all(c.is_alike(e) for c in cases))
    untouched = frozenset(e for e in events if not any(e in c.events for c in cases))
    even = frozenset(e for e in events if which.is_alike(e) and all(c.is_even(e) for c in cases))
    own = which.own or any(c.own for c in cases)
    zeros = all(c.zero for c in cases)
    settled = frozenset(e for e in events if zeros and all(e not in c.events or e in c.zero_or_nan for c in cases))
    zero_or_nan, turns = nan | (settled & alike), _turns((which, *cases))
    return Fate(own, False, False, events, nan, even | nan | untouched, alike | nan, zero_or_nan, turns)


def _turns(fates: Iterable[Fate]) -> frozenset[Var]:
    return frozenset[Var]().union(*(f.turns for f in fates))


def _all(sets: Iterable[frozenset[Event]]) -> frozenset[Event]:
    return _NOTHING.union(*sets)
