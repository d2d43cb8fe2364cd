"""Rewrites the step into row space: families that the plan lifts run on the touched rows only.

  ids -> route -> pull -> the step's own equations on [rows, ...] -> sweep (if need be) -> commit

Because pulls come first and commits last, a donated table is updated in place, without a copy.

Lifting rests on 0 * x = 0, which holds for finite x. A route always has a padding row: a real row of the table that
gets no gradient. If its new value differs from its old one, the untouched rows change as well (a NaN in a clip factor
does this in plain JAX, too), and `sweep` runs the untouched equations over all rows, in place, block by block.
Otherwise it does nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import jax.numpy as jnp
import numpy as np

from autopar.analysis.nonfinite import NonfiniteOutcome, NonfiniteOutcomes
from autopar.analysis.primitives import ELEMENTWISE, MOVES, those_that
from autopar.analysis.rules import ALIGNED, LAZY
from autopar.ir.local import NotLocal
from autopar.ir.program import (
    ArrayType,
    Atom,
    Block,
    Equation,
    Literal,
    Output,
    Program,
    RouteType,
    Var,
    count_equations,
)
from autopar.ir.program_plan import FamilyPlan, ProgramPlan
from autopar.ir.rowspace import Const, Free, Refusal, Row, RowFacts, RowIds, RowSpace, UntouchedValue
from autopar.ir.slicing import eliminate_dead, needed_equations
from autopar.jax_types import Leaf
from autopar.passes.lifting.deferral import NotDeferrable, StepUpdateLog, read_untouched_update
from autopar.passes.lifting.equations import UntouchedScope, rewrite, untouched_scope
from autopar.passes.lifting.scope import Lifting, RowValue, Scope, UntouchedRows

#: Rows that a sweep takes at a time, so that its memory doesn't grow with the table.
_BLOCK_ROWS = 512


def lift_rows(program: Program, bound: ProgramPlan) -> tuple[Program, str]:
    """Returns the program with every family that the plan lifts in row space. Raises NotDeferrable if rows of some
    leaves can't wait. Raises NotLocal if all rows of a table on hosts are needed where no program has them."""
    if not bound.families:
        return program, "nothing is lifted"
    lift = _Lift.of(program, bound)
    block = lift.run()
    before, after = count_equations(program.block), count_equations(block)
    rows = ", ".join(f"{f.bounds.rows - 1} rows" for f in bound.families)
    flag = () if lift.exceeded is None else (Output("whether a capacity was exceeded"),)
    loads = [Output(f"the most rows that a device asks another one for, family {f}") for f in lift.loads]
    logs = [input_ for log in lift.in_order() for input_ in log.inputs()]
    kept = (Output(input_.path, k) for k, input_ in enumerate(logs, len(program.inputs)))
    lifted = replace(
        program, block=block, inputs=(*program.inputs, *logs), outputs=(*program.outputs, *kept, *loads, *flag)
    )
    return lifted, f"{before} equations became {after}; at most {rows} a step"


