"""Watching alpha: samples judged by hand, and calls that must be left alone."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.run.drift import AlphaWatch, SeenAlpha
from tests.support.at_once import AtOnce

ROWS = 3000


def step(state: Any, batch: Any) -> Any:
    """Ids of the batch in one table, ids drawn by the state's key in another."""
    key, own = jax.random.split(state["key"])
    drawn = jax.random.randint(own, (7,), 0, ROWS)

    def loss_fn(p: Any) -> Any:
        return jnp.mean(p["emb"][batch["ids"]] ** 2) + jnp.mean(p["drawn"][drawn] ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    return {"params": jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads), "key": key}, loss


def make_state() -> Any:
    return {"params": {"emb": jnp.ones((ROWS, 8)), "drawn": jnp.ones((ROWS, 8))}, "key": jax.random.key(3)}


def ids(count: int) -> np.ndarray:
    """So many different ones among 64."""
    return (np.arange(64) % count).astype(np.int32)


def watched(every: int = 1) -> tuple[Any, AlphaWatch]:
    """The step, looked at every so many calls, and counted at once."""
    planned = autopar.parallelize(step)
    planned.watch = AlphaWatch(every, AtOnce())
    return planned, planned.watch


@pytest.mark.parametrize(
    ("samples", "streak", "mean"),
    [
        ((100, 149), 0, 124.5),
        ((150, 200, 150), 3, 500 / 3),
        ((150, 100, 150), 1, 150),
        ((66, 10), -2, 38),
        ((67, 67), 0, 67),
        ((300, 300, 10), -1, 10),
        ((300, 300, 90, 110), 0, 90 + 20 / 4),
        ((0, 0, 0), -3, 0),
    ],
)
def test_samples_by_hand(samples: tuple[int, ...], streak: int, mean: float) -> None:
    """100 rows are planned for: drift is from 150 on, and up to 66."""
    seen = SeenAlpha(100, samples[0], 1000)
    for rows in samples:
        seen = seen.with_sample(rows)
    assert (seen.streak, seen.samples, seen.drifted) == (streak, len(samples), abs(streak) >= 3)
    assert seen.rows == pytest.approx(mean)


def test_samples_become_rare_while_they_are_as_planned() -> None:
    planned, watch = watched(every=2)
    state, looked = make_state(), []
    watch.look, look = lambda *given: looked.append(calls) or look(*given), watch.look
    for calls in range(1, 76):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            state, _ = planned(state, {"ids": ids(40 if calls < 20 else 10)})
        assert len(told) == (calls == 70)
    # It gets ready after the first look; then there are 2, 4, 8, ... calls between looks, and 2 again after a stray.
    assert looked == [2, 4, 6, 10, 18, 34, 66, 68, 70, 72, 74]
    assert watch.seen["params/emb"].rows == 10


def test_ids_of_the_state_are_left_alone() -> None:
    planned, watch = watched()
    state = make_state()
    for _ in range(4):
        state, _ = planned(state, {"ids": ids(40)})
    assert set(watch.seen) == {"params/emb"}


def test_nothing_of_a_batch_is_kept() -> None:
    planned, watch = watched()
    state, kept = make_state(), []
    for _ in range(5):
        batch = {"ids": jnp.asarray(ids(40)), "more": jnp.ones(3)}
        kept += [weakref.ref(x) for x in batch.values()]
        state, _ = planned(state, batch)
    watch.look(None, [])  # waits for what is being counted
    assert watch.seen["params/emb"].samples == 2
    del batch
    gc.collect()
    assert sum(ref() is not None for ref in kept[2:]) == 0, "but the first one, the example"


def test_a_traced_call_is_the_plain_one() -> None:
    planned, watch = watched()
    state, _ = planned(make_state(), {"ids": ids(40)})
    plain = jax.jit(step)(jax.tree.map(jnp.copy, state), {"ids": ids(10)})
    for _ in range(3):
        traced = jax.jit(lambda s, b: planned(s, b))(state, {"ids": ids(10)})
    jax.tree.map(np.testing.assert_allclose, traced[0]["params"], plain[0]["params"])
    assert watch.seen == {}


def test_a_batch_that_is_gone_when_it_is_counted() -> None:
    planned, _ = watched()
    state = make_state()
    for _ in range(3):
        state, _ = planned(state, {"ids": jnp.asarray(ids(40))})
    given = jnp.asarray(ids(40))
    given.delete()
    with pytest.raises((autopar.DonatedStateError, RuntimeError, ValueError), match="deleted|given before"):
        planned(state, {"ids": given})
    state = make_state()
    for _ in range(3):
        state, _ = planned(state, {"ids": ids(40)})


def test_who_watches() -> None:
    assert autopar.parallelize(step, replan="warn").watch is not None
    assert autopar.parallelize(step, replan="off").watch is None


def test_options_that_do_not_exist() -> None:
    with pytest.raises(autopar.ArgumentsError, match="replan='auto': there are 'warn' and 'off'. To plan by a later"):
        autopar.parallelize(step, replan="auto")  # pyright: ignore[reportCallIssue, reportArgumentType]
