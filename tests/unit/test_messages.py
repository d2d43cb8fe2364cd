"""What a user meets beside the numbers: errors that say what, where and what to do; methods; tables in arithmetic."""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import autopar
from tests.support.explained import explained

ROWS, WIDTH = 40, 3
IDS = jnp.array([3, 5], jnp.int32)


def make_table() -> jax.Array:
    return jnp.arange(ROWS * WIDTH, dtype=jnp.float32).reshape(ROWS, WIDTH) / 100


def loss_of(table: Any, ids: Any) -> Any:
    return (table[ids] ** 2).sum()


def sgd(table: Any, batch: Any) -> Any:
    return table - 0.1 * jax.grad(loss_of)(table, batch["ids"]), batch["ids"].sum()


def decayed(table: Any, ids: Any) -> Any:
    """Moves all rows."""
    return 0.9 * table - 0.1 * jax.grad(loss_of)(table, ids), ids.sum()


# --- arguments ---


@pytest.mark.parametrize(
    ("batch", "told"),
    [
        ({"ids": IDS, "text": "a b"}, r"batch/text is no array of numbers \(str: 'a b'\).*take it out of 'batch'"),
        ({"ids": IDS, "more": [IDS, print]}, "batch/more/1 is no array.*built-in function print"),
        ({"ids": IDS, "words": np.array(["a", "b"])}, r"batch/words is no array of numbers \(array of <U1\)"),
        ({"ids": IDS, "objects": np.array([None])}, r"batch/objects is no array of numbers \(array of object\)"),
        ("a b", r"argument batch is no array of numbers.*static_argnums=1\)"),
    ],
)
@pytest.mark.parametrize("strategy", ["auto", ("ps", "hosts")])
def test_a_leaf_that_is_no_array_is_named(batch: Any, told: str, strategy: Any) -> None:
    step = autopar.parallelize(sgd, strategy=strategy)
    with pytest.raises(autopar.ArgumentsError, match=told):
        step(make_table(), batch)
    table, _ = step(make_table(), {"ids": IDS})
    with pytest.raises(autopar.ArgumentsError, match=told):
        step(table, batch)
    if batch == "a b":
        with pytest.raises(autopar.ArgumentsError, match=r"static_argnames='batch'\)"):
            step(table, batch=batch)
    else:  # of the structure that was planned
        with pytest.raises(autopar.ArgumentsError, match=r"batch/ids is no array of numbers \(str: 'c'\)"):
            step(table, {"ids": "c"})


# --- options, and what other functions are given ---


def dictionaries(state: Any, batch: Any) -> Any:
    return {"t": sgd(state["t"], batch)[0]}, 0.0


STATE, BATCH = {"t": make_table()}, {"ids": IDS}
DATA = {"x": np.ones((8, 2), np.float32)}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"strategy": {3: "ps"}}, "patterns over parameter paths are strings"),
        ({"donate": "yes"}, "donate='yes': give True or False"),
        ({"state_argnums": "0"}, "state_argnums='0': give positions"),
        ({"batch_argnums": (0.5,)}, r"batch_argnums=\(0.5,\): give positions"),
        ({"static_argnums": True}, "static_argnums=True: give positions"),
        ({"static_argnums": 7}, "static_argnums names argument 7; dictionaries takes 2"),
        ({"state_argnums": -3}, "state_argnums names argument -3; dictionaries takes 2"),
        ({"data_axis": "x"}, "data_axis='x' is no axis of the mesh: give mesh=, too"),
        (
            {"static_argnums": 1},
            r"static argument batch is a dict, which can't be hashed .*leave them out of static_arg",
        ),
    ],
)
def test_options_that_cannot_be(options: Any, told: str) -> None:
    with pytest.raises(autopar.ArgumentsError, match=told):
        autopar.parallelize(dictionaries, **options)(STATE, BATCH)


def planned() -> Any:
    return autopar.parallelize(dictionaries)


SHARD: list[tuple[Any, dict[str, Any], str]] = [
    (DATA, {"batch_size": "a"}, "batch_size='a': give a whole number, 1 or more"),
    (DATA, {"batch_size": 0}, "batch_size=0: give a whole number, 1 or more"),
    (DATA, {"batch_size": 2, "epochs": -1}, "epochs=-1: give a whole number, 0 or more"),
    (DATA, {"batch_size": 2, "shuffle": "a"}, "shuffle='a': give a whole number, 0 or more"),
    (DATA, {"mesh": 3}, "mesh is a int; make one with jax.make_mesh"),
    (DATA, {"mask": 3}, "mask=3: give the name"),
    (3, {}, "shard takes batches to go through, or, with batch_size=, examples that can be indexed, not a int"),
    ([{}], {}, "batch 0 has no array with an axis for its examples .it has no leaves.: give arrays"),
    (np.array(["a", "b"]), {"batch_size": 2}, "batch is an array of <U1: batches are of numbers"),
    ([{"x": np.ones(3)}, {"x": np.ones(4)}], {"batch_size": 2}, r"example 1 .*: x has shape \[4\] instead of \[3\]"),
    ([{"x": np.ones(3)}, {"y": np.ones(3)}], {"batch_size": 2}, "example 1 .*: its structure is"),
]


