"""The body of a `reduce_table` equation: everything between whole tables and a reduction, for a block of rows.

See `reduce_tables`. What belongs to no table (a mask, row numbers, a broadcast) is made anew for the block's rows where
it is a broadcast or computed element by element, so that no program makes an array as large as a table for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from autopar.analysis.local import REDUCES, NotLocal, resized_params
from autopar.analysis.primitives import ELEMENTWISE
from autopar.ir.layout import RowLayout
from autopar.ir.program import ArrayType, Atom, Block, Equation, Literal, Var
from autopar.ir.reductions import neutral
from autopar.ir.writer import Writer

#: Elements of the widest value that a block of rows may have: some megabytes, whatever the table's size.
_BLOCK_ELEMENTS = 1 << 20
#: What to do where all rows are needed at once.
READ_REMEDY = "Reduce them (a sum, product, extremum, norm or mean over the rows), before the update or after it"
_REMADE = ELEMENTWISE | {"broadcast_in_dim"}


@dataclass(frozen=True, slots=True)
class TableRows:
    """A value of all rows, which no rank has: `factor` elements of its axis belong to each row."""

    axis: int
    factor: int
    layout: RowLayout
    path: str

    def at(self, axis: int, size: int) -> TableRows | None:
        """The same rows along an axis of another value; None if its elements don't belong to rows."""
        factor = size // self.layout.extent
        return None if size % self.layout.extent else dataclasses.replace(self, axis=axis, factor=factor)


@dataclass(frozen=True, slots=True, eq=False)
class RowSource:
    """Where rows come from: a stored table, or the rows that a step touches, the others being as the padding row is.

    `leaf`: of a stored table its input. `is_old`: it is read before its update.
    """

    atoms: tuple[Atom, ...]
    leaf: Var | None = None
    is_old: bool = False


@dataclass(eq=False)
class Tables(Writer):
    """A block being written, and what is known of its values of all rows.

    Attributes:
      rows: They, and where their rows lie.
      sources: Those that rows come from.
      waiting: Row by row from whole tables -> operands that are taken by rows, and along which axis.
    """

    rows: dict[Atom, TableRows] = field(default_factory=dict)
    sources: dict[Atom, RowSource] = field(default_factory=dict)
    waiting: dict[Equation, Mapping[int, int]] = field(default_factory=dict)


def read_refusal(rows: TableRows, what: str, equation: Equation | None, remedy: str = READ_REMEDY) -> NotLocal:
    """That a table can't be read as a step does, with the line."""
    where = None if equation is None else equation.source
    reason = f"all rows of a table are read at once, of {rows.path}: {what}"
    return NotLocal(reason, where, remedy, (rows.path,))


