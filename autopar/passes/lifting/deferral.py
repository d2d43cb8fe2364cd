"""Reads the untouched update off a step: its effect on untouched rows, as a program of one row (see `ir.deferred`).

The family's untouched form (`UntouchedScope`) is cut in two. Equations that depend on the row's own leaves are the
untouched update's body; the rest, the same for all rows, is computed in the step, once, and written down. Most of those
values are scalars that were broadcast before they met a row; they are kept as scalars.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import jax
import numpy as np

from autopar import jax_compat
from autopar.analysis.primitives import ELEMENTWISE
from autopar.analysis.rules import LAZY
from autopar.analysis.scale_only import RowUpdate, find_fading, find_scale_only
from autopar.cost.model import replay_pays
from autopar.ir.deferred import Replay, flushes
from autopar.ir.layout import RowLayout
from autopar.ir.operations import plain_name
from autopar.ir.options import Options
from autopar.ir.program import ArrayType, Atom, Block, Equation, Input, Literal, Program, Var
from autopar.ir.rowspace import Refusal
from autopar.ir.slicing import clone, eliminate_dead
from autopar.ir.strategy import choice_for
from autopar.ir.writer import Writer, expand
from autopar.passes.lifting.equations import UntouchedScope
from autopar.passes.lifting.scope import Scope
from autopar.passes.rewriting import Rewriter

#: Largest record of a step, as a fraction of the family's bytes; a larger one would save nothing.
_RECORD_SHARE = 1 / 64
#: Most equations of a loop that is written out.
_WRITTEN_OUT = 512
#: Bytes that a step may always write down.
_SMALL_RECORD = 1 << 14


class NotDeferrable(Exception):
    """Raised for a family whose rows can't be brought up to date later."""

    def __init__(self, leaves: tuple[int, ...], refusal: Refusal) -> None:
        super().__init__(str(refusal))
        self.leaves = leaves
        self.refusal = refusal


def replayed_in_vain(program: Program, tables: Collection[int], options: Options) -> dict[int, Refusal]:
    """Finds leaves of families that "auto" defers although all of their rows must be replayed.

    A moving average of a table does that: only zero rows are scale-only. On one device that takes longer than the dense
    update, unless a table is large.

    `program`: a compiled one. `tables`: leaves that it looks up. `options`: those that it was compiled with.
    """
    found: dict[int, Refusal] = {}
    if options.devices > 1 or options.hosts or options.plan is not None:
        return found
    for equation in flushes(program.block):
        replay: Replay = equation.params["replay"]
        size = sum(program.block.inputs[k].type.nbytes for k in replay.leaves)
        is_asked = any(choice_for(options.strategy, program.inputs[k].path).method != "auto" for k in replay.leaves)
        zero = None if replay.scale_only is None else {replay.leaves[k] for k in replay.scale_only.zero}
        is_in_vain = zero is None or not zero.isdisjoint(tables)
        if is_in_vain and not is_asked and not replay_pays(family_bytes=size):
            reason, remedy = "what each step does to all of its rows would have to be replayed", "strategy='ps'"
            long = next((e for body in equation.bodies for e in body.walk() if _written_out(e) > _WRITTEN_OUT), None)
            if long is not None:
                turns, count = long.params["length"], _written_out(long)
                reason = f"{turns} steps in a loop are too many to see what they do to a row that none of them touches "
                reason += f"({count:,} equations, and {_WRITTEN_OUT} at most), so that each would have to be replayed"
                remedy = f"{max(turns * _WRITTEN_OUT // count, 1)} steps a call, or {remedy}"
            reason += ": the dense update is faster"
            found |= dict.fromkeys(replay.leaves, Refusal(reason, None, remedy, "replayed"))
    return found


def _written_out(equation: Equation) -> int:
    """Returns the number of equations of a scan that is written out; 0 of others."""
    if equation.op != "scan":
        return 0
    return equation.params["length"] * sum(1 for _ in equation.bodies[0].walk())