@pytest.mark.parametrize(("source", "options", "told"), SHARD)
def test_batches_that_cannot_be(source: Any, options: Any, told: str) -> None:
    with pytest.raises(autopar.ArgumentsError, match=told):
        next(autopar.shard(source, **options))


@pytest.mark.parametrize(
    "position",
    [3, None, {}, {"epoch": 0, "batch": 0}, *({"epoch": 0, "batch": k, "seed": -1, "sources": 1} for k in ("a", -1))],
)
def test_a_position_that_cannot_be(position: Any) -> None:
    with pytest.raises(autopar.ArgumentsError, match="is no position"):
        autopar.shard(DATA, batch_size=2).restore(position)


@pytest.mark.parametrize(
    ("work", "told"),
    [
        (lambda: autopar.verify(planned(), STATE, BATCH, steps=0), "steps=0; the step is run once at least"),
        (lambda: autopar.verify(planned(), *jax.eval_shape(lambda: (STATE, BATCH))), "give it arrays, not shapes"),
        (lambda: autopar.init(3, step=planned(), batch=BATCH), "a function that makes the state first, not a int"),
        (lambda: autopar.init(lambda: STATE, step=planned(), call=3), "call=3: give a function"),
        (lambda: autopar.save(3, STATE), "3 is no path of a checkpoint"),
        (lambda: autopar.restore(None), "None is no path of a checkpoint"),
        (lambda: jax.jit(lambda s: autopar.save("x", s))(STATE), "t is being traced .* outside of jax.jit"),
        (lambda: autopar.save("/proc/nothing", STATE), "/proc/nothing can't be made or written to: FileNotFoundError"),
        (lambda: autopar.Cluster.load(3), "3 is no path of a cluster file"),
        (
            lambda: autopar.Cluster.named("dgx-h100").save("/nowhere/x.toml"),
            "/nowhere/x.toml: .* can't be written: No su",
        ),
        (lambda: autopar.Plan.load(3), "3 is no path of a plan"),
        (lambda: autopar.plan(planned(), STATE, BATCH).diff(3), "diff takes a plan, .* not a int"),
        (lambda: autopar.why(3, "t", "ps"), "why takes a plan, .* not a int"),
        (lambda: autopar.why(planned(), "t", "ps"), r"why takes a plan, step\.plan or .*, not a step"),
        (lambda: autopar.simulate(3), "simulate takes a plan, .* not a int"),
        (lambda: autopar.watchdog("a"), "watchdog: 'a' seconds; it must be a positive number"),
    ],
)
def test_what_other_functions_are_given(work: Any, told: str) -> None:
    with pytest.raises(autopar.AutoparError, match=told):
        work()


# --- methods ---


class Trainer:
    def __init__(self, rate: float) -> None:
        self.rate = rate

    def plain(self, table: Any, ids: Any) -> Any:
        return table - self.rate * jax.grad(loss_of)(table, ids), ids.sum()

    step = autopar.parallelize(plain, strategy="ps", static_argnums=0)
    dynamic = autopar.parallelize(plain, strategy="ps")
    hosted = autopar.parallelize(plain, strategy=("ps", "hosts"), static_argnums=0)


@jax.tree_util.register_dataclass
@dataclass
class Rates:
    rate: Any

    step = autopar.parallelize(Trainer.plain, strategy="ps", state_argnums=1)


