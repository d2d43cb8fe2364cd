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
from autopar.cost.stage_time import pipeline_memory, stage_times
from autopar.cost.versions import simulate_versions
from autopar.ir.schedule import Task
from autopar.ir.timeline import Run, Whole
from autopar.planning.replay import replay_minibatches
from autopar.run.stage_executor import StageExecutor
from tests.support.explained import explained
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
        pairs = list(autopar.paired(planned, state, batches))
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
        (Pipeline(2, "stash", replicas=(1, 3)), {}),
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


def linear(stages: int, rate: float = 0.5) -> tuple[Any, Any, np.ndarray]:
    """A step whose gradients are constant: each weight moves by `rate` in every update. It returns what the forward saw
    of each, of each example."""

    def step(state: Any, x: jax.Array) -> Any:
        def loss_of(weights: Any) -> Any:
            y, seen = x, []
            for w in weights:
                seen.append(jnp.mean(x * w, -1))
                y = y + x * w
            return jnp.mean(jnp.sum(y, -1)), jnp.stack(seen, -1)

        (loss, seen), grads = jax.value_and_grad(loss_of, has_aux=True)(state)
        return [w - rate * g for w, g in zip(state, grads, strict=True)], (seen, loss)

    return step, [jnp.zeros(3) for _ in range(stages)], np.ones((8, 3), np.float32)


@pytest.mark.parametrize("schedule", ["spectrain", "async"])
def test_constant_gradients_are_predicted_exactly(schedule: str) -> None:
    """A forward sees what the weights are when its minibatch is done, once there was an update; else they are late."""
    step, state, x = linear(4)
    pipeline = Pipeline([[str(k)] for k in range(4)], schedule)
    planned = autopar.parallelize(step, pipeline=pipeline)
    batches = [x] * 16
    seen = [np.asarray(results[0])[0] for _, _, results in autopar.paired(planned, state, batches)]
    plan = planned.latest.compiled.plan.pipeline
    ahead = plan.ahead or ((0, 0),) * 4
    for m, weights in enumerate(seen):
        versions = [plan.calls.version("F", k, m) for k in range(4)]
        expected = [-0.5 * (v + ahead[k][0] * (v > 0)) for k, v in enumerate(versions)]
        np.testing.assert_array_equal(weights, expected)
    if schedule == "spectrain":
        assert max(s for s, _ in ahead) >= 2
        # Stage 0's own backward is the last one: there the weights have the updates of all minibatches before.
        np.testing.assert_array_equal([weights[0] for weights in seen[4:]], [-0.5 * m for m in range(4, len(seen))])


def test_touched_rows_are_predicted() -> None:
    """A row that the last update touched is predicted by its change, others are read as they are."""

    def step(state: Any, batch: Any) -> Any:
        x, ids = batch

        def loss_of(state: Any) -> Any:
            rows = state["rows"][ids]  # [B, 2, 3]
            return jnp.mean(jnp.sum(rows, (1, 2)) + jnp.sum(x * state["w"], -1)), rows

        (loss, rows), grads = jax.value_and_grad(loss_of, has_aux=True)(state)
        return jax.tree.map(lambda w, g: w - 0.5 * g, state, grads), (rows, loss)

    state = {"rows": jnp.zeros((50, 3)), "w": jnp.zeros(3)}
    pipeline = Pipeline([["rows"], ["w"]], "spectrain", ahead=[(2, 0), (0, 0)])
    planned = autopar.parallelize(step, pipeline=pipeline, strategy="ps")
    touched = [(7, 3), (3, 9), (3, 9), (9, 0), (49, 3), (3, 49), (3, 49)] * 2
    batches = [(np.ones((4, 3), np.float32), np.tile(np.asarray(ids, np.int32), (4, 1))) for ids in touched]
    seen = [np.asarray(rows)[0, :, 0] for _, _, (rows, _) in autopar.paired(planned, state, batches)]
    plan = planned.latest.compiled.plan
    assert plan.table("rows").lifted
    for m, rows in enumerate(seen):
        done = touched[: plan.pipeline.calls.version("F", 0, m)]
        expected = [
            -0.5 * (sum(r in ids for ids in done) + 2 * (done[-1:] != [] and r in done[-1])) for r in touched[m]
        ]
        np.testing.assert_array_equal(rows, expected)


