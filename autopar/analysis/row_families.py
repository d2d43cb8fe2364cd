"""Finds the families of a program, and those that can be lifted, from its interpretation (`RowFlow`).

A table's family is kept if

- the step returns each of its leaves, off the touched rows, as it was or as a constant (under `lazy`: as anything);
- every use of it that is no row equation can read the leaf as a whole (before or after the update);
- the ids of its lookups can be computed before its rows are read.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

from autopar.analysis.nonfinite import NonfiniteOutcomes
from autopar.analysis.row_flow import RowFlow
from autopar.analysis.row_ids import index_atoms, known_ids
from autopar.analysis.unfollowed import APART, LAZY, OF_ROWS, OWN_IDS
from autopar.ir.program import Atom, Block, Equation, Program, Source
from autopar.ir.rowspace import Access, Const, Refusal, RefusalKind, Row, RowSpace, Same
from autopar.ir.slicing import hoist, needed_equations


@dataclass(frozen=True, eq=False)
class Families:
    """The meaning of an interpretation of the program for its families."""

    program: Program
    flow: RowFlow
    lazy: bool
    defer: bool
    undeferred: Mapping[int, Refusal]
    #: (Equations around an access, its index operand) -> what computes it: moved out of loops, and at the top.
    slices: dict[tuple[tuple[Equation, ...], Atom], tuple[list[Equation], list[Equation]]] = field(default_factory=dict)

    def _row(self, atom: Atom, space: RowSpace) -> Row | None:
        value = self.flow.value(atom)
        return value if isinstance(value, Row) and self.flow.find(value.family) == space.family else None

    def _reads(self, family: int) -> list[Refusal]:
        return [refusal for f, refusal in self.flow.dense_reads if self.flow.find(f) == family]

    def _members(self) -> dict[int, list[int]]:
        members: dict[int, list[int]] = {}
        for k in self.flow.candidates:
            members.setdefault(self.flow.family_of(k), []).append(k)
        return members

    def unrelated(self) -> tuple[set[int], set[Equation]]:
        """Returns what has as many rows as a table by chance, belongs to none, and stands in the way of something:
        state leaves, and equations that put something into zeros."""
        troubled = self.flow.troubled()
        looked_up = {k for k, _ in self.program.tables}
        members = self._members()
        tables = {family for family, leaves in members.items() if looked_up.intersection(leaves)}
        leaves = {k for family, owned in members.items() if family in troubled - tables for k in owned}
        entries = {e for f, e in self.flow.entries.items() if self.flow.find(f) in troubled - tables}
        return leaves, entries

    def needed_whole(self, spaces: Sequence[RowSpace]) -> list[RowSpace]:
        """Returns the families of which all rows are needed whatever others do; if there are none, those of which all
        rows are needed where they meet others'."""
        meetings: dict[int, set[int]] = {}
        for family, refusal in (*self.flow.refusals, *self.flow.dense_reads):  # one refusal for all that meet
            meetings.setdefault(id(refusal), set()).add(self.flow.find(family))
        by_themselves = [s for s in spaces if {s.family} in meetings.values()]
        return by_themselves or [s for s in spaces if any(s.family in met for met in meetings.values())]

    def spaces(self) -> list[RowSpace]:
        """Returns the families that hold a table, with everything in them."""
        looked_up = {k for k, _ in self.program.tables}
        spaces = []
        for family, leaves in self._members().items():
            tables = tuple(k for k in leaves if k in looked_up)
            accesses = tuple(self._known(f, a) for f, a in self.flow.accesses.values() if self.flow.find(f) == family)
            is_read = any(a.is_lookup for a in accesses) or (
                accesses and not self.program.unfollowed.keys().isdisjoint(tables)
            )
            if tables and is_read and self._is_worth_lifting(leaves):
                axes = tuple(self.flow.candidates[k] for k in leaves)
                space = RowSpace(family, self.flow.extents[family], tuple(leaves), axes, tables, accesses)
                needed = tuple(sorted({f for access in accesses for f in self._families_of_ids(access)}))
                space = dataclasses.replace(space, depends_on=needed, is_read_whole=bool(self._reads(family)))
                spaces.append(dataclasses.replace(space, notes=self._notes(space)))
        return _closed(spaces)

    def _known(self, family: int, access: Access) -> Access:
        """Returns the access; if its ids depend on rows of its own family, with ids that don't, where some include them
        (under `lazy`: where these are the very rows, for all others that are touched would move)."""
        family = self.flow.find(family)
        if family not in self._families_of_ids(access):
            return access
        others = (
            dataclasses.replace(access, known=ids)
            for ids in known_ids(access, self._producers(access))
            if not (self.lazy and ids.equations)
        )
        return next((a for a in others if family not in self._families_of_ids(a)), access)

    @functools.cached_property
    def _made(self) -> Mapping[Atom, Equation]:
        return _producers(self.program.block)

    def _producers(self, access: Access) -> Mapping[Atom, Equation]:
        if not access.path:
            return self._made
        bodies = access.path[-1].bodies
        return _producers(next(b for b in bodies if any(e is access.equation for e in b.equations)))

    def _is_worth_lifting(self, leaves: Sequence[int]) -> bool:
        block, new = self.program.block, self.program.new_states
        if any(block.inputs[k] in self.program.pulled for k in leaves):
            return True
        updated = any(k in new and block.outputs[new[k]] is not block.inputs[k] for k in leaves)
        return updated or any(self.program.inputs[k].layout is not None for k in leaves)

    def _notes(self, space: RowSpace) -> tuple[str, ...]:
        reads = [f"read whole: {r}" for r in self._reads(space.family)]
        remedies = dict.fromkeys(r.remedy for r in self._reads(space.family))
        for atom, output in zip(self.program.block.outputs, self.program.outputs, strict=True):
            value = self._row(atom, space)
            if value is not None and output.state not in space.leaves:
                reads.append(f"the output {output.path} is written with all rows, {value.off} on untouched ones")
        return tuple(dict.fromkeys([*reads, *(f"to change that: {remedy}" for remedy in remedies)]))

    def causes(self, space: RowSpace) -> dict[int, Refusal]:
        """Returns leaves that keep the family from being lifted, with the reason."""
        refusal = self._met(space)
        changed = {} if refusal else {k: r for k in space.leaves if (r := self._changes(space, k)) is not None}
        if changed:
            return changed
        refusal = refusal or self._unliftable(space)
        return {} if refusal is None else dict.fromkeys(space.leaves, refusal)

    def _met(self, space: RowSpace) -> Refusal | None:
        refusal = next((r for f, r in self.flow.refusals if self.flow.find(f) == space.family), None)
        return refusal if refusal or self.lazy else self._carried(space)

    def _unliftable(self, space: RowSpace) -> Refusal | None:
        """Returns what keeps the family dense although its new rows are known."""
        if len({self.program.inputs[k].layout for k in space.leaves} - {None}) > 1:
            return Refusal("it meets rows of a table that is stored in another layout", None, APART)
        repeated = self._repeated_effect(space)
        if repeated is not None:
            reason = "the ids of a lookup come from a callback inside a loop, which would run twice"
            return Refusal(reason, repeated.source, "call it before the loop")
        if space.family in space.depends_on:
            where = next((a.equation.source for a in space.accesses if self._on_own_rows(space, a)), None)
            return Refusal("the ids of a lookup depend on rows of the same table", where, OWN_IDS)
        for atom, output in zip(self.program.block.outputs, self.program.outputs, strict=True):
            if self._row(atom, space) is not None and atom not in self.flow.whole and output.state not in space.leaves:
                return Refusal(f"the output {output.path} needs all of its rows", self._defined_at(atom), APART)
        return None

    def _carried(self, space: RowSpace) -> Refusal | None:
        """Returns a reduction over all rows of what a loop carries, where an untouched row may hide what a number that
        isn't finite does to others: nothing has all rows as they are at a turn."""
        outcomes = None
        for equation in self.flow.reduced_in_loops:
            rows = [(a, row.axis) for a in equation.inputs if (row := self._row(a, space)) is not None]
            if not rows or self.flow.roles.get(equation) not in ("reduce", "contract"):
                continue
            outcomes = outcomes or NonfiniteOutcomes(self.program.block, self.flow.values, self.flow.roles)
            outcome = outcomes.of(rows, equation if len(rows) > 1 else None)
            if outcome.may_differ and outcome.turns:
                reason = f"{equation.op} over all rows, in a loop, of what depends on the turns before"
                return Refusal(reason, equation.source, "compute it after the loop", "sum")
        return None

    def _changes(self, space: RowSpace, leaf: int) -> Refusal | None:
        """Returns why a leaf's new value isn't known off the touched rows."""
        new = self.program.new_states
        path = self.program.inputs[leaf].path
        if leaf not in new:
            return None
        atom = self.program.block.outputs[new[leaf]]
        value = self._row(atom, space)
        source = self._defined_at(atom)
        if value is not None and value.axis == self.flow.candidates[leaf]:
            if value.off == Same(leaf, self.program.block.inputs[leaf].dtype) or isinstance(value.off, Const):
                late = any(self.flow.find(f) == space.family for f in self.flow.after.get(atom, ()))
                return Refusal(f"{path} depends on a read of the whole updated table", source, APART) if late else None
            mixed = next((e for f, e in self.flow.mixed_with_dense if self.flow.find(f) == space.family), None)
            if mixed is None and (self.lazy or (self.defer and self._undeferred(space) is None)):
                return None
            read = self._product(space)
            if read is not None:
                return read
            if mixed is not None:
                what = "an array of all rows that isn't computed row by row (noise, a mask, another gradient)"
                return Refusal(f"{mixed.op} mixes its rows with {what}", mixed.source, OF_ROWS)
            why = self._undeferred(space) if self.defer else None
            if why is not None:
                return why
            return Refusal(f"{path} changes on every row, touched or not (momentum, decay, ...)", source, LAZY)
        other = self.flow.value(atom)
        if isinstance(other, Row):
            owners = self._members().get(self.flow.find(other.family), [])
            names = ", ".join(self.program.inputs[k].path for k in owners[:2])
            what = f"is made anew from all rows of {names}" if names else "isn't computed from what it was"
            return Refusal(f"{path} {what}", source, APART if names else OF_ROWS)
        return self._product(space) or Refusal(
            f"the step returns {path} as something that is not computed row by row", source, OF_ROWS
        )

    def _undeferred(self, space: RowSpace) -> Refusal | None:
        """Returns why rows that a step doesn't touch can't be brought up to date later."""
        known = next((self.undeferred[k] for k in space.leaves if k in self.undeferred), None)
        if known is not None:
            return known
        read = next(iter(self._reads(space.family)), None)
        if read is not None:
            reason = f"all of its rows move in every step, and it is read whole ({read.reason})"
            return Refusal(reason, read.source, read.remedy, read.kind)
        written = next(iter(self._notes(space)), None)
        return None if written is None else Refusal(f"all of its rows move in every step, and {written}", None, APART)

    def moves(self, space: RowSpace) -> bool:
        """Returns whether a step moves rows that it doesn't touch."""
        new, block = self.program.new_states, self.program.block
        values = [self._row(block.outputs[new[k]], space) for k in space.leaves if k in new]
        return any(v is not None and not isinstance(v.off, (Const, Same)) for v in values)

    def _product(self, space: RowSpace) -> Refusal | None:
        """Returns what makes the gradient dense (a product over all rows, a loop, a scatter): the cause, not its
        effects."""
        telling = [kind for kind in get_args(RefusalKind) if kind != "other"]
        return next((r for kind in telling for r in self._reads(space.family) if r.kind == kind), None)

    def _defined_at(self, atom: Atom) -> Source | None:
        for equation in reversed(self.program.block.equations):
            if any(v is atom for v in equation.outputs):
                return equation.source
        return None

    def _families_of_ids(self, access: Access) -> set[int]:
        return {f for equations in self._slices(access) for part in equations for f in self._families_in(part)}

    def _slices(self, access: Access) -> list[tuple[list[Equation], list[Equation]]]:
        """Returns what computes the ids of an access. Many accesses share theirs."""
        slices = []
        for atom in index_atoms(access):
            key = access.path, atom
            if key not in self.slices:
                inner, outer, _ = hoist(access.path, atom)
                inner = [*(() if access.known is None else access.known.equations), *inner]
                roots = [outer, *(a for e in inner for a in e.inputs)]
                self.slices[key] = inner, needed_equations(self.program.block, roots)
            slices.append(self.slices[key])
        return slices

    def own_lookups(self, space: RowSpace) -> list[Equation]:
        """Lists lookups whose ids depend on rows of the same family, of values that can be had for all rows."""
        lookups = [a for a in space.accesses if a.is_lookup and a.equation.inputs[0] in self.flow.whole]
        return [a.equation for a in lookups if self._on_own_rows(space, a)]

    def loops_to_read_whole(self, space: RowSpace) -> list[Equation]:
        """Returns loops and checkpoints that wouldn't stand in the way if they read all rows; they look none up."""
        loops = [loop for family, loop in self.flow.could_read_whole if self.flow.find(family) == space.family]
        return [loop for loop in loops if not any(loop in access.path for access in space.accesses)]

    def _on_own_rows(self, space: RowSpace, access: Access) -> bool:
        return space.family in self._families_of_ids(access)

    def _repeated_effect(self, space: RowSpace) -> Equation | None:
        slices = (effects for access in space.accesses for effects in self._slices(access))
        for equation in (e for inner, needed in slices for e in (*inner, *needed)):
            effects = [e for b in equation.bodies for e in b.walk() if e.effects and not e.bodies]
            if (equation.effects or effects) and equation not in self.program.block.equations:
                return effects[0] if effects else equation
        return None

    def _families_in(self, equations: Sequence[Equation]) -> set[int]:
        """Returns families whose routed rows the equations need (a read of the whole old leaf needs none)."""
        families: set[int] = set()
        for equation in equations:
            if self.flow.roles.get(equation) == "dense" and not any(self.flow.whole.get(a) for a in equation.inputs):
                continue
            for atom in (*equation.inputs, *equation.outputs):
                value = self.flow.value(atom)
                if isinstance(value, Row):
                    families.add(self.flow.find(value.family))
            for body in equation.bodies:
                families |= self._families_in(body.equations)
        return families


