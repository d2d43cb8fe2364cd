"""Follows which axis of a value runs over the examples of the batch.

This says how values are best spread over devices: a device with an equal shard of each input along its batch axis has
the same shard of these values along theirs. It is advice only: XLA moves values that are laid out otherwise, at a cost.

Guesses may be followed along with known axes: each is the bit of an integer, and a value's axis rests on those without
which it would have none. An equation that makes no sense with a guess refutes it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field

from autopar.analysis.batch_rules import SUMMED, partners, place_axes
from autopar.analysis.interpreter import Interpreter, union
from autopar.analysis.primitives import ELEMENTWISE
from autopar.ir.program import Atom, Block, Equation, Literal, Var
from autopar.ir.reductions import REDUCTION_PRIMITIVES

#: Variable with a batch axis -> the axis.
BatchAxes = MutableMapping[Var, int]
#: A batch axis, or None, and the guesses that it rests on.
_Found = tuple[int | None, int]
_NOTHING: _Found = (None, 0)


@dataclass(eq=False)
class Guesses:
    """Guesses about the batch axes of inputs, and their fate."""

    uniform: Mapping[Var, int]  #: Axes along which values are constant, which fit every guess (`uniform_axes`).
    bases: MutableMapping[Atom, int]  #: Variable -> the guesses that its axis rests on, if any.
    #: For each contradiction the guesses of which at least one is wrong.
    refuted: list[int] = field(default_factory=list)

    def is_uniform(self, atom: Atom, axis: int) -> bool:
        return is_uniform(self.uniform, atom, axis)

    def refute(self, guesses: int) -> None:
        if guesses:
            self.refuted.append(guesses)


def follow_batch(
    equations: Sequence[Equation], axes: BatchAxes, guesses: Guesses | None = None, *, devices: int
) -> None:
    """Adds to `axes` the variables of the equations, those of their bodies included.

    `devices`: number of devices over which examples are to be spread.
    """
    guesses = guesses or Guesses({}, {})
    walk = _Batch(guesses, devices)
    walk.values.update((var, (axis, guesses.bases.get(var, 0))) for var, axis in axes.items())
    walk.run(equations)
    for var, (axis, base) in walk.values.items():
        if axis is None:
            axes.pop(var, None)
        else:
            axes[var] = axis
        if base:
            guesses.bases[var] = base
        else:
            guesses.bases.pop(var, None)


class _Batch(Interpreter[_Found]):
    """Follows axes, and the guesses that they rest on."""

    def __init__(self, guesses: Guesses, devices: int) -> None:
        super().__init__()
        self.guesses, self.devices = guesses, devices
        #: (loop, carry) whose axis a turn doesn't return -> the guesses for it.
        self.lost: dict[tuple[Equation, int], int] = {}

    def unknown(self, atom: Atom) -> _Found:
        return _NOTHING

    # --- equations without bodies ---

    def plain(self, equation: Equation, operands: Sequence[_Found]) -> Sequence[_Found]:
        if equation.op == "optimization_barrier":
            return operands
        return [self._place(equation, operands)] * len(equation.outputs)

    def _place(self, equation: Equation, operands: Sequence[_Found]) -> _Found:
        axes_of_operands = {k: axis for k, (axis, _) in enumerate(operands) if axis is not None}
        if not axes_of_operands or not equation.outputs:  # a print or the like says nothing
            return _NOTHING
        places = {k: place_axes(equation, k, axis, self.devices) for k, axis in axes_of_operands.items()}
        bases = {k: operands[k][1] for k in axes_of_operands}
        kept = [(p, bases.get(k, 0)) for k, p in places.items() if p is not None and p != SUMMED]
        if any(bases.values()) and not self._make_sense(equation, axes_of_operands, places, bases):
            kept = [(p, base) for p, base in kept if not base]  # known axes stay known
        if not kept:
            return _NOTHING
        if equation.op == "gather":  # ids say more than what they select from
            kept.reverse()
        place = next((p for p, base in kept if not base), kept[0][0])
        along = [base for p, base in kept if p == place]
        return place, union(along) if all(along) else 0

    def _make_sense(
        self,
        equation: Equation,
        axes_of_operands: Mapping[int, int],
        places: Mapping[int, int | None],
        bases: Mapping[int, int],
    ) -> bool:
        """Returns whether operands with guessed axes fit the others; refutes the guesses if not."""
        before = len(self.guesses.refuted)
        for k, axis in axes_of_operands.items():
            if bases[k] and places[k] is None:
                self.guesses.refute(bases[k])
            for j, along in partners(equation, k, axis) if bases[k] else ():
                constant = j not in axes_of_operands and self.guesses.is_uniform(equation.inputs[j], along)
                if axes_of_operands.get(j) != along and not constant:
                    self.guesses.refute(bases[k] | bases.get(j, 0))
        return len(self.guesses.refuted) == before

    # --- loops and branches ---

    def while_loop(self, equation: Equation, operands: Sequence[_Found]) -> Sequence[_Found]:
        # A sweep over a table also has a body, of rows rather than examples.
        return self.followed(equation, operands) if equation.op == "while" else self.unconverged(equation)

    def join(self, values: Sequence[_Found], atoms: Sequence[Atom]) -> _Found:
        """Joins branches, which must agree on an axis; one that is uniform along it agrees with any."""
        axis, base = next((a for a, _ in values if a is not None), None), union(b for _, b in values)
        pairs = zip(values, atoms, strict=True)
        if axis is None or all(a == axis or (a is None and self.guesses.is_uniform(x, axis)) for (a, _), x in pairs):
            return axis, base
        self.guesses.refute(base)
        return _NOTHING

    def inside(self, value: _Found) -> _Found:
        axis, base = value
        return (axis - 1, base) if axis else _NOTHING

    def outside(self, value: _Found) -> _Found:
        axis, base = value
        return None if axis is None else axis + 1, base

    def widen(self, equation: Equation, k: int, carry: _Found, result: _Found) -> _Found:
        """Keeps a carry's axis if each turn returns it there."""
        (axis, base), (returned, other) = carry, result
        if axis == returned:
            return axis, base | other
        if axis is not None:
            self.lost[equation, k] = base | other
        return _NOTHING

    def end(self, carry: _Found, result: _Found) -> _Found:
        return _NOTHING if carry[0] is None else result

    def mark(self) -> int:
        return len(self.guesses.refuted)

    def restore(self, mark: int) -> None:
        del self.guesses.refuted[mark:]  # what was found with carries that aren't kept

    def loop_ended(self, equation: Equation, operands: Sequence[_Found]) -> None:
        taken_apart = equation.inputs[equation.border.fixed :] if equation.op == "scan" else ()
        for axis, base in map(self.value, taken_apart):
            if axis == 0:
                self.guesses.refute(base)
        for key in [key for key in self.lost if key[0] is equation]:
            self.guesses.refute(self.lost.pop(key))


