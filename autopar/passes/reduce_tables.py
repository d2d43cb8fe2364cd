"""Reductions over all rows of tables on hosts: each rank reduces the rows that it owns, and the results are combined.

A step may read a whole table: a parameter norm, a mean row, `jnp.all(jnp.isfinite(new))`. On hosts no rank has all
rows, and a table may be larger than a device. What is computed row by row from a whole table is therefore not computed
where it stands, but where a reduction over the rows ends it: the `reduce_table` equation holds, as its body, everything
between the table and the reduction for a block of rows. The runtime runs the body over the rank's rows, block by block,
and `localize` adds the reduction over the ranks.

Rows are read where they are: a table before its update or after it, but not both in one reduction, for it is updated in
place. Whatever else needs all rows at once (a sort, an output, a loop) is refused with its line.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopar.analysis.batch_rules import SUMMED
from autopar.analysis.local import REDUCES, NotLocal, place_spread
from autopar.ir.bound_plan import BoundPlan
from autopar.ir.operations import OPERATIONS, plain_name, split
from autopar.ir.program import Atom, Block, Equation, Output, Program, Var
from autopar.ir.slicing import eliminate_dead, nearest_line
from autopar.passes.reducing.table_body import READ_REMEDY, Body, RowSource, TableRows, Tables, read_refusal

#: Equations that update tables in place.
_WRITES = ("ap.sweep", "ap.fill", "ap.commit", "ap.densify")
#: What to do in place of `jnp.histogram` and the like.
_COUNT = (
    "Compute it apart from the step, or of looked-up rows alone; count by comparisons, "
    "(table[..., None] < edges).sum((0, 1)), in place of jnp.histogram"
)
#: Equations of lookups and updates, which take a stored table as it is.
_TAKES_STORED = frozenset({"ap.pull", "ap.catch_up", "ap.flush", "ap.reduce_rows"})


def reduce_tables(program: Program, bound: BoundPlan) -> tuple[Program, str]:
    """The program with its reads of whole tables on hosts as `reduce_table` equations.

    Raises:
      NotLocal: something needs all rows of a table and is no such reduction.
    """
    layouts = {f.family: f.layout for f in bound.families if f.on_hosts and f.layout is not None}
    if not layouts:
        return program, "no table is on hosts"
    walk = _Walk(program=program)
    for space in program.rows.spaces:
        if space.family in layouts:
            for k, axis in space.row_axes.items():
                path = program.inputs[k].path
                walk.store(program.block.inputs[k], TableRows(axis, 1, layouts[space.family], path))
    for equation in program.block.equations:
        walk.add(equation)
    block, _ = eliminate_dead(Block(program.block.inputs, tuple(walk.equations), walk.outputs()))
    return dataclasses.replace(program, block=block), f"{walk.count} reductions over all rows of tables"


@dataclass(eq=False)
class _Walk(Tables):
    """The block being written."""

    program: Program = field(kw_only=True)
    #: Stored table (an input) -> reductions of it so far.
    readers: dict[Var, list[Var]] = field(default_factory=dict)
    written: set[Var] = field(default_factory=set)
    count: int = 0

    def __post_init__(self) -> None:
        block, new = self.program.block, self.program.new_states
        #: New values of state leaves -> the leaf.
        self.updates = {block.outputs[out]: block.inputs[k] for k, out in new.items()}

    def store(self, var: Var, rows: TableRows) -> None:
        """A stored table, as it comes."""
        self.rows[var] = rows
        self.sources[var] = RowSource((var,), var, is_old=True)

    def outputs(self) -> tuple[Atom, ...]:
        """The block's. Tables are returned as they are stored; what is computed from all of their rows isn't.

        Raises:
          NotLocal: such an output.
        """
        block = self.program.block
        atoms, refused = [], list[NotLocal]()
        for atom, output in zip(block.outputs, self.program.outputs, strict=True):
            source = self.sources.get(atom)
            what = self._reads_whole(atom, output)
            if what:
                remedy = READ_REMEDY if output.state is None else ""
                refused.append(read_refusal(self.rows[atom], what, nearest_line(block, atom), remedy))
            atoms.append(atom if source is None else source.atoms[0])
        if refused:
            first = refused[0]
            tables = tuple(dict.fromkeys(path for error in refused for path in error.tables))
            raise NotLocal(first.reason, first.source, first.remedy, tables)
        return tuple(atoms)

    def _reads_whole(self, atom: Atom, output: Output) -> str:
        """What needs all rows of a table for an output; nothing where tables are returned as they are stored."""
        source = self.sources.get(atom)
        is_stored = source is not None and source.leaf is not None
        if atom not in self.rows:
            return ""
        if output.state is None:
            return "" if is_stored else f"the output {output.path} needs them"
        if is_stored and self.program.block.inputs[output.state] in self.sources:
            return ""
        return f"the new value of {self.program.inputs[output.state].path} needs them"

    # --- equations ---

    def add(self, equation: Equation) -> None:
        """Rewrite an equation."""
        if equation.op in _WRITES:
            self._write(equation)
        elif equation.op == "ap.changes":
            self._watch(equation)
        elif equation.op == "ap.whole" and equation.inputs[0] in self.sources:
            (stored,), (out,) = equation.inputs, equation.outputs
            self.rows[out], self.sources[out] = self.rows[stored], self.sources[stored]
        elif not any(a in self.rows for a in equation.inputs):
            self.append(equation)
        elif equation.op in _TAKES_STORED:
            self._take(equation)
        elif equation.op == "optimization_barrier":
            self._barrier(equation)
        else:
            self._compute(equation)

    def _take(self, equation: Equation) -> None:
        for atom in equation.inputs:
            source = self.sources.get(atom)
            if atom in self.rows and (source is None or source.leaf is None):
                raise read_refusal(self.rows[atom], "its update needs them", equation)
        self.append(equation)

    def _watch(self, equation: Equation) -> None:
        """What tells whether a sweep is needed, which waits for what reads the rows before it."""
        space = next(s for s in self.program.rows.spaces if s.family == equation.params["family"])
        self._take(self._waiting_for(equation, [self.program.block.inputs[k] for k in space.leaves]))

    def _waiting_for(self, equation: Equation, leaves: Sequence[Var]) -> Equation:
        """An equation that waits for some values (its group `first`): now for the reductions of some tables, too."""
        parts = split(equation.op, equation.params, equation.inputs)
        first = [v for leaf in leaves for v in self.readers.get(leaf, ())]
        rest = [a for a in parts.pop("first") if a not in self.rows and a not in first]
        kept = (a for atoms in parts.values() for a in atoms)
        return dataclasses.replace(equation, inputs=(*kept, *rest, *first))

    def _write(self, equation: Equation) -> None:
        """An update in place, which waits for what reads the rows before it."""
        leaves = self._written_leaves(equation)
        waits = "first" in OPERATIONS[equation.op].groups  # of a sweep, its condition does
        fixed = self._waiting_for(equation, leaves) if waits and leaves else equation
        if equation.op == "ap.densify":
            self.append(fixed)
            rows, axis = equation.inputs[0], equation.params["axis"]
            self._densified(equation, rows, axis, leaves)
            return
        self._take(fixed)
        if not leaves:
            return
        for leaf, out in zip(leaves, equation.outputs, strict=True):
            self.rows[out] = self.rows[leaf]
            self.sources[out] = RowSource((out,), leaf)
            self.written.add(leaf)

    def _written_leaves(self, equation: Equation) -> list[Var]:
        """The stored tables that an equation writes to."""
        if equation.op == "ap.densify":
            leaf = self.updates.get(equation.outputs[0])
            return [leaf] if leaf is not None and leaf in self.sources else []
        parts = split(equation.op, equation.params, equation.inputs)
        stored = parts["leaves"] if equation.op == "ap.sweep" else parts["leaf"]
        leaves_of = [self.sources[a].leaf for a in stored if a in self.sources]
        leaves = [leaf for leaf in leaves_of if leaf is not None]
        return leaves if len(leaves) == len(stored) else []  # not on hosts

    def _densified(self, equation: Equation, rows: Atom, axis: int, leaves: Sequence[Var]) -> None:
        """All rows from the touched ones: stored if it is a leaf's new value."""
        (out,) = equation.outputs
        like = self._family(equation)
        if like is None:
            return
        self.rows[out] = dataclasses.replace(like, axis=axis)
        if leaves:
            self.sources[out] = RowSource((out,), leaves[0])
            self.written.add(leaves[0])
        else:
            self.sources[out] = RowSource((rows, equation.inputs[1]))

    def _family(self, equation: Equation) -> TableRows | None:
        """The rows of a family's first table on hosts."""
        family = equation.inputs[1].type.family
        leaves = next(s.tables for s in self.program.rows.spaces if s.family == family)
        return self.rows.get(self.program.block.inputs[leaves[0]])

    def _barrier(self, equation: Equation) -> None:
        """What isn't computed here needs no barrier."""
        rest = []
        for atom, out in zip(equation.inputs, equation.outputs, strict=True):
            if atom in self.rows:
                self.rows[out] = self.rows[atom]
                self.waiting[Equation("copy", (atom,), (out,))] = {0: self.rows[atom].axis}
            else:
                rest.append((atom, out))
        if rest:
            inputs, outputs = zip(*rest, strict=True)
            self.append(dataclasses.replace(equation, inputs=inputs, outputs=outputs))

    def _compute(self, equation: Equation) -> None:
        """An ordinary equation of whole tables."""
        rows_of = {k: self.rows[a] for k, a in enumerate(equation.inputs) if a in self.rows}
        some = next(iter(rows_of.values()))
        if equation.effects or equation.bodies or equation.primitive is None or not equation.outputs:
            if not equation.bodies:
                raise read_refusal(some, f"by {plain_name(equation.op)}", equation, READ_REMEDY)
            if equation.origin is None or equation.origin.is_own_loop:
                remedy = "Reduce them outside of it, and pass the result in"
                raise read_refusal(some, "in a loop or branch", equation, remedy)
            raise read_refusal(some, "by a function of JAX that loops (a histogram does)", equation, _COUNT)
        if len({r.layout for r in rows_of.values()}) > 1:
            raise read_refusal(some, f"{equation.op} of tables that are stored in different ways", equation)
        spread = {k: rows.axis for k, rows in rows_of.items()}
        try:
            placed = place_spread(equation, spread, 1)
        except NotLocal:
            raise read_refusal(some, f"by {plain_name(equation.op)}", equation) from None
        by_rows = {**placed.needed, **spread}
        if placed.axis != SUMMED:
            rows = some.at(placed.axis, equation.outputs[0].shape[placed.axis])
            if rows is None:
                raise read_refusal(some, f"{equation.op} lets them run into each other", equation)
            self.rows.update(dict.fromkeys(equation.outputs, rows))
            self.waiting[equation] = by_rows
        elif equation.op in REDUCES:
            self._reduce(equation, by_rows, some)
        else:
            raise read_refusal(some, f"by {plain_name(equation.op)}", equation)

    # --- reductions ---

    def _reduce(self, equation: Equation, by_rows: Mapping[int, int], like: TableRows) -> None:
        body = Body(self, like)
        (out,) = equation.outputs
        base = equation.inputs[0] if equation.op == "scatter-add" else None
        total = out if base is None else Var(out.type)
        made = body.of(equation, by_rows)
        self._check_order(body, equation)
        self.append(dataclasses.replace(made, outputs=(total,)))
        for source in body.stored:
            if source.is_old and source.leaf is not None:
                self.readers.setdefault(source.leaf, []).append(total)
        if base is not None:
            self.append(Equation("ap.plus", (base, total), (out,), origin=equation.origin))
        self.count += 1

    def _check_order(self, body: Body, equation: Equation) -> None:
        for source in body.stored:
            if source.is_old and source.leaf in self.written:
                what = f"{equation.op} needs them as they were before the update, and the update as well"
                remedy = "Tables are updated in place: reduce the old and the new one by themselves, or the gradient"
                raise read_refusal(self.rows[source.atoms[0]], what, equation, remedy)
