"""A worker of several devices, each of which runs its own program of a part of the minibatch (`sync=Async`)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import autopar
from autopar.backends import served
from autopar.ir.local import NotLocal
from autopar.ways import servers
from tests.support.meshes import mesh_of
from tests.support.partitioned import IDS

N = 4


@pytest.mark.parametrize(("examples", "meet"), [(8, False), (6, False), (8, True)])
def test_a_worker_of_several_devices(examples: int, meet: bool) -> None:
    """Whose state servers keep, and whose minibatch its devices divide, if they can: forwards, backwards, results."""

    def step(state: Any, batch: Any) -> Any:
        params, count = state

        def loss_of(w: jax.Array) -> Any:
            running = lax.cumsum(batch["x"], 1) * lax.cumprod(batch["x"], 1)
            scale = lax.reduce(batch["y"], np.float32(1), lambda a, b: a + b, (0,))
            h = running @ w
            others = jax.nn.logsumexp(jnp.outer(h, h), 1).mean() if meet else 0.0
            return jnp.mean((h - batch["y"]) ** 2) * scale + others, batch["z"].max()

        (loss, largest), slope = jax.value_and_grad(loss_of, has_aux=True)(params)
        return (params - 0.01 * slope, count + 1), (
            loss,
            largest,
            jax.ops.segment_max(batch["z"], IDS[:examples] % 2, 2),
        )

    batch = {
        name: np.random.default_rng(k).normal(size=shape).astype(np.float32)
        for k, (name, shape) in enumerate({"x": (examples, 4), "y": (examples,), "z": (examples,)}.items())
    }
    batch["z"][3] = np.nan
    planned = autopar.parallelize(step, mesh=mesh_of(N), sync=autopar.sync.Async())
    mine, theirs = planned((jnp.ones(4), 0), batch), jax.jit(step)((jnp.ones(4), 0), batch)
    for a, b in zip(jax.tree.leaves(autopar.materialize(mine)), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    assert planned.latest is not None
    axes = planned.latest.compiled.program.served.local_worker.axes
    assert {*axes} == ({0, None} if examples % N == 0 else {None})


def _looked_up(axis: int) -> tuple[Any, Any, Any]:
    """A step on a table and a weight, its state, and a minibatch with its examples along an axis of the ids."""
    tx = optax.adagrad(0.1)

    def step(state: Any, batch: Any) -> Any:
        params, opt = state

        def loss_of(params: Any) -> jax.Array:
            h = jnp.tanh(params["table"][batch["ids"]].sum(1 - axis) @ params["w"])
            return jnp.mean((h - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, opt = tx.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), loss

    rng = np.random.default_rng(0)
    params = {"table": jnp.asarray(rng.normal(size=(301, 4)), jnp.float32), "w": jnp.eye(4)}
    ids = rng.integers(0, 301, (8, 3)).astype(np.int32)
    ids[5] = ids[1]  # two devices look up the same rows
    batch = {"ids": ids if axis == 0 else ids.T.copy(), "y": rng.normal(size=(8, 4)).astype(np.float32)}
    return step, (params, tx.init(params)), batch


@pytest.mark.parametrize("axis", [0, 1])
def test_rows_that_its_devices_look_up(axis: int) -> None:
    """Servers send the rows of the whole minibatch in their order, in which each device finds its examples'."""
    step, state, batch = _looked_up(axis)
    axes = {"**ids": axis, "**": 0}
    planned: Any = autopar.parallelize(step, mesh=mesh_of(N), sync=autopar.sync.Async(clients=1), batch_axis=axes)
    assert autopar.verify(planned, state, batch, steps=3).ok
    mine, theirs = state, state
    for _ in range(3):
        (mine, loss), (theirs, expected) = planned(mine, batch), jax.jit(step)(theirs, batch)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(autopar.average(mine)), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    worker = planned.latest.compiled.program.served.local_worker
    assert {*worker.axes} == {None, 0, axis}
    assert planned.plan.served.by_rows == ("0/table",)


def test_verify_runs_what_its_devices_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay has the same programs: what is wrong with them shows against the plain step."""
    mapped = served._mapped

    def without_other_devices(step: Any, devices: Any) -> Any:
        run = mapped(step, devices)
        return lambda *inputs: tuple(x / N if x.dtype == jnp.float32 else x for x in run(*inputs))

    monkeypatch.setattr(served, "_mapped", without_other_devices)
    step, state, batch = _looked_up(0)
    planned: Any = autopar.parallelize(step, mesh=mesh_of(N), sync=autopar.sync.Async(clients=1))
    with pytest.raises(autopar.VerificationError, match="differs from"):
        autopar.verify(planned, state, batch, steps=2)


@pytest.mark.parametrize("is_divided", [True, False])
def test_a_shard_map_in_the_step(is_divided: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each device's own program, or, where none can be written, in one of all devices on the whole minibatch."""

    def refused(*_: Any) -> None:
        raise NotLocal("a test")

    if not is_divided:
        monkeypatch.setattr(servers, "localize_worker", refused)
    mesh = mesh_of(N)

    def step(w: jax.Array, x: jax.Array) -> Any:
        def loss_of(w: jax.Array) -> jax.Array:
            part = jax.shard_map(lambda x: jnp.tanh(x @ w).sum(1), mesh=mesh, in_specs=P("data"), out_specs=P("data"))
            return jnp.mean(part(x) ** 2)

        loss, slope = jax.value_and_grad(loss_of)(w)
        return w - 0.1 * slope, loss

    x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    planned: Any = autopar.parallelize(step, mesh=mesh, sync=autopar.sync.Async(clients=1), state_argnums=0)
    (mine, loss), (theirs, expected) = planned(jnp.eye(4), x), jax.jit(step)(jnp.eye(4), x)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(autopar.average(mine), theirs, rtol=1e-5, atol=1e-6)
    assert (planned.latest.compiled.program.served.local_worker is not None) == is_divided
