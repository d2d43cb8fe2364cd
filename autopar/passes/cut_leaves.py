"""Cut leaves whose update goes element by element into pieces, each with an update of its own.

One large matrix would make one server busy. Where neither its update nor those of its slots look beyond a piece of an
axis, each server keeps a piece, and gets that piece of the gradient (MXNET-MPI, section 2: large keys are cut over all
servers).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import jax

from autopar import jax_compat
from autopar.analysis.batch_rules import SUMMED
from autopar.analysis.local import NotLocal, place_spread, resized_params
from autopar.ir.expand import expand
from autopar.ir.program import Atom, Equation, Literal, Var


@dataclass(frozen=True, slots=True, eq=False)
class LeafPiece:
    """The update of one piece of some leaves.

    Attributes:
      start, stop: Which part of the axis it is.
      states: Of each leaf its piece.
      given: What is read of elsewhere -> the piece of that.
      equations: The update.
      new: Of each leaf its new piece.
    """

    start: int
    stop: int
    states: tuple[Var, ...]
    given: Mapping[Var, Var]
    equations: tuple[Equation, ...]
    new: tuple[Var, ...]


@dataclass(frozen=True, slots=True, eq=False)
class CutLeaves:
    """Some leaves in pieces.

    Attributes:
      axis: Along which they are cut.
      axes: What is read of elsewhere in pieces -> the axis of these.
      pieces: In their order.
    """

    axis: int
    axes: Mapping[Var, int]
    pieces: tuple[LeafPiece, ...]


def cut_leaves(
    states: Sequence[Var], new: Sequence[Atom], equations: Sequence[Equation], elsewhere: Collection[Var], parts: int
) -> CutLeaves | None:
    """Returns leaves in equal pieces along the first axis that allows it; None if none does.

    Args:
      states: The leaves that an update ties together.
      new: Their new values.
      equations: What makes these, in order.
      elsewhere: What may be had in pieces from elsewhere (what workers push).
      parts: How many pieces.
    """
    shape = states[0].shape
    if any(v.shape != shape or jax_compat.is_key(v.dtype) for v in states):
        return None
    for axis, n in enumerate(shape):
        if n and n % parts == 0:
            try:
                return _Cutter(axis, n // parts, parts, elsewhere).cut(states, new, equations)
            except NotLocal:
                continue
    return None


class _Cutter:
    def __init__(self, axis: int, size: int, parts: int, elsewhere: Collection[Var]) -> None:
        self._axis, self._size, self._parts, self._elsewhere = axis, size, parts, elsewhere
        #: What is had in pieces -> the axis of these; and of this what comes from elsewhere, or is cut where it is.
        self._axes: dict[Var, int] = {}
        self._given: dict[Var, int] = {}
        self._whole: dict[Var, int] = {}

    def cut(self, states: Sequence[Var], new: Sequence[Atom], equations: Sequence[Equation]) -> CutLeaves:
        """Raises NotLocal where an equation looks beyond a piece."""
        self._axes = dict.fromkeys(states, self._axis)
        placed: list[tuple[Equation, dict[int, int]]] = []
        for equation in equations:
            spread = {k: self._axes[a] for k, a in enumerate(equation.inputs) if isinstance(a, Var) and a in self._axes}
            if not spread:
                continue  # all servers compute it
            if equation.bodies or equation.primitive is None:
                raise NotLocal(f"{equation.op} of all rows", equation.source)
            found = place_spread(equation, spread, self._parts)
            if found.axis == SUMMED:
                raise NotLocal(f"{equation.op} over all rows", equation.source)
            for k, along in found.needed.items():
                self._need(equation.inputs[k], along, equation)
            spread |= found.needed
            placed.append((equation, spread))
            self._axes.update(dict.fromkeys(equation.outputs, found.axis))
        if not placed:
            raise NotLocal("nothing is computed of the leaves", None)
        values: list[Var] = []
        for atom in new:
            if not isinstance(atom, Var) or self._axes.get(atom, self._axis) != self._axis:
                raise NotLocal("a new value lies otherwise", None)
            if atom not in self._axes:
                self._need(atom, self._axis, None)
            values.append(atom)
        pieces = tuple(self._piece(p, states, values, placed) for p in range(self._parts))
        return CutLeaves(self._axis, self._given, pieces)

    def _need(self, atom: Atom, axis: int, equation: Equation | None) -> None:
        if isinstance(atom, Literal):
            raise NotLocal("a constant of all rows", equation and equation.source)
        self._axes[atom] = axis
        (self._given if atom in self._elsewhere else self._whole)[atom] = axis

    def _piece(
        self, number: int, states: Sequence[Var], new: Sequence[Var], placed: Sequence[tuple[Equation, dict[int, int]]]
    ) -> LeafPiece:
        start = number * self._size
        parts: dict[Atom, Var] = {}

        def part(var: Var) -> Var:
            axis = self._axes[var]
            return parts.setdefault(var, Var(var.type.resized(axis, var.shape[axis] // self._parts)))

        like = placed[-1][0]
        made = [e for var, axis in self._whole.items() for e in sliced(var, axis, number, part(var), like)]
        for equation, spread in placed:
            inputs = tuple(part(a) if k in spread and isinstance(a, Var) else a for k, a in enumerate(equation.inputs))
            outputs = tuple(map(part, equation.outputs))
            along = self._axes[equation.outputs[0]]
            params = resized_params(equation, spread, along, outputs[0].shape[along])
            made.append(dataclasses.replace(equation, inputs=inputs, outputs=outputs, params=params, original=None))
        given = {var: part(var) for var in self._given}
        pieces = tuple(map(part, states))
        return LeafPiece(start, start + self._size, pieces, given, tuple(made), tuple(map(part, new)))


def sliced(var: Var, axis: int, number: int, output: Var, like: Equation) -> list[Equation]:
    """Returns the equations of one of the equal pieces of a value along an axis."""
    size = output.shape[axis]
    return expand(
        lambda x: jax.lax.slice_in_dim(x, number * size, (number + 1) * size, axis=axis), like, (var,), output
    )


def joined(pieces: Sequence[Var], axis: int, output: Var, like: Equation) -> list[Equation]:
    """Returns the equations that put pieces together along an axis."""
    return expand(lambda *xs: jax.lax.concatenate(xs, axis), like, pieces, output)
