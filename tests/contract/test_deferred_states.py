"""States with deferred rows, and what is done to them between steps."""

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
from autopar.sync import Async
from tests.support.deferred import deferring, differ, differences, rows_case
from tests.support.pairs import diagonal
from tests.zoo.case import Case
from tests.zoo.every_optimizer import lookup_case


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    """All of this is about what is computed, not about how it is rounded."""
    with jax_compat.enable_x64():
        yield


def _trained() -> Case:
    return lookup_case(optax.adamw(0.1, weight_decay=1e-2), np.float64)


def _reset(k: int, state: Any) -> Any:
    """A new optimizer state, the table being deferred."""
    if k % 10 != 9:
        return state
    opt = jax.tree.map(jnp.zeros_like, jax.eval_shape(lambda: optax.adamw(0.1).init(_trained().state["params"])))
    return {**state, "opt": opt}


def _doubled(k: int, state: Any) -> Any:
    """A new table, its optimizer state being deferred."""
    if k % 10 != 9:
        return state
    return {**state, "params": jax.tree.map(lambda p: 2 * jnp.asarray(p), state["params"])}


def _exchanged(k: int, state: Any) -> Any:
    """Both moments, each in the other's place (where it is not negative)."""
    if k % 10 != 9:
        return state
    first, *rest = state["opt"]
    mu = jax.tree.map(lambda x: abs(jnp.asarray(x)), first.mu)
    return {**state, "opt": (first._replace(mu=first.nu, nu=mu), *rest)}


def _read(k: int, state: Any) -> Any:
    if k % 3 == 0:
        np.asarray(state["params"]["emb"])
    if k % 4 == 0:
        jnp.asarray(state["opt"][0].nu["emb"])[:3]
    if k % 5 == 0:
        state["params"]["emb"][7]
    return state


def _rebuilt(k: int, state: Any) -> Any:
    return jax.tree.map(lambda x: x, state)


def _materialized(k: int, state: Any) -> Any:
    return autopar.materialize(state) if k % 7 == 3 else state


BETWEEN = (_reset, _doubled, _exchanged, _read, _rebuilt, _materialized)


@pytest.mark.parametrize(("between", "donate"), diagonal({f.__name__[1:]: f for f in BETWEEN}, [True, False]))
def test_states_between_steps(between: Callable[[int, Any], Any], donate: bool) -> None:
    assert differ(_trained(), steps=40, log_steps=6, between=between, donate=donate) == []


def test_old_states_can_be_used_again() -> None:
    """With donate=False a state stays what it is, whatever its successors are used for."""
    case = _trained()
    planned, plain = deferring(case.step, 6, donate=False), jax.jit(case.step)
    mine, theirs = [case.state], [case.state]
    order = np.random.default_rng(0)
    for k in range(40):
        old = int(order.integers(max(0, len(mine) - 4), len(mine)))
        mine.append(planned(mine[old], case.batches(k))[0])
        theirs.append(plain(theirs[old], case.batches(k))[0])
        if k % 5 == 0:
            np.asarray(mine[old]["params"]["emb"])
    for a, b in zip(theirs[1:], mine[1:], strict=True):
        assert differences(case.state, a, autopar.materialize(b), 1e-10) == []


def test_a_donated_state_is_gone() -> None:
    case = _trained()
    planned = deferring(case.step)
    state, _ = planned(jax.tree.map(jnp.copy, case.state), case.batches(0))
    planned(state, case.batches(1))
    with pytest.raises(
        autopar.errors.DonatedStateError, match=r"given before \(argument 0, opt/0/count\): .*donate=False"
    ):
        planned(state, case.batches(2))
    with pytest.raises(autopar.errors.DonatedStateError, match="given to a later step"):
        np.asarray(state["params"]["emb"])


def test_what_was_read_stays_what_it_was() -> None:
    """Later steps update in place: nothing that was handed out may change with them, or vanish."""
    case = _trained()
    planned = deferring(case.step, 6)
    state = jax.tree.map(jnp.copy, case.state)
    held = []
    evaluated = autopar.parallelize(lambda table, ids: (table, table[ids]))
    for k in range(20):
        state, _ = planned(state, case.batches(k))
        emb = state["params"]["emb"]
        reads = (np.asarray, jnp.asarray, lambda x: x[:], lambda x: x[...], autopar.materialize)
        held += [(read(emb), np.array(emb)) for read in reads]
        held.append((evaluated(emb, jnp.arange(3))[0], np.array(emb)))
    for read, copied in held:
        np.testing.assert_array_equal(read, copied)


