"""`check` of what each device's own program reduces and gathers: in loops and branches, flags, dense shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar
from autopar.planning.check import CheckRow
from tests.support.meshes import mesh_of
from tests.support.row_steps import same

EXAMPLES, LENGTH, WIDTH, TURNS = 12, 5, 8, 11
#: Bytes that each of four devices sends of a sum, and of a value of all examples.
SUM, ALL = 2 * 3 * 4 * WIDTH // 4, 3 * 4 * EXAMPLES * WIDTH // 4
BATCH = {"ids": np.arange(EXAMPLES * LENGTH, dtype=np.int32).reshape(EXAMPLES, LENGTH), "turns": np.int32(TURNS)}

Measure = Callable[[jax.Array, jax.Array], jax.Array]


def mean(h: jax.Array) -> jax.Array:
    return 0.5 * h + jnp.tanh(h.mean(0))


def pairs(h: jax.Array) -> jax.Array:
    return jnp.tanh(h @ h.T).sum(1, keepdims=True) * h


def scanned(h: jax.Array, turns: jax.Array) -> jax.Array:
    return lax.scan(lambda c, _: (mean(c), None), h, None, length=TURNS)[0]


def twice_scanned(h: jax.Array, turns: jax.Array) -> jax.Array:
    return lax.scan(lambda c, _: (scanned(c, turns), None), h, None, length=3)[0]


def branched(h: jax.Array, turns: jax.Array) -> jax.Array:
    return lax.cond(turns > 3, mean, lambda h: mean(mean(h)), h)


def counted(h: jax.Array, turns: jax.Array) -> jax.Array:
    return lax.while_loop(lambda c: c[0] < TURNS, lambda c: (c[0] + 1, mean(c[1])), (0, h))[1]


def gathered(h: jax.Array, turns: jax.Array) -> jax.Array:
    return lax.scan(lambda c, _: (pairs(c), None), h, None, length=TURNS)[0]


def flagged(h: jax.Array, turns: jax.Array) -> jax.Array:
    return lax.scan(lambda c, _: (jnp.where(jnp.any(c > 3), c, 2 * c), None), h, None, length=TURNS)[0]


def until(h: jax.Array, turns: jax.Array) -> jax.Array:
    return lax.fori_loop(0, turns, lambda _, c: mean(c), h)


def centred(h: jax.Array, turns: jax.Array) -> jax.Array:
    scale = jnp.linspace(0.5, 1, h.size).reshape(h.shape)
    return lax.scan(lambda c, _: (c - scale * jnp.broadcast_to(c.mean(0), c.shape), None), h, None, length=TURNS)[0]


def rows_of(measure: Measure | None, strategy: Any = "allreduce") -> dict[tuple[str, str], CheckRow]:
    """Returns a check's rows by (collective, what); all are planned, and as planned."""

    def step(state: dict[str, jax.Array], batch: dict[str, jax.Array]) -> Any:
        def loss(state: dict[str, jax.Array]) -> jax.Array:
            return jnp.mean((state["table"][batch["ids"]].mean(1) @ state["w"]) ** 2)

        value, gradients = jax.value_and_grad(loss)(state)
        h = state["table"][batch["ids"]].mean(1)
        measured = 0.0 if measure is None else jnp.sum(measure(h, batch["turns"]) ** 2)
        return jax.tree.map(lambda x, g: x - 0.1 * g, state, gradients), value + measured

    state = {"table": jnp.ones((400, WIDTH)), "w": jnp.eye(WIDTH)}
    planned = autopar.parallelize(step, strategy=strategy, mesh=mesh_of(4), batch_axis={"batch/turns": None})
    found = autopar.check(planned, state, BATCH)
    assert found.ok and all(row.planned is not None for row in found.rows), str(found)
    return {(row.collective, row.what): row for row in found.rows}


SUMS, MODEL, FLAGS = ("all-reduce", "sums over examples"), ("all-gather", "arrays of the model"), ("any", "flags")
TURN = "all-reduce", "each turn of a while loop"


@pytest.mark.parametrize(
    ("measure", "key", "sent"),
    [
        (scanned, SUMS, TURNS * SUM),
        (twice_scanned, SUMS, 3 * TURNS * SUM),
        (branched, SUMS, 3 * SUM),
        (counted, SUMS, TURNS * SUM),
        (gathered, MODEL, TURNS * ALL),
        (flagged, FLAGS, TURNS * 3),
        (until, TURN, SUM),
        (centred, SUMS, TURNS * SUM),
    ],
)
def test_what_loops_send_is_counted(measure: Measure, key: tuple[str, str], sent: int) -> None:
    """As often as they turn, where that is known; all branches. What is broadcast is reduced before."""
    without, row = rows_of(None), rows_of(measure)[key]
    before = without[key].compiled if key in without else 0
    assert (row.planned, row.compiled - before) == (row.compiled, sent)


def test_dense_leaves_in_shards_are_gathered_as_planned() -> None:
    row = rows_of(None, {"table": "allreduce", "w": "ps"})[MODEL]
    assert row.planned == row.compiled == 3 * WIDTH**2


def test_sums_that_are_broadcast_in_loops() -> None:
    """Some are needed whole in a turn; others are summed up, and reduced after the loop."""

    def step(w: jax.Array, x: jax.Array) -> Any:
        def loss(w: jax.Array) -> jax.Array:
            def turn(carry: tuple[jax.Array, jax.Array], _: None) -> Any:
                h, total = carry
                means = jnp.broadcast_to(h.mean(0), (3, WIDTH)) * jnp.linspace(1, 2, 3)[:, None]
                h = jnp.tanh(h @ w - means[1]) / jnp.sqrt(h.var(0) + 0.1)
                return (h, total + 2 * means), None

            h, total = lax.scan(turn, (x, jnp.zeros((3, WIDTH))), None, length=4)[0]
            return jnp.sum(h**2) + jnp.sum(total**2)

        value, gradient = jax.value_and_grad(loss)(w)
        return w - 0.01 * gradient, value

    w, x = jnp.eye(WIDTH) * 1.1, jnp.sin(jnp.arange(EXAMPLES * WIDTH, dtype=jnp.float32)).reshape(EXAMPLES, WIDTH)
    planned = autopar.parallelize(step, mesh=mesh_of(4), donate=False)
    same(planned(w, x), jax.jit(step)(w, x))
