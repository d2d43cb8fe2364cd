"""`Checkpointer`: what it keeps, where a training goes on, and how it is left."""

from __future__ import annotations

import doctest
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.state import checkpointer
from tests.support.checkpoints import ROWS, batch_of, limited_files, make_state, same, train
from tests.support.object_store import ObjectStore

KEY = jax.random.key(0)
#: Where checkpoints are in the `store`.
URL = "s3://bucket/run"


def opened(folder: Path | str | None, step: Any, **options: Any) -> autopar.Checkpointer:
    return autopar.Checkpointer(folder, step=step, batch=batch_of(0), **options)


def batches_of(steps: int) -> Any:
    data = (np.arange(8 * steps) % ROWS).astype(np.int32)
    return autopar.shard(data, batch_size=8, mesh=jax.make_mesh((1,), ("data",), devices=jax.devices()[:1]))


def trained(folder: Path | str, step: Any, steps: int, **options: Any) -> Any:
    """A training to its end, resumed if there is something to go on from."""
    with opened(folder, step, **options) as checkpoints:
        state, batches = checkpoints.resume(make_state, KEY, batches=batches_of(steps))
        for batch in batches:
            state, _ = step(state, batch)
            checkpoints.step(state)
    return state


def planned(**options: Any) -> Any:
    return autopar.parallelize(train, **{"strategy": ("ps", "hosts")} | options)


def values(state: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state)]


def equal(found: Any, expected: Any) -> None:
    for a, b in zip(values(found), values(expected), strict=True):
        np.testing.assert_array_equal(a, b)


def undisturbed(steps: int, **options: Any) -> Any:
    step = planned(**options)
    state = autopar.init(make_state, KEY, step=step, batch=batch_of(0))
    for batch in batches_of(steps):
        state, _ = step(state, batch)
    return state


@pytest.mark.parametrize("strategy", [("ps", "hosts"), "ps", "off"])
@pytest.mark.parametrize("async_save", [True, False])
def test_a_training_goes_on_at_its_step_its_position_and_its_plan(
    strategy: Any, async_save: bool, tmp_path: Path
) -> None:
    options = {"strategy": strategy} if strategy != "off" else {"strategy": "auto", "sparse": "off"}
    trained(tmp_path, planned(**options), 5, every=2, async_save=async_save)
    assert (tmp_path / "plan.json").exists()
    again = planned(**options)
    state = trained(tmp_path, again, 9, every=2, keep=2, async_save=async_save)
    assert int(state["step"]) == 9
    assert again.options.plan is not None and again.options.plan.source == str(tmp_path / "plan.json")
    equal(state, undisturbed(9, **options))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["plan.json", "step-00000008", "step-00000009"]


def test_what_is_saved_beside_a_training_is_the_state_of_its_step(store: ObjectStore) -> None:
    """Steps go on in place while a file waits to be written."""
    go = threading.Event()

    def slow(method: str, name: str) -> None:
        if method == "PUT" and "/rows/" in name:
            go.wait(60)

    store.watch = slow
    step = planned()
    with opened(URL, step, every=2) as checkpoints:
        state, batches = checkpoints.resume(make_state, KEY, batches=batches_of(3))
        for batch in batches:
            state, _ = step(state, batch)
            checkpoints.step(state)
        assert checkpoints.all_steps() == []
        go.set()
        checkpoints.wait()
        assert checkpoints.all_steps() == [2]
    found = autopar.restore(f"{URL}/step-00000002", jax.eval_shape(make_state, KEY))
    equal(found.state, undisturbed(2))
    assert found.position is not None and found.position["batch"] == 2


def test_a_save_that_fails_in_its_thread_is_an_error_of_a_later_call(tmp_path: Path) -> None:
    step = planned()
    with opened(tmp_path, step, every=1) as checkpoints:
        state, batches = checkpoints.resume(make_state, KEY, batches=batches_of(4))
        state, _ = step(state, next(batches))
        checkpoints.step(state)
        checkpoints.wait()
        with limited_files(100):
            state, _ = step(state, next(batches))
            checkpoints.step(state)
            with pytest.raises(autopar.CheckpointError, match="File too large"):
                checkpoints.wait()
        assert checkpoints.all_steps() == [1]
        state, _ = step(state, next(batches))
        checkpoints.step(state)
    assert checkpoints.all_steps() == [1, 3]


def test_the_last_and_the_best_are_kept(tmp_path: Path) -> None:
    step = planned()
    found = {3: 0.7, 4: 0.9, 5: float("nan"), 6: 0.8, 8: 0.9}

    def run(steps: int) -> autopar.Checkpointer:
        with opened(tmp_path, step, keep=2, every=2, best=("auc", max)) as checkpoints:
            state, batches = checkpoints.resume(make_state, KEY, batches=batches_of(steps))
            for batch in batches:
                state, _ = step(state, batch)
                checkpoints.step(state)
                if checkpoints.steps in found:
                    checkpoints.evaluated(state, {"auc": jnp.float32(found[checkpoints.steps]), "loss": 1.0})
        return checkpoints

    run(3)
    assert json.loads((tmp_path / "best.json").read_text())["step"] == 3
    checkpoints = run(9)
    assert checkpoints.all_steps() == [4, 8, 9] and checkpoints.best_step() == 4
    assert int(autopar.restore(checkpoints.path(4), jax.eval_shape(make_state, KEY)).state["step"]) == 4
    with autopar.Checkpointer(tmp_path, best=("loss", "min")) as checkpoints:
        checkpoints.resume(make_state, KEY)
        with pytest.raises(autopar.ArgumentsError, match=r"no 'loss', by which checkpoints are kept: \['auc'\]"):
            checkpoints.evaluated(None, {"auc": 1.0})


