"""A step that is cut into a worker's program and those of three servers: with one worker it is the step."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar import jax_compat
from autopar.backends.served import ServedPrograms, one_worker
from autopar.ir.served import CUTTING, Cutting, ServedStep
from autopar.ways import servers
from tests.support.pairs import every
from tests.support.served import compiled

ROWS, WIDTH, EXAMPLES, SERVERS, STEPS = 500, 4, 6, 3, 4
TRAINED = ("table", "hidden", "bias")
OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "schedule": optax.sgd(optax.linear_schedule(0.1, 0.0, 10), momentum=0.9),
    "adagrad": optax.adagrad(0.1),
    "adamw": optax.adamw(1e-2),
    "clip": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
    "every second": optax.MultiSteps(optax.adam(1e-2), 2),
    "if finite": optax.apply_if_finite(optax.sgd(0.1), 3),
    "lamb": optax.lamb(1e-2),
    "adafactor": optax.adafactor(1e-2),
    "noise": optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1)),
    "lion": optax.lion(1e-3),
    "adaptive clip": optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.1)),
}
#: What else a step may do: in the loss, the update, or the results.
KINDS = ("plain", "dropout", "batch norm", "decay in the loss", "warm-up", "scaled loss", "norms", "twice", "polyak")


def start(tx: optax.GradientTransformation) -> Any:
    random = np.random.default_rng(0)
    shapes = {"table": (ROWS, WIDTH), "hidden": (WIDTH, WIDTH), "frozen": (WIDTH, WIDTH), "bias": (WIDTH,)}
    params = {name: jnp.asarray(random.normal(size=shape)) for name, shape in shapes.items()}
    return {
        "params": params,
        "opt": tx.init({name: params[name] for name in TRAINED}),
        "step": jnp.zeros((), jnp.int32),
        "key": jax.random.key(3),
        "mean": jnp.zeros(WIDTH),
        "slow": {name: params[name] + 0 for name in ("hidden", "bias")},
        "scale": jnp.asarray(8.0),
    }


def batch(seed: int) -> Any:
    random = np.random.default_rng(seed)
    ids = random.integers(0, ROWS, (EXAMPLES, 3)).astype(np.int32)
    return {"ids": jnp.asarray(ids), "y": jnp.asarray(random.normal(size=(EXAMPLES, WIDTH)))}


def step_of(tx: optax.GradientTransformation, kind: str) -> Callable[..., Any]:
    def step(state: Any, batch: Any) -> Any:
        key, own = jax.random.split(state["key"])
        trained = {name: state["params"][name] for name in TRAINED}

        def loss_of(params: Any) -> Any:
            h = params["table"][batch["ids"]].sum(1) @ state["params"]["frozen"]
            if kind == "dropout":
                h = jnp.where(jax.random.bernoulli(own, 0.5, h.shape), h, 0)
            mean = h.mean(0)
            if kind == "batch norm":
                h = (h - mean) / jnp.sqrt(h.var(0) + 1e-3)
            weight = state["slow"]["hidden"] if kind == "polyak" else 0
            y = jnp.tanh(h @ (params["hidden"] + weight) + params["bias"])
            loss = jnp.mean((y - batch["y"]) ** 2)
            if kind == "contrastive":
                loss = loss + optax.softmax_cross_entropy_with_integer_labels(y @ y.T, jnp.arange(EXAMPLES)).mean()
            if kind == "in order":
                loss = loss + jnp.sum(jnp.sort(y.sum(1)) * jnp.arange(EXAMPLES))
            if kind == "decay in the loss":
                loss = loss + 0.01 * sum(jnp.sum(x**2) for x in jax.tree.leaves(params))
            if kind == "warm-up":
                loss = loss * jnp.minimum(1.0, (state["step"] + 1) / 3)
            return loss * (state["scale"] if kind == "scaled loss" else 1), mean

        (loss, mean), gradients = jax.value_and_grad(loss_of, has_aux=True)(trained)
        scale = state["scale"]
        if kind == "scaled loss":
            gradients = jax.tree.map(lambda g: g / scale, gradients)
            finite = jnp.all(jnp.asarray([jnp.isfinite(g).all() for g in jax.tree.leaves(gradients)]))
            scale = jnp.where(finite, 2 * scale, scale / 2)
        updates, opt = tx.update(gradients, state["opt"], trained)
        new = optax.apply_updates(trained, updates)
        if kind == "twice":
            new = {**new, "table": new["table"].at[batch["ids"][:, 0]].multiply(0.5)}
        results = {"loss": loss}
        if kind == "first rows":
            results["rows"] = new["table"][:3] + 1
        if kind == "norms":
            rate = 1 / (state["step"] + 1.0)
            results |= {"gradient": optax.tree.norm(gradients), "rate": rate, "w": jnp.abs(trained["hidden"]).max()}
        slow = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, state["slow"], {n: new[n] for n in ("hidden", "bias")})
        more = {"step": state["step"] + 1, "key": key, "mean": 0.9 * state["mean"] + 0.1 * mean}
        return {"params": {**state["params"], **new}, "opt": opt, "slow": slow, "scale": scale, **more}, results

    return step


def _values(tree: Any) -> list[np.ndarray]:
    keys = (jax.random.key_data(x) if jax_compat.is_key(x.dtype) else x for x in jax.tree.leaves(tree))
    return [np.asarray(x, np.float64) for x in keys]


CASES = [(name, "plain") for name in OPTIMIZERS] + [("sgd", kind) for kind in KINDS[1:]]
CASES += [("sgd", "first rows")]
#: Losses in which examples meet others.
CASES += [(name, kind) for name in ("sgd", "adagrad", "clip", "lamb") for kind in ("contrastive", "in order")]
CASES += [("clip", kind) for kind in ("decay in the loss", "norms", "scaled loss", "batch norm")]
#: Those whose leaves are kept whole: all are tied, or rows are updated twice.
WHOLE = {(name, "plain") for name in ("every second", "if finite", "lamb", "adafactor")}
WHOLE |= {("lamb", "contrastive"), ("lamb", "in order"), ("sgd", "scaled loss"), ("clip", "scaled loss")}
WHOLE |= {("clip", "decay in the loss"), ("sgd", "twice")}
#: Those that look up rows, of which each server keeps some columns.
BY_COLUMNS = {("sgd", kind) for kind in ("plain", "dropout", "batch norm", "warm-up", "norms", "polyak")}
BY_COLUMNS |= {("adagrad", "plain"), ("adaptive clip", "plain"), ("sgd", "first rows")}
BY_COLUMNS |= {(name, kind) for name in ("sgd", "adagrad") for kind in ("contrastive", "in order")}


@pytest.mark.parametrize(
    ("case", "cut"), [*((case, True) for case in CASES), *every(3, [(case, False) for case in CASES])], ids=str
)
def test_one_worker_does_the_step(case: tuple[str, str], cut: bool) -> None:
    name, kind = case
    cutting = Cutting(0, 0) if cut else CUTTING  # what can be cut is
    with jax_compat.enable_x64():
        step = step_of(OPTIMIZERS[name], kind)
        theirs = start(OPTIMIZERS[name])
        known = compiled(step, 2 if cut else SERVERS, theirs, batch(0), cutting=cutting)
        pieces = known.program.served.pieces
        assert bool(pieces) == (cut and (name, kind) not in WHOLE)
        by_rows = known.plan.served.by_rows
        columns = [piece for piece in pieces.values() if known.program.inputs[piece.leaf].path in by_rows]
        assert [piece.axis for piece in columns] == ([1, 1] if cut and (name, kind) in BY_COLUMNS else [])
        mine, tree = jax.tree.leaves(theirs), jax.tree.structure(jax.eval_shape(step, theirs, batch(0)))
        run = one_worker(ServedPrograms(known.program, known.analysed), known.analysed)
        plain = jax.jit(step)
        for k in range(STEPS):
            outputs = run(*mine, *jax.tree.leaves(batch(k)))
            theirs, results = plain(theirs, batch(k))
            made, own = jax.tree.unflatten(tree, outputs)
            for a, b in zip(_values((made, own)), _values((theirs, results)), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)
            mine = jax.tree.leaves(made)


def _swapped(step: ServedStep) -> ServedStep:
    """With two new slots of a weight in each other's place."""
    parts = list(step.servers)
    for n, part in enumerate(parts):
        outputs = list(part.update.outputs)
        for a in range(len(outputs)):
            for b in range(a):
                if outputs[a].type == outputs[b].type and len(outputs[a].type.shape) == 2:
                    outputs[a], outputs[b] = outputs[b], outputs[a]
                    parts[n] = dataclasses.replace(
                        part, update=dataclasses.replace(part.update, outputs=tuple(outputs))
                    )
                    return dataclasses.replace(step, servers=tuple(parts))
    raise AssertionError("Adam has two slots of one shape")


