"""Which leaves of a state are weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.sync import Average
from tests.support.explained import explained

SGD = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


def batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"ids": rng.integers(0, 30, (6, 3)).astype(np.int32), "x": rng.normal(size=(6, 4)).astype(np.float32)}


def make_state() -> dict[str, Any]:
    params = {"emb": jnp.ones((30, 4)), "w": jnp.eye(4), "frozen": jnp.ones(4), "layers": jnp.ones((2, 4, 4)) / 4}
    mean = {"mean": jnp.zeros(4), "carried": jnp.zeros((6, 4))}
    return {"params": params, "opt": SGD.init(params), "stats": mean, "count": jnp.int32(0), "target": jnp.eye(4)}


def step(state: Any, batch: Any) -> Any:
    """Gathers, a scan over layers, batch norm's running mean, a target network, a state carried with the examples."""

    def loss_fn(params: Any) -> Any:
        x = params["emb"][batch["ids"]].mean(1) @ params["w"] + batch["x"] * params["frozen"]
        x = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["layers"])[0]
        mean = x.mean(0)
        h = x - mean + 0.1 * state["stats"]["carried"]
        return jnp.mean((h - jax.lax.stop_gradient(h @ state["target"])) ** 2), (mean, h)

    (loss, (mean, h)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
    grads["frozen"] = jnp.zeros_like(grads["frozen"])
    updates, opt = SGD.update(grads, state["opt"], state["params"])
    params = {**optax.apply_updates(state["params"], updates), "frozen": state["params"]["frozen"]}
    stats = {"mean": 0.9 * state["stats"]["mean"] + 0.1 * mean, "carried": h}
    target = 0.99 * state["target"] + 0.01 * params["w"]
    new = {"params": params, "opt": opt, "stats": stats, "count": state["count"] + 1, "target": target}
    return new, loss


def test_weights_are_what_examples_meet() -> None:
    planned = autopar.parallelize(step, sync=Average(every=2))
    plan = autopar.plan(planned, make_state(), batch())
    assert plan.sync is not None
    (weights,) = plan.sync.fragments
    assert sorted(weights) == [
        "params/emb",
        "params/layers",
        "params/w",
        "target",
    ]
    assert "stats/mean" in plan.sync.own and plan.sync.examples == 6


def found_in(fun: Any, state: Any) -> tuple[str, ...]:
    plan = autopar.plan(autopar.parallelize(fun, sync=Average(every=2)), state, jnp.ones((6, 4)))
    assert plan.sync is not None
    return plan.sync.fragments[0]


def test_slots_that_examples_meet_after_an_update() -> None:
    """Two updates in a step, one after the other or in a loop, and a loss that is logged after the update."""

    def loss_fn(w: Any, x: Any) -> Any:
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    def once(state: Any, x: Any) -> Any:
        m = 0.9 * state["m"] + jax.grad(loss_fn)(state["w"], x)
        return {"w": state["w"] - 0.1 * m, "m": m}

    state = {"w": jnp.eye(4), "m": jnp.zeros((4, 4))}

    def logged(state: Any, x: Any) -> Any:
        new = once(state, x)
        return new, loss_fn(new["w"], x)

    def looped(state: Any, x: Any) -> Any:
        return jax.lax.scan(lambda s, part: (once(s, part), None), state, jnp.stack([x, x], 1).swapaxes(0, 1))[
            0
        ], x.sum()

    for fun in (lambda s, x: (once(once(s, x), x), x.sum()), logged, looped):
        assert found_in(fun, state) == ("w",)


def test_copies_of_master_weights_are_refused() -> None:
    def step(state: Any, x: Any) -> Any:
        grad = jax.grad(lambda w: jnp.mean((x.astype(w.dtype) @ w) ** 2))(state["copy"])
        master = state["master"] - 0.1 * grad.astype(jnp.float32)
        return {"copy": master.astype(jnp.bfloat16), "master": master}, x.sum()

    state = {"copy": jnp.eye(4, dtype=jnp.bfloat16), "master": jnp.eye(4)}
    with pytest.raises(
        autopar.StrategyError, match="copy meets the examples, but its new value doesn't follow from it"
    ):
        found_in(step, state)


def test_scales_of_batch_norm_are_weights() -> None:
    """They are multiplied by what follows from a sum over the examples, which is no gradient."""

    def step(state: Any, x: Any) -> Any:
        def loss_fn(p: Any) -> Any:
            h = x @ p["w"]
            scale = p["scale"] * jax.lax.rsqrt(h.var(0) + 1e-5)
            return jnp.mean(jnp.tanh(h * scale + (p["bias"] - h.mean(0) * scale)) ** 2)

        grads = jax.grad(loss_fn)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), x.sum()

    state = {"w": jnp.eye(4), "scale": jnp.ones(4), "bias": jnp.zeros(4)}
    assert found_in(step, state) == ("bias", "scale", "w")