@pytest.mark.filterwarnings("ignore::autopar.RecompileWarning")
def test_two_shapes_of_batches() -> None:
    case = _trained()

    def batches(k: int) -> Any:
        batch = case.batches(k)
        return jax.tree.map(lambda x: x[:4], batch) if k % 3 == 0 else batch

    assert differ(dataclasses.replace(case, batches=batches), steps=60, log_steps=7) == []


def _rates() -> list[Case]:
    return [lookup_case(optax.adamw(rate, weight_decay=0.1), np.float64) for rate in (0.1, 0.1 * (1 + 1e-7))]


def _arrays() -> list[Case]:
    def made(columns: list[float]) -> Case:
        by = jnp.array(columns)
        return rows_case(lambda t, g, s, count: (t * by - 0.1 * g, s))

    return [made([0.9, 0.99, 1.0]), made([1.0, 0.9, 0.8])]


def _scalars() -> list[Case]:
    """Arrays of JAX without dimensions."""

    def made(rate: jax.Array) -> Case:
        by = jnp.eye(3)
        return rows_case(lambda t, g, s, count: (t - rate * (s["m"] @ by), {"m": 0.9 * s["m"] + g}), _moments)

    return [made(jnp.float64(rate)) for rate in (0.1, 0.02)]


def _matrices() -> list[Case]:
    """Each row meets one as a whole."""

    def made(by: jax.Array) -> Case:
        return rows_case(lambda t, g, s, count: (t - 0.1 * s["m"] @ by, {"m": 0.9 * s["m"] + g}), _moments)

    return [made(sign * jnp.eye(3)) for sign in (1, -1)]


def _moments(table: jax.Array) -> Any:
    return {"m": jnp.zeros_like(table)}


def _operands() -> list[Case]:
    """Untouched updates that differ in the order of their inputs alone."""

    def made(order: int) -> Case:
        def update(t: jax.Array, g: jax.Array, s: Any, count: Any) -> Any:
            a, b = (t, s["m"])[::order]
            return 0.9 * a - 0.1 * b, {"m": s["m"] + g}

        return rows_case(update, _moments)

    return [made(order) for order in (1, -1)]


@pytest.mark.parametrize(
    ("cases", "strategy"),
    diagonal([_rates, _arrays, _scalars, _matrices, _operands], {"devices": "ps", "hosts": ("ps", "hosts")}),
)
def test_steps_that_differ_in_what_they_close_over_only(cases: Callable[[], list[Case]], strategy: Any) -> None:
    """An update log of another step isn't gone on with: it says what that one does to rows."""
    made = cases()
    planned, plain = [deferring(c.step, 50, strategy=strategy) for c in made], [jax.jit(c.step) for c in made]
    mine, theirs = jax.tree.map(jnp.copy, made[0].state), made[0].state
    for k in range(40):
        mine, _ = planned[k // 9 % 2](mine, made[0].batches(k))
        theirs, _ = plain[k // 9 % 2](theirs, made[0].batches(k))
    assert differences(made[0].state, theirs, autopar.materialize(mine), 1e-10) == []


@pytest.mark.parametrize("cases", [_scalars, _matrices])
def test_servers_do_not_go_on_with_such_a_step(cases: Callable[[], list[Case]]) -> None:
    one, other = cases()
    state, _ = autopar.parallelize(one.step, sync=Async())(jax.tree.map(jnp.copy, one.state), one.batches(0))
    with pytest.raises(autopar.StepError, match="servers keep the state for one step"):
        autopar.parallelize(other.step, sync=Async())(state, one.batches(1))


def test_evaluations_between_steps() -> None:
    """Planned ones take the state as it is, and so do those of JAX."""
    case = _trained()

    def evaluate(params: Any, ids: jax.Array) -> jax.Array:
        return jnp.sum(params["emb"][ids] ** 2, axis=-1)

    planned, plain = deferring(case.step, 7), jax.jit(case.step)
    evaluated = autopar.parallelize(evaluate)
    mine, theirs = jax.tree.map(jnp.copy, case.state), case.state
    ids = jnp.arange(0, 300, 7)
    for k in range(30):
        mine, _ = planned(mine, case.batches(k))
        theirs, _ = plain(theirs, case.batches(k))
        expected = evaluate(theirs["params"], ids)
        np.testing.assert_allclose(evaluated(mine["params"], ids), expected, rtol=1e-9)
        np.testing.assert_allclose(evaluate(autopar.materialize(mine["params"]), ids), expected, rtol=1e-9)
        if k % 10 == 3:  # brings all rows up to date
            np.testing.assert_allclose(jax.jit(evaluate)(mine["params"], ids), expected, rtol=1e-9)
    assert differences(case.state, theirs, autopar.materialize(mine), 1e-10) == []
