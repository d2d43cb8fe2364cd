"""Plans of pipelines: the stages that are chosen, in files, and beside what is sent."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.cost.rates import StageRates
from autopar.cost.stage_time import pipeline_memory
from autopar.passes.staging import stages as search
from autopar.passes.staging.loads import StageLoad
from autopar.planning.check import compare_sends
from autopar.planning.plan import elsewhere
from tests.support.explained import explained
from tests.support.machines import on_machine
from tests.support.meshes import mesh_of
from tests.support.microbatched import EXAMPLES, batch, difference, language_model, numbers, stages_of

CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))


@pytest.fixture(autouse=True)
def _float64() -> Any:
    with jax.enable_x64(True):
        yield


def test_a_plan_has_the_stages(tmp_path: Any) -> None:
    step, make = language_model(CLIPPED, tied=True)
    pipeline = autopar.Pipeline(3, "zero-bubble", 4, replicas=(1, 2, 1))
    plan = autopar.plan(autopar.parallelize(step, pipeline=pipeline), make(), batch(0))
    assert [len(stage.devices) for stage in plan.pipeline.stages] == [1, 2, 1]
    assert plan.pipeline.tied_bytes and plan.pipeline.is_timed
    plan.save(tmp_path / "plan.json")
    loaded = autopar.Plan.load(tmp_path / "plan.json")
    assert loaded == plan and not plan.diff(loaded)
    report = autopar.report(plan)
    assert list(report.figures) == ["schedule", "devices"] and len(report.tables["stages"]) == 3
    assert len(report.figures["schedule"].axes[0].patches) == 3 * 3 * 4  # stages, kinds, microbatches
    planned = autopar.parallelize(step, plan=loaded)
    assert difference(planned, step, make) < 1e-12
    assert planned.plan.pipeline.stages == plan.pipeline.stages
    other = autopar.plan(autopar.parallelize(step, pipeline=autopar.Pipeline(2, microbatches=4)), make(), batch(0))
    assert "pipeline" in str(plan.diff(other))
    with pytest.raises(autopar.ArgumentsError, match="pipeline= given together with plan="):
        autopar.parallelize(step, plan=loaded, pipeline=pipeline)


def test_stages_that_autopar_chooses() -> None:
    step, make = language_model(CLIPPED, dropout=0.2)
    planned = autopar.parallelize(
        step, pipeline=autopar.Pipeline("auto", microbatches=4), mesh=jax.make_mesh((4,), ("data",))
    )
    assert difference(planned, step, make) < 1e-12
    plan = planned.plan.pipeline
    assert len(plan.candidates) == 4 and sum(len(stage.devices) for stage in plan.stages) == 4
    assert "ms: 1 stage of 4 devices, 1f1b" in explained(planned)


def test_all_that_autopar_chooses() -> None:
    step, make = language_model(CLIPPED, dropout=0.2)
    pipeline = autopar.Pipeline(3, "auto", "auto", remat="auto")
    planned = autopar.parallelize(step, pipeline=pipeline)
    assert difference(planned, step, make) < 1e-12
    plan = planned.plan.pipeline
    assert len(plan.stages) == 3 and plan.schedule in ("1f1b", "zero-bubble") and EXAMPLES % plan.microbatches == 0
    given = autopar.Pipeline(4, "interleaved", "auto")
    stages = autopar.plan(autopar.parallelize(step, pipeline=given), make(), batch(0)).pipeline
    assert (stages.schedule, stages.devices, stages.microbatches % 2) == ("interleaved", 2, 0)
    whole = autopar.Pipeline("auto", "interleaved", "auto")
    chosen = autopar.plan(autopar.parallelize(step, pipeline=whole, mesh=jax.make_mesh((2,), ("a",))), make(), batch(0))
    assert chosen.pipeline.schedule == "interleaved" and len(chosen.pipeline.stages) == 4
    with pytest.raises(autopar.ArgumentsError, match="patterns say the stages"):
        autopar.Pipeline([["params/**"]], "auto")


def test_a_state_that_fits_in_no_other_way(tmp_path: Any) -> None:
    """Whether a device has room for it decides, without an option. (No table can be elsewhere.)"""
    step, make = language_model(CLIPPED, tied=True)
    size = sum(x.nbytes for x in jax.tree.leaves(make()))
    memory, rates = int(1.3 * size), StageRates(1e-9, 1e-9, 1e-6, 1e-9)
    planned = on_machine(autopar.parallelize(step, mesh=mesh_of(4)), memory=memory, stages=rates)
    assert difference(planned, step, make) < 1e-12
    plan = planned.plan.pipeline
    assert max(pipeline_memory(plan)) < memory and len(plan.stages) > 1
    assert "so it is run in stages" in explained(planned, make(), batch(0))
    state, _ = planned(autopar.init(make, step=planned, batch=batch(0)), batch(0))
    autopar.save(tmp_path, state)
    again = autopar.restore(tmp_path, jax.eval_shape(make), step=planned, batch=batch(0)).state
    for a, b in zip(jax.tree.leaves(again["params"]), jax.tree.leaves(state["params"]), strict=True):
        assert np.array_equal(a, b) and a.sharding == b.sharding
    planned = on_machine(autopar.parallelize(step, mesh=mesh_of(4)), memory=size // 40, stages=rates)
    shown = explained(planned, make(), batch(0))
    assert "in stages it doesn't run" in shown and "at least" in shown
    planned = on_machine(autopar.parallelize(step, mesh=mesh_of(4)), memory=2 * size, stages=rates)
    assert autopar.plan(planned, make(), batch(0)).pipeline is None


def test_loads_of_other_numbers_of_microbatches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of 2 and 8 say what those of 4 are."""
    step, make = language_model(CLIPPED, dropout=0.2)
    found: list[list[StageLoad]] = []
    unit_loads = search.unit_loads

    def noted(*args: Any, **options: Any) -> list[StageLoad]:
        found.append(unit_loads(*args, **options))
        return found[-1]

    def searched(count: Any) -> list[list[StageLoad]]:
        """What the search asks for, ahead of the stages that are cut in the end."""
        found.clear()
        pipeline = autopar.Pipeline("auto", microbatches=count)
        autopar.plan(autopar.parallelize(step, pipeline=pipeline), make(), batch(0))
        return found[: len(search.reference_counts([2, 4, 8] if count == "auto" else [count]))]

    monkeypatch.setattr(search, "unit_loads", noted)
    (twos, eights), (fours,) = searched("auto"), searched(4)
    for load, expected in zip(search._loads_of(4, {2: twos, 8: eights}), fours, strict=True):
        for name in ("flops", "moved", "sent", "ahead", "back", "activation", "gradient", "state", "tied"):
            assert getattr(load, name) == pytest.approx(getattr(expected, name)), name
    assert any(load.moved != eight.scaled(2).moved for load, eight in zip(fours, eights, strict=True))


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "interleaved"])
def test_rematerialization(schedule: str) -> None:
    """A stage holds what it was sent, in float64, and the mask of its dropout; it computes its forward once more."""
    step, make = language_model(CLIPPED, dropout=0.2)
    plans = []
    for remat in (False, True):
        planned = autopar.parallelize(step, pipeline=autopar.Pipeline(stages_of(4), schedule, 4, remat=remat))
        assert difference(planned, step, make) < 1e-12
        plans.append(planned.plan.pipeline)
        assert autopar.check(planned, make(), batch(0))
    for plain, again in list(zip(plans[0].stages, plans[1].stages, strict=True))[:-1]:
        assert again.activation_bytes <= again.ahead_bytes * 9 / 8 < plain.activation_bytes
        assert again.flops > plain.flops
    assert plans[1].stages[-1].flops == plans[0].stages[-1].flops


