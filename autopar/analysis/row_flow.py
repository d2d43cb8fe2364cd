"""The abstract interpreter of `analyze_rows`: runs `analysis.rules` over a program, values in place of arrays.

It finds what each variable is along the rows of a family, which equations touch rows, and which need all of them.
What that means for the families is for `analyze_rows` to say.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autopar.analysis.interpreter import Interpreter
from autopar.analysis.primitives import ELEMENTWISE, MOVES, SHAPED
from autopar.analysis.rules import ALIGNED, RULES, Mixes, off_of
from autopar.analysis.unfollowed import OWN_IDS
from autopar.analysis.values import atom_key, params_key
from autopar.ir.program import Atom, Block, Equation, Program, Var
from autopar.ir.rowspace import (
    UNKNOWN,
    Access,
    Const,
    Free,
    Off,
    Refusal,
    Row,
    Same,
    Unknown,
    Value,
    can_be_run_again,
    representative,
)

#: What to do about a table in a while loop.
_NO_WHILE = (
    "use lax.scan, or lax.fori_loop with bounds that are known when the step is traced; what ends earlier can skip the "
    "rest by lax.cond"
)

#: Why a lookup reads all rows, and what to do.
_OWN_LOOKUP = ("a lookup whose ids depend on rows of the same table", OWN_IDS)

#: What hands values on as they are, one by one.


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
    #: Equations that make rows which turned out to be no table's.
    barred: set[Equation] = field(default_factory=set)
    #: Lookups whose ids depend on the rows they look up, and loops of whose results something needs all rows: they read
    #: all rows.
    reading_whole: set[Equation] = field(default_factory=set)
    #: (family, loop or checkpoint): refused for something that needs all rows of its results; it could have read them.
    could_read_whole: list[tuple[int, Equation]] = field(default_factory=list)
    entries: dict[int, Equation] = field(default_factory=dict)
    #: Reductions and contractions over all rows at each turn of a loop, in order.
    reduced_in_loops: dict[Equation, None] = field(default_factory=dict)
    #: Row values that can be had for all rows -> families whose committed leaves that needs.
    whole: dict[Atom, frozenset[int]] = field(default_factory=dict)
    #: Top-level variables -> families whose committed leaves they depend on.
    after: dict[Atom, frozenset[int]] = field(default_factory=dict)
    #: Families of which every step touches all rows: what they are off these may be said to be anything.
    pulled: set[int] = field(default_factory=set)
    #: What a row value is made of -> the name of this function of an untouched row (`Unknown`).
    functions: dict[Hashable, int] = field(default_factory=dict)
    _equations: Sequence[Equation] = ()

    def __post_init__(self) -> None:
        inputs = self.program.block.inputs
        self.table_extents = {inputs[k].shape[axis] for k, axis in self.candidates.items()}
        #: Output variable -> the state inputs that it is the new value of.
        self.updates: dict[Atom, list[int]] = {}
        for leaf, out in self.program.new_states.items():
            self.updates.setdefault(self.program.block.outputs[out], []).append(leaf)

    # --- what rules ask (analysis.rules.Analysis) ---

    def find(self, family: int) -> int:
        return representative(self.parents, family)

    def unite(self, rows: Sequence[Row]) -> int:
        first = min(self.find(r.family) for r in rows)
        for row in rows:
            self.parents[self.find(row.family)] = first
        return first

    def new_family(self, extent: int) -> int:
        """Returns a family by itself."""
        self.parents.append(len(self.parents))
        self.extents.append(extent)
        return len(self.parents) - 1

    def enter(self, equation: Equation, axis: int) -> int | None:
        """Returns a family for what an equation puts into zeros; None where it can't be a table's gradient."""
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
        """Returns the family of a candidate leaf."""
        value = self.values[self.program.block.inputs[leaf]]
        assert isinstance(value, Row), "a candidate starts as rows"
        return self.find(value.family)

    def troubled(self) -> set[int]:
        """Returns families whose rows met something that needs all of them."""
        return {self.find(family) for family, _ in (*self.refusals, *self.dense_reads)}

    def run(self, equations: Sequence[Equation]) -> None:
        outer, self._equations = self._equations, equations
        known: dict[Any, Value] = self.values
        for equation in equations:
            self.equation(equation, [known.get(a) for a in equation.inputs])
        self._equations = outer

    def equation(self, equation: Equation, operands: Sequence[Value]) -> Sequence[Value]:
        """Interprets an equation; what needs all rows is noted, and has no value."""
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
        return dataclasses.replace(value, off=Const(0)) if self.is_pulled(value.family) else value

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
        """Returns the results; those of which no more is known off the touched rows are named by what they are made
        of."""
        if not any(isinstance(v, Row) and v.off == UNKNOWN for v in results):
            return results
        sources = tuple((a.type, _source(a, v)) for a, v in zip(equation.inputs, operands, strict=True))
        try:
            made = (equation.op, params_key(equation), sources)
            name = self.functions.setdefault(made, len(self.functions))
        except TypeError:  # a parameter that can't be hashed
            return results
        return [
            dataclasses.replace(v, off=Unknown((name, k))) if isinstance(v, Row) and v.off == UNKNOWN else v
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
        offs = [off_of(a, v, axis) for a, v in zip(atoms, values, strict=True)]
        return Row(axis, self.unite(rows), offs[0] if all(off == offs[0] for off in offs) else UNKNOWN)

    def widen(self, equation: Equation, k: int, carry: Value, result: Value) -> Value:
        if isinstance(carry, Free) and isinstance(result, Free) and carry.off == result.off and carry.off != UNKNOWN:
            return Free(carry.axes & result.axes, carry.off)
        is_rows = isinstance(carry, Row) or isinstance(result, Row)
        return super().widen(equation, k, carry, result) if is_rows else None

    def inside(self, value: Value) -> Value:
        if isinstance(value, Row) and value.axis == 0:
            raise Mixes("a scan over the rows of the table")
        return Row(value.axis - 1, value.family, _in_turns(value.off)) if isinstance(value, Row) else None

    def outside(self, value: Value) -> Value:
        return Row(value.axis + 1, value.family, _in_turns(value.off)) if isinstance(value, Row) else None

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

    # --- what needs all rows ---

    def _read_whole(self, equation: Equation, values: Sequence[Value], mixes: Mixes) -> None:
        """Handles an equation that needs all rows: reads them, or refuses the families it needs them of."""
        rows = [(a, v) for a, v in zip(equation.inputs, values, strict=True) if isinstance(v, Row)]
        refusal = self._refusal(equation, mixes, max((a.shape[v.axis] for a, v in rows), default=0))
        possible = all(a in self.whole and not (self.path and self.whole[a]) for a, _ in rows)
        for _, row in rows:
            (self.dense_reads if possible else self.refusals).append((row.family, refusal))
        if possible:
            self.roles[equation] = "dense"
        else:
            self._note_loops(rows)

    def _note_loops(self, rows: Sequence[tuple[Atom, Row]]) -> None:
        """Returns loops and checkpoints whose values can't be had for all rows, though what they are made of can."""
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

    def _refusal(self, equation: Equation, mixes: Mixes, rows: int) -> Refusal:
        summed = why_summed(equation, mixes.reason, rows, self._equations) if mixes.kind == "sum" else None
        return summed or Refusal(mixes.reason, equation.source, mixes.remedy, mixes.kind)

    def _after(self, equation: Equation) -> None:
        if self.path:
            return
        known = [self.after, self.whole] if self.roles.get(equation) == "dense" else [self.after]
        after = frozenset(f for atom in equation.inputs for families in known for f in families.get(atom, ()))
        if after:
            self.after.update(dict.fromkeys(equation.outputs, after))

    def _note_whole(self, equation: Equation) -> None:
        """Notes results that can be computed for all rows: new values of leaves, constants, and what is made of
        such."""
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
            if not self.path and isinstance(value.off, Same) and value.off.leaf in self.updates.get(var, ()):
                self.whole[var] = frozenset([value.family])
            elif sources is not None:
                self.whole[var] = sources
            elif not self.path and isinstance(value.off, Const):
                self.whole[var] = frozenset()
            else:
                self.whole.pop(var, None)

    def _note_dense_operands(self, equation: Equation, values: Sequence[Value], results: Sequence[Value]) -> None:
        if equation.op not in ALIGNED:
            return
        row = next(v for v in results if isinstance(v, Row))
        for atom, value in zip(equation.inputs, values, strict=True):
            dense = value is None or (isinstance(value, Free) and row.axis not in value.axes)
            if dense and atom.shape != () and not (isinstance(row.off, Const)):
                self.mixed_with_dense.append((row.family, equation))


