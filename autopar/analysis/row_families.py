"""Finds the families of a program, and those that can be lifted, from its interpretation (`RowFlow`).

A table's family is kept if

- the step returns each of its leaves unchanged or constant on untouched rows (under `lazy`: anything);
- every use of it that is no row equation can read the leaf as a whole (before or after the update);
- the ids of its lookups can be computed before its rows are read.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import get_args

import numpy as np

from autopar.analysis.interpreter import Interpreter
from autopar.analysis.nonfinite import NonfiniteOutcomes
from autopar.analysis.primitives import ELEMENTWISE, MOVES, SHAPED
from autopar.analysis.row_ids import index_atoms, known_ids
from autopar.analysis.rules import ALIGNED, APART, LAZY, OF_ROWS, OWN_IDS, RULES, Mixes, untouched_of
from autopar.analysis.values import atom_key, params_key
from autopar.ir.program import Atom, Block, Equation, Program, Source, Var
from autopar.ir.rowspace import (
    UNKNOWN,
    Access,
    Const,
    Free,
    Refusal,
    RefusalKind,
    Row,
    RowSpace,
    Same,
    Unknown,
    UntouchedValue,
    Value,
    can_be_run_again,
    representative,
)
from autopar.ir.slicing import hoist, needed_equations
from autopar.jax_types import Leaf


@dataclass(frozen=True, eq=False)
class Families:
    """The families that an interpretation of the program finds."""

    program: Program
    flow: RowFlow
    lazy: bool
    defer: bool
    undeferred: Mapping[int, Refusal]
    #: (Equations around an access, its index operand) -> equations that compute it: moved out of loops, and at the top.
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
        """Returns state leaves, and equations that put something into zeros, that have a table's number of rows by
        chance.

        Only those that stand in the way of something.
        """
        troubled = self.flow.troubled()
        looked_up = {k for k, _ in self.program.tables}
        members = self._members()
        tables = {family for family, leaves in members.items() if looked_up.intersection(leaves)}
        leaves = {k for family, owned in members.items() if family in troubled - tables for k in owned}
        entries = {e for f, e in self.flow.entries.items() if self.flow.find(f) in troubled - tables}
        return leaves, entries

    def needed_whole(self, spaces: Sequence[RowSpace]) -> list[RowSpace]:
        """Returns the families of which all rows are needed by themselves or, if there are none, where they meet
        others."""
        meetings: dict[int, set[int]] = {}
        for family, refusal in (*self.flow.refusals, *self.flow.dense_reads):  # one refusal for all that meet
            meetings.setdefault(id(refusal), set()).add(self.flow.find(family))
        by_themselves = [s for s in spaces if {s.family} in meetings.values()]
        return by_themselves or [s for s in spaces if any(s.family in met for met in meetings.values())]

    def spaces(self) -> list[RowSpace]:
        """Returns the families that hold a table."""
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
                space = replace(space, depends_on=needed, is_read_whole=bool(self._reads(family)))
                spaces.append(replace(space, notes=self._notes(space)))
        return _closed(spaces)

    def _known(self, family: int, access: Access) -> Access:
        """Returns the access, with known ids that include its own if these depend on rows of its own family.

        Under `lazy` they must be the very rows, since all others that are touched would move.
        """
        family = self.flow.find(family)
        if family not in self._families_of_ids(access):
            return access
        others = (
            replace(access, known=ids)
            for ids in known_ids(access, self._producers(access))
            if not (self.lazy and ids.equations)
        )
        return next((a for a in others if family not in self._families_of_ids(a)), access)

    @functools.cached_property
    def _made(self) -> Mapping[Atom, Equation]:
        return self.program.block.makers()

    def _producers(self, access: Access) -> Mapping[Atom, Equation]:
        if not access.path:
            return self._made
        bodies = access.path[-1].bodies
        return next(b for b in bodies if any(e is access.equation for e in b.equations)).makers()

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
                reads.append(f"the output {output.path} is written with all rows, {value.untouched} on untouched ones")
        return tuple(dict.fromkeys([*reads, *(f"to change that: {remedy}" for remedy in remedies)]))

    def causes(self, space: RowSpace) -> dict[int, Refusal]:
        """Returns leaves that keep the family from being lifted, with the reason."""
        refusal = next((r for f, r in self.flow.refusals if self.flow.find(f) == space.family), None)
        refusal = refusal if refusal or self.lazy else self._carried(space)
        changed = {} if refusal else {k: r for k in space.leaves if (r := self._changes(space, k)) is not None}
        if changed:
            return changed
        refusal = refusal or self._unliftable(space)
        return {} if refusal is None else dict.fromkeys(space.leaves, refusal)

    def _unliftable(self, space: RowSpace) -> Refusal | None:
        """Returns why the family stays dense although its new rows are known."""
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
        """Returns why a reduction over all rows of a loop's carry can't be lifted, if it can't.

        There an untouched row may hide what a non-finite number does to others, and all rows of a turn exist nowhere.
        """
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
        """Returns why a leaf's new value on untouched rows is unknown, if it is."""
        new = self.program.new_states
        path = self.program.inputs[leaf].path
        if leaf not in new:
            return None
        atom = self.program.block.outputs[new[leaf]]
        value = self._row(atom, space)
        source = self._defined_at(atom)
        if value is not None and value.axis == self.flow.candidates[leaf]:
            if value.untouched == Same(leaf, self.program.block.inputs[leaf].dtype) or isinstance(
                value.untouched, Const
            ):
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
        """Returns why untouched rows can't be brought up to date later, if they can't."""
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
        new, block = self.program.new_states, self.program.block
        values = [self._row(block.outputs[new[k]], space) for k in space.leaves if k in new]
        return any(v is not None and not isinstance(v.untouched, (Const, Same)) for v in values)

    def _product(self, space: RowSpace) -> Refusal | None:
        """Returns the cause of a dense gradient (a product over all rows, a loop, a scatter), not its effects."""
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
        """Returns the equations that compute the ids of an access; many accesses share them."""
        slices = []
        for atom in index_atoms(access):
            key = access.path, atom
            if key not in self.slices:
                inner, outer, _ = hoist(access.path, atom)
                inner = [*(() if access.known is None else access.known.equations), *inner]
                roots = [outer, *(a for e in inner for a in e.inputs)]
                self.slices[key] = inner, needed_equations(self.program.block.equations, roots)
            slices.append(self.slices[key])
        return slices

    def own_lookups(self, space: RowSpace) -> list[Equation]:
        """Lists lookups whose ids depend on rows of the same family, in values that can be computed for all rows."""
        lookups = [a for a in space.accesses if a.is_lookup and a.equation.inputs[0] in self.flow.whole]
        return [a.equation for a in lookups if self._on_own_rows(space, a)]

    def loops_to_read_whole(self, space: RowSpace) -> list[Equation]:
        """Lists loops and checkpoints without lookups that would no longer prevent lifting if they read all rows."""
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


