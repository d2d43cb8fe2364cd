"""Defines what each primitive does along the rows and to untouched rows.

`RULES[op]` takes an equation, the values of its operands and the running analysis, and returns the values of its
results. It raises `Mixes` when a result's row would depend on other rows. `RESIZE[op]` returns the parameters of the
same equation with the row axis at another size. An op in neither table has no rule: a table that reaches it stays
dense, and `explain` names it. To add a rule, see CONTRIBUTING.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import jax.numpy as jnp
import numpy as np

from autopar import jax_compat
from autopar.analysis.batch import SUMMED, result_axis
from autopar.analysis.primitives import ELEMENTWISE, MOVES, PRIMITIVES
from autopar.ir.program import Atom, Equation, Literal
from autopar.ir.reductions import REDUCTION_PRIMITIVES
from autopar.ir.rowspace import UNKNOWN, Const, Free, Refusal, RefusalKind, Row, Same, UntouchedValue, Value
from autopar.jax_types import Dtype, Leaf, Params

# --- reasons why rows can't be followed, and what to write instead ---
#: The remedy for anything that needs all rows.
APART = "compute it apart from the step (a metric), or of looked-up rows alone, or accept that the table stays dense"
#: The remedy for an update that isn't made row by row.
OF_ROWS = "make it for the rows that are looked up, and write these: t.at[ids].add(...), t.at[ids].set(...)"
LAZY = "sparse='lazy' moves only the touched rows, which is another function"
OWN_IDS = "compute the ids first, from what is no row of this table, or from a copy of it that the step doesn't update"
_ROWS_FIRST = "look up rows first (t[ids]), and compute the rest of these alone, where that is the same"
_OWN_NUMBERS = "look up rows by their own numbers in the table as it is stored, t[ids]"
_LEAF_BY_LEAF = (
    f"{_OWN_NUMBERS}; make norms and updates leaf by leaf (optax.tree.norm, jax.tree.map), not of one vector of all "
    "parameters (ravel_pytree)"
)

#: Operation that loses a table's rows -> the reason, and what to write instead.
LOST: Mapping[str, tuple[str, str]] = {
    "reshape": ("reshapes the table so that its rows run into each other", _OWN_NUMBERS),
    "pad": (
        "pads the table by rows",
        "look up rows of the table itself, and select where it is padded: jnp.where(is_padding, fill, t[ids])",
    ),
    "rev": ("reverses the table's rows", "look up rows by their numbers from the other end: t[len(t) - 1 - ids]"),
    "broadcast_in_dim": (
        "repeats the whole table",
        "look up rows first (t[ids]), and repeat these; to train copies of the table in a loop, train copies of the "
        "rows that it looks up (jnp.unique(ids, size=...)), and add their changes to the table",
    ),
    "scan": ("a scan over the rows of the table", _ROWS_FIRST),
    **dict.fromkeys(
        ("bcoo_dot_general", "bcsr_dot_general"),
        (
            "a product with a sparse matrix isn't followed",
            "look up rows, weigh them and add them up: jax.ops.segment_sum(weights[:, None] * t[columns], rows, n)",
        ),
    ),
}


def why_unfollowed(lost: Equation, access: Equation) -> Refusal:
    """Returns why a leaf's lookup isn't followed. `lost`: the equation where its rows are lost. `access`: the equation
    that reads parts of the result; `lost` itself if that is no lookup."""
    if lost.op in LOST:
        reason, remedy = LOST[lost.op]
    elif lost is access and lost.op == "dot_general":
        reason = "a product with a matrix that has weights, or several 1s, in the columns of ids isn't followed"
        remedy = "look up rows, weigh them and add them up: (weights[..., None] * t[ids]).sum(1)"
    elif lost is access:
        reason, remedy = f"{lost.op} is given ids, and isn't followed", _ROWS_FIRST
    else:
        reason, remedy = f"{lost.op} of all of its rows, ahead of a lookup", _ROWS_FIRST
    return Refusal(reason, lost.source or access.source, remedy)


def why_only_written(write: Equation, path: str) -> Refusal:
    """Returns why a leaf into which a step writes rows, and reads none, is no table."""
    return Refusal("the step only writes rows of it, in place", write.source, shards_remedy(path))


def shards_remedy(path: str) -> str:
    """Returns how to keep a leaf in shards although no update is saved."""
    return f"strategy={{{path!r}: 'ps', '**': 'auto'}} keeps a shard of it on each of several devices"


# --- rules ---


class Mixes(Exception):
    """Raised by a rule, with the reason, its remedy, and its kind (`ir.rowspace.Refusal`)."""

    def __init__(self, reason: str, remedy: str = APART, kind: RefusalKind = "other") -> None:
        super().__init__(reason)
        self.reason = reason
        self.remedy = remedy
        self.kind: RefusalKind = kind


class Analysis(Protocol):
    """The questions that a rule may ask the running analysis."""

    def unite(self, rows: Sequence[Row]) -> int: ...
    def enter(self, equation: Equation, axis: int) -> int | None: ...
    def access(self, family: int, equation: Equation, axis: int) -> None: ...
    def role(self, equation: Equation, role: str) -> None: ...


Rule = Callable[[Equation, Sequence[Value], Analysis], Sequence[Value]]
Resize = Callable[[Equation, int, int], Params]

RULES: dict[str, Rule] = {}
RESIZE: dict[str, Resize] = {}
#: Ops whose non-scalar operands all lie along the result's axes, so that each is restricted to the rows.
ALIGNED: set[str] = set()


def row_operand(values: Sequence[Value]) -> tuple[int, Row]:
    """Returns the first operand that is in row space; there must be one."""
    return next((k, v) for k, v in enumerate(values) if isinstance(v, Row))


def resized(shape: Sequence[int], axis: int, rows: int) -> tuple[int, ...]:
    return (*shape[:axis], rows, *shape[axis + 1 :])


# --- elementwise primitives: row-parallel by nature; rules compute their untouched values ---
#
# `fold` is the off-row algebra: constants fold (with NumPy), zero absorbs in products and is neutral in sums, one is
# neutral in products. `0 * x = 0` holds for finite x only: the lifted step checks a row of its own for what it can't
# know here (see `passes.lift_rows`).

_INEXACT = frozenset({"div", "rem", "pow", "integer_pow"})
_IDENTITIES = ELEMENTWISE & MOVES


def fold(equation: Equation, untouched_values: Sequence[UntouchedValue]) -> UntouchedValue:
    """Returns the result's untouched value from the operands'."""
    op = equation.op
    if op in _INEXACT and not jnp.issubdtype(equation.outputs[0].dtype, np.inexact):
        return UNKNOWN  # integers divide and overflow in XLA's own way
    special = _SPECIAL.get(op)
    if special is not None:
        return special(equation, untouched_values)
    if op in _IDENTITIES:
        return untouched_values[0]
    known = _constants(equation, untouched_values) or (
        _combined(equation, untouched_values) if op in _ALGEBRA else UNKNOWN
    )
    return _of_equals(equation, untouched_values) if known == UNKNOWN and op in _OF_EQUALS else known


def _as(equation: Equation, value: Leaf) -> Leaf:
    return np.asarray(value).astype(equation.outputs[0].dtype)


def is_zero(untouched: UntouchedValue) -> bool:
    return isinstance(untouched, Const) and untouched.is_zero


def _constants(equation: Equation, untouched_values: Sequence[UntouchedValue]) -> Const | None:
    folded = PRIMITIVES[equation.op].fold
    if folded is None or not all(isinstance(o, Const) for o in untouched_values):
        return None
    with np.errstate(all="ignore"):
        return Const(_as(equation, folded(*(np.asarray(o.value) for o in untouched_values if isinstance(o, Const)))))


#: Absorbing and neutral constants, for the first and the second operand. -1 has all bits set.
_ALGEBRA: Mapping[str, tuple[tuple[int | None, int | None], tuple[int | None, int | None]]] = {
    "mul": ((0, 0), (1, 1)),
    "add": ((None, None), (0, 0)),
    "add_any": ((None, None), (0, 0)),
    "sub": ((None, None), (None, 0)),
    "div": ((0, None), (None, 1)),
    "and": ((0, 0), (-1, -1)),
    "or": ((-1, -1), (0, 0)),
}


def _combined(equation: Equation, untouched_values: Sequence[UntouchedValue]) -> UntouchedValue:
    """Returns the result if one of two operands is a constant that absorbs the other, or is neutral."""
    absorbing, neutral = _ALGEBRA[equation.op]
    for untouched, number in zip(untouched_values, absorbing, strict=True):
        if number is not None and _is_all(untouched, number):
            return Const(_as(equation, number))
    for untouched, number, other in zip(untouched_values, neutral, untouched_values[::-1], strict=True):
        if number is not None and _is_all(untouched, number):
            return other
    return UNKNOWN


#: The result of two equal operands; None: the operand.
_OF_EQUALS: Mapping[str, int | None] = {
    "sub": 0,
    "xor": 0,
    **dict.fromkeys(("ne", "lt", "gt"), 0),
    **dict.fromkeys(("eq", "le", "ge"), 1),
    **dict.fromkeys(("max", "min", "and", "or"), None),
}


def _of_equals(equation: Equation, untouched_values: Sequence[UntouchedValue]) -> UntouchedValue:
    """Returns the untouched value of an equation whose two operands are the same function of the row there.

    One value with itself is left alone: `x != x` and `x - x` test for NaN and infinity.
    """
    one, other = equation.inputs
    if (
        one is other
        or untouched_values[0] != untouched_values[1]
        or isinstance(untouched_values[0], Const)
        or untouched_values[0] == UNKNOWN
    ):
        return UNKNOWN
    number = _OF_EQUALS[equation.op]
    return untouched_values[0] if number is None else Const(_as(equation, number))


def _is_all(untouched: UntouchedValue, number: int) -> bool:
    if not isinstance(untouched, Const):
        return False
    value = np.asarray(untouched.value)
    return bool(np.all(value == np.asarray(number).astype(value.dtype)))


def _convert(equation: Equation, untouched_values: Sequence[UntouchedValue]) -> UntouchedValue:
    (untouched,), new = untouched_values, equation.outputs[0].dtype
    if isinstance(untouched, Const):
        with np.errstate(all="ignore"):
            value = np.asarray(untouched.value)
            if np.iscomplexobj(value) and not np.issubdtype(new, np.complexfloating):
                return Const(np.zeros((), new)) if untouched.is_zero else UNKNOWN
            converted = value.astype(new)
            kept = jnp.issubdtype(new, np.inexact) or bool(converted.astype(value.dtype) == value)
            return Const(converted) if kept or converted.dtype == np.bool_ else UNKNOWN
    if isinstance(untouched, Same) and (new == untouched.dtype or _holds(new, untouched.dtype)):
        return untouched  # widening is exact, and narrowing back to the leaf's own dtype undoes it
    return UNKNOWN


def _holds(wide: Dtype, narrow: Dtype) -> bool:
    both_float = jax_compat.is_float(wide) and jax_compat.is_float(narrow)
    return both_float and jax_compat.holds_floats(wide, narrow)


def _integer_pow(equation: Equation, untouched_values: Sequence[UntouchedValue]) -> UntouchedValue:
    untouched = untouched_values[0]
    if not isinstance(untouched, Const):
        return UNKNOWN
    with np.errstate(all="ignore"):
        return Const(_as(equation, np.asarray(untouched.value) ** float(equation.params["y"])))


def _select(equation: Equation, untouched_values: Sequence[UntouchedValue]) -> UntouchedValue:
    which, *cases = untouched_values
    if isinstance(which, Const) and np.ndim(which.value) == 0:
        return cases[int(which.value)]
    return cases[0] if all(c == cases[0] and c != UNKNOWN for c in cases) else UNKNOWN


def _clamp(equation: Equation, untouched_values: Sequence[UntouchedValue]) -> UntouchedValue:
    if all(isinstance(o, Const) for o in untouched_values):
        low, x, high = (np.asarray(o.value) for o in untouched_values if isinstance(o, Const))
        return Const(_as(equation, np.minimum(np.maximum(x, low), high)))
    return UNKNOWN


_SPECIAL: Mapping[str, Callable[[Equation, Sequence[UntouchedValue]], UntouchedValue]] = {
    "convert_element_type": _convert,
    "integer_pow": _integer_pow,
    "select_n": _select,
    "clamp": _clamp,
}


def untouched_of(atom: Atom, value: Value, axis: int) -> UntouchedValue:
    """Returns an operand's untouched value, for rows along `axis`."""
    if isinstance(value, Row):
        return value.untouched
    if isinstance(value, Free) and (atom.shape == () or axis in value.axes):
        return value.untouched
    if isinstance(atom, Literal) and atom.shape == () and not jax_compat.is_key(atom.dtype):
        return Const(np.asarray(atom.value))
    return UNKNOWN


