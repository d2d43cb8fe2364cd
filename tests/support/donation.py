"""Steps that return states of one shape in another order, and where their buffers are."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from autopar.tables.sharded import DeferredTable, Table

ROWS, WIDTH = 4096, 8
IDS = np.array([1, 5, 5, 4095, 17, 17, 300, 8], np.int32)


def some(seed: int) -> jax.Array:
    """A positive table, of a buffer of its own."""
    return jnp.array(np.random.default_rng(seed).uniform(0.5, 1.0, (ROWS, WIDTH)), jnp.float32) + 0


def gradient(table: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jax.value_and_grad(lambda t: jnp.mean(jnp.tanh(t[ids]) ** 2))(table)


def adagrad(slot: jax.Array, table: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    loss, g = gradient(table, ids)
    slot = slot + g * g
    return slot, table - 0.1 * g / jnp.sqrt(slot), loss, g


@dataclass(frozen=True)
class Case:
    """A step, the states among its arguments, and where they are among its results."""

    step: Callable[..., Any]
    states: Callable[[], tuple[Any, ...]]
    new: Callable[[Any], tuple[Any, ...]]
    options: Any = None

    def planned(self, **options: Any) -> Any:
        return autopar.parallelize(self.step, **{"strategy": "ps", **(self.options or {}), **options})


def _alone(slot: jax.Array, table: jax.Array, ids: jax.Array) -> Any:
    slot, table, loss, _ = adagrad(slot, table, ids)
    return table, slot, loss


def _containers(slot: Any, table: Any, ids: jax.Array) -> Any:
    new = _alone(slot["slot"], table["table"], ids)
    return {"table": new[0]}, {"slot": new[1]}, new[2]


def _gradients_first(state: Any, ids: jax.Array) -> Any:
    slot, table, loss, g = adagrad(state[0], state[1], ids)
    return g, {"again": 2.0 * table, "loss": loss}, (slot, table)


def _gradients_of_the_states_form(state: Any, ids: jax.Array) -> Any:
    loss, g = gradient(state["table"], ids)
    return {"table": g}, {"table": state["table"] - 0.1 * g}, loss


def _unread(last: Any, table: Any, ids: jax.Array) -> Any:
    """The slot holds the last gradient, of which the next step reads nothing."""
    loss, g = gradient(table["table"], ids)
    return {"last": g}, {"table": table["table"] - 0.1 * g}, loss


def _untouched(frozen: Any, table: Any, ids: jax.Array) -> Any:
    loss, g = gradient(table["table"], ids)
    return loss, {"table": table["table"] - 0.1 * g}, {"frozen": frozen["frozen"]}


def _twice(state: Any, ids: jax.Array) -> Any:
    slot, table, loss, _ = adagrad(state[0], state[1], ids)
    return loss, slot + 1.0, table, (slot, table)


CASES = {
    "arrays by themselves": Case(_alone, lambda: (some(0), some(1)), lambda r: (r[1], r[0])),
    "containers": Case(_containers, lambda: ({"slot": some(0)}, {"table": some(1)}), lambda r: (r[1], r[0])),
    "gradients first": Case(_gradients_first, lambda: ((some(0), some(1)),), lambda r: (r[2],)),
    "gradients of the state's form": Case(
        _gradients_of_the_states_form, lambda: ({"table": some(1)},), lambda r: (r[1],)
    ),
    "an unread state": Case(
        _unread, lambda: ({"last": some(0)}, {"table": some(1)}), lambda r: (r[0], r[1]), {"state_argnums": (0, 1)}
    ),
    "an untouched state": Case(
        _untouched, lambda: ({"frozen": some(0)}, {"table": some(1)}), lambda r: (r[2], r[1]), {"state_argnums": (0, 1)}
    ),
    "a state that is returned twice": Case(_twice, lambda: ((some(0), some(1)),), lambda r: (r[3],)),
}


def _adam(m: Any, v: Any, table: Any, ids: jax.Array) -> Any:
    loss, g = jax.value_and_grad(lambda t: jnp.mean(jnp.tanh(t[ids]) ** 2))(table["t"])
    new_m, new_v = 0.9 * m["m"] + 0.1 * g, 0.99 * v["v"] + 0.01 * g * g
    return {"t": table["t"] - 0.1 * new_m / (jnp.sqrt(new_v) + 1e-3)}, {"v": new_v}, {"m": new_m}, loss


ADAM = Case(_adam, lambda: ({"m": some(0)}, {"v": some(1)}, {"t": some(2)}), lambda r: (r[2], r[1], r[0]))

#: Those whose other results are as large as a table, and may be copies of one.
LARGE_RESULTS = frozenset({"gradients first", "gradients of the state's form", "a state that is returned twice"})


def stored(leaf: Any) -> jax.Array:
    """The array that a leaf of the state is kept in."""
    if isinstance(leaf, DeferredTable):
        return leaf.pending.leaves[leaf.index]
    return leaf.stored if isinstance(leaf, Table) else leaf


def buffers(states: Any) -> list[list[int]]:
    """Where the leaves are, device by device."""
    arrays = map(stored, jax.tree.leaves(states))
    return [[s.data.unsafe_buffer_pointer() for s in x.addressable_shards] for x in arrays]


def large_copies(text: str, size: int = ROWS * WIDTH) -> list[str]:
    """Copies of at least so many elements in a compiled program."""
    found = re.findall(r"= (\w+\[([\d,]+)\]\S*) copy(?:-start)?\(", text)
    return [shape for shape, sizes in found if np.prod([int(n) for n in sizes.split(",")]) >= size]


def stamp_copies(text: str, count: int = ROWS) -> list[str]:
    """Copies of when each row was last brought up to date, in the compiled program of a step that defers rows."""
    return [shape for shape in large_copies(text, count) if shape.startswith("s32")]


def pairs(text: str) -> dict[int, int]:
    """Result -> parameter whose buffer it takes, of a compiled program."""
    header = text.splitlines()[0]
    return {int(a): int(b) for a, b in re.findall(r"\{(\d+)\}: \((\d+), \{\}, \w+-alias\)", header)}


def check_steps(case: Case, planned: Any, *, first: bool) -> int:
    """Three steps: each writes where the last one wrote, and the numbers are plain ones.

    Args:
      first: Whether the first one writes where the states were, too.

    Returns:
      How many leaves the states have.
    """
    mine, theirs = case.states(), case.states()
    plain = jax.jit(case.step)
    where = buffers(mine) if first else None
    for _ in range(3):
        found, wanted = planned(*mine, IDS), plain(*theirs, IDS)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a), b, rtol=1e-5, atol=1e-6), found, wanted)
        mine, theirs = case.new(found), case.new(wanted)
        assert where is None or buffers(mine) == where
        where = buffers(mine)
    return len(where or ())
