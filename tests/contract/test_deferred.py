"""Deferred rows: what untouched rows missed is replayed, and nobody can tell."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar import jax_compat
from autopar.backends import deferred
from autopar.backends.deferred import Deferred
from autopar.backends.segments import Entries, scales
from autopar.backends.update_log import UpdateLog
from autopar.ir.deferred import Replay
from tests.support.deferred import ROWS, WIDTH, adam, deferring, differ, momentum, one_slot, rows_case, times, two_slots
from tests.support.pairs import diagonal, every
from tests.zoo.case import Case, zipf_ids
from tests.zoo.every_optimizer import lookup_case


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    """All of this is about what is computed, not about how it is rounded."""
    with jax_compat.enable_x64():
        yield


# --- the replay is what makes the numbers ---


def _late(self: Deferred, rows: Any, begin: jax.Array, *rest: Any, _replayed: Any = Deferred._replay_group) -> Any:
    return _replayed(self, rows, jnp.maximum(begin, begin + 1), *rest)  # padding has the largest number


def test_one_step_too_few_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = rows_case(momentum, one_slot)
    assert differ(case, steps=60) == []
    monkeypatch.setattr(Deferred, "_replay_group", _late)
    assert differ(case, steps=60)


def test_a_factor_too_few_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = rows_case(times(lambda count: 0.99))
    assert differ(case, steps=60) == []

    def short(replay: Replay, entries: Entries) -> Any:
        return scales(replay, dataclasses.replace(entries, now=entries.now - 1))

    monkeypatch.setattr(deferred, "scales", short)
    assert differ(case, steps=60)


# --- between steps, rows are brought past the older part of the update log ---


@pytest.fixture
def few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Some rows after each step, as of large tables; counts flushes."""
    monkeypatch.setattr(deferred, "_LEAST_ELEMENTS", 1)
    monkeypatch.setattr(deferred, "_SOME_ELEMENTS", 2 * WIDTH)
    flushes = [0]

    def flush(self: Any, _flush: Callable[..., None] = UpdateLog._flush) -> None:
        flushes[0] += 1
        _flush(self)

    monkeypatch.setattr(UpdateLog, "_flush", flush)
    return flushes


@pytest.mark.parametrize(
    ("update", "log_steps"), diagonal({"adam": adam(), "small moments": adam(b2=0.7), "momentum": momentum}, [24, 2, 7])
)
def test_some_rows_at_a_time(few_at_a_time: list[int], update: Any, log_steps: int) -> None:
    case = rows_case(update, one_slot if update is momentum else two_slots)
    assert differ(case, steps=70, log_steps=log_steps) == []
    assert few_at_a_time == [1], "no step brings all rows up to date: the read at the end does"


