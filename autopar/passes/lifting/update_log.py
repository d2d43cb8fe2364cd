"""A family's update log in the step that is rewritten: rows brought up to date at their pull, and what is written down.

    stamps, now, segment, records, segments -> catch_up (before anything reads the rows) ... commit -> record -> flush

What each is, `backends.deferred` says. See docs/deferred.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np

from autopar.ir.layout import RowLayout
from autopar.ir.program import ArrayType, Atom, Equation, Input, Var
from autopar.ir.slicing import clone
from autopar.passes.lifting.deferral import UntouchedUpdate
from autopar.passes.lifting.scope import Scope

_INT = np.dtype(np.int32)


@dataclass(eq=False)
class StepUpdateLog:
    """One family's.

    Attributes:
      layout: How stamps are stored, with their rows; None where every device has all.
      old, new: The step's inputs and outputs that the update log is: stamps, now, segment, records, segments.
      stamped: The stamps of the rows that the step touches.
      committed: Leaf -> the leaf with the rows that the step touched.
      rows: Those rows.
    """

    family: int
    layout: RowLayout | None
    caught: dict[int, Var]
    waiting: Equation
    stamps: Var
    stamped: Atom
    now: Var
    old: list[Var] = field(default_factory=list)
    new: list[Atom] = field(default_factory=list)
    committed: dict[int, Atom] = field(default_factory=dict)
    rows: list[Atom] = field(default_factory=list)

    @staticmethod
    def begin(scope: Scope, family: int, changed: Sequence[int]) -> StepUpdateLog:
        """Pull rows and their stamps, and name the rows as they will be once they are up to date.

        `changed`: leaves that the untouched update changes.
        """
        space = scope.lifting.spaces[family]
        axes = space.row_axes
        layout = scope.lifting.families[family].layout
        count = space.extent if layout is None else layout.stored
        stamps, now = Var(ArrayType((count,), _INT)), Var(ArrayType((), _INT))
        raw = {k: scope.pull(scope.lifting.inputs[k], axes[k], family) for k in changed}
        stamped = scope.pull(stamps, 0, family)
        caught = {k: Var(atom.type) for k, atom in raw.items()}
        waiting = Equation("ap.catch_up", (*raw.values(), stamped), tuple(caught.values()))
        scope.append(waiting)
        for k, var in caught.items():
            scope.rows[scope.block.inputs[k], axes[k], family] = var
        return StepUpdateLog(family, layout, caught, waiting, stamps, stamped, now)

    def end(self, scope: Scope, update: UntouchedUpdate, exceeded: Atom | None) -> dict[int, Atom]:
        """Write down the step, and flush the update log if it is full; the leaves after that.

        Args:
          update: What the step does to rows that it doesn't touch.
          exceeded: Whether the step is to change nothing, because a capacity doesn't suffice.
        """
        replay = update.replay
        read = {k: scope.lifting.inputs[k] for k in update.read}
        segment = Var(ArrayType((), _INT))
        records = [Var(dataclasses.replace(t, shape=(replay.length, *t.shape))) for t in replay.records]
        segments = [Var(t) for t in replay.segments]
        self.old = [self.stamps, self.now, segment, *records, *segments]
        params = {"replay": replay, "family": self.family}
        self._complete(scope, update, read)
        route = scope.route(self.family)
        after = scope.emit("ap.next", (self.now,), self.now.type)
        # No stamp is larger. But what is written waits for what was read, or XLA copies all stamps in every step.
        full = scope.full(after, scope.at(self.stamps.type, 0, self.family))
        rows = Var(full.type)
        scope.append(Equation("max", (full, self.stamped), (rows,), primitive=jax.lax.max_p))
        guard = () if exceeded is None else (exceeded,)
        if exceeded is not None:
            after = scope.emit("ap.select", (exceeded, after, self.now), self.now.type)
        commit = {"axis": 0, "extent": replay.extent, "guarded": exceeded is not None or None}
        # Not before the rows themselves: a step that fails between the two would leave rows that count as moved.
        stamps = scope.emit("ap.commit", (self.stamps, rows, route, *guard, *self.rows), self.stamps.type, commit)
        written = tuple(Var(v.type) for v in records)
        body, _ = clone(update.body)
        scope.append(
            Equation("ap.record", (self.now, *records, *update.values, *guard), written, params, (body,)),
        )
        flushed = tuple(Var(self.committed[k].type) for k in self.caught)
        ends = tuple(Var(v.type) for v in (self.stamps, self.now, segment, *segments))
        operands = (*self.committed.values(), *read.values(), stamps, after, segment, *written, *segments)
        body, _ = clone(update.body)
        scope.append(Equation("ap.flush", operands, (*flushed, *ends), params, (body,)))
        self.new = [*ends[:3], *written, *ends[3:]]
        assert list(self.committed) == list(self.caught), "leaves keep their order"
        return dict(zip(self.caught, flushed, strict=True))

    def _complete(self, scope: Scope, update: UntouchedUpdate, read: Mapping[int, Var]) -> None:
        """The equation that brings rows up to date, now that the untouched update is known."""
        place = scope.equations.index(self.waiting)
        *raw, stamped = self.waiting.inputs
        axes = scope.lifting.spaces[self.family].row_axes
        end = len(scope.equations)
        also = [scope.pull(leaf, axes[k], self.family) for k, leaf in read.items()]
        pulls, scope.equations[end:] = scope.equations[end:], []
        body, _ = clone(update.body)
        inputs = (*raw, *also, stamped, *self.old[1:])
        params = {"replay": update.replay, "families": (self.family,)}
        done = dataclasses.replace(self.waiting, inputs=inputs, params=params, bodies=(body,))
        scope.equations[place : place + 1] = [*pulls, done]

    def inputs(self) -> list[Input]:
        """Paths and layouts of the update log's inputs."""
        lead = f"update log {self.family}"
        stamps = Input(f"{lead}/stamps", "log", None if self.layout is None else (self.layout, 0))
        rest = ("now", "segment", *(f"entry {k}" for k in range(len(self.old) - 3)))
        return [stamps, *(Input(f"{lead}/{name}", "log") for name in rest)]
