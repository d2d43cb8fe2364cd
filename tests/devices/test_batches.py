"""Batches whose examples lie along other axes than the first, and state that is carried along with each example."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.measure.compiled_collectives import read_collectives
from tests.support.explained import explained
from tests.support.meshes import mesh_of
from tests.support.pairs import diagonal, long
from tests.support.row_steps import same

ROWS, WIDTH, LENGTH, BATCH = 41, 3, 5, 8
TX = optax.chain(optax.clip_by_global_norm(0.1), optax.adagrad(0.1))


def make_state() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shapes = {"emb": (ROWS, WIDTH), "inner": (ROWS, WIDTH), "w": (WIDTH, WIDTH), "u": (WIDTH, WIDTH)}
    params = {k: jnp.asarray(rng.normal(size=shape), jnp.float32) for k, shape in shapes.items()}
    return {"params": params, "opt": TX.init(params)}


def time_major(seed: int = 0) -> dict[str, Any]:
    """ids [T, B]; weights [B]; noise of all examples [K, 2]."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, ROWS, (LENGTH, BATCH), np.int32)
    negatives = rng.integers(0, ROWS, (4, 2), np.int32)
    return {"ids": ids, "weights": rng.random(BATCH, np.float32), "negatives": negatives}


def recurrent(state: Any, batch: Any) -> Any:
    """One table is looked up before the loop over time, another one inside of it."""

    def loss_fn(p: Any) -> jax.Array:
        def cell(h: jax.Array, xs: Any) -> Any:
            x, ids = xs
            h = jnp.tanh(x @ p["w"] + h @ p["u"] + p["inner"][ids])
            return h, jnp.sum(h**2, -1)

        start = jnp.zeros((batch["ids"].shape[1], WIDTH))
        _, losses = jax.lax.scan(cell, start, (p["emb"][batch["ids"]], batch["ids"]))
        return jnp.mean(losses * batch["weights"]) + 0.1 * jnp.mean(p["emb"][batch["negatives"]] ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    updates, opt = TX.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss, "g": grads["emb"]}


def batch_placements(planned: Any) -> dict[str, int | None]:
    """Path of an input that is no state -> the axis along which it is spread."""
    entry = planned.latest
    pairs = zip(entry.compiled.analysed.inputs, entry.compiled.bound.placements, strict=True)
    return {given.path: axis for given, axis in pairs if given.role == "batch"}


AXES = {"mapping": {"batch/ids": -1, "**/negatives": None}, "int": 1}


@pytest.mark.parametrize(("method", "axis"), diagonal(["ps", "allgather", "allreduce_rows"], AXES))
def test_time_major_batches(method: str, axis: Any) -> None:
    planned = autopar.parallelize(recurrent, strategy=method, mesh=mesh_of(4), batch_axis=axis)
    plain = jax.jit(recurrent)
    mine, theirs = make_state(), make_state()
    for k in range(3):
        (mine, a), (theirs, b) = planned(mine, time_major(k)), plain(theirs, time_major(k))
        same((mine, a), (theirs, b))
    assert len(planned.plan.tables) == 2
    named = isinstance(axis, dict)
    expected = {"batch/ids": 1, "batch/negatives": None, "batch/weights": 0 if named else None}
    assert batch_placements(planned) == expected
    # What is compiled takes the ids in shards of the examples, and each device looks its own ones up.
    text = planned.lower(make_state(), time_major()).compile().as_text()
    assert f"s32[{LENGTH},{BATCH // 4}]{{1,0}} parameter" in text
    requested = {LENGTH * BATCH // 4 + 8, LENGTH * BATCH // 4}
    if method == "ps":
        assert {table.sizes.requested for table in planned.plan.tables} == requested


#: The width of a table, the axis that is named, and the one that is found.
NEGATIVES = {
    "looked up": (WIDTH, 0, None),
    "named": (WIDTH, {"batch/negatives": 0}, 0),
    "multiplied": (2 * WIDTH, 0, 0),
}
SOME = {("ps", "looked up"), ("ps", "multiplied"), ("allreduce_rows", "named")}


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        case if case in SOME else long(*case)
        for case in itertools.product(("ps", "allgather", "allreduce_rows"), NEGATIVES)
    ],
)
def test_negatives_that_all_examples_share(method: str, kind: str) -> None:
    """Each device has them all; but if a product takes them alone, each takes its part of it."""
    width, axis, expected = NEGATIVES[kind]

    def sampled(state: Any, batch: Any) -> Any:
        def loss_fn(p: Any) -> jax.Array:
            hidden = jnp.tanh(p["emb"][batch["ids"]].mean(1) @ p["w"])
            wrong = p["inner"][batch["negatives"]]
            if width > WIDTH:
                wrong = wrong @ jnp.concatenate([p["u"], p["w"]], 1) @ jnp.concatenate([p["u"], p["w"]], 0)
            scores = jnp.einsum("bd,nd->bn", hidden, wrong)
            scores = jnp.where(batch["negatives"] == batch["labels"][:, None], -jnp.inf, scores)
            right = jnp.sum(hidden * p["inner"][batch["labels"]], -1)
            return jnp.mean(jax.nn.logsumexp(jnp.concatenate([right[:, None], scores], 1), -1) - right)

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt = TX.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    def batch(seed: int) -> dict[str, Any]:
        rng = np.random.default_rng(seed)
        shapes = {"ids": (BATCH, LENGTH), "labels": (BATCH,), "negatives": (12,)}
        return {name: rng.integers(0, ROWS, shape, np.int32) for name, shape in shapes.items()}

    planned = autopar.parallelize(sampled, strategy=method, mesh=mesh_of(4), batch_axis=axis)
    mine, theirs = make_state(), make_state()
    for k in range(3):
        (mine, a), (theirs, b) = planned(mine, batch(k)), jax.jit(sampled)(theirs, batch(k))
        same((mine, a), (theirs, b))
    assert batch_placements(planned) == {"batch/ids": 0, "batch/labels": 0, "batch/negatives": expected}
    sums = {c.op for c in read_collectives(planned.lower(make_state(), batch(0)).compile().as_text())}
    assert method != "ps" or ("all-gather" in sums) == (expected == 0), "nothing of the model is gathered"


