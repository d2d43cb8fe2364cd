"""Single equations in row space: row-parallel ones, lookups, pushes and reductions over the rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from autopar import jax_compat
from autopar.analysis.row_ids import id_params, ids_equation, index_atoms
from autopar.analysis.rules import ALIGNED, resized
from autopar.ir.program import ArrayType, Atom, Equation, Literal, Var
from autopar.ir.reductions import REDUCTION_PRIMITIVES
from autopar.ir.rowspace import Access, Const, Free, Row
from autopar.passes.lifting.scope import Scope
from autopar.passes.lifting.untouched import RowValue


def lift_row_equation(scope: Scope, equation: Equation) -> None:
    """A row-parallel equation, at the routed rows."""
    lifting = scope.lifting
    if equation.op == "optimization_barrier":
        return _lift_barrier(scope, equation)
    place = next(r for v in equation.outputs if (r := lifting.row(v)) is not None)
    inputs = []
    for k, atom in enumerate(equation.inputs):
        row = lifting.row(atom)
        if row is not None:
            inputs.append(scope.at_rows(atom, row.axis, row.family))
        elif equation.op in ALIGNED or (k == 0 and equation.op.startswith("scatter")):
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
            scope.dense[old] = scope.get(atom)
            continue
        inputs.append(scope.get(atom) if row is None else scope.at_rows(atom, row.axis, row.family))
        outputs.append(Var(inputs[-1].type))
        if row is None:
            scope.dense[old] = outputs[-1]
        else:
            scope.rows[old, row.axis, row.family] = outputs[-1]
    scope.append(dataclasses.replace(equation, inputs=tuple(inputs), outputs=tuple(outputs)))


def _lift_lookup(scope: Scope, equation: Equation) -> None:
    """Rows in the shape of the ids."""
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
    scope.append(cut)
    scope.dense[out] = cut.outputs[0]


def _layout(scope: Scope, access: Access, params: Mapping[str, Any], examples: Sequence[int]) -> Mapping[str, Any]:
    """What a lookup or push needs to know beside the gather's or scatter's own parameters.

    `axis`: the rows' in the operand; `batch`: the index operand's axis by which the access is spread over the devices,
    `spread`: the same axis in the result or the updates, given those of its axes that are the index operand's.
    """
    batch = scope.lifting.batch_axes.get(access.equation)
    spread = None if batch is None else examples[batch]
    ours = {k: params[k] for k in ("extent", "position", "clip")}
    return {**ours, "axis": access.axis, "batch": batch, "spread": spread}


def _local_ids(scope: Scope, access: Access, params: Mapping[str, Any]) -> Atom:
    """The flat ids of a slice or pad, where it stands."""
    atoms = index_atoms(access)
    made = ids_equation(params, scope.index(access.equation) if atoms else None)
    scope.append(made)
    return made.outputs[0]


def _lift_push(scope: Scope, equation: Equation) -> None:
    """Gradients (or new values) of rows, added to (or set in) the rows they belong to."""
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
        scope.equations[-1] = dataclasses.replace(scope.equations[-1], primitive=equation.primitive)
        scope.rows[key] = pushed
        return
    updates = scope.get(equation.inputs[1 if equation.op == "dynamic_update_slice" else 0])
    ids = _local_ids(scope, access, params)
    scope.rows[key] = scope.emit(
        "ap.push_ids", (base, scope.route(row.family), ids, updates), type_, {"axis": row.axis}
    )


def push_base(scope: Scope, equation: Equation, row: Row) -> Atom:
    """What a push adds to: the operand at the rows; for a pad its padding value."""
    if equation.op == "pad":
        at = scope.at(equation.outputs[0].type, row.axis, row.family)
        return scope.full(scope.get(equation.inputs[1]), at)
    return scope.at_rows(equation.inputs[0], row.axis, row.family)


def _lift_reduce(scope: Scope, equation: Equation) -> None:
    """A reduction over all rows, from the routed ones."""
    row = scope.lifting.row(equation.inputs[0])
    assert row is not None, "a reduction over rows reads rows"
    assert isinstance(row.off, Const), "off the touched rows it is a constant"
    atom = equation.inputs[0]
    rows = scope.at_rows(atom, row.axis, row.family)
    value = RowValue(rows, row.axis, row.family, row.off.value, ((atom, row.axis),), equation)
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
    """A product that sums over all rows, one side being zero on the untouched ones; if it may be something else there,
    a product for each row, and a sum over the rows."""
    places = [row for a in equation.inputs if (row := scope.lifting.row(a)) is not None]
    sources = tuple((a, row.axis) for a, row in zip(equation.inputs, places, strict=True))
    family = places[0].family
    inputs = tuple(scope.at_rows(a, axis, family) for a, axis in sources)
    if scope.lifting.untouched.keeps_zero(scope, sources, family):
        out = scope.dense[equation.outputs[0]] = Var(equation.outputs[0].type)
        scope.append(dataclasses.replace(equation, inputs=inputs, outputs=(out,)))
        return
    product, axis = _product_by_row(equation, inputs, [axis for _, axis in sources])
    scope.append(product)
    value = RowValue(product.outputs[0], axis, family, 0, sources, equation, (product, axis))
    _reduce(scope, value, equation.outputs[0], "sum", (axis,))


def _product_by_row(equation: Equation, inputs: Sequence[Atom], axes: Sequence[int]) -> tuple[Equation, int]:
    """A contraction over rows, whose axes in the operands these are, as one for each row; where they lie in it."""
    contract, batch = equation.params["dimension_numbers"]
    kept = tuple(tuple(d for d in dims if d != axis) for dims, axis in zip(contract, axes, strict=True))
    batched = tuple((*dims, axis) for dims, axis in zip(batch, axes, strict=True))
    out, at = equation.outputs[0], len(batch[0])
    shape = (*out.shape[:at], inputs[0].shape[axes[0]], *out.shape[at:])
    dtype = jnp.promote_types(out.dtype, np.float32) if jax_compat.is_float(out.dtype) else out.dtype
    type_ = dataclasses.replace(out.type, shape=shape, dtype=dtype)
    params = {**equation.params, "dimension_numbers": (kept, batched), "preferred_element_type": dtype}
    return dataclasses.replace(equation, inputs=tuple(inputs), outputs=(Var(type_),), params=params), at


#: How an equation is lifted, by the role that analysis gave it.
LIFT: Mapping[str, Callable[[Scope, Equation], None]] = {
    "rows": lift_row_equation,
    "lookup": _lift_lookup,
    "push": _lift_push,
    "reduce": _lift_reduce,
    "contract": _lift_contract,
}
