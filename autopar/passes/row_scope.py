"""Rewriting one block into row space: the engine under `lift_rows`.

A `Scope` rewrites the equations of one block. `get` gives the dense form of a value, `at_rows` its form on the
touched rows of a family. The body of a scan or remat gets a scope of its own, which imports what it needs from the
scope around it; a scan's carries and sequences change form where they are in row space.

An `OffScope` does it a second time for the rows that the step does not touch: pushes are dropped, and dense values
are taken from the first rewriting (out of a loop, stacked). Its result is the off-row function of the family, which
`lift_rows` needs when a scalar of the step isn't finite.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autopar.ir.plan import FamilyPlan
from autopar.ir.program import ArrayType, Atom, Block, Equation, Literal, RouteType, Var
from autopar.ir.row_ids import id_params, ids_equation, index_atoms
from autopar.ir.rowspace import Access, Const, Free, Row, RowFacts
from autopar.ir.rules import ALIGNED, RESIZE, resized
from autopar.ir.slicing import clone

#: What an import brings into a nested block: a dense value, a value at a family's rows, or a route.
Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Lifting:
    """What all scopes of one rewriting share."""

    facts: RowFacts
    families: Mapping[int, FamilyPlan]
    extents: Mapping[int, int]
    #: Rows that a sweep over a whole table takes at a time.
    block_rows: Mapping[int, int]
    #: (scan or remat equation, family) -> its off-row form.
    templates: dict[tuple[Equation, int], Template]
    leaves: Mapping[Var, int]

    def row(self, atom: Atom) -> Row | None:
        """The value's place in row space if its family is lifted (the family given by its representative)."""
        value = self.facts.value(atom)
        if isinstance(value, Row):
            family = self.facts.find(value.family)
            if family in self.families:
                return Row(value.axis, family, value.off)
        return None

    def touches(self, equation: Equation) -> bool:
        """Whether an equation reads or makes a value of a lifted family."""
        return any(self.row(a) is not None for a in (*equation.inputs, *equation.outputs))


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """The off-row form of a scan or remat: built with the first rewriting, used by the second.

    `imports` are what the body reads from around it; `stacked` the dense values that the first rewriting exported.
    """

    equation: Equation
    family: int
    body: Block
    imports: tuple[Key, ...]
    carries: tuple[tuple[Atom, int], ...]
    sequences: tuple[tuple[Atom, int], ...]
    stacked: tuple[Var, ...]
    outputs: tuple[Var, ...]


