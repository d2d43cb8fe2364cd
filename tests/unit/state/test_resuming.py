"""Trainings that go on from what a step made of their first state, or with larger tables."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import autopar
from tests.support.checkpoints import ROWS, TX, batch_of, limited_files, same, train

KEY = jax.random.key(0)


def test_a_train_state_whose_counter_begins_with_a_python_number(tmp_path: Path) -> None:
    """A step returns an array in its place."""

    def make_state() -> Any:
        return TrainState.create(apply_fn=None, params={"w": jnp.ones((3, 2))}, tx=optax.adam(0.1))

    step = jax.jit(lambda state: state.apply_gradients(grads=state.params))

    def run(steps: int) -> Any:
        with autopar.Checkpointer(tmp_path, every=2) as checkpoints:
            state, _ = checkpoints.resume(make_state)
            while checkpoints.steps < steps:
                state = step(state)
                checkpoints.step(state)
        return state

    run(2)
    found, expected = run(5), make_state()
    for _ in range(5):
        expected = step(expected)
    assert len(jax.tree.leaves(found)) == len(jax.tree.leaves(expected))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        same(a, b)


@pytest.mark.parametrize(
    ("number", "array"),
    [
        (3, jnp.int32(3)),
        (3, jnp.asarray(3)),  # which is weak
        (3, np.uint8(3)),
        (3, jnp.int4(3)),
        (2.5, jnp.bfloat16(2.5)),
        (2.5, np.float64(2.5)),
        (True, jnp.array(True)),
        (1j, jnp.complex64(1j)),
    ],
)
def test_a_number_and_an_array_of_its_kind_are_the_same_leaf(number: Any, array: Any, tmp_path: Path) -> None:
    """Either stands for the other in a template; what is restored is what was saved."""
    array = np.asarray(array) if isinstance(array, np.generic) else array
    shape = jax.ShapeDtypeStruct((), array.dtype)
    for saved, like in (number, array), (number, shape), (array, number), (number, number), (array, array):
        autopar.save(tmp_path / "state", {"n": saved})
        same(autopar.restore(tmp_path / "state", {"n": like}).state, {"n": saved})


@pytest.mark.parametrize(
    ("saved", "like"),
    [
        (3, jnp.float32(3)),
        (3, jnp.array(True)),
        (True, jnp.int32(1)),
        (2.5, jnp.complex64(1)),
        (2.5, jnp.int32(1)),
        (3, jnp.ones(1, jnp.int32)),
        (3, True),
        (3, 3.0),
    ],
)
def test_numbers_of_other_kinds_are_other_leaves(saved: Any, like: Any, tmp_path: Path) -> None:
    for a, b in (saved, like), (like, saved):
        autopar.save(tmp_path / "state", {"n": a})
        with pytest.raises(autopar.CheckpointError, match=r"^n (is a Python \w+ in the template; |was) ?saved "):
            autopar.restore(tmp_path / "state", {"n": b})


@pytest.mark.parametrize("strategy", [("ps", "hosts"), "ps", None])
def test_a_training_goes_on_with_more_rows(tmp_path: Path, strategy: Any) -> None:
    """`strategy`: None: without `step=`."""

    def make_state(key: Any, rows: int) -> Any:
        table = jax.random.normal(key, (ROWS + 5, 3))[:rows]
        params = {"emb": table, "w": jnp.ones((3,))}
        return {"params": params, "opt": TX.init(params), "step": 0 if strategy is None else jnp.int32(0)}

    def run(steps: int, rows: int) -> Any:
        step = jax.jit(train) if strategy is None else autopar.parallelize(train, strategy=strategy)
        options = {} if strategy is None else {"step": step, "batch": batch_of(0)}
        with autopar.Checkpointer(tmp_path, **options) as checkpoints:
            make = lambda key: make_state(key, rows)  # noqa: E731
            state, _ = checkpoints.resume(make, KEY, resize=True)
            before = autopar.materialize(state)
            while checkpoints.steps < steps:
                state, _ = step(state, batch_of(checkpoints.steps))
                checkpoints.step(state)
        return before, autopar.materialize(state)

    _, small = run(3, ROWS)
    before, _ = run(4, ROWS + 5)
    fresh = make_state(KEY, ROWS + 5)
    for found, old, new in zip(*map(jax.tree.leaves, (before, small, fresh)), strict=True):
        expected = np.concatenate([old, new[ROWS:]]) if np.shape(old)[:1] == (ROWS,) else old
        np.testing.assert_array_equal(found, expected)
    again, last = run(6, ROWS + 5)  # nothing to resize
    assert again["step"] == 4 and last["step"] == 6


def test_what_is_not_installed_is_told_before_the_first_step(
    tmp_path: Path, uninstalled: Callable[[str], None]
) -> None:
    for module, told in ("orbax.checkpoint", "Orbax"), ("tensorstore", "TensorStore"):
        uninstalled(module)
        with pytest.raises(autopar.CheckpointError, match=rf"need {told}.*pip install 'autopar\[checkpoint\]'"):
            autopar.Checkpointer(tmp_path)
        autopar.Checkpointer(None)


def test_no_path(in_tmp_path: Path) -> None:
    for call in (autopar.Checkpointer, autopar.restore, lambda path: autopar.save(path, {})):
        for path in "", "file://":
            with pytest.raises(autopar.CheckpointError, match="is no path of a checkpoint"):
                call(path)
    assert not any(in_tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Orbax's, of loops that it closed
def test_a_save_that_orbax_fails_in_is_one_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its threads don't print theirs as well."""
    state = {"a": jax.random.normal(KEY, (200, 100)), "b": jnp.ones(3)}
    autopar.save(tmp_path / "state", state)
    caplog.set_level(logging.ERROR)
    with limited_files(20_000), pytest.raises(autopar.CheckpointError, match="by Orbax"):
        autopar.save(tmp_path / "state", state)
    assert not caplog.records
    assert not logging.getLogger("absl").filters
    gc.collect()
    same(autopar.restore(tmp_path / "state").state, state)


def test_saves_leave_no_files_open(tmp_path: Path) -> None:
    for _ in range(3):
        autopar.save(tmp_path / "state", {"a": jnp.ones(3), "n": 3})
    links = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    assert links and not [link for link in links if link.startswith(str(tmp_path))]
