"""In one process, rows of the next batch that are copied to the device beside a step: the same bits as without."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.backends.host.ranks import Ranks
from autopar.backends.host.segmented import SegmentedProgram
from autopar.errors import SlowPlanWarning
from autopar.planning.notes import hot_rows_notes
from tests.support.mpi.ahead_cases import (
    ANYWHERE,
    HOSTS,
    OPTIMIZERS,
    Batch,
    assert_same_bits,
    batches,
    make,
    of_other_numbers_of_rows,
    train,
)


@pytest.fixture(autouse=True)
def _as_on_an_accelerator() -> Iterator[None]:
    """CPUs send nothing ahead: rows are where they compute."""
    with ANYWHERE:
        yield


def _sends(
    given: Callable[[], Iterator[Batch]], between: Callable[[], Any] | None = None, *names: str, **options: Any
) -> int:
    """Trains with and without rows that are sent ahead, asserts that the bits are the same, and returns how many arrays
    of rows a step read that had been sent."""
    results, sent = list[Any](), Ranks.sent
    with mock.patch.object(Ranks, "sent", autospec=True, side_effect=sent) as reads:
        for ahead in (False, True):
            step, state = make(*names, **options)
            results.append(train(step, state, given(), ahead=ahead, between=between and between()))
            assert ahead or not reads.called
    assert_same_bits(*results)
    return reads.call_count


def test_the_bits_are_the_same() -> None:
    """With optimizers whose rows wait as well, over steps in which their update logs are full four times."""
    # Rows and slots of Adagrad, rows, two slots and stamps of AdamW, rows, one slot and stamps of momentum; none in the
    # first step. When a log is full all its rows are brought up to date, or their stamps begin anew: nothing is used.
    reads = _sends(lambda: batches(140), None, *OPTIMIZERS, clip=0.1)
    assert reads == (2 + 4 + 3) * (140 - 1 - 4)


def test_rows_that_a_step_writes_are_sent_again() -> None:
    """Otherwise the numbers are others."""
    step, state = make()
    right = train(step, state, batches(8), ahead=False)
    step, state = make()
    with mock.patch.object(SegmentedProgram, "_written", lambda *_: np.zeros(0, np.int32)):
        wrong = train(step, state, batches(8), ahead=True)
    assert np.any(np.array(right[0]) != np.array(wrong[0]))


def test_what_is_done_between_two_steps() -> None:
    """An evaluation and reading leave rows that were sent as they are; another step writes to the table."""

    def between() -> Any:
        other, _ = make()
        evaluate = autopar.parallelize(lambda params, ids: jnp.tanh(params["tables"]["adagrad"][ids]).sum())
        ids = np.arange(12, dtype=np.int32)

        def change(k: int, state: Any, batch: Any) -> tuple[Any, Any]:
            if k == 3:
                evaluate(state["params"], ids)
                np.asarray(state["params"]["tables"]["adagrad"])
            if k == 5:
                state = other(state, batch)[0]
            if k == 7:
                batch = jax.tree.map(np.copy, batch)  # an equal one that nobody has announced
            if k == 10:
                state = jax.tree.map(jnp.asarray, autopar.materialize(state))
            return state, batch

        return change

    # Nothing was sent of the first batch and of the one after an unannounced one; what was sent isn't used where the
    # table was written.
    assert _sends(lambda: batches(13), between) == 2 * (13 - 1 - 1 - 2 - 1)


def test_rows_that_wait_and_are_read_between_two_steps() -> None:
    def between() -> Any:
        evaluate = autopar.parallelize(lambda params, ids: jnp.tanh(params["tables"]["adamw"][ids]).sum())

        def change(k: int, state: Any, batch: Any) -> tuple[Any, Any]:
            if k == 4:
                evaluate(state["params"], np.arange(12, dtype=np.int32))
            if k == 8:
                np.asarray(state["params"]["tables"]["adamw"])
            return state, batch

        return change

    assert _sends(lambda: batches(12), between, "adamw", clip=0.1) == 4 * (12 - 1 - 2)


def test_other_numbers_of_rows() -> None:
    """Rows that fit no program yet are sent once there is one."""

    assert 0 < _sends(of_other_numbers_of_rows) < 2 * 8


def test_a_device_without_room_for_rows_of_two_steps() -> None:
    """What can't be sent ahead is copied in its step, as are those after it, and that is told."""
    calls, send = itertools.count(), Ranks.send

    def refused(ranks: Ranks, value: np.ndarray) -> Any:
        if next(calls) == 5:  # the second array of the third batch that is known ahead
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 12 bytes")
        return send(ranks, value)

    with mock.patch.object(Ranks, "send", refused), pytest.warns(SlowPlanWarning, match="RESOURCE_EXHAUSTED") as told:
        assert _sends(lambda: batches(8)) == 2 * 2
    assert len(told) == 1


