"""What `explain` says, and what the errors of strategies say."""

from __future__ import annotations

import builtins
import re
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from IPython.core.compilerop import CachingCompiler

import autopar
from tests.support.explained import explained
from tests.support.rounding import momentum_rounded_at_random
from tests.zoo import VARIANTS

ROWS = 50_000
IDS = jnp.array([[1, 4, 4], [7, 4, ROWS - 1]], jnp.int32)


def make(tx: optax.GradientTransformation, tied_rows: int = 300) -> tuple[Any, Any]:
    params = {"emb": jnp.ones((ROWS, 4)), "tied": jnp.ones((tied_rows, 4)), "w": jnp.eye(4)}

    def step(state: Any, ids: jax.Array) -> tuple[Any, jax.Array]:
        def loss_fn(p: Any) -> jax.Array:
            x = jnp.tanh(p["emb"][ids] @ p["w"]) + p["tied"][ids % tied_rows]
            return jnp.mean(jax.nn.logsumexp(x @ p["tied"].T, -1))

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    return step, {"params": params, "opt": tx.init(params)}


def shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def test_tables_alpha_lines_and_reasons() -> None:
    step, state = make(optax.adagrad(0.1))
    planned = autopar.parallelize(step)
    told = autopar.explain(planned, state, IDS)
    rows = {r.path: r for r in told.rows}
    emb, tied = rows["params/emb"], rows["params/tied"]
    assert (emb.action, emb.slots, emb.plan.shape, emb.nbytes) == ("sparse", 1, (ROWS, 4), 2 * ROWS * 16)
    assert emb.alpha is not None and emb.alpha.measured and emb.alpha.rows == 4 and emb.alpha.ids == 6
    assert emb.planned_bytes == int(emb.dense_bytes * 4 / ROWS)
    assert "test_explain.py" in emb.plan.line
    assert tied.action == "dense" and "softmax" in tied.reason
    assert "test_explain.py" in tied.plan.line
    assert rows["params/w"].kind == "dense" and rows["params/w"].alpha is None
    text = str(told)
    assert "params/emb" in text and "0.01%" in text and "times less" in text and "analyze_rows" not in text
    assert "\x1b" not in text
    assert "params/emb" in told._repr_html_() and "<pre>" in told._repr_html_()


@pytest.mark.parametrize(("tied_rows", "advised"), [(256, False), (30_000, True)])
def test_a_sampled_softmax_is_advised_for_large_tables(tied_rows: int, advised: bool) -> None:
    step, state = make(optax.adagrad(0.1), tied_rows)
    planned = autopar.parallelize(step)
    tied = {r.path: r for r in autopar.explain(planned, shapes(state), IDS).rows}["params/tied"]
    assert "for a full softmax" in tied.reason and ("sampled softmax" in tied.plan.remedy) == advised


def test_lines_of_a_notebook_name_its_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = types.SimpleNamespace(compile=CachingCompiler())
    code, scope = "def step(t, ids):\n    return t.at[ids].add(1.0), t[ids].sum()", {}
    exec(compile(code, shell.compile.cache(code, number=7), "exec"), scope)
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    told = autopar.explain(autopar.parallelize(scope["step"]), jax.ShapeDtypeStruct((ROWS, 4), jnp.float32), IDS)
    assert told.rows[0].plan.line == "In[7]:2" and "In[7]:2" in str(told)


def test_a_notebook_shows_it_once_and_as_text_where_it_shows_no_html(monkeypatch: pytest.MonkeyPatch) -> None:
    """rich's consoles display by themselves where the shell is Jupyter's."""
    step, state = make(optax.sgd(0.1))
    told = autopar.explain(autopar.parallelize(step), shapes(state), IDS)
    text, shown = str(told), []
    monkeypatch.setattr(builtins, "get_ipython", type("ZMQInteractiveShell", (), {}), raising=False)
    monkeypatch.setattr("IPython.display.display", shown.append)
    assert "params/emb" in told._repr_html_() and str(told) == repr(told) == text and not shown


