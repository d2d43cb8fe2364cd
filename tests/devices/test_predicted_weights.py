"""Versions in pipelines without a flush: what is predicted, how stale weights are, what versions take."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.cost.rates import StageRates
from autopar.cost.stage_time import pipeline_memory
from autopar.passes.split_pipeline import fitting_slack
from tests.support.machines import on_machine
from tests.support.microbatched import batch, language_model, stages_of

pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="four devices")

SGD = optax.sgd(0.1, momentum=0.9)
Pipeline = autopar.Pipeline


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
    seen = [np.asarray(results[0])[0] for _, _, results in autopar.train_batches(planned, state, batches)]
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
    seen = [np.asarray(rows)[0, :, 0] for _, _, (rows, _) in autopar.train_batches(planned, state, batches)]
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
                for _, _, (seen, _) in autopar.train_batches(planned, [jnp.copy(w) for w in state], [x] * 6)
            ]
        )
    assert found[0][2:] == [-0.5 * m for m in range(2, 6)] and found[1][2:] == [-0.5 * (m + 1) for m in range(2, 6)]


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


@pytest.mark.parametrize("schedule", ["stash", "spectrain"])
def test_divided_weights(schedule: str) -> None:
    """Changes are divided as their weights are, and a replay's products as the devices' are."""

    def step(state: Any, ids: Any) -> Any:
        def loss_of(state: Any) -> jax.Array:
            return jnp.mean((jnp.tanh(jnp.tanh(state["rows"][ids] @ state["a"]) @ state["b"]) @ state["c"]) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(state)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), loss

    shapes = {"rows": (500, 64), "a": (64, 256), "b": (256, 64), "c": (64, 64)}
    state = {name: 0.1 * jax.random.normal(jax.random.key(0), shape) for name, shape in shapes.items()}
    kinds = {"axis_types": (jax.sharding.AxisType.Auto,) * 2, "devices": jax.devices()[:4]}
    planned = autopar.parallelize(
        step,
        strategy={"rows": "ps", "**": "tensor"},
        mesh=jax.make_mesh((2, 2), ("data", "model"), **kinds),
        tensor_axis="model",
        pipeline=Pipeline(2, schedule),
    )
    assert autopar.verify(planned, state, np.arange(8, dtype=np.int32), steps=4).ok
    assert planned.latest.compiled.program.staged.divided and planned.latest.compiled.plan.table("rows").lifted


def test_slack_stays_within_the_memory(tmp_path: Path) -> None:
    """As much as there is room for; a plan file has it."""
    step, make = language_model(SGD)

    def plan_of(slack: int) -> autopar.Plan:
        planned = autopar.parallelize(step, pipeline=Pipeline(stages_of(2), "async", slack=slack))
        return autopar.plan(planned, make(), batch(0))

    plans = [plan_of(slack) for slack in range(4)]
    sizes = [max(pipeline_memory(plan.pipeline)) for plan in plans]
    assert sizes == sorted(set(sizes)), "each minibatch takes more"
    limits = [None, *sizes, sizes[0] - 1]
    assert [fitting_slack(plans[0].pipeline, 3, limit) for limit in limits] == [3, 0, 1, 2, 3, 0]
    plans[1].save(tmp_path / "plan.json")
    again = autopar.parallelize(step, plan=autopar.Plan.load(tmp_path / "plan.json"))
    assert autopar.plan(again, make(), batch(0)).pipeline.slack == 1


@pytest.mark.parametrize("pipeline", [Pipeline(2, "spectrain"), Pipeline("auto", "auto", asynchronous=True)])
def test_stages_of_one_process_have_no_slack(pipeline: Any) -> None:
    """Links that a busy machine slows down don't change what is trained."""
    step, make = language_model(SGD)
    slow = StageRates(flop_s=1e-12, byte_s=1e-12, call_s=1e-4, send_byte_s=3e-7)
    planned = on_machine(autopar.parallelize(step, pipeline=pipeline), stages=slow)
    assert autopar.plan(planned, make(), batch(0)).pipeline.slack == 0
