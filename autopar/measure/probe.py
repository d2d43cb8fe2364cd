"""Times the methods against each other on a table so small that only what they always cost is left."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

Array = Any
Step = Callable[[Any, Array], tuple[Any, Array]]

#: Rows, width and ids a device of the table.
_ROWS, _WIDTH, _IDS = 1024, 8, 4
_ROUNDS, _TURN = 12, 16
#: Dense parameters of a step whose AllReduces are timed.
_SUMS = 4


def probe(plan: Callable[[Step, str], Step], methods: tuple[str, ...], devices: int) -> dict[str, float]:
    """Method -> seconds of its step.

    Args:
      plan: Gives the planned form of a step by a method.
      methods: Those to time.
      devices: N.
    """
    return _times({m: (plan(_step, m), _state()) for m in methods}, devices)


def probe_sums(plan: Callable[[Step, str], Step], devices: int) -> float:
    """Seconds that one more small dense parameter costs a step: its gradient's AllReduce, and all that goes with it."""

    def with_sums(state: Any, ids: Array) -> tuple[Any, Array]:
        def loss_fn(dense: Any) -> Array:
            x = ids[:, None].astype(jnp.float32) * 1e-6
            for w in dense:
                x = jnp.tanh(x @ w + x)
            return jnp.sum(x)

        grads = jax.grad(loss_fn)(state["dense"])
        found, loss = _step(state, ids)
        return {**found, "dense": [w - 0.01 * g for w, g in zip(state["dense"], grads, strict=True)]}, loss

    more = {**_state(), "dense": [jnp.ones((1, 1)) for _ in range(_SUMS)]}
    timed = {"none": (plan(_step, "allreduce"), _state()), "sums": (plan(with_sums, "allreduce"), more)}
    found = _times(timed, devices)
    return max(0.0, found["sums"] - found["none"]) / _SUMS


def _times(steps: Mapping[str, tuple[Step, Any]], devices: int) -> dict[str, float]:
    """Seconds of each step, taking turns; each has a state."""
    ids = jnp.arange(devices * _IDS, dtype=jnp.int32) * 7 % _ROWS
    states = {name: state for name, (_, state) in steps.items()}
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(_ROUNDS):
        for name, (step, _) in steps.items():
            seconds = []
            for _ in range(_TURN):
                start = time.perf_counter()
                states[name], loss = step(states[name], ids)
                jax.block_until_ready((states[name], loss))
                seconds.append(time.perf_counter() - start)
            found[name].append(statistics.median(seconds[_TURN // 2 :]))
    # The best round of each: others at work on the machine slow down most what waits for others.
    return {name: min(seconds) for name, seconds in found.items()}


def _state() -> Any:
    return {"table": jnp.ones((_ROWS, _WIDTH)), "slot": jnp.ones((_ROWS, _WIDTH))}


def _step(state: Any, ids: Array) -> tuple[Any, Array]:
    """Adagrad on the sum of squares of some rows, clipped by its norm."""
    loss, g = jax.value_and_grad(lambda table: jnp.sum(table[ids] ** 2))(state["table"])
    g = g * jnp.minimum(1.0, 1.0 / jnp.sqrt(jnp.sum(g * g)))
    slot = state["slot"] + g * g
    return {"table": state["table"] - 0.01 * g * jax.lax.rsqrt(slot), "slot": slot}, loss
