"""`emit="pmap"`, each device's own program, against the oracle and against `emit="pjit"`: each checks the other."""

from __future__ import annotations

import jax
import pytest

import autopar
from autopar.measure.collectives import read_collectives
from autopar.verify import compare

from ..pairs import pairwise
from ..zoo import MODELS, OPTIMIZERS
from .meshes import mesh_of

AXES = {
    "devices": ("2", "4", "3"),
    "method": ("ps", "allgather", "allreduce_rows", "allreduce", "shares"),
    "model": tuple(MODELS),
    "optimizer": ("clipped", "scheduled"),
}


@pytest.mark.parametrize("row", pairwise(AXES)[::2], ids=lambda r: "-".join(r.values()))
def test_contract(row: dict[str, str]) -> None:
    case = MODELS[row["model"]].make(OPTIMIZERS[row["optimizer"]].make())
    strategy = {"**": "ps"} if row["method"] == "shares" else row["method"]
    mesh = mesh_of(int(row["devices"]))
    step = autopar.parallelize(case.step, strategy=strategy, mesh=mesh, donate=False, emit="pmap")
    entry = step.entry(case.state, case.batches(0))
    assert entry.compiled.program.local is not None
    found = compare(entry, [jax.tree.leaves((case.state, case.batches(i))) for i in range(4)])
    assert found.ok, str(found)


def test_gradients_of_a_loop_are_reduced_after_it() -> None:
    """XLA reduces an LSTM's dense gradients in every iteration; a device's own program adds them up first."""
    case = MODELS["lstm_lm"].make(OPTIMIZERS["clipped"].make())

    def in_loops(emit: str) -> int:
        step = autopar.parallelize(case.step, strategy="ps", mesh=mesh_of(2), emit=emit)
        text = step.lower(case.state, case.batches(0)).compile().as_text()
        return sum(c.times > 1 for c in read_collectives(text) if c.op == "all-reduce")

    assert in_loops("pjit") > 0
    assert in_loops("pmap") == 0
