"""Functions that only read Tables: rows are looked up where they are."""

from __future__ import annotations

import itertools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar.backends.devices import Devices
from autopar.backends.layouts import placed
from autopar.ir.layout import RowLayout
from tests.support.evaluation_page import check_page
from tests.support.explained import explained
from tests.support.meshes import mesh_of
from tests.support.pairs import diagonal
from tests.support.row_steps import ids_in, make_state, same, step

WIDTH = 4
FOUR = mesh_of(4)


def table_of(rows: int, seed: int = 0, cyclic: bool = True, mesh: Any = FOUR) -> tuple[jax.Array, autopar.Table]:
    devices = Devices(mesh, "data")
    array = np.random.default_rng(seed).normal(size=(rows, WIDTH)).astype(np.float32)
    layout = RowLayout(rows, devices.count, cyclic)
    return jnp.asarray(array), autopar.Table(placed(array, layout, 0, devices), layout, 0)


def predict(params: Any, ids: Any) -> Any:
    return jnp.tanh(params["emb"][ids] @ params["w"])


def bagged(params: Any, ids: Any) -> Any:
    """Rows changed before they are looked up, in two lookups."""
    rows = jnp.exp(params["emb"] * 0.1)
    return jnp.take(rows, ids, axis=0).mean(1), rows[ids[:, 0]]


def in_a_scan(params: Any, ids: Any) -> Any:
    return jax.lax.scan(lambda c, i: (jnp.tanh(c @ params["w"] + params["emb"][i]), c), jnp.zeros((8, WIDTH)), ids.T)


def tied(params: Any, ids: Any) -> Any:
    """A softmax over all rows reads them all."""
    hidden = params["emb"][ids].mean(1)
    return jax.nn.log_softmax(hidden @ params["emb"].T), jnp.sum(params["emb"] ** 2)


def in_a_while(params: Any, ids: Any) -> Any:
    """Can't be lifted."""
    body = lambda c: (c[0] + 1, c[1] + params["emb"][c[0] + ids[:, 0]])  # noqa: E731
    return jax.lax.while_loop(lambda c: c[0] < 3, body, (0, jnp.zeros((8, WIDTH))))[1]


FUNCTIONS = {f.__name__: f for f in (predict, bagged, in_a_scan, tied, in_a_while)}


@pytest.mark.parametrize(("fun", "rows"), diagonal(FUNCTIONS, [41, 40, 3]))
def test_what_is_read_is_right(fun: Any, rows: int) -> None:
    """Of tables with cyclic rows, whether the devices divide them or not; ids occur many times."""
    array, table = table_of(rows)
    w = jnp.eye(WIDTH)
    evaluate = autopar.parallelize(fun, mesh=FOUR)
    for seed in range(2):
        ids = ids_in(0, rows, seed)["ids"]
        same(evaluate({"emb": table, "w": w}, ids), fun({"emb": array, "w": w}, ids))
    assert not table.is_deleted()
    assert evaluate.plan is not None and evaluate.plan.lifts == (fun is not in_a_while)
    assert {p.method for p in evaluate.plan.parameters if p.lifted} <= {"ps"}


@pytest.mark.parametrize(("fun", "spread"), diagonal(FUNCTIONS, [P("data"), P(None, "data")]))
def test_what_is_read_of_spread_arrays_is_right(fun: Any, spread: P) -> None:
    """Along their rows, or along their features, which no lookup goes along."""
    array, w = table_of(40)[0], jnp.eye(WIDTH)
    params = jax.device_put({"emb": array, "w": w}, NamedSharding(FOUR, spread))
    evaluate = autopar.parallelize(fun, mesh=FOUR)
    for seed in range(2):
        ids = ids_in(0, 40, seed)["ids"]
        same(evaluate(params, ids), fun({"emb": array, "w": w}, ids))
    placements = evaluate.latest.compiled.bound.placements
    assert placements[0] == tuple(spread).index("data")
    assert evaluate.plan.lifts == (spread == P("data") and fun is not in_a_while)


@pytest.mark.parametrize("given", ["a table", "an array"])
def test_parameters_stay_where_they_are(given: str) -> None:
    """Devices divide their sizes, but they have no examples: nothing of them is spread, and gathered again."""
    array, table = table_of(40)
    whole = NamedSharding(FOUR, P())
    params = {"emb": table if given == "a table" else array, "w": jnp.eye(WIDTH)}
    params = jax.tree.map(lambda x: x if isinstance(x, autopar.Table) else jax.device_put(x, whole), params)
    evaluate, ids = autopar.parallelize(predict, mesh=FOUR), ids_in(0, 40, 1)["ids"]
    same(evaluate(params, ids), predict({"emb": array, "w": params["w"]}, ids))
    compiled = evaluate.lower(params, ids).compile()
    shardings = jax.tree.leaves(compiled.input_shardings[0])
    spread = [s.shard_shape((40,) * 2) != (40, 40) for s in shardings]
    assert spread == [given == "a table", False, True]  # emb, w, ids


