"""Every optimizer of Optax: how it ends (docs/optimizers.md), and that deferred ones train to the plain numbers.

The latter for some of them over few steps, and for all of them over more in `make test-all`.
"""

from __future__ import annotations

from types import ModuleType

import optax
import optax.contrib
import pytest

from tests.support import optimizers_page
from tests.support.deferred import LOG_STEPS
from tests.support.deferred_optimizers import DEFERRED, PAGE, check
from tests.support.pairs import long
from tests.zoo.every_optimizer import names

_NAMED = ("optax.adamw", "optax.lion", "optax.MultiSteps")
_OTHERS = [name for name in DEFERRED[5::24] if name not in _NAMED]
TESTED = [*(name for name in DEFERRED if name in _NAMED), *map(long, _OTHERS)]


def test_the_page_is_what_is_generated() -> None:
    if f"Optax {optax.__version__} " not in PAGE:
        pytest.skip("the page is of another Optax")
    assert optimizers_page.page() == PAGE, "python -m tests.support.optimizers_page > docs/optimizers.md"


def test_a_new_optimizer_is_not_forgotten() -> None:
    def simple(learning_rate: float) -> optax.GradientTransformation:
        return optax.sgd(learning_rate)

    def difficult(one: str, two: str) -> optax.GradientTransformation:
        return optax.sgd(float(one + two))

    module = ModuleType("optax.contrib")
    vars(module)["simple"] = simple
    assert "optax.contrib.simple" in names([module])
    vars(module)["difficult"] = difficult
    with pytest.raises(AssertionError, match="difficult needs a recipe"):
        names([module])


@pytest.mark.parametrize("name", TESTED)
def test_deferred_rows_train_to_the_plain_numbers(name: str) -> None:
    check(name, steps=3 * LOG_STEPS)


@pytest.mark.long
@pytest.mark.parametrize("name", DEFERRED)
def test_deferred_rows_train_for_long(name: str) -> None:
    check(name)