class Body(Writer):
    """The body of a `reduce_table` equation: everything between tables and a reduction, for a block of rows.

    Its inputs are the rows' numbers (-1 for none), blocks of stored tables, blocks of what is made of touched rows,
    blocks of dense arrays that have all rows, and other dense values.
    """

    def __init__(self, walk: Tables, like: TableRows) -> None:
        super().__init__()
        self._walk = walk
        self._like = like
        #: Values that are taken by rows, and their axis.
        self._cut: dict[Atom, TableRows] = {}
        self._kept: list[tuple[Equation, Mapping[int, int], TableRows]] = []
        self.stored: list[RowSource] = []

    def of(self, equation: Equation, by_rows: Mapping[int, int]) -> Equation:
        """The `reduce_table` equation of a reduction."""
        self._collect(equation, by_rows)
        self._size = self._block_rows()
        numbers = Var(ArrayType((self._size,), np.dtype(np.int32)))
        self._numbers = numbers
        self._env: dict[Atom, Var] = {}
        self._whole: dict[Atom, Var] = {}
        groups: dict[str, list[tuple[tuple[Atom, ...], Var, int, int]]] = {"stored": [], "touched": [], "dense": []}
        inside = {v for e, _, _ in self._kept for v in e.outputs}
        for atom, rows in self._cut.items():
            if atom not in inside:
                kind, atoms = self._kind(atom)
                self._env[atom] = Var(self._type(atom, rows))
                groups[kind].append((atoms, self._env[atom], rows.axis, rows.factor))
        for kept, operands, place in reversed(self._kept):
            self._again(kept, operands, place)
        part = self._last(equation, by_rows)
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
        return dataclasses.replace(made, info=equation.info, origin=equation.origin)

    def _collect(self, equation: Equation, by_rows: Mapping[int, int]) -> None:
        """What is computed by rows, last equations first."""
        self._want(equation, by_rows)
        walk = self._walk
        for made in reversed((*walk.equations, *walk.waiting)):
            places = [self._cut[v] for v in made.outputs if v in self._cut]
            if not places:
                continue
            operands = walk.waiting.get(made)
            if operands is None:
                operands = self._remade(made, places[0])
            if operands is not None:
                self._kept.append((made, operands, places[0]))
                self._want(made, operands)

    def _want(self, equation: Equation, by_rows: Mapping[int, int]) -> None:
        """Operands that are taken by rows."""
        for k, axis in by_rows.items():
            atom = equation.inputs[k]
            rows = self._like.at(axis, atom.shape[axis])
            if rows is None or self._cut.setdefault(atom, rows) != rows:
                raise read_refusal(self._like, f"{equation.op} needs them in two ways", equation)

    def _remade(self, equation: Equation, place: TableRows) -> Mapping[int, int] | None:
        """What belongs to no table is made anew for rows where it is a broadcast or a number's function: operands."""
        out = equation.outputs[0]
        if equation.op == "iota" and not equation.inputs:
            return {} if place.factor == 1 or equation.params["dimension"] != place.axis else None
        if equation.op not in _REMADE or equation.bodies or equation.effects or len(equation.outputs) != 1:
            return None
        if equation.op == "broadcast_in_dim":
            dims, shape = equation.params["broadcast_dimensions"], equation.inputs[0].shape
            inner = dims.index(place.axis) if place.axis in dims else None
            return {} if inner is None or shape[inner] != out.shape[place.axis] else {0: inner}
        if any(len(a.shape) not in (0, len(out.shape)) for a in equation.inputs):
            return None
        along = [k for k, a in enumerate(equation.inputs) if a.shape and a.shape[place.axis] == out.shape[place.axis]]
        return dict.fromkeys(along, place.axis) if along else None

    def _kind(self, atom: Atom) -> tuple[str, tuple[Atom, ...]]:
        source = self._walk.sources.get(atom)
        if source is None:
            return "dense", (atom,)
        if source.leaf is None:
            return "touched", source.atoms
        self.stored.append(source)
        return "stored", source.atoms

    def _block_rows(self) -> int:
        """Rows of a block."""
        extent = self._like.layout.extent
        widest = max(a.type.size // extent for a in self._cut)
        return max(1, min(self._like.layout.shard_rows, _BLOCK_ELEMENTS // max(widest, 1)))

    def _type(self, atom: Atom, rows: TableRows) -> ArrayType:
        """The type of a value for a block of rows."""
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

    def _again(self, equation: Equation, by_rows: Mapping[int, int], place: TableRows) -> None:
        """An equation once more, for a block of rows."""
        outputs = tuple(Var(self._type(v, place)) for v in equation.outputs)
        self._env.update(zip(equation.outputs, outputs, strict=True))
        if equation.op == "iota" and equation.params["dimension"] == place.axis:
            params = {"axis": place.axis, "shape": outputs[0].shape, "dtype": outputs[0].dtype}
            self.append(Equation("ap.numbered", (self._numbers,), outputs, params))
            return
        if equation.primitive is None:  # what was behind a barrier
            self._env[equation.outputs[0]] = self._env[equation.inputs[0]]
            return
        inputs = tuple(self._operand(equation, k, by_rows) for k in range(len(equation.inputs)))
        params = resized_params(equation, by_rows, place.axis, outputs[0].shape[place.axis])
        self.append(dataclasses.replace(equation, inputs=inputs, outputs=outputs, params=params, original=None))

    def _last(self, equation: Equation, by_rows: Mapping[int, int]) -> Var:
        """The reduction itself; rows that there aren't count for nothing."""
        inputs = []
        for k, atom in enumerate(equation.inputs):
            if equation.op == "scatter-add" and k == 0:
                inputs.append(self.zeros(atom.type))
            elif k in by_rows:
                inputs.append(self._only_rows(self._env[atom], self._cut[atom], equation.op))
            else:
                inputs.append(self._operand(equation, k, by_rows))
        part = Var(equation.outputs[0].type)
        self.append(dataclasses.replace(equation, inputs=tuple(inputs), outputs=(part,), original=None))
        return part

    def _only_rows(self, value: Var, rows: TableRows, op: str) -> Var:
        params = {"axis": rows.axis, "factor": rows.factor, "fill": neutral(REDUCES[op], value.dtype)}
        return self.emit("ap.only_rows", (value, self._numbers), value.type, params)