@pytest.mark.parametrize("trainer", [Trainer(0.1), Rates(jnp.float32(0.3))])
def test_a_step_that_is_a_method(trainer: Any) -> None:
    expected = Trainer.plain(trainer, make_table(), IDS)[0]
    np.testing.assert_allclose(trainer.step(make_table(), IDS)[0], expected, rtol=1e-6)
    np.testing.assert_allclose(trainer.step(make_table(), ids=IDS)[0], expected, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(trainer.step, static_argnames=())(make_table(), IDS)[0], expected, rtol=1e-6)
    assert trainer.step.plan.parameters[0].lifted and trainer.step == trainer.step != Trainer(0.1).step
    assert "sparse" in explained(trainer.step, make_table(), IDS)
    assert "sparse" in explained(trainer.step)
    assert autopar.verify(trainer.step, make_table(), IDS).ok
    assert "table" in str(autopar.plan(trainer.step, make_table(), IDS))
    assert "scatter" in trainer.step.lower(make_table(), IDS).as_text()
    assert trainer.step.name == "plain"
    np.testing.assert_allclose(trainer.step.__wrapped__(make_table(), IDS)[0], expected, rtol=1e-6)
    if isinstance(trainer, Trainer):
        with pytest.warns(autopar.RecompileWarning, match="a static argument changed") as warned:
            other = Trainer(0.2).step(make_table(), IDS)[0]
        assert warned[0].filename == __file__
        np.testing.assert_allclose(other, Trainer.plain(Trainer(0.2), make_table(), IDS)[0], rtol=1e-6)


def test_a_static_argument_that_changes_is_named(monkeypatch: Any) -> None:
    monkeypatch.setattr("autopar.run.step.MAX_PLANS", 3)
    step = autopar.parallelize(lambda table, batch, n: (*sgd(table, batch), jnp.zeros(n)), static_argnums=2)
    table, *_ = step(make_table(), BATCH, 1)
    for n in (2, 3):
        with pytest.warns(
            autopar.RecompileWarning, match=f"static argument changed: argument 2 was {n - 1} and is {n}"
        ):
            table, *_ = step(table, BATCH, n)
    with pytest.raises(autopar.ArgumentsError, match="3 different static arguments.*Pass it as an array"):
        step(table, BATCH, 4)


def test_the_strategy_of_a_step_is_for_calls_that_train() -> None:
    """Without a state, paths have the argument's name before them."""

    def step(state: Any, ids: Any, *, train: bool = True) -> Any:
        value = loss_of(state["table"], ids)
        return (jax.tree.map(lambda x: x - 0.1 * value, state) if train else state), value

    for strategy in ({"table": "ps"}, {"table": ("ps", "hosts")}):
        planned = autopar.parallelize(step, strategy=strategy, static_argnames="train")
        state, _ = planned({"table": make_table()}, IDS)
        wanted = float(loss_of(np.asarray(state["table"]), IDS))
        with pytest.warns(autopar.RecompileWarning, match="static argument changed: train, which one call isn't given"):
            _, value = planned(state, IDS, train=False)
        np.testing.assert_allclose(float(value), wanted, rtol=1e-6)
    with pytest.raises(autopar.StrategyError, match="'tabel' matches no parameter"):
        autopar.parallelize(step, strategy={"tabel": "ps"}, static_argnames="train")({"table": make_table()}, IDS)


def test_a_train_state_with_another_optimizer_is_named() -> None:
    def state(rate: float) -> Any:
        return TrainState.create(apply_fn=loss_of, params={"table": make_table()}, tx=optax.sgd(rate))

    step = autopar.parallelize(lambda s: s.apply_gradients(grads=s.params))
    step(state(0.1))
    with pytest.warns(
        autopar.RecompileWarning, match=r"s has another structure: TrainState.tx is another object. Make"
    ):
        step(state(0.1))


@pytest.mark.parametrize(
    ("other", "change"),
    [
        ({"table": 0, "b": 1}, r"the keys of a dict: \['a', 'table'\] became \['b', 'table'\]"),
        ({"table": 0, "a": (1, 1)}, "a leaf became a tuple"),
        ([0, 1], "a dict became a list"),
    ],
)
def test_a_structure_that_changes_is_named(other: Any, change: str) -> None:
    step = autopar.parallelize(lambda x: jax.tree.leaves(x)[0] * 2)
    step({"table": 0, "a": 1})
    with pytest.warns(autopar.RecompileWarning, match=f"x has another structure: {change}"):
        step(other)


def test_a_method_that_changes_an_nnx_object_is_for_the_nnx_integration() -> None:
    class Model(nnx.Module):
        def __init__(self) -> None:
            self.table: Any = nnx.Param(make_table())

        def fit(self, ids: Any) -> None:
            self.table[...] = self.table[...].at[ids].add(1.0)

    with pytest.raises(Exception, match="trace level") as caught:
        autopar.parallelize(Model().fit)(IDS)
    assert (
        "integrations.nnx.parallelize" in caught.value.__notes__[-1]
        and "Model.fit, called" in caught.value.__notes__[-1]
    )


