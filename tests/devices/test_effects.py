"""What calls Python from a step on several devices: once, on the first device, whatever each has of its operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import autopar
from tests.support.meshes import mesh_of

CALLS: list[Any] = []


def _called(value: Any) -> np.ndarray:
    CALLS.append(np.asarray(value))
    return np.asarray(value)


def _told(told: Callable[[jax.Array, jax.Array], Any]) -> Callable[..., Any]:
    """A step that calls Python with its loss and with a value of each example."""

    def step(w: jax.Array, x: jax.Array) -> Any:
        def loss_of(w: jax.Array) -> Any:
            each = ((x @ w) ** 2).sum(1)
            return each.mean(), each

        (loss, each), slope = jax.value_and_grad(loss_of, has_aux=True)(w)
        return w - 0.1 * slope, (loss, told(loss, each))

    return step


def _in_a_loop(loss: jax.Array, each: jax.Array) -> None:
    jax.lax.fori_loop(0, 3, lambda k, x: (jax.debug.callback(_called, x), x + loss)[1], each)


def _in_a_branch(loss: jax.Array, each: jax.Array) -> None:
    jax.lax.cond(loss > 0, lambda x: jax.debug.callback(_called, x), lambda x: None, each)


def _of(call: Callable[..., Any], **options: Any) -> Callable[[jax.Array, jax.Array], Any]:
    def told(loss: jax.Array, each: jax.Array) -> Any:
        return [call(_called, jax.ShapeDtypeStruct(v.shape, v.dtype), v, **options) for v in (loss, each)]

    return told


TOLD: dict[str, Callable[[jax.Array, jax.Array], Any]] = {
    "of the loss": lambda loss, each: jax.debug.callback(_called, loss),
    "of the examples": lambda loss, each: jax.debug.callback(_called, each),
    "in a loop": _in_a_loop,
    "in a branch": _in_a_branch,
    "pure": _of(jax.pure_callback),
    "io": _of(io_callback),
    "ordered": _of(io_callback, ordered=True),
}


@pytest.mark.parametrize(("examples", "mesh"), [(8, (4,)), (6, (4,)), (8, (2, 2))])
@pytest.mark.parametrize("name", TOLD)
def test_python_is_called_once(name: str, examples: int, mesh: tuple[int, ...]) -> None:
    step, rng = _told(TOLD[name]), np.random.default_rng(examples)
    w, x = jnp.asarray(rng.normal(size=(16, 4))), rng.normal(size=(examples, 16))
    calls: list[Any] = []
    planned = autopar.parallelize(step, mesh=jax.make_mesh(mesh, ("data", "other")[: len(mesh)]), donate=False)
    results = []
    for run in (jax.jit(step), planned):
        CALLS.clear()
        results.append(jax.device_get(run(w, x)))
        jax.effects_barrier()
        calls.append(sorted(CALLS, key=lambda v: (v.shape, v.sum())))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), *results)
    assert [v.shape for v in calls[0]] == [v.shape for v in calls[1]]
    for plain, mine in zip(*calls, strict=True):
        np.testing.assert_allclose(mine, plain, rtol=1e-5)


def test_a_table_in_a_layout_that_is_read_as_a_whole() -> None:
    """Each device reads its even shard; 37 rows on 4 devices."""

    def evaluate(table: Any, ids: jax.Array) -> Any:
        return table.mean(), (table**2).sum(0), table.max(), (table[ids] @ table.T).argmax(1)

    def train(table: jax.Array, ids: jax.Array) -> Any:
        loss, slope = jax.value_and_grad(lambda t: (t[ids] ** 2).mean())(table)
        return table - 0.1 * slope, loss

    rng = np.random.default_rng(0)
    table, ids = jnp.asarray(rng.normal(size=(37, 4)), jnp.float32), rng.integers(0, 37, 8)
    step = autopar.parallelize(train, mesh=mesh_of(4), strategy="ps", donate=False)
    mine, plain = step(table, ids)[0], jax.jit(train)(table, ids)[0]
    planned = autopar.parallelize(evaluate, mesh=mesh_of(4))
    found, expected = planned(mine, ids), jax.jit(evaluate)(plain, ids)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a), b, rtol=1e-5), found, expected)


def test_what_the_first_device_does_keeps_its_line() -> None:
    """So do partial sums of a loop that are scaled by a number of the step."""

    def step(w: jax.Array, x: jax.Array) -> Any:
        def loss(w: jax.Array) -> jax.Array:
            def turn(total: jax.Array, k: jax.Array) -> Any:
                return total + (x @ w).sum(0) * k, None

            return jax.lax.scan(turn, jnp.zeros(3), jnp.arange(2.0))[0].sum() ** 2

        jax.debug.print("{}", x.sum(1))
        return w - jax.grad(loss)(w), x.sum()

    planned = autopar.parallelize(step, mesh=mesh_of(4), donate=False)
    block = planned.planned_for(jnp.ones((3, 3)), jnp.ones((8, 3))).compiled.program.block
    lines = {e.op: e.source for e in block.walk() if e.op in ("ap.first", "ap.scaled")}
    assert {op: str(source).split(":")[0].endswith("test_effects.py") for op, source in lines.items()} == {
        "ap.first": True,
        "ap.scaled": True,
    }
