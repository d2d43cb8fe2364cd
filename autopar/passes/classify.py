"""Which leaves are looked up by rows: the candidates for lifting, and the leaves that may be their slots.

Leaves are those of states, and Tables that are only read.

A leaf is a *table* if a gather (or a slice of rows) along one of its axes reads it, directly or through row-parallel
equations. A leaf with as many rows may be one of its optimizer slots: whether it is, `analyze_rows` finds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from autopar.analysis.rules import ALIGNED
from autopar.ir.program import ArrayType, Atom, Block, Equation, Program, Var

#: Where a variable's rows come from: (state leaf, the leaf's axis, the variable's axis).
Trace = tuple[int, int, int]


def classify(program: Program) -> tuple[Program, str]:
    """Mark tables and candidates, each with its row axis."""
    states = [k for k, given in enumerate(program.inputs) if given.role in ("state", "table")]
    start: dict[Var, frozenset[Trace]] = {}
    for k in states:
        var = program.block.inputs[k]
        if isinstance(var.type, ArrayType):
            start[var] = frozenset((k, axis, axis) for axis, size in enumerate(var.shape) if size > 1)
    axes: dict[int, int] = {}
    for leaf, axis in sorted(_looked_up(program.block, start, set(start))):
        layout = program.inputs[leaf].layout
        if layout is None or layout[1] == axis:  # a stored table's row axis is settled
            axes.setdefault(leaf, axis)
    tables = tuple(sorted(axes.items()))
    candidates = tuple((k, axes.get(k, axis)) for k in states if (axis := _slot_axis(program, k, tables)) is not None)
    names = ", ".join(program.inputs[k].path for k, _ in tables)
    note = f"looked up by rows: {names}" if tables else "no parameter is looked up by rows"
    return dataclasses.replace(program, tables=tables, candidates=candidates), note


def _slot_axis(program: Program, k: int, tables: Sequence[tuple[int, int]]) -> int | None:
    """The axis along which a leaf may hold a slot of one of the tables."""
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


def _looked_up(block: Block, traces: dict[Var, frozenset[Trace]], pure: set[Atom]) -> set[tuple[int, int]]:
    """(leaf, axis) that a lookup reads; `traces` grows by the block's variables, `pure` by those made of states alone.

    Products are followed only where they are of states alone (`table @ w`), or every activation would carry a trace
    of every weight before it.
    """
    found: set[tuple[int, int]] = set()
    constants: set[Atom] = set()
    producers: dict[Atom, Equation] = {}
    for equation in block.equations:
        producers.update((v, equation) for v in equation.outputs)
        if all(a in constants for a in equation.inputs if isinstance(a, Var)):
            constants.update(equation.outputs)
        if all(a in pure for a in equation.inputs if isinstance(a, Var)):
            pure.update(equation.outputs)
        elif equation.op == "dot_general":
            continue  # activations times weights: their columns are nobody's rows
        sources = [traces.get(a, frozenset()) if isinstance(a, Var) else frozenset() for a in equation.inputs]
        if not any(sources):
            continue
        if equation.op in _SLICED:
            picked = {t for t in sources[0] if _picks_rows(equation, t[2])}
            chosen = {t for t in picked if not _is_fixed(equation, t[2], producers, constants)}
            # Fixed columns are no lookup; fixed rows are, unless other axes are indexed by data (`t[arange(k), ids]`).
            found |= {(leaf, of) for leaf, of, _ in chosen or {t for t in picked if t[1] == 0}}
        if equation.op in ("scan", "remat", "cond"):
            returned: list[frozenset[Trace]] = [frozenset()] * len(equation.outputs)
            for body in equation.bodies:
                inner, inner_pure = _into(equation, body, sources, pure)
                found |= _looked_up(body, inner, inner_pure)
                atoms = (inner.get(a, frozenset()) if isinstance(a, Var) else frozenset() for a in body.outputs)
                returned = [old | new for old, new in zip(returned, atoms, strict=True)]
            traces.update(zip(equation.outputs, _out_of(equation, returned), strict=True))
        elif equation.op == "while":
            returned = _looked_up_in_while(equation, sources, pure, found)
            traces.update(zip(equation.outputs, returned, strict=True))
        elif equation.op.startswith("scatter") or equation.op == "dynamic_update_slice":  # leave rows where they are
            traces[equation.outputs[0]] = sources[0]
        elif equation.op in ALIGNED or equation.op == "optimization_barrier":
            pairs = zip(equation.inputs, sources, strict=True)
            union = frozenset().union(*(s for a, s in pairs if not _is_repeated(equation, a)))
            traces |= {v: union for v in equation.outputs}
        elif equation.op in _MOVE:
            moved = {
                (leaf, of, to)
                for k, source in enumerate(sources)
                for leaf, of, axis in source
                if (to := _MOVE[equation.op](equation, k, axis)) is not None
            }
            traces |= {v: frozenset(moved) for v in equation.outputs}
    return found


def _looked_up_in_while(
    equation: Equation, sources: Sequence[frozenset[Trace]], pure: set[Atom], found: set[tuple[int, int]]
) -> list[frozenset[Trace]]:
    """Traces of a while loop's results; `found` grows by what it looks up."""
    consts = equation.params["cond_nconsts"], equation.params["body_nconsts"]
    starts = 0, consts[0]
    returned: list[frozenset[Trace]] = []
    for start, count, body in zip(starts, consts, equation.bodies, strict=True):
        places = [*range(start, start + count), *range(sum(consts), len(equation.inputs))]
        inner = {v: sources[k] for v, k in zip(body.inputs, places, strict=True)}
        inner_pure: set[Atom] = {v for v, k in zip(body.inputs, places, strict=True) if equation.inputs[k] in pure}
        found |= _looked_up(body, inner, inner_pure)
        returned = [inner.get(a, frozenset()) if isinstance(a, Var) else frozenset() for a in body.outputs]
    return returned  # the body's, which comes last