@dataclass(eq=False)
class Scope:
    """One block being rewritten. `operands` maps a nested block's loop-invariant inputs to the atoms outside."""

    lifting: Lifting
    block: Block
    parent: Scope | None = None
    operands: dict[Var, Atom] = field(default_factory=dict)
    equations: list[Equation] = field(default_factory=list)
    dense: dict[Var, Atom] = field(default_factory=dict)
    rows: dict[tuple[Var, int, int], Atom] = field(default_factory=dict)
    routes: dict[int, Atom] = field(default_factory=dict)
    imports: dict[Key, Var] = field(default_factory=dict)
    producers: dict[Var, Equation] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.producers = {v: e for e in self.block.equations for v in e.outputs}

    # --- values ---

    def get(self, atom: Atom) -> Atom:
        """The dense form of a value."""
        if isinstance(atom, Literal):
            return atom
        if atom in self.dense:
            return self.dense[atom]
        if atom in self.operands:
            found = self.import_(("dense", self.operands[atom]))
        else:
            found = self._whole(atom)
        self.dense[atom] = found
        return found

    def at_rows(self, atom: Atom, axis: int, family: int) -> Atom:
        """The value at the rows of a family that lie along `axis`."""
        if atom.shape == ():
            return self.get(atom)
        key = (atom, axis, family)
        if isinstance(atom, Var) and key in self.rows:
            return self.rows[key]
        found = self._make_rows(atom, axis, family)
        if isinstance(atom, Var):
            self.rows[key] = found
        return found

    def _make_rows(self, atom: Atom, axis: int, family: int) -> Atom:
        value = self.lifting.facts.value(atom)
        row = self.lifting.row(atom)
        if isinstance(atom, Var) and atom in self.operands and (row is not None or isinstance(value, Free)):
            return self.import_(("rows", self.operands[atom], axis, family))
        if isinstance(atom, Var) and atom in self.producers and isinstance(value, Free) and axis in value.axes:
            return self._free_rows(self.producers[atom], axis, family)
        assert row is None or atom in self.lifting.leaves, f"a row value of type {atom.type} is used before it is made"
        return self.pull(self.get(atom), axis, family)

    def pull(self, leaf: Atom, axis: int, family: int) -> Atom:
        """The routed rows of a leaf, or of any dense value with as many rows."""
        return self.emit("pull", (leaf, self.route(family)), self.at(leaf.type, axis, family), {"axis": axis})

    def _free_rows(self, equation: Equation, axis: int, family: int) -> Atom:
        """A value of no family, made anew for the rows."""
        out = equation.outputs[0]
        if equation.op == "iota" and equation.params["dimension"] == axis:
            params = {"axis": axis, "shape": resized(out.shape, axis, self.rows_of(family)), "dtype": out.dtype}
            return self.emit("row_iota", (self.route(family),), self.at(out.type, axis, family), params)
        inputs = []
        for atom in equation.inputs:
            inner = _operand_axis(equation, atom, axis)
            inputs.append(self.get(atom) if inner is None else self.at_rows(atom, inner, family))
        if equation.op == "reshape":  # of a constant: any shape is as good
            value = self.lifting.facts.value(out)
            assert isinstance(value, Free) and isinstance(value.off, Const), "only constants are reshaped freely"
            literal = Literal(value.off.value, ArrayType((), out.dtype))
            return self.full(literal, out.type, axis, family)
        return self.again(equation, inputs, axis, family)

    def full(self, value: Atom, type_: Any, axis: int, family: int) -> Var:
        """A scalar at every routed row."""
        at = self.at(type_, axis, family)
        return self.emit("full", (value,), at, {"shape": at.shape, "dtype": at.dtype})

    def again(self, equation: Equation, inputs: Sequence[Atom], axis: int, family: int) -> Atom:
        """A JAX equation emitted once more, its rows along `axis` being the routed ones."""
        resize = RESIZE.get(equation.op)
        params = resize(equation, axis, self.rows_of(family)) if resize else equation.params
        types = [self.at(v.type, axis, family) for v in equation.outputs]
        outputs = tuple(Var(t) for t in types)
        self.equations.append(
            dataclasses.replace(equation, inputs=tuple(inputs), outputs=outputs, params=params, original=None)
        )
        return outputs[0]

    def _whole(self, var: Var) -> Atom:
        """All rows of a value in row space: what is made of whole leaves, or a constant with the touched rows set."""
        row = self.lifting.row(var)
        assert row is not None, f"a {var.type} is used before it is defined"
        equation = self.producers.get(var)
        if equation is not None and self._is_made_of_whole(equation):
            copy = dataclasses.replace(
                equation,
                inputs=tuple(self.get(a) for a in equation.inputs),
                outputs=tuple(Var(v.type) for v in equation.outputs),
            )
            self.equations.append(copy)
            return copy.outputs[equation.outputs.index(var)]
        rows = self.at_rows(var, row.axis, row.family)
        params = {"axis": row.axis, "extent": self.lifting.extents[row.family]}
        return self.emit("densify", (rows, self.route(row.family)), var.type, params)

    def _is_made_of_whole(self, equation: Equation) -> bool:
        if self.lifting.facts.roles.get(equation) != "rows" or equation.bodies:
            return False
        rows = [a for a in equation.inputs if self.lifting.row(a) is not None]
        return all(a in self.dense or a in self.operands or self._cheaply_whole(a) for a in rows)

    def _cheaply_whole(self, atom: Atom) -> bool:
        return atom in self.lifting.facts.whole

    # --- routes and types ---

    def rows_of(self, family: int) -> int:
        """Number of routed rows."""
        return self.lifting.families[family].rows

    def at(self, type_: Any, axis: int, family: int) -> ArrayType:
        """The type of a value at the routed rows."""
        return dataclasses.replace(type_, shape=resized(type_.shape, axis, self.rows_of(family)))

    def route(self, family: int) -> Atom:
        """The family's route, imported where it was made outside."""
        if family not in self.routes:
            self.routes[family] = self.import_(("route", family))
        return self.routes[family]

    def import_(self, key: Key) -> Var:
        """An input of this nested block for something outside; `resolve` says what, when the block is complete."""
        assert self.parent is not None or isinstance(self, OffScope), "the outermost block imports nothing"
        if key not in self.imports:
            self.imports[key] = Var(self._import_type(key))
        return self.imports[key]

    def _import_type(self, key: Key) -> Any:
        if key[0] == "dense":
            return key[1].type
        if key[0] == "route":
            return RouteType(self.lifting.extents[key[1]], self.rows_of(key[1]))
        return self.at(key[1].type, key[2], key[3])

    def resolve(self, key: Key) -> Atom:
        """The atom of this scope that an import of a nested one means."""
        if key[0] == "dense":
            return self.get(key[1])
        if key[0] == "route":
            return self.route(key[1])
        return self.at_rows(key[1], key[2], key[3])

    # --- equations ---

    def emit(self, op: str, inputs: Sequence[Atom], type_: Any, params: Mapping[str, Any] | None = None) -> Var:
        """Append a row-space operation; its result."""
        out = Var(type_)
        self.equations.append(Equation(op, tuple(inputs), (out,), params or {}))
        return out

    def rewrite(self, equation: Equation) -> None:
        """Rewrite one equation of the block."""
        role = self.lifting.facts.roles.get(equation)
        if not self.lifting.touches(equation) or role == "dense":
            inputs = tuple(self.get(a) for a in equation.inputs)
            outputs = tuple(Var(v.type) for v in equation.outputs)
            self.equations.append(dataclasses.replace(equation, inputs=inputs, outputs=outputs))
            self.dense.update(zip(equation.outputs, outputs, strict=True))
        elif equation.op == "scan":
            _Loop(self, equation).lift()
        elif equation.op == "remat":
            _lift_remat(self, equation)
        else:
            _LIFT[role or "rows"](self, equation)