@pytest.mark.parametrize(
    ("metric", "reason"),
    [
        (lambda t, h: jnp.sqrt(jnp.mean(t**2)), "reduce_sum over all rows of the table"),
        (lambda t, h: jnp.max(t), "reduce_max over all rows of the table"),
        (lambda t, h: jnp.max(t.sum(1)) + jnp.sum(jnp.abs(t)), "reduce_max over all rows of the table"),
        (lambda t, h: jax.nn.softmax(h @ t.T)[:, 0].sum(), "reduce_max over all rows of the table, for a full softmax"),
        (lambda t, h: jnp.sum(jnp.exp(h @ t.T)), "reduce_sum over all rows of the table, for a full softmax"),
        (lambda t, h: jnp.max(jnp.exp(t - 1)), "reduce_max over all rows of the table"),
    ],
)
def test_a_sum_over_rows_is_called_a_softmax_only_where_it_is_one(metric: Any, reason: str) -> None:
    tx = optax.adam(0.1)

    def step(state: Any, ids: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda t: (t[ids] ** 2).sum())(state["t"])
        updates, opt = tx.update(grads, state["opt"], state["t"])
        told = jax.lax.stop_gradient(metric(state["t"], jnp.ones((2, 4))))
        return {"t": optax.apply_updates(state["t"], updates), "opt": opt}, (loss, told)

    table = jnp.ones((5000, 4))
    told = autopar.explain(autopar.parallelize(step), {"t": table, "opt": tx.init(table)}, IDS)
    (row,) = [r for r in told.rows if r.path == "t"]
    assert row.action == "dense" and row.reason == reason and "test_explain.py" in row.plan.line
    assert ("sampled softmax" in row.plan.remedy) == ("softmax" in reason) and row.plan.remedy


def test_shapes_give_an_upper_bound_and_run_nothing() -> None:
    step, state = make(optax.adagrad(0.1))
    told = autopar.explain(autopar.parallelize(step), shapes(state), shapes(IDS))
    alpha = told.rows[0].alpha
    assert alpha is not None and not alpha.measured and alpha.rows == 6
    assert "<= " in str(told)


def test_plan_in_use() -> None:
    step, state = make(optax.adagrad(0.1))
    planned = autopar.parallelize(step)
    with pytest.raises(autopar.ArgumentsError, match="hasn't been called yet"):
        autopar.explain(planned)
    planned(state, IDS)
    alpha = autopar.explain(planned).rows[0].alpha
    assert alpha is not None and alpha.measured and alpha.rows == 4


def test_an_optimizer_that_moves_every_row_is_named() -> None:
    step, state = make(optax.adam(0.1))
    told = autopar.explain(autopar.parallelize(step, strategy="ps"), state, IDS)
    emb = next(r for r in told.rows if r.path == "params/emb")
    assert emb.action == "sparse, others deferred" and "they wait for up to 256 steps" in emb.reason
    assert "KiB for what they missed" in emb.reason and "test_explain.py" in emb.plan.line


def test_an_optimizer_that_mixes_rows_is_named() -> None:
    step, state = make(optax.lamb(0.1))
    told = autopar.explain(autopar.parallelize(step), state, IDS)
    emb = next(r for r in told.rows if r.path == "params/emb")
    assert emb.action == "dense" and "reduce_sum over all rows" in emb.reason
    assert "test_explain.py" in emb.plan.line


@pytest.mark.parametrize("rows", [2**31 - 2, 2**31 - 1, 2**31, 2**33])
def test_tables_whose_rows_int32_cannot_number_are_refused(rows: int) -> None:
    """Nothing is made: they are shapes."""

    def step(table: Any, ids: Any) -> tuple[Any, Any]:
        return table - 0.1 * jax.grad(lambda t: jnp.sum(jnp.sin(t[ids])))(table), ids.sum()

    with jax.enable_x64(True):
        table, ids = jax.ShapeDtypeStruct((rows, 1), np.float32), jax.ShapeDtypeStruct((12,), np.int64)
        (found,) = autopar.plan(autopar.parallelize(step), table, ids).tables
        is_large = rows > 2**31 - 2
        assert (found.lifted, found.refused) == (not is_large, is_large)
        hosted = autopar.parallelize(step, strategy={"table": ("ps", "hosts")})
        if is_large:
            assert (found.reason, found.remedy) == (
                f"it has {rows} rows; numbers of rows are int32",
                "divide it into several tables",
            )
            told = f"table can't be on hosts: it has {rows} rows; .* To change it: divide it into several tables"
            with pytest.raises(autopar.StrategyError, match=told):
                autopar.plan(hosted, table, ids)
        else:
            assert autopar.plan(hosted, table, ids).on_hosts