def elementwise(equation: Equation, values: Sequence[Value], analysis: Analysis) -> Sequence[Value]:
    """Joins rows along one axis; other operands are restricted to them."""
    rows = [v for v in values if isinstance(v, Row)]
    if not rows:
        return [_free(equation, values)]
    if len({r.axis for r in rows}) > 1:
        raise Mixes(f"{equation.op} of values whose rows lie along different axes")
    axis = rows[0].axis
    untouched_values = [untouched_of(a, v, axis) for a, v in zip(equation.inputs, values, strict=True)]
    return [Row(axis, analysis.unite(rows), fold(equation, untouched_values))]


def _free(equation: Equation, values: Sequence[Value]) -> Value:
    """Returns the result of operands that belong to no family."""
    axes = set(range(len(equation.outputs[0].shape)))
    index_axis: int | None = None
    untouched_values: list[UntouchedValue] = []
    for atom, value in zip(equation.inputs, values, strict=True):
        if isinstance(value, Free):
            if atom.shape != ():
                axes &= value.axes
            if value.index_axis is not None:
                if index_axis not in (None, value.index_axis):
                    return None
                index_axis = value.index_axis
            untouched_values.append(value.untouched)
        elif atom.shape == ():
            untouched_values.append(untouched_of(atom, value, 0))
        else:
            return None
    untouched = fold(equation, untouched_values)
    if not axes and not isinstance(untouched, Const):
        return None
    return Free(frozenset(axes), untouched, index_axis)