def test_fragments_are_balanced() -> None:
    plan = autopar.plan(autopar.parallelize(step, sync=Average(every=4, fragments=2)), make_state(), batch())
    assert plan.sync is not None
    assert plan.sync.fragments == (("params/emb",), ("params/layers", "params/w", "target"))
    assert plan.sync.fragment_bytes == (480, 256)
    assert [plan.sync.due(k) for k in range(1, 7)] == [[], [1], [], [0], [], [1]]


def test_a_plan_holds_them(tmp_path: Path) -> None:
    planned = autopar.parallelize(step, sync=Average(every=2))
    plan = autopar.plan(planned, make_state(), batch())
    plan.save(tmp_path / "plan.json")
    loaded = autopar.Plan.load(tmp_path / "plan.json")
    assert loaded == plan and not plan.diff(loaded)
    again = autopar.parallelize(step, sync=Average(every=2), plan=loaded)
    again(make_state(), batch())
    assert again.plan is not None and again.plan.sync == plan.sync
    with pytest.raises(autopar.ArgumentsError, match="give sync= as well"):
        autopar.parallelize(step, plan=loaded)
    with pytest.raises(autopar.PlanError, match="local SGD, every 2, and sync= makes 1 client, local SGD, every 4"):
        autopar.parallelize(step, sync=Average(every=4), plan=loaded)(make_state(), batch())
    with pytest.raises(autopar.ArgumentsError, match="leave cluster= out"):
        autopar.explain(planned, make_state(), batch(), cluster=autopar.Cluster.named("dgx-h100"))
    other = autopar.plan(autopar.parallelize(step), make_state(), batch())
    assert "replicas" in str(other.diff(plan))


def test_what_explain_says() -> None:
    text = explained(autopar.parallelize(step, sync=Average(every=2)), make_state(), batch())
    assert "Replicas: 1 client," in text and "every 2 steps their mean is taken" in text
    assert "Each client keeps" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, r"every=0\): give a whole number, 1 or more"),
        ({"every": 4, "fragments": 3}, "fragments are averaged in turn"),
        ({"every": 2, "delay": 2}, "give a delay= below every="),
        ({"outer": 0.7}, "give an Optax transformation"),
        ({"clients": 0}, "give a whole number of clients"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(autopar.ArgumentsError, match=message):
        Average(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sync": "average"}, "give autopar.sync.Average"),
        ({"sync": Average(), "strategy": ("ps", "hosts")}, "tables on hosts are one for all ranks"),
        ({"sync": Average(), "pipeline": autopar.Pipeline(1)}, "sync= and pipeline= don't go together"),
        ({"sync": Average(clients=2)}, "2 clients don't divide 1 processes"),
    ],
)
def test_bad_combinations(options: dict[str, Any], message: str) -> None:
    with pytest.raises(autopar.ArgumentsError, match=message):
        autopar.parallelize(step, **options)


def test_steps_without_weights() -> None:
    planned = autopar.parallelize(lambda state, x: (state + x.sum(), x), sync=Average())
    with pytest.raises(autopar.StrategyError, match="has no weights"):
        planned(jnp.zeros(()), jnp.ones(4))
    with pytest.raises(autopar.StrategyError, match="fragments=8, and step has 4 weights"):
        autopar.parallelize(step, sync=Average(every=8, fragments=8))(make_state(), batch())


def test_one_client_is_the_step() -> None:
    planned, plain = autopar.parallelize(step, sync=Average(every=2)), jax.jit(step)
    mine, theirs = make_state(), make_state()
    for _ in range(4):
        (mine, loss), (theirs, expected) = planned(mine, batch()), plain(theirs, batch())
        np.testing.assert_allclose(loss, expected, 1e-5)
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        assert isinstance(a, autopar.Replica)
        np.testing.assert_allclose(np.asarray(a), b, 1e-4, 1e-6)
    with pytest.raises(autopar.DonatedStateError):
        old = mine
        planned(mine, batch())
        np.asarray(old["params"]["w"])
    with pytest.raises(autopar.StepError, match=r"step has replicas \(sync=\): it runs in several programs"):
        jax.jit(planned)(make_state(), batch())
    with pytest.raises(autopar.ArgumentsError, match="give the step that autopar.parallelize returned"):
        autopar.shard({"x": np.ones(4)}, batch_size=2, step=step)
