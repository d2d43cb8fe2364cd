"""Pieces of a session: what is around a step, how it is called, what a user does between its calls (`pieces.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import autopar
from tests.fuzz.pieces import Pieces
from tests.fuzz.skeleton import batch, whole
from tests.support.ingredients import IDS, WIDTH

# --- what is around a step ---


def _twice(train: Any) -> Any:
    def step(state: Any, batch: Any) -> Any:
        state, first = train(state, batch)
        state, second = train(state, {**batch, "y": -batch["y"]})
        return state, (first, second)

    return step


def _scanned(train: Any) -> Any:
    def step(state: Any, batch: Any) -> Any:
        return lax.scan(lambda s, scale: train(s, {**batch, "y": batch["y"] * scale}), state, jnp.array([1.0, 0.5]))

    return step


def _looped(train: Any) -> Any:
    def step(state: Any, batch: Any) -> Any:
        return lax.fori_loop(0, 2, lambda k, s: train(s, batch)[0], state), batch["y"].sum()

    return step


def _skipped(train: Any) -> Any:
    def step(state: Any, batch: Any) -> Any:
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(train, state, batch)[1])
        return lax.cond(batch["ids"][0].sum() > -5, train, lambda s, b: (s, nothing), state, batch)

    return step


AROUND: Pieces = {
    "nothing": lambda train: train,
    "jit": lambda train: jax.jit(train),
    "twice": _twice,
    "scan": _scanned,
    "counted loop": _looped,
    "skipped by the batch": _skipped,
    "checkpoint": lambda train: jax.checkpoint(train),
}


class _Named(NamedTuple):
    params: Any
    rest: Any


def _apart(train: Any) -> Any:
    def step(params: Any, rest: Any, batch: Any) -> Any:
        state, results = train({**rest, "params": params}, batch)
        return state.pop("params"), state, results

    return step


def _call_apart(f: Any, state: Any, batch: Any) -> Any:
    params, rest, results = f(state["params"], {n: x for n, x in state.items() if n != "params"}, batch)
    return {**rest, "params": params}, results


def _in_a_tuple(train: Any) -> Any:
    def step(state: Any, batch: Any) -> Any:
        new, results = train({**state.rest, "params": state.params}, batch)
        return _Named(new.pop("params"), new), results

    return step


def _call_in_a_tuple(f: Any, state: Any, batch: Any) -> Any:
    new, results = f(_Named(state["params"], {n: x for n, x in state.items() if n != "params"}), batch)
    return {**new.rest, "params": new.params}, results


def _batch_first(train: Any) -> Any:
    def step(batch: Any, state: Any) -> Any:
        return train(state, batch)

    return step


#: How the step takes its state: (the step as a function, a call of it).
CALLS: Pieces = {
    "state, batch": (lambda train: train, lambda f, state, batch: f(state, batch)),
    "params, rest, batch": (_apart, _call_apart),
    "a named tuple": (_in_a_tuple, _call_in_a_tuple),
    "batch, state": (_batch_first, lambda f, state, batch: f(batch, state)),
}


# --- what a user does, at the k-th place of a session ---


def _replace(s: Any, part: str, changed: Callable[[Any], Any]) -> None:
    s.state = {**s.state, part: changed(s.state[part])}


def _own_step(s: Any, k: Any) -> None:
    """A plain step in between, on whole arrays: XLA partitions one of spread tables, and gets some gradients wrong."""
    s.state, results = s.call(s.plain_step, jax.tree.map(whole, autopar.materialize(s.state)), batch(k))
    s.see(results)


def _on_disk(s: Any, k: Any) -> None:
    s.state = s.kept_on_disk()


def _materialized(s: Any, k: Any) -> None:
    s.state = autopar.materialize(s.state)


def _rebuilt(s: Any, k: Any) -> None:
    s.state = jax.tree.map(lambda x: x, s.state)


def _as_numpy(s: Any, k: Any) -> None:
    s.state = jax.tree.map(np.asarray, autopar.materialize(s.state))


def _gone_back(s: Any, k: Any) -> None:
    s.state = s.older_state()


def _two_branches(s: Any, k: Any) -> None:
    state = s.state
    s.train(batch(k))
    s.see(s.state)
    s.state = state


def _older_slots(s: Any, k: Any) -> None:
    older = s.older_state()
    _replace(s, "slots", lambda slots: older["slots"])


def _new_table(s: Any, k: Any) -> None:
    _replace(s, "params", lambda p: {**p, "table0": jnp.asarray(np.asarray(autopar.materialize(p["table0"])) * 0.5)})


def _new_slots(s: Any, k: Any) -> None:
    _replace(s, "slots", lambda slots: jax.tree.map(jnp.zeros_like, autopar.materialize(slots)))


EVENTS: Pieces = {
    "step": lambda s, k: s.train(batch(k)),
    "step, other size": lambda s, k: s.train(batch(k, 2 * IDS)),
    "step, no ids": lambda s, k: s.train(batch(k, 0)),
    "step, other constants": lambda s, k: s.train(batch(k), s.other_step),
    "another planned step": lambda s, k: s.train(batch(k), s.second_step),
    "plain step": _own_step,
    "evaluation": lambda s, k: s.see(s.evaluate(s.state["params"], batch(k))),
    "plain evaluation": lambda s, k: s.see(jax.jit(_own_evaluation)(autopar.materialize(s.state["params"]), batch(k))),
    "read": lambda s, k: s.see(s.state),
    "one leaf read": lambda s, k: s.see(np.asarray(s.state["params"]["table0"])),
    "one row read": lambda s, k: s.see(s.state["params"]["table0"][0]),
    "materialised": _materialized,
    "saved and restored": _on_disk,
    "rebuilt": _rebuilt,
    "as NumPy arrays": _as_numpy,
    "table replaced": _new_table,
    "slots replaced": _new_slots,
    "two branches": _two_branches,
    "back": _gone_back,
    "older slots": _older_slots,
}
#: They use states that were given to a step.
KEEPING = ("two branches", "back", "older slots")


def _own_evaluation(params: Any, batch: Any) -> Any:
    return params["table0"].sum(), params["w"] @ params["bias"] + WIDTH
