"""Operations behind a lookup, and ahead of the sum of its gradients, run at the rows' owners where that sends less."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.ir.strategy import OPTIMIZATIONS
from autopar.passes import place_border
from tests.support.borders import KEPT, MOVED, WIDTH, Look, ids_of, start, step_of
from tests.support.pairs import diagonal


def _planned(look: Look, method: str = "ps", tx: Any = None, **options: Any) -> tuple[Any, Any]:
    tx, options = optax.sgd(0.1) if tx is None else tx, {"strategy": {"params/emb": method}, **options}
    return autopar.parallelize(step_of(look, tx), donate=False, **options), start(tx)


def _trained(step: Any, state: Any) -> tuple[Any, list[float]]:
    losses = []
    for k in range(3):
        state, loss = step(state, ids_of(k))
        losses.append(float(loss))
    return jax.tree.map(np.asarray, autopar.materialize(state)), losses


@pytest.mark.parametrize("name", MOVED)
def test_rows_are_as_small_as_what_is_read_of_them(name: str) -> None:
    look, looked_up, gradient = MOVED[name]
    step, state = _planned(look)
    sizes = autopar.plan(step, state, ids_of(0)).table("params/emb").sizes
    assert sizes is not None and (sizes.row_bytes, sizes.sent_gradient) == (looked_up, gradient)
    check = autopar.check(step, state, ids_of(0))
    assert check.ok, str(check)


@pytest.mark.parametrize("name", MOVED)
def test_results_are_those_of_the_step_that_moves_nothing(name: str) -> None:
    """To the bit."""
    mine = _trained(*_planned(MOVED[name][0]))
    theirs = _trained(*_planned(MOVED[name][0], optimize=["once"]))
    jax.tree.map(np.testing.assert_array_equal, mine, theirs)
    plain = _trained(jax.jit(step_of(MOVED[name][0])), start())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), mine, plain)


@pytest.mark.parametrize("name", KEPT)
def test_rows_travel_as_they_are_where_nothing_is_saved(name: str) -> None:
    step, state = _planned(KEPT[name])
    table = autopar.plan(step, state, ids_of(0)).table("params/emb")
    assert table.sizes is not None and (table.sizes.row_bytes, table.sizes.sent_gradient) == (128, 128)
    assert "owners" not in table.reason


@pytest.mark.parametrize(
    ("method", "optimizer"), diagonal(["ps", "allgather", "allreduce_rows"], ["adam", "adagrad", "momentum"])
)
def test_it_goes_with_any_method_and_optimizer(method: str, optimizer: str) -> None:
    tx = {"adam": optax.adam(0.01), "adagrad": optax.adagrad(0.1), "momentum": optax.sgd(0.1, 0.9)}[optimizer]
    look = MOVED["slice, cast"][0]
    step, state = _planned(look, method, tx)
    sizes = autopar.plan(step, state, ids_of(0)).table("params/emb").sizes
    assert sizes is not None and sizes.sent_gradient == 32
    mine = _trained(step, state)
    theirs = _trained(*_planned(look, method, tx, optimize="none"))
    jax.tree.map(np.testing.assert_array_equal, mine, theirs)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
@pytest.mark.parametrize(
    ("look", "row", "gradient"),
    [
        (lambda t, i: t.astype(jnp.float32)[i], 64, 128),
        (lambda t, i: jnp.concatenate([t, t**2], 1).astype(jnp.float32)[i], 64, 256),
    ],
)
def test_rows_that_are_widened_ahead_of_their_lookup_travel_as_the_table_has_them(
    look: Look, row: int, gradient: int, optimizer: str
) -> None:
    """Their gradients are added up as they are written, and the bits stay."""
    tx = {"sgd": optax.sgd(0.1), "adagrad": optax.adagrad(0.1), "adam": optax.adam(0.01)}[optimizer]
    step, state = _planned(look, tx=tx)
    off, _ = _planned(look, tx=tx, optimize=["once"])
    params = {**state["params"], "emb": state["params"]["emb"].astype(jnp.bfloat16)}
    state = {"params": params, "opt": tx.init(params)}
    table = autopar.plan(step, state, ids_of(0)).table("params/emb")
    assert table.sizes is not None and (table.sizes.row_bytes, table.sizes.sent_gradient) == (row, gradient)
    assert re.search(rf"behind the lookup, and the rows' owners send 64 B a row in place of {gradient} B", table.reason)
    jax.tree.map(np.testing.assert_array_equal, _trained(step, state), _trained(off, state))


def test_explain_names_each_move() -> None:
    step, state = _planned(MOVED["slice, cast"][0])
    text = " ".join(str(autopar.explain(step, state, ids_of(0))).split())
    assert re.search(r"; slice \(\S+borders.py:\d+\), convert_element_type \(\S+borders.py:\d+\) run at", text)
    assert "run at the rows' owners, who send 16 B a row in place of 128 B" in text
    assert re.search(
        r"; pad \(\S+borders.py:\d+\) runs at the rows' owners, who are sent gradients of 32 B a row", text
    )


@pytest.mark.parametrize(
    ("name", "operations"), [("cast", ("convert_element_type",)), ("overlapping slices", ("pad",)), ("slice", ())]
)
def test_what_would_round_otherwise_stays_and_is_told(name: str, operations: tuple[str, ...]) -> None:
    """Gradients cross in their form behind it: with a cast before the sum, say, rows that several ids have differ."""
    look, _, sent = MOVED[name]
    step, state = _planned(look)
    (reason,) = (t.reason for t in autopar.plan(step, state, ids_of(0)).tables)
    told = re.findall(r"; (\S+) \(\S+borders.py:\d+\)[^;]* stays? where gradients are made: their sum would", reason)
    assert (tuple(told) == operations) and ("would round otherwise" in reason) is (sent == 4 * WIDTH), reason
    if name == "cast":
        text = " ".join(str(autopar.explain(step, state, ids_of(0))).split())
        assert "stays where gradients are made: their sum would round otherwise" in text
        narrow = jax.grad(lambda rows: jnp.mean(jnp.tanh(rows * jnp.bfloat16(0.7)) ** 2))(
            state["params"]["emb"][ids_of(0)].astype(jnp.bfloat16)
        )
        zeros = jnp.zeros((400, WIDTH))
        cast_first = zeros.at[ids_of(0)].add(narrow.astype(jnp.float32))
        cast_last = zeros.astype(jnp.bfloat16).at[ids_of(0)].add(narrow).astype(jnp.float32)
        assert np.any(np.asarray(cast_first) != np.asarray(cast_last)), "else nothing is at stake"


@pytest.mark.parametrize("clips", [False, True])
def test_explain_names_what_owners_do_with_gradients(clips: bool) -> None:
    """All of an update, by rows; of a global norm each owner's sum crosses."""
    clip = optax.clip_by_global_norm(1.0) if clips else optax.identity()
    step, state = _planned(MOVED["slice"][0], tx=optax.chain(clip, optax.adagrad(0.1)))
    text = " ".join(str(autopar.explain(step, state, ids_of(0))).split())
    assert "From the sum of gradients to the update the owners of params/emb compute pad, " in text
    crosses = re.search(r"of reduce_sum \(\S+:\d+\) each one's partial sums cross, 4 B", text)
    assert bool(crosses) is clips and ("nothing crosses between them" in text) is not clips