for _op in ELEMENTWISE:
    RULES[_op] = elementwise
    ALIGNED.add(_op)


# --- primitives that move or make axes (broadcast, reshape, transpose, slices), products, cumsum, sort ---


def constant_or_unknown(untouched: UntouchedValue) -> UntouchedValue:
    """Returns the untouched value after elements move within rows; a row that was the leaf's no longer is."""
    return untouched if isinstance(untouched, Const) else UNKNOWN


def broadcast_in_dim(equation: Equation, values: Sequence[Value], analysis: Analysis) -> Sequence[Value]:
    shape, dims = equation.params["shape"], equation.params["broadcast_dimensions"]
    value, operand = values[0], equation.inputs[0]
    if isinstance(value, Row):
        axis = result_axis(equation, 0, value.axis)
        if axis is None:
            raise Mixes("broadcasts a table of one row")
        return [Row(axis, value.family, constant_or_unknown(value.untouched))]
    new = {d for d in range(len(shape)) if d not in dims}
    new |= {d for k, d in enumerate(dims) if operand.shape[k] == 1 and shape[d] != 1}
    index_axis = None
    if isinstance(value, Free):
        new |= {dims[a] for a in value.axes if operand.shape[a] == shape[dims[a]]}
        index_axis = dims[value.index_axis] if value.index_axis is not None else None
    untouched = (
        constant_or_unknown(untouched_of(operand, value, 0))
        if operand.shape == () or isinstance(value, Free)
        else UNKNOWN
    )
    return [Free(frozenset(new), untouched, index_axis)] if new else [None]