def _operand_axis(equation: Equation, atom: Atom, axis: int) -> int | None:
    """The axis of an operand that becomes `axis` of the result; None where the operand has none."""
    if atom.shape == ():
        return None
    if equation.op == "broadcast_in_dim":
        dims = equation.params["broadcast_dimensions"]
        inner = dims.index(axis) if axis in dims else None
        return inner if inner is not None and atom.shape[inner] == equation.outputs[0].shape[axis] else None
    if equation.op == "transpose":
        return equation.params["permutation"][axis]
    if equation.op == "squeeze":
        gone = {d % len(atom.shape) for d in equation.params["dimensions"]}
        return [d for d in range(len(atom.shape)) if d not in gone][axis]
    return axis


def _lift_rows_equation(scope: Scope, equation: Equation) -> None:
    """A row-parallel equation, at the routed rows."""
    lifting = scope.lifting
    if equation.op == "optimization_barrier":
        return _lift_barrier(scope, equation)
    place = next(r for v in equation.outputs if (r := lifting.row(v)) is not None)
    inputs = []
    for atom in equation.inputs:
        row = lifting.row(atom)
        if row is not None:
            inputs.append(scope.at_rows(atom, row.axis, row.family))
        elif equation.op in ALIGNED:
            inputs.append(scope.at_rows(atom, place.axis, place.family))
        else:
            inputs.append(scope.get(atom))
    scope.again(equation, inputs, place.axis, place.family)
    for old, new in zip(equation.outputs, scope.equations[-1].outputs, strict=True):
        scope.rows[old, place.axis, place.family] = new
    return None


def _lift_barrier(scope: Scope, equation: Equation) -> None:
    """Each operand in its own form behind the barrier; what belongs to no family needs none."""
    inputs, outputs = [], []
    for atom, old in zip(equation.inputs, equation.outputs, strict=True):
        row, value = scope.lifting.row(atom), scope.lifting.facts.value(atom)
        if isinstance(value, Free):
            scope.producers.pop(old, None)
            if isinstance(atom, Var):
                scope.producers |= {old: scope.producers[atom]} if atom in scope.producers else {}
            scope.dense[old] = scope.get(atom)
            continue
        new = scope.get(atom) if row is None else scope.at_rows(atom, row.axis, row.family)
        out = Var(new.type)
        inputs.append(new)
        outputs.append(out)
        if row is None:
            scope.dense[old] = out
        else:
            scope.rows[old, row.axis, row.family] = out
    scope.equations.append(dataclasses.replace(equation, inputs=tuple(inputs), outputs=tuple(outputs)))


