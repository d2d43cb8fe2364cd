"""Dense parameters by `ps`: in shards, gathered for use; and what strategies may name."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.jax_types import Pytree
from autopar.measure.compiled_collectives import read_collectives
from tests.support.dense_steps import HIDDEN, ROWS, WIDTH, make_state, step
from tests.support.explained import explained
from tests.support.meshes import mesh_of
from tests.support.rounding import momentum_rounded_at_random
from tests.support.row_steps import same

IDS = jax.random.randint(jax.random.key(1), (8, 5), 0, ROWS)


def shards(leaf: jax.Array) -> set[tuple[int, ...]]:
    return {s.data.shape for s in leaf.addressable_shards}


@pytest.mark.parametrize("devices", [3, 4])
def test_a_step_on_shares(devices: int) -> None:
    planned = autopar.parallelize(step, strategy={"params/w*": "ps", "**/v": "ps"}, mesh=mesh_of(devices))
    plain = jax.jit(step)
    mine, theirs = make_state(), make_state()
    for _ in range(3):
        (mine, a), (theirs, b) = planned(mine, IDS), plain(theirs, IDS)
        same((mine, a), (theirs, b))
    assert planned.plan is not None
    w = (WIDTH // 4, HIDDEN) if devices == 4 else (WIDTH, HIDDEN)  # 3 divides none of its axes
    v = (HIDDEN // 4, 3) if devices == 4 else (HIDDEN, 1)
    adam = mine["opt"][1][0]
    for tree in (mine["params"], adam.mu, adam.nu):
        assert (shards(tree["w"]), shards(tree["v"])) == ({w}, {v})


def test_shares_are_gathered_for_use_only() -> None:
    planned = autopar.parallelize(step, strategy={"**": "ps"}, mesh=mesh_of(4), donate=False)
    compiled = planned.lower(make_state(), IDS).compile()
    gathered = {a for c in read_collectives(compiled.as_text()) if c.op == "all-gather" for a in c.arrays}
    # The result's w is gathered as well; neither the slots nor the table are.
    wanted = {("f32", (WIDTH, HIDDEN)), ("f32", (HIDDEN, 3)), ("bf16", (WIDTH, HIDDEN))}
    assert {a for a in gathered if a[1] in {(WIDTH, HIDDEN), (HIDDEN, 3), (ROWS, WIDTH)}} <= wanted
    assert ("f32", (HIDDEN, 3)) in gathered
    whole = sum(x.nbytes for x in jax.tree.leaves(make_state()))
    assert compiled.memory_analysis().argument_size_in_bytes < 0.27 * whole


@pytest.mark.parametrize("is_clipped", [False, True])
def test_gradients_are_reduced_to_their_owners(is_clipped: bool) -> None:
    """The squares that Adam and a norm take of them are computed of shards; what a product reads is gathered."""
    clip = [optax.clip_by_global_norm(1e-2)] * is_clipped
    optimizer = optax.chain(*clip, optax.adam(1e-2))

    def train(state: Pytree, x: jax.Array) -> Pytree:
        def loss_of(w: Pytree) -> jax.Array:
            return jnp.mean(jnp.tanh(jnp.tanh(x @ w["a"]) @ w["b"]) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(state[0])
        updates, slots = optimizer.update(grads, state[1], state[0])
        told = {"loss": loss, "similar": jnp.vdot(grads["b"] @ grads["b"], grads["b"])}
        return (optax.apply_updates(state[0], updates), slots), told

    def make() -> Pytree:
        w = {name: jax.random.normal(jax.random.key(k), (64, 64)) for k, name in enumerate("ab")}
        return w, optimizer.init(w)

    x = jax.random.normal(jax.random.key(2), (16, 64))
    planned, plain = autopar.parallelize(train, strategy={"**": "ps"}, mesh=mesh_of(4)), jax.jit(train)
    sent = {row.collective: (row.compiled, row.planned) for row in autopar.check(planned, make(), x).rows}
    mine, theirs = make(), make()
    for _ in range(3):
        (mine, a), (theirs, b) = planned(mine, x), plain(theirs, x)
        same((mine, a), (theirs, b))
    size = 64 * 64 * 4
    # Three quarters of one leaf; of the other one, which a product reads as well, all is reduced.
    assert sent["reduce-scatter"] == (3 * size // 4,) * 2
    assert sent["all-reduce"][0] < 2 * 3 * size // 4 + 100


def test_short_floats_are_gathered_as_they_are() -> None:
    """XLA on CPUs would send them as float32."""

    def train(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)

    w, x = (jax.random.normal(jax.random.key(k), (64, 64), jnp.bfloat16) for k in range(2))
    planned = autopar.parallelize(train, strategy={"*": "ps"}, mesh=mesh_of(4), donate=False)
    check = autopar.check(planned, w, x)
    (sent,) = (row.compiled for row in check.rows if row.collective == "all-gather")
    assert check.ok and sent == 64 * 64 * 2 * 3 // 4
    np.testing.assert_allclose(np.float32(planned(w, x)), np.float32(jax.jit(train)(w, x)), rtol=1e-2)


def test_a_table_that_can_not_be_lifted_is_stored_in_shares() -> None:
    planned = autopar.parallelize(step, strategy={"params/emb": "ps"}, mesh=mesh_of(4))
    same(planned(make_state(), IDS), jax.jit(step)(make_state(), IDS))
    assert planned.plan is not None
    (told,) = planned.plan.parameters
    assert (told.path, told.lifted, told.method) == ("params/emb", False, "ps")
    assert "a shard of axis 0 on each device, 2 slots with it; looked up at its owners" in told.reason
    assert "all rows, because" in told.reason
    assert "dense, in shards" in explained(planned)


def test_one_method_for_all_leaves_dense_parameters_alone() -> None:
    planned = autopar.parallelize(step, strategy="ps", mesh=mesh_of(4))
    planned.planned_for(make_state(), IDS)
    assert planned.plan is not None and not planned.latest.compiled.bound.shards


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ({"params/x": "ps"}, r"'params/x' matches no parameter. Looked up by rows: params/emb; others: opt/"),
        (
            {"params/w": "allgather"},
            r"'params/w' matches no parameter that.*'allreduce', 'ps' and 'tensor'",
        ),
        ({"params/odd": "ps"}, r"params/odd can't be spread over 4 devices: they divide none of its axes \(f32\[3\]\)"),
        ({"params/emb": "allgather"}, r"params/emb can't be trained with 'allgather'"),
        ({"params/w": "pss"}, r"there is no method 'pss'; the methods are auto, allreduce, ps"),
    ],
)
def test_strategies_that_can_not_be(strategy: dict[str, str], message: str) -> None:
    with pytest.raises(autopar.StrategyError, match=message):
        autopar.parallelize(step, strategy=strategy, mesh=mesh_of(4)).planned_for(make_state(), IDS)


def test_shares_of_one_device_are_the_whole() -> None:
    planned = autopar.parallelize(step, strategy={"**": "ps"}, mesh=mesh_of(1))
    same(planned(make_state(), IDS), jax.jit(step)(make_state(), IDS))


def test_momentum_that_is_rounded_at_random_draws_as_on_one_device() -> None:
    """Rows that a batch doesn't touch as well: all of them are dense."""
    optimizer = momentum_rounded_at_random(0.3)

    def train(state: Pytree, ids: jax.Array) -> Pytree:
        loss, grads = jax.value_and_grad(lambda p: jnp.mean(jnp.tanh(p["emb"][ids].sum(1)) ** 2))(state["params"])
        updates, slots = optimizer.update(grads, state["slots"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "slots": slots}, loss

    params = {"emb": jax.random.normal(jax.random.key(2), (ROWS, WIDTH))}
    mine = theirs = {"params": params, "slots": optimizer.init(params)}
    planned = autopar.parallelize(train, mesh=mesh_of(4), donate=False)
    for k in range(6):
        ids = (IDS + 7 * k) % (ROWS // 2)
        (mine, _), (theirs, _) = planned(mine, ids), jax.jit(train)(theirs, ids)
    assert planned.plan is not None and not planned.plan.lifts
    (a, _), (b, _) = mine["slots"], theirs["slots"]
    ours, plain = (np.asarray(x["emb"], np.float32) for x in (a, b))
    moving = plain != 0
    assert moving.sum() > 100 and np.mean(ours[moving] != plain[moving]) < 0.02, "another draw differs in a half"
    np.testing.assert_allclose(mine["params"]["emb"], theirs["params"]["emb"], rtol=1e-3, atol=1e-5)
