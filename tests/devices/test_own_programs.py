"""Each device's own program, against the oracle."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.measure.compiled_collectives import read_collectives
from autopar.planning.verify import compare_runs
from tests.support.explained import explained
from tests.support.meshes import mesh_of
from tests.support.own_examples import EACH, given, step_of
from tests.support.pairs import diagonal, every, pairwise
from tests.zoo import MODELS, OPTIMIZERS, WITH_TABLES, WITHOUT_TABLES

AXES = {
    "devices": ("2", "4", "3"),
    "method": ("ps", "allgather", "allreduce_rows", "allreduce", "shards"),
    "model": WITH_TABLES,
    "optimizer": ("clipped", "scheduled"),
}
ROWS = pairwise(AXES)[::2] + pairwise({**AXES, "method": ("shards",), "model": WITHOUT_TABLES})[::4]


@pytest.mark.parametrize("row", every(5, ROWS), ids=lambda r: "-".join(r.values()))
def test_contract(row: dict[str, str]) -> None:
    case = MODELS[row["model"]].make(OPTIMIZERS[row["optimizer"]].make())
    strategy = {"**": "ps"} if row["method"] == "shards" else row["method"]
    mesh = mesh_of(int(row["devices"]))
    step = autopar.parallelize(case.step, strategy=strategy, mesh=mesh, donate=False)
    entry = step.planned_for(case.state, case.batches(0))
    assert entry.compiled.program.local is not None
    found = compare_runs(entry, [jax.tree.leaves((case.state, case.batches(i))) for i in range(4)])
    assert found.ok, str(found)


@pytest.mark.long
def test_gradients_of_a_loop_are_reduced_after_it() -> None:
    """XLA would reduce an LSTM's dense gradients in every iteration; a device's own program adds them up first."""
    case = MODELS["lstm_lm"].make(OPTIMIZERS["clipped"].make())
    step = autopar.parallelize(case.step, strategy="ps", mesh=mesh_of(2))
    found = read_collectives(step.lower(case.state, case.batches(0)).compile().as_text())
    assert found and not any(c.times > 1 for c in found if c.op == "all-reduce")


@pytest.mark.parametrize("tied", [False, True])
def test_products_are_summed_before_they_are_transposed(tied: bool) -> None:
    """On a CPU XLA then has the product in one call. What else is added to a transposed gradient is reduced with it."""

    def step(state: Any, x: jax.Array) -> Any:
        def loss(state: Any) -> jax.Array:
            h = jnp.tanh(x @ state["w"])
            return ((h @ state["w"].T if tied else h) ** 2).sum()

        return jax.tree.map(lambda w, g: w - 0.1 * g, state, jax.grad(loss)(state)), x.sum()

    state, x = {"w": jnp.linspace(-1, 1, 24 * 16).reshape(24, 16)}, jnp.linspace(0, 1, 8 * 24).reshape(8, 24)
    planned = autopar.parallelize(step, mesh=mesh_of(4), donate=False)
    block = planned.planned_for(state, x).compiled.program.block
    reduced = [e for e in block.walk() if e.op == "ap.reduce" and e.inputs[0].shape]
    made = {v: e for e in block.walk() for v in e.outputs}
    assert [made[e.inputs[0]].op for e in reduced] == (["mul"] if tied else ["dot_general"])
    assert autopar.verify(planned, state, x, steps=2).ok


@pytest.mark.parametrize("kept", [jnp.float32, jnp.bfloat16], ids=["cast in the loss", "bfloat16 parameters"])
@pytest.mark.parametrize("tied", [False, True], ids=["once", "tied"])
def test_gradients_of_16_bits_are_rounded_after_they_are_summed(kept: Any, tied: bool) -> None:
    """Those of single devices are 100 times as large as their sum."""

    def step(w: jax.Array, x: jax.Array) -> Any:
        def loss_fn(w: jax.Array) -> jax.Array:
            short, seen = w.astype(jnp.bfloat16), x.astype(jnp.bfloat16)
            made = seen @ short
            made = jnp.concatenate([made, seen[:, ::-1] @ short.T], 0) if tied else made
            return made.astype(jnp.float32).sum()

        loss, grad = jax.value_and_grad(loss_fn)(w)
        return w - grad, loss

    one = jax.random.uniform(jax.random.key(0), (16, 32), minval=50.0, maxval=100.0)
    x = jnp.concatenate([one, -one[::-1] - 1.0, one + 0.5, -one])
    w = jnp.zeros((32, 32), kept)
    planned = autopar.parallelize(step, mesh=mesh_of(4), donate=False)
    mine, theirs = (np.asarray(f(w, x)[0], np.float32) for f in (planned, jax.jit(step)))
    np.testing.assert_allclose(mine, theirs, rtol=0, atol=2**-8 * np.abs(theirs).max())
    sums = [e.inputs[0] for e in planned.planned_for(w, x).compiled.program.block.walk() if e.op == "ap.reduce"]
    assert [a.dtype for a in sums if a.shape] == [np.float32]


@pytest.mark.parametrize("examples", [15, 16])
def test_products_of_16_bits_over_masked_examples(examples: int) -> None:
    """XLA on CPUs has no product of bfloat16 with a float32 result whose left operand is a mask of a transpose."""

    def step(seen: jax.Array, x: jax.Array) -> jax.Array:
        shown = jnp.where((x[:, 0] > 0)[None], x.T, 0) @ x
        bias = jnp.sum(x * 3, axis=0)  # a sum that is no product
        for _ in range(60):  # each operand is written once, not at each use
            shown = shown + shown
            shown = shown * jnp.bfloat16(0.5)
        for _ in range(40):
            bias = bias + bias
        return seen + shown + bias

    x = jax.random.normal(jax.random.key(0), (examples, 16), jnp.bfloat16)
    seen = jnp.zeros((16, 16), jnp.bfloat16)
    planned = autopar.parallelize(step, mesh=mesh_of(4), donate=False)
    mine, theirs = (np.asarray(f(seen, x), np.float32) for f in (planned, jax.jit(step)))
    np.testing.assert_allclose(mine, theirs, rtol=2**-6, atol=2**-7 * np.abs(theirs).max())
    assert len(planned.planned_for(seen, x).compiled.program.block.equations) < 400


def test_rows_that_every_device_looks_up_in_a_loop() -> None:
    """A batch that the devices don't divide: nothing in the loop is spread but the owners' rows that it adds to."""

    def step(state: Any, ids: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            def cell(h: jax.Array, some: jax.Array) -> Any:
                h = jnp.tanh(params["t"][some] @ params["w"] + h)
                return h, h.sum()

            h, sums = jax.lax.scan(cell, jnp.zeros((7, 4)), ids.T)
            return (h**2).sum() + (sums**2).mean()

        value, grads = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value

    rng = np.random.default_rng(0)
    state = {"t": jnp.asarray(rng.normal(size=(37, 4)), jnp.float32), "w": jnp.eye(4) / 2}
    ids = rng.integers(0, 37, (7, 3)).astype(np.int32)
    planned = autopar.parallelize(step, strategy="ps", mesh=mesh_of(2), donate=False)
    (mine, _), (theirs, _) = planned(state, ids), jax.jit(step)(state, ids)
    np.testing.assert_allclose(np.asarray(mine["t"]), theirs["t"], rtol=1e-4, atol=1e-6)


def test_masks_over_the_rows_of_a_table() -> None:
    """Each owner takes its rows: of a constant, of an argument, of what is computed from it; 37 rows on 2 devices."""
    constant = np.arange(37) % 3 / np.float32(2)

    def step(table: jax.Array, batch: Any) -> Any:
        value, grad = jax.value_and_grad(lambda t: (t[batch["ids"]] ** 3).sum())(table)
        masks = constant * batch["mask"] * jnp.roll(batch["mask"], 1)
        return table - 0.1 * grad * masks[:, None], (value, (grad * constant[:, None]).sum(0))

    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.normal(size=(37, 4)), jnp.float32)
    batch = {"ids": rng.integers(0, 37, (8, 3)).astype(np.int32), "mask": rng.normal(size=37).astype(np.float32)}
    planned = autopar.parallelize(step, strategy="ps", mesh=mesh_of(2), donate=False)
    (mine, told), (theirs, wanted) = planned(table, batch), jax.jit(step)(table, batch)
    np.testing.assert_allclose(np.asarray(mine), theirs, rtol=1e-4, atol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), told, wanted)


def test_what_needs_all_rows_is_told_with_its_line() -> None:
    def step(table: jax.Array, ids: jax.Array) -> Any:
        loss, grad = jax.value_and_grad(lambda t: (t[ids] ** 3).sum())(table)
        return table - 0.1 * grad, (loss, jnp.sort(table.ravel())[:3])

    planned = autopar.parallelize(step, strategy="ps", mesh=mesh_of(2), donate=False)
    table, ids = jnp.asarray(np.random.default_rng(0).normal(size=(37, 4))), jnp.arange(8)
    (mine, told), (theirs, other) = planned(table, ids), jax.jit(step)(table, ids)
    np.testing.assert_allclose(np.asarray(mine), theirs, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), told, other)
    assert re.search(r"every device has whole: +608 B for \w+ \(.*test_own_programs\.py:\d+\)", explained(planned))


def test_ids_that_only_one_branch_takes_from_the_batch() -> None:
    """The other branch has ids of its own, so that every device asks for all."""

    def step(table: jax.Array, ids: jax.Array) -> Any:
        own = jnp.arange(24, dtype=jnp.int32).reshape(8, 3)
        some = jax.lax.cond(ids.sum() % 2 == 0, lambda i: i, lambda i: own, ids)
        value, grad = jax.value_and_grad(lambda t: (t[some] ** 3).sum())(table)
        return table - 0.1 * grad, value

    table = jnp.asarray(np.random.default_rng(0).normal(size=(37, 4)), jnp.float32)
    for method in ("ps", "allgather", "allreduce_rows"):
        planned = autopar.parallelize(step, strategy=method, mesh=mesh_of(2), donate=False)
        for start in (0, 1):
            ids = (np.arange(24, dtype=np.int32).reshape(8, 3) * 7 + start * (np.arange(24) == 0).reshape(8, 3)) % 37
            (mine, loss), (theirs, other) = planned(table, ids), jax.jit(step)(table, ids)
            np.testing.assert_allclose(np.asarray(mine), theirs, rtol=1e-4, atol=1e-6)
            np.testing.assert_allclose(loss, other, rtol=1e-5)


@pytest.mark.parametrize("method", ["ps", "allgather", "allreduce_rows"])
def test_a_table_of_fewer_rows_than_lookups(method: str) -> None:
    """Products of looked-up rows, large enough for the passes to look at them."""
    rng = np.random.default_rng(0)
    state = {"emb": rng.normal(size=(24, 64)).astype(np.float32), "w": rng.normal(size=(64, 256)).astype(np.float32)}
    ids = rng.integers(0, 24, (64, 20)).astype(np.int32)

    def step(state: Any, ids: Any) -> tuple[Any, jax.Array]:
        loss, grads = jax.value_and_grad(lambda s: (jnp.tanh(s["emb"][ids] @ s["w"]) ** 2).mean())(state)
        return jax.tree.map(lambda x, g: x - 0.1 * g, state, grads), loss

    planned = autopar.parallelize(step, strategy={"emb": method}, mesh=mesh_of(4), donate=False)
    for mine, theirs in zip(
        jax.tree.leaves(planned(state, ids)), jax.tree.leaves(jax.jit(step)(state, ids)), strict=True
    ):
        np.testing.assert_allclose(np.asarray(mine), np.asarray(theirs), rtol=2e-5, atol=1e-6)


def _clipped(loss: Any) -> Any:
    def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        value, grads = jax.value_and_grad(loss)(state, batch)
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
        return jax.tree.map(lambda x, g: x - 0.1 * g / jnp.maximum(norm, 1.0), state, grads), value

    return step


#: Of each example a row of the table `t`, which `vmap` of the branch copies for each example.
COPIES = {
    "ids": lambda t, b: jax.vmap(lambda p, i: jax.lax.cond(p, lambda t: 2 * t[i], lambda t: t[i // 2], t))(*b),
    "slices": lambda t, b: jax.vmap(lambda p: jax.lax.cond(p, lambda t: 2 * t[3], lambda t: t[0], t))(b[0]),
    "starts": lambda t, b: jax.vmap(lambda p, i: jax.lax.dynamic_index_in_dim(p * t, i, keepdims=False))(*b),
}


@pytest.mark.parametrize(("kind", "method"), diagonal(list(COPIES), ["ps", "allgather", "allreduce_rows"]))
def test_a_table_that_is_copied_for_each_example(kind: str, method: str) -> None:
    """A branch over a table under `vmap`: rows of which each device has its examples' copies."""
    rng = np.random.default_rng(0)
    state = {"t": rng.normal(size=(31, 3)).astype(np.float32), "w": rng.normal(size=(3, 2)).astype(np.float32)}
    batch = rng.integers(0, 2, 8).astype(bool), rng.integers(0, 31, 8).astype(np.int32)

    def loss(state: Any, batch: Any) -> jax.Array:
        rows = state["t"][batch[1]]
        return (jnp.tanh(COPIES[kind](state["t"], batch) @ state["w"]) + jnp.tanh(rows @ state["w"])).sum() ** 2

    planned = autopar.parallelize(_clipped(loss), strategy={"t": method}, mesh=mesh_of(4), donate=False, replan="off")
    entry = planned.planned_for(state, batch)
    assert entry.compiled.plan.lifts
    found = compare_runs(entry, [jax.tree.leaves((state, batch))])
    assert found.ok, str(found)


