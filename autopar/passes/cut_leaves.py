"""Cuts leaves whose update is elementwise into pieces, each with an update of its own.

One large matrix would keep one server busy. If neither its update nor those of its slots look beyond a piece of an
axis, each server keeps a piece, and gets that piece of the gradient (MXNET-MPI, section 2: large keys are cut over all
servers). A table on its touched rows is cut along its columns: each server keeps a part of every row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import jax

from autopar import jax_compat
from autopar.analysis.batch import SUMMED
from autopar.analysis.local import Followed, follow_spread, resized_params
from autopar.analysis.primitives import ELEMENTWISE
from autopar.ir.local import NotLocal
from autopar.ir.operations import split
from autopar.ir.program import Atom, Block, Equation, Literal, Var
from autopar.ir.slicing import clone, eliminate_dead, needed_equations
from autopar.ir.writer import expand


@dataclass(frozen=True, slots=True, eq=False)
class LeafPiece:
    """The update of one piece of some leaves."""

    start: int  #: The range along the axis.
    stop: int
    states: tuple[Var, ...]  #: A piece of each leaf.
    given: tuple[Var, ...]  #: Pieces of values from elsewhere.
    slices: tuple[Equation, ...]  #: The equations that slice these from the whole values.
    equations: tuple[Equation, ...]  #: The update.
    new: tuple[Var, ...]  #: A new piece of each leaf.


@dataclass(frozen=True, slots=True, eq=False)
class CutLeaves:
    """Leaves in pieces, in order."""

    axis: int  #: The axis along which they are cut.
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
      equations: The update, in order.
      elsewhere: Values that may come in pieces from elsewhere (those that workers push).
      parts: Most pieces.
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
    """Returns the equations that concatenate pieces along an axis."""
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
    """Writes the equations of one piece.

    Args:
      placing: The values in pieces.
      number: The piece's number.
      like: An equation whose line slices have.
    """

    def __init__(self, placing: Placing, number: int, like: Equation) -> None:
        self._placing, self._number, self._like = placing, number, like
        self._parts: dict[Var, Var] = {}

    def part(self, var: Var) -> Var:
        if var not in self._parts:
            axis = self._placing.axes[var]
            start, stop = (0, 0) if axis is None else self._span(var, axis)
            self._parts[var] = Var(var.type if axis is None else var.type.resized(axis, stop - start))
        return self._parts[var]

    def sliced(self, var: Var) -> list[Equation]:
        """Returns the equations that slice the piece of a value from the whole."""
        axis = self._placing.axes[var]
        assert axis is not None, "it lies in pieces"
        start, stop = self._span(var, axis)
        return expand(
            lambda x: jax.lax.slice_in_dim(x, start, stop, axis=axis), self._like, (var,), output=self.part(var)
        )

    def equations(self) -> list[Equation]:
        """Returns the equations of the piece, in order."""
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


# --- the part of a block that can be computed on pieces of its values ---
#
# There are rules for JAX's equations (`analysis.local`) and for some operations on rows; others are refused.
#: Operation on rows -> operands that are cut as the result is.
_ON_ROWS: Mapping[str, tuple[str, ...]] = {
    "ap.pull": ("leaf",),
    "ap.padding": ("rows",),
    "ap.densify": ("rows",),
    "ap.commit": ("leaf", "rows"),
    "ap.fill": ("leaf", "rows"),
}


@dataclass(frozen=True, slots=True)
class Cut:
    """The indices at which an axis of `size` is cut, into `count` pieces of one size, or nearly so."""

    size: int
    count: int

    @property
    def is_equal(self) -> bool:
        return self.size % self.count == 0

    def fits(self, size: int) -> bool:
        """Returns whether an axis of another size can be cut alike."""
        ends = (self.size * n // self.count for n in range(self.count))
        return all(end * size % self.size == 0 for end in ends)

    def span(self, number: int, size: int) -> tuple[int, int]:
        """Returns where a piece of such an axis begins and ends."""
        start, stop = (self.size * n // self.count * size // self.size for n in (number, number + 1))
        return start, stop


@dataclass(frozen=True, slots=True, eq=False)
class PieceEquation:
    """An equation of the program that pieces compute."""

    equation: Equation
    along: Mapping[int, int | None]  #: Operand in pieces -> its axis.
    body: Placing | None = None  #: The values in pieces of its body, if it has one.


@dataclass(eq=False)
class Placing:
    """Finds which values of a block can be had in pieces."""

    cut: Cut
    #: Value in pieces -> their axis; None: each piece has a value of its own, of the same shape.
    axes: dict[Var, int | None]
    elsewhere: Collection[Var] = ()  #: Values that may come in pieces from elsewhere.
    #: Values in pieces that come from elsewhere; `whole`: those that are whole, and sliced here.
    given: list[Var] = field(default_factory=list)
    whole: list[Var] = field(default_factory=list)
    placed: list[PieceEquation] = field(default_factory=list)  #: The equations that pieces compute.
    #: Results of equations that all servers compute -> the equation.
    others: dict[Var, Equation] = field(default_factory=dict)
    order: dict[Equation, int] = field(default_factory=dict)  #: The position of each equation.

    def follow(self, equations: Sequence[Equation]) -> None:
        """Raises NotLocal where an equation looks beyond a piece."""
        self.order = {equation: n for n, equation in enumerate(equations)}
        for equation in equations:
            along = {k: self.axes[a] for k, a in enumerate(equation.inputs) if isinstance(a, Var) and a in self.axes}
            if not along:
                self.others.update(dict.fromkeys(equation.outputs, equation))
            elif equation.op == "ap.changes":
                self._changes(equation, along)
            elif equation.op == "ap.sweep":
                self._sweep(equation, along)
            elif equation.op in _ON_ROWS:
                groups = _operands(equation)
                rows = [k for name in _ON_ROWS[equation.op] for k in groups[name]]
                axis = self._of_rows(equation, along, rows, equation.params["axis"])
                self._cut_results(equation, {**along, **dict.fromkeys(rows, axis)}, [axis])
            else:
                found = self._found(equation, along)
                for k, axis in found.needed.items():
                    self.require(equation.inputs[k], axis)
                self._cut_results(equation, {**along, **found.needed}, [found.axis] * len(equation.outputs))

    def require(self, atom: Atom, axis: int) -> Var:
        """Returns a value that is needed in pieces along an axis.

        Raises:
          NotLocal: it can't be cut so.
        """
        if isinstance(atom, Literal):
            raise NotLocal("a constant of all rows")
        if atom not in self.axes:
            self._name(atom, axis)
            if atom in self.elsewhere:
                self.given.append(atom)
            elif not self._compute(atom, axis):
                self.whole.append(atom)
        if self.axes[atom] != axis:
            raise NotLocal("a value lies otherwise")
        return atom

    def keep_read(self) -> None:
        """Slices given values here if they are whole anyway, because a sum over them is computed."""
        read = [a for p in self.placed for k, a in enumerate(p.equation.inputs) if k not in p.along]
        needed = needed_equations(dict.fromkeys(self.others.values()), [*read, *self.whole])
        whole = {*read, *(a for equation in needed for a in equation.inputs)}
        self.whole += [v for v in self.given if v in whole]
        self.given = [v for v in self.given if v not in whole]

    def _compute(self, var: Var, axis: int) -> bool:
        """Lets pieces compute an elementwise value from pieces of its operands; returns whether they can."""
        equation = self.others.get(var)
        if equation is None or equation.op not in ELEMENTWISE:
            return False
        large = {k: axis for k, a in enumerate(equation.inputs) if a.shape == var.shape}
        if not large or any(isinstance(equation.inputs[k], Literal) for k in large):
            return False
        if any(self.axes.get(a, axis) != axis for a in equation.inputs if isinstance(a, Var)):
            return False
        for k in large:
            self.require(equation.inputs[k], axis)
        self.placed.append(PieceEquation(equation, large))
        return True

    def _found(self, equation: Equation, along: Mapping[int, int | None]) -> Followed:
        """Cuts the results of an equation without bodies, from operands in pieces."""
        op = equation.op
        spread = {k: axis for k, axis in along.items() if axis is not None}
        is_known = equation.primitive is not None and not equation.bodies and len(spread) == len(along)
        if not is_known or (op == "conv_general_dilated" and not self.cut.is_equal):
            raise NotLocal(f"{op} of all rows", equation.source)
        found = follow_spread(equation, spread, self.cut.count if self.cut.is_equal else 1)
        if found.axis == SUMMED:
            raise NotLocal(f"{op} over all rows", equation.source)
        return found

    def _of_rows(
        self, equation: Equation, along: Mapping[int, int | None], operands: Sequence[int], row_axis: int
    ) -> int:
        """Finds the axis along which some operands are cut, as all of them then must be; it can't be the rows'."""
        axes = {along[k] for k in operands if k in along}
        axis = axes.pop() if len(axes) == 1 else None
        if axis is None or axis == row_axis:
            raise NotLocal(f"{equation.op} of all rows", equation.source)
        for k in operands:
            self.require(equation.inputs[k], axis)
        return axis

    def _changes(self, equation: Equation, along: Mapping[int, int | None]) -> None:
        """Checks each piece for changes of untouched rows."""
        groups, all_ = _operands(equation), dict(along)
        for old, new, row_axis in zip(groups["old"], groups["new"], equation.params["axes"], strict=True):
            if old in along or new in along:
                all_.update(dict.fromkeys((old, new), self._of_rows(equation, along, (old, new), row_axis)))
        for k, (_, row_axis) in zip(groups["constant"], equation.params["constants"], strict=True):
            if k in along:
                self._of_rows(equation, along, (k,), row_axis)
        self._cut_results(equation, all_, [None])

    def _sweep(self, equation: Equation, along: Mapping[int, int | None]) -> None:
        """Updates all rows of each piece, if need be."""
        groups, (body,), params = _operands(equation), equation.bodies, equation.params
        axes = [self._of_rows(equation, along, (k,), a) for k, a in zip(groups["leaves"], params["axes"], strict=True)]
        for k, row_axis in zip(groups["read"], params["read_axes"], strict=True):
            if k in along:
                self._of_rows(equation, along, (k,), row_axis)
        inside = Placing(self.cut, {body.inputs[k]: axis for k, axis in along.items() if k not in groups["needed"]})
        inside.follow(body.equations)
        for atom, axis in zip(body.outputs, axes, strict=True):
            inside.require(atom, axis)
        self._cut_results(equation, along, axes, inside)

    def _cut_results(
        self,
        equation: Equation,
        along: Mapping[int, int | None],
        axes: Sequence[int | None],
        body: Placing | None = None,
    ) -> None:
        for var, axis in zip(equation.outputs, axes, strict=True):
            self._name(var, axis)
        self.placed.append(PieceEquation(equation, along, body))

    def _name(self, var: Var, axis: int | None) -> None:
        if axis is not None and not self.cut.fits(var.shape[axis]):
            raise NotLocal(f"an axis of {var.shape[axis]} isn't cut at the same places")
        self.axes[var] = axis


def _operands(equation: Equation) -> dict[str, tuple[int, ...]]:
    return split(equation.op, equation.params, range(len(equation.inputs)))