def test_damaged_checkpoints_are_left_out_and_replaced(tmp_path: Path) -> None:
    step = planned()
    trained(tmp_path, step, 4, every=1)
    for name, file in (("step-00000004", "rows/*emb*/c.0.0"), ("step-00000003", "manifest.json")):
        (path, *_) = (tmp_path / name / "version-000001").glob(file)
        data = path.read_bytes()
        path.write_bytes(data[:-2] + bytes([data[-2] ^ 1]) + data[-1:])
    with pytest.warns(autopar.StateWarning, match="the checkpoint of step [34] is left out: .*isn't what was written"):
        state = trained(tmp_path, step, 6, every=1, keep=2)
    equal(state, undisturbed(6))
    assert sorted(p.name for p in tmp_path.glob("step*")) == ["step-00000005", "step-00000006"]
    for path in tmp_path.glob("step-*/version-*/rows/*emb*/c*"):
        path.unlink()
    with (
        pytest.warns(autopar.StateWarning, match="is left out"),
        pytest.raises(autopar.DamagedCheckpointError, match="step-00000006.*is missing"),
    ):
        trained(tmp_path, step, 7)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Python's own handler, which a process that a shell starts in the background hasn't."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_answered_when_the_state_is_saved(number: int, tmp_path: Path) -> None:
    step, before = planned(), [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else SystemExit) as raised:
        with opened(tmp_path, step) as checkpoints:
            state, _ = checkpoints.resume(make_state, KEY)
            for k in range(9):  # a loop that knows of no interrupts
                if k == 3:
                    signal.raise_signal(number)
                state, _ = step(state, batch_of(8 * k))
                checkpoints.step(state)
    assert number == signal.SIGINT or raised.value.code == 128 + number
    assert checkpoints.all_steps() == [4]
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before
    equal(autopar.restore(checkpoints.path(4), jax.eval_shape(make_state, KEY)).state, undisturbed(4))


@pytest.mark.usefixtures("interruptible")
def test_a_signal_behind_the_last_step_is_answered_in_the_end(tmp_path: Path) -> None:
    step = planned()
    with pytest.raises(KeyboardInterrupt):
        with opened(tmp_path, step) as checkpoints:
            state, _ = checkpoints.resume(make_state, KEY)
            state, _ = step(state, batch_of(0))
            checkpoints.step(state)
            signal.raise_signal(signal.SIGINT)
    assert checkpoints.all_steps() == [1]


def test_a_users_handler_interrupts_between_two_batches(tmp_path: Path) -> None:
    step, before = planned(), signal.signal(signal.SIGUSR1, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            with opened(tmp_path, step) as checkpoints:
                state, batches = checkpoints.resume(make_state, KEY, batches=batches_of(9))
                for batch in batches:
                    if checkpoints.steps == 3:
                        signal.raise_signal(signal.SIGUSR1)
                    state, _ = step(state, batch)
                    checkpoints.step(state)
        assert checkpoints.all_steps() == [4]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_an_interrupt_while_the_state_is_elsewhere_says_what_is_lost(tmp_path: Path) -> None:
    step = planned()
    with (
        pytest.raises(KeyboardInterrupt),
        pytest.warns(autopar.StateWarning, match="the state of step 3 was given to another step"),
        opened(tmp_path, step, every=2) as checkpoints,
    ):
        state, _ = checkpoints.resume(make_state, KEY)
        for _ in range(3):
            state, _ = step(state, batch_of(0))
            checkpoints.step(state)
        state, _ = step(state, batch_of(0))
        raise KeyboardInterrupt
    assert checkpoints.all_steps() == [2]


def test_a_killed_process_leaves_whole_checkpoints(tmp_path: Path) -> None:
    """Killed while a thread writes, at the beginning of the second save."""
    script = """
        import os, signal, sys
        from pathlib import Path
        from autopar.state import checkpoint
        from tests.unit.state.test_checkpointer import planned, trained
        real = checkpoint.write_rows

        def write(version, name, rows):
            found = real(version, name, rows)
            if "step-00000004" in str(version):
                os.kill(os.getpid(), signal.SIGKILL)
            return found

        checkpoint.write_rows = write
        trained(Path(sys.argv[1]), planned(), 9, every=2)
    """
    job = subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(tmp_path)], env=os.environ)
    assert job.returncode == -signal.SIGKILL
    assert sorted(p.name for p in tmp_path.glob("step*")) == ["step-00000002", "step-00000004"]
    with opened(tmp_path, planned()) as checkpoints:
        assert checkpoints.latest_step() == 2
    equal(trained(tmp_path, planned(), 9, every=4, keep=1), undisturbed(9))
    assert sorted(p.name for p in tmp_path.glob("step*")) == ["step-00000009"]


