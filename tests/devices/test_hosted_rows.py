"""Tables in the memory of one process whose devices share its examples: each runs its own program."""

from __future__ import annotations

from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.backends.host.ranks import Ranks
from tests.support.host_models import HOSTED, LOSSES, batch_of, start, step_of
from tests.support.mpi.ahead_cases import ANYWHERE, assert_same_bits, batches, make, train


@pytest.mark.parametrize(("loss", "examples", "devices"), [("normed", 16, 8), ("in_batch", 12, 4), ("looped", 7, 1)])
def test_models(loss: str, examples: int, devices: int) -> None:
    step, plain = step_of(LOSSES[loss]), jax.jit(step_of(LOSSES[loss]))
    planned = autopar.parallelize(step, strategy=HOSTED)
    mine, theirs = start(), start()
    for seed in range(3):
        mine, told = planned(mine, batch_of(seed, examples))
        theirs, wanted = plain(theirs, batch_of(seed, examples))
        found = jax.tree.leaves((autopar.materialize(mine), told))
        for a, b in zip(found, jax.tree.leaves((theirs, wanted)), strict=True):
            np.testing.assert_allclose(np.asarray(a), b, rtol=1e-4, atol=1e-5)
    assert planned.latest is not None
    assert planned.latest.compiled.bound.rank_devices == devices


def test_callbacks_are_run_once() -> None:
    seen: list[float] = []

    def loss(p: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
        value = LOSSES["normed"](p, batch)
        jax.debug.callback(lambda x: seen.append(float(x)), jnp.sum(batch["y"]))
        return value

    planned = autopar.parallelize(step_of(loss), strategy=HOSTED)
    batch = batch_of(0, 16)
    state, _ = planned(start(), batch)
    jax.effects_barrier()
    seen.clear()  # the first step begins again, once its rows are known
    planned(state, batch)
    jax.effects_barrier()
    assert seen == [pytest.approx(float(batch["y"].sum()), abs=1e-4)]


def test_rows_that_are_sent_ahead_reach_each_device() -> None:
    results, sent = list[Any](), Ranks.sent
    with ANYWHERE, mock.patch.object(Ranks, "sent", autospec=True, side_effect=sent) as reads:
        for ahead in (False, True):
            step, state = make("adagrad", "adamw")
            results.append(train(step, state, batches(6), ahead=ahead))
    assert_same_bits(*results)
    assert step.latest is not None and step.latest.compiled.bound.rank_devices == 4
    assert reads.call_count == (2 + 4) * 5