def _is_repeated(equation: Equation, atom: Atom) -> bool:
    """Whether an elementwise equation repeats an operand along an axis (as it does with a bias)."""
    shape = equation.outputs[0].shape
    return equation.op != "concatenate" and equation.op in ALIGNED and atom.shape != shape


def _into(
    equation: Equation, body: Block, sources: Sequence[frozenset[Trace]], pure: set[Atom]
) -> tuple[dict[Var, frozenset[Trace]], set[Atom]]:
    """Traces of a body's inputs, and which inputs are made of states alone. Sequences lose their first axis."""
    skipped = len(equation.inputs) - len(body.inputs)  # a cond's index
    sequences = equation.params["num_consts"] + equation.params["num_carry"] if equation.op == "scan" else len(sources)
    inner = {}
    for k, (var, source) in enumerate(zip(body.inputs, sources[skipped:], strict=True)):
        if k >= sequences:
            source = frozenset((leaf, of, axis - 1) for leaf, of, axis in source if axis > 0)
        inner[var] = source
    return inner, {v for v, a in zip(body.inputs, equation.inputs[skipped:], strict=True) if a in pure}


def _out_of(equation: Equation, returned: Sequence[frozenset[Trace]]) -> list[frozenset[Trace]]:
    """Traces of the results; what a scan stacks has one axis more."""
    if equation.op != "scan":
        return list(returned)
    carry = equation.params["num_carry"]
    stacked = [frozenset((leaf, of, axis + 1) for leaf, of, axis in source) for source in returned[carry:]]
    return [*returned[:carry], *stacked]


def _is_fixed(equation: Equation, axis: int, producers: Mapping[Atom, Equation], constants: set[Atom]) -> bool:
    """Whether a slice takes the same places along an axis whatever the data."""
    if equation.op == "slice":
        return True
    if equation.op == "dynamic_slice":
        index = equation.inputs[1 + axis]
        return not isinstance(index, Var) or index in constants
    index = equation.inputs[1]
    if not isinstance(index, Var) or index in constants:
        return True
    source = producers.get(index)
    if source is None or source.op != "concatenate" or source.params["dimension"] != len(index.shape) - 1:
        return False
    column = equation.params["dimension_numbers"].start_index_map.index(axis)
    for part in source.inputs:
        if column < part.shape[-1]:
            return not isinstance(part, Var) or part in constants
        column -= part.shape[-1]
    return False