@pytest.mark.usefixtures("few_at_a_time")
def test_rows_that_are_left_behind_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(self: Deferred, *operands: Any, _some: Any = Deferred.catch_up_some) -> Any:
        *most, which, ids, times = operands
        return _some(self, *most, which // 2, ids, times)

    monkeypatch.setattr(Deferred, "catch_up_some", forgetful)
    assert differ(rows_case(momentum, one_slot), steps=70)


# --- an optimizer that nobody has heard of ---


class _Spring(NamedTuple):
    speed: Any
    heat: Any
    count: jax.Array


def spring(stiffness: float = 0.02, friction: float = 0.3) -> optax.GradientTransformation:
    """Pulls each row to a sphere, with inertia, and a temperature of its own that the row's speed heats."""

    def init(params: Any) -> _Spring:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return _Spring(zeros, jax.tree.map(lambda p: jnp.ones(p.shape[:1], p.dtype), params), jnp.zeros((), jnp.int32))

    def update(updates: Any, state: _Spring, params: Any = None) -> tuple[Any, _Spring]:
        def moved(g: jax.Array, v: jax.Array, h: jax.Array, p: jax.Array) -> jax.Array:
            radius = jnp.sqrt(jnp.sum(p * p, axis=1, keepdims=True) + 1e-6)
            pull = stiffness * p * (1 - 1 / radius) * jnp.cos(state.count.astype(p.dtype) / 7)
            return (1 - friction) * v - 0.1 * g / h[:, None] - pull

        speed = jax.tree.map(moved, updates, state.speed, state.heat, params)
        heat = jax.tree.map(lambda h, v: 0.95 * h + 0.05 * (1 + jnp.sum(v * v, axis=1)), state.heat, speed)
        return speed, _Spring(speed, heat, state.count + 1)

    return optax.GradientTransformation(init, update)


def test_an_optimizer_of_ones_own() -> None:
    assert differ(lookup_case(spring(), np.float64)) == []


# --- numbers that a replay could get wrong ---

NUMBERS: dict[str, Case | Callable[[], Case]] = {
    "grows": lambda: rows_case(times(lambda count: 1.02)),
    "turns": lambda: rows_case(times(lambda count: -0.99)),
    "becomes zero": lambda: rows_case(times(lambda count: jnp.where(count % 37 == 5, 0.0, 0.99))),
    "halved": lambda: rows_case(times(lambda count: 0.5)),
    "sometimes": lambda: rows_case(times(lambda count: jnp.where(count % 2 == 0, 1.0, 0.9))),
    "rate of zero": lambda: rows_case(times(lambda count: 1 - 0.1 * (count < 0))),
    "hardly moves": lambda: rows_case(times(lambda count: 1 - 1e-13)),
    "overflows where it is zero": lambda: rows_case(times(lambda count: 1e30), start=_sparse),
    "minus zero": lambda: rows_case(adam(decay=0.1), two_slots, start=lambda t: -np.abs(t) * (t > 0)),
    "epsilon of zero": lambda: rows_case(adam(eps=0.0), two_slots),
    "epsilon below zero": lambda: rows_case(adam(eps=-1e-8), two_slots),
    "tiny epsilon": lambda: rows_case(adam(eps=5e-324), two_slots),
    "negative second moments": lambda: rows_case(adam(), lambda t: {"m": 0 * t, "v": -0.1 + 0 * t}),
    "a negative second moment": lambda: rows_case(adam(), lambda t: {"m": 0 * t, "v": (0 * t).at[-3, 1].set(-0.1)}),
    "infinite rows": lambda: rows_case(adam(decay=0.1), two_slots, start=_with(np.inf)),
    "rows that are not numbers": lambda: rows_case(adam(decay=0.1), two_slots, start=_with(np.nan)),
    "huge rows": lambda: rows_case(adam(decay=0.1), two_slots, start=_with(1e308)),
    "huge second moments": lambda: rows_case(adam(), lambda t: {"m": 0 * t, "v": 0 * t + 1e308}),
    "momentum of its own": lambda: rows_case(momentum, lambda t: {"m": 1e-3 + 0 * t}),
}


def _sparse(table: np.ndarray) -> np.ndarray:
    return table * 0


def _with(value: float) -> Callable[[np.ndarray], np.ndarray]:
    def start(table: np.ndarray) -> np.ndarray:
        table[-3, 1] = value
        return table

    return start


@pytest.mark.parametrize("name", every(3, NUMBERS))
def test_numbers(name: str) -> None:
    assert differ(NUMBERS[name](), steps=60, log_steps=7) == []


@pytest.mark.parametrize("name", ["overflows where it is zero", "halved", "grows"])
def test_numbers_over_a_long_update_log(name: str) -> None:
    assert differ(NUMBERS[name](), steps=90, log_steps=80) == []


def test_small_numbers_keep_their_digits() -> None:
    """A second moment that fell for long is small, but it divides: relative errors count."""
    case = rows_case(adam(b2=0.7), lambda t: {"m": 0 * t, "v": 0 * t + 1e6})
    planned, plain = deferring(case.step, 100, donate=False), jax.jit(case.step)
    mine = theirs = case.state
    for k in range(90):
        mine, theirs = planned(mine, case.batches(k))[0], plain(theirs, case.batches(k))[0]
    assert float(theirs["slots"]["v"][-1, 0]) < 1e-7
    np.testing.assert_allclose(mine["slots"]["v"], theirs["slots"]["v"], rtol=1e-12)


WITH_GRADIENTS: dict[str, Callable[[], Any]] = {
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(0.1), 2),
    "clipped adam": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1)),
    "clipped momentum": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1, momentum=0.9)),
    "zero_nans": lambda: optax.chain(optax.zero_nans(), optax.rmsprop(0.1)),
    "MultiSteps": lambda: optax.MultiSteps(optax.adamw(0.1), 3).gradient_transformation(),
}


