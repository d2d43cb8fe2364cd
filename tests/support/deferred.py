"""Runs a step whose untouched rows are deferred beside the plain one, and compares what became of the state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from autopar.run.step import ParallelStep
from tests.support.settings import set_options
from tests.zoo.case import Case, key_path, zipf_ids

#: Of a table by hand.
ROWS, WIDTH = 40, 3
#: Steps in an update log here: much fewer than in a run, so that there are many flushes.
LOG_STEPS = 24


def deferring(
    step: Callable[..., Any], log_steps: int = LOG_STEPS, *, strategy: Any = "ps", **options: Any
) -> ParallelStep:
    """The planned step with a short update log."""
    made = autopar.parallelize(step, strategy=strategy, **options)
    set_options(made, log_steps=log_steps)
    return made


def differences(start: Any, plain: Any, mine: Any, share: float) -> list[str]:
    """Leaves of which some element errs by more than a share of the leaf's largest change, or is of another kind."""
    found = []
    leaves = jax.tree_util.tree_leaves_with_path(plain)
    for (path, a), b, old in zip(leaves, jax.tree.leaves(mine), jax.tree.leaves(start), strict=True):
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b, old = map(jax.random.key_data, (a, b, old))
        same_type = a.dtype == b.dtype and a.shape == b.shape
        x, y, z = (np.asarray(v).astype(np.float64) for v in (a, b, old))
        with np.errstate(invalid="ignore"):
            finite = np.isfinite(x)
            same_kind = np.array_equal(np.where(finite, 0, x), np.where(np.isfinite(y), 0, y), equal_nan=True)
            change = np.max(np.abs(x - z), where=finite, initial=0)
            error = np.max(np.abs(x - y), where=finite, initial=0)
        if not (same_type and same_kind and error <= share * change):
            found.append(f"{key_path(path)}: errs by {error:.3g}, changed by {change:.3g}, alike: {same_kind}")
    return found


def differ(
    case: Case,
    *,
    steps: int = 150,
    share: float = 1e-10,
    log_steps: int = LOG_STEPS,
    tables: Sequence[str] | None = None,
    between: Callable[[int, Any], Any] = lambda k, state: state,
    **options: Any,
) -> list[str]:
    """Train by both steps; what differs at the end, nothing being all right.

    Args:
      case: The step. Each of its tables must be deferred.
      steps: How many.
      share: What may differ, as a share of a leaf's largest change.
      log_steps: Steps in an update log.
      tables: Those that must be deferred, if not all of the case.
      between: What is done to both states before a step.
      **options: Of `parallelize`.
    """
    planned, plain = deferring(case.step, log_steps, **options), jax.jit(case.step)
    theirs, mine = case.state, jax.tree.map(jax.numpy.copy, case.state)
    for k in range(steps):
        batch = case.batches(k)
        theirs, _ = plain(between(k, theirs), batch)
        mine, _ = planned(between(k, mine), batch)
    assert planned.plan is not None and planned.plan.defers
    assert {p.path for p in planned.plan.parameters if "until they are read" in p.reason} >= set(
        case.tables if tables is None else tables
    )
    return differences(case.state, theirs, autopar.materialize(mine), share)


# --- steps on a table by hand ---


def rows_case(
    update: Callable[..., Any],
    slots: Callable[[jax.Array], Any] = lambda table: {},
    start: Callable[[np.ndarray], np.ndarray] = lambda table: table,
    scales: Callable[[int], float] = lambda k: 1.0,
    dtype: Any = np.float64,
) -> Case:
    """`update(table, gradient, slots, count) -> (table, slots)` by hand; ids [4] of ROWS, few of the last ten."""
    table = jnp.asarray(start(np.random.default_rng(0).normal(size=(ROWS, WIDTH))), dtype)

    def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        loss, g = jax.value_and_grad(lambda t: batch["scale"].astype(t.dtype) * jnp.sum(jnp.sin(t[batch["ids"]])))(
            state["table"]
        )
        new, kept = update(state["table"], g, state["slots"], state["count"])
        return {"table": new, "slots": kept, "count": state["count"] + 1}, loss

    def batches(k: int) -> dict[str, Any]:
        ids = zipf_ids(np.random.default_rng(k), (4,), ROWS - 10)
        return {"ids": ids, "scale": np.float64(scales(k))}

    return Case(step, {"table": table, "slots": slots(table), "count": jnp.zeros((), jnp.int32)}, batches, ("table",))


def momentum(t: jax.Array, g: jax.Array, s: Any, count: jax.Array) -> Any:
    m = 0.9 * s["m"] + g
    return t - 0.1 * m, {"m": m}


def one_slot(t: jax.Array) -> Any:
    return {"m": jnp.zeros_like(t)}


def two_slots(t: jax.Array) -> Any:
    return {"m": jnp.zeros_like(t), "v": jnp.zeros_like(t)}


def adam(eps: float = 1e-8, decay: float = 0.0, b2: float = 0.99) -> Callable[..., Any]:
    def update(t: jax.Array, g: jax.Array, s: Any, count: jax.Array) -> Any:
        m, v = 0.9 * s["m"] + 0.1 * g, b2 * s["v"] + (1 - b2) * g * g
        return t - 0.1 * (m / (jnp.sqrt(v) + eps) + decay * t), {"m": m, "v": v}

    return update


def times(factor: Callable[[jax.Array], Any]) -> Callable[..., Any]:
    return lambda t, g, s, count: (factor(count) * t - 0.1 * g, s)
