"""What every rank runs in `test_worlds.py`: evaluations of a state on all ranks' devices, some rows of which wait."""

from __future__ import annotations

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from tests.support.compilations import finish
from tests.support.deferred import deferring
from tests.support.evaluation_page import check_page
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
                    assert mine["params"]["emb"].pending.is_up_to_date == flushes
                    mine, theirs = step(mine, ids)[0], plain(theirs, ids)[0]
    assert_same(autopar.materialize(mine), theirs)


def check_arguments_that_stay() -> None:
    """Arrays of this process, and those that all have a part of, give what they give plainly, placed once or anew."""

    def step(table: jax.Array, vectors: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, g = jax.value_and_grad(lambda t: ((t[ids] * vectors[ids, :3]) ** 2).mean())(table)
        return table - 0.1 * g, loss

    rows, count = 16 * jax.device_count(), 4 * jax.device_count()
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    whole = np.random.default_rng(0).normal(size=(rows, 5)).astype(np.float32)
    spread = jax.make_array_from_callback(whole.shape, NamedSharding(mesh, P("data")), whole.__getitem__)
    for strategy, axis in (("ps", None), (("ps", "hosts"), 0), (("ps", "hosts"), None)):
        planned = autopar.parallelize(
            step, strategy=strategy, state_argnums=0, batch_axis={"vectors": axis, "ids": 0}, replan="off"
        )
        mine, theirs, own = jnp.ones((rows, 3)), jnp.ones((rows, 3)), jax.device_put(whole)
        shared = [spread] if strategy == "ps" or axis == 0 else []
        for k, given in enumerate((own, own, *shared, own, jnp.copy(own), whole)):
            ids = (np.arange(count, dtype=np.int32) * 7 + k) % rows
            (mine, a), (theirs, b) = planned(mine, given, ids), jax.jit(step)(theirs, whole, ids)
            np.testing.assert_allclose(a, b, rtol=1e-5)
        assert_same(autopar.materialize(mine), theirs)
        before = weakref.ref(own)
        del own, given
        gc.collect()
        assert before() is None, "what is kept keeps nothing else"


def check_the_page_of_evaluations_runs() -> None:
    """As it is for one process."""
    check_page()
