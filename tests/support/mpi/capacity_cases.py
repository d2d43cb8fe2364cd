"""What every rank runs in `test_worlds.py`: batches that need more of a capacity than the plan's example did."""

from __future__ import annotations

import json
import time
import warnings
from typing import Any

import numpy as np

import autopar
from autopar.run import devices
from tests.support.compilations import compilations
from tests.support.mpi.global_cases import ALL, BATCH, COUNT, PLAIN, RANK, RANKS, agree, here, ids_of
from tests.support.row_steps import make_state, step


def check_growth() -> None:
    """All ranks know at the same call that a capacity was exceeded, however late or early one of them asks."""
    rows = 1000 * COUNT
    planned = autopar.parallelize(step, strategy="ps")
    even = ids_of(rows, length=20)
    unequal = {"ids": even["ids"] % 1000}  # all of one owner
    state, theirs = make_state(rows), make_state(rows)
    start, capacities, warned = here(state), [], []
    for k, batch in enumerate([even, even, unequal, unequal, even, even]):
        if k % RANKS == RANK:
            time.sleep(0.2)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            state, _ = planned(state, batch)
        theirs, _ = PLAIN(theirs, batch)
        warned += [k for w in told if issubclass(w.category, autopar.CapacityWarning)]
        assert planned.plan is not None
        capacities.append(planned.plan.tables[0].capacity)
    assert len(warned) == 1 and capacities[-1] > capacities[0], (warned, capacities)
    assert len(set(ALL.gather(json.dumps([capacities, warned]).encode(), "growth"))) == 1
    agree(start, state, theirs)


def check_larger_capacities() -> None:
    """All ranks begin at the same call to compile what batches come near to needing, and go on with it at the same."""
    rows, capacities, warned = 1000 * COUNT, [], []

    def asking(n: int) -> dict[str, Any]:
        ids = (np.arange(COUNT)[:, None] * 1000 + np.arange(60) % n).reshape(-1)
        return {"ids": np.tile(ids, (COUNT, 1)).reshape(BATCH, -1).astype(np.int32)}

    planned = autopar.parallelize(step, strategy="ps")
    state, theirs = make_state(rows), make_state(rows)
    start = here(state)
    for n in [20, 30, 20, 20, 20, 50, 50, 20, 20]:
        with compilations() as made, warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            state, _ = planned(state, asking(n))
        theirs, _ = PLAIN(theirs, asking(n))
        warned += [str(w.message) for w in told if issubclass(w.category, autopar.CapacityWarning)]
        assert planned.latest is not None and (made.here == 0 or not warned)
        capacities.append((planned.plan.tables[0].capacity, planned.latest.larger is None))
    assert len(warned) == 1 and "compiled beside" in warned[0], warned
    assert [c for c, _ in capacities] == [32] * 7 + [56] * 2 and not capacities[4][1], capacities
    assert len(set(ALL.gather(json.dumps([capacities, warned]).encode(), "larger"))) == 1
    agree(start, state, theirs)


def check_fallback() -> None:
    """All ranks go over at the same call to the step with its fallback, which was compiled beside the ones before."""
    rows = 1000 * COUNT
    before = devices.CALLS, devices.WAITING_CALLS
    devices.CALLS, devices.WAITING_CALLS = 2, 5
    try:
        planned = autopar.parallelize(step, strategy="ps")
        even = ids_of(rows, length=20)
        state, theirs = make_state(rows), make_state(rows)
        start, here_ = here(state), []
        for k in range(9):
            if k % RANKS == RANK:
                time.sleep(0.2)
            batch = {"ids": even["ids"] % 1000} if k == 8 else even  # all of one owner
            with compilations() as made:
                state, _ = planned(state, batch)
            theirs, _ = PLAIN(theirs, batch)
            here_.append(made.here > 0)
        assert here_ == [True] + [False] * 8, here_
        agree(start, state, theirs)
    finally:
        devices.CALLS, devices.WAITING_CALLS = before
