"""Which equations of a block belong to a softmax: the sum of exponentials, and the maximum that is subtracted before.

A full softmax over a table has a remedy of its own (a sampled one), which other sums over all rows haven't.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.analysis.primitives import ELEMENTWISE, MOVES
from autopar.ir.program import Atom, Equation

#: What hands values on as they are, one by one.
_SAME = (ELEMENTWISE & MOVES) | {"optimization_barrier"}


def softmaxes(equations: Sequence[Equation]) -> frozenset[Equation]:
    """The sums and maxima of softmaxes (logsumexp and the normalizer alone are such, too)."""
    made: dict[Atom, Equation] = {var: e for e in equations for var in e.outputs}

    def origin(atom: Atom) -> Atom:
        while atom in made and made[atom].op in _SAME and len(made[atom].inputs) == 1:
            atom = made[atom].inputs[0]
        return atom

    found: set[Equation] = set()
    maxima = [e for e in equations if e.op == "reduce_max"]
    for equation in equations:
        exponential = made.get(origin(equation.inputs[0])) if equation.op == "reduce_sum" else None
        if exponential is None or exponential.op not in ("exp", "exp2"):
            continue
        found.add(equation)
        shifted = made.get(origin(exponential.inputs[0]))
        if shifted is not None and shifted.op == "sub":
            logits = origin(shifted.inputs[0])
            same_axes = (m for m in maxima if m.params["axes"] == equation.params["axes"])
            found.update(m for m in same_axes if origin(m.inputs[0]) is logits)
    return frozenset(found)
