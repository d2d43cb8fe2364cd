"""Gathers, scatters and slices along the rows: the doors of row space.

A value leaves it by a gather along the row axis (`table[ids]`, `jnp.take`), by `dynamic_slice` (`table[i]`) and by a
slice (`table[0]`). It enters it by their transposes: a scatter-add into zeros, a dynamic_update_slice into zeros, a
pad with zeros.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autopar import jax_compat
from autopar.analysis.batch_rules import place_axes
from autopar.analysis.rules.elementwise import is_zero, off_of
from autopar.analysis.rules.shape import constant_or_unknown, pad_other_axis
from autopar.analysis.rules.table import RESIZE, RULES, Analysis, Mixes, resized
from autopar.ir.program import Equation
from autopar.ir.rowspace import UNKNOWN, Const, Free, Off, Row, Value

#: What to write instead.
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
    axis = place_axes(equation, 0, row.axis)
    if axis is not None:
        off = UNKNOWN if "FILL" in str(equation.params["mode"]) else constant_or_unknown(row.off)
        return [Row(axis, row.family, off)]
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
        family, axis, off = operand.family, operand.axis, operand.off
    elif isinstance(operand, Free) and is_known_scatter(equation):
        free = [d for d in rows if d in operand.axes]
        if not free or not isinstance(operand.off, Const):
            return [None]
        off = operand.off
        entered = ((d, analysis.enter(equation, d)) for d in free)
        axis, family = next((pair for pair in entered if pair[1] is not None), (free[0], None))
    else:
        return [None]
    return _pushed(equation, axis, family, off, analysis)


def _pushed(equation: Equation, axis: int, family: int | None, off: Off, analysis: Analysis) -> Sequence[Value]:
    """What rows become into which some are written; nothing if they are no table's."""
    if family is None:
        return [None]
    analysis.access(family, equation, axis)
    analysis.role(equation, "push")
    return [Row(axis, family, off)]


def _window(equation: Equation, gone: Sequence[int]) -> list[int]:
    """Operand dimensions that are in the window of a gather or scatter, in order."""
    gone = (*gone, *equation.params["dimension_numbers"].operand_batching_dims)
    return [d for d in range(len(equation.inputs[0].shape)) if d not in gone]


def _scatter_columns(equation: Equation, values: Sequence[Value], analysis: Analysis) -> Sequence[Value]:
    """A scatter of whole columns: each row is added to itself (the transpose of a gather of columns)."""
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
    offs = [off_of(equation.inputs[0], operand, axis), update.off]
    family = analysis.unite([v for v in (operand, update) if isinstance(v, Row)])
    return [Row(axis, family, offs[0] if all(map(is_zero, offs)) else UNKNOWN)]


def _single_rows(equation: Equation) -> set[int]:
    """Operand dimensions along which each update is one row."""
    numbers, update = equation.params["dimension_numbers"], equation.inputs[2]
    window = _window(equation, numbers.inserted_window_dims)
    single = {d for d, at in zip(window, numbers.update_window_dims, strict=True) if update.shape[at] == 1}
    return single | set(numbers.inserted_window_dims)


def is_known_scatter(equation: Equation) -> bool:
    """A plain 'scatter' may carry any function (`scatter_apply`); only the one that replaces is known."""
    if equation.op != "scatter":
        return True
    update = equation.params.get("update_jaxpr")
    if update is None:
        return True
    jaxpr, _ = jax_compat.open_jaxpr(update)
    return not jaxpr.eqns and jaxpr.outvars[0] is jaxpr.invars[1]


def slice_(equation: Equation, values: Sequence[Value], analysis: Analysis) -> Sequence[Value]:
    """Of some rows, or of all of them."""
    row = values[0]
    if any(isinstance(v, Row) for v in values[1:]):
        raise Mixes("the ids are themselves rows of a table", _IDS_FIRST)
    if not isinstance(row, Row):
        return [None]
    if place_axes(equation, 0, row.axis) is not None:
        return [Row(row.axis, row.family, constant_or_unknown(row.off))]
    analysis.access(row.family, equation, row.axis)
    analysis.role(equation, "lookup")
    return [None]


def dynamic_update_slice(equation: Equation, values: Sequence[Value], analysis: Analysis) -> Sequence[Value]:
    operand, update = equation.inputs[0], equation.inputs[1]
    value = values[0]
    if any(isinstance(v, Row) for v in values[1:]):
        raise Mixes("a dynamic_update_slice of rows of a table")
    short = [d for d in range(len(operand.shape)) if update.shape[d] != operand.shape[d]]
    if isinstance(value, Row):
        if short != [value.axis]:
            raise Mixes("a dynamic_update_slice that is not by rows", _WRITE_ROWS)
        family, axis, off = value.family, value.axis, value.off
    elif isinstance(value, Free) and isinstance(value.off, Const) and len(short) == 1 and short[0] in value.axes:
        axis, off = short[0], value.off
        family = analysis.enter(equation, axis)
    else:
        return [None]
    return _pushed(equation, axis, family, off, analysis)


def pad(equation: Equation, values: Sequence[Value], analysis: Analysis) -> Sequence[Value]:
    if any(isinstance(v, Row) for v in values):
        return pad_other_axis(equation, values)
    config = equation.params["padding_config"]
    padded = [d for d, c in enumerate(config) if tuple(c) != (0, 0, 0)]
    off = off_of(equation.inputs[1], values[1], 0)
    if len(padded) != 1 or not is_zero(off) or any(x < 0 for x in config[padded[0]]):
        return [None]
    axis = padded[0]
    family = analysis.enter(equation, axis)
    return _pushed(equation, axis, family, off, analysis)


RULES |= {
    "gather": gather,
    "slice": slice_,
    "dynamic_slice": slice_,
    "dynamic_update_slice": dynamic_update_slice,
    "pad": pad,
}
for _op in ("scatter", *(f"scatter-{f}" for f in ("add", "sub", "mul", "min", "max"))):
    RULES[_op] = scatter


def _resize_gather(equation: Equation, axis: int, rows: int) -> Mapping[str, Any]:
    """A gather of columns: its window holds all rows."""
    numbers = equation.params["dimension_numbers"]
    operand_axis = _window(equation, numbers.collapsed_slice_dims)[numbers.offset_dims.index(axis)]
    return {**equation.params, "slice_sizes": resized(equation.params["slice_sizes"], operand_axis, rows)}


RESIZE["gather"] = _resize_gather