@dataclass(eq=False)
class _Lift:
    program: Program
    bound: ProgramPlan
    facts: RowFacts
    scope: Scope
    spaces: dict[int, RowSpace]
    ids: dict[int, RowIds]
    inputs: Sequence[Var]
    done: set[Equation] = field(default_factory=set)
    committed: set[int] = field(default_factory=set)
    known: set[Atom] = field(default_factory=set)
    #: Family with a measured capacity -> the batch's need of it, in rows.
    loads: dict[int, Var] = field(default_factory=dict)
    #: A flag that the batch exceeds one; (new value that is the leaf's old one then, leaf).
    exceeded: Var | None = None
    guarded: set[tuple[Atom, int]] = field(default_factory=set)
    logs: dict[int, StepUpdateLog] = field(default_factory=dict)

    @staticmethod
    def of(program: Program, bound: ProgramPlan) -> _Lift:
        facts = program.facts
        spaces = {s.family: s for s in facts.spaces if bound.family(s.family) is not None}
        block = program.block
        ids: dict[int, RowIds] = {f: program.ids[f] for f in spaces}
        inputs = list(block.inputs)
        for k, (layout, axis) in bound.layouts.items():
            inputs[k] = Var(inputs[k].type.resized(axis, layout.stored))
        lifting = Lifting(
            facts=facts,
            families={f.family: f for f in bound.families},
            lazy=bound.plan.sparse == "lazy",
            spaces=spaces,
            inputs=inputs,
            block_rows={f.family: _block_rows(spaces[f.family], f, bound.devices) for f in bound.families},
            templates={},
            leaves={block.inputs[k]: k for s in spaces.values() for k in s.leaves},
            batch_axes={e: axis for of_family in ids.values() for e, axis in of_family.axes.items()},
            indices={e: index for of_family in ids.values() for e, index in of_family.indices.items()},
            untouched=Exact(
                [input_.path for input_ in program.inputs],
                functools.cache(lambda: NonfiniteOutcomes(block, facts.values, facts.roles)),
            ),
        )
        scope = Scope(
            lifting,
            block,
            dense={v: v for v in inputs},
            leaf_atoms={inputs[k] for k in lifting.leaves.values()},
            stored={block.inputs[k]: (inputs[k], *layout) for k, layout in bound.layouts.items()},
        )
        return _Lift(program, bound, facts, scope, spaces, ids, inputs, known=set(block.inputs))

    def run(self) -> Block:
        block = self.program.block
        self._check_capacity()
        waiting = list(block.equations)
        while waiting:
            left = [e for e in waiting if not self._try(e)]
            # All equations wait for a commit: write back complete families.
            if len(left) == len(waiting):
                ready = [f for f in self.spaces if f not in self.committed and self._is_complete(f)]
                assert ready, f"nothing can go on at {left[0].op} ({left[0].where})"
                for family in ready:
                    self._commit(family)
            waiting = left
        for family in self.spaces:
            if family not in self.committed:
                self._commit(family)
        states = [out.state for out in self.program.outputs]
        outputs = [self._output(a, k) for a, k in zip(block.outputs, states, strict=True)]
        old = [v for log in self.in_order() for v in log.old]
        outputs += [v for log in self.in_order() for v in log.new]
        outputs += [] if self.exceeded is None else [*self.loads.values(), self.exceeded]
        lifted, _ = eliminate_dead(Block((*self.inputs, *old), tuple(self.scope.equations), tuple(outputs)))
        return lifted

    # --- measured capacities ---

    def in_order(self) -> list[StepUpdateLog]:
        """Returns the update logs by family number, since a step and its fallback meet their families in any order."""
        return [self.logs[family] for family in sorted(self.logs)]

    def _check_capacity(self) -> None:
        """Checks first whether the batch exceeds a measured capacity, in which case no state may change."""
        tight = {f.family: f.bounds.capacity for f in self.bound.families if f.bounds.tight}
        if not tight:
            return
        for family in tight:
            self._route(family)
        bit, rows = ArrayType((), np.dtype(bool)), ArrayType((), np.dtype(np.int32))
        emit, routes = self.scope.emit, self.scope.routes
        self.loads = {f: emit("ap.load", (routes[f],), rows) for f in tight}
        flags = [emit("ap.exceeded", (load,), bit, {"capacity": tight[f]}) for f, load in self.loads.items()]
        self.exceeded = emit("ap.any", flags, bit)

    def _output(self, atom: Atom, state: int | None) -> Atom:
        stored = state in self.bound.layouts
        new = self.scope.stored[atom][0] if stored else self.scope.get(atom)
        if self.exceeded is None or state is None or (new, state) in self.guarded or new is self.inputs[state]:
            return new
        return self.scope.emit("ap.select", (self.exceeded, new, self.inputs[state]), self.inputs[state].type)

    # --- equations in an order in which they can run ---

    def _try(self, equation: Equation) -> bool:
        """Rewrites an equation, unless it has to wait for a commit."""
        if equation in self.done:
            return True
        if any(isinstance(a, Var) and a not in self.known for a in equation.inputs):
            return False
        if any(f in self.spaces and f not in self.committed for f in self._read_after(equation)):
            return False
        if self.facts.roles.get(equation) != "dense":  # ids may depend on a dense read
            for family in self._families(equation):
                self._route(family)
        rewrite(self.scope, equation)
        self.done.add(equation)
        self.known.update(equation.outputs)
        return True

    def _read_after(self, equation: Equation) -> set[int]:
        if self.facts.roles.get(equation) != "dense":
            return set()
        read = (self.facts.whole.get(a, frozenset()) for a in equation.inputs if isinstance(a, Var))
        return {self.facts.find(f) for families in read for f in families}

    def _families(self, equation: Equation) -> list[int]:
        atoms: Iterable[Atom] = (*equation.inputs, *equation.outputs)
        rows = (self.scope.lifting.row(a) for a in atoms)
        return list(dict.fromkeys(r.family for r in rows if r is not None))

    # --- routes ---

    def _route(self, family: int) -> None:
        """Computes the family's ids and route, before the equations in between if need be."""
        if family in self.scope.routes:
            return
        space = self.spaces[family]
        ids = self.ids[family]
        roots = [a for e in ids.equations for a in e.inputs]
        self._ahead(needed_equations(self.program.block.equations, roots))
        for equation in ids.equations:
            self.scope.compute(equation)
        self.scope.indices |= {e: self.scope.get(index.atom) for e, index in ids.indices.items()}
        type_ = RouteType(family, space.extent, self.scope.rows_of(family))
        flat = [self.scope.get(v) for v in ids.results]
        planned = self.scope.lifting.families[family]
        batched = ids.batched if any(ids.batched) else None
        bounds = planned.bounds
        params = {"extent": space.extent, "rows": type_.rows, "requested": bounds.requested, "batched": batched}
        params |= {"bag_ids": bounds.bag_ids} if bounds.tight and bounds.bag_ids else {}
        self.scope.routes[family] = self.scope.emit("ap.route", flat, type_, params)
        if planned.table.log_steps:
            self.logs[family] = StepUpdateLog.begin(self.scope, family, self._kept(space))

    def _ahead(self, equations: list[Equation]) -> None:
        """Emits the equations that ids depend on. A loop that is needed in part is copied in part."""
        whole = set(self.program.block.equations)
        for equation in equations:
            if equation in whole:
                done = self._try(equation)
                assert done, f"ids wait for {equation.op} ({equation.where})"
                continue
            for family in self._families(equation):
                self._route(family)
            self.scope.compute(equation)
            self.known.update(equation.outputs)

    # --- the end of a step ---

    def _updates(self, space: RowSpace) -> dict[int, Atom]:
        block, new = self.program.block, self.program.new_states
        updates = {k: block.outputs[new[k]] for k in space.leaves if k in new}
        return {k: atom for k, atom in updates.items() if atom is not block.inputs[k]}

    def _is_complete(self, family: int) -> bool:
        return all(not isinstance(a, Var) or a in self.known for a in self._updates(self.spaces[family]).values())

    def _commit(self, family: int) -> None:
        """Writes the new rows back, after making sure that the other rows keep their values."""
        scope, space = self.scope, self.spaces[family]
        self._route(family)
        route = scope.route(family)
        inputs = self.inputs
        self._write_whole(space)
        axes, updates = space.row_axes, self._updates(space)
        changed = {k: scope.at_rows(atom, axes[k], family) for k, atom in updates.items()}
        first = [v for k in space.leaves for v in self._old_readers(inputs[k])]
        log = self.logs.get(family)
        kept = self._kept(space)
        leaves = {k: inputs[k] for k in kept}
        if changed and log is None and not scope.lifting.only_touched_move(family):
            # Untouched rows are updated first: touched ones are written into the sweep's results.
            untouched_values = {k: (atom, self._untouched(atom)) for k, atom in updates.items()}
            leaves = sweep(scope, family, untouched_values, self.exceeded, first)
            first = []
        for k, rows in changed.items():
            if k in leaves:
                params = {"axis": axes[k], "extent": space.extent, "guarded": self.exceeded is not None or None}
                guard = () if self.exceeded is None else (self.exceeded,)
                new = scope.emit("ap.commit", (leaves[k], rows, route, *guard, *first), inputs[k].type, params)
                self.guarded.add((new, k))
            else:
                new = scope.densify(updates[k])
            if log is not None and k in leaves:
                log.committed[k] = new
                log.rows.append(rows)
                continue
            self._name(updates[k], k, new)
        if log is not None:
            self._defer(space, log, kept)
        self.committed.add(family)

    def _write_whole(self, space: RowSpace) -> None:
        """Writes outputs with all rows that are no leaves.

        They are read from the old leaves before these change; those that need the new leaves wait for them.
        """
        updates = self._updates(space).values()
        for atom in self.program.block.outputs:
            row = self.scope.lifting.row(atom)
            if row is None or row.family != space.family or atom not in self.known or atom in updates:
                continue
            if not self.facts.whole[atom]:
                self.scope.get(atom)

    def _name(self, atom: Atom, leaf: int, new: Atom) -> None:
        if isinstance(atom, Var) and leaf in self.bound.layouts:
            self.scope.stored[atom] = new, *self.bound.layouts[leaf]
        elif isinstance(atom, Var):
            self.scope.dense[atom] = new

    def _kept(self, space: RowSpace) -> list[int]:
        waits = self.scope.lifting.families[space.family].table.log_steps or space.is_pulled
        return [k for k, atom in self._updates(space).items() if waits or not isinstance(self._untouched(atom), Const)]

    def _defer(self, space: RowSpace, log: StepUpdateLog, kept: list[int]) -> None:
        """Writes down the untouched update."""
        scope = self.scope
        untouched, inner = untouched_scope(scope, space.family)
        axes, updates = space.row_axes, self._updates(space)
        untouched.run([a for k in kept if isinstance(a := updates[k], Var)], space.family)
        new = [untouched.at_rows(updates[k], axes[k], space.family) for k in kept]
        update = read_untouched_update(scope, untouched, space.family, kept, inner, new)
        flushed = log.end(scope, update, self.exceeded)
        for k in kept:
            self._name(updates[k], k, flushed[k])
            self.guarded.add((flushed[k], k))

    def _untouched(self, atom: Atom):
        value = self.facts.value(atom)
        return value.untouched if isinstance(value, Row) else None

    def _old_readers(self, leaf: Var) -> list[Atom]:
        """Returns results that were computed from the whole old leaf; the commit waits for them, and so needs no
        copy."""
        tainted: set[Atom] = {leaf}
        readers: list[Atom] = []
        for equation in self.scope.equations:
            is_planned = equation.op in ("ap.pull", "ap.sweep", "ap.fill", "ap.commit")
            if is_planned or not tainted.intersection(equation.inputs):
                continue
            big = [v for v in equation.outputs if isinstance(v.type, ArrayType) and 2 * v.type.size >= leaf.type.size]
            tainted.update(big)
            if not big and equation.outputs and isinstance(equation.outputs[0].type, ArrayType):
                readers.append(equation.outputs[0])
        return readers