def reshape(equation: Equation, values: Sequence[Value], analysis: Analysis) -> Sequence[Value]:
    value, old, new = values[0], equation.inputs[0].shape, equation.params["new_sizes"]
    if isinstance(value, Free):
        if isinstance(value.untouched, Const) and len(value.axes) == len(old):
            return [Free(frozenset(range(len(new))), value.untouched)]
        return [None]
    if not isinstance(value, Row):
        return [None]
    before = math.prod(old[: value.axis])
    for axis, size in enumerate(new):
        if size == old[value.axis] and math.prod(new[:axis]) == before:
            return [Row(axis, value.family, constant_or_unknown(value.untouched))]
    reason, remedy = LOST["reshape"]
    raise Mixes(reason, _LEAF_BY_LEAF if len(new) == 1 else remedy, kind="lost")


#: The remedy for one table made of several.
_APART_ROWS = (
    "where rows of zeros follow, for ids of padding, look up t.at[ids].get(mode='fill', fill_value=0); else look up "
    "rows of each by itself, and select: jnp.where((ids < len(a))[..., None], a[jnp.minimum(ids, len(a) - 1)], "
    "b[jnp.maximum(ids - len(a), 0)])"
)
#: Reasons why rows aren't followed along their own axis.
_REFUSED = {
    "squeeze": "squeezes away the row axis",
    "split": "splits the table by rows",
    "unstack": "takes the table apart by rows",
}