def test_momentum_that_is_rounded_at_random_keeps_a_table_dense() -> None:
    """Each row draws bits in each step, touched or not."""
    step, state = make(momentum_rounded_at_random(0.1))
    told = autopar.explain(autopar.parallelize(step, strategy="ps"), state, IDS)
    emb = next(r for r in told.rows if r.path == "params/emb")
    assert emb.action == "dense" and "an array of all rows that isn't computed row by row (noise" in emb.reason
    assert re.search(r"rounding.py:\d+", emb.plan.line)
    hosted = autopar.parallelize(step, strategy={"params/emb": ("ps", "hosts")})
    with pytest.raises(autopar.StrategyError, match=r"params/emb can't be on hosts: .*noise.*\(\S+rounding.py:\d+\)"):
        autopar.plan(hosted, state, IDS)


def test_a_table_in_a_while_loop_is_named_with_a_remedy() -> None:
    case = VARIANTS["steps_while"].make()
    told = autopar.explain(autopar.parallelize(case.step), case.state, case.batches(0))
    emb = next(r for r in told.rows if r.path == "params/emb")
    assert emb.action == "dense" and "inside a while loop" in emb.reason and "lax.scan" in emb.plan.remedy
    assert "whole_steps.py" in emb.plan.line


def test_few_rows_against_many_ids_stay_dense_unless_named() -> None:
    step, state = make(optax.adagrad(0.1))
    ids = jnp.zeros((ROWS,), jnp.int32)
    plan = autopar.parallelize(step).planned_for(shapes(state), shapes(ids)).compiled.plan
    assert not plan.lifts and "the dense update is faster" in plan.parameters[0].reason
    assert autopar.parallelize(step, strategy="ps").planned_for(shapes(state), shapes(ids)).compiled.plan.lifts


def test_many_ids_pay_if_a_loop_trains_many_steps() -> None:
    """A dense step walks all rows in each of its turns."""

    def step(table: Any, ids: Any) -> tuple[Any, Any]:
        return table - 0.1 * jax.grad(lambda t: jnp.sum(jnp.sin(t[ids])))(table), ids.sum()

    def several(table: Any, batches: Any) -> tuple[Any, Any]:
        return jax.lax.scan(step, table, batches)

    table, batches = jax.ShapeDtypeStruct((ROWS, 4), np.float32), jax.ShapeDtypeStruct((16, 200), np.int32)
    for planned, ids, lifts in ((several, batches, True), (step, jax.ShapeDtypeStruct((3200,), np.int32), False)):
        assert autopar.parallelize(planned).planned_for(table, ids).compiled.plan.lifts == lifts


def test_rows_of_tables_in_one_array_lie_along_the_longest_axis() -> None:
    def step(tables: Any, ids: Any) -> tuple[Any, Any]:
        return tables - 0.1 * jax.grad(lambda t: jnp.sum(jnp.sin(t[ids % 4, ids])))(tables), ids.sum()

    (table,) = autopar.plan(autopar.parallelize(step), jnp.ones((4, ROWS, 4)), IDS).tables
    assert table.lifted and f"of {ROWS} rows" in table.reason


def test_rows_lie_along_the_axis_of_the_first_lookup_though_their_columns_are_more() -> None:
    """A bigram model, whose labels are looked up in the logits; and tables that are chosen before their rows."""

    def bigram(table: Any, ids: Any) -> Any:
        def loss_of(table: Any) -> jax.Array:
            return optax.softmax_cross_entropy_with_integer_labels(table[ids], ids[::-1]).mean()

        return table - 0.1 * jax.grad(loss_of)(table)

    def chosen(tables: Any, ids: Any) -> Any:
        return tables - 0.1 * jax.grad(lambda t: jnp.sum(jnp.sin(t[ids[0] % 4][ids])))(tables)

    for step, shape in ((bigram, (2_000, 3_000)), (chosen, (4, 3_000, 4))):
        (table,) = autopar.plan(autopar.parallelize(step, strategy="ps"), jnp.ones(shape), jnp.arange(8)).tables
        assert table.lifted and table.axis == 0, table.reason