def test_a_plan_in_a_file_is_followed(tmp_path: Path) -> None:
    look = MOVED["slice, cast"][0]
    step, state = _planned(look)
    plan = autopar.plan(step, state, ids_of(0))
    plan.save(tmp_path / "plan.json")
    again = autopar.parallelize(step_of(look), plan=autopar.Plan.load(tmp_path / "plan.json"))
    assert autopar.plan(again, state, ids_of(0)).table("params/emb").sizes == plan.table("params/emb").sizes


def test_what_is_switched_off_is_told_and_goes_with_plans(tmp_path: Path) -> None:
    look = MOVED["slice, cast"][0]
    step, state = _planned(look)
    off, _ = _planned(look, optimize=["once"])
    plan, naive = (autopar.plan(each, state, ids_of(0)) for each in (step, off))
    sizes = naive.table("params/emb").sizes
    assert sizes is not None and (sizes.row_bytes, sizes.sent_gradient) == (128, 128)
    assert "the step: optimize all -> once" in str(plan.diff(naive))
    naive.save(tmp_path / "plan.json")
    again = autopar.parallelize(step_of(look), plan=tmp_path / "plan.json")
    followed = autopar.plan(again, state, ids_of(0))
    assert followed.optimize == "once" and followed.table("params/emb").sizes == sizes
    text = " ".join(str(autopar.explain(off, state, ids_of(0))).split())
    assert "optimize= leaves out 'border': with it of params/emb slice (" in text
    assert "who send 16 B a row in place of 128 B" in text
    none = autopar.parallelize(step_of(look), optimize="none", mesh=jax.make_mesh((1,), ("data",)), donate=False)
    text = " ".join(str(autopar.explain(none, start(), ids_of(0))).split())
    assert all(f"leaves out {name!r}: nothing is at stake here" in text for name in OPTIMIZATIONS)