def test_a_wrong_cut_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    cut = servers.split_servers
    monkeypatch.setattr(servers, "split_servers", lambda *given: _swapped(cut(*given)))
    step = autopar.parallelize(step_of(OPTIMIZERS["clip"], "plain"), sync=autopar.sync.Async())
    with pytest.raises(autopar.VerificationError, match="opt"):
        autopar.verify(step, start(OPTIMIZERS["clip"]), batch(0), steps=2)


def test_steps_that_cannot_be_cut() -> None:
    def nothing(state: Any, x: Any) -> Any:
        return state + 1, jnp.tanh(x).mean()

    with pytest.raises(autopar.StrategyError, match="nothing (to train|in it works on single examples)"):
        autopar.parallelize(nothing, sync=autopar.sync.Async(), state_argnums=0).planned_for(
            jnp.zeros(3), jnp.ones((4, 3))
        )

    def shown(state: Any, x: Any) -> Any:
        w, m = state
        m = 0.9 * m + jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return (w - 0.1 * m, m), jnp.linalg.norm(w - 0.1 * m)

    with pytest.raises(autopar.StrategyError, match=r"autopar.average\(state\)"):
        autopar.parallelize(shown, sync=autopar.sync.Async()).planned_for(
            (jnp.zeros(3), jnp.zeros(3)), jnp.ones((4, 3))
        )

    def meeting(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            h = x @ w
            return jax.nn.logsumexp(h @ h.T, axis=1).mean()

        return w - 0.1 * jax.grad(loss)(w), x.sum()

    with pytest.raises(autopar.StrategyError, match="sync: meeting can't be cut.* leave sync= out"):
        autopar.parallelize(meeting, sync=autopar.sync.Async()).planned_for(jnp.ones((3, 2)), jnp.ones((4, 3)))


def test_random_keys_that_servers_keep_and_weak_types() -> None:
    """A step that is left out, key and all, where its loss isn't finite; a count and a rate of Python's."""

    def step(state: Any, x: Any) -> Any:
        key, own = jax.random.split(state["key"])

        def loss_of(w: Any) -> Any:
            h = x @ w
            return (h * jax.random.bernoulli(own, 0.5, h.shape)).mean()

        loss, gradient = jax.value_and_grad(loss_of)(state["w"])
        new = {"w": state["w"] - state["rate"] * gradient, "key": key, "n": state["n"] + 1, "rate": 0.9 * state["rate"]}
        return jax.tree.map(lambda a, b: jnp.where(jnp.isfinite(loss), a, b), new, state), loss

    mine = theirs = {"w": jnp.ones((4, 2)), "key": jax.random.key(0), "n": 0, "rate": 0.1}
    planned, plain = autopar.parallelize(step, sync=autopar.sync.Async()), jax.jit(step)
    for k in range(3):
        x = jnp.ones((8, 4)) * (jnp.nan if k == 1 else 1)
        mine, _ = planned(mine, x)
        theirs, _ = plain(theirs, x)
    made = autopar.average(mine)
    for a, b in zip(_values(made), _values(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert [x.aval.weak_type for x in (made["n"], made["rate"])] == [
        x.aval.weak_type for x in (theirs["n"], theirs["rate"])
    ]
    assert len({entry.call.key for entry in planned._planned.values()}) == 1
    np.testing.assert_array_equal(*(jax.random.key_data(x) for x in (mine["key"].current(), theirs["key"])))


def test_states_of_other_steps() -> None:
    def step(w: Any, x: Any) -> Any:
        return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), x.sum()

    x = jnp.ones((4, 3))
    served, _ = autopar.parallelize(step, sync=autopar.sync.Async())(jnp.ones(3), x)
    replica, _ = autopar.parallelize(step, sync=autopar.sync.Average())(jnp.ones(3), x)
    for state, sync in ((served, autopar.sync.Average()), (served, None), (replica, autopar.sync.Async())):
        with pytest.raises(autopar.StepError, match=r"autopar.average\(state\)"):
            autopar.parallelize(step, sync=sync)(state, x)

    def slower(w: Any, x: Any) -> Any:
        return w - 0.01 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), x.sum()

    with pytest.raises(autopar.StepError, match="begin once more"):
        autopar.parallelize(slower, sync=autopar.sync.Async())(served, x)


@pytest.mark.parametrize("way", [autopar.sync.Async, autopar.sync.Average, autopar.sync.Hybrid])
def test_one_process_alone_is_told_that_it_exchanges_nothing(way: Any) -> None:
    def step(w: Any, x: Any) -> Any:
        return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), x.sum()

    x = jnp.ones((4, 3))
    planned = autopar.parallelize(step, sync=way())
    with pytest.warns(autopar.LoneClientWarning, match=rf"{way.__name__}\(...\) has nobody.*launch -n") as told:
        w, _ = planned(jnp.ones(3), x)
        planned(w, x)
    assert len(told) == 1  # where the training begins
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        autopar.parallelize(step, sync=way(clients=1))(jnp.ones(3), x)  # as it was asked for


def test_a_leaf_that_was_replaced() -> None:
    def step(state: Any, x: Any) -> Any:
        gradient = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(state["w"])
        return {
            "w": state["w"] - state["rate"] * gradient,
            "rate": 0.9 * state["rate"],
            "m": state["m"] + gradient,
        }, None

    planned, x = autopar.parallelize(step, sync=autopar.sync.Async()), jnp.ones((4, 3))
    state, _ = planned({"w": jnp.ones(3), "rate": jnp.asarray(0.1), "m": jnp.zeros(3)}, x)
    for wrong in ({**state, "rate": jnp.asarray(0.01)}, {**state, "w": state["m"], "m": state["w"]}):
        with pytest.raises(autopar.StateError, match="servers keep the state, but"):
            planned(wrong, x)
    planned({**autopar.average(state), "rate": jnp.asarray(0.01)}, x)
