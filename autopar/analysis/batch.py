"""Which axis of a value runs over the examples of the batch, as far as it can be followed.

This says how values are best spread over devices: a device that holds an equal share of each input along its batch
axis holds the same share of these values along theirs. It is never more than advice: whatever is laid out otherwise
is moved by XLA, at a cost.

Guesses may be followed along with what is known: each is the bit of an integer, and a value's axis rests on those
without which it would have none. An equation that a guess makes no sense of refutes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field

from autopar.analysis.batch_rules import SUMMED, partners, place
from autopar.analysis.uniform import is_uniform
from autopar.ir.program import Atom, Block, Equation, Var

#: Variable -> its batch axis; variables without one are missing.
BatchAxes = MutableMapping[Var, int]
#: A batch axis, or None, and the guesses that it rests on.
_Found = tuple[int | None, int]
_NOTHING: _Found = (None, 0)


@dataclass(eq=False)
class Guesses:
    """Guesses about the batch axes of inputs, and what becomes of them.

    Attributes:
      uniform: Along which axes values are constant (`analysis.uniform`): those fit every guess.
      bases: Variable -> the guesses that its axis rests on; missing if it is known without any.
      refuted: For each contradiction the guesses of which one at least is wrong.
    """

    uniform: Mapping[Var, int]
    bases: MutableMapping[Atom, int]
    refuted: list[int] = field(default_factory=list)

    def is_uniform(self, atom: Atom, axis: int) -> bool:
        return is_uniform(self.uniform, atom, axis)

    def refute(self, guesses: int) -> None:
        if guesses:
            self.refuted.append(guesses)


def follow_batch(
    equations: Sequence[Equation], axes: BatchAxes, guesses: Guesses | None = None, *, devices: int
) -> None:
    """Add what the equations define, those of their bodies included.

    Args:
      equations: In an order that can be run.
      axes: What is known, and guessed, of the variables that they read.
      guesses: What is guessed of it.
      devices: Over how many devices the examples are to be spread.
    """
    _Flow(axes, guesses or Guesses({}, {}), devices).follow(equations)


@dataclass(eq=False, slots=True)
class _Flow:
    axes: BatchAxes
    guesses: Guesses
    devices: int

    def follow(self, equations: Sequence[Equation]) -> None:
        for equation in equations:
            if equation.bodies:
                found = self._nested(equation)
            elif equation.op == "optimization_barrier":
                found = [self._read(a) for a in equation.inputs]
            elif equation.outputs:  # else it is a print or the like, which says nothing
                found = [self._plain(equation)] * len(equation.outputs)
            else:
                continue
            for var, one in zip(equation.outputs, found, strict=True):
                self._write(var, one)

    def _read(self, atom: Atom) -> _Found:
        if not isinstance(atom, Var) or atom not in self.axes:
            return _NOTHING
        return self.axes[atom], self.guesses.bases.get(atom, 0)

    def _write(self, var: Var, found: _Found) -> None:
        axis, base = found
        if axis is None:
            self.axes.pop(var, None)
        else:
            self.axes[var] = axis
        if base:
            self.guesses.bases[var] = base
        else:
            self.guesses.bases.pop(var, None)

    # --- equations without bodies ---

    def _plain(self, equation: Equation) -> _Found:
        given = {k: self.axes[a] for k, a in enumerate(equation.inputs) if isinstance(a, Var) and a in self.axes}
        if not given:
            return _NOTHING
        places = {k: place(equation, k, axis, self.devices) for k, axis in given.items()}
        bases = {k: self.guesses.bases.get(equation.inputs[k], 0) for k in given} if self.guesses.bases else {}
        kept = [(p, bases.get(k, 0)) for k, p in places.items() if p is not None and p != SUMMED]
        if any(bases.values()) and not self._make_sense(equation, given, places, bases):
            kept = [(p, base) for p, base in kept if not base]  # what is known is known all the same
        if not kept:
            return _NOTHING
        if equation.op == "gather":  # ids say more than what they select from
            kept.reverse()
        found = next((p for p, base in kept if not base), kept[0][0])
        along = [base for p, base in kept if p == found]
        return found, _union(along) if all(along) else 0

    def _make_sense(
        self,
        equation: Equation,
        given: Mapping[int, int],
        places: Mapping[int, int | None],
        bases: Mapping[int, int],
    ) -> bool:
        """Whether operands whose axes are guesses go together with the others; refutes the guesses if not."""
        before = len(self.guesses.refuted)
        for k, axis in given.items():
            if bases[k] and places[k] is None:
                self.guesses.refute(bases[k])
            for j, along in partners(equation, k, axis) if bases[k] else ():
                constant = j not in given and self.guesses.is_uniform(equation.inputs[j], along)
                if given.get(j) != along and not constant:
                    self.guesses.refute(bases[k] | bases.get(j, 0))
        return len(self.guesses.refuted) == before

    # --- loops and branches ---

    def _nested(self, equation: Equation) -> Sequence[_Found]:
        given = [self._read(a) for a in equation.inputs]
        if equation.op == "scan":
            return self._scan(equation, given)
        if equation.op in ("remat", "cond"):
            return self._branches(equation, given[len(given) - len(equation.bodies[0].inputs) :])
        self.guesses.refute(_union(base for _, base in given))
        return [_NOTHING] * len(equation.outputs)

    def _body(self, body: Block, given: Sequence[_Found]) -> list[_Found]:
        for var, found in zip(body.inputs, given, strict=True):
            self._write(var, found)
        self.follow(body.equations)
        return [self._read(a) for a in body.outputs]

    def _branches(self, equation: Equation, given: Sequence[_Found]) -> list[_Found]:
        """Branches agree on an axis, or don't care for it."""
        returned = zip(*(self._body(body, given) for body in equation.bodies), strict=True)
        atoms = zip(*(body.outputs for body in equation.bodies), strict=True)
        results: list[_Found] = []
        for found, outputs in zip(returned, atoms, strict=True):
            axis, base = next((a for a, _ in found if a is not None), None), _union(b for _, b in found)
            pairs = zip(found, outputs, strict=True)
            agree = axis is None or all(
                a == axis or (a is None and self.guesses.is_uniform(x, axis)) for (a, _), x in pairs
            )
            if not agree:
                self.guesses.refute(base)
            results.append((axis, base) if agree else _NOTHING)
        return results

    def _scan(self, equation: Equation, given: Sequence[_Found]) -> list[_Found]:
        """A carry keeps its axis if each iteration returns it there; sequences have one axis more outside."""
        consts, carry = equation.params["num_consts"], equation.params["num_carry"]
        sequences = [(axis - 1, base) if axis else _NOTHING for axis, base in given[consts + carry :]]
        lost = [base for axis, base in given[consts + carry :] if axis == 0]
        carries = list(given[consts : consts + carry])
        before = len(self.guesses.refuted)
        while True:
            del self.guesses.refuted[before:]  # what was found with carries that aren't kept
            returned = self._body(equation.bodies[0], [*given[:consts], *carries, *sequences])
            kept = [(a, m | n) if a == b else _NOTHING for (a, m), (b, n) in zip(carries, returned, strict=False)]
            if kept == carries:
                break
            lost += [m | n for (a, m), (b, n) in zip(carries, returned, strict=False) if a != b and a is not None]
            carries = kept
        for base in lost:
            self.guesses.refute(base)
        ends = [_NOTHING if a is None else end for (a, _), end in zip(carries, returned, strict=False)]
        return [*ends, *((None if a is None else a + 1, base) for a, base in returned[carry:])]


def _union(guesses: Iterable[int]) -> int:
    total = 0
    for some in guesses:
        total |= some
    return total