_SLICED = frozenset({"gather", "dynamic_slice", "slice"})


def _picks_rows(equation: Equation, axis: int) -> bool:
    """Whether a slice takes some of the rows along an axis (rather than all of them)."""
    rows = equation.inputs[0].shape[axis]
    if equation.op == "slice":
        return equation.outputs[0].shape[axis] != rows
    if equation.op == "gather" and axis not in equation.params["dimension_numbers"].start_index_map:
        return False
    return equation.params["slice_sizes"][axis] != rows


def _broadcast(equation: Equation, k: int, axis: int) -> int | None:
    dims, shape = equation.params["broadcast_dimensions"], equation.outputs[0].shape
    to = dims[axis]
    kept = {d for k, d in enumerate(dims) if equation.inputs[0].shape[k] == shape[d]}
    if any(size > 1 for d, size in enumerate(shape) if d not in kept):
        return None  # repeated for each example, as a bias is: an activation
    return to if equation.outputs[0].shape[to] == equation.inputs[0].shape[axis] else None


def _reshape(equation: Equation, k: int, axis: int) -> int | None:
    old, new = equation.inputs[0].shape, equation.outputs[0].shape
    before = _size(old[:axis])
    return next((d for d in range(len(new)) if new[d] == old[axis] and _size(new[:d]) == before), None)


def _size(shape: Sequence[int]) -> int:
    return ArrayType(tuple(shape), None).size


def _transpose(equation: Equation, k: int, axis: int) -> int | None:
    return list(equation.params["permutation"]).index(axis)


def _squeeze(equation: Equation, k: int, axis: int) -> int | None:
    gone = {d % len(equation.inputs[0].shape) for d in equation.params["dimensions"]}
    return None if axis in gone else axis - sum(d < axis for d in gone)


def _dot(equation: Equation, k: int, axis: int) -> int | None:
    contract, batch = equation.params["dimension_numbers"]
    if axis in contract[k] or axis in batch[k]:
        return None
    free = [d for d in range(len(_operand(equation, k).shape)) if d not in contract[k] and d not in batch[k]]
    left = len(_operand(equation, 0).shape) - len(contract[0]) - len(batch[0]) if k == 1 else 0
    return len(batch[k]) + left + free.index(axis)


def _operand(equation: Equation, k: int) -> Atom:
    return equation.inputs[k]


def _columns(equation: Equation, k: int, axis: int) -> int | None:
    """A gather of columns takes all rows along."""
    numbers = equation.params["dimension_numbers"]
    if k > 0 or equation.params["slice_sizes"][axis] != equation.inputs[0].shape[axis]:
        return None
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    window = [d for d in range(len(equation.inputs[0].shape)) if d not in gone]
    return numbers.offset_dims[window.index(axis)]


def _other_columns(equation: Equation, k: int, axis: int) -> int | None:
    """A slice of columns takes all rows along."""
    return axis if k == 0 and not _picks_rows(equation, axis) else None


def _split(equation: Equation, k: int, axis: int) -> int | None:
    return None if axis == equation.params["axis"] else axis


def _unstack(equation: Equation, k: int, axis: int) -> int | None:
    along = equation.params["axis"]
    return None if axis == along else axis - (along < axis)


def _stack(equation: Equation, k: int, axis: int) -> int | None:
    return axis + (equation.params["axis"] <= axis)


def _rev(equation: Equation, k: int, axis: int) -> int | None:
    return None if axis in equation.params["dimensions"] else axis


_MOVE = {
    "slice": _other_columns,
    "dynamic_slice": _other_columns,
    "gather": _columns,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "dot_general": _dot,
    "split": _split,
    "stack": _stack,
    "unstack": _unstack,
    "rev": _rev,
}