@pytest.mark.parametrize(("tx", "value"), diagonal(WITH_GRADIENTS, [np.nan, np.inf, -np.inf, 0.0, 1e200]))
def test_a_gradient_that_is_not_finite(tx: Callable[[], Any], value: float) -> None:
    chosen = tx()

    def update(t: jax.Array, g: jax.Array, s: Any, count: jax.Array) -> Any:
        updates, s = chosen.update(g, s, t)
        return t + updates, s

    case = rows_case(update, chosen.init, scales=lambda k: value if k in (17, 18) else 1.0)
    assert differ(case, steps=40, log_steps=7) == []


# --- optimizers as they are combined ---


def _wide(schedule: Callable[..., Any]) -> Callable[[Any], Any]:
    """A schedule counts in float32, which two programs round differently, unless its count is float64."""
    return lambda count: schedule(jnp.asarray(count, jnp.float64))


def _restarts() -> Any:
    cycles = [optax.warmup_cosine_decay_schedule(0.0, 0.1, 5, 20, 0.0) for _ in range(4)]
    return _wide(optax.join_schedules(cycles, [20, 40, 60]))


def _table_only(params: Any) -> Any:
    return {name: name == "emb" for name in params}


def _rest_only(params: Any) -> Any:
    return {name: name != "emb" for name in params}


COMBINED: dict[str, Callable[[], Any]] = {
    "decay with a mask": lambda: optax.adamw(0.1, weight_decay=1e-2, mask=_table_only),
    "decay masked out": lambda: optax.adamw(0.1, weight_decay=1e-2, mask=_rest_only),
    "restarts": lambda: optax.adamw(_restarts()),
    "rate becomes zero": lambda: optax.adamw(_wide(optax.linear_schedule(0.1, 0.0, 30))),
    "injected": lambda: optax.inject_hyperparams(optax.adamw)(
        learning_rate=_wide(optax.linear_schedule(0.1, 0.01, 50))
    ),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(0.1), 4).gradient_transformation(),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(0.1), 3),
    "bfloat16 momentum": lambda: optax.adam(0.1, mu_dtype=jnp.bfloat16),
    "nesterov": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "clipped by value after": lambda: optax.chain(optax.adam(0.1), optax.clip(0.05)),
}


@pytest.mark.parametrize("name", every(2, COMBINED))
def test_combined(name: str) -> None:
    assert differ(lookup_case(COMBINED[name](), np.float64), steps=80) == []


@pytest.mark.parametrize("name", ["lamb", "lars"])
def test_what_mixes_rows_is_dense(name: str) -> None:
    case = lookup_case(getattr(optax, name)(0.1))
    plan = autopar.parallelize(case.step, strategy="ps").planned_for(case.state, case.batches(0)).compiled.plan
    assert not plan.lifts and "reduce_sum over all rows" in plan.parameters[0].reason


@pytest.mark.parametrize("mu", [None, jnp.bfloat16])
def test_bfloat16_tables_are_replayed_bit_by_bit(mu: Any) -> None:
    """What short floats round away in each step can't be multiplied out: each step is replayed."""
    case = lookup_case(optax.adamw(0.1, mu_dtype=mu), jnp.bfloat16)
    assert differ(case, steps=60, share=0.02) == []
    planned = deferring(case.step)
    flushes = [
        e
        for e in planned.planned_for(case.state, case.batches(0)).compiled.program.block.equations
        if e.op == "ap.flush"
    ]
    assert flushes and all(e.params["replay"].scale_only is None for e in flushes)


# --- tables as they are used ---


