"""Finds leaves (of states, and Tables that are only read) that are looked up by rows: the candidates for lifting.

A leaf is a *table* if a gather (or a slice of rows) along one of its axes reads it, directly or through row-parallel
equations. A leaf with as many rows may be one of its optimizer slots; `analyze_rows` decides. For leaves whose rows are
lost ahead of a lookup, and those into which rows are only written, it notes why they are no table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp

from autopar.analysis.batch import SUMMED, result_axis
from autopar.analysis.interpreter import Interpreter
from autopar.analysis.primitives import ELEMENTWISE, PRIMITIVES, SHAPED
from autopar.analysis.rules import ALIGNED, RULES, why_only_written, why_unfollowed
from autopar.ir.program import ArrayType, Atom, Block, Equation, Literal, Program
from autopar.ir.reductions import REDUCTION_PRIMITIVES
from autopar.ir.strategy import ROW_METHODS, Strategy, choice_for

#: The origin of a variable's rows: (state leaf, the leaf's axis, the variable's axis).
Trace = tuple[int, int, int]


def classify(program: Program, strategy: Strategy = "auto") -> tuple[Program, str]:
    """Marks tables and candidates, each with its row axis; in a program that `pull_whole` has written those that it
    found, too.

    Leaves into which rows are only written are tables if the strategy gives them a row method.
    """
    states = [k for k, input_ in enumerate(program.inputs) if input_.role in ("state", "table")]
    walk = _Lookups()
    for k in states:
        var = program.block.inputs[k]
        if isinstance(var.type, ArrayType):
            traces = frozenset((k, axis, axis) for axis, size in enumerate(var.shape) if size > 1)
            walk.values[var] = _Rows(traces, pure=True)
    walk.run(program.block.equations)
    axes: dict[int, int] = {}
    updating = walk.updating()
    walk.found = {(leaf, axis) for leaf, axis in walk.found if leaf not in updating}
    looked_up = {leaf for leaf, _ in walk.found}
    written = {leaf: e for leaf, e in walk.written.items() if leaf not in looked_up}
    named = {k for k in written if choice_for(strategy, program.inputs[k].path).method in ROW_METHODS}
    found = {*walk.found, *((leaf, 0) for leaf in named)}
    # Of a table that is indexed along several axes at once, `tables[field, ids]`, the rows are those of the longest.
    for leaf, axis in sorted(found, key=lambda at: (at[0], at not in walk.longest, at[1])):
        layout = program.inputs[leaf].layout
        if layout is None or layout[1] == axis:  # a stored table's row axis is settled
            axes.setdefault(leaf, axis)
    tables = tuple(sorted(axes.items()))
    candidates = tuple((k, axes.get(k, axis)) for k in states if (axis := _slot_axis(program, k, tables)) is not None)
    if program.pulled_tables:
        inputs, along = program.block.inputs, {v.shape: axis for v, axis in program.pulled_tables.items()}
        pulled = {k: along[v.shape] for k, v in enumerate(inputs) if v in program.pulled}
        axes |= {k: axis for k, axis in pulled.items() if inputs[k] in program.pulled_tables}
        tables, candidates = tuple(sorted(axes.items())), tuple(sorted((dict(candidates) | pulled).items()))
    names = ", ".join(program.inputs[k].path for k, _ in tables)
    note = f"looked up by rows: {names}" if tables else "no parameter is looked up by rows"
    unfollowed = {k: why_unfollowed(lost, access) for k, (lost, access) in walk.unfollowed.items() if k not in axes}
    for k, write in written.items():
        unfollowed.setdefault(k, why_only_written(write, program.inputs[k].path))
    rows_read = {k: _rows_read(program.block.inputs[k].type, equations) for k, equations in walk.read_by.items()}
    facts = {"unfollowed": unfollowed, "rows_read": rows_read}
    return replace(program, tables=tables, candidates=candidates, **facts), note


def _rows_read(table: ArrayType, reads: Iterable[Equation]) -> int:
    return -(-sum(v.type.size for e in reads for v in e.outputs) * table.shape[0] // table.size)


def _slot_axis(program: Program, k: int, tables: Sequence[tuple[int, int]]) -> int | None:
    """Returns the axis along which a leaf may hold a slot of one of the tables."""
    shape, layout = program.block.inputs[k].shape, program.inputs[k].layout
    if layout is not None:
        return next((layout[1] for t, axis in tables if program.block.inputs[t].shape[axis] == layout[0].extent), None)
    for table, axis in tables:
        like = program.block.inputs[table].shape
        if shape == like:
            return axis
        if shape[:1] == like[axis : axis + 1]:
            return 0
    return None


@dataclass(frozen=True, slots=True)
class _Rows:
    """Knowledge of a value."""

    traces: frozenset[Trace] = frozenset()  #: Origins of its rows.
    pure: bool = False  #: It depends on states alone.
    constant: bool = False  #: It doesn't depend on data, as far as its block shows.
    #: For pure values, (leaf whose elements it may have, but not row by row; the equation that lost the rows).
    lost: frozenset[tuple[int, Equation]] = frozenset()


_NOTHING, _OF_LITERAL = _Rows(), _Rows(pure=True, constant=True)


class _Lookups(Interpreter[_Rows]):
    """Follows rows.

    Products and sums are followed only of states alone (`table @ w`), or every activation would carry a trace of every
    weight before it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[int, int]] = set()  #: (leaf, axis) that a lookup reads.
        self.longest: set[tuple[int, int]] = set()  #: Those of them that are no shorter than others of that lookup.
        self.old: set[int] = set()  #: Leaves that are looked up as they were before the step.
        #: Leaf -> for each lookup in what the step has changed, all leaves whose rows that has.
        self.new: dict[int, set[frozenset[int]]] = {}
        #: Leaf -> the equation that loses its rows, and one that reads parts of the result.
        self.unfollowed: dict[int, tuple[Equation, Equation]] = {}
        self.read_by: dict[int, dict[Equation, None]] = {}  #: Leaf -> equations that read parts of it.
        self.written: dict[int, Equation] = {}  #: Leaf -> an equation that writes into it by ids.
        self._loop: Equation | None = None
        self.of_ids: dict[tuple[Atom, int], bool] = {}  #: (Matrix, classes) -> whether it is made of ids.
        self.made: dict[Atom, Equation] = {}  #: Value -> the equation that makes it.

    def unknown(self, atom: Atom) -> _Rows:
        return _OF_LITERAL if isinstance(atom, Literal) else _NOTHING

    def join(self, values: Sequence[_Rows], atoms: Sequence[Atom]) -> _Rows:
        pure, constant = all(v.pure for v in values), all(v.constant for v in values)
        lost = frozenset(entry for v in values for entry in v.lost) if pure else frozenset()
        return _Rows(_all(v.traces for v in values), pure, constant, lost)

    def nested(self, equation: Equation, operands: Sequence[_Rows]) -> Sequence[_Rows]:
        outer, self._loop = self._loop, equation
        results = super().nested(equation, operands)
        self._loop = outer
        return results

    def inside(self, value: _Rows) -> _Rows:
        kept = frozenset((leaf, of, axis - 1) for leaf, of, axis in value.traces if axis > 0)
        gone = {leaf for leaf, _, axis in value.traces if axis == 0}
        lost = {(leaf, self._loop) for leaf in gone if self._loop is not None} if value.pure else set()
        return replace(value, traces=kept, lost=value.lost | lost)

    def outside(self, value: _Rows) -> _Rows:
        return replace(value, traces=frozenset((leaf, of, axis + 1) for leaf, of, axis in value.traces))

    def end(self, carry: _Rows, result: _Rows) -> _Rows:
        return result

    def body(self, equation: Equation, block: Block, operands: Sequence[_Rows]) -> list[_Rows]:
        return super().body(equation, block, [replace(v, constant=False) for v in operands])

    def while_loop(self, equation: Equation, operands: Sequence[_Rows]) -> Sequence[_Rows]:
        border = equation.border
        carried = operands[border.head + border.consts :]
        self.body(equation, equation.bodies[0], [*operands[: border.head], *carried])
        return self.loop(equation, operands[border.head :])

    def equation(self, equation: Equation, operands: Sequence[_Rows]) -> Sequence[_Rows]:
        self.made.update(dict.fromkeys(equation.outputs, equation))
        pure = constant = True
        traced = False
        for value in operands:
            pure, constant = pure and value.pure, constant and value.constant
            traced = traced or bool(value.traces or value.lost)
        if traced:
            results = super().equation(equation, operands)
            if pure and not equation.bodies:
                results = self._losing(equation, operands, results)
            return [_Rows(v.traces, pure, constant, v.lost) for v in results] if pure or constant else results
        return [_Rows(pure=pure, constant=constant) if pure or constant else _NOTHING] * len(equation.outputs)

    def plain(self, equation: Equation, operands: Sequence[_Rows]) -> Sequence[_Rows]:
        nothing = [_NOTHING] * len(equation.outputs)
        if equation.op in _OF_STATES and not all(v.pure for v in operands):
            self._note_unfollowed(equation, operands)
            return nothing  # activations times weights, and sums of these: their columns are nobody's rows
        if equation.op in _SLICED:
            self._look_up(equation, operands)
        self._note_unfollowed(equation, operands)
        if equation.op.startswith("scatter") or equation.op == "dynamic_update_slice":  # rows stay in place
            return [replace(operands[0], pure=False, constant=False)]
        if equation.op in ALIGNED or equation.op == "optimization_barrier":
            pairs = zip(equation.inputs, operands, strict=True)
            shape = None if equation.op in ("concatenate", "optimization_barrier") else equation.outputs[0].shape
            # An elementwise equation repeats an operand of another shape along an axis (as it does with a bias).
            union = _all(v.traces for a, v in pairs if shape in (None, a.shape))
            return [_Rows(union)] * len(equation.outputs)
        moved = {
            (leaf, of, to)
            for k, value in enumerate(operands)
            for leaf, of, axis in value.traces
            if (to := _moved(equation, k, axis)) is not None
        }
        return [_Rows(frozenset(moved))] * len(equation.outputs)

    def _look_up(self, equation: Equation, operands: Sequence[_Rows]) -> None:
        picked = {t for t in operands[0].traces if _picks_rows(equation, t[2])}
        chosen = {t for t in picked if not self._is_fixed(equation, t[2])}
        # Fixed columns are no lookup; fixed rows are, unless other axes are indexed by data (`t[arange(k), ids]`).
        chosen = chosen or {t for t in picked if t[1] == 0}
        leaves = frozenset(leaf for leaf, _, _ in chosen)
        shape = equation.inputs[0].shape
        for leaf in leaves:
            along = [(shape[axis], -of) for k, of, axis in chosen if k == leaf]
            self.longest.add((leaf, -max(along)[1]))
        for leaf, of, _ in chosen:
            self.found.add((leaf, of))
            self.read_by.setdefault(leaf, {})[equation] = None
            if not operands[0].pure:
                self.new.setdefault(leaf, set()).add(leaves)
        self.old |= leaves if operands[0].pure else frozenset()

    def updating(self) -> set[int]:
        """Returns leaves that update tables: of several steps in a call, later ones look up what earlier ones made of
        a table and its slots."""
        return {k for k, lookups in self.new.items() if k not in self.old and all(self.old & ks for ks in lookups)}

    def _losing(self, equation: Equation, operands: Sequence[_Rows], results: Sequence[_Rows]) -> Sequence[_Rows]:
        """Returns the results of an equation of states alone, with the leaves whose rows were lost by it or before."""
        pairs = zip(operands, equation.inputs, strict=True)
        axes = {(leaf, of, a.type.size) for v, a in pairs for leaf, of, _ in v.traces}
        lost = frozenset(entry for v in operands for entry in v.lost)
        made = []
        for value, out in zip(results, equation.outputs, strict=True):
            kept = {(leaf, of) for leaf, of, _ in value.traces}
            # Leaves smaller than a result with rows of another leaf are weights: `w` of `(table @ w)[ids]`.
            least = out.type.size if kept else 0
            gone = {(k, equation) for k, of, n in axes if (k, of) not in kept and least <= n <= 2 * out.type.size}
            made.append(replace(value, lost=lost | gone))
        return made

    def _note_unfollowed(self, equation: Equation, operands: Sequence[_Rows]) -> None:
        """Notes equations that read parts of leaves with lost rows, or may do so by a rule of their own, and writes
        by ids."""
        first = _FIRST_INDEX.get("scatter" if equation.op.startswith("scatter") else equation.op)
        if first is not None:
            last = 2 if equation.op.startswith("scatter") else len(operands)
            if all(v.constant for v in operands[first:last]):
                return
            if equation.op in _SLICED:
                for leaf, lost in operands[0].lost:
                    self._unfollowed(leaf, lost, equation)
            else:
                self.written |= {k: equation for k, _, _ in operands[0].traces if k not in self.written}
        elif equation.op == "dot_general":
            for k, axes in enumerate(equation.params["dimension_numbers"][0]):
                rows = {leaf for leaf, _, axis in operands[k].traces if axis in axes and operands[k].pure}
                if rows and self._is_made_of_ids(equation.inputs[1 - k], equation.inputs[k].shape[axes[0]]):
                    for leaf in rows:
                        self._unfollowed(leaf, equation, equation)
        elif equation.op not in RULES and equation.op not in PRIMITIVES and equation.op not in _NO_LOOKUPS:
            pairs = list(zip(equation.inputs, operands, strict=True))
            if any(jnp.issubdtype(a.dtype, jnp.integer) and a.shape and not v.pure for a, v in pairs):
                for leaf in {leaf for v in operands if v.pure for leaf, _, _ in v.traces}:
                    self._unfollowed(leaf, equation, equation)

    def _is_made_of_ids(self, atom: Atom, classes: int) -> bool:
        """Returns whether a matrix has a column for each class, and weights or several 1s in those of a row's ids."""
        if (atom, classes) not in self.of_ids:  # once: what is read several times has many paths to it
            self.of_ids[atom, classes] = self._makes_of_ids(self.made.get(atom), atom, classes)
        return self.of_ids[atom, classes]

    def _makes_of_ids(self, maker: Equation | None, atom: Atom, classes: int) -> bool:
        if maker is None or classes not in atom.shape or classes < _MANY_CLASSES:
            return False
        if maker.op == "eq":  # with the classes, which are counted; not of two segments
            is_counted = any(self.value(a).constant for a in maker.inputs)
            return is_counted and jnp.issubdtype(maker.inputs[0].dtype, jnp.integer)
        if maker.op.startswith("scatter"):
            return True
        found = (self._is_made_of_ids(a, classes) for a in (maker.inputs if maker.op in _WEIGHING else ()))
        # A sum with a dense matrix is dense, as a softmax's gradient is.
        return all(found) if maker.op in ("add", "sub", "add_any") else any(found)

    def _unfollowed(self, leaf: int, lost: Equation, access: Equation) -> None:
        self.unfollowed.setdefault(leaf, (lost, access))
        self.read_by.setdefault(leaf, {})[access] = None

    def _is_fixed(self, equation: Equation, axis: int) -> bool:
        """Returns whether a slice takes the same indices along an axis whatever the data."""
        if equation.op == "slice":
            return True
        index = equation.inputs[1 + axis if equation.op == "dynamic_slice" else 1]
        if self.value(index).constant or equation.op == "dynamic_slice":
            return self.value(index).constant
        source = self.made.get(index)
        if source is None or source.op != "concatenate" or source.params["dimension"] != len(index.shape) - 1:
            return False
        column = equation.params["dimension_numbers"].start_index_map.index(axis)
        for part in source.inputs:
            if column < part.shape[-1]:
                return self.value(part).constant
            column -= part.shape[-1]
        return False