def test_a_wrong_prediction_is_seen() -> None:
    """Another s than the counted one is another function."""
    step, state, x = linear(2)
    stages = [["0"], ["1"]]
    found = []
    for ahead in (None, [(2, 0), (0, 0)]):
        planned = autopar.parallelize(step, pipeline=Pipeline(stages, "spectrain", ahead=ahead))
        found.append(
            [
                np.asarray(seen)[0, 0]
                for _, _, (seen, _) in autopar.paired(planned, [jnp.copy(w) for w in state], [x] * 6)
            ]
        )
    assert found[0][2:] == [-0.5 * m for m in range(2, 6)] and found[1][2:] == [-0.5 * (m + 1) for m in range(2, 6)]


def test_states_are_drained_when_they_are_read(tmp_path: Path) -> None:
    """Reading, saving, another step: all minibatches that came before have gone through, and training goes on."""
    step, make = language_model(SGD)
    pipeline = Pipeline(stages_of(2), "spectrain")
    planned, state = autopar.parallelize(step, pipeline=pipeline), make()
    for k in range(3):
        state, results = planned(state, batch(k))
        assert (results is None) == (k < 2) and autopar.ended(state) == (None if k < 2 else 0)
    old, words = state, state["params"]["words"]
    assert isinstance(words, autopar.PendingArray) and "on their way" in repr(words) and words.shape == (30, 8)
    assert not isinstance(state["key"], autopar.PendingArray)  # no gradient reaches it
    read = np.asarray(words)
    autopar.save(tmp_path / "a", state)
    np.testing.assert_array_equal(read, np.asarray(autopar.drain(state)["params"]["words"]))
    found = autopar.restore(tmp_path / "a", make(), step=planned, batch=batch(0)).state
    np.testing.assert_array_equal(read, np.asarray(found["params"]["words"]))
    state, results = planned(state, batch(3))
    assert results is None and autopar.ended(state) is None
    with pytest.raises(autopar.DonatedStateError, match="later"):
        np.asarray(old["params"]["words"])
    other = autopar.parallelize(step, pipeline=Pipeline(3, microbatches=2))
    back, _ = other(found, batch(3))
    state = autopar.drain(state)
    for a, b in zip(jax.tree.leaves(state["params"]), jax.tree.leaves(back["params"]), strict=True):
        np.testing.assert_allclose(numbers(a), numbers(b), rtol=1e-3, atol=1e-4)  # one minibatch: nothing is late


def test_other_functions_take_a_state_that_is_on_its_way() -> None:
    """An evaluation that is planned reads it, and so finishes its minibatches; `jax.jit` refuses it."""
    step, make = language_model(SGD)
    planned, state = autopar.parallelize(step, pipeline=Pipeline(stages_of(2), "async")), make()
    for k in range(3):
        state, _ = planned(state, batch(k))

    def sum_of(params: Any) -> jax.Array:
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(params))

    with pytest.raises(TypeError, match="PendingArray"):
        jax.jit(sum_of)(state["params"])
    found = autopar.parallelize(sum_of)(state["params"])
    params = autopar.materialize(state["params"])
    assert autopar.ended(state) == 0
    np.testing.assert_allclose(float(found), float(sum_of(params)), rtol=1e-6)


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


