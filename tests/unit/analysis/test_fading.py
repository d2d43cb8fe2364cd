"""Rows whose momentum has faded aren't replayed to the end: nobody can tell, and what says so is a bound."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar import jax_compat
from autopar.analysis.scale_only import RowUpdate, factors, fading_numbers
from autopar.backends import segments
from autopar.backends.deferred import Deferred
from autopar.backends.emit import deferred_of
from autopar.ir.deferred import FLOORS, flushes
from tests.support.deferred import deferring, differ, one_slot, rows_case, two_slots
from tests.support.pairs import every
from tests.zoo.case import Case

#: Momentum that is lost in rounding (float64) after some 35 steps, well within an update log.
FAST, LONG = 0.3, 80


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax_compat.enable_x64():
        yield


def momentum(rate: Callable[[jax.Array], Any] = lambda count: 0.1) -> Callable[..., Any]:
    def update(t: jax.Array, g: jax.Array, s: Any, count: jax.Array) -> Any:
        m = FAST * s["m"] + g
        return t - rate(count) * m, {"m": m}

    return update


def adam(
    rate: Callable[[jax.Array], Any] = lambda count: 0.1, eps: float = 1e-8, decay: float = 0.0
) -> Callable[..., Any]:
    def update(t: jax.Array, g: jax.Array, s: Any, count: jax.Array) -> Any:
        m, v = FAST * s["m"] + (1 - FAST) * g, 0.99 * s["v"] + 0.01 * g * g
        return t - rate(count) * (m / (jnp.sqrt(v) + eps) + decay * t), {"m": m, "v": v}

    return update


def _zero_at_times(count: jax.Array) -> jax.Array:
    """Momentum that does nothing now moves rows later."""
    return jnp.where(count % 20 < 10, 0.0, 0.1)


def _not_a_number_once(count: jax.Array) -> jax.Array:
    return jnp.where(count == 70, jnp.nan, 0.1)


CASES: dict[str, Callable[[], Case]] = {
    "momentum": lambda: rows_case(momentum(), one_slot),
    "adam": lambda: rows_case(adam(), two_slots),
    "adam with decay": lambda: rows_case(adam(decay=0.1), two_slots),
    "a rate that jumps": lambda: rows_case(momentum(_zero_at_times), one_slot),
    "adam's rate jumps": lambda: rows_case(adam(_zero_at_times, decay=1e-9), two_slots),
    "not a number": lambda: rows_case(adam(_not_a_number_once, decay=0.1), two_slots),
    "rows of zeros": lambda: rows_case(adam(), two_slots, start=lambda t: 0 * t),
    "no epsilon": lambda: rows_case(adam(eps=0.0), two_slots),
    "a divisor by column": lambda: rows_case(_divided_by_column, two_slots, start=lambda t: 1e10 * t),
    "infinite": lambda: rows_case(adam(decay=0.1), two_slots, start=_infinite),
    "a second moment below zero": lambda: rows_case(
        adam(), lambda t: {"m": 0 * t + 1e-3, "v": (0 * t).at[5, 1].set(-1.0)}
    ),
    "a large second moment": lambda: rows_case(adam(), lambda t: {"m": 0 * t + 1e-3, "v": 0 * t + 1e300}),
    "growing momentum": lambda: rows_case(
        lambda t, g, s, count: (t - 1e-9 * s["m"], {"m": 1.1 * s["m"] + g}), one_slot
    ),
}


def _divided_by_column(t: jax.Array, g: jax.Array, s: Any, count: jax.Array) -> Any:
    """The least of a quotient is that by the largest divisor."""
    by = jnp.asarray([1.0, 1.0, 1e10]) + 0 * count
    m, v = FAST * s["m"] + (g != 0), 0.99 * s["v"] + 0.01 * (g != 0)
    return t - 0.1 * (m / (jnp.sqrt(v) / by + 1e-16)), {"m": m, "v": v}


def _down_and_up(t: jax.Array, g: jax.Array, s: Any, count: jax.Array) -> Any:
    """A row becomes far smaller than it was, and with it what rounding does."""
    m = FAST * s["m"] + g
    return jnp.where(count % LONG < LONG / 2, 0.1, 10.0) * t - 0.1 * m, {"m": m}


def _second_moment_sinks(t: jax.Array, g: jax.Array, s: Any, count: jax.Array) -> Any:
    """By momentum, in the end below zero."""
    m, v = FAST * s["m"] + (g != 0), 0.1 * s["v"] - 1e-24 * s["m"] + (g != 0)
    return t - 0.1 * m / (jnp.sqrt(s["v"]) + 1e-6), {"m": m, "v": v}


def _touched_once(case: Case, row: int = 20, at: int = 7) -> Case:
    """A row; others are read, with a gradient of zero."""

    def batches(k: int) -> dict[str, Any]:
        return {"ids": np.full((4,), row * (k == at), np.int32), "scale": np.float64(k == at)}

    return dataclasses.replace(case, batches=batches)


@pytest.mark.parametrize("update", [_down_and_up, _second_moment_sinks])
def test_rows_that_become_small(update: Callable[..., Any]) -> None:
    slots = two_slots if update is _second_moment_sinks else one_slot
    assert differ(_touched_once(rows_case(update, slots)), steps=LONG, log_steps=LONG) == []


def _infinite(table: np.ndarray) -> np.ndarray:
    table[5, 1] = np.inf
    return table


@pytest.mark.parametrize("name", every(4, CASES))
def test_numbers(name: str) -> None:
    assert differ(CASES[name](), steps=170, log_steps=LONG) == []


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_stopping_too_early_is_noticed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(segments, "_NEGLIGIBLE", 1e9)
    assert differ(CASES[name](), steps=170, log_steps=LONG)


@pytest.mark.parametrize(("name", "fades"), [("momentum", True), ("adam", True), ("growing momentum", False)])
def test_rows_stop(monkeypatch: pytest.MonkeyPatch, name: str, fades: bool) -> None:
    """Replay that goes wrong after 60 steps goes unnoticed if rows have faded by then."""
    steps: list[int] = []
    update = Deferred._replay_group

    def counted(self: Deferred, *operands: Any) -> Any:
        def told(*rows_and_values: Any) -> Any:
            jax.debug.callback(lambda: steps.append(1))
            return self_phi(*rows_and_values)

        self_phi = self.update
        return update(Deferred(self.replay, self.body, told), *operands)

    monkeypatch.setattr(Deferred, "_replay_group", counted)
    case = CASES[name]()
    planned = deferring(case.step, LONG)
    state, _ = planned(jax.tree.map(jnp.copy, case.state), case.batches(0))
    one = {**case.batches(0), "ids": np.full((4,), 39, np.int32)}
    for _ in range(75):
        state, _ = planned(state, one)
    jax.block_until_ready(state)
    steps.clear()
    autopar.materialize(state)
    jax.effects_barrier()
    assert (len(steps) < 75) == fades


def test_what_shrinks_keeps_its_digits() -> None:
    """Rounding that was usual for a row's larger elements isn't for what became of them."""

    def update(t: jax.Array, g: jax.Array, s: Any, count: jax.Array) -> Any:
        m = FAST * s["m"] + g
        return 0.5 * t - 0.1 * m, {"m": m}

    case = rows_case(update, one_slot)
    planned, plain = deferring(case.step, LONG), jax.jit(case.step)
    mine, theirs = jax.tree.map(jnp.copy, case.state), case.state
    for k in range(72):
        batch = {**case.batches(k), "ids": np.arange(4, dtype=np.int32) if k < 2 else np.full((4,), 39, np.int32)}
        mine, theirs = planned(mine, batch)[0], plain(theirs, batch)[0]
    assert 0 < np.abs(theirs["table"][:4]).max() < 1e-20
    np.testing.assert_allclose(np.asarray(mine["table"])[:4], theirs["table"][:4], rtol=1e-12)


# --- the bound ---

OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "adamw": lambda: optax.adamw(optax.exponential_decay(1e-2, 10, 0.9), weight_decay=1e-2),
    "nesterov": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "rmsprop with momentum": lambda: optax.rmsprop(1e-2, momentum=0.9, decay=0.99),
    "amsgrad-free nadam": lambda: optax.nadamw(1e-2),
    "radam": lambda: optax.radam(1e-2),
    "epsilon in the root": lambda: optax.chain(optax.scale_by_adam(eps=0.0, eps_root=1e-6), optax.scale(-0.1)),
}


def _deferred(tx: optax.GradientTransformation) -> Deferred:
    def update(t: jax.Array, g: jax.Array, s: Any, count: jax.Array) -> Any:
        updates, s = tx.update(g, s, t)
        return t + updates, s

    case = rows_case(update, tx.init)
    (flush,) = flushes(deferring(case.step).planned_for(case.state, case.batches(0)).compiled.program.block)
    return deferred_of(flush)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_nothing_reaches_farther_than_the_bound(name: str) -> None:
    """The untouched update on random rows and random numbers of a step, beside what analysis says of them."""
    deferred = _deferred(OPTIMIZERS[name]())
    p, body = deferred.replay, deferred.body
    row_update = RowUpdate(body, p.changed, p.read)
    assert p.scale_only is not None and p.fading is not None and p.fading.pairs
    rng = np.random.default_rng(0)
    update = jax.jit(deferred.update)
    for _ in range(200):
        values = [np.asarray(rng.choice([1e-3, 0.5, 1.0, 0.0]) * (t.dtype.kind == "f"), t.dtype) for t in p.values]
        leaves = []
        for k, var in enumerate(body.inputs[: p.changed]):
            leaf = rng.normal(size=var.shape) * 10.0 ** rng.integers(-9, 3, var.shape)
            leaves.append(np.abs(leaf) if k in p.scale_only.not_negative else leaf)
        *rates, holds = factors(row_update, p.scale_only, values, np)
        numbers = fading_numbers(row_update, p.scale_only, p.fading, values, np)
        if not holds:
            continue
        new = [np.asarray(x) for x in update(*leaves, *values)]
        own, reaches = numbers[: len(p.scale_only.zero)], numbers[len(p.scale_only.zero) :]
        for leaf, by in zip(p.fading.zero, own, strict=True):
            np.testing.assert_allclose(new[leaf], leaves[leaf] * by, rtol=1e-12)
        for leaf, rate, near_one in zip(p.scale_only.scaled, rates, p.scale_only.near_one, strict=True):
            moved = np.abs(new[leaf] - leaves[leaf] * (1 + rate if near_one else rate))
            rounding = 1e-14 * (np.abs(new[leaf]) + np.abs(leaves[leaf]))
            for f, floor in enumerate(FLOORS):
                above = np.ones(moved.shape, bool)
                for x in p.fading.floors:
                    above &= leaves[x] >= floor
                pairs = [(z, reach) for (x, z), reach in zip(p.fading.pairs, reaches, strict=True) if x == leaf]
                most = sum((np.abs(leaves[z]) * reach[f] for z, reach in pairs), np.zeros_like(moved))
                assert np.all((moved <= most * (1 + 1e-12) + rounding) | ~above), (name, floor)