def test_a_profiled_plan() -> None:
    """Each stage takes as long as its part of the gradient program takes here."""
    step, make = language_model(CLIPPED, dropout=0.2)
    planned = autopar.parallelize(step, pipeline=autopar.Pipeline(2, microbatches=4, profile=True))
    assert difference(planned, step, make) < 1e-12
    assert all(second > 0 for stage in planned.plan.pipeline.stages for second in stage.seconds.values())


@pytest.mark.parametrize("stages", [2, "auto"])
def test_a_cluster_counts_the_devices_of_an_axis_name(stages: Any) -> None:
    """As many as `jax.pmap` over the cluster has, whatever stages there are: the loss says it."""
    cluster = autopar.Cluster.named("dgx-h100")

    def step(w: Any, x: Any) -> Any:
        loss, slope = jax.value_and_grad(lambda w: jnp.tanh(jnp.tanh(x @ w["a"]) @ w["b"]).mean())(w)
        w = jax.tree.map(lambda w, g: w - 0.1 * jax.lax.pmean(g, "batch"), w, slope)
        return w, (jax.lax.pmean(loss, "batch"), jnp.ones(jax.lax.axis_size("batch")))

    pipeline = autopar.Pipeline(stages, microbatches=2)
    planned = autopar.parallelize(step, axis_name="batch", pipeline=pipeline, mesh=mesh_of(4))
    weights, x = {"a": jnp.ones((4, 4)), "b": jnp.ones((4, 4))}, jnp.ones((16, 4))
    (_, counted) = planned(dict(weights), x)[1]
    assert counted.shape == (4,)
    there = elsewhere(planned, cluster).planned_for(weights, x)
    assert there.compiled.analysed.block.outputs[-1].type.shape == (cluster.count,) == (8,)
    assert "2 stages on 2 devices" in str(autopar.explain(planned, weights, x, cluster=cluster)) or stages == "auto"


