"""A model whose sizes can be chosen to be equal: tables of tokens, positions and segments, a table along its columns, a
bias for each token, dense layers, biases and scales, and a kernel that is read by fixed rows, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

#: All that are looked up and should lift, whatever their sizes.
TABLES = frozenset({"tok", "pos", "seg", "col", "bias"})

OPTIMIZERS: dict[str, optax.GradientTransformation] = {
    "sgd": optax.sgd(0.1),
    "adagrad": optax.adagrad(0.1),
    "momentum": optax.sgd(0.1, 0.9),
    "adam": optax.adam(0.01),
    "clip": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.01)),
}


class Sizes(NamedTuple):
    """Rows of the tables, widths, examples."""

    tokens: int = 40
    positions: int = 24
    segments: int = 50
    width: int = 16
    hidden: int = 12
    batch: int = 4
    length: int = 8
    classes: int = 3


#: What is equal -> sizes; of the first nothing is.
SIZES = {
    "nothing": Sizes(),
    "rows of a small table and the width": Sizes(positions=16),
    "everything": Sizes(16, 16, 16, 16, 16, 16, 8, 16),
    "tables, batch and hidden width": Sizes(24, 24, 24, 16, 24, 24, 8, 24),
    "a square table beside another": Sizes(16, 24, 24, 24, 16, 16, 8, 16),
}

State = dict[str, Any]


def state_of(sizes: Sizes, optimizer: optax.GradientTransformation) -> State:
    rng = np.random.default_rng(0)
    v, p, s, d, h, _, _, c = sizes
    shapes = {
        "tok": (v, d),
        "pos": (p, d),
        "seg": (s, d),
        "col": (d, v),
        "bias": (v,),
        "scale": (d,),
        "kernel": (d, h),
        "hidden": (h, h),
        "hidden_bias": (h,),
        "out": (h, c),
    }
    params = {k: jnp.float32(rng.normal(size=shape)) for k, shape in shapes.items()}
    return {"params": params, "opt": optimizer.init(params)}


def batch_of(sizes: Sizes, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    examples = sizes.batch, sizes.length
    return {
        "ids": rng.integers(0, sizes.tokens, examples),
        "segments": rng.integers(0, sizes.segments, sizes.batch),
        "y": rng.normal(size=(*examples, sizes.classes)).astype(np.float32),
    }


def loss_of(p: State, batch: Any) -> jax.Array:
    length = batch["ids"].shape[1]
    x = p["scale"] * (p["tok"][batch["ids"]] + p["pos"][:length]) + p["seg"][batch["segments"]][:, None]
    x = x + jnp.moveaxis(p["col"][:, batch["ids"]], 0, -1)
    x = x * jnp.mean(p["kernel"][:4])  # makes a table of the kernel, too
    h = jnp.tanh(x @ p["kernel"] + p["hidden_bias"])
    h = jnp.tanh(h + h @ p["hidden"])
    return jnp.mean(jnp.square(h @ p["out"] + p["bias"][batch["ids"]][..., None] - batch["y"]))


def step_of(optimizer: optax.GradientTransformation) -> Callable[[State, Any], tuple[State, jax.Array]]:
    def train(state: State, batch: Any) -> tuple[State, jax.Array]:
        loss, grads = jax.value_and_grad(loss_of)(state["params"], batch)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    return train