def test_verify_and_explain_know_the_axis() -> None:
    planned = autopar.parallelize(recurrent, strategy="ps", mesh=mesh_of(4), batch_axis=1, donate=False)
    assert autopar.verify(planned, make_state(), time_major()).ok
    assert "1 inputs are spread over 4 devices" in explained(planned, make_state(), time_major(), verbose=True)


@pytest.mark.parametrize("devices", [1, 4])
def test_what_the_batch_does_not_have(devices: int) -> None:
    def plan(axis: Any) -> Any:
        planned = autopar.parallelize(recurrent, mesh=mesh_of(devices), batch_axis=axis)
        return planned.planned_for(make_state(), time_major())

    with pytest.raises(
        autopar.ArgumentsError, match=r"'batch/id' matches nothing.*batch/ids \[5, 8\], batch/negatives"
    ):
        plan({"batch/id": 1})
    with pytest.raises(autopar.ArgumentsError, match=r"batch/ids has no axis 2, its shape is \[5, 8\]"):
        plan({"batch/ids": 2})
    with pytest.raises(autopar.ArgumentsError, match="batch_axis=2: nothing in the batch has that axis"):
        plan(2)
    with pytest.raises(autopar.ArgumentsError, match="'params/emb' matches nothing"):
        plan({"params/emb": 1})
    plan({"batch/ids": 1, "**": 1})  # a pattern for everything else names nothing


@pytest.mark.parametrize("axis", [True, None, "batch", 1.0, {"batch/ids": "1"}, {0: 1}])
def test_a_batch_axis_of_another_kind(axis: Any) -> None:
    with pytest.raises(autopar.ArgumentsError, match="give an int, or a mapping from patterns"):
        autopar.parallelize(recurrent, batch_axis=axis)


# --- state that is carried along with the examples ---


def state_placements(planned: Any, *args: Any) -> dict[str, int]:
    """Path of a leaf of the state that is spread -> its axis; tables left out."""
    entry = planned.planned_for(*args)
    program, plan = entry.compiled.analysed, entry.compiled.bound
    tables = {k for space in program.rows.spaces if plan.family(space.family) for k in space.leaves}
    pairs = enumerate(zip(program.inputs, plan.placements, strict=True))
    return {g.path: axis for k, (g, axis) in pairs if g.role == "state" and axis is not None and k not in tables}


def planned_on(step: Callable[..., Any], devices: int = 4, **options: Any) -> Any:
    return autopar.parallelize(step, mesh=mesh_of(devices), donate=False, **options)


class Reader(nn.Module):
    """As many features as examples, everywhere."""

    size: int

    @nn.compact
    def __call__(self, carry: Any, tokens: jax.Array) -> Any:
        x = nn.LayerNorm()(nn.Embed(ROWS, self.size, name="emb")(tokens))
        carry, x = nn.RNN(nn.OptimizedLSTMCell(self.size), return_carry=True, name="lstm")(x, initial_carry=carry)
        return carry, nn.Dense(ROWS)(nn.Dense(self.size)(x))


