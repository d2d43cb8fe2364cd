"""Times the methods against each other on a table so small that only what they always cost is left."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Array = Any
Step = Callable[[Any, Array], tuple[Any, Array]]

#: Rows, width and ids a device of the table.
_ROWS, _WIDTH, _IDS = 1024, 8, 4
_ROUNDS, _TURN = 12, 16


def probe(plan: Callable[[Step, str], Step], methods: tuple[str, ...], devices: int) -> dict[str, float]:
    """Method -> seconds that its step takes longer than the quickest one's.

    Args:
      plan: Gives the planned form of a step by a method.
      methods: Those to time.
      devices: N.
    """
    ids = jnp.arange(devices * _IDS, dtype=jnp.int32) * 7 % _ROWS
    steps = {m: plan(_step, m) for m in methods}
    states = {m: {"table": jnp.ones((_ROWS, _WIDTH)), "slot": jnp.ones((_ROWS, _WIDTH))} for m in methods}
    found: dict[str, list[float]] = {m: [] for m in methods}
    for _ in range(_ROUNDS):
        for m, step in steps.items():
            seconds = []
            for _ in range(_TURN):
                start = time.perf_counter()
                states[m], loss = step(states[m], ids)
                jax.block_until_ready((states[m], loss))
                seconds.append(time.perf_counter() - start)
            found[m].append(statistics.median(seconds[_TURN // 2 :]))
    # The best round of each: others at work on the machine slow down most what waits for others.
    best = {m: min(seconds) for m, seconds in found.items()}
    return {m: seconds - min(best.values()) for m, seconds in best.items()}


def _step(state: Any, ids: Array) -> tuple[Any, Array]:
    """Adagrad on the sum of squares of some rows, clipped by its norm."""
    loss, g = jax.value_and_grad(lambda table: jnp.sum(table[ids] ** 2))(state["table"])
    g = g * jnp.minimum(1.0, 1.0 / jnp.sqrt(jnp.sum(g * g)))
    slot = state["slot"] + g * g
    return {"table": state["table"] - 0.01 * g * jax.lax.rsqrt(slot), "slot": slot}, loss