def _lift_lookup(scope: Scope, equation: Equation) -> None:
    """Rows in the shape of the ids."""
    row = scope.lifting.row(equation.inputs[0])
    assert row is not None, "a lookup reads rows"
    rows, route = scope.at_rows(equation.inputs[0], row.axis, row.family), scope.route(row.family)
    access = Access(equation, (), row.axis)
    out = equation.outputs[0]
    params = id_params(access, scope.lifting.extents[row.family])
    if equation.op == "gather":
        index = scope.get(equation.inputs[1])
        ours = {**equation.params, **{k: params[k] for k in ("extent", "position", "clip")}}
        scope.dense[out] = scope.emit("lookup", (rows, route, index), out.type, ours)
        return
    starts = [scope.get(a) for a in equation.inputs[1:]]
    ids = _local_ids(scope, access, params)
    shape = resized(rows.shape, row.axis, ids.shape[0])
    taken_type = ArrayType(shape, out.dtype)
    taken = scope.emit("lookup_ids", (rows, route, ids), taken_type, {"axis": row.axis})
    if equation.op == "dynamic_slice":  # other axes may be sliced as well
        starts[row.axis] = Literal(np.zeros((), starts[row.axis].dtype), ArrayType((), starts[row.axis].dtype))
        cut = dataclasses.replace(equation, inputs=(taken, *starts), outputs=(Var(out.type),))
    else:
        p = equation.params
        strides = None if p["strides"] is None else tuple(resized(p["strides"], row.axis, 1))
        params = {
            "start_indices": resized(p["start_indices"], row.axis, 0),
            "limit_indices": resized(p["limit_indices"], row.axis, ids.shape[0]),
            "strides": strides,
        }
        cut = dataclasses.replace(equation, inputs=(taken,), outputs=(Var(out.type),), params=params)
    scope.equations.append(cut)
    scope.dense[out] = cut.outputs[0]


def _local_ids(scope: Scope, access: Access, params: Mapping[str, Any]) -> Atom:
    """The flat ids of a slice or pad, where it stands."""
    atoms = index_atoms(access)
    made = ids_equation(params, scope.get(atoms[0]) if atoms else None)
    scope.equations.append(made)
    return made.outputs[0]


def _lift_push(scope: Scope, equation: Equation) -> None:
    """Gradients (or new values) of rows, added to (or set in) the rows they belong to."""
    out = equation.outputs[0]
    row = scope.lifting.row(out)
    assert row is not None, "a push makes rows"
    key = (out, row.axis, row.family)
    access = Access(equation, (), row.axis)
    params = id_params(access, scope.lifting.extents[row.family])
    type_ = scope.at(out.type, row.axis, row.family)
    base = _push_base(scope, equation, row)
    if equation.op.startswith("scatter"):
        index, updates = scope.get(equation.inputs[1]), scope.get(equation.inputs[2])
        ours = {**equation.params, **{k: params[k] for k in ("extent", "position", "clip")}}
        pushed = scope.emit("push", (base, scope.route(row.family), index, updates), type_, ours | {"op": equation.op})
        scope.equations[-1] = dataclasses.replace(scope.equations[-1], primitive=equation.primitive)
        scope.rows[key] = pushed
        return
    updates = scope.get(equation.inputs[1 if equation.op == "dynamic_update_slice" else 0])
    ids = _local_ids(scope, access, params)
    scope.rows[key] = scope.emit("push_ids", (base, scope.route(row.family), ids, updates), type_, {"axis": row.axis})


def _push_base(scope: Scope, equation: Equation, row: Row) -> Atom:
    """What a push adds to: the operand at the rows; for a pad its padding value."""
    if equation.op == "pad":
        return scope.full(scope.get(equation.inputs[1]), equation.outputs[0].type, row.axis, row.family)
    return scope.at_rows(equation.inputs[0], row.axis, row.family)


def _lift_reduce(scope: Scope, equation: Equation) -> None:
    """A reduction over all rows, from the routed ones."""
    row = scope.lifting.row(equation.inputs[0])
    assert row is not None, "a reduction over rows reads rows"
    rows = scope.at_rows(equation.inputs[0], row.axis, row.family)
    out, extent = equation.outputs[0], scope.lifting.extents[row.family]
    axes = tuple(equation.params["axes"])
    params = {"op": equation.op, "axes": axes, "axis": row.axis, "extent": extent, "dtype": out.dtype}
    scope.dense[out] = scope.emit("reduce_rows", (rows, scope.route(row.family)), out.type, params)


