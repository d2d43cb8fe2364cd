"""Find the families whose step can run on the touched rows only, and say why the others can't.

An abstract interpretation over `ir.rowspace` values with the rules of `ir.rules`. Each candidate leaf starts as a
family of its own; families unite where their rows meet in one equation. A table's family is kept if

- each of its leaves comes back, off the touched rows, as it was or as a constant (under `lazy`: as anything);
- every use of it that is no row equation can read the leaf as a whole (before or after the update);
- the ids of its lookups can be computed before its rows are read.

On a refusal only its cause is dropped and the rest is analysed again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopar.ir.program import Atom, Block, Equation, Program, Var
from autopar.ir.row_ids import index_atoms
from autopar.ir.rowspace import Access, Const, Free, Refusal, Row, RowFacts, RowSpace, Same, Value
from autopar.ir.rules import ALIGNED, RULES, Mixes
from autopar.ir.slicing import hoist, needed_equations

_LATER = "needs deferred rows (planned); sparse='lazy' moves only the touched rows, which is another function"


def analyze_rows(program: Program, *, lazy: bool = False) -> tuple[Program, str]:
    """Fill `program.rows`.

    Args:
      program: A classified program.
      lazy: Accept leaves that change off the touched rows (they will not): the meaning of `sparse="lazy"`.
    """
    dropped: dict[int, Refusal] = {}
    refused: list[RowSpace] = []
    strangers: set[int] = set()
    barred: set[Equation] = set()
    while True:
        candidates = {k: axis for k, axis in program.candidates if k not in dropped and k not in strangers}
        run = _Run(program, candidates, lazy, barred=barred)
        run.start()
        found, entries = run.strangers()
        if found or entries:
            strangers |= found
            barred |= entries
            continue
        spaces = run.spaces()
        causes = {k: reason for space in spaces for k, reason in run.causes(space).items()}
        if not causes:
            break
        for space in spaces:
            bad = [k for k in space.leaves if k in causes]
            if set(bad) & set(space.tables):
                reason = _first_reason(space, causes, dropped)
                tables = tuple(k for k in bad if k in space.tables)
                refused.append(dataclasses.replace(space, family=-1, tables=tables, refusal=reason))
        dropped |= {k: reason for k, reason in causes.items() if k not in dropped}
    taken = {k for space in refused for k in space.tables}
    for k, axis in program.tables:
        if k not in taken and not any(k in s.leaves for s in spaces):
            refused.append(_lonely(program, k, axis, dropped.get(k)))
    facts = RowFacts(run.values, run.roles, tuple([*spaces, *refused]), tuple(run.parents), run.whole)
    note = f"{len(spaces)} families lift, {len(refused)} don't"
    return dataclasses.replace(program, rows=facts), note


def _first_reason(space: RowSpace, causes: dict[int, Refusal], dropped: dict[int, Refusal]) -> Refusal:
    """The most telling reason: that of a slot which went first, if there was one."""
    slots = [causes[k] for k in space.leaves if k in causes and k not in space.tables]
    earlier = [r for k, r in dropped.items() if k not in space.tables]
    return (slots or earlier or [causes[k] for k in space.tables if k in causes])[0]


def _lonely(program: Program, k: int, axis: int, reason: Refusal | None) -> RowSpace:
    reason = reason or Refusal("the step only reads it: there is no update to save")
    return RowSpace(-1, program.block.inputs[k].shape[axis], (k,), (axis,), (k,), (), reason)


@dataclass(eq=False)
class _Run:
    """One pass over the program with a given set of candidate leaves. Implements `ir.rules.Analysis`."""

    program: Program
    candidates: Mapping[int, int]
    lazy: bool
    values: dict[Var, Value] = field(default_factory=dict)
    roles: dict[Equation, str] = field(default_factory=dict)
    parents: list[int] = field(default_factory=list)
    extents: list[int] = field(default_factory=list)
    accesses: dict[Equation, tuple[int, Access]] = field(default_factory=dict)
    refusals: list[tuple[int, Refusal]] = field(default_factory=list)
    dense_reads: list[tuple[int, Refusal]] = field(default_factory=list)
    mixed_with_dense: list[tuple[int, Equation]] = field(default_factory=list)
    path: tuple[Equation, ...] = ()
    #: Equations that make rows which turned out to be no table's.
    barred: set[Equation] = field(default_factory=set)
    entries: dict[int, Equation] = field(default_factory=dict)
    #: Row values that can be had for all rows -> families whose committed leaves that needs.
    whole: dict[Atom, frozenset[int]] = field(default_factory=dict)
    #: Top-level variables -> families whose committed leaves they depend on.
    after: dict[Atom, frozenset[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        inputs = self.program.block.inputs
        self.table_extents = {inputs[k].shape[axis] for k, axis in self.candidates.items()}

    # --- what rules ask (ir.rules.Analysis) ---

    def find(self, family: int) -> int:
        while self.parents[family] != family:
            family = self.parents[family]
        return family

    def unite(self, rows: Sequence[Row]) -> int:
        first = min(self.find(r.family) for r in rows)
        for row in rows:
            self.parents[self.find(row.family)] = first
        return first

    def extent(self, family: int) -> int:
        return self.extents[self.find(family)]

    def new_family(self, extent: int) -> int:
        """A family by itself."""
        self.parents.append(len(self.parents))
        self.extents.append(extent)
        return len(self.parents) - 1

    def enter(self, equation: Equation, axis: int) -> int | None:
        """A family for what an equation puts into zeros; None where it can't be a table's gradient."""
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

    def checkpoint(self) -> tuple:
        return (dict(self.accesses), list(self.refusals), list(self.dense_reads), list(self.mixed_with_dense))

    def restore(self, mark: tuple) -> None:
        self.accesses, self.refusals, self.dense_reads, self.mixed_with_dense = (type(m)(m) for m in mark)

    def body(self, equation: Equation, block: Block, values: Sequence[Value]) -> list[Value]:
        outer, self.path = self.path, (*self.path, equation)
        fixed = equation.params["num_consts"] if equation.op == "scan" else len(block.inputs)
        for k, (var, value) in enumerate(zip(block.inputs, values, strict=True)):
            self.values[var] = value
            operand = equation.inputs[k]
            if k < fixed and self.whole.get(operand) == frozenset():
                self.whole[var] = frozenset()
            else:
                self.whole.pop(var, None)
        self._equations(block)
        self.path = outer
        return [self._value(a) for a in block.outputs]

    # --- the pass itself ---

    def start(self) -> None:
        block = self.program.block
        for k, axis in self.candidates.items():
            var = block.inputs[k]
            self.values[var] = Row(axis, self.new_family(var.shape[axis]), Same(k, var.dtype))
            self.whole[var] = frozenset()
        self._equations(block)

    def _value(self, atom: Atom) -> Value:
        return self.values.get(atom) if isinstance(atom, Var) else None

    def _equations(self, block: Block) -> None:
        for equation in block.equations:
            self._equation(equation)

    def _equation(self, equation: Equation) -> None:
        values = [self._value(a) for a in equation.inputs]
        self.roles.pop(equation, None)
        self.accesses.pop(equation, None)
        try:
            results = self._apply(equation, values)
        except Mixes as mixes:
            results = [None] * len(equation.outputs)
            self._read_whole(equation, values, mixes)
        for var, value in zip(equation.outputs, results, strict=True):
            self.values[var] = value
        self._after(equation)
        if any(isinstance(v, Row) for v in results):
            self.roles.setdefault(equation, "rows")
            self._note_whole(equation)
            self._note_dense_operands(equation, values, results)

    def _apply(self, equation: Equation, values: Sequence[Value]) -> Sequence[Value]:
        rule = RULES.get(equation.op)
        if rule is not None:
            return rule(equation, values, self)
        if any(isinstance(v, Row) for v in values):
            raise Mixes(f"{equation.op} has no rule for rows")
        return [None] * len(equation.outputs)

    def _read_whole(self, equation: Equation, values: Sequence[Value], mixes: Mixes) -> None:
        """An equation that needs all rows: read them, or refuse the families it needs them of."""
        rows = [(a, v) for a, v in zip(equation.inputs, values, strict=True) if isinstance(v, Row)]
        refusal = Refusal(mixes.reason, equation.source, mixes.remedy)
        possible = all(a in self.whole for a, _ in rows) and not (
            self.path and any(self.whole[a] for a, _ in rows if isinstance(a, Var))
        )
        for _, row in rows:
            (self.dense_reads if possible else self.refusals).append((row.family, refusal))
        if possible:
            self.roles[equation] = "dense"

    def _after(self, equation: Equation) -> None:
        """Which committed leaves the results depend on (top level only)."""
        if self.path:
            return
        found: set[int] = set()
        for atom in equation.inputs:
            if isinstance(atom, Var):
                found |= self.after.get(atom, frozenset())
                if self.roles.get(equation) == "dense":
                    found |= self.whole.get(atom, frozenset())
        if found:
            self.after |= {v: frozenset(found) for v in equation.outputs}

    def _note_whole(self, equation: Equation) -> None:
        """Results that can be had for all rows: new values of leaves, constants, and what is made of such."""
        updates = self._updates()
        sources: frozenset[int] | None = frozenset()
        for atom in equation.inputs:
            if isinstance(atom, Var) and isinstance(self.values.get(atom), Row):
                needed = self.whole.get(atom)
                sources = None if sources is None or needed is None else sources | needed
        if self.roles[equation] != "rows" or equation.bodies:
            sources = None
        for var in equation.outputs:
            value = self.values[var]
            if not isinstance(value, Row):
                continue
            if not self.path and isinstance(value.off, Same) and value.off.leaf in updates.get(var, ()):
                self.whole[var] = frozenset([value.family])
            elif sources is not None:
                self.whole[var] = sources
            elif not self.path and isinstance(value.off, Const):
                self.whole[var] = frozenset()
            else:
                self.whole.pop(var, None)

    def _updates(self) -> dict[Atom, tuple[int, ...]]:
        """Output variable -> the state inputs that it is the new value of."""
        if not hasattr(self, "_updates_cache"):
            found: dict[Atom, tuple[int, ...]] = {}
            for leaf, out in self.program.new_states.items():
                atom = self.program.block.outputs[out]
                found[atom] = (*found.get(atom, ()), leaf)
            self._updates_cache = found
        return self._updates_cache

    def _note_dense_operands(self, equation: Equation, values: Sequence[Value], results: Sequence[Value]) -> None:
        if equation.op not in ALIGNED:
            return
        row = next(v for v in results if isinstance(v, Row))
        for atom, value in zip(equation.inputs, values, strict=True):
            dense = value is None or (isinstance(value, Free) and row.axis not in value.axes)
            if dense and atom.shape != () and not (isinstance(row.off, Const)):
                self.mixed_with_dense.append((row.family, equation))

    # --- what was found ---

    def _members(self) -> dict[int, list[int]]:
        """Family -> its leaves."""
        members: dict[int, list[int]] = {}
        for k in self.candidates:
            value = self.values[self.program.block.inputs[k]]
            assert isinstance(value, Row), "a candidate starts as rows"
            members.setdefault(self.find(value.family), []).append(k)
        return members

    def strangers(self) -> tuple[set[int], set[Equation]]:
        """What has as many rows as a table by chance, belongs to none, and stands in the way of something: state
        leaves, and equations that put something into zeros."""
        troubled = {self.find(f) for f, _ in (*self.refusals, *self.dense_reads)}
        looked_up = {k for k, _ in self.program.tables}
        members = self._members()
        tables = {family for family, leaves in members.items() if looked_up.intersection(leaves)}
        leaves = {k for family, found in members.items() if family in troubled - tables for k in found}
        entries = {e for f, e in self.entries.items() if self.find(f) in troubled - tables}
        return leaves, entries

    def spaces(self) -> list[RowSpace]:
        """The families that hold a table, with everything in them."""
        looked_up = {k for k, _ in self.program.tables}
        found = []
        for family, leaves in self._members().items():
            tables = tuple(k for k in leaves if k in looked_up)
            accesses = tuple(a for f, a in self.accesses.values() if self.find(f) == family)
            if tables and any(a.is_lookup for a in accesses) and self._is_updated(leaves):
                axes = tuple(self.candidates[k] for k in leaves)
                space = RowSpace(family, self.extents[family], tuple(leaves), axes, tables, accesses)
                found.append(dataclasses.replace(space, depends_on=self._id_families(space), notes=self._notes(space)))
        return _closed(found)

    def _is_updated(self, leaves: Sequence[int]) -> bool:
        block, new = self.program.block, self.program.new_states
        return any(k in new and block.outputs[new[k]] is not block.inputs[k] for k in leaves)

    def _notes(self, space: RowSpace) -> tuple[str, ...]:
        reads = [f"read whole: {r}" for f, r in self.dense_reads if self.find(f) == space.family]
        for atom, output in zip(self.program.block.outputs, self.program.outputs, strict=True):
            value = self._value(atom)
            if isinstance(value, Row) and self.find(value.family) == space.family and output.state not in space.leaves:
                reads.append(f"the output {output.path} is written with all rows, {value.off} on untouched ones")
        return tuple(dict.fromkeys(reads))

    def causes(self, space: RowSpace) -> dict[int, Refusal]:
        """Leaves that keep the family from being lifted, with the reason."""
        for family, refusal in self.refusals:
            if self.find(family) == space.family:
                return dict.fromkeys(space.leaves, refusal)
        changed = {k: r for k in space.leaves if (r := self._changes(space, k)) is not None}
        if changed:
            return changed
        if space.family in space.depends_on:
            where = self._own_rows_line(space)
            reason = Refusal("the ids of a lookup depend on rows of the same table", where, "compute the ids first")
            return dict.fromkeys(space.leaves, reason)
        return self._output_causes(space)

    def _changes(self, space: RowSpace, leaf: int) -> Refusal | None:
        """Why a leaf's new value isn't known off the touched rows."""
        new = self.program.new_states
        path = self.program.inputs[leaf].path
        if leaf not in new:
            return None
        atom = self.program.block.outputs[new[leaf]]
        value = self._value(atom)
        source = self._defined_at(atom)
        if isinstance(value, Row) and self.find(value.family) == space.family and value.axis == self.candidates[leaf]:
            if value.off == Same(leaf, self.program.block.inputs[leaf].dtype) or isinstance(value.off, Const):
                late = any(self.find(f) == space.family for f in self.after.get(atom, ()))
                return Refusal(f"{path} depends on a read of the whole updated table", source) if late else None
            mixed = next((e for f, e in self.mixed_with_dense if self.find(f) == space.family), None)
            if self.lazy and mixed is None:
                return None
            read = self._product(space)
            if mixed is not None or read is not None:
                return read or Refusal("its gradient is dense", mixed.source if mixed else source)
            return Refusal(f"{path} changes on every row, touched or not (momentum, decay, ...)", source, _LATER)
        return self._product(space) or Refusal(
            f"{path} comes back as something that is not computed row by row", source
        )

    def _product(self, space: RowSpace) -> Refusal | None:
        """What makes the gradient dense, a product over all rows or a cond: it tells more than what comes of it."""
        reads = [r for f, r in self.dense_reads if self.find(f) == space.family]
        inside = next((r for r in reads if "inside a" in r.reason), None)
        if inside is not None:
            return inside
        return reads[0] if any("product" in r.reason for r in reads) else None

    def _defined_at(self, atom: Atom):
        for equation in reversed(self.program.block.equations):
            if any(v is atom for v in equation.outputs):
                return equation.source
        return None

    def _output_causes(self, space: RowSpace) -> dict[int, Refusal]:
        """Outputs that aren't states and hold a row value which can't be had for all rows."""
        for atom, output in zip(self.program.block.outputs, self.program.outputs, strict=True):
            value = self._value(atom)
            if not isinstance(value, Row) or self.find(value.family) != space.family or atom in self.whole:
                continue
            if output.state is None or output.state not in space.leaves:
                reason = Refusal(f"the output {output.path} needs all of its rows", self._defined_at(atom))
                return dict.fromkeys(space.leaves, reason)
        return {}

    def _id_families(self, space: RowSpace) -> tuple[int, ...]:
        """Families whose rows the ids of this one depend on directly."""
        block = self.program.block
        found: set[int] = set()
        for access in space.accesses:
            for atom in index_atoms(access):
                inner, outer = hoist(access.path, atom)
                roots = [outer, *(a for e in inner for a in e.inputs)]
                found |= self._families_in(inner)
                found |= self._families_in(needed_equations(block, roots))
        return tuple(sorted(found))

    def _families_in(self, equations: Sequence[Equation]) -> set[int]:
        """Families whose routed rows the equations need (a read of the whole old leaf needs none)."""
        found: set[int] = set()
        for equation in equations:
            if self.roles.get(equation) == "dense" and not any(self.whole.get(a) for a in equation.inputs):
                continue
            for atom in (*equation.inputs, *equation.outputs):
                value = self._value(atom)
                if isinstance(value, Row):
                    found.add(self.find(value.family))
            for body in equation.bodies:
                found |= self._families_in(body.equations)
        return found

    def _own_rows_line(self, space: RowSpace):
        for access in space.accesses:
            if access.is_lookup:
                return access.equation.source
        return None


def _closed(spaces: list[RowSpace]) -> list[RowSpace]:
    """`depends_on` through any number of families."""
    direct = {s.family: set(s.depends_on) for s in spaces}
    for _ in spaces:
        for found in direct.values():
            found |= {g for f in tuple(found) for g in direct.get(f, ())}
    return [dataclasses.replace(s, depends_on=tuple(sorted(direct[s.family]))) for s in spaces]
