"""A block being rewritten: `get` returns a value's dense form, `at_rows` its form at the touched rows of a family.

The body of a scan or remat has a scope of its own, which imports values from the scope around it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from autopar.analysis.batch import result_axis
from autopar.analysis.primitives import SHAPED
from autopar.analysis.rules import RESIZE
from autopar.ir.layout import RowLayout
from autopar.ir.operations import plain_name
from autopar.ir.program import ArrayType, Atom, Block, Equation, Literal, RouteType, Var
from autopar.ir.program_plan import FamilyPlan
from autopar.ir.rowspace import Free, Index, Row, RowFacts, RowSpace, can_be_run_again
from autopar.ir.slicing import copied
from autopar.ir.writer import Writer
from autopar.jax_types import Leaf, ValueType

#: An import of a nested block: a dense value, a rewritten one ("new"), one at a family's rows, a route.
Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Lifting:
    """The common state of all scopes of one rewriting."""

    facts: RowFacts
    families: Mapping[int, FamilyPlan]
    #: Only touched rows move, whatever the optimizer says.
    lazy: bool
    spaces: Mapping[int, RowSpace]
    #: The program's inputs as they are stored.
    inputs: Sequence[Var]
    #: Rows that a sweep over a whole table takes at a time.
    block_rows: Mapping[int, int]
    #: (scan, remat or cond, family) -> its untouched form.
    templates: dict[tuple[Equation, int], Template]
    leaves: Mapping[Var, int]
    #: Access that is spread over the devices -> the batch axis of its index operand.
    batch_axes: Mapping[Equation, int | None]
    #: Access -> its index operand, computed outside of loops.
    indices: Mapping[Equation, Index]
    #: Computes untouched rows that the padding row doesn't represent.
    untouched: Untouched

    def row(self, atom: Atom) -> Row | None:
        """Returns the value's row axis and family (the representative), if that family is lifted."""
        value = self.facts.value(atom)
        if isinstance(value, Row):
            family = self.facts.find(value.family)
            if family in self.families:
                return Row(value.axis, family, value.untouched)
        return None

    def only_touched_move(self, family: int) -> bool:
        """Returns whether untouched rows need no care: they don't move, or there are none."""
        return self.lazy or self.spaces[family].is_pulled

    def touches(self, equation: Equation) -> bool:
        """Returns whether an equation reads or makes a value of a lifted family."""
        return any(self.row(a) is not None for a in (*equation.inputs, *equation.outputs))


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """The untouched form of a scan, remat or cond: made while a block is rewritten for touched rows (the first
    rewriting), used when it is written again for untouched ones (the second, `lifting/equations.py`)."""

    equation: Equation
    family: int
    bodies: tuple[Block, ...]
    imports: tuple[Key, ...]  #: Values that the bodies read from around them.
    carries: tuple[tuple[Atom, int], ...]
    sequences: tuple[tuple[Atom, int], ...]
    exports: tuple[Atom, ...]  #: Values of the first rewriting's bodies that they read.
    outputs: tuple[Var, ...]
    stacked: tuple[Var, ...] = ()  #: The first rewriting's results of these, once it is complete.


class Untouched(Protocol):
    """Values that are constant on untouched rows, unless a number of the step isn't finite (`lift_rows`)."""

    def densified(self, scope: Scope, atom: Var, dense: Var, row: Row) -> Var:
        """Returns all rows of a value, given `dense`, which has the padding row for all untouched ones."""
        ...

    def reduced(self, scope: Scope, value: RowValue) -> UntouchedRows | None:
        """Returns the other rows that a reduction reads, if it must."""
        ...

    def keeps_zero(self, scope: Scope, sources: Sequence[tuple[Atom, int]], family: int) -> bool:
        """Returns whether a product of these, one of which is zero, is 0 or NaN in all rows."""
        ...


