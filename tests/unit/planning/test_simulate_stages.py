"""Pipelines on devices that aren't here, and on more of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.cost.rates import planned_stage_rates
from tests.unit.planning.test_simulate import CLUSTER


def _layers(params: Any, x: Any) -> Any:
    def loss(p: Any) -> Any:
        y = x
        for w in p:
            y = jnp.tanh(y @ w)
        return jnp.mean(y**2)

    value, g = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, g), value


def test_stages_on_more_devices() -> None:
    """Copies of the pipeline: the same microbatches, and sums of gradients once a step."""
    width, examples = 512, 1 << 14
    params = [jax.ShapeDtypeStruct((width, width), "float32")] * 8
    x = jax.ShapeDtypeStruct((examples, width), "float32")
    cluster = CLUSTER.of(2, 4)
    open_ = autopar.Pipeline(stages="auto", schedule="auto", microbatches="auto")
    made = autopar.plan(autopar.parallelize(_layers, pipeline=open_), params, x, cluster=cluster)
    assert made.pipeline is not None and made.pipeline.devices == 8
    found = autopar.simulate(made, devices=(8, 16, 64))
    one, two, eight = found.times
    assert one.parts["dense gradients"][0].seconds == 0 < two.parts["dense gradients"][0].seconds
    assert one.parts["model"] == two.parts["model"] == eight.parts["model"]
    gradient = max(stage.gradient_bytes for stage in made.pipeline.stages)
    assert eight.parts["dense gradients"][0].sent == pytest.approx(2 * 7 / 8 * gradient, rel=1e-3)
    flops = 6 * 8 * examples * width * width - 2 * examples * width * width
    rates = planned_stage_rates(cluster)
    assert flops / 8 * rates.flop_s < one.parts["model"][0].seconds < 4 * flops / 8 * rates.flop_s
    assert 1 < found.speedups[1] < 2 < found.speedups[2] < 8
    with pytest.raises(autopar.ArgumentsError, match="has stages on 8 devices; give multiples"):
        autopar.simulate(made, devices=(8, 12))
    tiny = dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, memory_bytes=1e6))
    assert not autopar.simulate(made, cluster=tiny, devices=8).times[0].fits
