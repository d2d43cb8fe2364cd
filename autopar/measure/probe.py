"""Times whole steps: the methods against each other on a table so small that only what they always cost is left; and
what dense parameters and a model's values add to such a step.

In a whole step nothing waits in a cache, and threads wait for each other: what a loop of one operation takes says
little of it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.analysis.work import count_work
from autopar.backends.devices import Devices
from autopar.cost.rates import Curve
from autopar.measure.loops import agreed_turns

Array = Any
Step = Callable[[Any, Any], tuple[Any, Array]]

#: Rows, width and ids a device of the table.
_ROWS, _WIDTH, _IDS = 1024, 8, 4
#: Rounds, and the most turns in each; about the time that the turns of a round may take.
_ROUNDS, _TURN, _TURN_S = 24, 16, 0.03
#: Rows and columns of dense parameters, of which a step gets so many.
_SIDES, _COUNT = (1, 64, 256, 1024), 2
#: Examples a device, few and many, width and hidden units of a perceptron.
_EXAMPLES, _IN, _HIDDEN = (32, 512), 64, 512


@dataclass(frozen=True, slots=True)
class Probed:
    """What whole steps take.

    Attributes:
      calls: Method -> seconds of the step on the small table.
      dense: Seconds that one more dense parameter costs a step, by its bytes: its gradient's AllReduce, clipping, and
        Adagrad.
      moved_byte_s: Seconds of a byte of the batch's values that a model reads or writes: what more examples add to a
        perceptron's step, beside products.
    """

    calls: Mapping[str, float]
    dense: Curve
    moved_byte_s: float


def probe(plan: Callable[[Step, str], Step], methods: tuple[str, ...], devices: Devices, flop_s: float) -> Probed:
    """Time all steps, in turns.

    `plan` gives the planned form of a step by a method; "allreduce" is one of the methods. `flop_s`: seconds of an
    operation of products.
    """
    n = devices.count
    ids = jnp.arange(n * _IDS, dtype=jnp.int32) * 7 % _ROWS
    steps: dict[str, tuple[Any, Any, Any]] = {m: (plan(_step, m), _table(), ids) for m in methods}
    for side in _SIDES:
        state = _with_dense([(side, side)] * _COUNT)
        steps[f"dense {side}"] = plan(_dense_step, "allreduce"), state, ids
    for count in _EXAMPLES:
        batch = {"ids": ids, "x": jnp.full((n * count, _IN), 1e-3, jnp.float32)}
        steps[f"examples {count}"] = (
            plan(_perceptron, "allreduce"),
            _with_dense([(_IN, _HIDDEN), (_HIDDEN, _IN)]),
            batch,
        )
    few, many = (steps[f"examples {count}"] for count in _EXAMPLES)
    work = [count_work(step.entry(state, batch).compiled.analysed) for step, state, batch in (few, many)]
    seconds = _times(steps, devices)
    more = [max(0.0, seconds[f"dense {side}"] - seconds["allreduce"]) / _COUNT for side in _SIDES]
    added = seconds[f"examples {_EXAMPLES[1]}"] - seconds[f"examples {_EXAMPLES[0]}"]
    products = (work[1].on(n) - work[0].on(n)) * flop_s
    moved = (work[1].moved_bytes - work[0].moved_bytes) / n
    return Probed(
        calls={m: seconds[m] for m in methods},
        dense=Curve(tuple((4.0 * side**2, max(more[: k + 1])) for k, side in enumerate(_SIDES))),
        moved_byte_s=max(0.0, added - products) / moved,
    )


def _dense_step(state: Any, ids: Array) -> tuple[Any, Array]:
    """A chain of square matrices, beside the table."""

    def loss_fn(dense: Any) -> Array:
        x = ids[:, None].astype(jnp.float32) * 1e-6 * jnp.ones((1, dense[0].shape[0]))
        for w in dense:
            x = jnp.tanh(x @ w + x)
        return jnp.sum(x)

    return _trained(state, ids, jax.grad(loss_fn)(state["dense"]))


def _perceptron(state: Any, batch: Any) -> tuple[Any, Array]:
    """One hidden layer, beside the table."""

    def loss_fn(dense: Any) -> Array:
        y = jax.nn.relu(batch["x"] @ dense[0]) @ dense[1]
        return jnp.mean((y - batch["x"]) ** 2)

    return _trained(state, batch["ids"], jax.grad(loss_fn)(state["dense"]))


def _trained(state: Any, ids: Array, grads: Any) -> tuple[Any, Array]:
    """The table by `_step`, dense parameters by Adagrad on their gradients, clipped by their norm."""
    new_state, loss = _step({k: state[k] for k in ("table", "slot")}, ids)
    scale = jnp.minimum(1.0, jax.lax.rsqrt(sum(jnp.sum(g * g) for g in grads)))
    grads = [g * scale for g in grads]
    slots = [s + g * g for s, g in zip(state["slots"], grads, strict=True)]
    dense = [w - 0.01 * g * jax.lax.rsqrt(s) for w, g, s in zip(state["dense"], grads, slots, strict=True)]
    return {**new_state, "dense": dense, "slots": slots}, loss


def _with_dense(shapes: list[tuple[int, int]]) -> Any:
    dense, slots = ([jnp.full(shape, x, jnp.float32) for shape in shapes] for x in (1e-3, 1.0))
    return {**_table(), "dense": dense, "slots": slots}


def _times(steps: Mapping[str, tuple[Step, Any, Any]], devices: Devices) -> dict[str, float]:
    """Seconds of each step, all of them in turns for some seconds; each has a state and a batch."""
    states = {name: state for name, (_, state, _) in steps.items()}
    timed: dict[str, list[float]] = {name: [] for name in steps}

    def turn(name: str) -> float:
        step, _, batch = steps[name]
        start = time.perf_counter()
        states[name], loss = step(states[name], batch)
        jax.block_until_ready((states[name], loss))
        return time.perf_counter() - start

    turns = {}
    for name in steps:
        first = min(turn(name) for _ in range(3))
        turns[name] = agreed_turns(devices, np.clip(_TURN_S / first, 2, _TURN))
    for round in range(_ROUNDS):
        for name, count in turns.items():
            if count == _TURN or round % 4 == 0:
                timed[name].append(statistics.median([turn(name) for _ in range(count)][count // 2 :]))
    # The best round of each: others at work on the machine slow down most what waits for others.
    return {name: min(seconds) for name, seconds in timed.items()}


def _table() -> Any:
    return {"table": jnp.ones((_ROWS, _WIDTH)), "slot": jnp.ones((_ROWS, _WIDTH))}


def _step(state: Any, ids: Array) -> tuple[Any, Array]:
    """Adagrad on the sum of squares of some rows, clipped by its norm."""
    loss, g = jax.value_and_grad(lambda table: jnp.sum(table[ids] ** 2))(state["table"])
    g = g * jnp.minimum(1.0, 1.0 / jnp.sqrt(jnp.sum(g * g)))
    slot = state["slot"] + g * g
    return {"table": state["table"] - 0.01 * g * jax.lax.rsqrt(slot), "slot": slot}, loss