@pytest.mark.parametrize("tx", [optax.adagrad(0.1), optax.adamw(0.1)], ids=["adagrad", "adamw"])
def test_arrays_that_a_step_spread_are_read_where_they_are(tx: Any) -> None:
    """Tables whose rows the devices divide are arrays, or deferred ones that are stored as they are.

    Batches that lie on the devices, the same tables before a step has spread them, and functions that read more.
    """

    def make() -> Any:
        params = {"items": jnp.linspace(-1, 1, 160).reshape(40, WIDTH), "w": jnp.eye(WIDTH)}
        return {"params": params, "opt": tx.init(params)}

    def loss_of(params: Any, batch: Any) -> Any:
        return jnp.square(params["items"][batch["ids"]] @ params["w"] - 1).mean()

    def step(state: Any, batch: Any) -> Any:
        loss, slope = jax.value_and_grad(loss_of)(state["params"], batch)
        updates, opt = tx.update(slope, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    def read(state: Any, batch: Any) -> Any:
        return loss_of(state["params"], batch), state["params"]["items"][batch["ids"]]

    def read_all(state: Any, batch: Any) -> Any:
        return read(state, batch), jnp.sort(state["params"]["items"], axis=0)

    planned, plain = autopar.parallelize(step, mesh=FOUR, strategy="ps"), jax.jit(step)
    readers = [autopar.parallelize(f, mesh=FOUR) for f in (read, read_all)]
    mine, theirs = make(), make()
    for k in range(3):
        batch = {"ids": (np.arange(8) * (k + 3)) % 40}
        there = jax.device_put(batch, NamedSharding(FOUR, P("data")))
        for reader, given in itertools.product(readers, (batch, there)):
            for got, expected in zip(
                jax.tree.leaves(reader(mine, given)), jax.tree.leaves(reader.fun(theirs, batch)), strict=True
            ):
                np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
            used = reader.latest.compiled
            inputs = zip(used.analysed.inputs, used.bound.placements, strict=True)
            (role,) = {(x.role, axis) for x, axis in inputs if x.path == "state/params/items"}
            assert role == (("batch", None) if k == 0 else ("table", 0))
        (mine, a), (theirs, b) = planned(mine, batch), plain(theirs, batch)
        np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.parametrize(
    "fun",
    [
        lambda p, x: p["a"][x["ids"]] @ p["b"],
        lambda p, x: (x["one"] @ p["b"].astype(jnp.bfloat16)).sum(1) + x["ids"],
        lambda p, x: jax.grad(lambda w: jnp.square(x["one"] @ w).sum())(p["b"]),
    ],
    ids=["looked up", "a cast weight", "a gradient"],
)
@pytest.mark.parametrize("first", [True, False])
def test_parameters_of_one_size_are_told_by_their_use(fun: Any, first: bool) -> None:
    """Whichever argument they are, and though the batch's leaves differ in size."""
    params = {"a": jnp.ones((8, 8)), "b": jnp.ones((8, 8))}
    batch = {"one": jnp.ones((16, 8)), "ids": jnp.arange(16) % 8, "negatives": jnp.ones(32)}
    evaluate = autopar.parallelize(fun if first else lambda x, p: fun(p, x), mesh=FOUR)
    arguments = (params, batch) if first else (batch, params)
    same(evaluate(*arguments), fun(params, batch))
    placements = evaluate.planned_for(*arguments).compiled.bound.placements
    assert placements == ((None, None, 0, 0, 0) if first else (0, 0, 0, None, None))


def test_an_argument_of_one_size_is_a_batch() -> None:
    """As no other argument is one, or as that one's leaves are of one size, too."""
    weights = {"a": jnp.ones((8, 3)), "b": jnp.ones((8,))}
    for fun, arguments in (
        (lambda p: p["a"].sum(1) * p["b"], (weights,)),
        (lambda p, x: p["a"][:4] * x, (weights, jnp.ones((4, 3)))),
    ):
        compiled = autopar.parallelize(fun, mesh=FOUR).lower(*arguments).compile()
        leaves = zip(jax.tree.leaves(arguments), jax.tree.leaves(compiled.input_shardings[0]), strict=True)
        assert all(s.shard_shape(x.shape) != x.shape for x, s in leaves)


def test_tables_in_arithmetic_are_ordinary_arrays() -> None:
    array, table = table_of(41)
    for found, expected in (
        (0.9 * table, 0.9 * array),
        (array - table, array - array),
        (np.float64(2) ** table, np.float64(2) ** array),
        (table @ jnp.ones(WIDTH), array @ jnp.ones(WIDTH)),
        (table > table, array > array),
    ):
        assert isinstance(found, jax.Array) and found.dtype == expected.dtype
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    mean = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, {"emb": array}, {"emb": table})
    np.testing.assert_allclose(mean["emb"], array, rtol=1e-6)
    table.stored.delete()  # as a step does
    for read in (lambda: np.asarray(table), lambda: table[0], lambda: 2 * table, lambda: autopar.materialize(table)):
        with pytest.raises(autopar.DonatedStateError, match=r"this table, float32\[41, 4\], was given to a step"):
            read()


