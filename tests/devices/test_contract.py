"""The contract on several devices: devices x methods x models x optimizers, pairwise, against the float64 oracle.

Models without tables have no method: they run with their parameters in shards.
"""

from __future__ import annotations

import jax
import pytest

import autopar
from autopar.planning.verify import compare_runs
from tests.support.meshes import mesh_of
from tests.support.pairs import every, long, pairwise
from tests.zoo import MODELS, OPTIMIZERS, VARIANTS, WITH_TABLES, WITHOUT_TABLES

AXES = {
    "devices": ("2", "3", "4", "8"),
    "method": ("ps", "allgather", "allreduce_rows", "shards"),
    "model": WITH_TABLES,
    "optimizer": ("clipped", "adam", "rowwise_adagrad"),
}
ROWS = pairwise(AXES) + pairwise({**AXES, "method": ("shards",), "model": WITHOUT_TABLES})[::3]
#: Programs that take a quarter of a minute to compile.
SLOW = [row for row in ROWS if row["model"] == "lstm_lm" or (row["devices"] == "8" and "sampled" in row["model"])]
FAST = [row for row in ROWS if row not in SLOW]


@pytest.mark.parametrize("row", [*every(4, FAST), *map(long, SLOW)], ids=lambda r: "-".join(r.values()))
def test_planned_step_trains_to_the_plain_numbers(row: dict[str, str]) -> None:
    chosen = OPTIMIZERS[row["optimizer"]]
    case = MODELS[row["model"]].make(chosen.make())
    strategy = {"**": "ps"} if row["method"] == "shards" else row["method"]  # dense parameters, too
    step = autopar.parallelize(case.step, strategy=strategy, mesh=mesh_of(int(row["devices"])), donate=False)
    entry = step.planned_for(case.state, case.batches(0))
    plan = entry.compiled.plan
    lifted = set(case.tables) if chosen.lifts else set()
    assert {p.path for p in plan.parameters if p.lifted} == lifted
    assert plan.defers == (chosen.moves and bool(lifted))
    assert {t.method for t in plan.tables if t.lifted} <= {strategy if isinstance(strategy, str) else "ps"}
    found = compare_runs(entry, [jax.tree.leaves((case.state, case.batches(i))) for i in range(5)])
    assert found.ok, str(found)


LIFTING = [name for name, variant in VARIANTS.items() if variant.expect == "lift"]
SOME = dict.fromkeys(["written_again", *LIFTING[::15]])


@pytest.mark.parametrize(
    ("name", "method"),
    [*((name, "ps") for name in SOME), ("written_again", "allgather"), ("written_again", "allreduce_rows")],
)
def test_variant(name: str, method: str) -> None:
    """Some ways of looking a table up, on three devices: sizes that they don't divide, and some that they do."""
    case = VARIANTS[name].make()
    step = autopar.parallelize(case.step, strategy=method, mesh=mesh_of(3), donate=False)
    entry = step.planned_for(case.state, case.batches(0))
    assert {f.method for f in entry.compiled.bound.families} == {method}
    found = compare_runs(entry, [jax.tree.leaves((case.state, case.batches(i))) for i in range(3)])
    assert found.ok, str(found)
