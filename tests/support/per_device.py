"""Train steps written for one device of several, and what they share."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

AXIS = "batch"
TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adagrad(0.1))

State = dict[str, Any]


def mean_loss(params: Any, batch: Any) -> jax.Array:
    rows = params["emb"][batch["ids"]] * jnp.cos(params["emb"][batch["ids"] // 2])
    return jnp.mean((jnp.tanh(rows @ params["w"]).sum(-1) - batch["y"]) ** 2)


def apply(state: State, grads: Any) -> State:
    updates, slots = TX.update(grads, state["slots"], state["params"])
    return {**state, "params": optax.apply_updates(state["params"], updates), "slots": slots}


def pmean_of_means(state: State, batch: Any) -> tuple[State, Any]:
    loss, grads = jax.value_and_grad(mean_loss)(state["params"], batch)
    grads = lax.pmean(grads, AXIS)
    return apply(state, grads), {"loss": lax.pmean(loss, AXIS)}


def one_pmean(state: State, batch: Any) -> tuple[State, Any]:
    """The loss is reduced inside of what is differentiated."""
    loss, grads = lax.pmean(jax.value_and_grad(mean_loss)(state["params"], batch), axis_name=AXIS)
    return apply(state, grads), loss


def psum_of_means(state: State, batch: Any) -> tuple[State, Any]:
    """Gradients that grow with the number of devices; and the number itself."""
    loss, grads = jax.value_and_grad(mean_loss)(state["params"], batch)
    count = lax.psum(1, AXIS)
    return apply(state, lax.psum(grads, AXIS)), {"loss": lax.psum(loss, AXIS) / count, "count": count}
