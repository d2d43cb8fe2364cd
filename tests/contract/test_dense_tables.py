"""A table that stays dense says why, where, and what to write instead; that lifts, and computes the same."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.ir.plan import TablePlan
from tests.support.dense_tables import FORMS, Step, batch_of, clients, lookup, state_of, training
from tests.support.settings import set_options


def _equals_plain(step: Step, plain: Step, strategy: Any = "ps", **options: Any) -> tuple[autopar.Plan, list[str]]:
    """The plan of a step whose results are those of a plain one, and its warnings."""
    planned = autopar.parallelize(step, strategy=strategy, state_argnums=0)
    set_options(planned, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", autopar.SlowPlanWarning)
        found = autopar.materialize(planned(state_of(), batch_of()))
    wanted = jax.jit(plain)(state_of(), batch_of())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a), b, rtol=1e-4, atol=1e-6), found, wanted)
    assert planned.plan is not None
    return planned.plan, [str(w.message) for w in caught if issubclass(w.category, autopar.SlowPlanWarning)]


@pytest.mark.parametrize("name", FORMS)
def test_a_dense_table_says_why(name: str) -> None:
    plan, told = _equals_plain(FORMS[name].dense, FORMS[name].dense, {"*": "ps"}, slow_bytes=1)
    (table,) = plan.tables
    assert not table.lifted
    assert table.reason and "dense_tables.py:" in table.line
    if name != "softmax":  # which is advised against where a table is large, and warned of where it is named
        (text,) = told
        assert table.remedy and all(part in text for part in (table.reason, table.remedy, table.line))


@pytest.mark.parametrize(
    ("name", "reason"), [("a row of zeros behind", "concatenates"), ("a row of zeros ahead, beside a lookup", "pads")]
)
def test_the_reason_is_what_makes_the_gradient_dense(name: str, reason: str) -> None:
    plan, _ = _equals_plain(FORMS[name].dense, FORMS[name].dense)
    assert plan.tables[0].reason.startswith(reason)


def test_a_large_table_of_a_softmax_has_a_remedy() -> None:
    table, ids = jax.ShapeDtypeStruct((300_000, 16), jnp.float32), jax.ShapeDtypeStruct((64,), jnp.int32)
    (row,) = autopar.explain(autopar.parallelize(FORMS["softmax"].dense, state_argnums=0), table, ids).rows
    assert isinstance(row.plan, TablePlan) and "sampled softmax" in row.plan.remedy


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.instead is not None])
def test_what_to_write_instead_lifts(name: str) -> None:
    form = FORMS[name]
    assert form.instead is not None
    plan, _ = _equals_plain(form.instead, form.dense if form.same else form.instead)
    (table,) = plan.tables
    assert table.lifted, table.reason


def test_a_table_that_is_named_says_why_whatever_it_is() -> None:
    """A full softmax isn't worth a word by itself."""
    _, told = _equals_plain(FORMS["softmax"].dense, FORMS["softmax"].dense, {"table": "ps"}, slow_bytes=1)
    assert len(told) == 1 and "softmax" in told[0]
    assert _equals_plain(clients, clients, {"table": "ps"})[1] == []


@pytest.mark.parametrize("write", [lambda t, i: t.at[i].set(1.0), lambda t, i: t.at[i].add(1.0)])
def test_a_table_that_is_only_written(write: Any) -> None:
    def step(table: Any, ids: Any) -> tuple[Any, Any]:
        return write(table, ids), ids.sum()

    plan, _ = _equals_plain(step, step, "auto")
    (table,) = plan.tables
    assert not table.lifted and "only writes" in table.reason and "'ps'" in table.remedy
    assert "test_dense_tables.py:" in table.line
    plan, _ = _equals_plain(step, step, {"table": "ps"})
    assert plan.tables[0].lifted


def test_a_table_that_is_only_read() -> None:
    def step(state: Any, ids: Any) -> tuple[Any, Any]:
        bias, table = state
        return (bias + 1, table), lookup(table, ids).sum()

    planned = autopar.parallelize(step, state_argnums=0)
    planned((jnp.zeros(3), state_of()), batch_of())
    assert planned.plan is not None
    (table,) = planned.plan.tables
    assert "only reads" in table.reason and "'ps'" in table.remedy and "dense_tables.py:" in table.line


def test_a_note_on_what_is_read_whole_says_what_to_do() -> None:
    def step(table: Any, ids: Any) -> tuple[Any, Any]:
        new, loss = training(lookup)(table, ids)
        return new, (loss, jax.lax.top_k(new, 3, axis=0)[0])

    plan, _ = _equals_plain(step, step)
    (table,) = plan.tables
    assert table.lifted and "read whole: top_k along the rows" in table.reason
    assert "to change that: compute it apart from the step (a metric), or of looked-up rows alone" in table.reason


@pytest.mark.parametrize(
    "step",
    [
        training(lambda t, i: t[i] + jax.lax.top_k(t, 3, axis=0)[0].sum()),
        lambda t, i: (t.at[jnp.argmin(t, axis=0)].add(1.0), t[i].sum()),
    ],
)
def test_rows_that_are_found_by_reading_all_are_written(step: Step) -> None:
    assert _equals_plain(step, step)[0].tables[0].lifted


def test_ids_of_a_copy_of_the_table() -> None:
    def step(state: Any, ids: Any) -> tuple[Any, Any]:
        table, copy = state
        best = jax.lax.top_k(copy.sum(1), 3)[1]
        new, loss = training(lookup)(table, best)
        return (new, copy), loss + copy[ids].sum()

    planned = autopar.parallelize(step, strategy="ps", state_argnums=0)
    (found, _), loss = planned((state_of(), state_of() + 1), batch_of())
    (wanted, _), other = jax.jit(step)((state_of(), state_of() + 1), batch_of())
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    np.testing.assert_allclose(loss, other, rtol=1e-5)
    assert planned.plan is not None and planned.plan.tables[0].lifted


def test_weights_are_no_tables() -> None:
    """What is read whole, position by position or by constant places, needs no reason."""

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        def loss_fn(state: Any) -> Any:
            heads = state["w"].reshape(8, 2, 4)
            x = jnp.einsum("bti,ihd->bthd", batch["x"] + state["positions"], heads).reshape(3, 5, 8)
            last = x[jnp.arange(3), batch["length"]] + state["bias"]
            return jnp.take_along_axis(jax.nn.log_softmax(last), batch["label"][:, None], 1).mean()

        loss, gradient = jax.value_and_grad(loss_fn)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradient), loss

    state = {"w": jnp.ones((8, 8)), "positions": jnp.ones((5, 8)), "bias": jnp.ones(8)}
    batch = {"x": jnp.ones((3, 5, 8)), "length": jnp.array([1, 2, 3]), "label": jnp.array([0, 1, 2])}
    planned = autopar.parallelize(step, state_argnums=0)
    planned(state, batch)
    assert planned.plan is not None and planned.plan.tables == ()