def _source(atom: Atom, value: Value) -> Hashable:
    off = value.off if isinstance(value, (Row, Free)) else UNKNOWN
    if isinstance(off, Const):
        return np.asarray(off.value).tobytes()
    return atom_key(atom) if off == UNKNOWN else off


def _in_turns(off: Off) -> Off:
    return UNKNOWN if isinstance(off, Unknown) else off


# Sums over all rows of a table that have a remedy of their own: a full softmax, and what a mask takes of the rows.

_HANDS_ON = (ELEMENTWISE & MOVES) | {"optimization_barrier"}
_SPREADS = SHAPED | {"convert_element_type"}
_ROWS_OF_MASK = (
    "look up the rows that the mask has: rows = jnp.nonzero(mask, size=..., fill_value=len(t))[0]; "
    "t.at[rows].get(mode='fill', fill_value=0)"
)


def why_summed(equation: Equation, reason: str, rows: int, equations: Sequence[Equation]) -> Refusal | None:
    """Returns why a sum needs all rows of a table; None where there is no more to say than of others.

    Args:
      equation: A reduction over the rows, or a product that sums over them.
      reason: What is said of others.
      rows: The table's.
      equations: Those of the block that it stands in.
    """
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
    """Returns the sums of exponentials in softmaxes, and the maxima that are subtracted before (logsumexp and the
    normalizer alone are such, too). A full softmax over a table has a remedy of its own, which other sums haven't."""
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
