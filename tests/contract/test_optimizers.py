"""Every optimizer of Optax: how it ends (docs/optimizers.md), and that deferred ones train to the plain numbers.

The latter for some of them here, and for all by `python -m benchmarks optimizers`.
"""

from __future__ import annotations

import re
from pathlib import Path

import jax
import numpy as np
import optax
import optax.contrib
import pytest

from autopar import jax_compat
from autopar.planning.verify import compare

from . import optimizers_page
from .deferred import deferring, differ
from .zoo.every_optimizer import names, optimizer_case

PAGE = (Path(__file__).parents[1] / "docs" / "optimizers.md").read_text()
DEFERRED = re.findall(r"^\| `([\w.]+)` \| deferred", PAGE, re.MULTILINE)
_NAMED = ("optax.adamw", "optax.amsgrad", "optax.lion", "optax.MultiSteps")
TESTED = [name for k, name in enumerate(DEFERRED) if name in _NAMED or k % 24 == 5]
#: Programs that have been tested -> under which name: many names make the same one.
_tested: dict[str, str] = {}


def test_the_page_is_what_is_generated() -> None:
    if f"Optax {optax.__version__} " not in PAGE:
        pytest.skip("the page is of another Optax")
    assert optimizers_page.page() == PAGE, "python -m tests.optimizers_page > docs/optimizers.md"


def test_a_new_optimizer_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    def simple(learning_rate: float) -> optax.GradientTransformation:
        return optax.sgd(learning_rate)

    def difficult(one: str, two: str) -> optax.GradientTransformation:
        return optax.sgd(float(one + two))

    monkeypatch.setattr(optax.contrib, "simple", simple, raising=False)
    assert "optax.contrib.simple" in names()
    monkeypatch.setattr(optax.contrib, "difficult", difficult, raising=False)
    with pytest.raises(AssertionError, match="difficult needs a recipe"):
        names()


@pytest.mark.parametrize("name", TESTED)
def test_deferred_rows_train_to_the_plain_numbers(name: str) -> None:
    check(name)


def check(name: str) -> None:
    """12 steps in float32, and 300 in float64."""
    case = optimizer_case(name)
    text = str(jax.make_jaxpr(case.step)(case.state, case.batches(0)))
    if _tested.setdefault(text, name) != name:
        return
    planned = deferring(case.step, 5, donate=False)
    entry = planned.entry(case.state, case.batches(0))
    assert entry.compiled.plan.defers
    found = compare(entry, [jax.tree.leaves((case.state, case.batches(i))) for i in range(12)])
    assert found.ok, str(found)
    with jax_compat.enable_x64():
        assert differ(optimizer_case(name, np.float64), steps=300, tables=()) == []