def test_versions_take_memory() -> None:
    """A stash holds a version of stage 0's weights for each stage behind it, of whole tables, too; a prediction the
    last change of each, of tables' touched rows."""
    step, make = language_model(optax.adagrad(1e-2))
    for strategy in ("auto", "ps"):
        plans = {
            schedule: autopar.plan(
                autopar.parallelize(step, pipeline=Pipeline(stages_of(3), schedule), strategy=strategy),
                make(),
                batch(0),
            ).pipeline
            for schedule in ("async", "stash", "spectrain")
        }
        sizes = {schedule: pipeline_memory(plan) for schedule, plan in plans.items()}
        weights, sums = (
            [getattr(stage, name) for stage in plans["async"].stages] for name in ("weight_bytes", "gradient_bytes")
        )
        assert (sums[0] != weights[0]) == (strategy == "ps") and sums[1] == weights[1]
        more = {name: [a - b for a, b in zip(size, sizes["async"], strict=True)] for name, size in sizes.items()}
        assert more["stash"] == [2 * weights[0], weights[1], 0]
        assert more["spectrain"] == [w * any(s) for w, s in zip(sums, plans["spectrain"].ahead, strict=True)]


def test_asynchronous_stages_are_asked_for() -> None:
    step, make = language_model(SGD)
    for options, schedules in (({}, {"1f1b", "zero-bubble", "interleaved"}), ({"asynchronous": True}, {"spectrain"})):
        planned = autopar.parallelize(step, pipeline=Pipeline("auto", "auto", "auto", **options))
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


def test_staleness_is_measured() -> None:
    """Weights that move by 0.5 in each update are s times that from where they will be; predicted they are there."""
    step, state, x = linear(4)
    planned = autopar.parallelize(step, pipeline=Pipeline([[str(k)] for k in range(4)], "spectrain"))
    plan = autopar.plan(planned, state, x)
    found = autopar.staleness(planned, state, [x] * 9)
    assert [(t.stage, t.kind, t.ahead) for t in found.tasks] == [
        (k, kind, s) for k, each in enumerate(plan.pipeline.ahead) for kind, s in zip("FB", each, strict=True) if s
    ]
    for task in found.tasks:
        assert task.stale == (0.5 * task.ahead,) * (9 - task.ahead) and set(task.predicted) == {0.0}
    assert re.search(r"0 +F +3 +1.50e\+00 +0.00e\+00 +100%", str(found))
    report = autopar.report(plan, staleness=found)
    assert "staleness" in report.figures and len(report.tables["versions"]) == 4
    assert report.tables["staleness"][0]["RMSE stale"] == 1.5
    with pytest.raises(autopar.ArgumentsError, match="4 batches; versions are compared over 3 updates"):
        autopar.staleness(planned, state, [x] * 4)
    synchronous = autopar.parallelize(step, pipeline=Pipeline(2, microbatches=2))
    with pytest.raises(autopar.ArgumentsError, match="no asynchronous pipeline"):
        autopar.staleness(synchronous, state, [x] * 9)


@pytest.mark.parametrize(
    ("schedule", "told"),
    [
        ("spectrain", "miss 2 updates of .* predict the weights 3 and 1 updates ahead$"),
        ("async", "By async its forwards miss 2 updates of earlier minibatches, its backwards none$"),
        ("stash", "its backwards 2, for which 2 older versions of the stage's weights"),
        ("1f1b", "By 1f1b no task misses an update"),
    ],
)
def test_why_a_stage_has_no_other_schedule(schedule: str, told: str) -> None:
    step, make = language_model(SGD)
    pipeline = Pipeline(stages_of(4), "spectrain", ahead=[(3, 0), (3, 1), (2, 1), (2, 2)])
    plan = autopar.plan(autopar.parallelize(step, pipeline=pipeline), make(), batch(0))
    assert re.search(told, str(autopar.why(plan, plan.pipeline.stages[1].weights[0], schedule)))
    with pytest.raises(autopar.ArgumentsError, match="no weight of a stage"):
        autopar.why(plan, "nothing", schedule)


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
    from autopar.ir.asynchronous_timeline import asynchronous_timeline, verify_versions
    from autopar.ir.timeline import verify_timeline

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