def _all(traces: Iterable[frozenset[Trace]]) -> frozenset[Trace]:
    return frozenset[Trace]().union(*traces)


_SLICED = frozenset({"gather", "dynamic_slice", "slice"})
#: Operation that reads or writes by ids -> the first operand that holds them.
_FIRST_INDEX = {"gather": 1, "dynamic_slice": 1, "scatter": 1, "dynamic_update_slice": 2}
#: Operations that weigh one-hot matrices and add them up; the least number of classes that is told of.
_WEIGHING, _MANY_CLASSES = SHAPED | ELEMENTWISE | {"reduce_sum", "reduce_max", "reduce_or"}, 1024
#: Operations without a rule whose integer operands are sizes rather than ids.
_NO_LOOKUPS = frozenset({"ragged_dot_general", "ragged_dot"})


def _picks_rows(equation: Equation, axis: int) -> bool:
    rows = equation.inputs[0].shape[axis]
    if equation.op == "slice":
        return equation.outputs[0].shape[axis] != rows
    if equation.op == "gather" and axis not in equation.params["dimension_numbers"].start_index_map:
        return False
    return equation.params["slice_sizes"][axis] != rows


def _moved(equation: Equation, k: int, axis: int) -> int | None:
    """Returns the axis of an operand's rows in the results; None if they aren't all there, or are paired with
    others'."""
    op, operand = equation.op, equation.inputs[k]
    if op not in _MOVES or (k > 0 and op in _SLICED):
        return None
    if op == "broadcast_in_dim" and equation.outputs[0].type.size > operand.type.size:
        return None  # repeated for each example, as a bias is: an activation
    if op == "dot_general" and axis in equation.params["dimension_numbers"][1][k]:
        return None
    if op == "gather" and axis in equation.params["dimension_numbers"].operand_batching_dims:
        return None
    to = result_axis(equation, k, axis)
    if to is None or to == SUMMED or equation.outputs[0].shape[to] != operand.shape[axis]:
        return None
    return to


#: Followed of states alone.
_OF_STATES = frozenset({"dot_general", *REDUCTION_PRIMITIVES})
_MOVES = _SLICED | SHAPED | _OF_STATES | {"split", "stack", "unstack", "rev"}