# --- axes along which a value is constant: broadcasts, literals, and elementwise functions of such ---
#
# Random bits count as constant along all axes, which have no meaning before they meet another value.
#: Operations whose results are constant along the operand's constant axes.
_SHAPED = frozenset({"transpose", "squeeze", "reshape", "slice", "dynamic_slice", "split", "unstack"})


def is_uniform(uniform: Mapping[Var, int], atom: Atom, axis: int) -> bool:
    """Returns whether a value is constant along an axis.

    A closed-over array counts as uniform, since it says nothing of its axes.
    """
    return isinstance(atom, Literal) or atom.shape[axis] == 1 or bool(uniform.get(atom, 0) >> axis & 1)


def uniform_axes(block: Block) -> dict[Var, int]:
    """Maps each variable to the axes along which it is constant, as bits; inputs of the block are missing."""
    walk = _Uniform()
    walk.run(block.equations)
    return walk.values


class _Uniform(Interpreter[int]):
    """Values are axes, as bits."""

    def unknown(self, atom: Atom) -> int:
        return _all(atom) if isinstance(atom, Literal) else 0

    def join(self, values: Sequence[int], atoms: Sequence[Atom]) -> int:
        return functools.reduce(operator.and_, values)

    def inside(self, value: int) -> int:
        return value >> 1

    def outside(self, value: int) -> int:
        return value << 1

    def plain(self, equation: Equation, operands: Sequence[int]) -> Sequence[int]:
        return [_axes(equation, operands)] * len(equation.outputs)


def _all(atom: Atom) -> int:
    return (1 << len(atom.shape)) - 1


def _axes(equation: Equation, operands: Sequence[int]) -> int:
    """Maps the constant axes of the operands to those of the results."""
    if not equation.outputs:
        return 0
    out, op = equation.outputs[0], equation.op
    if op == "random_bits":
        return _all(out)
    if op == "iota":
        return _all(out) & ~(1 << equation.params["dimension"])
    if op in ("broadcast_in_dim", "tile"):
        operand = equation.inputs[0]
        constant = operands[0] | union(1 << axis for axis, size in enumerate(operand.shape) if size == 1)
        if op == "tile":
            return constant
        dims = enumerate(equation.params["broadcast_dimensions"])
        return _all(out) & ~union(1 << to for axis, to in dims if not constant >> axis & 1)
    if op in ELEMENTWISE:
        bits = (bits for atom, bits in zip(equation.inputs, operands, strict=True) if atom.shape == out.shape)
        return functools.reduce(operator.and_, bits, _all(out))
    if op == "dot_general":
        return _placed(equation, operands, 0) | _placed(equation, operands, 1)
    if op == "reshape" and operands[0] == _all(equation.inputs[0]):
        return _all(out)
    return _placed(equation, operands, 0) if op in _SHAPED or op in REDUCTION_PRIMITIVES else 0


def _placed(equation: Equation, operands: Sequence[int], k: int) -> int:
    operand, out = equation.inputs[k], equation.outputs[0]
    axes = [axis for axis in range(len(operand.shape)) if operands[k] >> axis & 1]
    places = [(place_axes(equation, k, axis), operand.shape[axis]) for axis in axes]
    return union(1 << at for at, size in places if at is not None and at != SUMMED and out.shape[at] == size)