def _closed(spaces: list[RowSpace]) -> list[RowSpace]:
    direct = {s.family: set(s.depends_on) for s in spaces}
    for _ in spaces:
        for reached in direct.values():
            reached |= {g for f in tuple(reached) for g in direct.get(f, ())}
    return [replace(s, depends_on=tuple(sorted(direct[s.family]))) for s in spaces]


# --- which state leaves belong to which table, where sizes are ambiguous ---
#
# `classify` takes every leaf with as many rows as a table for a possible slot. A hidden width, a batch or another
# table's width may have that size by chance. Such a leaf makes rows of a family without a table, which meet the tables'
# own rows and slots along other axes; the equation where they meet doesn't show which one is wrong. Here the analysis
# runs with the tables alone and grows from there: a leaf is *tied* to a table if its new value is rows of the table's
# family, along the same axis.


@dataclass(frozen=True, slots=True, eq=False)
class Ties:
    """The leaves that belong to tables (these included) with their row axes, and equations that make rows of their
    families."""

    axes: Mapping[int, int]
    entries: frozenset[Equation]


def find_ties(program: Program, tables: Mapping[int, int], reading_whole: Iterable[Equation]) -> Ties:
    """Returns the ties of the tables (input -> row axis). `reading_whole`: lookups that read all rows."""
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


# --- the abstract interpreter: runs `analysis.rules` over a program, values in place of arrays ---
#
# It finds each variable's row axis and family, which equations touch rows, and which need all of them.
#: The remedy for a table in a while loop.
_NO_WHILE = (
    "use lax.scan, or lax.fori_loop with bounds that are known when the step is traced; what ends earlier can skip the "
    "rest by lax.cond"
)

#: The reason why a lookup reads all rows, and the remedy.
_OWN_LOOKUP = ("a lookup whose ids depend on rows of the same table", OWN_IDS)