def _lift_contract(scope: Scope, equation: Equation) -> None:
    """A product that sums over all rows, one side being zero on the untouched ones."""
    inputs = []
    for atom in equation.inputs:
        row = scope.lifting.row(atom)
        assert row is not None, "both sides are rows"
        inputs.append(scope.at_rows(atom, row.axis, row.family))
    out = Var(equation.outputs[0].type)
    scope.equations.append(dataclasses.replace(equation, inputs=tuple(inputs), outputs=(out,)))
    scope.dense[equation.outputs[0]] = out


_LIFT: Mapping[str, Callable[[Scope, Equation], None]] = {
    "rows": _lift_rows_equation,
    "lookup": _lift_lookup,
    "push": _lift_push,
    "reduce": _lift_reduce,
    "contract": _lift_contract,
}


@dataclass(eq=False)
class OffScope(Scope):
    """The second rewriting of a block, for untouched rows of one family: pushes are dropped, dense values imported.

    `primary` is the first rewriting of the same block.
    """

    primary: Scope | None = None

    def get(self, atom: Atom) -> Atom:
        if isinstance(atom, Literal):
            return atom
        if atom in self.dense:  # a leaf of the family, which the sweep updates in place
            return self.dense[atom]
        assert self.primary is not None
        return self.frontier(self.primary.get(atom))

    def frontier(self, atom: Atom) -> Atom:
        """A value of the first rewriting, as an input of this one."""
        if isinstance(atom, Literal):
            return atom
        return self.import_(("new", atom))

    def _import_type(self, key: Key) -> Any:
        return key[1].type if key[0] == "new" else super()._import_type(key)

    def rows_of(self, family: int) -> int:
        return self.lifting.block_rows[family]

    def run(self, targets: Sequence[Var], family: int) -> None:
        """Rewrite the row equations that the targets need, in order."""
        lifting = self.lifting
        needed = set(targets)
        kept = []
        for equation in reversed(self.block.equations):
            if not needed.intersection(equation.outputs):
                continue
            if not any((r := lifting.row(v)) is not None and r.family == family for v in equation.outputs):
                continue
            kept.append(equation)
            push = lifting.facts.roles.get(equation) == "push"
            inputs = equation.inputs[:1] if push else equation.inputs
            needed.update(a for a in inputs if isinstance(a, Var))
        for equation in reversed(kept):
            self._off(equation, family)

    def _off(self, equation: Equation, family: int) -> None:
        if self.lifting.facts.roles.get(equation) == "push":
            out = equation.outputs[0]
            row = self.lifting.row(out)
            assert row is not None, "a push makes rows"
            self.rows[out, row.axis, family] = _push_base(self, equation, row)
        elif equation.bodies:
            self._use(self.lifting.templates[equation, family])
        else:
            _lift_rows_equation(self, equation)

    def _use(self, template: Template) -> None:
        """Put the off-row form of a scan or remat here."""
        outer = [self.frontier(k[1]) if k[0] == "new" else self.resolve(k) for k in template.imports]
        equation = template.equation
        stacked = [self.frontier(v) for v in template.stacked]
        if equation.op == "remat":
            copy, env = clone(template.body, dict(zip(template.body.inputs, [*outer, *stacked], strict=True)))
            self.equations += copy.equations
            results = [env.get(a, a) if isinstance(a, Var) else a for a in template.body.outputs]
        else:
            starts = [self.at_rows(a, axis, template.family) for a, axis in template.carries]
            sequences = [self.at_rows(a, axis, template.family) for a, axis in template.sequences]
            results = _emit_scan(self, equation, template.body, outer, starts, [*sequences, *stacked])
        for old, new in zip(template.outputs, results, strict=True):
            row = self.lifting.row(old)
            assert row is not None, "the off-row form returns rows"
            self.rows[old, row.axis, row.family] = new