@dataclass(eq=False)
class Scope(Writer):
    """One block being rewritten. `operands` maps a nested block's loop-invariant inputs to the atoms outside."""

    lifting: Lifting
    block: Block
    parent: Scope | None = None
    operands: dict[Var, Atom] = field(default_factory=dict)
    dense: dict[Var, Atom] = field(default_factory=dict)
    rows: dict[tuple[Leaf, ...], Atom] = field(default_factory=dict)
    routes: dict[int, Atom] = field(default_factory=dict)
    imports: dict[Key, Var] = field(default_factory=dict)
    producers: dict[Atom, Equation] = field(default_factory=dict)
    #: Leaves of the state, by their names in this block.
    leaf_atoms: set[Atom] = field(default_factory=set)
    #: Access -> its index operand in this block, which is computed once, outside of loops, and passed in.
    indices: dict[Equation, Atom] = field(default_factory=dict)
    #: Leaf (old or new) in a layout -> (stored array, layout, row axis).
    stored: dict[Atom, tuple[Atom, RowLayout, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.producers = self.block.makers()

    @property
    def may_import(self) -> bool:
        """There is a block around this one."""
        return self.parent is not None

    @property
    def around(self) -> list[Scope]:
        """This block and those around it."""
        return [self, *(() if self.parent is None else self.parent.around)]

    # --- values ---

    def get(self, atom: Atom) -> Atom:
        if isinstance(atom, Literal):
            return atom
        if atom in self.dense:
            return self.dense[atom]
        if atom in self.operands:
            dense = self.import_(("dense", self.operands[atom]), self.operands[atom].type)
        elif atom in self.stored:
            dense = self.unstored(*self.stored[atom])
        else:
            dense = self._whole(atom)
        self.dense[atom] = dense
        return dense

    def at_rows(self, atom: Atom, axis: int, family: int) -> Atom:
        """Returns the value at the rows of a family that lie along `axis`."""
        if atom.shape == ():
            return self.get(atom)
        key = (atom, axis, family)
        rows = self.rows.get(key)
        if rows is None:
            self.rows[key] = rows = self._make_rows(atom, axis, family)
        return rows

    def fetched(self, atom: Atom, axis: int, family: int) -> Atom:
        """Returns the rows of a value that each device asked for, fetched outside of loops that don't change them."""
        if self.lifting.families[family].layout is None:
            return self.at_rows(atom, axis, family)
        key = (atom, axis, family, "fetched")
        fetched = self.rows.get(key)
        if fetched is None:
            count = self.lifting.families[family].bounds.requested
            assert count is not None, "only rows that are spread are fetched"
            if isinstance(atom, Var) and atom in self.operands:
                outer = self.operands[atom]
                fetched = self.import_(("fetched", outer, axis, family), outer.type.resized(axis, count))
            else:
                rows = self.at_rows(atom, axis, family)
                type_ = atom.type.resized(axis, count)
                fetched = self.emit("ap.fetch", (rows, self.route(family)), type_, {"axis": axis})
            self.rows[key] = fetched
        return fetched

    def _make_rows(self, atom: Atom, axis: int, family: int) -> Atom:
        value = self.lifting.facts.value(atom)
        row = self.lifting.row(atom)
        if isinstance(atom, Var) and atom in self.operands and (row is not None or isinstance(value, Free)):
            outer = self.operands[atom]
            return self.import_(("rows", outer, axis, family), self.at(outer.type, axis, family))
        if isinstance(value, Free) and axis in value.axes:
            equation = self.producers.get(atom) if isinstance(atom, Var) else None
            if equation is not None and equation.op == "optimization_barrier":
                return self.at_rows(equation.inputs[equation.outputs.index(atom)], axis, family)
            if equation is not None and not equation.bodies:
                return self._free_rows(equation, axis, family)
        assert row is None or atom in self.lifting.leaves, f"a row value of type {atom.type} is used before it is made"
        if atom in self.stored:
            return self.pull(self.stored[atom][0], axis, family)
        leaf, layout = self.get(atom), self.lifting.families[family].layout
        if layout is not None and not layout.is_plain and leaf not in self.leaf_atoms:
            params = {"layout": layout, "axis": axis}
            leaf = self.emit("ap.store", (leaf,), leaf.type.resized(axis, layout.stored), params)
        return self.pull(leaf, axis, family)

    def padding(self, rows: Atom, axis: int, family: int) -> Var:
        """Returns the padding rows, one of each device if rows are spread."""
        layout = self.lifting.families[family].layout
        type_ = rows.type.resized(axis, 1 if layout is None else layout.devices)
        return self.emit("ap.padding", (rows, self.route(family)), type_, {"axis": axis})

    def unstored(self, stored: Atom, layout: RowLayout, axis: int) -> Var:
        """Returns all rows of a stored leaf in their own order."""
        params = {"layout": layout, "axis": axis}
        return self.emit("ap.whole", (stored,), stored.type.resized(axis, layout.extent), params)

    def densify(self, atom: Atom) -> Var:
        """Returns all rows, as they are stored; untouched ones, which are constant, are copies of the padding row."""
        row = self.lifting.row(atom)
        assert row is not None, "rows are made dense"
        rows, layout = self.at_rows(atom, row.axis, row.family), self.lifting.families[row.family].layout
        stored = atom.type if layout is None else atom.type.resized(row.axis, layout.stored)
        params = {"axis": row.axis, "extent": self.lifting.spaces[row.family].extent, "of": (atom,)}
        return self.emit("ap.densify", (rows, self.route(row.family)), stored, params)

    def pull(self, leaf: Atom, axis: int, family: int) -> Atom:
        """Returns the routed rows of a leaf, or of any dense value with as many rows."""
        params = {"axis": axis, "state": leaf in self.leaf_atoms}
        return self.emit("ap.pull", (leaf, self.route(family)), self.at(leaf.type, axis, family), params)

    def _free_rows(self, equation: Equation, axis: int, family: int) -> Atom:
        """Returns a value of no family, computed anew for the rows."""
        out = equation.outputs[0]
        if equation.op == "reshape":  # its operand is constant, unless it was multiplied by a NaN
            number = self._filled_with(equation.inputs[0])
            if number is None:
                return self.pull(self.get(out), axis, family)
            return self.full(number, self.at(out.type, axis, family))
        if equation.op == "iota" and equation.params["dimension"] == axis:
            extent = self.lifting.spaces[family].extent
            type_ = self.at(out.type, axis, family)
            params = {"axis": axis, "shape": type_.shape, "dtype": out.dtype, "extent": extent}
            return self.emit("ap.row_iota", (self.route(family),), type_, params)
        inputs = []
        for atom in equation.inputs:
            inner = _operand_axis(equation, atom, axis)
            inputs.append(self.get(atom) if inner is None else self.at_rows(atom, inner, family))
        return self.again(equation, inputs, axis, family)

    def _filled_with(self, atom: Atom) -> Literal | None:
        while isinstance(atom, Var):
            made = self.producers.get(atom)
            if made is None or made.op not in ("broadcast_in_dim", "reshape"):
                return None
            (atom,) = made.inputs
        return atom if atom.shape == () else None

    def again(self, equation: Equation, inputs: Sequence[Atom], axis: int, family: int) -> Atom:
        """Emits a JAX equation again, with the routed rows along `axis`."""
        resize = RESIZE.get(equation.op)
        params = resize(equation, axis, self.rows_of(family)) if resize else equation.params
        outputs = tuple(Var(self.at(v.type, axis, family)) for v in equation.outputs)
        self.append(replace(equation, inputs=tuple(inputs), outputs=outputs, params=params, original=None))
        return outputs[0]

    def _whole(self, var: Var) -> Atom:
        """Returns all rows of a value in row space: a function of whole leaves, or a constant with the touched rows
        set."""
        row = self.lifting.row(var)
        assert row is not None, f"a {var.type} is used before it is defined"
        equation = self.producers.get(var)
        if equation is not None and self._is_made_of_whole(equation):
            copy = self.copy(equation)
            for old, new in zip(equation.outputs, copy.outputs, strict=True):
                self.dense.setdefault(old, new)  # a cond has many: it is run once for all of them
            return self.dense[var]
        dense = self.lifting.untouched.densified(self, var, self.densify(var), row)
        layout = self.lifting.families[row.family].layout
        return dense if layout is None or layout.is_plain else self.unstored(dense, layout, row.axis)

    def _is_made_of_whole(self, equation: Equation) -> bool:
        if self.lifting.facts.roles.get(equation) != "rows" or not can_be_run_again(equation):
            return False
        rows = [a for a in equation.inputs if self.lifting.row(a) is not None]
        return all(a in self.dense or a in self.operands or a in self.lifting.facts.whole for a in rows)

    def index(self, access: Equation) -> Atom:
        index = self.indices.get(access)
        if index is None and access not in self.lifting.indices:  # it has `known` ids
            return self.get(access.inputs[1])
        if index is None:
            assert self.parent is not None
            self.indices[access] = index = self.import_(("index", access), self.parent.index(access).type)
        return index

    # --- routes and types ---

    def rows_of(self, family: int) -> int:
        return self.lifting.families[family].bounds.rows

    def at(self, type_: ValueType, axis: int, family: int) -> ArrayType:
        return type_.resized(axis, self.rows_of(family))

    def route(self, family: int) -> Atom:
        """Returns the family's route, imported if it was made outside."""
        if family not in self.routes:
            type_ = RouteType(family, self.lifting.spaces[family].extent, self.rows_of(family))
            self.routes[family] = self.import_(("route", family), type_)
        return self.routes[family]

    def take(self, atom: Atom, owner: Scope) -> Atom:
        """Returns a rewritten value of a block around this one, `owner`."""
        if owner is self or isinstance(atom, Literal):
            return atom
        assert self.parent is not None, "a block takes what is around it"
        return self.import_new(self.parent.take(atom, owner))

    def import_new(self, atom: Atom) -> Var:
        """Returns an input for a rewritten value of the block around this one."""
        return self.import_(("new", atom), atom.type)

    def import_(self, key: Key, type_: ValueType) -> Var:
        """Returns an input of this nested block for an outer value, which `resolve` finds when the block is
        complete."""
        assert self.may_import, "the outermost block imports nothing"
        if key not in self.imports:
            self.imports[key] = Var(type_)
        return self.imports[key]

    def resolve(self, key: Key) -> Atom:
        """Returns the atom of this scope that an import of a nested one means."""
        kind, *what = key
        if kind == "new":
            return what[0]
        ways = {
            "dense": self.get,
            "rows": self.at_rows,
            "fetched": self.fetched,
            "index": self.index,
            "route": self.route,
        }
        return ways[kind](*what)

    def bind(self, old: Sequence[Var], new: Sequence[Atom]) -> None:
        """Names results: dense ones, and rows of lifted families. There may be more new ones than old."""
        for var, atom in zip(old, new, strict=False):
            row = self.lifting.row(var)
            if row is None:
                self.dense[var] = atom
            else:
                self.rows[var, row.axis, row.family] = atom

    # --- equations ---

    def copy(self, equation: Equation) -> Equation:
        """Appends an equation on dense values, with results and bodies of its own."""
        copy = copied(equation, map(self.get, equation.inputs))
        self.append(copy)
        return copy

    def compute(self, equation: Equation) -> None:
        """Appends an equation on dense values, whose results are known in their dense form from here on."""
        self.dense.update(zip(equation.outputs, self.copy(equation).outputs, strict=True))


def _operand_axis(equation: Equation, atom: Atom, axis: int) -> int | None:
    if equation.op not in SHAPED:
        return axis if atom.shape else None
    return next((d for d in range(len(atom.shape)) if result_axis(equation, 0, d) == axis), None)


# --- untouched rows for an equation that needs all rows ---


@dataclass(frozen=True, slots=True, eq=False)
class UntouchedRows:
    """The untouched rows, for a reduction over all."""

    operands: tuple[Atom, ...]  #: A flag that they matter, leaves, and values of the step.
    axes: tuple[int, ...]  #: The leaves' row axes.
    body: Block  #: From a route to some rows, and the operands after the flag, to the value to reduce.


@dataclass(frozen=True, slots=True, eq=False)
class RowValue:
    """A value of which all rows are needed."""

    rows: Atom  #: The value at the routed rows.
    axis: int  #: Its row axis.
    family: int
    constant: Leaf  #: Its value on untouched rows, by analysis.
    sources: tuple[tuple[Atom, int], ...]  #: Values in row space that it depends on, and their row axes.
    equation: Equation | None  #: The reduction over all rows, or the equation that makes the value.
    #: Computes it from the sources' rows, and its row axis; None if it is the only source.
    product: tuple[Equation, int] | None = None
    is_reduced: bool = True  #: All that is needed is a reduction of it.

    @property
    def op(self) -> str:
        """The user's operation, for messages."""
        return "an equation" if self.equation is None else plain_name(self.equation.op)
