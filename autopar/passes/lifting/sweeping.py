"""What the step does to rows that it doesn't touch, where that isn't nothing: see `lift_rows`.

changes -> whether it isn't
sweep   -> if so, the off-row form of all rows, in place, block by block
fill    -> if not, all rows of a leaf that is constant off the touched ones
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.ir.program import ArrayType, Atom, Block, Equation, Var
from autopar.ir.rowspace import Const, Off, Row, RowSpace
from autopar.ir.slicing import eliminate_dead
from autopar.passes.lifting.off_rows import off_scope
from autopar.passes.lifting.scope import Scope, UntouchedRows
from autopar.passes.lifting.suspects import find_suspects


@dataclass(frozen=True, slots=True, eq=False)
class OffForm:
    """What becomes of rows that the step doesn't touch.

    Attributes:
      body: From a route to some rows, `leaves` and `frontier` to what some values are at these rows.
      leaves: Which leaves it takes.
      frontier: Dense values of the step that it reads.
      finite, nonzero: What else must be finite, and must not be zero, for untouched rows to stay as they are.
    """

    body: Block
    leaves: tuple[int, ...]
    frontier: tuple[Atom, ...]
    finite: tuple[Atom, ...]
    nonzero: tuple[Atom, ...]

    @staticmethod
    def of(
        scope: Scope, space: RowSpace, inputs: Sequence[Var], targets: Sequence[tuple[Atom, int]], first: Sequence[int]
    ) -> OffForm:
        """The off-row form of some values, each with its row axis; `first` are leaves that it takes in any case."""
        family = space.family
        off, inner = off_scope(scope, space, inputs, space.leaves)
        chunk = off.routes[family]
        assert isinstance(chunk, Var), "the rows of a round are an input"
        ran = off.run([a for a, _ in targets if isinstance(a, Var)], family)
        rows = tuple(off.at_rows(atom, axis, family) for atom, axis in targets)
        assert all(key[0] == "new" for key in off.imports), "the outermost off-row form reads the first rewriting only"
        body, _ = eliminate_dead(Block((chunk, *inner.values(), *off.imports.values()), tuple(off.equations), rows))
        used = {a for e in body.equations for a in e.inputs}
        leaves = (*first, *(k for k, v in inner.items() if k not in first and v in used))
        body = Block((chunk, *(inner[k] for k in leaves), *off.imports.values()), body.equations, body.outputs)
        finite, nonzero = find_suspects(scope, ran, family)
        return OffForm(body, leaves, tuple(key[1] for key in off.imports), tuple(finite), tuple(nonzero))


def changes(
    scope: Scope,
    form: OffForm,
    family: int,
    kept: Iterable[tuple[Atom, Atom, int]],
    constant: Iterable[tuple[Atom, Any, int]],
    exceeded: Atom | None = None,
    first: Sequence[Atom] = (),
) -> Var:
    """Whether untouched rows become something else than what analysis has found.

    Args:
      scope: The outermost block.
      form: Their off-row form.
      family: The family.
      kept: (old, new, axis) of what they keep, at the routed rows.
      constant: (new, constant, axis) of what is constant off the touched rows.
      exceeded: Whether the step is to change nothing.
      first: What must have been computed before a leaf changes.
    """
    kept, constant = list(kept), list(constant)
    guard = () if exceeded is None else (exceeded,)
    operands = [old for old, _, _ in kept] + [new for _, new, _ in kept] + [new for new, _, _ in constant]
    params = {
        "axes": tuple(axis for *_, axis in kept),
        "constants": tuple((np.asarray(value).item(), axis) for _, value, axis in constant),
        "family": family,
        "finite": len(form.finite),
        "frontier": len(form.frontier),
        "guarded": exceeded is not None or None,
        "nonzero": len(form.nonzero),
    }
    watched = (*operands, *form.frontier, *form.finite, *form.nonzero, *guard, *first)
    return scope.emit("ap.changes", watched, ArrayType((), np.dtype(bool)), params)


def sweep(
    scope: Scope,
    space: RowSpace,
    inputs: Sequence[Var],
    updates: Mapping[int, tuple[Atom, Off | None]],
    exceeded: Atom | None,
    first: Sequence[Atom],
) -> dict[int, Atom]:
    """A family's leaves, all rows that the step doesn't touch being as they are after it.

    Args:
      scope: The outermost block.
      space: The family.
      inputs: The program's inputs as they are stored.
      updates: Leaf -> its new value, and what that is off the touched rows.
      exceeded: Whether the step is to change nothing, because a capacity doesn't suffice.
      first: What must have been computed before a leaf changes.
    """
    family, axes = space.family, dict(zip(space.leaves, space.axes, strict=True))
    form = OffForm.of(scope, space, inputs, [(a, axes[k]) for k, (a, _) in updates.items()], tuple(updates))
    rows = {k: scope.at_rows(atom, axes[k], family) for k, (atom, _) in updates.items()}
    constants = {k: off.value for k, (_, off) in updates.items() if isinstance(off, Const)}
    old = {k: scope.at_rows(scope.block.inputs[k], axes[k], family) for k in updates if k not in constants}
    kept = [(old[k], rows[k], axes[k]) for k in old]
    constant = [(rows[k], value, axes[k]) for k, value in constants.items()]
    needed = changes(scope, form, family, kept, constant, exceeded, first)
    params = {
        "axes": tuple(axes[k] for k in updates),
        "extent": space.extent,
        "read_axes": tuple(axes[k] for k in form.leaves[len(updates) :]),
        "rows": scope.lifting.block_rows[family],
    }
    outputs = tuple(Var(inputs[k].type) for k in updates)
    operands = (needed, *(inputs[k] for k in form.leaves), *form.frontier)
    scope.equations.append(Equation("ap.sweep", operands, outputs, params, (form.body,)))
    leaves: dict[int, Atom] = dict(zip(updates, outputs, strict=True))
    guard = () if exceeded is None else (exceeded,)
    for k in constants:
        filled = (leaves[k], rows[k], scope.route(family), needed, *guard)
        leaves[k] = scope.emit("ap.fill", filled, inputs[k].type, {"axis": axes[k]})
    return leaves


@dataclass(frozen=True, slots=True, eq=False)
class Exact:
    """Implements `scope.Untouched` for families whose rows can be read in blocks.

    Attributes:
      spaces: Family -> its space, of those.
      on_hosts: Families whose rows are reduced only: no program has all of them.
      inputs: The program's inputs as they are stored.
    """

    spaces: Mapping[int, RowSpace]
    on_hosts: frozenset[int]
    inputs: Sequence[Var]

    def densified(self, scope: Scope, atom: Var, found: Var, row: Row) -> Var:
        """Swept, if need be."""
        if row.family in self.on_hosts:
            return found
        rows = scope.at_rows(atom, row.axis, row.family)
        form, needed = self._form(scope, atom, rows, row)
        if form is None or needed is None:
            return found
        chunk, *rest = form.body.inputs
        body = Block((chunk, Var(found.type), *rest), form.body.equations, form.body.outputs)
        space = self.spaces[row.family]
        params = {
            "axes": (row.axis,),
            "extent": space.extent,
            "read_axes": self._axes(form, row.family),
            "rows": scope.lifting.block_rows[row.family],
        }
        out = Var(found.type)
        operands = (needed, found, *(self.inputs[k] for k in form.leaves), *form.frontier)
        scope.equations.append(Equation("ap.sweep", operands, (out,), params, (body,)))
        params = {"axis": row.axis, "extent": space.extent, "guarded": None}
        # The sweep has taken all rows for untouched ones.
        return scope.emit("ap.commit", (out, rows, scope.route(row.family)), found.type, params)

    def reduced(self, scope: Scope, atom: Atom, rows: Atom, row: Row) -> UntouchedRows | None:
        """The other rows, looked at if need be."""
        form, needed = self._form(scope, atom, rows, row)
        if form is None or needed is None:
            return None
        operands = (needed, *(self.inputs[k] for k in form.leaves), *form.frontier)
        return UntouchedRows(operands, self._axes(form, row.family), form.body)

    def _axes(self, form: OffForm, family: int) -> tuple[int, ...]:
        """The row axes of the leaves that a form takes."""
        space = self.spaces[family]
        return tuple(space.axes[space.leaves.index(k)] for k in form.leaves)

    def _form(self, scope: Scope, atom: Atom, rows: Atom, row: Row) -> tuple[OffForm | None, Var | None]:
        """The off-row form of a value, and whether untouched rows differ from its constant; None if they never do."""
        if row.family not in self.spaces or not isinstance(row.off, Const):
            return None, None
        form = OffForm.of(scope, self.spaces[row.family], self.inputs, [(atom, row.axis)], ())
        if not (form.frontier or form.finite or form.nonzero or form.leaves):
            return None, None
        return form, changes(scope, form, row.family, (), [(rows, row.off.value, row.axis)])
