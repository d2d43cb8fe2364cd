"""`Checkpointer`: how a training ends, by Ctrl-C, SIGTERM and saves that fail, and what `resume` then finds."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import autopar
from autopar.batches.on_demand import BatchesOnDemand
from autopar.integrations import nnx as anx
from autopar.state import checkpointer
from tests.support.object_store import ObjectStore
from tests.unit.state.test_checkpointer import (
    KEY,
    URL,
    batches_of,
    equal,
    make_state,
    opened,
    planned,
    trained,
    undisturbed,
)


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Python's own handler, which a process that a shell starts in the background hasn't."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_in_a_loop_over_batches_waits_for_its_step_once(presses: int, tmp_path: Path) -> None:
    step, done = planned(), []
    with pytest.raises(KeyboardInterrupt):
        with opened(tmp_path, step) as checkpoints:
            state, batches = checkpoints.resume(make_state, KEY, batches=batches_of(9))
            for batch in batches:
                if checkpoints.steps == 3:
                    for _ in range(presses):
                        signal.raise_signal(signal.SIGINT)
                        time.sleep(checkpointer.SECOND_S + 0.05)
                    done.append("the second one went through")
                state, _ = step(state, batch)
                checkpoints.step(state)
    assert checkpoints.all_steps() == [4 if presses == 1 else 3] and len(done) == (presses == 1)
    equal(trained(tmp_path, planned(), 6), undisturbed(6))


def test_ctrl_c_while_files_are_waited_for_keeps_what_is_written(store: ObjectStore) -> None:
    goes_on, written = threading.Event(), list[str]()

    def slowly(method: str, name: str) -> None:
        if method == "PUT" and name.endswith("/zarr.json"):
            written.append(name)
            goes_on.wait()

    def press() -> None:
        time.sleep(0.1)  # until files are waited for
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        while not checkpoints._leaving._noted:  # the second one comes so long after this one is seen
            time.sleep(1e-3)
        time.sleep(checkpointer.SECOND_S + 0.05)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        time.sleep(0.2)
        goes_on.set()

    store.watch = slowly
    step = planned()
    with pytest.raises(KeyboardInterrupt):
        with opened(URL, step) as checkpoints:
            state, batches = checkpoints.resume(make_state, KEY, batches=batches_of(9))
            state, _ = step(state, next(batches))
            checkpoints.step(state)
            checkpoints.save()
            threading.Thread(target=press).start()
            checkpoints.wait()
            raise AssertionError("it was interrupted")
    assert checkpoints.all_steps() == [1] and goes_on.is_set()
    assert written and len(set(written)) == len(written), "each array is written once"
    equal(trained(URL, planned(), 3), undisturbed(3))


def test_the_last_state_is_saved_though_the_save_before_it_failed(store: ObjectStore) -> None:
    trained_all = threading.Event()

    def full_once(method: str, name: str) -> int | None:
        if method != "PUT" or "step-00000002" not in name or "/rows/" not in name:
            return None
        trained_all.wait(60)  # the thread isn't done before the end
        return 403

    store.watch, step = full_once, planned()
    with pytest.warns(autopar.StateWarning, match="an earlier save failed, the one of step 3 didn't: .*PERMISSION"):
        with opened(URL, step, every=2) as checkpoints:
            state, batches = checkpoints.resume(make_state, KEY, batches=batches_of(3))
            for batch in batches:
                state, _ = step(state, batch)
                checkpoints.step(state)
            trained_all.set()
    assert checkpoints.all_steps() == [3] and not any("step-00000002" in name for name in store.objects)
    store.watch = lambda method, name: 403 if method == "PUT" and "/rows/" in name else None
    with pytest.raises(autopar.CheckpointError, match="PERMISSION_DENIED"):
        trained(URL, planned(), 5, every=4)


def test_a_best_state_that_could_not_be_saved_is_none(store: ObjectStore) -> None:
    fails = False
    store.watch = lambda method, name: 403 if fails and method == "PUT" and "/rows/" in name else None
    with autopar.Checkpointer(URL, best=("auc", max), async_save=False) as checkpoints:
        state, _ = checkpoints.resume(lambda: {"w": jnp.zeros(3)})
        for auc in (0.5, 0.9, 0.8):
            state = {"w": state["w"] + 1}
            checkpoints.step(state)
            fails = auc == 0.9
            if fails:
                with pytest.raises(autopar.CheckpointError, match="PERMISSION_DENIED"):
                    checkpoints.evaluated(state, {"auc": auc})
                assert checkpoints.best_step() == 1
            else:
                checkpoints.evaluated(state, {"auc": auc})
    assert checkpoints.best_step() == 3 and 2 not in checkpoints.all_steps()


@pytest.mark.parametrize("value", [0, 0.0, np.zeros(2), np.zeros(2, np.float32)])
def test_numbers_and_numpy_arrays_of_a_state_come_back_as_they_were(value: Any, tmp_path: Path) -> None:
    def make(key: Any) -> Any:
        return {"w": jax.random.normal(key, (3,)), "n": value}

    for k in range(2):
        with autopar.Checkpointer(tmp_path, every=1) as checkpoints:
            state, _ = checkpoints.resume(make, KEY)
            assert type(state["n"]) is type(value) and np.all(state["n"] == k)
            state = {"w": state["w"] + 1, "n": type(value)(k + 1) if np.isscalar(value) else state["n"] + 1}
            checkpoints.step(state)


def test_jax_is_asked_for_preemption_by_one_count_for_all_trainings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was told of it before its first question leaves at that: the numbers mustn't leave any out."""
    asked: list[int] = []
    monkeypatch.setattr(checkpointer.jax_compat, "reached_preemption", asked.append)
    trained(tmp_path, planned(), 3)
    trained(tmp_path, planned(), 5)
    assert len(asked) == 5 and asked == list(range(asked[0], asked[0] + 5))