def test_why_tables_are_dense_is_found_in_one_walk() -> None:
    """Each turn reads a value four times; and no product of a dense matrix is one with weights of ids."""

    def step(params: Any, x: Any) -> Any:
        def loss_of(params: Any) -> jax.Array:
            hidden = x @ params["first"]
            for _ in range(40):
                hidden = hidden * (1.5 - 0.5 * hidden * hidden)
            labels = jnp.arange(len(x))
            return optax.softmax_cross_entropy_with_integer_labels(hidden @ params["out"], labels).mean()

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss_of)(params))

    params = {"first": jnp.ones((4, 2048)), "out": jnp.ones((2048, 1024))}
    plan = autopar.plan(autopar.parallelize(step), params, jnp.ones((8, 4)))
    assert not any("several 1s" in p.reason for p in plan.parameters)


@pytest.mark.parametrize("strategy", [{"params/em*": "ps"}, {"params/emb": "allgather", "**": "auto"}, {"**": "ps"}])
def test_patterns(strategy: dict[str, str]) -> None:
    step, state = make(optax.adagrad(0.1))
    plan = autopar.parallelize(step, strategy=strategy).planned_for(shapes(state), shapes(IDS)).compiled.plan
    assert [p.path for p in plan.parameters if p.lifted] == ["params/emb"]


def test_strategy_errors() -> None:
    step, state = make(optax.adagrad(0.1))
    for strategy, text in (
        ({"params/embedding": "ps"}, "matches no parameter. Looked up by rows: params/emb, params/tied"),
        ({"params/emb": "mpi"}, "^strategy: there is no method 'mpi'"),
        ({"params/emb": "ps:column"}, "placed by rows, 'ps', which divides .* no method 'ps:column'; the methods"),
        (
            {"params/emb": ("table_wise", "hosts")},
            "placed by rows, .*'ps:table' and .* no method 'table_wise'; the methods",
        ),
        ({"params/tied": "allgather"}, r"params/tied can't be trained with 'allgather'.*softmax.*test_explain.py:\d+"),
    ):
        with pytest.raises(autopar.StrategyError, match=text):
            autopar.parallelize(step, strategy=strategy)(state, IDS)
    assert (
        autopar.parallelize(step, strategy={"params/emb": "allreduce"}).planned_for(state, IDS).compiled.plan.lifts
        is False
    )


def test_outputs_that_need_all_rows_are_said() -> None:
    def step(table: jax.Array, ids: jax.Array) -> Any:
        grad = jax.grad(lambda t: jnp.sum(t[ids] ** 2))(table)
        return table - grad, grad

    planned = autopar.parallelize(step, strategy="ps", donate=False)
    table = jnp.ones((200, 3))
    _, grad = planned(table, IDS % 200)
    np.testing.assert_allclose(grad, step(table, IDS % 200)[1])
    assert "dense" in explained(planned) and planned.plan is not None and planned.plan.lifts


def test_broadcasts_that_are_written_down_are_no_dead_equations() -> None:
    """`rows * scale` with a scale for each row: JAX leaves the broadcast unsaid, `normalize` adds it. One is dead."""

    def step(table: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        scale = jnp.sum(ids, 1, keepdims=True)
        loss, grad = jax.value_and_grad(lambda t: jnp.sum(t[ids[:, 0]] * scale))(table)
        jnp.sin(loss)
        return table - 0.1 * grad, loss

    told = autopar.explain(autopar.parallelize(step), jnp.ones((ROWS, 4)), IDS)
    (note,) = (note for name, note, _ in told.passes if name == "normalize")
    (dead,) = re.findall(r"equations; (-?\d+) dead", note)
    assert int(dead) >= 1, note


def test_what_a_step_only_reads_has_no_update() -> None:
    @autopar.parallelize(strategy="ps")
    def step(state: Any, ids: jax.Array) -> tuple[Any, jax.Array]:
        def loss_of(adapter: Any) -> jax.Array:
            return ((state["frozen"][ids] @ state["mix"] + adapter[ids] @ jnp.ones((2, 4))) ** 2).mean()

        loss, grad = jax.value_and_grad(loss_of)(state["adapter"])
        return {**state, "adapter": state["adapter"] - 0.1 * grad}, loss

    state = {"frozen": jnp.ones((ROWS, 4)), "mix": jnp.eye(4), "adapter": jnp.ones((ROWS, 2))}
    told = autopar.explain(step, state, IDS)
    rows = {row.path: (row.action, row.dense_bytes, row.planned_bytes) for row in told.rows}
    assert rows["frozen"] == rows["mix"] == ("none", 0, 0)
    assert rows["adapter"][0] == "sparse" and told.dense_bytes == rows["adapter"][1] > 0
