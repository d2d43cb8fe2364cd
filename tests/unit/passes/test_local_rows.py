"""Row-space operations in the program of one device."""

from __future__ import annotations

import numpy as np

from autopar.ir.local import PARTIAL
from autopar.ir.plan import Plan, TablePlan
from autopar.ir.program import ArrayType, Equation, Var
from autopar.ir.program_plan import Bounds, FamilyPlan, ProgramPlan
from autopar.passes.local_forms import Localization
from autopar.passes.localize import Localizer


def test_what_must_be_finite_is_a_whole_sum() -> None:
    """A device's part may be 0, or infinite, where the sum isn't: the condition of a sweep reads sums."""
    scalar, bit = ArrayType((), np.dtype(np.float32)), ArrayType((), np.dtype(bool))
    table = TablePlan("t", (9,), "float32", 0, (), 3, "allreduce_rows", "devices", lifted=True)
    plan = ProgramPlan(Plan("step", 2, None, "exact", (), (), 0), (FamilyPlan(0, table, Bounds(4)),))
    walk = Localizer(Localization(plan, True))
    rows, frontier, finite, nonzero = (Var(scalar) for _ in range(4))
    for var in (rows, frontier, finite, nonzero):
        walk.define(var, None if var is rows else PARTIAL)
    params = {"axes": (), "constants": (), "family": 0, "frontier": 1, "finite": 1, "nonzero": 1, "guarded": None}
    walk.add(Equation("ap.changes", (frontier, finite, nonzero), (Var(bit),), params))
    *_, changes = walk.equations
    made = {v: e.op for e in walk.equations for v in e.outputs}
    assert [made.get(a) for a in changes.inputs] == ["ap.reduce"] * 3