def _producers(block: Block) -> Mapping[Atom, Equation]:
    return {v: e for e in block.equations for v in e.outputs}


def _closed(spaces: list[RowSpace]) -> list[RowSpace]:
    direct = {s.family: set(s.depends_on) for s in spaces}
    for _ in spaces:
        for reached in direct.values():
            reached |= {g for f in tuple(reached) for g in direct.get(f, ())}
    return [dataclasses.replace(s, depends_on=tuple(sorted(direct[s.family]))) for s in spaces]


# --- which state leaves belong to which table, where their sizes don't tell ---
#
# `classify` takes every leaf with as many rows as a table for a slot that it may have. A hidden width, a batch or
# another table's width may be of that size by chance. Such a leaf makes rows of a family that holds no table, and those
# meet the tables' own rows and slots along other axes: who is to blame can't be read off the equation where they meet.
# Here the analysis runs with the tables alone and grows from there: a leaf is *tied* to a table if its new value is
# rows of the table's family, and it has its rows along the axis that this value has them.


@dataclass(frozen=True, slots=True, eq=False)
class Ties:
    """The belongings of tables: leaves (the tables among them) with their row axes, and equations that make rows of
    their families (gradients)."""

    axes: Mapping[int, int]
    entries: frozenset[Equation]


def find_ties(program: Program, tables: Mapping[int, int], reading_whole: Iterable[Equation] = ()) -> Ties:
    """Returns what belongs to the tables (input -> row axis). `reading_whole`: lookups that read all rows."""
    axes = dict(tables)
    barred: set[Equation] = set()
    while True:
        flow = RowFlow(program, axes, barred=barred, reading_whole=set(reading_whole))
        flow.start()
        own = {flow.family_of(k) for k in tables}
        chance = flow.troubled() - own
        false = {f: e for f, e in flow.entries.items() if flow.find(f) in chance}
        if false:
            smallest = min(false.values(), key=lambda e: e.outputs[0].type.nbytes)
            barred.update(_unlike_tables(flow, false, tables) or [smallest])
            continue
        new = {k: axis for k, axis in _updated(flow, own).items() if k not in axes}
        if not new:
            return Ties(axes, frozenset(e for f, e in flow.entries.items() if flow.find(f) in own))
        axes |= new


def _unlike_tables(flow: RowFlow, entries: Mapping[int, Equation], tables: Mapping[int, int]) -> set[Equation]:
    like = {(flow.program.block.inputs[k].shape, axis) for k, axis in tables.items()}
    made = ((e, flow.value(e.outputs[0])) for e in entries.values())
    return {e for e, row in made if not isinstance(row, Row) or (e.outputs[0].shape, row.axis) not in like}


def _updated(flow: RowFlow, families: set[int]) -> dict[int, int]:
    """Maps leaves whose new values are rows of one of the families to their row axes."""
    program, updated = flow.program, {}
    for leaf, output in program.new_states.items():
        value, layout = flow.value(program.block.outputs[output]), program.inputs[leaf].layout
        if isinstance(value, Row) and flow.find(value.family) in families:
            if layout is None or layout[1] == value.axis:
                updated[leaf] = value.axis
    return updated
