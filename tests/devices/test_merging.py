"""Gradients travel once: several lookups, loops and checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import autopar
from autopar.measure.compiled_collectives import read_collectives
from tests.support.meshes import mesh_of
from tests.support.pairs import diagonal
from tests.support.row_steps import same

WIDTH, ROWS = 8, 400
TX = optax.chain(optax.clip_by_global_norm(0.1), optax.adagrad(0.1))
IDS = jax.random.randint(jax.random.key(1), (32, 6), 0, ROWS)

Loss = Callable[[Any, Any], jax.Array]


def make_state() -> dict[str, Any]:
    params = {"emb": jax.random.normal(jax.random.key(0), (ROWS, WIDTH)), "w": jnp.eye(WIDTH)}
    return {"params": params, "opt": TX.init(params)}


def step_of(loss_fn: Loss) -> Callable[[Any, Any], Any]:
    def step(state: Any, ids: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: loss_fn(p, ids))(state["params"])
        updates, opt = TX.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    return step


def three_lookups(p: Any, ids: Any) -> jax.Array:
    a, b, c = p["emb"][ids], jnp.take(p["emb"], ids[:, ::2], axis=0), p["emb"][ids[:, 0] // 2]
    return jnp.mean(jnp.tanh(a @ p["w"]) ** 2) + jnp.mean(b**3) + jnp.mean(c)


def in_a_scan(p: Any, ids: Any) -> jax.Array:
    def one(h: jax.Array, now: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = jnp.tanh(h @ p["w"] + p["emb"][now])
        return h, jnp.mean((h - p["emb"][now // 3]) ** 2)

    return jnp.mean(jax.lax.scan(one, jnp.zeros((ids.shape[0], WIDTH)), ids.T)[1])


def in_nested_scans(p: Any, ids: Any) -> jax.Array:
    def inner(h: jax.Array, now: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(h @ p["w"] + p["emb"][now]), None

    def outer(h: jax.Array, now: jax.Array) -> tuple[jax.Array, None]:
        return jax.lax.scan(inner, h, now)[0], None

    h, _ = jax.lax.scan(outer, jnp.zeros((ids.shape[0], WIDTH)), ids.T.reshape(2, 3, -1))
    return jnp.mean(h**2)


def checkpointed(p: Any, ids: Any) -> jax.Array:
    layer = jax.checkpoint(lambda emb, w: jnp.tanh(emb[ids] @ w))
    return jnp.mean(layer(p["emb"], p["w"]) ** 2) + jnp.mean(p["emb"][ids])


def checkpointed_in_a_scan(p: Any, ids: Any) -> jax.Array:
    @jax.checkpoint
    def one(h: jax.Array, now: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(h @ p["w"] + p["emb"][now]), None

    return jnp.mean(jax.lax.scan(one, jnp.zeros((ids.shape[0], WIDTH)), ids.T)[0] ** 2)


LOSSES = (three_lookups, in_a_scan, in_nested_scans, checkpointed, checkpointed_in_a_scan)


@pytest.mark.parametrize(("loss_fn", "method"), diagonal(LOSSES, ["ps", "allgather"]))
def test_gradients_travel_once(loss_fn: Loss, method: str) -> None:
    step = step_of(loss_fn)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (make_state(), IDS))
    planned = autopar.parallelize(step, strategy=method, mesh=mesh_of(4))
    text = planned.lower(*shapes).compile().as_text()
    found = [c.op for c in read_collectives(text) if c.times]
    assert (found.count("all-to-all"), found.count("all-gather")) == ((3, 0) if method == "ps" else (0, 2))
    planned = autopar.parallelize(step, strategy=method, mesh=mesh_of(4), donate=False)
    same(planned(make_state(), IDS), jax.jit(step)(make_state(), IDS))


@pytest.mark.parametrize("loss_fn", LOSSES, ids=lambda f: f.__name__)
def test_on_one_device_gradients_are_added_where_they_belong(loss_fn: Loss) -> None:
    step = step_of(loss_fn)
    planned = autopar.parallelize(step, strategy="ps", mesh=mesh_of(1), donate=False)
    same(planned(make_state(), IDS), jax.jit(step)(make_state(), IDS))
    baseline = autopar.parallelize(step_of(one_lookup), strategy="ps", mesh=mesh_of(1), donate=False)
    baseline(make_state(), IDS)
    # A loop around a loop or a checkpoint adds what that returns once an iteration.
    more = loss_fn in (in_nested_scans, checkpointed_in_a_scan)
    assert sums_of_rows(planned) == sums_of_rows(baseline) + more > 0, "the optimizer's own, and no others"


def one_lookup(p: Any, ids: Any) -> jax.Array:
    return jnp.mean((p["emb"][ids] @ p["w"]) ** 2)


def sums_of_rows(planned: autopar.ParallelStep) -> int:
    """Sums of values at the routed rows."""
    assert planned.latest is not None
    program = planned.latest.compiled.program
    rows = next(e for e in program.block.walk() if e.op == "ap.push").outputs[0].shape
    return sum(e.op in ("add", "add_any", "ap.plus") and e.outputs[0].shape == rows for e in program.block.walk())


def test_a_nonzero_start_is_kept() -> None:
    """A loop that adds gradients to what was there before it."""

    def step(state: Any, ids: Any) -> Any:
        def one(sums: Any, now: Any) -> tuple[Any, jax.Array]:
            loss, g = jax.value_and_grad(lambda p: in_a_scan(p, now))(state["params"])
            return jax.tree.map(jnp.add, sums, g), loss

        first = jax.grad(lambda p: three_lookups(p, ids))(state["params"])
        grads, losses = jax.lax.scan(one, first, jnp.stack([ids, ids + 1, ids // 2]))
        updates, opt = TX.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, losses

    for method in ("ps", "allgather"):
        planned = autopar.parallelize(step, strategy=method, mesh=mesh_of(4), donate=False)
        same(planned(make_state(), IDS), jax.jit(step)(make_state(), IDS))


@pytest.mark.parametrize("method", ["ps", "allgather"])
def test_microbatches(method: str) -> None:
    """Fewer microbatches than devices: each is spread, and gradients travel after the last one."""

    def step(state: Any, ids: Any) -> Any:
        def one(sums: Any, now: Any) -> tuple[Any, jax.Array]:
            loss, g = jax.value_and_grad(lambda p: three_lookups(p, now))(state["params"])
            return jax.tree.map(jnp.add, sums, g), loss

        zeros = jax.tree.map(jnp.zeros_like, state["params"])
        grads, losses = jax.lax.scan(one, zeros, ids.reshape(2, -1, ids.shape[1]))
        updates, opt = TX.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, losses

    planned = autopar.parallelize(step, strategy=method, mesh=mesh_of(4), donate=False)
    same(planned(make_state(), IDS), jax.jit(step)(make_state(), IDS))
    assert planned.plan.tables[0].sizes.requested <= 80, "a device asks for its own examples' rows"
    found = read_collectives(planned.lower(make_state(), IDS).compile().as_text())
    # Rows out and gradients back, or gradients alone; the examples of a microbatch move as ids. What the batch would
    # need if it exceeded the capacity doesn't count.
    op, times = ("all-to-all", [1, 1]) if method == "ps" else ("all-gather", [1])
    rows = [c for c in found if c.op == op and c.times and c.arrays[0][0] == "f32" and c.arrays[0][1][-1:] == (WIDTH,)]
    assert [c.times for c in rows] == times
