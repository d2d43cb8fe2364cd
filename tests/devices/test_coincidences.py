"""Sizes that are equal by chance, on four devices."""

from __future__ import annotations

import jax

import autopar
from tests.support.coincidences import OPTIMIZERS, SIZES, batch_of, state_of, step_of
from tests.support.meshes import mesh_of
from tests.support.row_steps import same


def test_numbers_with_equal_sizes() -> None:
    tx, sizes = OPTIMIZERS["adagrad"], SIZES["everything"]
    methods = {"params/tok": "ps", "params/pos": "ps", "params/col": "allgather"}
    step = autopar.parallelize(step_of(tx), strategy=methods, mesh=mesh_of(4))
    plain = jax.jit(step_of(tx))
    state, wanted = state_of(sizes, tx), state_of(sizes, tx)
    for seed in range(2):
        state, loss = step(state, batch_of(sizes, seed))
        wanted, other = plain(wanted, batch_of(sizes, seed))
        same((autopar.materialize(state), loss), (wanted, other))
    assert step.latest is not None
    found = {p.path: p.lifted for p in step.latest.compiled.plan.parameters}
    assert all(found[path] for path in methods)
