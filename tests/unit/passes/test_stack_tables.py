"""`stack_tables`: which tables become one, and that it changes no number."""

from __future__ import annotations

import functools
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.backends.host.storage import HostRows, stacked
from autopar.ir.layout import RowLayout
from tests.support import many_tables
from tests.support.pairs import long
from tests.support.stacked_tables import LOOKUPS, OPTIMIZERS, assert_same, batch, stacks, start, step_of, trained

HOSTS = ("ps", "hosts")
ADAGRAD = OPTIMIZERS["clipped Adagrad"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_tables_that_are_alike_are_one(name: str) -> None:
    """The five of one width; where rows wait as well, and are read in between."""
    plain, step = (
        wrap(step_of(OPTIMIZERS[name])) for wrap in (jax.jit, functools.partial(autopar.parallelize, strategy=HOSTS))
    )
    evaluation = autopar.parallelize(lambda params, ids: params["tables"]["t1"][ids].sum())
    theirs, mine = start(OPTIMIZERS[name]), start(OPTIMIZERS[name])
    ids = np.array([0, 5, 39])
    for k in range(25):
        theirs, wanted = plain(theirs, batch(k))
        mine, loss = step(mine, batch(k))
        np.testing.assert_allclose(loss, wanted, rtol=1e-4)
        if k % 6 == 2:
            tables, others = mine["params"]["tables"], theirs["params"]["tables"]
            np.testing.assert_allclose(evaluation(mine["params"], ids), others["t1"][ids].sum(), rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(np.asarray(tables["t3"]), others["t3"], rtol=1e-3, atol=1e-4)
    assert stacks(step) == [5]
    program = step.latest.compiled.program
    assert [e.op for e in program.block.walk()].count("ap.route") == 2  # the stack's and the wide table's
    assert_same(mine, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("out_of_range", [long(False), True])
@pytest.mark.parametrize("name", LOOKUPS)
def test_lookups_of_all_kinds(name: str, out_of_range: bool) -> None:
    step = step_of(ADAGRAD, LOOKUPS[name])
    planned = autopar.parallelize(step, strategy=HOSTS)
    mine, theirs = (trained(s, start(ADAGRAD), 5, out_of_range=out_of_range) for s in (planned, jax.jit(step)))
    assert stacks(planned) == [5]
    assert_same(mine, theirs)


def test_tables_of_16_bits() -> None:
    step = step_of(optax.sgd(0.125))
    planned = autopar.parallelize(step, strategy=HOSTS)
    mine, theirs = (trained(s, start(optax.sgd(0.125), jnp.bfloat16), 3) for s in (planned, jax.jit(step)))
    assert stacks(planned) == [5]
    assert_same(mine, theirs, rtol=1e-2, atol=1e-2)


def test_what_is_of_one_table_keeps_it_apart() -> None:
    """Each table's gradient clipped by its own norm; a row mask of one table; ids that depend on another one's rows."""

    def masked(state: Any, batch: Any) -> Any:
        new, loss = step_of(optax.sgd(0.3))(state, batch)
        kept = batch["mask"][:, None] * new["params"]["tables"]["t0"]
        return {**new, "params": {**new["params"], "tables": {**new["params"]["tables"], "t0": kept}}}, loss

    def followed(state: Any, batch: Any) -> Any:
        first = state["params"]["tables"]["t0"][batch["ids"][:, 0], 0]
        ids = batch["ids"].at[:, 1].set((first > 0).astype(jnp.int32))
        return step_of(optax.sgd(0.3))(state, {**batch, "ids": ids})

    clipped = optax.chain(optax.clip_by_block_rms(0.01), optax.sgd(0.3))
    for step, tx, wanted in (
        (step_of(clipped), clipped, []),
        (masked, optax.sgd(0.3), [4]),
        (followed, optax.sgd(0.3), [4]),
    ):
        planned = autopar.parallelize(step, strategy=HOSTS)
        mine, theirs = start(tx), start(tx)
        for k in range(3):
            given = {**batch(k), "mask": np.linspace(0.5, 1, 7).astype(np.float32)}
            (mine, _), (theirs, _) = planned(mine, given), jax.jit(step)(theirs, given)
        assert stacks(planned) == wanted, step
        assert_same(mine, theirs)
        told = " ".join(str(autopar.explain(planned)).split())
        assert "1 table has exchanges of its own: params/tables/t5 (no 4 of these have the same width" in told
        whose = "5 tables have exchanges of their own: params/tables/t{0..4} (the step uses a sum over the rows of each"
        assert (whose in told) == (step.__name__ == "train_step")


def test_explain_names_what_keeps_tables_apart() -> None:
    """Ids that depend on rows of another table, the update of two, lookups in a loop; nothing if there are three."""

    def mixed(state: Any, batch: Any) -> Any:
        ids = batch["ids"]
        other = (state["t0"][ids[:, 0], 0] > 0).astype(jnp.int32)

        def loss(tables: Any) -> jax.Array:
            looped = jax.lax.map(lambda ids: tables["t8"][ids], ids)
            rows = (tables[f"t{k}"][other if k == 1 else ids[:, k % 6]] for k in range(1, 8))
            return sum((jnp.sin(x).sum() for x in rows), looped.sum())

        grads = jax.grad(loss)(state)
        rates = {f"t{k}": 0.3 * loss(state) if k in (6, 7) else 0.1 for k in range(9)}
        return {k: x - rates[k] * jnp.sign(grads[k]) for k, x in state.items()}, loss(state)

    state = {f"t{k}": jnp.ones((20 + k, 8)) for k in range(9)}
    told = autopar.explain(autopar.parallelize(mixed, strategy=HOSTS), state, batch(0))
    as_one, part, depends, *rest = (line for line in told.notes if "exchange" in line)
    assert as_one == "4 tables are exchanged and updated as one: t{2..5}"
    assert "1 table has exchanges of its own: t0 (gather (" in part
    assert Path(__file__).name in part
    assert depends == "1 table has exchanges of its own: t1 (its ids depend on rows)"
    assert rest == [
        "1 table has exchanges of its own: t8 (it is looked up in a loop or branch)",
        "2 tables have exchanges of their own: t{6,7} (no 4 of these are updated by the same equations)",
    ]
    tx = optax.sgd(0.1)
    step = autopar.parallelize(many_tables.step_of(tx), strategy=HOSTS)
    assert "exchanges of" not in str(autopar.explain(step, many_tables.start(3, tx), many_tables.batch(3, 0)))


def four_of(tx: optax.GradientTransformation) -> Any:
    """Makes a step that trains the first four tables, and doesn't have the others."""

    def four(state: Any, ids: Any) -> Any:
        tables, opt = state
        grads = jax.grad(lambda tables: sum(jnp.sum(jnp.sin(x[ids])) for x in tables.values()))(tables)
        updates, opt = tx.update(grads, opt, tables)
        return optax.apply_updates(tables, updates), opt

    return four


def first_four(state: Any) -> Any:
    """Returns four tables of a state with the optimizer's leaves of them."""

    def some(tree: Any) -> Any:
        return {f"t{k}": tree["tables"][f"t{k}"] for k in range(4)} if isinstance(tree, dict) else tree

    return some(state["params"]), jax.tree.map(some, state["opt"], is_leaf=lambda x: isinstance(x, dict))


def test_a_step_of_the_first_tables_of_a_stack_leaves_the_last_alone() -> None:
    """Rows of all tables wait in one log, and those of another step in a log of its own."""
    tx, ids = OPTIMIZERS["AdamW"], np.array([1, 3, 6])
    mine, theirs = start(tx), start(tx)
    step, other = (autopar.parallelize(f, strategy=HOSTS) for f in (step_of(tx), four_of(tx)))
    mine, theirs = trained(step, mine, 3), trained(jax.jit(step_of(tx)), theirs, 3)
    some, others = first_four(mine), first_four(theirs)
    for _ in range(5):
        some, others = other(some, ids), jax.jit(four_of(tx))(others, ids)
    assert (stacks(step), stacks(other)) == ([5], [4])
    assert_same(some, others, rtol=1e-3, atol=1e-4)
    assert_same(mine["params"]["tables"]["t4"], theirs["params"]["tables"]["t4"], rtol=1e-3, atol=1e-4)


def test_steps_that_stack_tables_otherwise_are_warned_of_once() -> None:
    """Tables are moved at each change between two steps."""
    tx, ids = optax.sgd(0.3), np.array([1, 3, 6])
    step, other = (autopar.parallelize(f, strategy=HOSTS) for f in (step_of(tx), four_of(tx)))
    state = start(tx)

    def train_some() -> None:
        tables, _ = other((first_four(state)[0], tx.init({})), ids)
        state["params"]["tables"].update(tables)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state = trained(step, state, 3)
        train_some()
        train_some()
        assert not [w for w in caught if "moves" in str(w.message)]
        for _ in range(3):
            state = trained(step, state, 1)
            train_some()
    (told,) = (str(w.message) for w in caught if "moves" in str(w.message))
    assert told.startswith("train_step and four keep params/tables/t0 beside other tables"), told


@pytest.mark.parametrize(
    ("count", "name", "stacked"), [(2, "AdamW", []), (8, "clipped Adagrad", [4]), (26, "mixed", [4, 5, 5, 8])]
)
def test_many_tables(count: int, name: str, stacked: list[int]) -> None:
    """Tables of one width, dtype and optimizer are one."""
    planned = many_tables.check(count, name, functools.partial(autopar.parallelize, strategy=HOSTS))
    assert sorted(stacks(planned)) == stacked


def test_shards_are_moved_one_by_one() -> None:
    """Beside the tables a stack takes the memory of one of them, not of all."""
    rows, count = 100_000, 8
    program = f"""
import resource, numpy as np
from autopar.backends.host.storage import HostRows, stacked
from autopar.ir.layout import RowLayout
one = RowLayout({rows}, 1, False)
shards = [HostRows.empty(({rows}, 64), np.dtype(np.float32), 0, one, 0, str(k)) for k in range({count})]
for k, shard in enumerate(shards):
    shard.rows[...] = k
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
stacked(shards, RowLayout({count * rows}, 1, False), [{rows} * k for k in range({count})], "train_step")
assert all((shard.rows == k).all() for k, shard in enumerate(shards))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 3 * rows * 64 * 4, done.stdout


def test_a_moved_shard_never_has_a_version_again() -> None:
    """Else rows that were fetched before another step wrote to it would be taken for the current ones."""
    one, two = RowLayout(3, 1, False), RowLayout(6, 1, False)
    first, second, third = (HostRows.of(np.zeros((3, 2), np.float32), 0, one, 0, str(k)) for k in range(3))
    before = first.version
    stacked([first, second], two, [0, 3], "train").commit(np.arange(3), 3, np.ones((3, 2), np.float32))
    stacked([first, third], two, [0, 3], "finetune")
    assert first.rows.all() and first.version != before


def test_programs_hardly_grow_with_tables() -> None:
    """26 tables take at most three times the instructions of two."""
    instructions = []
    for count in (2, 26):
        train_step, state, minibatch = many_tables.alike(count)
        step = autopar.parallelize(train_step, strategy=HOSTS)
        step(state, minibatch)
        segmented = step.latest.runner._last.segmented
        texts = []
        for called in segmented._called:
            operands = [segmented._operand(called, v, k, None) for k, v in enumerate(called.inputs)]
            texts.append(called.program.lower(*operands).compile().as_text())
        instructions.append("".join(texts).count(" = "))
    assert 300 < instructions[0] < instructions[1] <= 3 * instructions[0], instructions


@pytest.mark.parametrize("mode", ["clip", "drop"])
def test_ids_of_several_types(mode: str) -> None:
    """Of tables that are one; some out of range, in types that hold more rows, or fewer, than the tables have."""
    types = [np.uint8, np.int32, np.uint32, np.int16]

    def train_step(tables: Any, ids: Any) -> Any:
        def loss(tables: Any) -> jax.Array:
            rows = [
                t.at[i].get(mode="clip" if mode == "clip" else "fill", fill_value=0.5)
                for t, i in zip(tables, ids, strict=True)
            ]
            return sum(jnp.sum(jnp.tanh(x) ** (k + 2)) for k, x in enumerate(rows))

        value, grads = jax.value_and_grad(loss)(tables)
        return [t - 0.1 * g for t, g in zip(tables, grads, strict=True)], value

    rng = np.random.default_rng(0)
    for kinds in (types, [np.uint32] * 4, [np.uint8] * 4):
        tables = [jnp.asarray(rng.normal(size=(n, 3)), np.float32) for n in (300, 200, 100, 250)]
        given = [np.arange(24).astype(t) * 9 for t in kinds]
        for ids in given:
            ids[-1] = np.iinfo(ids.dtype).max
            ids[-2] = np.iinfo(ids.dtype).min
        step = autopar.parallelize(train_step, strategy=HOSTS, donate=False)
        new, value = step(tables, given)
        expected, wanted = jax.jit(train_step)(tables, given)
        assert step.latest.compiled.stacked is not None
        np.testing.assert_allclose(value, wanted, rtol=1e-5)
        for a, b in zip(new, expected, strict=True):
            np.testing.assert_allclose(np.asarray(a), b, rtol=1e-5, atol=1e-6)
