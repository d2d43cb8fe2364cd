"""Many tables on several devices: mixed widths, dtypes and optimizers; and the bytes of what is compiled."""

from __future__ import annotations

import functools
import itertools

import pytest

import autopar
from tests.support.many_tables import COUNTS, OPTIMIZERS, alike, batch, check, start
from tests.support.meshes import mesh_of
from tests.support.pairs import long

#: Each number of tables, each optimizer and each strategy; the rest of the product is long.
SOME = [(2, "clipped Adagrad", "ps"), (8, "AdamW", "auto"), (26, "mixed", "ps")]
ALL = itertools.product(COUNTS, OPTIMIZERS, ("ps", "auto"))


@pytest.mark.parametrize(("count", "name", "strategy"), [case if case in SOME else long(*case) for case in ALL])
def test_trained_as_by_jax(count: int, name: str, strategy: str) -> None:
    step = check(count, name, functools.partial(autopar.parallelize, mesh=mesh_of(4), strategy=strategy))
    sent = autopar.check(step, start(count, OPTIMIZERS[name](count)), batch(count, 0))
    assert sent.ok, sent


def test_programs_hardly_grow_with_tables() -> None:
    """26 tables take at most three times the instructions of two."""
    instructions = []
    for count in (2, 26):
        train_step, state, minibatch = alike(count)
        step = autopar.parallelize(train_step, mesh=mesh_of(4), strategy="ps")
        runner = step.planned_for(state, minibatch).runner
        instructions.append(runner.lower().compile().as_text().count(" = "))
    assert 300 < instructions[0] < instructions[1] <= 3 * instructions[0], instructions