@dataclass(eq=False)
class RowFlow(Interpreter[Value]):
    """One pass over the program with a given set of candidate leaves. Implements `analysis.rules.Analysis`."""

    program: Program
    candidates: Mapping[int, int]
    values: dict[Var, Value] = field(default_factory=dict)
    roles: dict[Equation, str] = field(default_factory=dict)
    parents: list[int] = field(default_factory=list)
    extents: list[int] = field(default_factory=list)
    accesses: dict[Equation, tuple[int, Access]] = field(default_factory=dict)
    refusals: list[tuple[int, Refusal]] = field(default_factory=list)
    dense_reads: list[tuple[int, Refusal]] = field(default_factory=list)
    mixed_with_dense: list[tuple[int, Equation]] = field(default_factory=list)
    path: tuple[Equation, ...] = ()
    #: Equations whose rows turned out to belong to no table.
    barred: set[Equation] = field(default_factory=set)
    #: Equations that read all rows: lookups whose ids depend on the rows they look up, and loops where all rows of a
    #: result are needed.
    reading_whole: set[Equation] = field(default_factory=set)
    #: (family, loop or checkpoint): refused since all rows of its results are needed, though it could read all.
    could_read_whole: list[tuple[int, Equation]] = field(default_factory=list)
    entries: dict[int, Equation] = field(default_factory=dict)
    #: Reductions and contractions over all rows at each turn of a loop, in order.
    reduced_in_loops: dict[Equation, None] = field(default_factory=dict)
    #: Row value that can be computed for all rows -> families whose committed leaves that needs.
    whole: dict[Atom, frozenset[int]] = field(default_factory=dict)
    #: Top-level variable -> families whose committed leaves it depends on.
    after: dict[Atom, frozenset[int]] = field(default_factory=dict)
    #: Families of which every step touches all rows, so that any value of untouched rows may be assumed.
    pulled: set[int] = field(default_factory=set)
    #: Origin of a row value -> the name of this function of an untouched row (`Unknown`).
    functions: dict[Hashable, int] = field(default_factory=dict)
    _equations: Sequence[Equation] = ()

    def __post_init__(self) -> None:
        inputs = self.program.block.inputs
        self.table_extents = {inputs[k].shape[axis] for k, axis in self.candidates.items()}
        #: Output variable -> the state inputs whose new value it is.
        self.updates: dict[Atom, list[int]] = {}
        for leaf, out in self.program.new_states.items():
            self.updates.setdefault(self.program.block.outputs[out], []).append(leaf)

    # --- questions of rules (analysis.rules.Analysis) ---

    def find(self, family: int) -> int:
        return representative(self.parents, family)

    def unite(self, rows: Sequence[Row]) -> int:
        first = min(self.find(r.family) for r in rows)
        for row in rows:
            self.parents[self.find(row.family)] = first
        return first

    def new_family(self, extent: int) -> int:
        self.parents.append(len(self.parents))
        self.extents.append(extent)
        return len(self.parents) - 1

    def enter(self, equation: Equation, axis: int) -> int | None:
        """Returns a family for an equation that writes into zeros; None if it can't be a table's gradient."""
        extent = equation.outputs[0].shape[axis]
        if equation in self.barred or extent not in self.table_extents:
            return None
        family = self.new_family(extent)
        self.entries[family] = equation
        return family

    def access(self, family: int, equation: Equation, axis: int) -> None:
        self.accesses[equation] = (family, Access(equation, self.path, axis))

    def role(self, equation: Equation, role: str) -> None:
        self.roles[equation] = role
        if role in ("reduce", "contract") and any(e.op == "scan" for e in self.path):
            self.reduced_in_loops[equation] = None

    def mark(self) -> tuple:
        return (dict(self.accesses), list(self.refusals), list(self.dense_reads), list(self.mixed_with_dense))

    def restore(self, mark: tuple) -> None:
        self.accesses, self.refusals, self.dense_reads, self.mixed_with_dense = (type(m)(m) for m in mark)

    # --- the pass itself ---

    def start(self) -> None:
        block = self.program.block
        for k, axis in self.candidates.items():
            var = block.inputs[k]
            self.values[var] = Row(axis, self.new_family(var.shape[axis]), Same(k, var.dtype))
            if var in self.program.pulled:
                self.values[var] = self._pulled(var, self.values[var])
            self.whole[var] = frozenset()
        self.run(block.equations)

    def family_of(self, leaf: int) -> int:
        value = self.values[self.program.block.inputs[leaf]]
        assert isinstance(value, Row), "a candidate starts as rows"
        return self.find(value.family)

    def troubled(self) -> set[int]:
        """Returns families whose rows met an equation that needs all of them."""
        return {self.find(family) for family, _ in (*self.refusals, *self.dense_reads)}

    def run(self, equations: Sequence[Equation]) -> None:
        outer, self._equations = self._equations, equations
        known: dict[Leaf, Value] = self.values
        for equation in equations:
            self.equation(equation, [known.get(a) for a in equation.inputs])
        self._equations = outer

    def equation(self, equation: Equation, operands: Sequence[Value]) -> Sequence[Value]:
        """Interprets an equation; one that needs all rows is noted, and its results are dense."""
        self.roles.pop(equation, None)
        self.accesses.pop(equation, None)
        try:
            if equation in self.reading_whole and any(isinstance(v, Row) for v in operands):
                reason = "a loop or checkpoint of whose results all rows are needed"
                raise Mixes(reason) if equation.bodies else Mixes(*_OWN_LOOKUP)
            results = self.nested(equation, operands) if equation.bodies else self.plain(equation, operands)
        except Mixes as mixes:
            results = [None] * len(equation.outputs)
            self._read_whole(equation, operands, mixes)
        if self.pulled or self.program.pulled:
            results = [self._pulled(var, value) for var, value in zip(equation.outputs, results, strict=True)]
        self.values.update(zip(equation.outputs, results, strict=True))
        self._after(equation)
        if any(isinstance(v, Row) for v in results):
            self.roles.setdefault(equation, "rows")
            self._note_whole(equation)
            self._note_dense_operands(equation, operands, results)
        return results

    def _pulled(self, var: Var, value: Value) -> Value:
        if not isinstance(value, Row):
            return value
        if var in self.program.pulled:
            self.pulled.add(value.family)
        return replace(value, untouched=Const(0)) if self.is_pulled(value.family) else value

    def is_pulled(self, family: int) -> bool:
        """Returns whether every step touches all rows of a family."""
        return self.find(family) in map(self.find, self.pulled)

    def plain(self, equation: Equation, operands: Sequence[Value]) -> Sequence[Value]:
        rule = RULES.get(equation.op)
        if rule is not None:
            return self._named(equation, operands, rule(equation, operands, self))
        if any(isinstance(v, Row) for v in operands):
            raise Mixes(f"{equation.op} has no rule for rows")
        return [None] * len(equation.outputs)

    def _named(self, equation: Equation, operands: Sequence[Value], results: Sequence[Value]) -> Sequence[Value]:
        """Names unknown untouched values of results after the equation and its operands, so that equal ones are
        recognized."""
        if not any(isinstance(v, Row) and v.untouched == UNKNOWN for v in results):
            return results
        sources = tuple((a.type, _source(a, v)) for a, v in zip(equation.inputs, operands, strict=True))
        try:
            made = (equation.op, params_key(equation), sources)
            name = self.functions.setdefault(made, len(self.functions))
        except TypeError:  # a parameter that can't be hashed
            return results
        return [
            replace(v, untouched=Unknown((name, k))) if isinstance(v, Row) and v.untouched == UNKNOWN else v
            for k, v in enumerate(results)
        ]

    # --- loops and branches ---

    def unknown(self, atom: Atom) -> Value:
        return None

    def join(self, values: Sequence[Value], atoms: Sequence[Atom]) -> Value:
        """Returns rows if one of them is rows: the others can be restricted to them."""
        rows = [v for v in values if isinstance(v, Row)]
        if not rows:
            return values[0] if all(v == values[0] for v in values) else None
        axis = rows[0].axis
        if any(r.axis != axis for r in rows):
            raise Mixes("rows along different axes in a loop or a cond")
        untouched_values = [untouched_of(a, v, axis) for a, v in zip(atoms, values, strict=True)]
        return Row(
            axis,
            self.unite(rows),
            untouched_values[0] if all(untouched == untouched_values[0] for untouched in untouched_values) else UNKNOWN,
        )

    def widen(self, equation: Equation, k: int, carry: Value, result: Value) -> Value:
        if (
            isinstance(carry, Free)
            and isinstance(result, Free)
            and carry.untouched == result.untouched
            and carry.untouched != UNKNOWN
        ):
            return Free(carry.axes & result.axes, carry.untouched)
        is_rows = isinstance(carry, Row) or isinstance(result, Row)
        return super().widen(equation, k, carry, result) if is_rows else None

    def inside(self, value: Value) -> Value:
        if isinstance(value, Row) and value.axis == 0:
            raise Mixes("a scan over the rows of the table")
        return Row(value.axis - 1, value.family, _in_turns(value.untouched)) if isinstance(value, Row) else None

    def outside(self, value: Value) -> Value:
        return Row(value.axis + 1, value.family, _in_turns(value.untouched)) if isinstance(value, Row) else None

    def unconverged(self, equation: Equation) -> Sequence[Value]:
        raise Mixes("a loop whose carries don't converge")

    def while_loop(self, equation: Equation, operands: Sequence[Value]) -> Sequence[Value]:
        if any(isinstance(v, Row) for v in operands):
            raise Mixes("the table is used inside a while loop", _NO_WHILE, "body")
        return [None] * len(equation.outputs)

    def branches(self, equation: Equation, operands: Sequence[Value]) -> Sequence[Value]:
        mark = self.mark()
        results = super().branches(equation, operands)
        refusal = next((refusal for _, refusal in self.refusals[len(mark[1]) :]), None)
        if equation.op == "cond" and refusal is not None:  # the cond as a whole may still read all rows
            self.restore(mark)
            raise Mixes(f"inside a cond: {refusal.reason}", refusal.remedy, "body")
        return results

    def body(self, equation: Equation, block: Block, operands: Sequence[Value]) -> list[Value]:
        outer, self.path = self.path, (*self.path, equation)
        fixed, atoms = equation.border.consts, equation.inputs[equation.border.head :]
        for k, (var, operand) in enumerate(zip(block.inputs, atoms, strict=True)):
            if k < fixed and self.whole.get(operand) == frozenset():
                self.whole[var] = frozenset()
            else:
                self.whole.pop(var, None)
        results = super().body(equation, block, operands)
        self.path = outer
        return results

    # --- equations that need all rows ---

    def _read_whole(self, equation: Equation, values: Sequence[Value], mixes: Mixes) -> None:
        """Handles an equation that needs all rows: reads them, or refuses their families."""
        rows = [(a, v) for a, v in zip(equation.inputs, values, strict=True) if isinstance(v, Row)]
        extent = max((a.shape[v.axis] for a, v in rows), default=0)
        summed = why_summed(equation, mixes.reason, extent, self._equations) if mixes.kind == "sum" else None
        refusal = summed or Refusal(mixes.reason, equation.source, mixes.remedy, mixes.kind)
        possible = all(a in self.whole and not (self.path and self.whole[a]) for a, _ in rows)
        for _, row in rows:
            (self.dense_reads if possible else self.refusals).append((row.family, refusal))
        if possible:
            self.roles[equation] = "dense"
        else:
            self._note_loops(rows)

    def _note_loops(self, rows: Sequence[tuple[Atom, Row]]) -> None:
        """Notes loops and checkpoints whose results can't be computed for all rows, though their operands can."""
        made: dict[Atom, Equation] = {var: e for e in self._equations for var in e.outputs}
        waiting = [(atom, row.family) for atom, row in rows]
        while waiting:
            atom, family = waiting.pop()
            equation = made.get(atom)
            if equation is None or atom in self.whole or self.roles.get(equation) != "rows":
                continue
            sources = [a for a in equation.inputs if isinstance(a, Var) and isinstance(self.values.get(a), Row)]
            if can_be_run_again(equation):
                waiting += ((a, family) for a in sources)
            elif all(a in self.whole and not (self.path and self.whole[a]) for a in sources):
                self.could_read_whole.append((family, equation))

    def _after(self, equation: Equation) -> None:
        if self.path:
            return
        known = [self.after, self.whole] if self.roles.get(equation) == "dense" else [self.after]
        after = frozenset(f for atom in equation.inputs for families in known for f in families.get(atom, ()))
        if after:
            self.after.update(dict.fromkeys(equation.outputs, after))

    def _note_whole(self, equation: Equation) -> None:
        """Notes results that can be computed for all rows: new values of leaves, constants, and functions of such."""
        sources: frozenset[int] | None = frozenset()
        for atom in equation.inputs:
            if isinstance(atom, Var) and isinstance(self.values.get(atom), Row):
                needed = self.whole.get(atom)
                sources = None if sources is None or needed is None else sources | needed
        if self.roles[equation] != "rows" or not can_be_run_again(equation):
            sources = None
        for var in equation.outputs:
            value = self.values[var]
            if not isinstance(value, Row):
                continue
            if (
                not self.path
                and isinstance(value.untouched, Same)
                and value.untouched.leaf in self.updates.get(var, ())
            ):
                self.whole[var] = frozenset([value.family])
            elif sources is not None:
                self.whole[var] = sources
            elif not self.path and isinstance(value.untouched, Const):
                self.whole[var] = frozenset()
            else:
                self.whole.pop(var, None)

    def _note_dense_operands(self, equation: Equation, values: Sequence[Value], results: Sequence[Value]) -> None:
        if equation.op not in ALIGNED:
            return
        row = next(v for v in results if isinstance(v, Row))
        for atom, value in zip(equation.inputs, values, strict=True):
            dense = value is None or (isinstance(value, Free) and row.axis not in value.axes)
            if dense and atom.shape != () and not (isinstance(row.untouched, Const)):
                self.mixed_with_dense.append((row.family, equation))


