"""Optimizers of Optax whose rows are deferred (docs/optimizers.md), and whether they train to the plain numbers."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import numpy as np

from autopar import jax_compat
from autopar.planning.verify import compare_runs
from tests.support.deferred import deferring, differ
from tests.zoo.every_optimizer import optimizer_case

PAGE = (Path(__file__).parents[2] / "docs" / "optimizers.md").read_text()
DEFERRED = re.findall(r"^\| `([\w.]+)` \| deferred", PAGE, re.MULTILINE)
#: Programs that have been tested -> under which name: many names make the same one.
_tested: dict[str, str] = {}


def check(name: str, steps: int = 300) -> None:
    """12 steps in float32, and more in float64."""
    case = optimizer_case(name)
    text = str(jax.make_jaxpr(case.step)(case.state, case.batches(0)))
    if _tested.setdefault(text, name) != name:
        return
    planned = deferring(case.step, 5, donate=False)
    entry = planned.planned_for(case.state, case.batches(0))
    assert entry.compiled.plan.defers
    found = compare_runs(entry, [jax.tree.leaves((case.state, case.batches(i))) for i in range(12)])
    assert found.ok, str(found)
    with jax_compat.enable_x64():
        assert differ(optimizer_case(name, np.float64), steps=steps, tables=()) == []
