"""`stack_tables`: which tables become one, and that it changes no number."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from tests.support import many_tables
from tests.support.stacked_tables import LOOKUPS, OPTIMIZERS, batch, stacks, start, step_of

HOSTS = ("ps", "hosts")
ADAGRAD = OPTIMIZERS["clipped Adagrad"]


def assert_same(mine: Any, theirs: Any, rtol: float = 2e-5, atol: float = 2e-6) -> None:
    """Compares all leaves."""
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(theirs), jax.tree.leaves(mine), strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        np.testing.assert_allclose(b, a, rtol=rtol, atol=atol, err_msg=str(path))


def trained(step: Any, state: Any, steps: int, **options: Any) -> Any:
    for k in range(steps):
        state, _ = step(state, batch(k, **options))
    return state


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


@pytest.mark.parametrize("out_of_range", [False, True])
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


def test_tables_whose_new_values_are_other_leaves_as_well_are_refused_as_without_a_stack() -> None:
    def remembering(state: Any, batch: Any) -> Any:
        new, loss = step_of(ADAGRAD)({k: state[k] for k in ("params", "opt")}, batch)
        return {**new, "last": new["params"]["tables"]}, loss

    state = start(ADAGRAD)
    state["last"] = jax.tree.map(jnp.zeros_like, state["params"]["tables"])
    with pytest.raises(autopar.StrategyError, match="all rows of a table are read at once"):
        autopar.parallelize(remembering, strategy=HOSTS)(state, batch(0))


def test_arguments_stay_if_they_are_not_donated() -> None:
    """A table that comes twice is two tables."""
    planned = autopar.parallelize(step_of(ADAGRAD), strategy=HOSTS, donate=False)
    first, _ = planned(start(ADAGRAD), batch(0))
    before = jax.tree.map(np.asarray, first)
    twice = {
        **first,
        "params": {**first["params"], "tables": {**first["params"]["tables"], "t2": first["params"]["tables"]["t2"]}},
    }
    new, _ = planned(twice, batch(1))
    assert_same(first, before, 0, 0)
    wanted = trained(jax.jit(step_of(ADAGRAD)), start(ADAGRAD), 2)
    assert_same(new, wanted)


def test_other_steps_take_some_of_the_tables(tmp_path: Path) -> None:
    """A step that trains two of them by itself; a checkpoint of each table; a step that was planned anew."""
    tx = OPTIMIZERS["AdamW"]

    def two(state: Any, ids: Any) -> Any:
        tables = state["params"]["tables"]
        some = {k: tables[k] for k in ("t0", "t2")}
        grads = jax.grad(lambda t: sum(jnp.sum(jnp.sin(x[ids])) for x in t.values()))(some)
        some = jax.tree.map(lambda x, g: x - 0.1 * g, some, grads)
        return {**state, "params": {**state["params"], "tables": {**tables, **some}}}

    step, other = (autopar.parallelize(f, strategy=HOSTS) for f in (step_of(tx), two))
    plain, plain_two = jax.jit(step_of(tx)), jax.jit(two)
    mine, theirs, ids = start(tx), start(tx), np.array([1, 3, 6])
    for k in range(12):
        (mine, _), (theirs, _) = step(mine, batch(k)), plain(theirs, batch(k))
        if k % 4 == 1:
            mine, theirs = other(mine, ids), plain_two(theirs, ids)
        if k == 6:
            autopar.save(tmp_path / "state", mine)
            mine = autopar.restore(tmp_path / "state", like=mine).state
    assert stacks(step) == [5]
    assert_same(mine, theirs, rtol=1e-3, atol=1e-4)


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
stacked(shards, RowLayout({count * rows}, 1, False))
assert all((shard.rows == k).all() for k, shard in enumerate(shards))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 3 * rows * 64 * 4, done.stdout
