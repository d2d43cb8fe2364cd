"""Examples that meet those of other devices and are examples again: each device goes on with its part of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from tests.support.explained import explained
from tests.support.meshes import mesh_of

WIDTH, HIDDEN = 6, 64


@pytest.fixture(autouse=True)
def _float64() -> Any:
    with jax.enable_x64(True):
        yield


def _net(w: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w["up"]) @ w["up"].T


def _permuted(x: jax.Array) -> jax.Array:
    return x[jax.random.permutation(jax.random.key(0), x.shape[0])]


def _two_views(w: Any, b: Any) -> jax.Array:
    """Two views of each example, put together for the network, and taken apart."""
    z = _net(w, jnp.concatenate([b["x"], 0.9 * b["x"]]))
    first, second = jnp.split(z, 2)
    return jnp.mean((first - second) ** 2) + jnp.mean(z[: len(z) // 2] ** 3)


def _permutation(w: Any, b: Any) -> jax.Array:
    return jnp.mean(_net(w, _permuted(b["x"])) * b["x"])


def _in_reverse(w: Any, b: Any) -> jax.Array:
    return jnp.mean(_net(w, b["x"][::-1]) * b["x"])


def _whole_once(w: Any, b: Any) -> jax.Array:
    """All examples are sorted; the network takes each by itself all the same."""
    return jnp.sort(b["x"], axis=0)[1].sum() * jnp.mean(w["up"]) + jnp.mean(_net(w, b["x"]) ** 2)


def _edges(w: Any, b: Any) -> jax.Array:
    """Messages along edges, each of which has its place in the batch."""
    messages = _net(w, b["x"][b["ids"]] - b["x"][b["ids"][::-1]])
    return jnp.mean(jax.ops.segment_sum(messages, b["ids"], len(b["x"])) ** 2)


def _pairs(w: Any, b: Any) -> jax.Array:
    """Each example with each other one."""
    return jnp.mean(_net(w, b["x"][:, None] - b["x"]) ** 2)


def _microbatches(count: int) -> Any:
    """Gradients of equal parts in time, added up by the step itself."""

    def loss_of(w: Any, b: Any) -> jax.Array:
        def turn(total: jax.Array, x: jax.Array) -> Any:
            each = _net(w, x) ** 2
            return total + each.mean(), each.max(1)

        parts = b["x"].reshape(count, -1, WIDTH)
        total, each = jax.lax.scan(turn, jnp.zeros(()), parts)
        return total / count + each[0].mean()

    return loss_of


def _sliced(w: Any, b: Any) -> jax.Array:
    """Parts in time, cut out of the batch in each turn."""
    size = len(b["x"]) // 2
    return jax.lax.fori_loop(
        0, 2, lambda i, c: c + jnp.mean(_net(w, jax.lax.dynamic_slice_in_dim(b["x"], i * size, size)) ** 2), 0.0
    )


LOSSES = {
    "two views": _two_views,
    "a permutation": _permutation,
    "in reverse": _in_reverse,
    "whole once": _whole_once,
    "edges": _edges,
    "pairs": _pairs,
    "2 microbatches": _microbatches(2),
    "4 microbatches": _microbatches(4),
    "slices": _sliced,
}


@pytest.mark.filterwarnings("ignore::autopar.RecompileWarning")
@pytest.mark.parametrize("name", LOSSES)
def test_each_device_goes_on_with_its_part(name: str) -> None:
    """With the numbers of one device, and about a quarter of its work."""

    def step(w: Any, batch: Any) -> Any:
        loss, slope = jax.value_and_grad(LOSSES[name])(w, batch)
        return jax.tree.map(lambda a, g: a - 0.1 * g, w, slope), loss

    rng = np.random.default_rng(0)

    def given(examples: int) -> Any:
        ids = rng.integers(0, examples, examples).astype(np.int32)
        return {"up": jnp.asarray(0.3 * rng.normal(size=(WIDTH, HIDDEN)))}, {
            "x": rng.normal(size=(examples, WIDTH)),
            "ids": ids,
        }

    planned = autopar.parallelize(step, mesh=mesh_of(4), donate=False)
    for examples in (128, 20, 12):  # the last ones aren't divided in microbatches
        w, batch = given(examples)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12),
            planned(w, batch),
            jax.jit(step)(w, batch),
        )
    w, batch = given(128)
    assert "DIFFERS" not in str(autopar.check(planned, w, batch))
    assert " a turn for" not in explained(planned), "what doesn't change is exchanged before a loop"
    runner: Any = planned.planned_for(w, batch).runner
    flops = [c.compile().cost_analysis()["flops"] for c in (runner.lower(), jax.jit(step).lower(w, batch))]
    assert flops[0] < 0.4 * flops[1], flops
