"""Rewrites single equations into row space: row-parallel ones, lookups, pushes and reductions over the rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import jax.numpy as jnp
import numpy as np

from autopar import jax_compat
from autopar.analysis.row_ids import id_params, ids_equation, index_atoms
from autopar.analysis.rules import ALIGNED, resized
from autopar.ir.program import ArrayType, Atom, Block, Equation, Literal, RouteType, Var
from autopar.ir.reductions import REDUCTION_PRIMITIVES
from autopar.ir.rowspace import Access, Const, Free, Row
from autopar.ir.slicing import clone
from autopar.jax_types import Params
from autopar.passes.lifting.scope import Key, Lifting, RowValue, Scope, Template


def lift_row_equation(scope: Scope, equation: Equation) -> None:
    """Writes a row-parallel equation at the routed rows."""
    lifting = scope.lifting
    if equation.op == "optimization_barrier":
        return _lift_barrier(scope, equation)
    result = next(r for v in equation.outputs if (r := lifting.row(v)) is not None)
    inputs = []
    for k, atom in enumerate(equation.inputs):
        row = lifting.row(atom)
        if row is not None:
            inputs.append(scope.at_rows(atom, row.axis, row.family))
        elif equation.op in ALIGNED or (k == 0 and equation.op.startswith(("scatter", "dynamic_update_slice"))):
            inputs.append(scope.at_rows(atom, result.axis, result.family))
        else:
            inputs.append(scope.get(atom))
    scope.again(equation, inputs, result.axis, result.family)
    for old, new in zip(equation.outputs, scope.equations[-1].outputs, strict=True):
        scope.rows[old, result.axis, result.family] = new
    return None


def _lift_barrier(scope: Scope, equation: Equation) -> None:
    """Writes a barrier over operands in their own forms; dense values need none."""
    inputs, outputs = [], []
    for atom, old in zip(equation.inputs, equation.outputs, strict=True):
        row, value = scope.lifting.row(atom), scope.lifting.facts.value(atom)
        if isinstance(value, Free):
            scope.dense[old] = scope.get(atom)
            continue
        inputs.append(scope.get(atom) if row is None else scope.at_rows(atom, row.axis, row.family))
        outputs.append(Var(inputs[-1].type))
        if row is None:
            scope.dense[old] = outputs[-1]
        else:
            scope.rows[old, row.axis, row.family] = outputs[-1]
    scope.append(replace(equation, inputs=tuple(inputs), outputs=tuple(outputs)))


def _lift_lookup(scope: Scope, equation: Equation) -> None:
    """Writes rows in the shape of the ids."""
    row = scope.lifting.row(equation.inputs[0])
    assert row is not None, "a lookup reads rows"
    rows, route = scope.fetched(equation.inputs[0], row.axis, row.family), scope.route(row.family)
    access = Access(equation, (), row.axis)
    out = equation.outputs[0]
    params = id_params(access, scope.lifting.spaces[row.family].extent)
    if equation.op == "gather":
        index = scope.index(equation)
        examples = [d for d in range(len(out.shape)) if d not in equation.params["dimension_numbers"].offset_dims]
        ours = {**equation.params, **_layout(scope, access, params, examples)}
        scope.dense[out] = scope.emit("ap.lookup", (rows, route, index), out.type, ours)
        return
    starts = [scope.get(a) for a in equation.inputs[1:]]
    ids = _local_ids(scope, access, params)
    taken_type = ArrayType(resized(rows.shape, row.axis, ids.shape[0]), out.dtype)
    taken = scope.emit("ap.lookup_ids", (rows, route, ids), taken_type, {"axis": row.axis})
    if equation.op == "dynamic_slice":  # other axes may be sliced as well
        starts[row.axis] = Literal.scalar(0, starts[row.axis].dtype)
        cut = replace(equation, inputs=(taken, *starts), outputs=(Var(out.type),))
    else:
        p = equation.params
        strides = None if p["strides"] is None else tuple(resized(p["strides"], row.axis, 1))
        params = {
            "start_indices": resized(p["start_indices"], row.axis, 0),
            "limit_indices": resized(p["limit_indices"], row.axis, ids.shape[0]),
            "strides": strides,
        }
        cut = replace(equation, inputs=(taken,), outputs=(Var(out.type),), params=params)
    scope.append(cut)
    scope.dense[out] = cut.outputs[0]


def _layout(scope: Scope, access: Access, params: Params, examples: Sequence[int]) -> Params:
    """Returns a lookup's or push's parameters beside the gather's or scatter's own.

    `axis`: the operand's row axis. `batch`: the index operand's axis that is spread over the devices. `spread`: the
    same axis in the result or the updates (`examples`: which of their axes are the index operand's).
    """
    batch = scope.lifting.batch_axes.get(access.equation)
    spread = None if batch is None else examples[batch]
    ours = {k: params[k] for k in ("extent", "position", "clip")}
    return {**ours, "axis": access.axis, "batch": batch, "spread": spread}


def _local_ids(scope: Scope, access: Access, params: Params) -> Atom:
    atoms = index_atoms(access)
    made = ids_equation(params, scope.index(access.equation) if atoms else None)
    scope.append(made)
    return made.outputs[0]


def _lift_push(scope: Scope, equation: Equation) -> None:
    """Adds gradients of rows to the rows, or sets new values."""
    out = equation.outputs[0]
    row = scope.lifting.row(out)
    assert row is not None, "a push makes rows"
    key = (out, row.axis, row.family)
    access = Access(equation, (), row.axis)
    params = id_params(access, scope.lifting.spaces[row.family].extent)
    type_ = scope.at(out.type, row.axis, row.family)
    base = push_base(scope, equation, row)
    if equation.op.startswith("scatter"):
        index, updates = scope.index(equation), scope.get(equation.inputs[2])
        window = equation.params["dimension_numbers"].update_window_dims
        examples = [d for d in range(len(updates.shape)) if d not in window]
        ours = {**equation.params, **_layout(scope, access, params, examples), "op": equation.op}
        pushed = scope.emit("ap.push", (base, scope.route(row.family), index, updates), type_, ours)
        scope.equations[-1] = replace(scope.equations[-1], primitive=equation.primitive)
        scope.rows[key] = pushed
        return
    updates = scope.get(equation.inputs[1 if equation.op == "dynamic_update_slice" else 0])
    ids = _local_ids(scope, access, params)
    scope.rows[key] = scope.emit(
        "ap.push_ids", (base, scope.route(row.family), ids, updates), type_, {"axis": row.axis}
    )


def push_base(scope: Scope, equation: Equation, row: Row) -> Atom:
    """Returns the base of a push: the operand at the rows; for a pad its padding value."""
    if equation.op == "pad":
        at = scope.at(equation.outputs[0].type, row.axis, row.family)
        return scope.full(scope.get(equation.inputs[1]), at)
    return scope.at_rows(equation.inputs[0], row.axis, row.family)


def _lift_reduce(scope: Scope, equation: Equation) -> None:
    row = scope.lifting.row(equation.inputs[0])
    assert row is not None, "a reduction over rows reads rows"
    assert isinstance(row.untouched, Const), "off the touched rows it is a constant"
    atom = equation.inputs[0]
    rows = scope.at_rows(atom, row.axis, row.family)
    value = RowValue(rows, row.axis, row.family, row.untouched.value, ((atom, row.axis),), equation)
    _reduce(scope, value, equation.outputs[0], REDUCTION_PRIMITIVES[equation.op], tuple(equation.params["axes"]))


def _reduce(scope: Scope, value: RowValue, out: Var, op: str, axes: tuple[int, ...]) -> None:
    extent = scope.lifting.spaces[value.family].extent
    of = tuple(atom for atom, _ in value.sources)
    params = {"op": op, "axes": axes, "axis": value.axis, "extent": extent, "dtype": out.dtype, "of": of}
    others = scope.lifting.untouched.reduced(scope, value)
    operands, bodies = (value.rows, scope.route(value.family)), ()
    if others is not None:
        operands, bodies = (*operands, *others.operands), (others.body,)
        params |= {"read_axes": others.axes, "rows": scope.lifting.block_rows[value.family]}
    scope.dense[out] = scope.emit("ap.reduce_rows", operands, out.type, params, bodies)


def _lift_contract(scope: Scope, equation: Equation) -> None:
    """Writes a product that sums over all rows, one side being zero on the untouched ones.

    If that isn't known, it writes a product for each row, and a sum over the rows.
    """
    rows = [row for a in equation.inputs if (row := scope.lifting.row(a)) is not None]
    sources = tuple((a, row.axis) for a, row in zip(equation.inputs, rows, strict=True))
    family = rows[0].family
    inputs = tuple(scope.at_rows(a, axis, family) for a, axis in sources)
    if scope.lifting.untouched.keeps_zero(scope, sources, family):
        out = scope.dense[equation.outputs[0]] = Var(equation.outputs[0].type)
        scope.append(replace(equation, inputs=inputs, outputs=(out,)))
        return
    product, axis = _product_by_row(equation, inputs, [axis for _, axis in sources])
    scope.append(product)
    value = RowValue(product.outputs[0], axis, family, 0, sources, equation, (product, axis))
    _reduce(scope, value, equation.outputs[0], "sum", (axis,))


def _product_by_row(equation: Equation, inputs: Sequence[Atom], axes: Sequence[int]) -> tuple[Equation, int]:
    """Returns a contraction over rows, along these axes of the operands, as a product for each row, and its row
    axis."""
    contract, batch = equation.params["dimension_numbers"]
    kept = tuple(tuple(d for d in dims if d != axis) for dims, axis in zip(contract, axes, strict=True))
    batched = tuple((*dims, axis) for dims, axis in zip(batch, axes, strict=True))
    out, at = equation.outputs[0], len(batch[0])
    shape = (*out.shape[:at], inputs[0].shape[axes[0]], *out.shape[at:])
    dtype = jnp.promote_types(out.dtype, np.float32) if jax_compat.is_float(out.dtype) else out.dtype
    type_ = replace(out.type, shape=shape, dtype=dtype)
    params = {**equation.params, "dimension_numbers": (kept, batched), "preferred_element_type": dtype}
    return replace(equation, inputs=tuple(inputs), outputs=(Var(type_),), params=params), at


#: Role of an equation, by analysis -> its rewrite.
LIFT: Mapping[str, Callable[[Scope, Equation], None]] = {
    "rows": lift_row_equation,
    "lookup": _lift_lookup,
    "push": _lift_push,
    "reduce": _lift_reduce,
    "contract": _lift_contract,
}


# --- the second rewriting of a block, for untouched rows of a family ---
#
# Pushes are dropped, and dense values are imported from the first rewriting (stacked, out of a loop). The result is the
# family's untouched form, which a sweep over all rows runs.


@dataclass(eq=False)
class UntouchedScope(Scope):
    """The second rewriting of a block, for untouched rows of one family."""

    primary: Scope | None = None  #: The first rewriting of the same block.
    #: The second rewriting of the block around it, which computes its rows; None for a `Template`, which imports them,
    #: and for the outermost block.
    outer: UntouchedScope | None = None
    ran: list[Equation] = field(default_factory=list)  #: The rewritten equations.

    @property
    def may_import(self) -> bool:
        return True

    def get(self, atom: Atom) -> Atom:
        if isinstance(atom, Literal):
            return atom
        if atom in self.dense:  # a leaf of the family, which the sweep updates in place
            return self.dense[atom]
        assert self.primary is not None
        return self.frontier(self.primary.get(atom))

    def frontier(self, atom: Atom) -> Atom:
        """Returns a value of the first rewriting, as an input of this one."""
        if isinstance(atom, Literal):
            return atom
        return self.import_new(atom)

    def rows_of(self, family: int) -> int:
        return self.lifting.block_rows[family]

    def _make_rows(self, atom: Atom, axis: int, family: int) -> Atom:
        if self.outer is not None and isinstance(atom, Var) and atom in self.operands:
            outside = self.operands[atom]
            if isinstance(self.lifting.facts.value(atom), (Row, Free)):
                return self.outer.computed(outside, axis, family)
        return super()._make_rows(atom, axis, family)

    def computed(self, atom: Atom, axis: int, family: int) -> Atom:
        """Returns the value at the rows, after computing it."""
        if isinstance(atom, Var) and (atom, axis, family) not in self.rows and self.lifting.row(atom) is not None:
            self.run([atom], family)
        return self.at_rows(atom, axis, family)

    def run(self, targets: Sequence[Var], family: int) -> None:
        """Rewrites the row equations that the targets need, in order."""
        lifting = self.lifting
        needed = set(targets)
        kept = []
        for equation in reversed(self.block.equations):
            if not needed.intersection(equation.outputs):
                continue
            if not any((r := lifting.row(v)) is not None and r.family == family for v in equation.outputs):
                continue
            kept.append(equation)
            needed.update(a for a in self._read(equation, family) if isinstance(a, Var))
        for equation in reversed(kept):
            self._untouched(equation, family)
        self.ran += reversed(kept)

    def _read(self, equation: Equation, family: int) -> Sequence[Atom]:
        if self.lifting.facts.roles.get(equation) == "push":
            return equation.inputs[:1]
        if not equation.bodies:
            return equation.inputs
        template = self.lifting.templates[equation, family]
        rows = [what[0] for kind, *what in template.imports if kind in ("rows", "fetched")]
        return [*(a for a, _ in (*template.carries, *template.sequences)), *rows]

    def _untouched(self, equation: Equation, family: int) -> None:
        if self.lifting.facts.roles.get(equation) == "push":
            out = equation.outputs[0]
            row = self.lifting.row(out)
            assert row is not None, "a push makes rows"
            self.rows[out, row.axis, family] = push_base(self, equation, row)
        elif equation.op == "optimization_barrier":
            for operand, out in zip(equation.inputs, equation.outputs, strict=True):
                row = self.lifting.row(out)
                if row is not None and row.family == family:
                    self.rows[out, row.axis, family] = self.at_rows(operand, row.axis, family)
        elif equation.bodies:
            self._use(self.lifting.templates[equation, family])
        else:
            lift_row_equation(self, equation)

    def _use(self, template: Template) -> None:
        """Inserts the untouched form of a scan, remat or cond."""
        outer = [self.frontier(k[1]) if k[0] == "new" else self.resolve(k) for k in template.imports]
        equation = template.equation
        stacked = [self.frontier(v) for v in template.stacked]
        if equation.op == "remat":
            (body,) = template.bodies
            copy, env = clone(body, dict(zip(body.inputs, [*outer, *stacked], strict=True)))
            self.equations += copy.equations
            results = [env.get(a, a) if isinstance(a, Var) else a for a in body.outputs]
        elif equation.op == "cond":
            inputs = (self.get(equation.inputs[0]), *outer, *stacked)
            results = tuple(Var(a.type) for a in template.bodies[0].outputs)
            self.append(equation.with_operands([clone(b)[0] for b in template.bodies], results, consts=inputs))
        else:
            starts = [self.at_rows(a, axis, template.family) for a, axis in template.carries]
            sequences = [self.at_rows(a, axis, template.family) for a, axis in template.sequences]
            body, _ = clone(template.bodies[0])
            results = emit_scan(self, equation, body, outer, starts, [*sequences, *stacked])
        for old, new in zip(template.outputs, results, strict=True):
            row = self.lifting.row(old)
            assert row is not None, "the untouched form returns rows"
            self.rows[old, row.axis, row.family] = new


def untouched_scope(scope: Scope, family: int) -> tuple[UntouchedScope, dict[int, Var]]:
    """Returns a scope for a family's untouched form, and the names of its leaves in it; its route is its first input.

    `scope`: the first rewriting of a block that is in no loop which carries rows.
    """
    block, space = scope.block, scope.lifting.spaces[family]
    if scope.parent is not None:
        outer, inner = untouched_scope(scope.parent, family)
        routes = {family: outer.routes[family]}
        untouched = UntouchedScope(
            scope.lifting, block, None, dict(scope.operands), routes=routes, primary=scope, outer=outer
        )
        return untouched, inner
    inner = {k: Var(scope.lifting.inputs[k].type) for k in space.leaves}
    chunk = Var(RouteType(family, space.extent, scope.lifting.block_rows[family]))
    untouched = UntouchedScope(
        scope.lifting,
        block,
        routes={family: chunk},
        primary=scope,
        dense={block.inputs[k]: v for k, v in inner.items()},
        leaf_atoms=set(inner.values()),
    )
    return untouched, inner


def emit_scan(
    scope: Scope, like: Equation, body: Block, consts: Sequence[Atom], starts: Sequence[Atom], xs: Sequence[Atom]
) -> tuple[Var, ...]:
    """Appends a scan with a new body; returns its carries and stacked results."""
    carry, length = len(starts), like.params["length"]
    outputs = [Var(a.type) for a in body.outputs[:carry]]
    outputs += [Var(replace(a.type, shape=(length, *a.shape))) for a in body.outputs[carry:]]
    scope.append(like.with_operands([body], outputs, consts=consts, carries=starts, xs=xs))
    return tuple(outputs)


# --- scans, remats and conds in row space, and `rewrite`, which dispatches every equation ---
#
# A scan's carries and sequences change form if they are in row space; its body imports other values. Each family that
# comes out of a body gets the body's untouched form as well (a `Template`).


def rewrite(scope: Scope, equation: Equation) -> None:
    """Rewrites one equation of the block."""
    role = scope.lifting.facts.roles.get(equation)
    if not scope.lifting.touches(equation) or role == "dense":
        scope.compute(equation)
    elif equation.op == "scan":
        _Loop(scope, equation).lift()
    elif equation.op in ("remat", "cond"):
        _lift_branches(scope, equation)
    else:
        LIFT[role or "rows"](scope, equation)


@dataclass(eq=False)
class _Loop:
    """Rewrites one scan."""

    scope: Scope
    equation: Equation

    def lift(self) -> None:
        scope, equation, lifting = self.scope, self.equation, self.scope.lifting
        consts, carry = equation.border.consts, equation.border.carries
        body = equation.bodies[0]
        child = Scope(lifting, body, scope, dict(zip(body.inputs[:consts], equation.inputs[:consts], strict=True)))
        starts, start_vars = self._bind(child, range(consts, consts + carry), equation.outputs[:carry], 0)
        xs, x_vars = self._bind(child, range(consts + carry, len(equation.inputs)), None, 1)
        # Ids that differ from turn to turn are computed before the loop; each turn takes its own.
        for access in self._varying_indices():
            stacked = scope.index(access)
            child.indices[access] = one = Var(replace(stacked.type, shape=stacked.shape[1:]))
            xs.append(stacked)
            x_vars.append(one)
        for inner in body.equations:
            rewrite(child, inner)
        outputs = [self._result(child, k, 0 if k < carry else 1) for k in range(len(equation.outputs))]
        pending = self._untouched_forms(child, carry)
        exported: dict[Atom, int] = {}
        for untouched in pending:
            for atom in untouched.exports:
                exported.setdefault(atom, len(outputs) + len(exported))
        inputs = (*child.imports.values(), *start_vars, *x_vars)
        block = Block(inputs, tuple(child.equations), (*outputs, *exported))
        results = emit_scan(scope, equation, block, [scope.resolve(k) for k in child.imports], starts, xs)
        scope.bind(equation.outputs, results)
        for untouched in pending:
            stacked = tuple(results[exported[a]] for a in untouched.exports)
            lifting.templates[equation, untouched.family] = replace(untouched, stacked=stacked)

    def _varying_indices(self) -> list[Equation]:
        indices = self.scope.lifting.indices.items()
        return [e for e, at in indices if self.equation in at.path and at.varies[at.path.index(self.equation)]]

    def _bind(
        self, child: Scope, positions: range, fixed: Sequence[Var] | None, shift: int
    ) -> tuple[list[Atom], list[Var]]:
        """Returns the body's varying inputs, outside and inside, in row form if they are in row space."""
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

    def _untouched_forms(self, child: Scope, carry: int) -> list[Template]:
        """Rewrites the body again for each family that comes out of the loop."""
        equation, lifting = self.equation, self.scope.lifting
        consts, body = equation.border.consts, equation.bodies[0]
        made = []
        for family in _families(lifting, equation.outputs):
            untouched = UntouchedScope(lifting, body, None, dict(child.operands), primary=child)
            carries, sequences, inner = [], [], []
            for k in range(consts, len(equation.inputs)):
                is_carry = k < consts + carry
                row = lifting.row(equation.outputs[k - consts] if is_carry else body.inputs[k])
                if row is None or row.family != family:
                    continue
                var = Var(untouched.at(body.inputs[k].type, row.axis, family))
                untouched.rows[body.inputs[k], row.axis, family] = var
                inner.append(var)
                (carries if is_carry else sequences).append((equation.inputs[k], row.axis + (0 if is_carry else 1)))
            made.append(_template(equation, family, untouched, carry, inner, carries, sequences))
        return made


def _families(lifting: Lifting, outputs: Sequence[Var]) -> list[int]:
    return list(dict.fromkeys(r.family for v in outputs if (r := lifting.row(v)) is not None))


def _template(
    equation: Equation,
    family: int,
    untouched: UntouchedScope,
    carry: int,
    inner: Sequence[Var] = (),
    carries: Sequence[tuple[Atom, int]] = (),
    sequences: Sequence[tuple[Atom, int]] = (),
) -> Template:
    """Returns the untouched form of a body, whose results are stacked from index `carry` on.

    Its loop-invariant inputs are imported; the first rewriting exports the rest.
    """
    returned = untouched.block.outputs
    outs = [(k, r) for k, v in enumerate(equation.outputs) if (r := untouched.lifting.row(v)) and r.family == family]
    untouched.run([a for k, _ in outs if isinstance(a := returned[k], Var)], family)
    results = tuple(untouched.at_rows(returned[k], r.axis - (k >= carry), family) for k, r in outs)
    assert untouched.primary is not None, "an untouched form is a second rewriting"
    outside = {var: key for key, var in untouched.primary.imports.items()}
    imports: list[Key] = []
    invariant, varying, exports = [], [], []
    for key, var in untouched.imports.items():
        if key[0] == "new" and key[1] not in outside:
            varying.append(var)
            exports.append(key[1])
            continue
        outer = outside[key[1]] if key[0] == "new" else key
        assert key[0] != "new" or outer[0] == "dense", "it takes only dense values from the first rewriting"
        invariant.append(var)
        imports.append(outer)
    return Template(
        equation=equation,
        family=family,
        bodies=(Block((*invariant, *inner, *varying), tuple(untouched.equations), results),),
        imports=tuple(imports),
        carries=tuple(carries),
        sequences=tuple(sequences),
        exports=tuple(exports),
        outputs=tuple(equation.outputs[k] for k, _ in outs),
    )


def _lift_branches(scope: Scope, equation: Equation) -> None:
    """Writes a remat, or the branches of a cond, whose bodies work on rows. All bodies take the same operands."""
    lifting = scope.lifting
    head, operands = equation.inputs[: equation.border.head], equation.inputs[equation.border.head :]
    children = [Scope(lifting, b, scope, dict(zip(b.inputs, operands, strict=True))) for b in equation.bodies]
    returned = []
    for child in children:
        for inner in child.block.equations:
            rewrite(child, inner)
        pairs = zip(child.block.outputs, map(lifting.row, equation.outputs), strict=True)
        returned.append([child.get(a) if r is None else child.at_rows(a, r.axis, r.family) for a, r in pairs])
    pending = {
        f: [_untouched_branch(child, equation, f) for child in children] for f in _families(lifting, equation.outputs)
    }
    exports = [
        list(dict.fromkeys(a for untouched_values in pending.values() for a in untouched_values[k].exports))
        for k in range(len(children))
    ]
    for k, (child, outputs) in enumerate(zip(children, returned, strict=True)):
        # All branches return as many values: one's exports are zeros in the others.
        for j, atoms in enumerate(exports):
            outputs += atoms if j == k else [child.zeros(a.type) for a in atoms]
    types = {key: var.type for child in children for key, var in child.imports.items()}
    blocks = tuple(
        Block(tuple(child.import_(key, type_) for key, type_ in types.items()), tuple(child.equations), tuple(outputs))
        for child, outputs in zip(children, returned, strict=True)
    )
    results = tuple(Var(a.type) for a in blocks[0].outputs)
    inputs = [*(scope.get(a) for a in head), *(scope.resolve(key) for key in types)]
    scope.append(equation.with_operands(blocks, results, consts=inputs))
    scope.bind(equation.outputs, results)
    exported = dict(zip([a for atoms in exports for a in atoms], results[len(equation.outputs) :], strict=True))
    for family, untouched_values in pending.items():
        lifting.templates[equation, family] = _join_branches(untouched_values, exported)


def _untouched_branch(child: Scope, equation: Equation, family: int) -> Template:
    untouched = UntouchedScope(child.lifting, child.block, None, dict(child.operands), primary=child)
    return _template(equation, family, untouched, len(equation.outputs))


def _join_branches(untouched_values: Sequence[Template], exported: Mapping[Atom, Var]) -> Template:
    """Joins the branches' untouched forms into one template, with the same operands."""
    named = [dict(zip((*o.imports, *o.exports), o.bodies[0].inputs, strict=True)) for o in untouched_values]
    imports = tuple(dict.fromkeys(key for untouched in untouched_values for key in untouched.imports))
    exports = tuple(dict.fromkeys(a for untouched in untouched_values for a in untouched.exports))
    types = {name: var.type for rows in named for name, var in rows.items()}
    bodies = tuple(
        replace(untouched.bodies[0], inputs=tuple(rows.get(k) or Var(types[k]) for k in (*imports, *exports)))
        for untouched, rows in zip(untouched_values, named, strict=True)
    )
    stacked = tuple(exported[a] for a in exports)
    return replace(untouched_values[0], bodies=bodies, imports=imports, stacked=stacked)
