"""Tables whose ids depend on their own rows, or that are looked up behind reshapes, run on their touched rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from tests.support.followed_lookups import STEPS, batch_of, state_of, trained
from tests.support.pairs import diagonal


@pytest.fixture(autouse=True)
def _double() -> Any:
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize(("name", "strategy"), diagonal(list(STEPS), {"ps": "ps", "hosts": ("ps", "hosts")}))
def test_they_are_followed(name: str, strategy: Any) -> None:
    table = trained(name, rtol=1e-12, strategy=strategy)
    assert table.lifted and "read whole" not in table.reason, table.reason


def test_candidates_are_counted_once() -> None:
    step: Any = autopar.parallelize(STEPS["shared candidates"], strategy="ps", state_argnums=0)
    step(state_of(), batch_of(0))
    assert step.plan.table("table").ids == len(batch_of(0)["shared"]) + len(batch_of(0)["ids"])


@pytest.mark.parametrize(
    "ids",
    [
        lambda t, i: jnp.round(t[i].sum(-1)).astype(int) % 640,  # any row
        lambda t, i: (i[jnp.argsort(t[i, 0])][:, None] + i[jnp.argsort(-t[i, 0])]).sum(-1) % 640,  # of pairs
        lambda t, i: i[jnp.argsort(t[i, 0])] + jnp.argsort(t[i, 0]),  # the place matters, too
        lambda t, i: (i[jnp.argsort(t[i, 0])] * 0.7).astype(int),  # of floats, which may be rounded otherwise
    ],
)
def test_ids_of_which_nothing_is_known(ids: Any) -> None:
    def train_step(state: Any, batch: Any) -> Any:
        table = state["table"]
        return {**state, "table": table.at[ids(table, batch["ids"])].add(1.0)}, table[batch["ids"]].sum()

    step: Any = autopar.parallelize(train_step, strategy="ps", state_argnums=0)
    found, _ = step(state_of(), batch_of(0))
    wanted, _ = jax.jit(train_step)(state_of(), batch_of(0))
    np.testing.assert_array_equal(found["table"], wanted["table"])
    assert not step.plan.table("table").lifted


def test_rows_that_are_divided_unevenly_stay_dense() -> None:
    def train_step(table: Any, ids: Any) -> Any:
        loss, gradient = jax.value_and_grad(lambda t: t.reshape(320, 3, 4)[ids // 2].sum())(table)
        return table - gradient, loss

    step: Any = autopar.parallelize(train_step, strategy="ps", state_argnums=0)
    found, _ = step(state_of()["table"], batch_of(0)["ids"])
    np.testing.assert_array_equal(found, jax.jit(train_step)(state_of()["table"], batch_of(0)["ids"])[0])
    (table,) = step.plan.tables
    assert not table.lifted and "reshapes the table" in table.reason


def test_weights_are_reshaped_as_they_were() -> None:
    """What is no lookup isn't written anew."""

    def train_step(w: Any, x: Any) -> Any:
        loss, gradient = jax.value_and_grad(lambda w: jnp.einsum("bi,ihd->bhd", x, w.reshape(6, 4, 160)).sum())(w)
        return w - gradient, loss

    step: Any = autopar.parallelize(train_step, state_argnums=0)
    found, _ = step(state_of()["table"].reshape(6, 640), jnp.ones((3, 6)))
    np.testing.assert_array_equal(found, jax.jit(train_step)(state_of()["table"].reshape(6, 640), jnp.ones((3, 6)))[0])
    assert step.plan.tables == ()


@pytest.mark.parametrize(("name", "lifts"), [("Q-learning", True), ("shared candidates", False)])
def test_lazy_updates_move_the_rows_that_are_looked_up_alone(name: str, lifts: bool) -> None:
    step: Any = autopar.parallelize(STEPS[name], strategy="ps", sparse="lazy", state_argnums=0)
    step(state_of(), batch_of(0))
    assert step.plan.table("table").lifted is lifts