@pytest.mark.parametrize("uses", [bool, jnp.zeros], ids=["an if", "a shape"])
def test_a_number_whose_value_the_step_needs_may_be_static(uses: Any) -> None:
    step = autopar.parallelize(lambda table, batch, n: (*sgd(table, batch), uses(n)))
    with pytest.raises(TypeError) as caught:
        step(make_table(), BATCH, 3)
    assert "n is a number, which" in caught.value.__notes__[-1]
    assert "static_argnums=2" in caught.value.__notes__[-1]
    with pytest.raises(TypeError) as caught:
        step(make_table(), BATCH, n=True)
    assert "static_argnames='n'" in caught.value.__notes__[-1]


def test_a_partial_has_the_name_of_its_function() -> None:
    step = autopar.parallelize(functools.partial(dictionaries, batch=BATCH))
    assert step.name == "dictionaries" and repr(step) == "<ParallelStep of dictionaries>"


def test_a_state_is_made_and_restored_for_a_method(tmp_path: Any) -> None:
    trainer = Trainer(0.1)
    table = autopar.init(make_table, step=trainer.hosted, batch=IDS)
    assert isinstance(table, autopar.HostTable)
    table, _ = trainer.hosted(table, IDS)
    autopar.save(tmp_path, table)
    found = autopar.restore(tmp_path, step=trainer.hosted, call=lambda made: (made, IDS)).state
    assert isinstance(found, autopar.HostTable)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(table))


def test_an_object_that_is_no_pytree_is_to_be_static() -> None:
    with pytest.raises(autopar.ArgumentsError, match=r"argument self is no array of numbers \(Trainer: .*argnums=0\)"):
        Trainer(0.1).dynamic(make_table(), IDS)
    with pytest.raises(autopar.ArgumentsError, match=r"argument self is no array of numbers \(Trainer: .*argnums=0\)"):
        autopar.explain(Trainer(0.1).dynamic, make_table(), IDS)


@pytest.mark.parametrize("function", [autopar.explain, autopar.verify, autopar.plan, autopar.check])
def test_what_is_no_planned_step(function: Any) -> None:
    name = function.__name__
    with pytest.raises(
        autopar.ArgumentsError, match=rf"{name} takes .* not a function: {name}\(autopar.parallelize\(sgd"
    ):
        function(sgd, make_table(), {"ids": IDS})
    with pytest.raises(autopar.ArgumentsError, match=rf"{name} takes a step that parallelize returned, not a Trainer$"):
        function(Trainer(0.1), make_table(), IDS)


# --- lower ---


def test_lower_is_of_the_program_that_a_call_runs() -> None:
    """Of ordinary arrays, too, though the step's rows are deferred: the plain program has no update log."""
    step = autopar.parallelize(decayed, strategy="ps", state_argnums=0)
    text = step.lower(make_table(), IDS).as_text()
    assert "stablehlo.while" in text
    shapes = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.int32)
    assert step.lower(*shapes).as_text() == text
    table, _ = step(make_table(), IDS)
    assert isinstance(table, autopar.DeferredTable)
    assert step.lower(table, IDS).as_text() == text


# --- arithmetic ---

BINARY = "sub mul pow lt ge".split()


@pytest.mark.parametrize("strategy", ["ps", ("ps", "hosts")])
def test_tables_in_arithmetic_are_ordinary_arrays(strategy: Any) -> None:
    step = autopar.parallelize(decayed, strategy=strategy, state_argnums=0)
    table, _ = step(make_table() + 1, IDS)
    assert isinstance(table, (autopar.DeferredTable, autopar.HostTable))
    array = autopar.materialize(table)
    np.testing.assert_allclose(array, decayed(make_table() + 1, IDS)[0], rtol=1e-6)
    others = [2.0, np.float64(2), np.full(WIDTH, 2.0, np.float32), array, table]
    for name in BINARY:
        apply = getattr(operator, name)
        for other in others:
            same = array if other is table else other
            for found, expected in (
                (apply(table, other), apply(array, same)),
                (apply(other, table), apply(same, array)),
            ):
                assert type(found) is type(expected) and found.dtype == expected.dtype
                np.testing.assert_array_equal(found, expected)
    for found, expected in ((-table, -array), (abs(table), abs(array)), (table @ array.T, array @ array.T)):
        np.testing.assert_array_equal(found, expected)
    assert len(list(table)) == ROWS
    with pytest.raises(ValueError, match="a table of 120 elements is neither true nor false"):
        bool(table)
    mean = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, {"t": array}, {"t": table})
    np.testing.assert_array_equal(mean["t"], 0.9 * array + 0.1 * array)
    with pytest.raises(TypeError, match=rf"unsupported operand type\(s\) for \+: '{type(table).__name__}' and 'str'"):
        table + "a"
    assert not table.is_deleted() and step(table, IDS)
