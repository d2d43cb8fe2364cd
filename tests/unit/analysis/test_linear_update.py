"""Where averaging weights in every step is what averaging gradients is, and where not: checked by numbers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.sync import ADPSGD, Average

SCHEDULE = optax.exponential_decay(0.1, 10, 0.9)
LINEAR = {
    "sgd": optax.sgd(0.1),
    "a schedule": optax.sgd(SCHEDULE),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "nesterov": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "decay": optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1)),
}
OTHERS = {
    "adam": (optax.adam(0.1), ""),
    "adagrad": (optax.adagrad(0.1), ""),
    "a clip": (optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1)), ""),
    "a clip of each": (optax.chain(optax.clip(0.01), optax.sgd(0.1)), ""),
    "signs": (optax.sign_sgd(0.1), "sign"),
}


def plain(tx: optax.GradientTransformation) -> Any:
    def step(state: Any, batch: Any) -> Any:
        params, slots = state

        def loss_of(p: Any) -> jax.Array:
            return jnp.mean((jnp.tanh(batch["x"] @ p["w"]) @ p["v"] - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, slots = tx.update(grads, slots, params)
        return (optax.apply_updates(params, updates), slots), loss

    return step


def start(tx: optax.GradientTransformation) -> Any:
    params = {"w": jnp.linspace(-1, 1, 12).reshape(4, 3), "v": jnp.linspace(0.5, 1, 3)}
    return params, tx.init(params)


def batches(client: int, k: int) -> Any:
    random = np.random.default_rng((client, k))
    return {"x": random.normal(size=(6, 4)), "y": random.normal(size=6)}


def is_gradient_averaging(tx: optax.GradientTransformation) -> bool:
    """Whether three steps of two clients are those on the whole of their minibatches."""
    step, whole, each = jax.jit(plain(tx)), start(tx), [start(tx), start(tx)]
    for k in range(3):
        parts = [batches(c, k) for c in range(2)]
        whole, _ = step(whole, jax.tree.map(lambda *xs: np.concatenate(xs), *parts))
        each = [step(own, part)[0] for own, part in zip(each, parts, strict=True)]
        mean = jax.tree.map(lambda *xs: sum(xs) / 2, *[params for params, _ in each])
        each = [(mean, slots) for _, slots in each]
    return all(jax.tree.leaves(jax.tree.map(lambda a, b: np.allclose(a, b, rtol=1e-4), whole[0], each[0][0])))


def planned(tx: optax.GradientTransformation, sync: Any) -> Any:
    step = autopar.parallelize(plain(tx), sync=sync)
    text = " ".join(str(autopar.explain(step, start(tx), batches(0, 0))).split())
    assert step.plan is not None and step.plan.sync is not None
    return step.plan.sync, text


@pytest.mark.parametrize("name", LINEAR)
def test_linear_updates_are_known(name: str) -> None:
    sync, text = planned(LINEAR[name], Average())
    assert sync.averages_gradients and not sync.nonlinear and "this is what averaging gradients is" in text
    assert is_gradient_averaging(LINEAR[name])


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_told_with_their_place(name: str) -> None:
    tx, op = OTHERS[name]
    sync, text = planned(tx, Average())
    assert not sync.averages_gradients and op in sync.nonlinear and "test_linear_update.py" in sync.nonlinear
    assert "This isn't what averaging gradients is" in text
    assert not is_gradient_averaging(tx)


def test_other_ways_claim_nothing() -> None:
    for way in (Average(every=2), Average(outer=optax.sgd(0.7)), ADPSGD()):
        sync, text = planned(optax.sgd(0.1), way)
        assert not sync.averages_gradients and not sync.nonlinear and "averaging gradients" not in text