def test_lookups_take_memory_for_a_batch_not_for_a_table() -> None:
    _, table = table_of(100_001)
    params = {"emb": table, "w": jnp.eye(WIDTH)}
    ids = ids_in(0, 100_001)["ids"]
    shapes = jax.ShapeDtypeStruct(ids.shape, ids.dtype)
    for batch in (ids, shapes):  # with a measured capacity, and with the safe one
        evaluate = autopar.parallelize(predict, mesh=FOUR)
        memory = evaluate.lower(params, batch).compile().memory_analysis()
        assert memory.temp_size_in_bytes < 40_000
        assert memory.argument_size_in_bytes == pytest.approx(table.nbytes / 4, rel=0.01)


def test_the_state_of_a_training_is_evaluated_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    new, _ = autopar.parallelize(step, strategy="ps", mesh=FOUR)(make_state(41), ids_in(0, 41))
    params = autopar.materialize(new["params"])
    monkeypatch.setattr(autopar.Table, "materialize", lambda self: pytest.fail("the whole table was read"))
    evaluate = autopar.parallelize(lambda p, ids: p["emb"][ids] @ p["w"], mesh=FOUR)
    np.testing.assert_allclose(evaluate(new["params"], np.arange(8)), params["emb"][:8] @ params["w"], rtol=1e-5)
    assert not new["params"]["emb"].is_deleted()
    text = explained(evaluate)
    assert "sparse, ps" in text and "Lookups in tables that are spread touch" in text
    assert autopar.explain(evaluate).planned_bytes < 41 * 3 * 4


def test_a_batch_that_exceeds_the_capacity() -> None:
    """Outputs that are no states come from the run without limits."""
    array, table = table_of(400)
    evaluate = autopar.parallelize(predict, mesh=FOUR)
    params, plain = {"emb": table, "w": jnp.eye(WIDTH)}, {"emb": array, "w": jnp.eye(WIDTH)}
    even = np.random.default_rng(0).integers(0, 400, (8, 20), np.int32)
    unequal = even // 4 * 4  # all of one owner
    same(evaluate(params, even), predict(plain, even))
    assert evaluate.plan.tables[0].tight
    small = evaluate.plan.tables[0].capacity
    with pytest.warns(autopar.CapacityWarning, match="with the same result"):
        for _ in range(2):  # that the capacity was exceeded may be known a call later only
            same(evaluate(params, unequal), predict(plain, unequal))
            time.sleep(0.1)
    assert evaluate.plan.tables[0].capacity > small
    same(evaluate(params, unequal), predict(plain, unequal))


def test_arrays_and_tables_are_planned_apart() -> None:
    array, table = table_of(41)
    evaluate = autopar.parallelize(predict, mesh=FOUR)
    ids = ids_in(0, 41)["ids"]
    w = jnp.eye(WIDTH)
    for emb, lifted in ((array, False), (table, True), (array, False), (table_of(41, cyclic=False)[1], True)):
        same(evaluate({"emb": emb, "w": w}, ids), predict({"emb": array, "w": w}, ids))
        assert evaluate.plan is not None and evaluate.plan.lifts == lifted
    assert len(evaluate._planned) == 3
    other = table_of(41, mesh=mesh_of(3))[1]
    same(evaluate({"emb": other, "w": w}, ids), predict({"emb": array, "w": w}, ids))
    assert len(evaluate._planned) == 3


def test_tables_in_several_layouts() -> None:
    """Looked up apart, each as it is stored; added row by row, as arrays."""
    (a, cyclic), (b, plain) = table_of(41), table_of(41, 1, cyclic=False)
    ids = ids_in(0, 41)["ids"]
    apart = autopar.parallelize(lambda p, ids: (p["a"][ids], p["b"][ids]), mesh=FOUR)
    same(apart({"a": cyclic, "b": plain}, ids), (a[ids], b[ids]))
    assert apart.plan is not None and len(apart.latest.compiled.bound.families) == 2
    added = autopar.parallelize(lambda p, ids: (p["a"] + p["b"])[ids], mesh=FOUR)
    same(added({"a": cyclic, "b": plain}, ids), (a + b)[ids])
    assert added.plan is not None and not added.plan.lifts
    assert "stored in another layout" in added.plan.parameters[0].reason
    same(added({"a": cyclic, "b": table_of(41, 1)[1]}, ids), (a + b)[ids])
    assert added.plan.lifts


