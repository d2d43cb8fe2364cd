"""What every rank runs in `test_worlds.py`: `Checkpointer` where several ranks save, are told to leave, and fail."""

from __future__ import annotations

import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

import autopar  # first: it makes the ranks JAX's processes

# isort: split
import jax
import jax.numpy as jnp
import numpy as np
import optax

from autopar.mpi.world import world
from autopar.state import checkpointer
from tests.support.interrupting import BATCHES, ROWS, lookup_step, same

RANK = jax.process_index()
FOLDER = Path(os.environ["XDG_CACHE_HOME"]).parent / "checkpointer"
BATCH_SIZE = 8
MAKE, STEP = lookup_step(optax.adagrad(0.1))
PLANNED = autopar.parallelize(STEP, strategy=("ps", "hosts"))
SHAPES = jax.ShapeDtypeStruct((BATCH_SIZE,), jnp.int32)


def _batches(steps: int) -> Any:
    ids = np.random.default_rng(1).integers(0, ROWS, BATCHES * BATCH_SIZE).astype(np.int32)
    return autopar.shard(np.tile(ids, 20)[: steps * BATCH_SIZE], batch_size=BATCH_SIZE)


def _open(name: str, **options: Any) -> autopar.Checkpointer:
    return autopar.Checkpointer(FOLDER / name, step=PLANNED, batch=SHAPES, **options)


def _train(name: str, steps: int, before: Any = None, **options: Any) -> tuple[Any, list[int]]:
    """The state at the end, and the steps that are kept. `before(n)`: called before the n-th step."""
    with _open(name, **options) as checkpoints:
        state, batches = checkpoints.resume(lambda: MAKE(), batches=_batches(steps))
        while (batch := next(batches, None)) is not None:  # which holds no signals, as a `for` loop does
            if before is not None:
                before(checkpoints.steps)
            state, _ = PLANNED(state, batch)
            checkpoints.step(state)
            if checkpoints.steps == 3 and options.get("best"):
                checkpoints.evaluated(state, {"loss": 0.5 + RANK})
    return state, checkpoints.all_steps()


def _undisturbed(steps: int) -> Any:
    state = MAKE()
    for batch in _batches(steps):
        state, _ = PLANNED(state, batch)
    return state


def check_a_training_is_resumed() -> None:
    _, kept = _train("resumed", 5, every=2, best=("loss", min))
    assert kept == [3, 4, 5], kept
    state, kept = _train("resumed", 12, every=4, keep=1, best=("loss", min))
    assert kept == [3, 12], kept
    same(state, _undisturbed(12))


def check_a_signal_to_one_rank_is_answered_by_all() -> None:
    checkpointer.SECOND_S = 60.0  # a launcher may have it pass twice
    for number in (signal.SIGINT, signal.SIGTERM):
        name = signal.Signals(number).name

        def send(steps: int, number: int = number) -> None:
            if steps == 3 and world().rank == world().size - 1:
                os.kill(os.getpid(), number)
            if steps >= 3 and number == signal.SIGTERM:  # JAX's service looks for it once a second
                time.sleep(0.1)

        try:
            _train(name, 80, send)
        except KeyboardInterrupt:
            assert number == signal.SIGINT
        except SystemExit as error:
            assert number == signal.SIGTERM and error.code == 128 + number
        else:
            raise AssertionError(f"{name} was lost")
        with _open(name) as checkpoints:
            (step,) = checkpoints.all_steps()
            assert len(set(world().comm.allgather(step))) == 1 and 4 <= step < 80, step
        state, _ = _train(name, step + 2)
        same(state, _undisturbed(step + 2))


def check_what_fails_on_one_rank_is_an_error_on_all() -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with _open("fails", every=1) as checkpoints:
        state, batches = checkpoints.resume(lambda: MAKE(), batches=_batches(3))
        state, _ = PLANNED(state, next(batches))
        checkpoints.step(state)
        checkpoints.wait()
        if RANK == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        try:
            state, _ = PLANNED(state, next(batches))
            checkpoints.step(state)
            checkpoints.wait()
        except autopar.CheckpointError as error:
            assert "rank 1" in str(error) and "can't be written" in str(error), str(error)
        else:
            raise AssertionError("no error")
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert checkpoints.all_steps() == [1]
    assert checkpoints.all_steps() == [1, 2]