def move(equation: Equation, values: Sequence[Value], analysis: Analysis) -> Sequence[Value]:
    """Moves rows along with their axis."""
    value, count = values[0], len(equation.outputs)
    if isinstance(value, Row):
        axis = result_axis(equation, 0, value.axis)
        if axis is None:
            raise Mixes(_REFUSED[equation.op])
        return [Row(axis, value.family, constant_or_unknown(value.untouched))] * count
    if not isinstance(value, Free) or equation.op in ("split", "unstack"):
        return [None] * count
    index_axis = None if value.index_axis is None else result_axis(equation, 0, value.index_axis)
    if value.index_axis is not None and index_axis is None:
        return [None]
    moved = (result_axis(equation, 0, axis) for axis in value.axes)
    return [Free(frozenset(axis for axis in moved if axis is not None), value.untouched, index_axis)]


def iota(equation: Equation, values: Sequence[Value], analysis: Analysis) -> Sequence[Value]:
    if values:  # a dynamic shape
        return [None]
    rank = len(equation.params["shape"])
    return [Free(frozenset(range(rank)), UNKNOWN, equation.params["dimension"])]


def concatenate(equation: Equation, values: Sequence[Value], analysis: Analysis) -> Sequence[Value]:
    rows = [v for v in values if isinstance(v, Row)]
    if not rows:
        return [None]
    axis = rows[0].axis
    if axis == equation.params["dimension"] or any(r.axis != axis for r in rows):
        raise Mixes("concatenates rows", _APART_ROWS, kind="lost")
    untouched_values = [untouched_of(a, v, axis) for a, v in zip(equation.inputs, values, strict=True)]
    same = all(isinstance(o, Const) and o == untouched_values[0] for o in untouched_values)
    return [Row(axis, analysis.unite(rows), untouched_values[0] if same else UNKNOWN)]


def stack(equation: Equation, values: Sequence[Value], analysis: Analysis) -> Sequence[Value]:
    rows = [v for v in values if isinstance(v, Row)]
    if not rows:
        return [None]
    if len(rows) != len(values) or len({r.axis for r in rows}) > 1:
        raise Mixes("stacks rows of a table with something else")
    axis = result_axis(equation, 0, rows[0].axis)
    assert axis is not None, "stacked axes stay"
    same = all(isinstance(r.untouched, Const) and r.untouched == rows[0].untouched for r in rows)
    return [Row(axis, analysis.unite(rows), rows[0].untouched if same else UNKNOWN)]


def along_other_axis(keeps: Callable[[Const], bool] = lambda constant: True) -> Leaf:
    """Returns a rule for scans and sorts along one axis: rows stay rows unless that axis is theirs.

    `keeps`: returns whether the op leaves a row of equal elements unchanged.
    """

    def rule(equation: Equation, values: Sequence[Value], analysis: Analysis) -> Sequence[Value]:
        rows = [v for v in values if isinstance(v, Row)]
        if not rows:
            return [None] * len(equation.outputs)
        along = equation.params[PRIMITIVES[equation.op].along]
        along = along if isinstance(along, tuple) else (along,)
        if any(not isinstance(v, Row) for v in values) or any(r.axis in along or r.axis != rows[0].axis for r in rows):
            raise Mixes(f"{equation.op} along the rows", kind="lost")
        family = analysis.unite(rows)
        untouched_values = [
            r.untouched if isinstance(r.untouched, Const) and keeps(r.untouched) else UNKNOWN for r in rows
        ]
        untouched_values = (
            untouched_values if len(untouched_values) == len(equation.outputs) else [UNKNOWN] * len(equation.outputs)
        )
        return [Row(rows[0].axis, family, untouched) for untouched in untouched_values]

    return rule


def dot_general(equation: Equation, values: Sequence[Value], analysis: Analysis) -> Sequence[Value]:
    """Keeps rows times a dense matrix (`table @ w`) as rows.

    A contraction over the rows mixes them, unless one side is zero on untouched ones (the gradient of w).
    """
    contract, batch = equation.params["dimension_numbers"]
    rows = [v for v in values if isinstance(v, Row)]
    if not rows:
        return [None]
    if len(rows) == 2:
        positions = [c.index(v.axis) if v.axis in c else None for v, c in zip(rows, contract, strict=True)]
        if positions[0] is None or positions[0] != positions[1] or not any(is_zero(v.untouched) for v in rows):
            raise Mixes("a product of two tables' rows", kind="product")
        analysis.unite(rows)
        analysis.role(equation, "contract")
        return [None]
    side, row = row_operand(values)
    if row.axis in contract[side]:
        raise Mixes("a matrix product sums over all rows of the table", kind="sum")
    if row.axis in batch[side]:
        raise Mixes("a matrix product is batched over the rows", kind="product")
    axis = result_axis(equation, side, row.axis)
    assert axis is not None, "axes of a matrix product go somewhere"
    return [Row(axis, row.family, row.untouched if is_zero(row.untouched) else UNKNOWN)]