def test_what_is_broadcast_is_made_in_the_size_of_a_shard() -> None:
    """A bias, by NumPy's rules and with an axis of one; not for all examples on each device, to take a part of it."""

    def step(state: Any, x: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            wide = jnp.broadcast_to(p["c"][None], (8, 4))
            return (jax.nn.relu(x @ p["w"] + p["b"]) * wide).sum()

        value, grads = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value

    state = {"w": jnp.ones((3, 4)), "b": jnp.ones(4), "c": jnp.ones(4)}
    planned = autopar.parallelize(step, mesh=mesh_of(4))
    program = planned.planned_for(state, np.ones((8, 3), np.float32)).compiled.program
    assert program.local is not None and not [e for e in program.block.walk() if e.op == "ap.shard"]


def test_examples_by_themselves() -> None:
    """Nothing that works on each example by itself is brought together."""
    with jax.enable_x64(True):
        step = step_of(EACH)
        planned = autopar.parallelize(step, mesh=mesh_of(4), donate=False)
        ours, theirs = planned(*given()), jax.jit(step)(*given())
        assert planned.planned_for(*given()).compiled.program.local.examples_meet is None
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("spec", [("data", None), ("data",), (), (None, "data")])
def test_a_sharding_constraint(spec: tuple[str | None, ...]) -> None:
    """One changes nothing, whatever it asks for."""
    mesh = mesh_of(4)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))

    def step(w: jax.Array, x: jax.Array) -> Any:
        def loss_of(w: jax.Array) -> jax.Array:
            hidden, _ = jax.lax.scan(lambda h, _: (placed(jnp.tanh(h @ w)), None), placed(jnp.tanh(x)), length=2)
            return (hidden**2).mean()

        def placed(x: jax.Array) -> jax.Array:
            return jax.lax.with_sharding_constraint(x, sharding) if spec else x

        if not spec:
            w = jax.lax.with_sharding_constraint(w, sharding)
        loss, slope = jax.value_and_grad(loss_of)(w)
        return w - 0.1 * slope, loss

    w, x = jnp.full((16, 16), 0.1), np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
    planned = autopar.parallelize(step, mesh=mesh, donate=False)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), planned(w, x), jax.jit(step)(w, x))
    assert "sharding_constraint" in explained(planned, w, x)