def _emit_scan(
    scope: Scope, like: Equation, body: Block, consts: Sequence[Atom], starts: Sequence[Atom], xs: Sequence[Atom]
) -> tuple[Var, ...]:
    """Append a scan with a new body; its carries and stacked results."""
    carry, length = len(starts), like.params["length"]
    outputs = [Var(a.type) for a in body.outputs[:carry]]
    outputs += [Var(dataclasses.replace(a.type, shape=(length, *a.shape))) for a in body.outputs[carry:]]
    params = {**like.params, "num_consts": len(consts), "num_carry": carry}
    inputs = (*consts, *starts, *xs)
    scope.equations.append(
        dataclasses.replace(
            like, inputs=inputs, outputs=tuple(outputs), params=params, bodies=(body,), original=None
        )
    )
    return tuple(outputs)


@dataclass(eq=False)
class _Loop:
    """Rewriting one scan."""

    scope: Scope
    equation: Equation

    def lift(self) -> None:
        scope, equation, lifting = self.scope, self.equation, self.scope.lifting
        consts, carry = equation.params["num_consts"], equation.params["num_carry"]
        body = equation.bodies[0]
        child = Scope(lifting, body, scope, dict(zip(body.inputs[:consts], equation.inputs[:consts], strict=True)))
        starts, start_vars = self._bind(child, range(consts, consts + carry), equation.outputs[:carry], 0)
        xs, x_vars = self._bind(child, range(consts + carry, len(equation.inputs)), None, 1)
        for inner in body.equations:
            child.rewrite(inner)
        outputs = [self._result(child, k, 0 if k < carry else 1) for k in range(len(equation.outputs))]
        pending = self._off_bodies(child, carry)
        exported: dict[Atom, int] = {}
        for off in pending:
            for atom in off.exports:
                exported.setdefault(atom, len(outputs) + len(exported))
        inputs = (*child.imports.values(), *start_vars, *x_vars)
        block = Block(inputs, tuple(child.equations), (*outputs, *exported))
        results = _emit_scan(scope, equation, block, [scope.resolve(k) for k in child.imports], starts, xs)
        for old, new in zip(equation.outputs, results, strict=False):
            row = lifting.row(old)
            if row is None:
                scope.dense[old] = new
            else:
                scope.rows[old, row.axis, row.family] = new
        for off in pending:
            stacked = tuple(results[exported[a]] for a in off.exports)
            lifting.templates[equation, off.template.family] = dataclasses.replace(off.template, stacked=stacked)

    def _bind(
        self, child: Scope, positions: range, fixed: Sequence[Var] | None, shift: int
    ) -> tuple[list[Atom], list[Var]]:
        """Inputs of the body that vary: outside and inside, in row form where they are in row space."""
        outside, inside = [], []
        for n, k in enumerate(positions):
            operand, var = self.equation.inputs[k], self.equation.bodies[0].inputs[k]
            row = self.scope.lifting.row(var if fixed is None else fixed[n])
            if row is None:
                outside.append(self.scope.get(operand))
                child.dense[var] = new = Var(var.type)
            else:
                outside.append(self.scope.at_rows(operand, row.axis + shift, row.family))
                new = Var(child.at(var.type, row.axis, row.family))
                child.rows[var, row.axis, row.family] = new
            inside.append(new)
        return outside, inside

    def _result(self, child: Scope, k: int, shift: int) -> Atom:
        atom, row = self.equation.bodies[0].outputs[k], self.scope.lifting.row(self.equation.outputs[k])
        return child.get(atom) if row is None else child.at_rows(atom, row.axis - shift, row.family)

    def _off_bodies(self, child: Scope, carry: int) -> list[_OffBody]:
        """The body once more for each family that comes out of the loop."""
        equation, lifting = self.equation, self.scope.lifting
        consts, body = equation.params["num_consts"], equation.bodies[0]
        made = []
        for family in _families(lifting, equation.outputs):
            off = OffScope(lifting, body, None, dict(child.operands), primary=child)
            carries, sequences, inner = [], [], []
            for k in range(consts, len(equation.inputs)):
                is_carry = k < consts + carry
                row = lifting.row(equation.outputs[k - consts] if is_carry else body.inputs[k])
                if row is None or row.family != family:
                    continue
                var = Var(off.at(body.inputs[k].type, row.axis, family))
                off.rows[body.inputs[k], row.axis, family] = var
                inner.append(var)
                (carries if is_carry else sequences).append((equation.inputs[k], row.axis + (0 if is_carry else 1)))
            outs = [(k, r) for k, v in enumerate(equation.outputs) if (r := lifting.row(v)) and r.family == family]
            targets = [body.outputs[k] for k, _ in outs]
            off.run([t for t in targets if isinstance(t, Var)], family)
            results = [off.at_rows(body.outputs[k], r.axis - (k >= carry), family) for k, r in outs]
            made.append(_OffBody.of(equation, family, off, inner, results, carries, sequences, [k for k, _ in outs]))
        return made


