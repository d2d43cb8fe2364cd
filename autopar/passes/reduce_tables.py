"""Reduces over all rows of tables on hosts: each rank reduces the rows that it owns, and the results are combined.

A step may read a whole table: a parameter norm, a mean row, `jnp.all(jnp.isfinite(new))`. On hosts no rank has all
rows, and a table may be larger than a device. So row-by-row equations between the table and a reduction over its rows
become the body of a `reduce_table` equation, for a block of rows. The runtime runs the body over the rank's rows, block
by block, and `localize` adds the reduction over the ranks.

Rows are read in place: a table before its update or after it, but not both in one reduction. Any other read of all rows
at once (a sort, an output, a loop) is refused with its line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.analysis.batch import SUMMED
from autopar.analysis.local import REDUCES, follow_spread, resized_params
from autopar.analysis.primitives import ELEMENTWISE
from autopar.ir.layout import RowLayout
from autopar.ir.local import NotLocal
from autopar.ir.operations import OPERATIONS, plain_name, split
from autopar.ir.program import ArrayType, Atom, Block, Equation, Literal, Output, Program, Var
from autopar.ir.program_plan import ProgramPlan
from autopar.ir.reductions import neutral
from autopar.ir.slicing import eliminate_dead, nearest_line
from autopar.ir.writer import Writer

# --- the body of a `reduce_table` equation, for a block of rows ---
#
# Other values with a table's rows (a mask, row numbers) are computed in the body if they are elementwise or broadcasts,
# so that no program makes an array as large as a table for them.
#: Most elements of a value of a block of rows: some megabytes, whatever the table's size.
_BLOCK_ELEMENTS = 1 << 20
#: The remedy where all rows are needed at once.
READ_REMEDY = "Reduce them (a sum, product, extremum, norm or mean over the rows), before the update or after it"
_COMPUTABLE = ELEMENTWISE | {"broadcast_in_dim"}


@dataclass(frozen=True, slots=True)
class TableRows:
    """A value of all rows, which no rank has; `factor` elements of its axis belong to each row."""

    axis: int
    factor: int
    layout: RowLayout
    path: str

    def at(self, axis: int, size: int) -> TableRows | None:
        """Returns the same rows along an axis of another value; None if its elements don't belong to rows."""
        factor = size // self.layout.extent
        return None if size % self.layout.extent else replace(self, axis=axis, factor=factor)


@dataclass(frozen=True, slots=True, eq=False)
class RowSource:
    """The values that hold the rows of a value of all rows."""

    atoms: tuple[Atom, ...]  #: A stored table; or touched rows and their route, the padding row standing for others.
    leaf: Var | None = None  #: The input that is the stored table.
    is_old: bool = False  #: The stored table is read before its update.


@dataclass(eq=False)
class Tables(Writer):
    """A block being written, and its values of all rows."""

    rows: dict[Atom, TableRows] = field(default_factory=dict)  #: Value of all rows -> its rows.
    sources: dict[Atom, RowSource] = field(default_factory=dict)  #: Value that is stored or densified -> its source.
    #: Row-by-row equation on whole tables, not written yet -> operands that are taken by rows, with their axes.
    waiting: dict[Equation, Mapping[int, int]] = field(default_factory=dict)


def read_refusal(rows: TableRows, what: str, equation: Equation | None, remedy: str = READ_REMEDY) -> NotLocal:
    """Returns the error for a read of a whole table: `what` needs it."""
    where = None if equation is None else equation.source
    reason = f"all rows of a table are read at once, of {rows.path}: {what}"
    return NotLocal(reason, where, remedy, (rows.path,))