def pad_other_axis(equation: Equation, values: Sequence[Value]) -> Sequence[Value]:
    """Applies a pad of axes other than the rows'; a pad along the rows enters row space (`pad`)."""
    _, row = row_operand(values)
    if tuple(equation.params["padding_config"][row.axis]) != (0, 0, 0):
        raise Mixes(*LOST["pad"], kind="lost")
    filled = untouched_of(equation.inputs[1], values[1], 0)
    same = isinstance(row.untouched, Const) and filled == row.untouched
    return [Row(row.axis, row.family, row.untouched if same else UNKNOWN)]


RULES |= {
    "broadcast_in_dim": broadcast_in_dim,
    "reshape": reshape,
    **dict.fromkeys(("transpose", "squeeze", "split", "unstack"), move),
    "iota": iota,
    "concatenate": concatenate,
    "optimization_barrier": lambda equation, values, analysis: list(values),
    "dot_general": dot_general,
    "cumsum": along_other_axis(lambda constant: constant.is_zero),
    "cumprod": along_other_axis(lambda constant: constant.is_zero or constant.is_one),
    "cummax": along_other_axis(),
    "cummin": along_other_axis(),
    "cumlogsumexp": along_other_axis(lambda constant: False),
    "sort": along_other_axis(),
    "top_k": along_other_axis(lambda constant: False),
    "stack": stack,
    "rev": along_other_axis(),
}
ALIGNED |= {"concatenate", "sort"}


def _resize_shape(name: str) -> Leaf:
    def resize(equation: Equation, axis: int, rows: int) -> Params:
        return {**equation.params, name: resized(equation.params[name], axis, rows)}

    return resize


