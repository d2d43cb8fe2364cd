"""Every way of looking a table up: lifted or not as expected, and equal to the plain step."""

from __future__ import annotations

import jax
import pytest

import autopar
from autopar.planning.verify import compare_runs
from tests.support.pairs import every
from tests.zoo import VARIANTS

LIFT = [name for name, variant in VARIANTS.items() if variant.expect == "lift"]
OTHERS = [name for name in VARIANTS if name not in LIFT]


@pytest.mark.parametrize("name", [*every(2, LIFT), *OTHERS])
def test_variant(name: str) -> None:
    variant = VARIANTS[name]
    case = variant.make()
    step = autopar.parallelize(case.step, strategy="ps", donate=False)
    entry = step.planned_for(case.state, case.batches(0))
    lifted = {p.path for p in entry.compiled.plan.parameters if p.lifted}
    assert (variant.expect == "defer") == entry.compiled.plan.defers
    if variant.expect != "dense":
        assert set(case.tables) <= lifted, str(autopar.explain(step, case.state, case.batches(0)))
    else:
        assert not lifted.intersection(case.tables)
    found = compare_runs(entry, [jax.tree.leaves((case.state, case.batches(i))) for i in range(3)])
    assert found.ok, str(found)