def _source(atom: Atom, value: Value) -> Hashable:
    untouched = value.untouched if isinstance(value, (Row, Free)) else UNKNOWN
    if isinstance(untouched, Const):
        return np.asarray(untouched.value).tobytes()
    return atom_key(atom) if untouched == UNKNOWN else untouched


def _in_turns(untouched: UntouchedValue) -> UntouchedValue:
    return UNKNOWN if isinstance(untouched, Unknown) else untouched


# --- sums over all rows of a table that have a remedy of their own: full softmaxes, and sums under a mask of rows ---

_HANDS_ON = (ELEMENTWISE & MOVES) | {"optimization_barrier"}
_SPREADS = SHAPED | {"convert_element_type"}
_ROWS_OF_MASK = (
    "look up the rows that the mask has: rows = jnp.nonzero(mask, size=..., fill_value=len(t))[0]; "
    "t.at[rows].get(mode='fill', fill_value=0)"
)


def why_summed(equation: Equation, reason: str, rows: int, equations: Sequence[Equation]) -> Refusal | None:
    """Returns a more precise reason why a sum needs all rows of a table than the general one, if there is one.
    `equation`: a reduction over the rows, or a product that sums over them. `equations`: those of the block around
    it."""
    made: dict[Atom, Equation] = {var: e for e in equations for var in e.outputs}
    if equation in _softmaxes(equations, made):
        reason = f"{equation.op} over all rows of the table, for a full softmax"
        remedy = "use a sampled softmax, or accept that this table stays dense"
        return Refusal(reason, equation.source, remedy, "softmax")
    masked = equation if equation.op == "dot_general" else made.get(_origin(equation.inputs[0], made))
    if masked is None or masked.op not in ("mul", "select_n", "and", "dot_general"):
        return None
    for atom in masked.inputs:
        while atom in made and made[atom].op in _SPREADS:
            atom = made[atom].inputs[0]
        if atom.dtype == np.dtype(bool) and atom.type.size == rows:
            return Refusal(f"{reason}, under a mask of rows", equation.source, _ROWS_OF_MASK, "sum")
    return None


def _origin(atom: Atom, made: dict[Atom, Equation]) -> Atom:
    while atom in made and made[atom].op in _HANDS_ON and len(made[atom].inputs) == 1:
        atom = made[atom].inputs[0]
    return atom


def _softmaxes(equations: Sequence[Equation], made: dict[Atom, Equation]) -> frozenset[Equation]:
    """Returns the sums of exponentials in softmaxes (logsumexp and normalizers, too), and the maxima that are
    subtracted."""
    softmaxes: set[Equation] = set()
    maxima = [e for e in equations if e.op == "reduce_max"]
    for equation in equations:
        exponential = made.get(_origin(equation.inputs[0], made)) if equation.op == "reduce_sum" else None
        if exponential is None or exponential.op not in ("exp", "exp2"):
            continue
        softmaxes.add(equation)
        shifted = made.get(_origin(exponential.inputs[0], made))
        if shifted is not None and shifted.op == "sub":
            logits = _origin(shifted.inputs[0], made)
            same_axes = (m for m in maxima if m.params["axes"] == equation.params["axes"])
            softmaxes.update(m for m in same_axes if _origin(m.inputs[0], made) is logits)
    return frozenset(softmaxes)