def _resize_convolution(equation: Equation, axis: int, size: int) -> Params:
    p, numbers, features = equation.params, equation.params["dimension_numbers"], equation.outputs[0].shape
    if axis != numbers.out_spec[1]:
        return p
    kind = "feature_group_count" if p["feature_group_count"] > 1 else "batch_group_count"
    return {**p, kind: p[kind] * size // features[axis]}


RESIZE |= {
    "conv_general_dilated": _resize_convolution,
    **{op: _resize_shape(primitive.sizes) for op, primitive in PRIMITIVES.items() if primitive.sizes},
}


# --- reductions: over other axes they stay in row space; over the rows they leave it ---
#
# A reduction over the rows of a value that is constant off the touched rows needs the touched rows only, after their
# duplicates have been summed, with the constant folded in for the others.

_ARG = frozenset({"argmax", "argmin"})


def reduce(equation: Equation, values: Sequence[Value], analysis: Analysis) -> Sequence[Value]:
    row = values[0]
    if not isinstance(row, Row):
        return [None]
    axis = result_axis(equation, 0, row.axis)
    if axis == SUMMED:
        if equation.op in _ARG:
            raise Mixes(f"{equation.op} over all rows")
        if not isinstance(row.untouched, Const):
            raise Mixes(f"{equation.op} over all rows of the table", kind="sum")
        analysis.role(equation, "reduce")
        return [None]
    assert axis is not None, "axes stay or are reduced"
    return [Row(axis, row.family, _reduced_untouched(equation, row.untouched))]


def _reduced_untouched(equation: Equation, untouched: UntouchedValue) -> UntouchedValue:
    if not isinstance(untouched, Const) or equation.op in _ARG:
        return UNKNOWN
    count = math.prod([equation.inputs[0].shape[a] for a in equation.params["axes"]])
    value = np.asarray(untouched.value)
    with np.errstate(all="ignore"):
        if equation.op == "reduce_sum":
            return Const((value * count).astype(equation.outputs[0].dtype))
        if equation.op == "reduce_prod":
            return Const((value**count).astype(equation.outputs[0].dtype))
    return untouched


for _op in REDUCTION_PRIMITIVES.keys() | _ARG:
    RULES[_op] = reduce


# --- gathers, scatters and slices along the rows: entrances and exits of row space ---
#
# A value leaves it by a gather along the row axis (`table[ids]`, `jnp.take`), by `dynamic_slice` (`table[i]`) and by a
# slice (`table[0]`). It enters it by their transposes: a scatter-add into zeros, a dynamic_update_slice into zeros, a
# pad with zeros.

#: Remedies.
_IDS_FIRST = "look up the rows of ids that are needed first: t[numbers[ids]] in place of t[numbers][ids]"
_EACH = "look up each of them: t[starts[:, None] + jnp.arange(n)]"
_WRITE_ROWS = "write whole rows, made of looked-up ones: t.at[ids].set(f(t[ids]))"


def gather(equation: Equation, values: Sequence[Value], analysis: Analysis) -> Sequence[Value]:
    row, numbers = values[0], equation.params["dimension_numbers"]
    if isinstance(values[1], Row):
        raise Mixes("the ids are themselves rows of a table", _IDS_FIRST)
    if not isinstance(row, Row):
        return [None]
    if row.axis in numbers.operand_batching_dims:
        raise Mixes("a gather that is batched over the rows")
    axis = result_axis(equation, 0, row.axis)
    if axis is not None:
        untouched = UNKNOWN if "FILL" in str(equation.params["mode"]) else constant_or_unknown(row.untouched)
        return [Row(axis, row.family, untouched)]
    if equation.params["slice_sizes"][row.axis] != 1:
        raise Mixes("a gather of several adjacent rows at a time", _EACH)
    analysis.access(row.family, equation, row.axis)
    analysis.role(equation, "lookup")
    return [None]


def scatter(equation: Equation, values: Sequence[Value], analysis: Analysis) -> Sequence[Value]:
    numbers, operand = equation.params["dimension_numbers"], values[0]
    if isinstance(values[2], Row) and not isinstance(values[1], Row):
        return _scatter_columns(equation, values, analysis)
    if isinstance(values[1], Row):
        raise Mixes("the ids are themselves rows of a table", _IDS_FIRST)
    single = _single_rows(equation)
    rows = [d for d in numbers.scatter_dims_to_operand_dims if d in single]
    if isinstance(operand, Row):
        if operand.axis not in rows or not is_known_scatter(equation):
            raise Mixes(f"a {equation.op} that is not by rows", _WRITE_ROWS, "scatter")
        family, axis, untouched = operand.family, operand.axis, operand.untouched
    elif isinstance(operand, Free) and is_known_scatter(equation):
        free = [d for d in rows if d in operand.axes]
        if not free or not isinstance(operand.untouched, Const):
            return [None]
        untouched = operand.untouched
        entered = ((d, analysis.enter(equation, d)) for d in free)
        axis, family = next((pair for pair in entered if pair[1] is not None), (free[0], None))
    else:
        return [None]
    return _pushed(equation, axis, family, untouched, analysis)


def _pushed(
    equation: Equation, axis: int, family: int | None, untouched: UntouchedValue, analysis: Analysis
) -> Sequence[Value]:
    if family is None:
        return [None]
    analysis.access(family, equation, axis)
    analysis.role(equation, "push")
    return [Row(axis, family, untouched)]


def _window(equation: Equation, gone: Sequence[int]) -> list[int]:
    gone = (*gone, *equation.params["dimension_numbers"].operand_batching_dims)
    return [d for d in range(len(equation.inputs[0].shape)) if d not in gone]


def _scatter_columns(equation: Equation, values: Sequence[Value], analysis: Analysis) -> Sequence[Value]:
    """Applies a scatter of whole columns, which adds each row to itself (the transpose of a gather of columns)."""
    numbers, (operand, _, update) = equation.params["dimension_numbers"], values
    assert isinstance(update, Row), "the caller has looked"
    if update.axis not in numbers.update_window_dims:
        raise Mixes("a scatter of rows of a table", kind="scatter")
    axis = _window(equation, numbers.inserted_window_dims)[numbers.update_window_dims.index(update.axis)]
    free = isinstance(operand, Free) and axis in operand.axes
    if equation.inputs[0].shape[axis] != equation.inputs[2].shape[update.axis] or equation.op != "scatter-add":
        raise Mixes("a scatter of rows of a table", kind="scatter")
    if not free and not (isinstance(operand, Row) and operand.axis == axis):
        raise Mixes("a scatter of rows of a table into something else", kind="scatter")
    return _onto(equation.inputs[0], operand, replace(update, axis=axis), analysis)


def _onto(operand: Atom, value: Value, written: Row, analysis: Analysis) -> Sequence[Value]:
    """Returns columns of all rows (`written`) that are written to an operand."""
    untouched_values = [untouched_of(operand, value, written.axis), written.untouched]
    family = analysis.unite([v for v in (value, written) if isinstance(v, Row)])
    return [Row(written.axis, family, untouched_values[0] if all(map(is_zero, untouched_values)) else UNKNOWN)]


def _single_rows(equation: Equation) -> set[int]:
    numbers, update = equation.params["dimension_numbers"], equation.inputs[2]
    window = _window(equation, numbers.inserted_window_dims)
    single = {d for d, at in zip(window, numbers.update_window_dims, strict=True) if update.shape[at] == 1}
    return single | set(numbers.inserted_window_dims)


def is_known_scatter(equation: Equation) -> bool:
    """Returns whether a scatter's function is known: a plain 'scatter' may carry any (`scatter_apply`)."""
    if equation.op != "scatter":
        return True
    update = equation.params.get("update_jaxpr")
    if update is None:
        return True
    jaxpr, _ = jax_compat.open_jaxpr(update)
    return not jaxpr.eqns and jaxpr.outvars[0] is jaxpr.invars[1]


def slice_(equation: Equation, values: Sequence[Value], analysis: Analysis) -> Sequence[Value]:
    row = values[0]
    if any(isinstance(v, Row) for v in values[1:]):
        raise Mixes("the ids are themselves rows of a table", _IDS_FIRST)
    if not isinstance(row, Row):
        return [None]
    if result_axis(equation, 0, row.axis) is not None:
        return [Row(row.axis, row.family, constant_or_unknown(row.untouched))]
    analysis.access(row.family, equation, row.axis)
    analysis.role(equation, "lookup")
    return [None]


def dynamic_update_slice(equation: Equation, values: Sequence[Value], analysis: Analysis) -> Sequence[Value]:
    operand, update = equation.inputs[0], equation.inputs[1]
    value, written, *starts = values
    if any(isinstance(v, Row) for v in starts):
        raise Mixes("a dynamic_update_slice at rows of a table")
    if isinstance(written, Row):
        return _write_columns(equation, value, written, analysis)
    short = [d for d in range(len(operand.shape)) if update.shape[d] != operand.shape[d]]
    if isinstance(value, Row):
        if short != [value.axis]:
            raise Mixes("a dynamic_update_slice that is not by rows", _WRITE_ROWS)
        family, axis, untouched = value.family, value.axis, value.untouched
    elif isinstance(value, Free) and isinstance(value.untouched, Const) and len(short) == 1 and short[0] in value.axes:
        axis, untouched = short[0], value.untouched
        family = analysis.enter(equation, axis)
    else:
        return [None]
    return _pushed(equation, axis, family, untouched, analysis)


def _write_columns(equation: Equation, value: Value, written: Row, analysis: Analysis) -> Sequence[Value]:
    """Writes columns of all rows (the transpose of a slice of columns, or of one of several stacked tables)."""
    axis, (operand, update, *_) = written.axis, equation.inputs
    together = axis in value.axes if isinstance(value, Free) else isinstance(value, Row) and value.axis == axis
    if operand.shape[axis] != update.shape[axis] or not together:
        raise Mixes("a dynamic_update_slice of rows of a table", _WRITE_ROWS)
    return _onto(operand, value, written, analysis)


def pad(equation: Equation, values: Sequence[Value], analysis: Analysis) -> Sequence[Value]:
    if any(isinstance(v, Row) for v in values):
        return pad_other_axis(equation, values)
    config = equation.params["padding_config"]
    padded = [d for d, c in enumerate(config) if tuple(c) != (0, 0, 0)]
    untouched = untouched_of(equation.inputs[1], values[1], 0)
    if len(padded) != 1 or not is_zero(untouched) or any(x < 0 for x in config[padded[0]]):
        return [None]
    axis = padded[0]
    family = analysis.enter(equation, axis)
    return _pushed(equation, axis, family, untouched, analysis)


RULES |= {
    "gather": gather,
    "slice": slice_,
    "dynamic_slice": slice_,
    "dynamic_update_slice": dynamic_update_slice,
    "pad": pad,
}
for _op in ("scatter", *(f"scatter-{f}" for f in ("add", "sub", "mul", "min", "max"))):
    RULES[_op] = scatter


def _resize_gather(equation: Equation, axis: int, rows: int) -> Params:
    numbers = equation.params["dimension_numbers"]
    operand_axis = _window(equation, numbers.collapsed_slice_dims)[numbers.offset_dims.index(axis)]
    return {**equation.params, "slice_sizes": resized(equation.params["slice_sizes"], operand_axis, rows)}


RESIZE["gather"] = _resize_gather
