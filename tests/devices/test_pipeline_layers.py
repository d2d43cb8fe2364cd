"""Layers of a scan, cut into stages between its iterations."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from tests.support.microbatched import batch, difference, language_model
from tests.support.pairs import diagonal

CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))


@pytest.fixture(autouse=True)
def _float64() -> Any:
    with jax.enable_x64(True):
        yield


OF_LAYERS = {
    "1f1b": autopar.Pipeline(4, "1f1b", 4),
    "interleaved": autopar.Pipeline(6, "interleaved", 6),
    "zero-bubble": autopar.Pipeline(3, "zero-bubble", 4),
}


@pytest.mark.parametrize(("pipeline", "options"), diagonal(OF_LAYERS, [{"remat": True}, {"dropout": 0.2}]))
def test_layers_of_a_scan(pipeline: autopar.Pipeline, options: dict[str, Any]) -> None:
    step, make = language_model(CLIPPED, stacked=True, **options)
    planned = autopar.parallelize(step, pipeline=pipeline)
    assert difference(planned, step, make) < 1e-12
    homes = [stage.weights for stage in planned.plan.pipeline.stages]
    parts = {re.sub(r".*/\w+", "", path) for weights in homes for path in weights if "layers" in path}
    assert len(parts) >= pipeline.count - 2, homes


def test_a_stack_in_stages_is_donated_saved_and_goes_on_in_others(tmp_path: Any) -> None:
    step, make = language_model(CLIPPED, stacked=True)
    patterns = [["params/words", "params/layers/*[0:1]"], ["params/layers/**[1:4]", "params/out"]]
    by_patterns, three, plain = (
        autopar.parallelize(step, pipeline=autopar.Pipeline(patterns, microbatches=4)),
        autopar.parallelize(step, pipeline=autopar.Pipeline(3, microbatches=4)),
        autopar.parallelize(step),
    )
    old = autopar.init(lambda key: make(), jax.random.key(0), step=by_patterns, batch=batch(0))
    first = old["params"]["layers"]["w"]
    assert [(p.start, p.stop) for p in first.parts] == [(0, 1), (1, 4)]
    assert [x.devices() for x in first.values] == [{jax.devices()[0]}, {jax.devices()[1]}]
    assert np.array_equal(first, jax.jit(make)()["params"]["layers"]["w"])
    assert first[2].shape == first.shape[1:] and "on 2 devices" in repr(first)
    arrays = first.values
    state, _ = by_patterns(old, batch(0))
    assert first.is_deleted() and all(x.is_deleted() for x in arrays)
    autopar.save(tmp_path / "state", state)
    results = []
    for planned, like, where in (
        (by_patterns, state, {}),
        (three, jax.eval_shape(make), {"step": three, "batch": batch(1)}),
        (plain, make(), {}),
        (three, state, {}),  # the parts are those of the patterns
    ):
        restored = autopar.restore(tmp_path / "state", like, **where).state
        new, metrics = planned(restored, batch(1))
        results.append(jax.tree.leaves((autopar.materialize(new["params"]), metrics)))
    new, metrics = plain(autopar.materialize(state), batch(1))
    for found in results:
        for a, b in zip(found, jax.tree.leaves((new["params"], metrics)), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-12)


def test_a_plan_of_layers_is_written_and_read(tmp_path: Any) -> None:
    step, make = language_model(CLIPPED, stacked=True)
    plan = autopar.plan(autopar.parallelize(step, pipeline=autopar.Pipeline(3, microbatches=4)), make(), batch(0))
    plan.save(tmp_path / "plan.json")
    planned = autopar.parallelize(step, plan=autopar.Plan.load(tmp_path / "plan.json"))
    assert difference(planned, step, make) < 1e-12
    assert planned.plan.pipeline.stages == plan.pipeline.stages


def test_layers_that_no_stage_has() -> None:
    step, make = language_model(CLIPPED, stacked=True)
    patterns = [["params/words", "params/layers/**[0:1]"], ["params/layers/**[2:4]", "params/out"]]
    with pytest.raises(autopar.StrategyError, match=r"params/layers/\w\[1:2\] belongs to no stage"):
        autopar.parallelize(step, pipeline=autopar.Pipeline(patterns))(make(), batch(0))
    with pytest.raises(autopar.StrategyError, match="6 weights and layers to cut between"):
        autopar.parallelize(step, pipeline=autopar.Pipeline(7))(make(), batch(0))


def test_layers_that_a_leaf_does_not_have() -> None:
    step, make = language_model(CLIPPED, stacked=True)

    def refused(first: str, second: str, step: Any = step) -> str:
        pipeline = autopar.Pipeline([["params/words", first], [second, "params/out"]])
        with pytest.raises(autopar.StrategyError) as error:
            autopar.parallelize(step, pipeline=pipeline)(make(), batch(0))
        return str(error.value)

    said = refused("params/layers/**[0:2]", "params/layers/**[2:9]")
    assert said.endswith("'params/layers/**[2:9]': params/layers/b has the layers [0:4]")
    assert "has the layers [0:4]" in refused("params/layers/**[0:4]", "params/layers/**[4:4]")

    def normed(state: Any, given: Any) -> Any:
        """A loss with the weights' last layer in it, which no scan reads."""
        layers = state["params"]["layers"]["w"]
        norm, grad = jax.value_and_grad(lambda w: jnp.sum(w[-1] ** 2) * given["mask"].sum())(layers)
        new, metrics = step(state, given)
        new["params"]["layers"]["w"] -= grad
        return new, {**metrics, "last": norm}

    said = refused("params/layers/**[0:2]", "params/layers/**[2:4]", normed)
    assert "params/layers/w belongs to no stage" in said and "otherwise than a scan" in said
    assert "test_pipeline_layers.py:" in said