def _block_rows(space: RowSpace, family: FamilyPlan, devices: int) -> int:
    if family.table.log_steps:
        return 1
    if family.layout is None:
        return min(space.extent, _BLOCK_ROWS)
    return devices * min(-(-space.extent // devices), _BLOCK_ROWS)


# --- changes of untouched rows ---
#
# changes -> a flag if there are any
# sweep   -> if so, the untouched form of all rows, in place, block by block
# fill    -> if not, all rows of a leaf that is constant on untouched ones


@dataclass(frozen=True, slots=True, eq=False)
class UntouchedForm:
    """The function that computes new untouched rows from old ones."""

    body: Block  #: From a route to some rows, `leaves` and `frontier` to some values at these rows.
    leaves: tuple[int, ...]  #: The leaves that it reads.
    frontier: tuple[Atom, ...]  #: Dense values of the step that it reads, by their names in the form's block.
    finite: tuple[Atom, ...]  #: Further values that must be finite, and must not be zero, or untouched rows change.
    nonzero: tuple[Atom, ...]

    @staticmethod
    def of(
        scope: Scope,
        family: int,
        targets: Sequence[tuple[Atom, int]],
        first: Sequence[int] = (),
        product: tuple[Equation, int] | None = None,
    ) -> UntouchedForm:
        """Returns the untouched form of some values.

        Args:
          scope: Their block.
          family: Their family.
          targets: The values, each with its row axis.
          first: Leaves that it reads in any case.
          product: A product of these rows that is wanted instead, and its row axis.
        """
        untouched, inner = untouched_scope(scope, family)
        chunk = untouched.routes[family]
        assert isinstance(chunk, Var), "the rows of a round are an input"
        untouched.run([a for a, _ in targets if isinstance(a, Var)], family)
        rows = tuple(untouched.at_rows(atom, axis, family) for atom, axis in targets)
        if product is not None:
            equation, axis = product
            made = Var(untouched.at(equation.outputs[0].type, axis, family))
            untouched.append(replace(equation, inputs=rows, outputs=(made,)))
            rows = (made,)
        levels = _levels(untouched)
        imports = [(level, key[1], var) for level in levels for key, var in level.imports.items()]
        assert all(key[0] == "new" for level in levels for key in level.imports), "it reads the first rewriting only"
        names = [var for *_, var in imports]
        equations = tuple(e for level in levels for e in level.equations)
        body, _ = eliminate_dead(Block((chunk, *inner.values(), *names), equations, rows))
        used = {a for e in body.equations for a in e.inputs}
        leaves = (*first, *(k for k, v in inner.items() if k not in first and v in used))
        body = Block((chunk, *(inner[k] for k in leaves), *names), body.equations, body.outputs)
        finite, nonzero = list[Atom](), list[Atom]()
        for level in levels:
            assert level.primary is not None, "an untouched form is a second rewriting"
            needed = needed_numbers(level.primary, level.ran, family)
            for found, those in zip((finite, nonzero), needed, strict=True):
                found += [scope.take(a, level.primary) for a in those]
        frontier = tuple(scope.take(a, level.primary) for level, a, _ in imports if level.primary is not None)
        return UntouchedForm(body, leaves, frontier, tuple(finite), tuple(nonzero))


def _levels(untouched: UntouchedScope) -> list[UntouchedScope]:
    return [untouched] if untouched.outer is None else [*_levels(untouched.outer), untouched]


def changes(
    scope: Scope,
    form: UntouchedForm,
    family: int,
    kept: Iterable[tuple[Atom, Atom, int]],
    constant: Iterable[tuple[Atom, Leaf, int]],
    exceeded: Atom | None = None,
    first: Sequence[Atom] = (),
) -> Var:
    """Returns whether untouched rows differ from the values that analysis has found.

    Args:
      form: Their untouched form.
      kept: (old, new, axis) of values that stay, at the routed rows.
      constant: (new, constant, axis) of values that are constant on untouched rows.
      exceeded: A flag that the step changes nothing, because a capacity is exceeded.
      first: Values to compute before a leaf changes.
    """
    kept, constant = list(kept), list(constant)
    guard = () if exceeded is None else (exceeded,)
    operands = [old for old, _, _ in kept] + [new for _, new, _ in kept] + [new for new, _, _ in constant]
    params = {
        "axes": tuple(axis for *_, axis in kept),
        "constants": tuple((np.asarray(value).item(), axis) for _, value, axis in constant),
        "family": family,
        "finite": len(form.finite),
        "frontier": len(form.frontier),
        "guarded": exceeded is not None or None,
        "nonzero": len(form.nonzero),
    }
    watched = (*operands, *form.frontier, *form.finite, *form.nonzero, *guard, *first)
    return scope.emit("ap.changes", watched, ArrayType((), np.dtype(bool)), params)


def sweep(
    scope: Scope,
    family: int,
    updates: Mapping[int, tuple[Atom, UntouchedValue | None]],
    exceeded: Atom | None,
    first: Sequence[Atom],
) -> dict[int, Atom]:
    """Returns a family's leaves with all untouched rows updated. `updates`: leaf -> its new value, and its untouched
    value. `exceeded`, `first`: as for `changes`."""
    space, inputs = scope.lifting.spaces[family], scope.lifting.inputs
    axes = space.row_axes
    form = UntouchedForm.of(scope, family, [(a, axes[k]) for k, (a, _) in updates.items()], tuple(updates))
    rows = {k: scope.at_rows(atom, axes[k], family) for k, (atom, _) in updates.items()}
    constants = {k: untouched.value for k, (_, untouched) in updates.items() if isinstance(untouched, Const)}
    old = {k: scope.at_rows(scope.block.inputs[k], axes[k], family) for k in updates if k not in constants}
    kept = [(old[k], rows[k], axes[k]) for k in old]
    constant = [(rows[k], value, axes[k]) for k, value in constants.items()]
    needed = changes(scope, form, family, kept, constant, exceeded, first)
    params = {
        "axes": tuple(axes[k] for k in updates),
        "extent": space.extent,
        "read_axes": tuple(axes[k] for k in form.leaves[len(updates) :]),
        "rows": scope.lifting.block_rows[family],
    }
    outputs = tuple(Var(inputs[k].type) for k in updates)
    operands = (needed, *(inputs[k] for k in form.leaves), *form.frontier)
    scope.append(Equation("ap.sweep", operands, outputs, params, (form.body,)))
    leaves: dict[int, Atom] = dict(zip(updates, outputs, strict=True))
    # Leaves that are constant on untouched rows are filled with that constant, unless the sweep was needed.
    guard = () if exceeded is None else (exceeded,)
    for k in constants:
        filled = (leaves[k], rows[k], scope.route(family), needed, *guard)
        leaves[k] = scope.emit("ap.fill", filled, inputs[k].type, {"axis": axes[k], "of": (updates[k][0],)})
    return leaves


@dataclass(frozen=True, slots=True, eq=False)
class Exact:
    """Implements `scope.Untouched`."""

    paths: Sequence[str]  #: Paths of the program's inputs.
    outcomes: Callable[[], NonfiniteOutcomes]  #: Finds whether untouched rows may differ.

    def densified(self, scope: Scope, atom: Var, dense: Var, row: Row) -> Var:
        """Returns a densified value, swept if need be."""
        if scope.lifting.only_touched_move(row.family) or not isinstance(row.untouched, Const):
            return dense
        rows = scope.at_rows(atom, row.axis, row.family)
        equation = scope.producers.get(atom)
        value = RowValue(
            rows, row.axis, row.family, row.untouched.value, ((atom, row.axis),), equation, is_reduced=False
        )
        form, needed = self._form(scope, value)
        if form is None or needed is None:
            return dense
        chunk, *rest = form.body.inputs
        body = Block((chunk, Var(dense.type), *rest), form.body.equations, form.body.outputs)
        space = scope.lifting.spaces[row.family]
        params = {
            "axes": (row.axis,),
            "extent": space.extent,
            "read_axes": self._axes(scope, form, row.family),
            "rows": scope.lifting.block_rows[row.family],
        }
        operands = (needed, dense, *self._leaves(scope, form), *form.frontier)
        out = scope.emit("ap.sweep", operands, dense.type, params, (body,))
        params = {"axis": row.axis, "extent": space.extent, "guarded": None}
        # The sweep has treated all rows as untouched.
        return scope.emit("ap.commit", (out, rows, scope.route(row.family)), dense.type, params)

    def reduced(self, scope: Scope, value: RowValue) -> UntouchedRows | None:
        """Returns the other rows that a reduction reads, if it must."""
        form, needed = self._form(scope, value)
        if form is None or needed is None:
            return None
        operands = (needed, *self._leaves(scope, form), *form.frontier)
        return UntouchedRows(operands, self._axes(scope, form, value.family), form.body)

    def keeps_zero(self, scope: Scope, sources: Sequence[tuple[Atom, int]], family: int) -> bool:
        """Returns whether a product of these, one of which is zero, is 0 or NaN in all rows."""
        return scope.lifting.only_touched_move(family) or self.outcomes().keeps_zero(sources)

    def _axes(self, scope: Scope, form: UntouchedForm, family: int) -> tuple[int, ...]:
        axes = scope.lifting.spaces[family].row_axes
        return tuple(axes[k] for k in form.leaves)

    def _leaves(self, scope: Scope, form: UntouchedForm) -> list[Atom]:
        return [scope.take(scope.lifting.inputs[k], scope.around[-1]) for k in form.leaves]

    def _form(self, scope: Scope, value: RowValue) -> tuple[UntouchedForm | None, Var | None]:
        """Returns a value's untouched form, and a flag that untouched rows differ from its constant.

        None if they never do, or if the padding row tells the value of all of them. Raises NotLocal if the rows are on
        hosts, where only a reduction outside of loops and branches can read them. Raises NotDeferrable if deferred rows
        would have to be read.
        """
        family, planned = value.family, scope.lifting.families[value.family]
        if scope.lifting.only_touched_move(family):
            return None, None
        is_deferred = planned.table.log_steps > 0
        if (is_deferred or scope.parent is not None or not value.is_reduced) and self._is_told(scope, value):
            return None, None
        form = UntouchedForm.of(scope, family, value.sources, product=value.product)
        # Deferred rows are swept one by one, on one device.
        if is_deferred and (form.leaves or planned.layout is not None):
            if self._outcome(value).may_differ:
                raise NotDeferrable(scope.lifting.spaces[family].leaves, _of_rows_that_wait(value))
            return None, None
        if not (form.frontier or form.finite or form.nonzero or form.leaves):
            return None, None
        return form, changes(scope, form, family, (), [(value.rows, value.constant, value.axis)])

    def _outcome(self, value: RowValue) -> NonfiniteOutcome:
        return self.outcomes().of(value.sources, None if value.product is None else value.product[0])

    def _is_told(self, scope: Scope, value: RowValue) -> bool:
        """Returns whether the padding row tells the value of all others.

        For loop carries it must: analysis has refused those that may differ.
        """
        outcome = self._outcome(value)
        if not outcome.own or outcome.turns:
            return True
        on_hosts = scope.lifting.families[value.family].on_hosts
        nowhere = on_hosts and (scope.parent is not None or not value.is_reduced)
        if nowhere and outcome.may_differ:
            raise self._refusal_on_hosts(scope, value)
        return nowhere

    def _refusal_on_hosts(self, scope: Scope, value: RowValue) -> NotLocal:
        paths = tuple(self.paths[k] for k in scope.lifting.spaces[value.family].tables)
        if value.is_reduced:
            reason = f"{value.op} in a loop, branch or checkpoint is over all rows of {paths[0]}"
            remedy = "Reduce them outside of it, and pass the result in"
        else:
            reason = f"all rows of a table are read at once, of {paths[0]}: by {value.op}"
            remedy = "Reduce them once (a sum, product, extremum or norm)"
        source = None if value.equation is None else value.equation.source
        return NotLocal(f"{reason}, and {_HIDES}", source, remedy, paths)


_HIDES = "what a row holds, or its number, hides what isn't finite in others"


def _of_rows_that_wait(value: RowValue) -> Refusal:
    source = None if value.equation is None else value.equation.source
    return Refusal(f"all of its rows move in every step, and {value.op} is over all of them; {_HIDES}", source, LAZY)


# --- values that may make untouched rows non-finite, beside the step's scalars ---
#
# `0 * x = 0` needs a finite x, `0 / x = 0` needs a nonzero x. A predicate of the padding row may hide it there, so the
# values themselves are checked: at the padding row if they are the same for all rows, all of them if they depend on
# the rows' numbers.
#: Operations that map zero to zero, so that a divisor made by them of a zero is zero.
_KEEPS_ZERO = those_that(lambda p: p.keeps_zero)
#: Operation that isn't finite at zero -> the operand.
_POLES = {"div": 1, "rsqrt": 0, "log": 0, "pow": 0, "rem": 1}


def needed_numbers(scope: Scope, equations: Sequence[Equation], family: int) -> tuple[list[Atom], list[Atom]]:
    """Returns values that must be finite, and values that must not be zero, or untouched rows change. `scope`: the
    outermost block, in which they are all known. `equations`: the equations on untouched rows."""
    finite: dict[Atom, None] = {}
    nonzero: dict[Atom, None] = {}
    for equation in equations:
        row = next((r for v in equation.outputs if (r := scope.lifting.row(v)) is not None), None)
        if row is None or equation.op not in ALIGNED:
            continue
        for atom in equation.inputs:
            is_free = isinstance(scope.lifting.facts.value(atom), Free)
            if atom.shape != () and (is_free or isinstance(atom, Literal)) and not _is_finite(scope, atom):
                finite[_watched(scope, atom, row.axis, family)] = None
        if equation.op in _POLES:
            for atom in _zero_factors(scope, equation.inputs[_POLES[equation.op]]):
                nonzero[_watched(scope, atom, row.axis, family)] = None
    return list(finite), list(nonzero)


def _is_finite(scope: Scope, atom: Atom) -> bool:
    """Returns whether a value is always finite: an integer, a mask, or made of literals alone."""
    if not jnp.issubdtype(atom.dtype, np.inexact):
        return True
    if isinstance(atom, Literal):
        return bool(np.all(np.isfinite(np.asarray(atom.value))))
    made = scope.producers.get(_unspread(scope, atom))
    if made is not None and made.op == "convert_element_type" and made.inputs[0].dtype == bool:
        return True
    value = scope.lifting.facts.value(atom)
    untouched = value.untouched if isinstance(value, Free) else None
    return (
        isinstance(untouched, Const)
        and bool(np.all(np.isfinite(np.asarray(untouched.value))))
        and _is_literal(scope, atom)
    )


def _unspread(scope: Scope, atom: Atom) -> Atom:
    made = scope.producers.get(atom)
    while made is not None and made.op in ("broadcast_in_dim", "reshape") and made.inputs[0].shape != ():
        atom = made.inputs[0]
        made = scope.producers.get(atom)
    return atom


def _is_literal(scope: Scope, atom: Atom) -> bool:
    """Returns whether a value is an elementwise function of literals, so that its constant is its value everywhere."""
    waiting, seen = [atom], set[Atom]()
    while waiting:
        value = waiting.pop()
        if isinstance(value, Literal) or value in seen:
            continue
        seen.add(value)
        equation = scope.producers.get(value)
        if equation is None or equation.op not in ELEMENTWISE | MOVES:
            return False
        waiting += equation.inputs
    return True


def _zero_factors(scope: Scope, atom: Atom) -> list[Atom]:
    """Lists the factors that make a divisor zero and are no table's rows."""
    if isinstance(atom, Literal):
        return [] if np.all(np.asarray(atom.value)) else [atom]
    value = scope.lifting.facts.value(atom)
    if not isinstance(value, Row):
        return [atom]
    equation = scope.producers.get(atom)
    if equation is None or equation.op not in _KEEPS_ZERO:
        return []
    return [factor for a in equation.inputs for factor in _zero_factors(scope, a)]


def _watched(scope: Scope, atom: Atom, axis: int, family: int) -> Atom:
    value = scope.lifting.facts.value(atom)
    if atom.shape != () and isinstance(value, Free) and axis in value.axes - {value.index_axis}:
        return scope.padding(scope.at_rows(atom, axis, family), axis, family)
    return scope.get(_unspread(scope, atom))
