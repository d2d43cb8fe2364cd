"""The contract (docs/accuracy.md): models x optimizers, 20 steps, against the float64 oracle, leaf by leaf.

`make test` runs models with tables with the named optimizers, and with Adam and others some of them; `make test-all`
the product. Steps without tables are left as they are, whatever trains them: they run with a few.
"""

from __future__ import annotations

import itertools

import jax
import pytest

import autopar
from autopar.planning.verify import compare_runs
from tests.support.pairs import every, pairwise
from tests.zoo import MODELS, OPTIMIZERS, WITH_TABLES, WITHOUT_TABLES

STEPS = 20
#: The issue's optimizers, and those which make other programs of the same models.
NAMED = ("sgd", "adagrad", "clipped", "scheduled", "partitioned")
#: Models of one and of several tables that are trained with Adam, too: its programs take long to compile.
WITH_ADAM = ("multi_hot", "lstm_lm")
OTHERS = (
    "zero_nans",
    "injected",
    "clip_value",
    "rowwise_adagrad",
    "decay_dense",
    "rmsprop",
    "adafactor",
    "apply_if_finite",
)
SPARSE = ("exact", "off")


def check(model: str, optimizer: str, sparse: str = "exact", steps: int = STEPS) -> None:
    """One case: lifts what it should, and trains to the plain step's numbers."""
    chosen = OPTIMIZERS[optimizer]
    case = MODELS[model].make(chosen.make())
    strategy = "auto" if sparse == "off" else "ps"
    step = autopar.parallelize(case.step, strategy=strategy, sparse=sparse, donate=False)
    entry = step.planned_for(case.state, case.batches(0))
    lifted = {p.path for p in entry.compiled.plan.parameters if p.lifted}
    expected = set(case.tables) if chosen.lifts and sparse != "off" else set()
    assert lifted == expected, str(autopar.explain(step, case.state, case.batches(0)))
    found = compare_runs(entry, [jax.tree.leaves((case.state, case.batches(i))) for i in range(steps)])
    assert found.ok, str(found)


ROWS = pairwise({"model": WITH_TABLES, "optimizer": NAMED, "sparse": SPARSE})
EXTRA = pairwise({"model": WITH_TABLES, "optimizer": OTHERS, "sparse": ("exact",)})[:: len(WITH_TABLES) - 1]
EXTRA += pairwise({"model": WITHOUT_TABLES, "optimizer": ("clipped", *OTHERS), "sparse": ("exact",)})[::5]
EXTRA += [{"model": model, "optimizer": "adam", "sparse": "exact"} for model in WITH_ADAM]


@pytest.mark.parametrize(
    "row", every(4, [r for r in ROWS if r["sparse"] == "exact"] + EXTRA), ids=lambda r: "-".join(r.values())
)
def test_planned_step_trains_to_the_plain_numbers(row: dict[str, str]) -> None:
    check(**row)


@pytest.mark.long
@pytest.mark.parametrize(("model", "optimizer"), sorted(itertools.product(MODELS, OPTIMIZERS)))
def test_every_optimizer_trains_every_model_to_the_plain_numbers(model: str, optimizer: str) -> None:
    check(model, optimizer)


@pytest.mark.parametrize("row", [r for r in ROWS if r["sparse"] == "off"][:3], ids=lambda r: "-".join(r.values()))
def test_sparse_off(row: dict[str, str]) -> None:
    check(**row, steps=3)
