"""Times whole steps: the methods against each other on a table so small that only what they always cost is left; and
what dense parameters and a model's values add to such a step. Two at a time, so that each pair can be timed by itself.

In a whole step nothing waits in a cache, and threads wait for each other: what a loop of one operation takes says
little of it.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.analysis.work import count_work
from autopar.backends.devices import Devices
from autopar.measure.figures import BASE
from autopar.measure.loops import agreed_turns

Array = Any
Step = Callable[[Any, Any], tuple[Any, Array]]
#: Gives the planned form of a step by a method.
StepPlanner = Callable[[Step, str], Any]
#: A planned step, what makes its state, and its batch.
Timed = tuple[Any, Callable[[], Any], Any]

#: Rows, width and ids a device of the table.
_ROWS, _WIDTH, _IDS = 1024, 8, 4
#: Rounds, and the most turns in each; about the time that the turns of a round may take.
_ROUNDS, _TURN, _TURN_S = 12, 16, 0.02
#: Dense parameters that a step gets.
_COUNT = 2
#: Examples a device, few and many, width and hidden units of a perceptron.
_EXAMPLES, _IN, _HIDDEN = (32, 512), 64, 512


class WholeSteps:
    """Steps that are compiled when they are first timed, each in turns with the base, the plain step by AllReduce.

    Args:
      plan: Gives the planned form of a step by a method.
      devices: Those that run them.
    """

    def __init__(self, plan: StepPlanner, devices: Devices) -> None:
        self._plan, self._devices = plan, devices
        self._ids = jnp.arange(devices.count * _IDS, dtype=jnp.int32) * 7 % _ROWS

    @functools.cached_property
    def _base(self) -> Timed:
        return self._plan(_step, BASE), _table, self._ids

    def call_s(self) -> float:
        """Seconds of the base."""
        return _times({BASE: self._base}, self._devices)[BASE]

    def method_s(self, method: str) -> float:
        """Seconds that the step takes longer by a method than by the base's."""
        return self._more((self._plan(_step, method), _table, self._ids))

    def dense_s(self, size: int) -> float:
        """Seconds that one more dense parameter of so many bytes costs a step."""
        side = math.isqrt(size // 4)
        state = functools.partial(_with_dense, [(side, side)] * _COUNT)
        return max(0.0, self._more((self._plan(_dense_step, BASE), state, self._ids)) / _COUNT)

    def moved_byte_s(self, flop_s: float) -> float:
        """Seconds of a byte of the batch's values that a model reads or writes: what more examples add to a
        perceptron's step, beside products. `flop_s`: seconds of an operation of those."""
        n = self._devices.count
        state = functools.partial(_with_dense, [(_IN, _HIDDEN), (_HIDDEN, _IN)])
        batches = [{"ids": self._ids, "x": jnp.full((n * count, _IN), 1e-3, jnp.float32)} for count in _EXAMPLES]
        few, many = ((self._plan(_perceptron, BASE), state, batch) for batch in batches)
        seconds = _times({"few": few, "many": many}, self._devices)
        work = [count_work(step.entry(state(), batch).compiled.analysed) for step, _, batch in (few, many)]
        products = (work[1].on(n) - work[0].on(n)) * flop_s
        moved = (work[1].moved_bytes - work[0].moved_bytes) / n
        return max(0.0, seconds["many"] - seconds["few"] - products) / moved

    def _more(self, timed: Timed) -> float:
        seconds = _times({"base": self._base, "step": timed}, self._devices)
        return seconds["step"] - seconds["base"]


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


def _times(steps: Mapping[str, Timed], devices: Devices) -> dict[str, float]:
    """Seconds of each step, all of them in turns."""
    states = {name: make() for name, (_, make, _) in steps.items()}
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