def test_a_step_that_trains_one_table_and_reads_another() -> None:
    array, table = table_of(41)

    def distil(state: Any, teacher: Any, ids: Any) -> Any:
        loss, g = jax.value_and_grad(lambda e: jnp.mean((e[ids] - teacher["emb"][ids]) ** 2))(state["emb"])
        return {"emb": state["emb"] - g}, loss

    planned = autopar.parallelize(distil, strategy="ps", mesh=FOUR)
    mine = theirs = {"emb": jnp.ones((41, WIDTH))}
    for seed in range(3):
        ids = ids_in(0, 41, seed)["ids"]
        (mine, a), (theirs, b) = planned(mine, {"emb": table}, ids), jax.jit(distil)(theirs, {"emb": array}, ids)
        same((mine, a), (theirs, b))
    assert planned.plan is not None and {p.lifted for p in planned.plan.parameters} == {True}
    assert len(planned._planned) == 1, "the state came as an array first, then as a Table"
    assert not table.is_deleted()


def test_inside_another_jit_and_verified() -> None:
    array, table = table_of(41)
    evaluate = autopar.parallelize(predict, mesh=FOUR)
    ids, w = ids_in(0, 41)["ids"], jnp.eye(WIDTH)
    nested = jax.jit(lambda w, ids: evaluate({"emb": table, "w": w}, ids))
    same(nested(w, ids), predict({"emb": array, "w": w}, ids))
    assert autopar.verify(evaluate, {"emb": table, "w": w}, ids).ok


@pytest.mark.parametrize("copy", [True, False])
def test_what_is_on_devices_of_its_own_is_brought_together(copy: bool) -> None:
    """As the state of a pipeline is; what a mesh has all devices of stays where it is."""
    one, two, pair = jax.devices()[1], jax.devices()[2], jax.sharding.Mesh(jax.devices()[2:4], ("replicas",))
    replicated = jax.NamedSharding(pair, jax.P())
    state = {
        "first": jax.device_put(jnp.arange(3.0), one),
        "second": jax.device_put(jnp.arange(3.0), two),
        "replicas": jax.device_put(jnp.arange(3.0), replicated),
        "key": jax.device_put(jax.random.key(0), two),
        "anywhere": jnp.arange(3.0),
        "host": np.arange(3.0),
    }
    together = autopar.materialize(state, copy=copy)
    assert all(together[name].devices() == {one} for name in ("first", "second", "replicas", "key"))
    if copy:
        for name in "first", "second", "replicas":
            state[name].delete()
    total = jax.jit(lambda s: sum(s[name] for name in sorted(s) if name != "key"))(together)
    np.testing.assert_array_equal(total, 5 * np.arange(3.0))
    mixed = {"spread": jax.device_put(jnp.arange(3.0), replicated), "one": jax.device_put(1.0, two)}
    kept = autopar.materialize(mixed, copy=copy)
    assert {name: x.devices() for name, x in kept.items()} == {name: x.devices() for name, x in mixed.items()}


def test_the_page_of_evaluations_runs() -> None:
    check_page()


@pytest.mark.parametrize("best", [jax.lax.top_k, jax.lax.approx_max_k], ids=["top_k", "approx_max_k"])
@pytest.mark.parametrize("looped", [False, True])
def test_the_best_of_all_items_are_found_by_each_device_for_its_examples(best: Any, looped: bool) -> None:
    """XLA would gather the scores of all examples."""
    rows, examples = 320, 16

    def find(params: Any, users: Any) -> Any:
        scores = params["user"][users] @ params["item"].T
        if looped:
            return jax.lax.scan(lambda c, x: (c, best(scores + x, 5)), 0, jnp.arange(2.0))[1]
        return best(scores, 5)

    params = {"user": table_of(40)[0], "item": table_of(rows, 1)[0]}
    evaluate, users = autopar.parallelize(find, mesh=FOUR), np.arange(examples, dtype=np.int32)
    for mine, theirs in zip(evaluate(params, users), jax.jit(find)(params, users), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
    text = evaluate.lower(params, users).compile().as_text()
    assert f"f32[{examples},{rows}]" not in text and f"f32[{examples // 4},{rows}]" in text
    assert "every device has whole" not in explained(evaluate)