def language_model(tx: Any, size: int = BATCH) -> tuple[Callable[..., Any], Any, Callable[[int], Any]]:
    """A step of truncated backpropagation through time, its state, its batches."""
    module = Reader(size)
    zeros = jnp.zeros((size, size)), jnp.zeros((size, size))
    params: Any = module.init(jax.random.key(0), zeros, np.zeros((size, LENGTH), np.int32))["params"]

    def step(state: Any, batch: Any) -> Any:
        carry = jax.tree.map(lambda c: c * batch["keep"][:, None], state["carry"])

        def loss_fn(p: Any) -> Any:
            new, logits = module.apply({"params": p}, carry, batch["ids"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
            return losses.mean(), new

        (loss, new), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt, "carry": new}, loss

    def batches(seed: int) -> Any:
        rng = np.random.default_rng(seed)
        ids, labels = rng.integers(0, ROWS, (2, size, LENGTH), np.int32)
        return {"ids": ids, "labels": labels, "keep": rng.integers(0, 2, size).astype(np.float32)}

    return step, {"params": params, "opt": tx.init(params), "carry": zeros}, batches


def test_a_carried_lstm_state_is_spread() -> None:
    step, state, batches = language_model(TX)
    planned, plain = planned_on(step, strategy="ps"), jax.jit(step)
    assert state_placements(planned, state, batches(0)) == {"carry/0": 0, "carry/1": 0}
    assert "carried along with the examples: carry/0, carry/1" in explained(planned, state, batches(0), verbose=True)
    mine = theirs = state
    for k in range(4):
        (mine, a), (theirs, b) = planned(mine, batches(k)), plain(theirs, batches(k))
        same((mine, a), (theirs, b))
    assert [s.data.shape for s in mine["carry"][0].addressable_shards] == [(BATCH // 4, BATCH)] * 4
    assert mine["params"]["Dense_1"]["kernel"].sharding.is_fully_replicated
    assert float(jnp.abs(mine["carry"][1]).max()) > 0.01
    assert autopar.verify(planned, state, batches(0)).ok


@pytest.mark.parametrize("sparse", ["exact", "off"])
def test_neither_adam_nor_dense_tables_change_that(sparse: str) -> None:
    step, state, batches = language_model(optax.adamw(1e-2))
    planned = planned_on(step, sparse=sparse, strategy="ps" if sparse == "exact" else "auto")
    assert state_placements(planned, state, batches(0)) == {"carry/0": 0, "carry/1": 0}
    assert planned.plan is not None and planned.plan.lifts == (sparse == "exact")


def test_a_batch_that_the_devices_do_not_divide_carries_nothing() -> None:
    step, state, batches = language_model(TX, size=6)
    planned = planned_on(step)
    assert state_placements(planned, state, batches(0)) == {}
    same(planned(state, batches(0)), jax.jit(step)(state, batches(0)))


def test_carried_layers_of_a_time_major_step() -> None:
    """[layers, B, H], never reset; the loss comes from a second loop, inside of a remat."""

    def step(state: Any, batch: Any) -> Any:
        def loss_fn(p: Any) -> Any:
            @jax.checkpoint
            def cell(carry: jax.Array, ids: jax.Array) -> Any:
                low = jnp.tanh(p["emb"][ids] @ p["w"] + carry[0] @ p["u"])
                high = jnp.tanh(low + carry[1] * 0.5)
                return jnp.stack([low, high]), high

            new, out = jax.lax.scan(cell, state["carry"], batch["ids"])
            return jnp.mean(out**2), new

        (loss, new), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        updates, opt = TX.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt, "carry": new}, loss

    planned, plain = planned_on(step, strategy="ps", batch_axis={"batch/ids": 1}), jax.jit(step)
    mine = theirs = {**make_state(), "carry": jnp.zeros((2, BATCH, WIDTH))}
    assert state_placements(planned, mine, {"ids": time_major()["ids"]}) == {"carry": 1}
    for k in range(3):
        batch = {"ids": time_major(k)["ids"]}
        (mine, a), (theirs, b) = planned(mine, batch), plain(theirs, batch)
        same((mine, a), (theirs, b))
    assert mine["carry"].sharding.shard_shape(mine["carry"].shape) == (2, BATCH // 4, WIDTH)


B, H = BATCH, 3


def shapes(**leaves: tuple[int, ...]) -> Any:
    return {k: jax.ShapeDtypeStruct(shape, jnp.float32) for k, shape in leaves.items()}


MODELS: dict[str, tuple[Any, Callable[[Any, jax.Array], jax.Array]]] = {
    "kernel": (shapes(w=(B, H)), lambda p, x: x @ p["w"]),
    "kernel to B": (shapes(v=(B, H), w=(H, B)), lambda p, x: jnp.tanh(x @ p["v"]) @ p["w"]),
    "square kernel": (shapes(w=(B, B)), lambda p, x: x @ p["w"]),
    "bias": (shapes(w=(B, B), b=(B,)), lambda p, x: x @ p["w"] + p["b"]),
    "scale": (shapes(s=(B,)), lambda p, x: (x - x.mean(-1, keepdims=True)) * p["s"]),
    "weight norm": (shapes(w=(B, B)), lambda p, x: x @ (p["w"] / jnp.linalg.norm(p["w"], axis=0))),
    "positions": (shapes(e=(B, H)), lambda p, x: x[:, :, None] * p["e"]),
    "a dense table": (shapes(e=(B, H)), lambda p, x: p["e"][(x * 7).astype(jnp.int32)]),
    "a convolution": (
        shapes(k=(3, 1, B)),
        lambda p, x: jax.lax.conv_general_dilated(
            x[:, :, None], p["k"], (1,), "SAME", None, None, ("NWC", "WIO", "NWC")
        ),
    ),
    "heads": (shapes(w=(B, 2, B)), lambda p, x: jnp.einsum("bi,iho->bho", x, p["w"])),
    "in a loop": (
        shapes(w=(B, B), b=(B,)),
        lambda p, x: jax.lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ p["w"] + p["b"]), x),
    ),
    "experts": (shapes(w=(B, B, H), g=(B, B)), lambda p, x: jnp.einsum("bi,eih,be->bh", x, p["w"], x @ p["g"])),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tx", [optax.adagrad(0.1), optax.adam(0.1)], ids=["adagrad", "adam"])
def test_weights_of_the_batch_size_stay_where_they_are(tx: Any, model: str) -> None:
    weights, apply = MODELS[model]

    def step(state: Any, batch: Any) -> Any:
        grads = jax.grad(lambda p: jnp.mean(apply(p, batch["x"]) ** 2))(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, grads

    state = {"params": weights, "opt": jax.eval_shape(tx.init, weights)}
    planned = planned_on(step, sparse="off")
    assert state_placements(planned, state, shapes(x=(B, B))) == {}
    assert batch_placements(planned) == {"batch/x": 0}


def carried(use: Callable[..., Any], **leaves: tuple[int, ...]) -> dict[str, int]:
    """What is spread of a step whose state has a `c`; `use(state, x, c)` gives its new value, or just reads it."""

    def step(state: Any, batch: Any) -> Any:
        found = use(state, batch["x"], state["c"])
        new, read = found if isinstance(found, tuple) else (found, 0.0)
        return {**state, "c": new, "n": state["n"] + 1}, read

    state = {"n": jax.ShapeDtypeStruct((), jnp.int32), **shapes(**{"c": (B, H), **leaves})}
    return state_placements(planned_on(step, state_argnums=0), state, shapes(x=(B, H)))


def twice(c: jax.Array, x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda c, _: (jnp.tanh(c + x), None), c, length=2)[0]


def dropped(c: jax.Array, n: jax.Array) -> jax.Array:
    return jnp.where(jax.random.bernoulli(jax.random.key(n), 0.5, c.shape), c, 0)


CARRIED: dict[str, Callable[[Any, jax.Array, jax.Array], Any]] = {
    "added to": lambda s, x, c: 0.9 * c + x,
    "a bias": lambda s, x, c: c + s["b"] + x,
    "a kernel": lambda s, x, c: jnp.tanh(c @ s["w"] + s["b"] + x),
    "a loop": lambda s, x, c: twice(c, x),
    "dropout": lambda s, x, c: dropped(c, s["n"]) + x,
    "reset by a branch": lambda s, x, c: jax.lax.cond(s["n"] > 3, jnp.zeros_like, lambda c: c, c) + x,
    "reset by a counter": lambda s, x, c: jnp.where(s["n"] > 3, jnp.tile(s["b"], (B, 1)), c) + x,
    "columns": lambda s, x, c: jnp.concatenate([c[:, :1], jnp.ones((B, 1)), c[:, 2:]], 1) + x,
    "attention": lambda s, x, c: jax.nn.softmax(jnp.einsum("bi,bj->bij", x, c)) @ jnp.ones(H) + x,
    "other examples'": lambda s, x, c: (c + x, x @ c.T),
    "printed": lambda s, x, c: (c + x, jax.debug.print("{}", c) or 0.0),
    "its norm": lambda s, x, c: (c / jnp.linalg.norm(c) + x, jnp.sum(c**2)),
    "a while": lambda s, x, c: (x, jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: c + 1, c)),
    "only written": lambda s, x, c: x * 2,
}
REFUSED: dict[str, Callable[[Any, jax.Array, jax.Array], Any]] = {
    "handed back": lambda s, x, c: c,
    "by itself": lambda s, x, c: c * 0.9,
    "of weights": lambda s, x, c: c + s["v"] @ s["w"],
    "a sum over the batch": lambda s, x, c: c + (jnp.ones((B, 1)) @ x.sum(0, keepdims=True)),
    # Their new value is the batch's, but something else is done with the old one.
    "plus weights": lambda s, x, c: (x, c + s["v"] @ s["w"]),
    "turned": lambda s, x, c: (x, (x @ s["w"] @ s["v"].T) * (c @ s["w"] @ s["v"].T).T),
    "contracted": lambda s, x, c: (x, s["v"].T @ c),
    "looked up": lambda s, x, c: (x, c[jnp.argmax(x, -1)]),
    "written by ids": lambda s, x, c: (x, c.at[jnp.argmax(x, -1)].set(1.0)),
    "half": lambda s, x, c: (x, c[: B // 2]),
    "sorted": lambda s, x, c: (x, jnp.sort(c, 0)),
    "summed up": lambda s, x, c: (x, jnp.cumsum(c, 0)),
    "followed by more": lambda s, x, c: (x, jnp.concatenate([c, x])),
    "a while that turns": lambda s, x, c: (x, jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: c[::-1] + 1, c)),
    "no rule": lambda s, x, c: (x, jnp.linalg.qr(c)[0]),
    "a loop over examples": lambda s, x, c: (x, jax.lax.scan(lambda a, c: (a + c, a), jnp.zeros(H), c)[1]),
    "a loop that turns": lambda s, x, c: (x, jax.lax.scan(lambda a, _: (a[::-1], None), c, length=2)[0]),
    "a branch that does not": lambda s, x, c: (x, jax.lax.cond(s["n"] > 3, lambda c: s["v"], lambda c: c, c)),
}


@pytest.mark.parametrize("name", CARRIED)
def test_what_is_carried(name: str) -> None:
    assert carried(CARRIED[name], w=(H, H), b=(H,)) == {"c": 0}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_carried(name: str) -> None:
    assert carried(REFUSED[name], w=(H, H), v=(B, H)) == {}


def test_the_second_axis_is_tried_after_the_first() -> None:
    assert carried(lambda s, x, c: 0.9 * c + (x @ s["v"].T).T, c=(B, B), v=(B, H)) == {"c": 1}


def test_what_meets_a_wrong_guess_is_not_blamed_for_it() -> None:
    """`v` is the batch's along its second axis, where `c` meets it; its first one is guessed before."""

    def step(state: Any, x: jax.Array) -> Any:
        v = 0.9 * state["v"] + x.T
        return {"c": state["c"] * state["v"].T + x, "v": v}, jnp.sum(v)

    assert state_placements(planned_on(step, state_argnums=0), shapes(c=(B, B), v=(B, B)), shapes(x=(B, B))["x"]) == {
        "c": 0,
        "v": 1,
    }


def test_steps_in_a_loop() -> None:
    """The whole state is a loop's carry: weights and what is carried along are told apart inside of it."""

    def step(state: Any, batch: Any) -> Any:
        def one(state: Any, x: jax.Array) -> Any:
            def loss_fn(w: jax.Array) -> Any:
                c = jnp.tanh(state["c"] @ w + x)
                return jnp.sum(c**2), c

            g, c = jax.grad(loss_fn, has_aux=True)(state["w"])
            return {"w": state["w"] - 0.1 * g, "c": c}, jnp.sum(c)

        return jax.lax.scan(one, state, batch["x"])

    planned = planned_on(step, batch_axis=1)
    rng = np.random.default_rng(0)
    state = {"w": jnp.eye(B), "c": jnp.asarray(rng.normal(size=(B, B)), jnp.float32)}
    batch = {"x": rng.normal(size=(3, B, B)).astype(np.float32)}
    assert state_placements(planned, state, batch) == {"c": 0}
    same(planned(state, batch), jax.jit(step)(state, batch))
