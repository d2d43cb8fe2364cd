"""What every rank runs in `test_worlds.py`: a key-value store over the ranks."""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np
import optax
import pytest

import autopar
from autopar import kvstore
from autopar.launch.group import everyone

RANK, RANKS = jax.process_index(), jax.process_count()
ONES = np.ones(3, np.float32)


def check_sums() -> None:
    """Figures 2 and 3: one value for all, the first rank's; sums of all workers' devices."""
    store = kvstore.create("sync")
    store.init(["a", "b"], [ONES * (RANK + 1), np.zeros((2, 2), np.float32)])
    np.testing.assert_array_equal(store.pull("a"), ONES)
    for k in range(20):  # rounds don't mix, however fast a rank is
        store.push(["a", "b"], [ONES * (RANK + k), [np.ones((2, 2), np.float32)] * 2])
        a, b = store.pull(["a", "b"])
        np.testing.assert_array_equal(a, ONES * (RANKS * (RANKS - 1) / 2 + RANKS * k))
        assert (b == 2 * RANKS).all()


def check_optimizers() -> None:
    """Figures 6 and 7: one update a round, or one a push."""
    store = kvstore.create("sync")
    store.init(["w"], [ONES])
    store.set_optimizer(optax.sgd(0.1, momentum=0.5), rescale=1 / RANKS)
    weight, slots = np.ones(3), optax.sgd(0.1, momentum=0.5).init(ONES)
    for k in range(10):
        store.push("w", ONES * (RANK + k))
        updates, slots = optax.sgd(0.1, momentum=0.5).update(ONES * ((RANKS - 1) / 2 + k), slots)
        weight = weight + updates
        np.testing.assert_allclose(store.pull("w"), weight, rtol=1e-5, atol=1e-6)
    store = kvstore.create("async")
    store.init([1], [ONES])
    store.set_optimizer(optax.sgd(1.0))
    for _ in range(100):
        store.push(1, ONES / 128)
        store.pull(1)
    everyone().gather(b"", "all have pushed")
    np.testing.assert_array_equal(store.pull(1), ONES - 100 * RANKS / 128)


def check_workers_of_several_ranks() -> None:
    """Figures 4 and 5: MPI within a worker, whose first rank speaks for it."""
    pure = kvstore.create("sync-mpi")
    pure.init(["g"], [ONES])
    np.testing.assert_array_equal(pure.pushpull("g", ONES * RANK), ONES * (RANKS * (RANKS - 1) / 2))
    half = np.ones(2, ml_dtypes.bfloat16)
    pure.init(["h"], [half])
    assert (pure.pushpull("h", half) == RANKS).all()
    count = 2 if RANKS % 2 == 0 else RANKS
    store = kvstore.create("async-mpi", clients=count)
    assert (store.workers, store.rank) == (count, RANK // (RANKS // count))
    store.init(["g"], [ONES])
    store.set_optimizer(optax.sgd(1.0))
    store.push("g", ONES)
    store.pull("g")
    everyone().gather(b"", "all have pushed")
    np.testing.assert_array_equal(store.pull("g"), ONES - RANKS)


def check_figure_8() -> None:
    """Two workers in turn, whose weights move by a centre that has moved: not as equations 2 and 3 have it."""
    store = kvstore.create("async")
    store.init(["c"], [np.zeros(1, np.float32)])
    store.set_optimizer(kvstore.elastic(0.5))
    x = np.zeros(1, np.float32)
    for _ in range(2):
        for worker in range(RANKS):
            if worker == RANK:
                store.push("c", x)
                x = x + 1 - 0.5 * (x - store.pull("c"))
            everyone().gather(b"", "a turn")
    if RANKS == 2:
        assert [float(v) for (v,) in everyone().values(x.tolist(), "weights")] == [1.75, 1.875]
        assert float(store.pull("c")[0]) == 0.75


def check_what_is_refused() -> None:
    with pytest.raises(autopar.ArgumentsError, match="there are 'sync', 'async'"):
        kvstore.create("dist")  # type: ignore[arg-type]
    with pytest.raises(autopar.ArgumentsError, match="every rank is a worker"):
        kvstore.create("async", clients=2)
    store = kvstore.create("async")
    with pytest.raises(autopar.ArgumentsError, match="init it first"):
        store.pull("w")
    store.init(["w"], [ONES])
    with pytest.raises(autopar.ArgumentsError, match="set_optimizer first"):
        store.push("w", ONES)
    with pytest.raises(autopar.ArgumentsError, match="known already"):
        store.init(["w"], [ONES])
    with pytest.raises(autopar.ArgumentsError, match="Optax transformation"):
        store.set_optimizer(0.1)