def test_a_damaged_best_checkpoint_is_forgotten(tmp_path: Path) -> None:
    def run(steps: int, value: float, metric: tuple[str, Any] = ("auc", max)) -> autopar.Checkpointer:
        step = planned()
        with opened(tmp_path, step, keep=2, best=metric) as checkpoints:
            state, batches = checkpoints.resume(make_state, KEY, batches=batches_of(steps))
            for batch in batches:
                state, _ = step(state, batch)
                checkpoints.step(state)
            checkpoints.evaluated(state, {metric[0]: value})
        return checkpoints

    run(2, 0.5)
    assert run(4, 0.9).best_step() == 4
    manifests = [tmp_path / f"step-{n:08d}" / "version-000001" / "manifest.json" for n in (2, 4)]
    whole = [manifest.read_text() for manifest in manifests]
    for manifest in manifests:
        manifest.write_text("{")
    with pytest.warns(autopar.StateWarning, match="is left out"), pytest.raises(autopar.DamagedCheckpointError):
        run(6, 0.6)
    assert json.loads((tmp_path / "best.json").read_text())["step"] == 4  # nothing was restored: it may come back
    manifests[0].write_text(whole[0])
    with pytest.warns(autopar.StateWarning, match="step 4 is left out"):
        assert run(6, 0.6).best_step() == 6
    assert json.loads((tmp_path / "best.json").read_text()) == {"step": 6, "auc": 0.6}
    checkpoints = run(8, 0.7, ("loss", min))  # which isn't compared with the other metric
    assert json.loads((tmp_path / "best.json").read_text()) == {"step": 8, "loss": 0.7}
    assert checkpoints.all_steps() == [6, 8]


def test_a_plan_that_cannot_be_read_is_made_again(tmp_path: Path) -> None:
    trained(tmp_path, planned(), 2)
    (tmp_path / "plan.json").write_text("{")
    with pytest.warns(autopar.StateWarning, match=r"the step is planned anew: .*plan\.json"):
        equal(trained(tmp_path, planned(), 4), undisturbed(4))


def test_what_there_is_not_to_save(tmp_path: Path) -> None:
    with opened(tmp_path, planned()) as checkpoints:
        with pytest.raises(autopar.ArgumentsError, match=r"workers of sync=Async\(\) and Elastic\(\) do steps"):
            checkpoints.resume(make_state, KEY, batches=BatchesOnDemand.__new__(BatchesOnDemand))
        checkpoints.resume(make_state, KEY)
        with pytest.raises(autopar.CheckpointError, match="there is no state to save yet"):
            checkpoints.save()


class Model(nnx.Module):
    """A table that waits with its rows."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.table, self.layer = nnx.Embed(9_000, 8, rngs=rngs), nnx.Linear(8, 1, rngs=rngs)


def test_objects_of_nnx(tmp_path: Path) -> None:
    tx = optax.adamw(1e-2)

    def trained_nnx(folder: Path, steps: int) -> Any:
        model = Model()
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        with autopar.Checkpointer(folder, every=2) as checkpoints:
            state, _ = checkpoints.resume(lambda: nnx.state((model, optimizer)))
            nnx.update((model, optimizer), state)
            while checkpoints.steps < steps:
                step(model, optimizer, np.arange(4, dtype=np.int32) * 7 + checkpoints.steps)
                checkpoints.step(nnx.state((model, optimizer)))
        return autopar.materialize(nnx.state(model))

    @anx.parallelize(strategy="ps")
    def step(model: Model, optimizer: nnx.Optimizer, ids: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda m: (m.layer(m.table(ids)) ** 2).mean())(model)
        optimizer.update(model, grads)
        return loss

    with pytest.raises(autopar.ArgumentsError, match=r"not a NnxStep.*of nnx objects keep nnx.state\(...\)"):
        autopar.Checkpointer(tmp_path / "it", step=step)
    trained_nnx(tmp_path / "it", 3)
    found, expected = trained_nnx(tmp_path / "it", 6), trained_nnx(tmp_path / "other", 6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-6, 1e-7), found, expected)