def test_without_a_step_there_are_ordinary_arrays(tmp_path: Path) -> None:
    def run(steps: int) -> Any:
        with autopar.Checkpointer(tmp_path, keep=3, every=2, best=("auc", max), async_save=True) as checkpoints:
            state, _ = checkpoints.resume(make_state, KEY)
            while checkpoints.steps < steps:
                state, _ = jax.jit(train)(state, batch_of(8 * checkpoints.steps))
                checkpoints.step(state)
        return state

    run(3)
    found, expected = run(5), make_state(KEY)
    for k in range(5):
        expected, _ = jax.jit(train)(expected, batch_of(8 * k))
    same(found, expected)


def test_without_a_folder_nothing_is_kept(in_tmp_path: Path) -> None:
    step = planned()
    with opened(None, step, every=2, best=("loss", min)) as checkpoints:
        state, batches = checkpoints.resume(make_state, KEY, batches=batches_of(5))
        for batch in batches:
            state, loss = step(state, batch)
            checkpoints.step(state)
            checkpoints.evaluated(state, {"loss": float(np.mean(loss))})
        checkpoints.save()
    equal(state, undisturbed(5))
    assert checkpoints.steps == 5 and checkpoints.all_steps() == [] and not any(in_tmp_path.iterdir())
    with pytest.raises(autopar.CheckpointError, match=r"Checkpointer\(None\) keeps none"):
        checkpoints.path(5)


def test_a_plan_of_another_step_is_made_again(tmp_path: Path) -> None:
    trained(tmp_path, planned(strategy="ps"), 2)
    text = (tmp_path / "plan.json").read_text()
    (tmp_path / "plan.json").write_text(text.replace('"params/emb"', '"params/other"'))
    step = planned(strategy="ps")
    equal(trained(tmp_path, step, 4), undisturbed(4, strategy="ps"))
    assert step.options.plan is None


def test_bad_arguments(tmp_path: Path) -> None:
    for options, told in (
        ({"keep": 0}, "keep=0: give a whole number"),
        ({"every": 2.5}, "every=2.5: give a whole number"),
        ({"best": "auc"}, "best='auc': give the name of a metric and max or min"),
        ({"best": ("auc", sum)}, "give the name of a metric"),
        ({"best": ("step", max)}, "a metric's name is a text other than 'step'"),
        ({"best": (1, max)}, "a metric's name is a text"),
    ):
        with pytest.raises(autopar.ArgumentsError, match=told):
            autopar.Checkpointer(tmp_path, **options)
    with pytest.raises(autopar.CheckpointError, match="checkpoints are saved to file systems"):
        autopar.Checkpointer("ftp://host/run")
    with autopar.Checkpointer(tmp_path) as checkpoints:
        with pytest.raises(autopar.ArgumentsError, match="batches is a list, which doesn't know where it is"):
            checkpoints.resume(make_state, KEY, batches=[1])
        with pytest.raises(autopar.ArgumentsError, match=r'best=\("auc", max\)'):
            checkpoints.evaluated({}, {"auc": 1.0})
        checkpoints.step({"x": 1})
    with autopar.Checkpointer(tmp_path) as checkpoints:
        with pytest.raises(autopar.CheckpointError, match="has checkpoints: go on from them"):
            checkpoints.step({"x": 1})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "Expecting property name"),
        ("[1]", "an object"),
        ('{"auc": 0.7}', "best.json.step is a whole number, not null"),
        ('{"step": 1.5, "auc": 0.7}', "best.json.step is a whole number, not 1.5"),
        ('{"step": "1", "auc": 0.7}', 'best.json.step is a number, not "1"'),
        ('{"step": true, "auc": 0.7}', "best.json.step is a number, not true"),
        ('{"step": 1, "auc": "0.7"}', 'best.json.auc is a number, not "0.7"'),
        ('{"step": 1, "auc": NaN}', "step 1 can't be the best with auc nan"),
        ('{"step": -1, "auc": 0.7}', "step -1 can't be the best"),
        ('{"step": 1}', "a step and one metric"),
        ('{"step": 1, "auc": 0.7, "loss": 1}', "a step and one metric"),
    ],
)
def test_a_damaged_file_of_the_best(tmp_path: Path, text: str, told: str) -> None:
    """It is an error: where the best isn't known, its checkpoint would be removed."""
    (tmp_path / "best.json").write_text(text)
    with pytest.raises(autopar.CheckpointError, match=f"best.json is damaged: remove it.*{told}"):
        autopar.Checkpointer(tmp_path)
    (tmp_path / "best.json").write_text('{"step": 7, "auc": 1}')
    assert autopar.Checkpointer(tmp_path).best_step() == 7


def test_docstring_examples() -> None:
    found = doctest.testmod(checkpointer)
    assert found.attempted >= 6 and found.failed == 0
