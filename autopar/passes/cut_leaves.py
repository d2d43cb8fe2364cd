"""Cut leaves whose update goes element by element into pieces, each with an update of its own.

One large matrix would make one server busy. Where neither its update nor those of its slots look beyond a piece of an
axis, each server keeps a piece, and gets that piece of the gradient (MXNET-MPI, section 2: large keys are cut over all
servers). A table on its touched rows is cut along its columns: each server keeps a part of every row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import jax

from autopar import jax_compat
from autopar.analysis.local import NotLocal, resized_params
from autopar.ir.expand import expand
from autopar.ir.program import Atom, Block, Equation, Var
from autopar.ir.slicing import clone, eliminate_dead
from autopar.passes.place_pieces import Cut, PieceEquation, Placing


@dataclass(frozen=True, slots=True, eq=False)
class LeafPiece:
    """The update of one piece of some leaves.

    Attributes:
      start, stop: Which part of the axis it is.
      states: Of each leaf its piece.
      given: Pieces of what is read of elsewhere.
      slices: The equations that make these where the whole is.
      equations: The update.
      new: Of each leaf its new piece.
    """

    start: int
    stop: int
    states: tuple[Var, ...]
    given: tuple[Var, ...]
    slices: tuple[Equation, ...]
    equations: tuple[Equation, ...]
    new: tuple[Var, ...]


@dataclass(frozen=True, slots=True, eq=False)
class CutLeaves:
    """Some leaves in pieces.

    Attributes:
      axis: Along which they are cut.
      pieces: In their order.
    """

    axis: int
    pieces: tuple[LeafPiece, ...]


def cut_leaves(
    states: Sequence[Var],
    new: Sequence[Atom],
    equations: Sequence[Equation],
    elsewhere: Collection[Var],
    parts: int,
    uncut: Collection[int] = (),
) -> CutLeaves | None:
    """Returns leaves in pieces along an axis that allows it, in equal ones if some axis does; None if none does.

    Args:
      states: The leaves that an update ties together.
      new: Their new values.
      equations: What makes these, in order.
      elsewhere: What may be had in pieces from elsewhere (what workers push).
      parts: How many pieces, at most.
      uncut: Axes along which they stay whole.
    """
    shape = states[0].shape
    if any(v.shape != shape or jax_compat.is_key(v.dtype) for v in states):
        return None
    axes = [axis for axis, n in enumerate(shape) if n > 1 and axis not in uncut]
    equal = [axis for axis in axes if shape[axis] % parts == 0]
    for axis in (*equal, *sorted(set(axes) - {*equal}, key=lambda axis: -shape[axis])):
        try:
            return _cut(Cut(shape[axis], min(parts, shape[axis])), axis, states, new, equations, elsewhere)
        except NotLocal:
            continue
    return None


def joined(pieces: Sequence[Var], axis: int, output: Var, like: Equation) -> list[Equation]:
    """Returns the equations that put pieces together along an axis."""
    return expand(lambda *xs: jax.lax.concatenate(xs, axis), like, pieces, output)


def _cut(
    cut: Cut,
    axis: int,
    states: Sequence[Var],
    new: Sequence[Atom],
    equations: Sequence[Equation],
    elsewhere: Collection[Var],
) -> CutLeaves:
    """Cuts leaves along an axis.

    Raises:
      NotLocal: an equation looks beyond a piece.
    """
    placing = Placing(cut, dict.fromkeys(states, axis), elsewhere)
    placing.follow(equations)
    if not placing.placed:
        raise NotLocal("nothing is computed of the leaves")
    values = [placing.require(atom, axis) for atom in new]
    placing.keep_read()
    pieces = []
    for number in range(cut.count):
        writer = _PieceWriter(placing, number, placing.placed[-1].equation)
        start, stop = cut.span(number, cut.size)
        given = {var: writer.part(var) for var in placing.given}
        pieces.append(
            LeafPiece(
                start=start,
                stop=stop,
                states=tuple(map(writer.part, states)),
                given=tuple(given.values()),
                slices=tuple(e for var in given for e in writer.sliced(var)),
                equations=tuple(writer.equations()),
                new=tuple(map(writer.part, values)),
            )
        )
    return CutLeaves(axis, tuple(pieces))


class _PieceWriter:
    """Writes what one piece computes.

    Args:
      placing: What lies in pieces.
      number: The piece's.
      like: An equation whose line slices have.
    """

    def __init__(self, placing: Placing, number: int, like: Equation) -> None:
        self._placing, self._number, self._like = placing, number, like
        self._parts: dict[Var, Var] = {}

    def part(self, var: Var) -> Var:
        """Returns the piece of a value."""
        if var not in self._parts:
            axis = self._placing.axes[var]
            start, stop = (0, 0) if axis is None else self._span(var, axis)
            self._parts[var] = Var(var.type if axis is None else var.type.resized(axis, stop - start))
        return self._parts[var]

    def sliced(self, var: Var) -> list[Equation]:
        """Returns the equations that take the piece of a value from the whole."""
        axis = self._placing.axes[var]
        assert axis is not None, "it lies in pieces"
        start, stop = self._span(var, axis)
        return expand(
            lambda x: jax.lax.slice_in_dim(x, start, stop, axis=axis), self._like, (var,), output=self.part(var)
        )

    def equations(self) -> list[Equation]:
        """Returns what the piece computes, in order."""
        order = self._placing.order
        placed = sorted(self._placing.placed, key=lambda placed: order[placed.equation])
        return [*(e for var in self._placing.whole for e in self.sliced(var)), *map(self._equation, placed)]

    def _equation(self, placed: PieceEquation) -> Equation:
        equation, along = placed.equation, placed.along
        inputs = tuple(self._part(a) if k in along else a for k, a in enumerate(equation.inputs))
        outputs = tuple(map(self.part, equation.outputs))
        params, axis = equation.params, self._placing.axes[equation.outputs[0]]
        if axis is not None:
            spread = {k: a for k, a in along.items() if a is not None}
            params = resized_params(equation, spread, axis, outputs[0].shape[axis])
        bodies = () if placed.body is None else (self._body(equation.bodies[0], placed.body),)
        new = {"inputs": inputs, "outputs": outputs, "params": params, "bodies": bodies}
        return dataclasses.replace(equation, **new, original=None)

    def _body(self, body: Block, placing: Placing) -> Block:
        writer = _PieceWriter(placing, self._number, self._like)
        inputs = tuple(writer.part(v) if v in placing.axes else v for v in body.inputs)
        equations = (*dict.fromkeys(placing.others.values()), *writer.equations())
        outputs = tuple(map(writer._part, body.outputs))
        return clone(eliminate_dead(Block(inputs, equations, outputs))[0])[0]

    def _part(self, atom: Atom) -> Atom:
        return self.part(atom) if isinstance(atom, Var) else atom

    def _span(self, var: Var, axis: int) -> tuple[int, int]:
        return self._placing.cut.span(self._number, var.shape[axis])