def test_a_copied_state_gets_rows_of_its_own() -> None:
    """Every step copies its tables then."""
    assert _sends(lambda: batches(4), donate=False) == 0


def test_what_is_told() -> None:
    step, state = make("adagrad", "adamw")
    text = " ".join(str(autopar.explain(step, state, next(batches(1)))).split())
    assert "of params/tables/adagrad, params/tables/adamw rows of the next batch are asked for beside a step" in text
    assert "by batch/ids as shard gives it, and copied to the devices as far as it doesn't write them" in text
    with mock.patch.object(Ranks, "hides_exchanges", staticmethod(lambda exchange: False)):
        assert "Batches of autopar.shard" not in str(autopar.explain(step, state, next(batches(1))))


def test_what_came_of_it_is_told() -> None:
    """A call without shard, then six with it; the third is given an array that shard didn't announce, and so announces
    nothing."""
    step, state = make("adagrad", "adamw")
    given = list(batches(8))
    assert "So far" not in str(autopar.explain(step, state, given[0]))
    state, _ = step(state, given[0])
    told = "So far: nothing is fetched ahead, as no batch is announced by shard(step=)."
    assert told in " ".join(str(autopar.explain(step, state, given[0])).split())
    for k, batch in enumerate(autopar.shard(iter(given[1:7]), step=step)):
        state, _ = step(state, batch | {"ids": batch["ids"] + 0} if k == 2 else batch)
    told = (
        "So far: of 7 steps 3 had rows there from beside the step before, 0 found owners asked but fetched anew, and 4"
    )
    assert told in " ".join(str(autopar.explain(step, state, given[0])).split())


@pytest.mark.parametrize(
    ("ids_of", "told"),
    [
        (lambda state, ids, shift: ids + shift, "by ids and shift as shard gives them"),
        (lambda state, ids, shift: ids + state["next"], "asked for ahead, as ids depend on the state (next)"),
        (lambda state, ids, shift: _printed(ids), "asked for ahead, as ids are computed beside an effect"),
    ],
)
def test_what_ids_depend_on_is_told(ids_of: Callable[..., jax.Array], told: str) -> None:
    @autopar.parallelize(strategy={"rows": HOSTS})
    def step(state: Any, ids: jax.Array, shift: jax.Array) -> Any:
        grad = jax.grad(lambda rows: jnp.sum(rows[ids_of(state, ids, shift)] ** 2))(state["rows"])
        return {"rows": state["rows"] - 0.1 * grad, "next": state["next"] + 1}

    state = {"rows": jnp.ones((300, 8)), "next": jnp.int32(0)}
    text = " ".join(str(autopar.explain(step, state, jnp.arange(16), jnp.int32(1))).split())
    assert told in text


def _printed(ids: jax.Array) -> jax.Array:
    jax.debug.print("{}", ids[0])
    return ids


def test_what_travels_to_an_accelerator_is_told() -> None:
    step, state = make("adagrad")
    (told,) = hot_rows_notes(autopar.plan(step, state, next(batches(1))), accelerators=True)
    # 60 rows of 32 B, there and back.
    assert "All rows of a batch travel to the accelerator and back, at most 3.8 KiB a step" in told
