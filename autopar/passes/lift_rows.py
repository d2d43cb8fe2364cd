"""Rewrite the step into row space: what the plan lifts runs on the touched rows only.

    ids -> route -> pull -> the step's own equations on [rows, ...] -> sweep (if need be) -> commit

Order matters: pull, compute, commit last. With it a donated table is updated in place, without a copy.

Lifting rests on 0 * x = 0, which holds for finite x. A route always has a padding row: a real row of the table that
gets no gradient. If its new value differs from its old one, the untouched rows change as well (a NaN in a clip
factor does this in plain JAX, too), and `sweep` runs the off-row equations over all rows, in place, block by block.
Otherwise it does nothing (see `lifting.sweeping`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.analysis.nonfinite import NonfiniteOutcomes
from autopar.ir.bound_plan import BoundPlan, FamilyPlan
from autopar.ir.program import ArrayType, Atom, Block, Equation, Output, Program, RouteType, Var, count_equations
from autopar.ir.rowspace import Const, Row, RowFacts, RowIds, RowSpace
from autopar.ir.slicing import eliminate_dead, needed_equations
from autopar.passes.lifting.deferral import StepUpdateLog, read_untouched_update
from autopar.passes.lifting.equations import off_scope, rewrite
from autopar.passes.lifting.scope import Lifting, Scope
from autopar.passes.lifting.sweeping import Exact, sweep

#: Rows that a sweep takes at a time: its memory doesn't grow with the table.
_BLOCK_ROWS = 512


def lift_rows(program: Program, bound: BoundPlan) -> tuple[Program, str]:
    """Returns the program with every family that the plan lifts in row space.

    Raises:
      NotDeferrable: rows of some leaves can't wait.
      NotLocal: all rows of a table on hosts are needed where no program has them.
    """
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
    lifted = dataclasses.replace(
        program, block=block, inputs=(*program.inputs, *logs), outputs=(*program.outputs, *kept, *loads, *flag)
    )
    return lifted, f"{before} equations became {after}; at most {rows} a step"


@dataclass(eq=False)
class _Lift:
    program: Program
    bound: BoundPlan
    facts: RowFacts
    scope: Scope
    spaces: dict[int, RowSpace]
    ids: dict[int, RowIds]
    inputs: Sequence[Var]
    done: set[Equation] = field(default_factory=set)
    committed: set[int] = field(default_factory=set)
    known: set[Atom] = field(default_factory=set)
    #: Of families with a measured capacity what the batch needs of it, in rows.
    loads: dict[int, Var] = field(default_factory=dict)
    #: Whether the batch exceeds one; new values that are the old ones of a leaf then, and the leaf.
    exceeded: Var | None = None
    guarded: set[tuple[Atom, int]] = field(default_factory=set)
    logs: dict[int, StepUpdateLog] = field(default_factory=dict)

    @staticmethod
    def of(program: Program, bound: BoundPlan) -> _Lift:
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
        """Returns the update logs by family: a step and what does it again in its place begin their families in any
        order."""
        return [self.logs[family] for family in sorted(self.logs)]

    def _check_capacity(self) -> None:
        """Checks, ahead of everything, whether the batch exceeds a measured capacity: then no state may change."""
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

    # --- equations in an order that can be run ---

    def _try(self, equation: Equation) -> bool:
        """Rewrites an equation, unless it has to wait for a commit."""
        if equation in self.done:
            return True
        if any(isinstance(a, Var) and a not in self.known for a in equation.inputs):
            return False
        if any(f in self.spaces and f not in self.committed for f in self._read_after(equation)):
            return False
        if self.facts.roles.get(equation) != "dense":  # which may be what the ids are made of
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
        """Computes the family's ids and route, ahead of the equations in between if need be."""
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
        params = {"extent": space.extent, "rows": type_.rows, "requested": planned.bounds.requested, "batched": batched}
        self.scope.routes[family] = self.scope.emit("ap.route", flat, type_, params)
        if planned.table.log_steps:
            self.logs[family] = StepUpdateLog.begin(self.scope, family, self._kept(space))

    def _ahead(self, equations: list[Equation]) -> None:
        """Emits what ids depend on. A loop that is needed in part only is copied in part."""
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
        """Writes the new rows back; first make sure that the other rows stay as they are."""
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
        if changed and log is None and not scope.lifting.moves_alone(family):
            offs = {k: (atom, self._off(atom)) for k, atom in updates.items()}
            leaves = sweep(scope, family, offs, self.exceeded, first)
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

        They are read of the old leaves before these change; what needs the new leaves waits for them.
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
        return [k for k, atom in self._updates(space).items() if waits or not isinstance(self._off(atom), Const)]

    def _defer(self, space: RowSpace, log: StepUpdateLog, kept: list[int]) -> None:
        """Writes down what the step does to the other rows."""
        scope = self.scope
        off, inner = off_scope(scope, space.family)
        axes, updates = space.row_axes, self._updates(space)
        off.run([a for k in kept if isinstance(a := updates[k], Var)], space.family)
        new = [off.at_rows(updates[k], axes[k], space.family) for k in kept]
        update = read_untouched_update(scope, off, space.family, kept, inner, new)
        flushed = log.end(scope, update, self.exceeded)
        for k in kept:
            self._name(updates[k], k, flushed[k])
            self.guarded.add((flushed[k], k))

    def _off(self, atom: Atom):
        value = self.facts.value(atom)
        return value.off if isinstance(value, Row) else None

    def _old_readers(self, leaf: Var) -> list[Atom]:
        """Returns results of what has read the whole old leaf so far: the commit waits for them, and so needs no
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