@pytest.mark.parametrize(
    "pipeline",
    [
        autopar.Pipeline(3, "1f1b", 4),
        autopar.Pipeline(3, "zero-bubble", 4, replicas=(1, 2, 1)),
        autopar.Pipeline(4, "interleaved", 4),
    ],
    ids=lambda p: p.schedule,
)
def test_check_finds_what_the_plan_says(pipeline: autopar.Pipeline) -> None:
    step, make = language_model(optax.sgd(0.1), tied=True, dropout=0.2)
    planned = autopar.parallelize(step, pipeline=pipeline)
    found = autopar.check(planned, make(), batch(0))
    assert found.ok, str(found)
    sent = {row.what: row.compiled for row in found.rows}
    assert sent["device 1" if pipeline.schedule == "interleaved" else "stage 2 to earlier stages"]
    assert "not in the plan" in str(found)
    entry = planned.planned_for(make(), batch(0))
    plan = entry.compiled.plan.pipeline
    stages = (dataclasses.replace(plan.stages[0], ahead_bytes=plan.stages[0].ahead_bytes + 8), *plan.stages[1:])
    wrong = compare_sends("step", dataclasses.replace(plan, stages=stages), entry.runner.timeline)
    assert [row.ok for row in wrong.rows].count(False) == 1


def test_the_state_may_be_behind_the_batch() -> None:
    """New leaves, which stay at their stages, are found by what they are the new value of."""
    step, make = language_model(optax.sgd(0.1))

    def turned(given: Any, state: Any) -> Any:
        return step(state, given)[::-1]

    planned = autopar.parallelize(turned, pipeline=autopar.Pipeline(stages_of(2), microbatches=4))
    found, new = planned(batch(0), make())
    expected, metrics = jax.jit(step)(make(), batch(0))
    pairs = zip(jax.tree.leaves((found, new)), jax.tree.leaves((metrics, expected)), strict=True)
    assert max(float(np.max(np.abs(numbers(a) - numbers(b)))) for a, b in pairs) < 1e-12
    compiled = planned.latest.compiled
    staged, program = compiled.program.staged, compiled.analysed
    homes = {staged.outputs[out]: staged.homes[staged.inputs[leaf]] for leaf, out in program.new_states.items()}
    assert staged.new_leaves == {var: home for var, home in homes.items() if var.shape}


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_state_with_a_weak_count_is_planned_once(replicas: int) -> None:
    """Flax's TrainState counts from a Python zero."""

    def step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        loss, grads = jax.value_and_grad(lambda w: ((jnp.tanh(x @ w[0]) @ w[1]) ** 2).mean())(state["w"])
        return {"w": [w - 0.1 * g for w, g in zip(state["w"], grads, strict=True)], "count": state["count"] + 1}, loss

    planned = autopar.parallelize(step, pipeline=autopar.Pipeline(2, microbatches=2, replicas=replicas))
    state = {"w": [jnp.eye(4), jnp.eye(4)], "count": jnp.asarray(0)}
    assert state["count"].weak_type
    for _ in range(3):
        state, _ = planned(state, np.ones((4, 4)))
    assert state["count"].weak_type and len(planned._planned) == 1