def _families(lifting: Lifting, outputs: Sequence[Var]) -> list[int]:
    return list(dict.fromkeys(r.family for v in outputs if (r := lifting.row(v)) is not None))


@dataclass(frozen=True, slots=True, eq=False)
class _OffBody:
    """A template without its stacked values, and the values of the first rewriting that it needs."""

    template: Template
    exports: tuple[Atom, ...]

    @staticmethod
    def of(
        equation: Equation,
        family: int,
        off: OffScope,
        inner: Sequence[Var],
        results: Sequence[Atom],
        carries: Sequence[tuple[Atom, int]],
        sequences: Sequence[tuple[Atom, int]],
        outputs: Sequence[int],
    ) -> _OffBody:
        """Sort what the off-row body reads: what the loop leaves alone is imported, the rest is exported by it."""
        assert off.primary is not None
        outside = {var: key for key, var in off.primary.imports.items()}
        imports: list[Key] = []
        invariant, varying, exports = [], [], []
        for key, var in off.imports.items():
            if key[0] == "new" and key[1] not in outside:
                varying.append(var)
                exports.append(key[1])
            else:
                invariant.append(var)
                imports.append(_outer_key(outside[key[1]]) if key[0] == "new" else key)
        body = Block((*invariant, *inner, *varying), tuple(off.equations), tuple(results))
        template = Template(
            equation=equation,
            family=family,
            body=body,
            imports=tuple(imports),
            carries=tuple(carries),
            sequences=tuple(sequences),
            stacked=(),
            outputs=tuple(equation.outputs[k] for k in outputs),
        )
        return _OffBody(template, tuple(exports))


def _outer_key(key: Key) -> Key:
    """An import of the first rewriting's body, as an import of the second's: resolved in its dense form outside."""
    assert key[0] == "dense", "the off-row form takes only dense values from the first rewriting"
    return key


def _lift_remat(scope: Scope, equation: Equation) -> None:
    """A remat whose body works on rows."""
    lifting, body = scope.lifting, equation.bodies[0]
    child = Scope(lifting, body, scope, dict(zip(body.inputs, equation.inputs, strict=True)))
    for inner in body.equations:
        child.rewrite(inner)
    outputs = []
    for atom, old in zip(body.outputs, equation.outputs, strict=True):
        row = lifting.row(old)
        outputs.append(child.get(atom) if row is None else child.at_rows(atom, row.axis, row.family))
    pending = []
    for family in _families(lifting, equation.outputs):
        off = OffScope(lifting, body, None, dict(child.operands), primary=child)
        outs = [(k, r) for k, v in enumerate(equation.outputs) if (r := lifting.row(v)) and r.family == family]
        off.run([a for k, _ in outs if isinstance(a := body.outputs[k], Var)], family)
        results = [off.at_rows(body.outputs[k], r.axis, family) for k, r in outs]
        pending.append(_OffBody.of(equation, family, off, (), results, (), (), [k for k, _ in outs]))
    exports = list(dict.fromkeys(a for off in pending for a in off.exports))
    block = Block(tuple(child.imports.values()), tuple(child.equations), (*outputs, *exports))
    results = tuple(Var(a.type) for a in block.outputs)
    inputs = tuple(scope.resolve(k) for k in child.imports)
    scope.equations.append(
        dataclasses.replace(equation, inputs=inputs, outputs=results, bodies=(block,), original=None)
    )
    for old, new in zip(equation.outputs, results, strict=False):
        row = lifting.row(old)
        if row is None:
            scope.dense[old] = new
        else:
            scope.rows[old, row.axis, row.family] = new
    for off in pending:
        stacked = tuple(results[len(outputs) + exports.index(a)] for a in off.exports)
        lifting.templates[equation, off.template.family] = dataclasses.replace(off.template, stacked=stacked)