@dataclass(frozen=True, slots=True, eq=False)
class UntouchedUpdate:
    """The untouched update: its replay and body, the leaves that it only reads, and the values to write down."""

    replay: Replay
    body: Block
    read: tuple[int, ...]
    values: tuple[Atom, ...]


def read_untouched_update(
    scope: Scope,
    untouched: UntouchedScope,
    family: int,
    changed: Sequence[int],
    inner: Mapping[int, Var],
    new: Sequence[Atom],
) -> UntouchedUpdate:
    """Cuts a family's untouched form, made for one row. `scope`, the step being rewritten, gets the equations of the
    values to write down. `changed`: leaves whose new rows are `new`. `inner`: leaf -> its name in the untouched form.
    Raises NotDeferrable if the update needs more than a row and some values of the step."""
    space = scope.lifting.spaces[family]
    axes = space.row_axes
    chunk = untouched.routes[family]
    form = Block((*inner.values(), *untouched.imports.values()), tuple(untouched.equations), tuple(new))
    outside = {v: key[1] for key, v in untouched.imports.items()}
    kept, _ = eliminate_dead(_Simpler(scope, outside).block(form))
    rows: dict[int, Var] = {}
    renamed: dict[Atom, Atom] = {}
    names = {v: k for k, v in inner.items()}
    step = _Step(scope, outside)
    row_equations: list[Equation] = []
    dependent: set[Atom] = set()
    for equation in kept.equations:
        if equation.op == "ap.pull" and equation.inputs[0] in names and equation.inputs[1] is chunk:
            leaf = names[equation.inputs[0]]
            first = rows.setdefault(leaf, equation.outputs[0])
            renamed[equation.outputs[0]] = first
            dependent.add(first)
            continue
        if chunk in equation.inputs:
            number = equation.op == "ap.row_iota"
            what = "the number of the row" if number else f"rows of another array ({plain_name(equation.op)})"
            raise NotDeferrable(space.leaves, Refusal(f"what becomes of untouched rows depends on {what}", None, LAZY))
        inputs = tuple(renamed.get(a, a) for a in equation.inputs)
        equation = replace(equation, inputs=inputs)
        # The step computes values that depend on no row, once for all rows, and writes down those that rows need.
        if dependent.intersection(inputs):
            row_equations.append(equation)
            dependent.update(equation.outputs)
        else:
            step.compute(equation)
    results = [renamed.get(a, a) for a in kept.outputs]
    for leaf in changed:
        if leaf not in rows:
            rows[leaf] = Var(scope.at(scope.block.inputs[leaf].type, axes[leaf], family))
    read = tuple(k for k in rows if k not in changed)
    body, values = step.boundary(row_equations, results, [rows[k] for k in (*changed, *read)], dependent)
    assert all(isinstance(v.type, ArrayType) for v in values), "what is written down are arrays"
    types = tuple(v.type for v in values)
    leaves = [scope.block.inputs[k].type for k in (*changed, *read)]
    family_bytes = sum(t.nbytes for t in leaves)
    update = RowUpdate(body, len(changed), len(read))
    scale_only = find_scale_only(update)
    replay = Replay(
        leaves=(*changed, *read),
        extent=space.extent,
        changed=len(changed),
        axes=tuple(axes[k] for k in (*changed, *read)),
        values=types,
        scale_only=scale_only,
        fading=None if scale_only is None else find_fading(update, scale_only),
        part=max(1, scope.lifting.families[family].table.log_steps // 2),
    )
    # Records are kept for all steps of an update log: they must be small beside the family's leaves.
    if replay.record_bytes > max(_SMALL_RECORD, _RECORD_SHARE * family_bytes):
        reason = f"what becomes of untouched rows depends on {replay.record_bytes} bytes of each step"
        raise NotDeferrable(space.leaves, Refusal(reason, None, LAZY))
    return UntouchedUpdate(replay, body, read, tuple(values))


class _Simpler(Rewriter):
    """Makes an untouched update simpler: a masked gradient of 0 doesn't depend on the row's number, and of short loops
    over several steps, written out, it is known what they do to a row."""

    def __init__(self, scope: Scope, outside: Mapping[Var, Atom]) -> None:
        """Takes the step, and which of its values the update's inputs are."""
        super().__init__()
        self.made = {v: e for e in scope.equations for v in e.outputs}
        self.outside = outside

    def rule(self, equation: Equation) -> list[Equation]:
        if equation.op not in ("mul", "select_n"):
            return [equation]
        (out,), inputs = equation.outputs, equation.inputs
        values = inputs if equation.op == "mul" else inputs[1:]
        zeros = [a for a in values if a.shape == out.shape and self._is_zero(a)]
        others = [a for a in values if a not in zeros]
        if not zeros or not all(equation.op == "mul" and self._is_mask(a) for a in others):
            return [equation]
        self.env[out] = zeros[0]
        return []

    def _is_zero(self, atom: Atom) -> bool:
        source = self._source(atom)
        return isinstance(source, Literal) and not jax_compat.is_key(source.dtype) and not np.any(source.value)

    def _is_mask(self, atom: Atom) -> bool:
        """Returns whether all elements are 0 or 1."""
        source = self._source(atom)
        return isinstance(source.type, ArrayType) and source.dtype == np.bool_

    def _source(self, atom: Atom) -> Atom:
        while True:
            atom = self.outside.get(atom, atom) if isinstance(atom, Var) else atom
            maker = self.made.get(atom)
            if maker is None or maker.op not in ("broadcast_in_dim", "ap.full", "reshape", "convert_element_type"):
                return atom
            atom = maker.inputs[0]

    def nested(self, equation: Equation) -> list[Equation]:
        border = equation.border
        carried = border.consts + border.carries
        is_stacked = len(equation.outputs) > border.carries
        if equation.op != "scan" or is_stacked or _written_out(equation) > _WRITTEN_OUT:
            return [equation]
        made: list[Equation] = []
        carry: Sequence[Atom] = equation.inputs[border.consts : carried]
        for k in range(equation.params["length"])[:: -1 if equation.params["reverse"] else 1]:
            operands = [*equation.inputs[: border.consts], *carry]
            for atom in equation.inputs[carried:]:
                made += expand(functools.partial(jax.lax.index_in_dim, index=k, keepdims=False), equation, (atom,))
                operands.append(made[-1].outputs[0])
            turn, _ = clone(equation.bodies[0], dict(zip(equation.bodies[0].inputs, operands, strict=True)))
            made += turn.equations
            carry = turn.outputs
        self.env.update(zip(equation.outputs, carry, strict=True))
        return made


@dataclass(eq=False)
class _Step:
    """Writes computations that are the same for all rows into the step."""

    scope: Scope
    outside: Mapping[Var, Atom]  #: Input of the untouched form -> the step's atom.
    scalars: dict[Atom, Atom] = field(default_factory=dict)  #: Value that is a scalar everywhere -> the scalar.
    arrays: dict[Atom, Atom] = field(default_factory=dict)  #: Value of one row -> the step's, with that row's axis.
    inverses: dict[Atom, Atom] = field(default_factory=dict)  #: Number -> one over it.

    def scalar(self, atom: Atom) -> Atom | None:
        """Returns the value as a scalar, if all of its elements are equal."""
        if atom.shape == ():
            return atom if isinstance(atom, Literal) else self.outside.get(atom) or self.arrays.get(atom)
        return self.scalars.get(atom)

    def array(self, atom: Atom) -> Atom:
        if isinstance(atom, Literal):
            return atom
        array = self.outside.get(atom) or self.arrays.get(atom)
        if array is None:
            array = self.arrays[atom] = self.scope.full(self.scalars[atom], atom.type)
        return array

    def compute(self, equation: Equation) -> None:
        """Emits an equation none of whose operands depends on rows."""
        out = equation.outputs[0]
        scalars = [self.scalar(a) for a in equation.inputs]
        if equation.op in ("ap.full", "broadcast_in_dim", "reshape") and scalars[0] is not None and out.shape != ():
            same = scalars[0].dtype == out.dtype
            self.scalars[out] = scalars[0] if same else self.scope.full(scalars[0], ArrayType((), out.dtype))
            return
        known = [a for a in scalars if a is not None]
        if equation.op in ELEMENTWISE and out.shape != () and len(known) == len(scalars):
            made = Var(replace(out.type, shape=()))
            params = {**equation.params, "sharding": None} if "sharding" in equation.params else equation.params
            self.scope.append(replace(equation, inputs=tuple(known), outputs=(made,), params=params))
            self.scalars[out] = made
            return
        outputs = tuple(Var(v.type) for v in equation.outputs)
        inputs = tuple(self.array(a) for a in equation.inputs)
        self.scope.append(replace(equation, inputs=inputs, outputs=outputs))
        self.arrays.update(zip(equation.outputs, outputs, strict=True))

    def _inverse(self, equation: Equation) -> Atom | None:
        """Returns one over the divisor, if that is a number of the step.

        Not of short floats, where the quotient's bits would show it.
        """
        if equation.op != "div" or isinstance(equation.inputs[1], Literal):
            return None
        divisor = self.scalar(equation.inputs[1])
        dtype = equation.outputs[0].dtype
        if divisor is None or isinstance(divisor, Literal) or not jax_compat.is_float(dtype) or dtype.itemsize < 4:
            return None
        if divisor not in self.inverses:
            inverse = self.inverses[divisor] = Var(ArrayType((), dtype))
            inputs = (Literal.scalar(1, dtype), divisor)
            self.scope.append(replace(equation, inputs=inputs, outputs=(inverse,)))
        return self.inverses[divisor]

    def boundary(
        self, equations: Sequence[Equation], results: Sequence[Atom], rows: Sequence[Var], dependent: set[Atom]
    ) -> tuple[Block, list[Atom]]:
        """Returns the untouched update's body, and the step's values that it takes."""
        values: list[Atom] = []
        names: dict[Atom, Var] = {}
        inside: dict[Atom, Atom] = {}
        body = Writer()

        def given(value: Atom) -> Atom:
            if isinstance(value, Literal) and value.shape == ():
                return value
            if value not in names:
                names[value] = Var(value.type)
                values.append(value)
            return names[value]

        def take(atom: Atom) -> Atom:
            if isinstance(atom, Literal) or atom in dependent or atom in rows:
                return atom
            if atom not in inside:
                scalar = self.scalar(atom)
                if scalar is None or atom.shape == ():
                    inside[atom] = given(self.array(atom))
                else:
                    inside[atom] = body.full(given(scalar), atom.type)
            return inside[atom]

        for equation in equations:
            by = self._inverse(equation) if equation.inputs[0] in dependent else None
            if by is None:
                inputs = tuple(take(a) for a in equation.inputs)
                body.append(replace(equation, inputs=inputs))
            else:  # a division by a number of the step: one in the step, in place of one for each element
                factor = body.full(given(by), replace(equation.outputs[0].type, weak_type=False))
                inputs = take(equation.inputs[0]), factor
                body.append(replace(equation, op="mul", primitive=jax.lax.mul_p, inputs=inputs))
        outputs = tuple(take(a) for a in results)
        return Block((*rows, *names.values()), tuple(body.equations), outputs), values


# --- a family's update log in the step: rows are brought up to date at their pull, and the step is recorded ---
#
#     stamps, now, segment, records, segments -> catch_up (before anything reads the rows) ... commit -> record -> flush
#
# `backends.deferred` describes each. See docs/deferred.md.

_INT = np.dtype(np.int32)


@dataclass(eq=False)
class StepUpdateLog:
    """One family's update log."""

    family: int
    layout: RowLayout | None  #: Layout of the stamps, as of their rows; None if every device has all.
    caught: dict[int, Var]
    waiting: Equation
    stamps: Var
    stamped: Atom  #: The stamps of the touched rows.
    now: Var
    #: The log's inputs and outputs of the step: stamps, now, segment, records, segments.
    old: list[Var] = field(default_factory=list)
    new: list[Atom] = field(default_factory=list)
    committed: dict[int, Atom] = field(default_factory=dict)  #: Leaf -> the leaf with its touched rows committed.
    rows: list[Atom] = field(default_factory=list)  #: The committed rows.

    @staticmethod
    def begin(scope: Scope, family: int, changed: Sequence[int]) -> StepUpdateLog:
        """Pulls rows and their stamps, and names the rows that are up to date.

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
        """Writes the step down, and flushes the log if it is full; returns the leaves after that.

        `exceeded`: a flag that the step changes nothing, because a capacity is exceeded.
        """
        replay = update.replay
        read = {k: scope.lifting.inputs[k] for k in update.read}
        segment = Var(ArrayType((), _INT))
        records = [Var(replace(t, shape=(replay.length, *t.shape))) for t in replay.records]
        segments = [Var(t) for t in replay.segments]
        self.old = [self.stamps, self.now, segment, *records, *segments]
        params = {"replay": replay, "family": self.family}
        self._complete(scope, update, read)
        route = scope.route(self.family)
        after = scope.emit("ap.next", (self.now,), self.now.type)
        # No stamp is larger; but the write must wait for the read, or XLA copies all stamps in every step.
        full = scope.full(after, scope.at(self.stamps.type, 0, self.family))
        rows = Var(full.type)
        scope.append(Equation("max", (full, self.stamped), (rows,), primitive=jax.lax.max_p))
        guard = () if exceeded is None else (exceeded,)
        if exceeded is not None:
            after = scope.emit("ap.select", (exceeded, after, self.now), self.now.type)
        commit = {"axis": 0, "extent": replay.extent, "guarded": exceeded is not None or None}
        # After the rows themselves: a step that fails between the two must not leave rows that count as moved.
        stamps = scope.emit("ap.commit", (self.stamps, rows, route, *guard, *self.rows), self.stamps.type, commit)
        written = tuple(Var(v.type) for v in records)
        body, _ = clone(update.body)
        scope.append(Equation("ap.record", (self.now, *records, *update.values, *guard), written, params, (body,)))
        flushed = tuple(Var(self.committed[k].type) for k in self.caught)
        ends = tuple(Var(v.type) for v in (self.stamps, self.now, segment, *segments))
        operands = (*self.committed.values(), *read.values(), stamps, after, segment, *written, *segments)
        body, _ = clone(update.body)
        scope.append(Equation("ap.flush", operands, (*flushed, *ends), params, (body,)))
        self.new = [*ends[:3], *written, *ends[3:]]
        assert list(self.committed) == list(self.caught), "leaves keep their order"
        return dict(zip(self.caught, flushed, strict=True))

    def _complete(self, scope: Scope, update: UntouchedUpdate, read: Mapping[int, Var]) -> None:
        """Writes the equation that brings rows up to date, now that the untouched update is known."""
        index = scope.equations.index(self.waiting)
        *raw, stamped = self.waiting.inputs
        axes = scope.lifting.spaces[self.family].row_axes
        end = len(scope.equations)
        also = [scope.pull(leaf, axes[k], self.family) for k, leaf in read.items()]
        pulls, scope.equations[end:] = scope.equations[end:], []
        body, _ = clone(update.body)
        inputs = (*raw, *also, stamped, *self.old[1:])
        params = {"replay": update.replay, "families": (self.family,)}
        done = replace(self.waiting, inputs=inputs, params=params, bodies=(body,))
        scope.equations[index : index + 1] = [*pulls, done]

    def inputs(self) -> list[Input]:
        """Returns paths and layouts of the update log's inputs."""
        lead = f"update log {self.family}"
        stamps = Input(f"{lead}/stamps", "log", None if self.layout is None else (self.layout, 0))
        rest = ("now", "segment", *(f"entry {k}" for k in range(len(self.old) - 3)))
        return [stamps, *(Input(f"{lead}/{name}", "log") for name in rest)]