class ReductionBody(Writer):
    """Writes the body of a `reduce_table` equation: what lies between tables and a reduction, for a block of rows.

    Its inputs are the rows' numbers (-1 for none), blocks of stored tables, blocks of functions of touched rows, blocks
    of dense arrays with all rows, and other dense values.
    """

    def __init__(self, walk: Tables, like: TableRows) -> None:
        super().__init__()
        self._walk = walk
        self._like = like
        self._by_rows: dict[Atom, TableRows] = {}  #: Value that is taken by rows -> its rows.
        #: Equations of the body, last ones first, with their operands that are taken by rows, and the results' rows.
        self._kept: list[tuple[Equation, Mapping[int, int], TableRows]] = []
        self.stored: list[RowSource] = []  #: The stored tables that it reads.

    def reduction(self, equation: Equation, by_rows: Mapping[int, int]) -> Equation:
        """Returns the `reduce_table` equation in place of a reduction. `by_rows`: operands to take by rows -> axes."""
        self._collect(equation, by_rows)
        layout, widest = self._like.layout, max(a.type.size // self._like.layout.extent for a in self._by_rows)
        self._size = max(1, min(layout.shard_rows, _BLOCK_ELEMENTS // max(widest, 1)))
        numbers = Var(ArrayType((self._size,), np.dtype(np.int32)))
        self._numbers = numbers
        self._env: dict[Atom, Var] = {}
        self._whole: dict[Atom, Var] = {}
        groups: dict[str, list[tuple[tuple[Atom, ...], Var, int, int]]] = {"stored": [], "touched": [], "dense": []}
        inside = {v for e, _, _ in self._kept for v in e.outputs}
        for atom, rows in self._by_rows.items():
            if atom not in inside:
                kind, atoms = self._kind(atom)
                self._env[atom] = Var(self._type(atom, rows))
                groups[kind].append((atoms, self._env[atom], rows.axis, rows.factor))
        for kept, operands, rows in reversed(self._kept):
            self._write(kept, operands, rows)
        part = self._write_reduction(equation, by_rows)
        entries_ = [entry for entries in groups.values() for entry in entries]
        inputs = (*(a for atoms, *_ in entries_ for a in atoms), *self._whole)
        block = Block((numbers, *(v for _, v, *_ in entries_), *self._whole.values()), tuple(self.equations), (part,))
        params = {
            "op": REDUCES[equation.op],
            "layout": self._like.layout,
            "rows": self._size,
            **{kind: tuple((axis, factor) for _, _, axis, factor in entries) for kind, entries in groups.items()},
        }
        made = Equation("ap.reduce_table", inputs, (part,), params, (block,))
        return replace(made, info=equation.info, origin=equation.origin)

    def _collect(self, equation: Equation, by_rows: Mapping[int, int]) -> None:
        """Collects the equations that a reduction needs by rows, last ones first."""
        self._take_by_rows(equation, by_rows)
        walk = self._walk
        for made in reversed((*walk.equations, *walk.waiting)):
            found = [self._by_rows[v] for v in made.outputs if v in self._by_rows]
            if not found:
                continue
            operands = walk.waiting.get(made)
            if operands is None:
                operands = self._computable(made, found[0])
            if operands is not None:
                self._kept.append((made, operands, found[0]))
                self._take_by_rows(made, operands)

    def _take_by_rows(self, equation: Equation, by_rows: Mapping[int, int]) -> None:
        for k, axis in by_rows.items():
            atom = equation.inputs[k]
            rows = self._like.at(axis, atom.shape[axis])
            if rows is None or self._by_rows.setdefault(atom, rows) != rows:
                raise read_refusal(self._like, f"{equation.op} needs them in two ways", equation)

    def _computable(self, equation: Equation, rows: TableRows) -> Mapping[int, int] | None:
        """Returns the operands that an equation on no table takes by rows in the body; None if it can't be there."""
        out = equation.outputs[0]
        if equation.op == "iota" and not equation.inputs:
            return {} if rows.factor == 1 or equation.params["dimension"] != rows.axis else None
        if equation.op not in _COMPUTABLE or equation.bodies or equation.effects or len(equation.outputs) != 1:
            return None
        if equation.op == "broadcast_in_dim":
            dims, shape = equation.params["broadcast_dimensions"], equation.inputs[0].shape
            inner = dims.index(rows.axis) if rows.axis in dims else None
            return {} if inner is None or shape[inner] != out.shape[rows.axis] else {0: inner}
        if any(len(a.shape) not in (0, len(out.shape)) for a in equation.inputs):
            return None
        along = [k for k, a in enumerate(equation.inputs) if a.shape and a.shape[rows.axis] == out.shape[rows.axis]]
        return dict.fromkeys(along, rows.axis) if along else None

    def _kind(self, atom: Atom) -> tuple[str, tuple[Atom, ...]]:
        source = self._walk.sources.get(atom)
        if source is None:
            return "dense", (atom,)
        if source.leaf is None:
            return "touched", source.atoms
        self.stored.append(source)
        return "stored", source.atoms

    def _type(self, atom: Atom, rows: TableRows) -> ArrayType:
        return atom.type.resized(rows.axis, self._size * rows.factor)

    def _operand(self, equation: Equation, k: int, by_rows: Mapping[int, int]) -> Atom:
        atom = equation.inputs[k]
        if k in by_rows:
            return self._env[atom]
        if isinstance(atom, Literal):
            return atom
        if atom in self._walk.rows:
            raise read_refusal(self._like, f"by {equation.op}", equation)
        return self._whole.setdefault(atom, Var(atom.type))

    def _write(self, equation: Equation, by_rows: Mapping[int, int], rows: TableRows) -> None:
        """Writes an equation for a block of rows."""
        outputs = tuple(Var(self._type(v, rows)) for v in equation.outputs)
        self._env.update(zip(equation.outputs, outputs, strict=True))
        if equation.op == "iota" and equation.params["dimension"] == rows.axis:
            params = {"axis": rows.axis, "shape": outputs[0].shape, "dtype": outputs[0].dtype}
            self.append(Equation("ap.numbered", (self._numbers,), outputs, params))
            return
        if equation.primitive is None:  # a copy in place of a barrier
            self._env[equation.outputs[0]] = self._env[equation.inputs[0]]
            return
        inputs = tuple(self._operand(equation, k, by_rows) for k in range(len(equation.inputs)))
        params = resized_params(equation, by_rows, rows.axis, outputs[0].shape[rows.axis])
        self.append(replace(equation, inputs=inputs, outputs=outputs, params=params, original=None))

    def _write_reduction(self, equation: Equation, by_rows: Mapping[int, int]) -> Var:
        """Writes the reduction of a block, in which rows of the number -1 don't count."""
        inputs = []
        for k, atom in enumerate(equation.inputs):
            if equation.op == "scatter-add" and k == 0:
                inputs.append(self.zeros(atom.type))
            elif k in by_rows:
                inputs.append(self._only_rows(self._env[atom], self._by_rows[atom], equation.op))
            else:
                inputs.append(self._operand(equation, k, by_rows))
        part = Var(equation.outputs[0].type)
        self.append(replace(equation, inputs=tuple(inputs), outputs=(part,), original=None))
        return part

    def _only_rows(self, value: Var, rows: TableRows, op: str) -> Var:
        params = {"axis": rows.axis, "factor": rows.factor, "fill": neutral(REDUCES[op], value.dtype)}
        return self.emit("ap.only_rows", (value, self._numbers), value.type, params)


#: Operations that update tables in place.
_WRITES = ("ap.sweep", "ap.fill", "ap.commit", "ap.densify")
#: The remedy for `jnp.histogram` and the like.
_COUNT = (
    "Compute it apart from the step, or of looked-up rows alone; count by comparisons, "
    "(table[..., None] < edges).sum((0, 1)), in place of jnp.histogram"
)
#: Operations of lookups and updates, which take a stored table.
_TAKES_STORED = frozenset({"ap.pull", "ap.catch_up", "ap.flush", "ap.reduce_rows"})


def reduce_tables(program: Program, bound: ProgramPlan) -> tuple[Program, str]:
    """Writes reads of whole tables on hosts as `reduce_table` equations; raises NotLocal for a read that is no
    reduction."""
    if not bound.host_layouts:
        return program, "no table is on hosts"
    walk = _Walk(program=program)
    for k, (layout, axis) in bound.hosted(program).items():
        walk.store(program.block.inputs[k], TableRows(axis, 1, layout, program.inputs[k].path))
    for equation in program.block.equations:
        walk.add(equation)
    block, _ = eliminate_dead(Block(program.block.inputs, tuple(walk.equations), walk.outputs()))
    return replace(program, block=block), f"{walk.count} reductions over all rows of tables"


@dataclass(eq=False)
class _Walk(Tables):
    """Rewrites the program's block."""

    program: Program = field(kw_only=True)
    readers: dict[Var, list[Var]] = field(default_factory=dict)  #: Stored table (an input) -> its reductions so far.
    written: set[Var] = field(default_factory=set)  #: Stored tables (inputs) that were updated.
    count: int = 0  #: Number of reductions.

    def __post_init__(self) -> None:
        block, new = self.program.block, self.program.new_states
        #: New value of a state leaf -> the leaf.
        self.updates = {block.outputs[out]: block.inputs[k] for k, out in new.items()}

    def store(self, var: Var, rows: TableRows) -> None:
        self.rows[var] = rows
        self.sources[var] = RowSource((var,), var, is_old=True)

    def outputs(self) -> tuple[Atom, ...]:
        """Returns the block's outputs; raises NotLocal if one needs all rows of a table and isn't stored itself."""
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
        """Says why an output needs all rows of a table; "" if it doesn't, or is stored itself."""
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
        if equation.op in _WRITES:
            self._write(equation)
        elif equation.op == "ap.changes":
            space = next(s for s in self.program.facts.spaces if s.family == equation.params["family"])
            self._take(self._after_readers(equation, [self.program.block.inputs[k] for k in space.leaves]))
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

    def _after_readers(self, equation: Equation, leaves: Sequence[Var]) -> Equation:
        """Returns an equation that runs after the reductions of tables before their update."""
        parts = split(equation.op, equation.params, equation.inputs)
        first = [v for leaf in leaves for v in self.readers.get(leaf, ())]
        rest = [a for a in parts.pop("first") if a not in self.rows and a not in first]
        kept = (a for atoms in parts.values() for a in atoms)
        return replace(equation, inputs=(*kept, *rest, *first))

    def _write(self, equation: Equation) -> None:
        """Writes an update in place, after reductions of the table before it."""
        leaves = self._written_leaves(equation)
        waits = "first" in OPERATIONS[equation.op].groups  # a sweep waits by its condition
        fixed = self._after_readers(equation, leaves) if waits and leaves else equation
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
        """Returns the stored tables that an equation updates; [] if they aren't on hosts."""
        if equation.op == "ap.densify":
            leaf = self.updates.get(equation.outputs[0])
            return [leaf] if leaf is not None and leaf in self.sources else []
        parts = split(equation.op, equation.params, equation.inputs)
        stored = parts["leaves"] if equation.op == "ap.sweep" else parts["leaf"]
        leaves_of = [self.sources[a].leaf for a in stored if a in self.sources]
        leaves = [leaf for leaf in leaves_of if leaf is not None]
        return leaves if len(leaves) == len(stored) else []

    def _densified(self, equation: Equation, rows: Atom, axis: int, leaves: Sequence[Var]) -> None:
        """Notes the value of all rows that touched rows become; it is stored if it is a leaf's new value."""
        (out,) = equation.outputs
        spaces, family = self.program.facts.spaces, equation.inputs[1].type.family
        like = self.rows.get(self.program.block.inputs[next(s.tables for s in spaces if s.family == family)[0]])
        if like is None:
            return
        self.rows[out] = replace(like, axis=axis)
        if leaves:
            self.sources[out] = RowSource((out,), leaves[0])
            self.written.add(leaves[0])
        else:
            self.sources[out] = RowSource((rows, equation.inputs[1]))

    def _barrier(self, equation: Equation) -> None:
        """Writes a barrier without values of whole tables."""
        rest = []
        for atom, out in zip(equation.inputs, equation.outputs, strict=True):
            if atom in self.rows:
                self.rows[out] = self.rows[atom]
                self.waiting[Equation("copy", (atom,), (out,))] = {0: self.rows[atom].axis}
            else:
                rest.append((atom, out))
        if rest:
            inputs, outputs = zip(*rest, strict=True)
            self.append(replace(equation, inputs=inputs, outputs=outputs))

    def _compute(self, equation: Equation) -> None:
        """Handles an ordinary equation on whole tables: it waits for a reduction, or is one."""
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
            placed = follow_spread(equation, spread, 1)
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
        body = ReductionBody(self, like)
        (out,) = equation.outputs
        base = equation.inputs[0] if equation.op == "scatter-add" else None
        total = out if base is None else Var(out.type)
        made = body.reduction(equation, by_rows)
        self._check_order(body, equation)
        self.append(replace(made, outputs=(total,)))
        for source in body.stored:
            if source.is_old and source.leaf is not None:
                self.readers.setdefault(source.leaf, []).append(total)
        if base is not None:
            self.append(Equation("ap.plus", (base, total), (out,), origin=equation.origin))
        self.count += 1

    def _check_order(self, body: ReductionBody, equation: Equation) -> None:
        for source in body.stored:
            if source.is_old and source.leaf in self.written:
                what = f"{equation.op} needs them as they were before the update, and the update as well"
                remedy = "Tables are updated in place: reduce the old and the new one by themselves, or the gradient"
                raise read_refusal(self.rows[source.atoms[0]], what, equation, remedy)
