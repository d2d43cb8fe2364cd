"""Interrupts on several devices, and warnings that are errors: the state stays the caller's."""

from __future__ import annotations

import warnings
from pathlib import Path

import jax
import optax
import pytest

import autopar
from tests.support.documented_loop import check_interrupted_checkpointer, check_interrupted_script
from tests.support.interrupting import Loop, check_interrupted, lookup_step
from tests.support.meshes import mesh_of
from tests.support.row_steps import ids_in, make_state, same
from tests.support.row_steps import step as rows_step


@pytest.mark.parametrize("tx", [optax.sgd(0.1), optax.adam(1e-2)], ids=["lifted", "deferred"])
def test_training_goes_on(tx: optax.GradientTransformation) -> None:
    make, step = lookup_step(tx)
    planned = autopar.parallelize(step, strategy="ps", mesh=mesh_of(4))
    check_interrupted(planned, make(), lambda steps: Loop(planned, make()).run(steps))


def test_the_documented_script_goes_on_where_it_was() -> None:
    make, step = lookup_step(optax.sgd(0.1))
    check_interrupted_script(autopar.parallelize(step, strategy="ps", mesh=mesh_of(4)), make, mesh_of(4))


def test_the_documented_checkpointer_goes_on_where_it_was(tmp_path: Path) -> None:
    make, step = lookup_step(optax.adam(1e-2))
    planned = autopar.parallelize(step, strategy="ps", mesh=mesh_of(4))
    check_interrupted_checkpointer(tmp_path, planned, make, mesh_of(4), count=4)


def test_a_capacity_warning_that_is_an_error_costs_no_state() -> None:
    planned, plain = autopar.parallelize(rows_step, strategy="ps", mesh=mesh_of(4)), jax.jit(rows_step)
    mine, theirs = make_state(400), make_state(400)
    planned.planned_for(mine, ids_in(0, 400, length=20))
    unequal, warned = ids_in(0, 90, 1, length=20), 0
    with warnings.catch_warnings():
        warnings.simplefilter("error", autopar.CapacityWarning)
        for _ in range(2):
            theirs, _ = plain(theirs, unequal)
            try:
                mine, _ = jax.block_until_ready(planned(mine, unequal))
            except autopar.CapacityWarning:
                warned += 1
                mine, _ = planned(mine, unequal)
    assert warned == 1
    same(mine, theirs)
