"""Sums over all rows of a table that have a remedy of their own: a full softmax, and what a mask takes of the rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.analysis.primitives import ELEMENTWISE, MOVES
from autopar.ir.program import Atom, Equation
from autopar.ir.rowspace import Refusal

_HANDS_ON = (ELEMENTWISE & MOVES) | {"optimization_barrier"}
_SHAPED = frozenset({"broadcast_in_dim", "reshape", "squeeze", "transpose", "convert_element_type"})
_ROWS_OF_MASK = (
    "look up the rows that the mask has: rows = jnp.nonzero(mask, size=..., fill_value=len(t))[0]; "
    "t.at[rows].get(mode='fill', fill_value=0)"
)


def why_summed(equation: Equation, reason: str, rows: int, equations: Sequence[Equation]) -> Refusal | None:
    """Returns why a sum needs all rows of a table; None where there is no more to say than of others.

    Args:
      equation: A reduction over the rows, or a product that sums over them.
      reason: What is said of others.
      rows: The table's.
      equations: Those of the block that it stands in.
    """
    made: dict[Atom, Equation] = {var: e for e in equations for var in e.outputs}
    if equation in _softmaxes(equations, made):
        reason = f"{equation.op} over all rows of the table, for a full softmax"
        remedy = "use a sampled softmax, or accept that this table stays dense"
        return Refusal(reason, equation.source, remedy, "softmax")
    masked = equation if equation.op == "dot_general" else made.get(_origin(equation.inputs[0], made))
    if masked is None or masked.op not in ("mul", "select_n", "and", "dot_general"):
        return None
    for atom in masked.inputs:
        while atom in made and made[atom].op in _SHAPED:
            atom = made[atom].inputs[0]
        if atom.dtype == np.dtype(bool) and atom.type.size == rows:
            return Refusal(f"{reason}, under a mask of rows", equation.source, _ROWS_OF_MASK, "sum")
    return None


def _origin(atom: Atom, made: dict[Atom, Equation]) -> Atom:
    while atom in made and made[atom].op in _HANDS_ON and len(made[atom].inputs) == 1:
        atom = made[atom].inputs[0]
    return atom


def _softmaxes(equations: Sequence[Equation], made: dict[Atom, Equation]) -> frozenset[Equation]:
    """The sums of exponentials in softmaxes, and the maxima that are subtracted before (logsumexp and the normalizer
    alone are such, too). A full softmax over a table has a remedy of its own, which other sums haven't."""
    softmaxes: set[Equation] = set()
    maxima = [e for e in equations if e.op == "reduce_max"]
    for equation in equations:
        exponential = made.get(_origin(equation.inputs[0], made)) if equation.op == "reduce_sum" else None
        if exponential is None or exponential.op not in ("exp", "exp2"):
            continue
        softmaxes.add(equation)
        shifted = made.get(_origin(exponential.inputs[0], made))
        if shifted is not None and shifted.op == "sub":
            logits = _origin(shifted.inputs[0], made)
            same_axes = (m for m in maxima if m.params["axes"] == equation.params["axes"])
            softmaxes.update(m for m in same_axes if _origin(m.inputs[0], made) is logits)
    return frozenset(softmaxes)
