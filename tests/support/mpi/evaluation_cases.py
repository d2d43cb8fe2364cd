"""What every rank runs in `test_worlds.py`: evaluations of a state on all ranks' devices, some rows of which wait."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from tests.support.compilations import finish
from tests.support.deferred import deferring
from tests.support.evaluation_rows import EVALUATIONS, ROWS, assert_same, make_state, train_step


def check_rows_that_are_read() -> None:
    """Rows that wait are brought up to date where they are read, by plain numbers and by global ones."""
    step, plain = deferring(train_step, 64), jax.jit(train_step)
    mine, theirs, random = make_state(), make_state(), np.random.default_rng(0)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    evaluations = [(f, autopar.parallelize(f), flushes) for f, flushes in EVALUATIONS]
    for k in range(20):
        ids = random.integers(0, ROWS, 2 * jax.device_count()).astype(np.int32)
        mine, theirs = step(mine, ids)[0], plain(theirs, ids)[0]
        if k == 18:
            finish()  # then there is a program for blocks of rows
        if k in (3, 18):
            seen = random.integers(0, ROWS + 9, 4 * jax.device_count()).astype(np.int32)
            spread = jax.make_array_from_callback(seen.shape, NamedSharding(mesh, P("data")), seen.__getitem__)
            for evaluate, planned, flushes in evaluations:
                for given in (seen, jnp.asarray(seen), spread):
                    assert_same(planned(mine, given), evaluate(theirs, seen))
                    assert mine["params"]["emb"].log.is_up_to_date == flushes
                    mine, theirs = step(mine, ids)[0], plain(theirs, ids)[0]
    assert_same(autopar.materialize(mine), theirs)