def test_names_that_there_are_not() -> None:
    there = ", ".join(map(repr, OPTIMIZATIONS))
    for wrong, told in {
        "hot": "'hot': rows that all ranks ask for stay with their owners, .*",
        "warm": "there is no 'warm'",
    }.items():
        with pytest.raises(autopar.ArgumentsError, match=f"optimize=: {told}; there are .*{there}"):
            autopar.parallelize(abs, optimize=["once", wrong])
    with pytest.raises(autopar.ArgumentsError, match="optimize='border': give 'all', 'none', or a list of names"):
        autopar.parallelize(abs, optimize="border")
    assert autopar.parallelize(abs, optimize=list(OPTIMIZATIONS)).planner.options.optimize == "all"


def test_one_device_moves_nothing() -> None:
    look = MOVED["slice"][0]
    step = autopar.parallelize(step_of(look), strategy="ps", mesh=jax.make_mesh((1,), ("data",)), donate=False)
    table = autopar.plan(step, start(), ids_of(0)).table("params/emb")
    assert table.lifted and "owners" not in table.reason


def test_tables_that_are_alike_are_exchanged_as_one() -> None:
    """As they are where nothing moves."""
    names = [f"emb{k}" for k in range(5)]

    def step(tables: Any, ids: Any) -> Any:
        def loss_of(tables: Any) -> Any:
            rows = [tables[name][ids + k].astype(jnp.bfloat16)[..., 8:16] for k, name in enumerate(names)]
            return jnp.mean(jnp.tanh(sum(x.astype(jnp.float32) for x in rows)) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(tables)
        return jax.tree.map(lambda t, g: t - 0.3 * g, tables, grads), loss

    rng = np.random.default_rng(2)
    state = {name: jnp.asarray(rng.normal(size=(300 + k, 32)), jnp.float32) for k, name in enumerate(names)}
    mine = autopar.parallelize(step, strategy="ps", donate=False)
    plan = autopar.plan(mine, state, ids_of(0) % 290)
    assert [(t.sizes.together, t.sizes.row_bytes, t.sizes.sent_gradient) for t in plan.tables if t.sizes] == [
        (5, 16, 32)
    ] * 5
    assert "are exchanged and updated as one" in " ".join(str(autopar.explain(mine, state, ids_of(0) % 290)).split())
    theirs = jax.jit(step)(state, ids_of(0) % 290)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), mine(state, ids_of(0) % 290), theirs
    )


def test_a_slice_moved_without_its_pad_is_found() -> None:
    """By `verify`, which compares with the plain step."""
    step, state = _planned(MOVED["slice"][0])
    elsewhere = ((0, 0, 0), (WIDTH - 8, 0, 0))
    with mock.patch.object(place_border, "_spread", lambda rows, steps: jax.lax.pad(rows, jnp.float32(0), elsewhere)):
        with pytest.raises(autopar.VerificationError):
            autopar.verify(step, state, ids_of(0))


@pytest.mark.parametrize("name", ["slice, cast", "kept sum", "filled with 2"])
def test_an_evaluation_reads_what_it_needs_of_rows(name: str) -> None:
    """Of tables that stay where training has them."""
    look, looked_up, _ = MOVED[name]
    step, state = _planned(look)
    state, _ = step(state, ids_of(0))
    evaluate = autopar.parallelize(lambda params, i: look(params["emb"], i), donate=False)
    found = evaluate(state["params"], ids_of(1))
    assert evaluate.plan is not None
    sizes = evaluate.plan.table("params/emb").sizes
    assert sizes is None or sizes.row_bytes == looked_up
    assert "at the rows' owners, who send" in evaluate.plan.table("params/emb").reason
    plain = jax.tree.map(jnp.asarray, jax.tree.map(np.asarray, autopar.materialize(state)))
    np.testing.assert_array_equal(found, jax.jit(look)(plain["params"]["emb"], ids_of(1)))
