"""Reductions: over other axes they stay in row space; over the rows they leave it.

A reduction over the rows of a value that is constant off the touched rows needs the touched rows only, after their
duplicates have been summed, with the constant folded in for the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from autopar.analysis.batch_rules import SUMMED, place_axes
from autopar.analysis.rules.table import RULES, Analysis, Mixes
from autopar.ir.program import Equation
from autopar.ir.reductions import REDUCTION_PRIMITIVES
from autopar.ir.rowspace import UNKNOWN, Const, Off, Row, Value

_ARG = frozenset({"argmax", "argmin"})


def reduce(equation: Equation, values: Sequence[Value], analysis: Analysis) -> Sequence[Value]:
    row = values[0]
    if not isinstance(row, Row):
        return [None]
    axis = place_axes(equation, 0, row.axis)
    if axis == SUMMED:
        if equation.op in _ARG:
            raise Mixes(f"{equation.op} over all rows")
        if not isinstance(row.off, Const):
            raise Mixes(f"{equation.op} over all rows of the table", kind="sum")
        analysis.role(equation, "reduce")
        return [None]
    assert axis is not None, "axes stay or are reduced"
    return [Row(axis, row.family, _reduced_off(equation, row.off))]


def _reduced_off(equation: Equation, off: Off) -> Off:
    if not isinstance(off, Const) or equation.op in _ARG:
        return UNKNOWN
    count = math.prod([equation.inputs[0].shape[a] for a in equation.params["axes"]])
    value = np.asarray(off.value)
    with np.errstate(all="ignore"):
        if equation.op == "reduce_sum":
            return Const((value * count).astype(equation.outputs[0].dtype))
        if equation.op == "reduce_prod":
            return Const((value**count).astype(equation.outputs[0].dtype))
    return off


for _op in REDUCTION_PRIMITIVES.keys() | _ARG:
    RULES[_op] = reduce
