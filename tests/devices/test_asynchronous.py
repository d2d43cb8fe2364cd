"""Pipelines without a flush: each run is its own replay bit for bit, and sees the versions that are simulated."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.cost.stage_time import simulate_versions, stage_times
from autopar.ir.schedule import Task
from autopar.ir.timeline import Run, Whole
from autopar.planning.replay import replay_minibatches
from autopar.run.stage_executor import StageExecutor
from tests.support.explained import explained
from tests.support.meshes import mesh_of
from tests.support.microbatched import batch, language_model, numbers, stages_of
from tests.support.pairs import long

pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="four devices")

SGD = optax.sgd(0.1, momentum=0.9)
CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.01))
Pipeline = autopar.Pipeline


def flat(*given: Any) -> list[Any]:
    return jax.tree.leaves(autopar.materialize(given))


def check_run(planned: Any, make: Callable[[], Any], epochs: int = 2, count: int = 9) -> None:
    """Epochs of a run against their replays."""
    state = make()
    for epoch in range(epochs):
        batches = [batch(100 * epoch + k) for k in range(count)]
        minibatches = [flat(state, given) for given in batches]
        pairs = list(autopar.train_batches(planned, state, batches))
        assert all(given is batches[k] for k, (_, given, _) in enumerate(pairs))
        state, found = pairs[-1][0], [results for _, _, results in pairs]
        assert not any(isinstance(leaf, autopar.PendingArray) for leaf in jax.tree.leaves(state))
        compiled = planned.latest.compiled
        expected = replay_minibatches(compiled.program.staged, compiled.analysed.new_states, minibatches)
        leaves = jax.tree.leaves(state)
        for a, b in zip(leaves, expected[-1], strict=False):
            np.testing.assert_array_equal(numbers(a), numbers(b))
        for mine, theirs in zip(found, expected, strict=True):
            for a, b in zip(jax.tree.leaves(mine), theirs[len(leaves) :], strict=True):
                np.testing.assert_array_equal(numbers(a), numbers(b))


@pytest.mark.parametrize(
    ("pipeline", "options"),
    [
        (Pipeline(4, "async"), {"tied": True, "dropout": 0.2}),
        (Pipeline(3, "stash"), {"dropout": 0.2}),
        (Pipeline(4, "spectrain"), {}),
        (Pipeline(2, "spectrain", replicas=(2, 1)), {"tied": True}),
        (Pipeline(3, "spectrain"), {"tx": CLIPPED, "dropout": 0.2}),
        long(Pipeline(2, "stash", replicas=(1, 3)), {}),
        (Pipeline(3, "spectrain", slack=1), {"tied": True}),
        long(Pipeline(2, "stash", replicas=(2, 1), slack=2), {}),
        (Pipeline(2, "spectrain", remat=True), {"stacked": True, "tx": optax.adamw(0.01)}),
        long(Pipeline(1, "spectrain"), {}),
        long(Pipeline(2, "stash", replicas=2), {"tied": True, "dropout": 0.2}),
        long(Pipeline(2, "async", replicas=(1, 2)), {"tx": CLIPPED}),
        long(Pipeline(4, "stash"), {"tx": CLIPPED, "tied": True}),
        long(Pipeline(3, "async"), {"tx": optax.adagrad(0.1)}),
    ],
    ids=lambda x: f"{x.schedule} {x}" if isinstance(x, Pipeline) else "-".join(x),
)
def test_a_run_is_its_replay(pipeline: Pipeline, options: dict[str, Any]) -> None:
    step, make = language_model(**{"tx": SGD, **options})
    check_run(autopar.parallelize(step, pipeline=pipeline), make)


def test_updates_that_wait_for_all_stages_are_told() -> None:
    """By a norm of all gradients; by how much is what tasks miss more than without it."""
    notes, missed = {}, {}
    for name, tx in (("clipped", optax.chain(optax.clip_by_global_norm(0.5), SGD)), ("plain", SGD)):
        step, make = language_model(tx)
        planned = autopar.parallelize(step, pipeline=Pipeline(3, "spectrain"))
        notes[name] = " ".join(str(autopar.explain(planned, make(), batch(0))).split())
        calls = planned.plan.pipeline.calls
        missed[name] = [calls.missed(k)[0] for k in range(3)]
    more = [a - b for a, b in zip(missed["clipped"], missed["plain"], strict=True)]
    assert more[0] == 0 < more[1] < more[2]
    assert "stages 1, 2 need a value of all stages" in notes["clipped"]
    assert f"come {more[1]} to {more[2]} calls later" in notes["clipped"]
    assert "staler than it says" in notes["clipped"] and "need a value of all stages" not in notes["plain"]


@pytest.mark.parametrize(
    ("pipeline", "sampled"),
    [
        (Pipeline(3, "spectrain"), False),
        (Pipeline(2, "stash", replicas=(2, 1)), False),
        long(Pipeline(2, "async"), True),
        (Pipeline(3, "spectrain"), True),
    ],
)
def test_tables_on_their_touched_rows(pipeline: Pipeline, sampled: bool) -> None:
    """A table is at one stage, which gives its rows to others that look words up in it."""
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adagrad(1e-2))
    step, make = language_model(tx, sampled=sampled)
    planned = autopar.parallelize(step, pipeline=pipeline, strategy="ps")
    check_run(planned, make)
    assert planned.plan.table("params/words").lifted


@pytest.mark.parametrize(
    "pipeline",
    [
        Pipeline(stages_of(4), "async"),
        Pipeline(stages_of(3), "stash"),
        Pipeline(stages_of(2), "async", replicas=(2, 1), slack=1),
        Pipeline(stages_of(3), "stash", slack=2),
    ],
)
def test_tasks_see_the_versions_that_are_simulated(pipeline: Pipeline) -> None:
    step, make = language_model(SGD)
    planned = autopar.parallelize(step, pipeline=pipeline)
    planned(make(), batch(0))
    plan, timeline = planned.latest.compiled.plan.pipeline, planned.latest.runner.timeline
    seen = simulate_versions(plan.calls, stage_times(plan), timeline.microbatches).seen
    runs = [action for action in timeline.actions if isinstance(action, Run) and action.program.phase in ("F", "B")]
    checked = 0
    for action in runs:
        versions = {value.version for value in action.reads if isinstance(value.part, Whole)}
        kind: Any = "F" if plan.calls.stashes else action.program.phase
        assert versions <= {seen[Task(kind, action.program.stage, action.microbatch)]}
        checked += bool(versions)
    assert checked > len(runs) // 2


def test_one_stage_is_the_plain_step() -> None:
    """Its updates are never late, and nothing is predicted. Sums of whole numbers are exact in whatever order."""

    def step(state: Any, x: jax.Array) -> Any:
        def loss_of(w: Any) -> jax.Array:
            return jnp.sum((x @ w["a"]) @ w["b"])

        loss, grads = jax.value_and_grad(loss_of)(state)
        return jax.tree.map(lambda w, g: w - g / 256, state, grads), loss

    state = {"a": jnp.eye(8), "b": jnp.ones((8, 4))}
    planned, plain = autopar.parallelize(step, pipeline=Pipeline(1, "spectrain")), jax.jit(step)
    ours, theirs = jax.tree.map(jnp.copy, state), state
    for k in range(4):
        x = np.random.default_rng(k).integers(-2, 3, (16, 8)).astype(np.float32)
        ours, a = planned(ours, x)
        theirs, b = plain(theirs, x)
        assert float(a) == float(b)
    for a, b in zip(jax.tree.leaves(autopar.drain(ours)), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_states_are_drained_when_they_are_read(tmp_path: Path) -> None:
    """Reading, saving, another step: all minibatches that came before have gone through, and training goes on."""
    step, make = language_model(SGD)
    pipeline = Pipeline(stages_of(2), "spectrain")
    planned, state = autopar.parallelize(step, pipeline=pipeline), make()
    for k in range(3):
        state, results = planned(state, batch(k))
        assert (results is None) == (k < 2) and autopar.finished_minibatch(state) == (None if k < 2 else 0)
    old, words = state, state["params"]["words"]
    assert isinstance(words, autopar.PendingArray) and "on their way" in repr(words) and words.shape == (30, 8)
    assert not isinstance(state["key"], autopar.PendingArray)  # no gradient reaches it
    read = np.asarray(words)
    autopar.save(tmp_path / "a", state)
    np.testing.assert_array_equal(read, np.asarray(autopar.drain(state)["params"]["words"]))
    found = autopar.restore(tmp_path / "a", make(), step=planned, batch=batch(0)).state
    np.testing.assert_array_equal(read, np.asarray(found["params"]["words"]))
    state, results = planned(state, batch(3))
    assert results is None and autopar.finished_minibatch(state) is None
    with pytest.raises(autopar.DonatedStateError, match="later"):
        np.asarray(old["params"]["words"])
    other = autopar.parallelize(step, pipeline=Pipeline(3, microbatches=2))
    back, _ = other(found, batch(3))
    state = autopar.drain(state)
    for a, b in zip(jax.tree.leaves(state["params"]), jax.tree.leaves(back["params"]), strict=True):
        np.testing.assert_allclose(numbers(a), numbers(b), rtol=1e-3, atol=1e-4)  # one minibatch: nothing is late


def test_other_functions_take_a_state_that_is_on_its_way() -> None:
    """An evaluation reads it, planned or under `jax.jit`, and so finishes its minibatches."""
    step, make = language_model(SGD)
    planned, state = autopar.parallelize(step, pipeline=Pipeline(stages_of(2), "async")), make()
    for k in range(3):
        state, _ = planned(state, batch(k))

    def sum_of(params: Any) -> jax.Array:
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(params))

    under_jit = jax.jit(sum_of)(state["params"])
    found = autopar.parallelize(sum_of)(state["params"])
    params = autopar.materialize(state["params"])
    assert autopar.finished_minibatch(state) == 0
    for each in (found, under_jit):
        np.testing.assert_allclose(float(each), float(sum_of(params)), rtol=1e-6)


def test_a_drain_that_fails_is_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    step, make = language_model(SGD)
    planned = autopar.parallelize(step, pipeline=Pipeline(stages_of(2), "async"))
    state, _ = planned(make(), batch(0))

    def fail(*_: Any) -> None:
        raise MemoryError("no more")

    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(StageExecutor, "_run", fail)
        autopar.drain(state)
    with pytest.raises(autopar.DonatedStateError):
        autopar.drain(state)


def test_asynchronous_stages_are_asked_for() -> None:
    step, make = language_model(SGD)
    for options, schedules in (({}, {"1f1b", "zero-bubble", "interleaved"}), ({"asynchronous": True}, {"spectrain"})):
        planned = autopar.parallelize(step, pipeline=Pipeline("auto", "auto", "auto", **options), mesh=mesh_of(4))
        plan = autopar.plan(planned, make(), batch(0)).pipeline
        assert plan.schedule in schedules


def test_batches_may_be_filled_anew() -> None:
    """A minibatch that is on its way keeps what it was given."""
    step, make = language_model(SGD)
    finals = []
    for shared in (False, True):
        planned, state = autopar.parallelize(step, pipeline=Pipeline(stages_of(2), "async")), make()
        buffer = batch(0)
        for k in range(4):
            given = batch(k)
            if shared:
                for name, array in given.items():
                    buffer[name][...] = array
                given = buffer
            state, _ = planned(state, given)
            if shared:
                for array in buffer.values():
                    array[...] = 0
        finals.append(autopar.materialize(state["params"]))
    for a, b in zip(*map(jax.tree.leaves, finals), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_what_is_told(tmp_path: Path) -> None:
    step, make = language_model(SGD)
    planned = autopar.parallelize(step, pipeline=Pipeline(stages_of(4), "spectrain"))
    text = re.sub(r"\s+", " ", explained(planned, make(), batch(0)))
    assert "F predicts" in text and "by eq. 5" in text and "another function than the step on one device" in text
    state, _ = planned(make(), batch(0))
    verified = autopar.verify(planned, make(), batch(0), steps=6)
    assert verified.ok and "replay" in str(verified)
    assert autopar.check(planned, state, batch(0)).ok
    made = autopar.plan(planned, make(), batch(0))
    assert made.pipeline.ahead and made.pipeline.updates == (3, 2, 1, 0)
    made.save(tmp_path / "plan.json")
    again = autopar.parallelize(step, plan=autopar.Plan.load(tmp_path / "plan.json"))
    assert autopar.plan(again, make(), batch(0)).pipeline.ahead == made.pipeline.ahead
    assert (
        autopar.report(made).figures["schedule"]
        and len(autopar.simulate(made, cluster=autopar.Cluster.named("dgx-h100")).times) == 1
    )
    stashed = autopar.plan(autopar.parallelize(step, pipeline=Pipeline(stages_of(4), "stash")), make(), batch(0))
    assert "stash" in str(stashed.diff(made))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "async", "microbatches": 4}, "microbatches=4 with schedule='async'"),
        ({"schedule": "stash", "statistics": "microbatch"}, "statistics='microbatch' with schedule='stash'"),
        ({"schedule": "1f1b", "asynchronous": True}, "asynchronous=True with schedule='1f1b'"),
        ({"schedule": "spectrain", "stages_per_device": 2}, "stages_per_device=2 with schedule='spectrain'"),
        ({"schedule": "async", "ahead": [(1, 0)] * 2}, "which predicts no weights"),
        ({"schedule": "1f1b", "slack": 1}, "slack=1 with schedule='1f1b', which isn't asynchronous"),
        ({"schedule": "async", "slack": -1}, "slack=-1: give a number of minibatches, 0 or more"),
        ({"schedule": "spectrain", "ahead": [(1, 0)]}, "give two numbers for each of 2 stages"),
        ({"asynchronous": 1, "schedule": "auto"}, "asynchronous=1: give True or False"),
    ],
)
def test_what_does_not_go_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(autopar.ArgumentsError, match=re.escape(message)):
        Pipeline(2, **options)


def test_a_state_that_each_stage_reads_is_refused() -> None:
    """A factor that depends on gradients and is read by all stages: which version would they see?"""

    def step(state: Any, x: jax.Array) -> Any:
        weights, scale = state

        def loss_of(weights: Any) -> jax.Array:
            y = x
            for w in weights:
                y = jnp.tanh(y @ w)
            return scale * jnp.mean(y**2)

        loss, grads = jax.value_and_grad(loss_of)(weights)
        return (
            [w - g / scale for w, g in zip(weights, grads, strict=True)],
            scale * (1 + 0.1 * jnp.isfinite(loss)),
        ), loss

    planned = autopar.parallelize(step, pipeline=Pipeline(3, "async"))
    with pytest.raises(autopar.StrategyError, match=r"stage \d reads 1, which .*synchronous schedule"):
        planned(([jnp.eye(4) for _ in range(3)], jnp.float32(2.0)), np.ones((8, 4), np.float32))


def test_timelines_that_are_wrong_are_refused() -> None:
    """An update seen early, a version dropped while a backward needs it, one that is kept over the end."""
    from autopar.ir.timeline import asynchronous_timeline, verify_timeline, verify_versions

    step, make = language_model(SGD)
    planned = autopar.parallelize(step, pipeline=Pipeline(stages_of(3), "stash"))
    planned(make(), batch(0))
    staged = planned.latest.compiled.program.staged
    good = asynchronous_timeline(staged, 6)
    actions = list(good.actions)
    names = {(v.var, v.version): v for a in actions if isinstance(a, Run) for v in (*a.reads, *a.writes)}

    def with_version(action: Run, shift: int) -> Run:
        reads = tuple(
            names.get((v.var, v.version + shift), v) if isinstance(v.part, Whole) and v.var in staged.homes else v
            for v in action.reads
        )
        return dataclasses.replace(action, reads=reads)

    def replaced(k: int, action: Any) -> Any:
        return dataclasses.replace(good, actions=(*actions[:k], action, *actions[k + 1 :]))

    def find(phase: str, minibatch: int) -> int:
        return next(
            k
            for k, a in enumerate(actions)
            if isinstance(a, Run) and (a.program.phase, a.program.stage, a.microbatch) == (phase, 0, minibatch)
        )

    for phase, minibatch, shift in (("B", 3, 1), ("F", 4, -1), ("F", 4, 1)):
        k = find(phase, minibatch)
        wrong = replaced(k, with_version(actions[k], shift))
        with pytest.raises(AssertionError, match=r"sees version|reads"):
            verify_timeline(wrong)
            verify_versions(wrong, stashes=True)
    verify_versions(good, stashes=True)
    with pytest.raises(AssertionError, match="sees version"):
        verify_versions(good, stashes=False)
    update = find("update", 1)
    early = find("B", 3)
    drops = list(good.drops)
    moved = [drop for drop in drops[early] if drop[1].var in staged.homes]
    assert update < early and moved, "a backward lets its version go"
    drops[early] = tuple(drop for drop in drops[early] if drop not in moved)
    drops[update] = (*drops[update], *moved)
    with pytest.raises(AssertionError, match="dropped before"):
        verify_timeline(dataclasses.replace(good, drops=tuple(drops)))