def _tables(look: Callable[[Any, Any], jax.Array], params: dict[str, tuple[int, ...]], decay: float = 0.0) -> Case:
    """Adam on a loss of what `look(params, ids)` finds; an EMA of all parameters in the state."""
    rng = np.random.default_rng(0)
    start = {name: jnp.asarray(rng.normal(size=shape)) for name, shape in params.items()}
    tx = optax.adamw(0.1, weight_decay=1e-2)

    def step(state: Any, ids: jax.Array) -> tuple[Any, Any]:
        def loss_fn(p: Any) -> jax.Array:
            return jnp.mean(jnp.sin(look(p, ids)) ** 2)

        grads = jax.grad(loss_fn)(state["params"])
        grads = jax.tree.map(lambda g, p: g + decay * p, grads, state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        new = optax.apply_updates(state["params"], updates)
        ema = jax.tree.map(lambda e, p: 0.99 * e + 0.01 * p, state["ema"], new)
        return {"params": new, "opt": opt, "ema": ema}, {}

    state = {"params": start, "opt": tx.init(start), "ema": jax.tree.map(jnp.copy, start)}
    return Case(
        step, state, lambda k: zipf_ids(np.random.default_rng(k), (6,), ROWS), tuple(f"params/{n}" for n in params)
    )


USES: dict[str, Callable[[], Case]] = {
    "ema of the table": lambda: _tables(lambda p, ids: p["t"][ids], {"t": (ROWS, WIDTH)}),
    "penalty": lambda: _tables(lambda p, ids: p["t"][ids], {"t": (ROWS, WIDTH)}, decay=1e-3),
    "columns as rows": lambda: _tables(lambda p, ids: p["t"][:, ids], {"t": (WIDTH, ROWS)}),
    "of rank 1": lambda: _tables(lambda p, ids: p["t"][ids], {"t": (ROWS,)}),
    "of rank 3": lambda: _tables(lambda p, ids: p["t"][ids], {"t": (ROWS, 2, 2)}),
    "middle axis": lambda: _tables(lambda p, ids: p["t"][:, ids], {"t": (2, ROWS, 2)}),
    "read twice": lambda: _tables(lambda p, ids: p["t"][ids] * p["t"][(7 * ids) % ROWS], {"t": (ROWS, WIDTH)}),
    "two of one size": lambda: _tables(
        lambda p, ids: p["t"][ids] * p["u"][(7 * ids) % ROWS], {"t": (ROWS, WIDTH), "u": (ROWS, WIDTH)}
    ),
    "two that are added": lambda: _tables(
        lambda p, ids: (p["t"] + p["u"])[ids], {"t": (ROWS, WIDTH), "u": (ROWS, WIDTH)}
    ),
    "ids of the other": lambda: _tables(
        lambda p, ids: p["t"][jnp.argmax(p["u"][ids], axis=-1) + ids // 2] + p["u"][ids],
        {"t": (ROWS, WIDTH), "u": (ROWS, WIDTH)},
    ),
    "in a scan": lambda: _tables(
        lambda p, ids: jax.lax.scan(lambda h, i: (jnp.tanh(h + p["t"][i]), p["t"][i]), jnp.zeros(WIDTH), ids)[1],
        {"t": (ROWS, WIDTH)},
    ),
    "several tables in one": lambda: _tables(lambda p, ids: p["t"][ids % 2, ids], {"t": (2, ROWS, WIDTH)}),
    "two rows": lambda: _tables(lambda p, ids: p["t"][ids % 2], {"t": (2, WIDTH)}),
    "as many rows as ids": lambda: _tables(lambda p, ids: p["t"][ids % 6], {"t": (6, 6)}),
    "out of range": lambda: _tables(
        lambda p, ids: p["t"].at[3 * ids].get(mode="fill", fill_value=0.5), {"t": (ROWS, WIDTH)}
    ),
}


@pytest.mark.parametrize("name", every(3, USES))
def test_uses(name: str) -> None:
    assert differ(USES[name](), steps=60, log_steps=9) == []


@pytest.mark.parametrize("reverse", [False, True])
def test_several_steps_a_call(reverse: bool) -> None:
    """Rows that a loop over steps doesn't touch are multiplied as those of one step are, and slots are no tables."""
    one = rows_case(adam(), two_slots)

    def step(state: Any, batches: Any) -> tuple[Any, Any]:
        return jax.lax.scan(one.step, state, batches, reverse=reverse)

    def stacked(k: int) -> Any:
        return jax.tree.map(lambda *x: np.stack(x), *(one.batches(3 * k + i) for i in range(3)))

    case = Case(step, one.state, stacked, one.tables)
    assert differ(case, steps=40) == []
    compiled = deferring(case.step).planned_for(case.state, case.batches(0)).compiled
    assert [table.path for table in compiled.plan.tables] == ["table"]
    (flush,) = (e for e in compiled.program.block.equations if e.op == "ap.flush")
    assert flush.params["replay"].scale_only is not None


def test_one_leaf_in_two_places() -> None:
    """`ema = params` by reference: two leaves of the state are one."""
    case = USES["ema of the table"]()

    def between(k: int, state: Any) -> Any:
        return {**state, "ema": state["params"]} if k % 10 == 4 else state

    assert differ(case, steps=40, log_steps=7, between=between) == []
