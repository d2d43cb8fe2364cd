"""The small step that each variant changes in one thing.

Parameters `emb` [37, 4] and `w` [4, 4], Adagrad behind a clip by global norm, int32 Zipf ids [6, 5], and
the loss mean(tanh(look(params, batch) @ w)^2); a dict state and a dict batch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.zoo.case import Case, Tree, concrete, counter, zipf_ids

ROWS, WIDTH, IDS = 37, 4, (6, 5)

Params = Mapping[str, Any]
Batch = Mapping[str, Any]
Look = Callable[[Params, Batch], jax.Array]
Batches = Callable[[int], dict[str, Any]]


@dataclass(frozen=True)
class Updated:
    """What a step has in hand at its end, for its metrics."""

    old: Tree
    new: Tree
    grads: Tree
    updates: Tree
    loss: jax.Array


def _loss(report: Updated) -> dict[str, Any]:
    return {"loss": report.loss, "grad_norm": optax.tree.norm(report.grads)}


def clipped_adagrad() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(0.1), optax.adagrad(0.1))


def make_params(**shapes: tuple[int, ...]) -> dict[str, jax.Array]:
    """Normally distributed parameters of these shapes, and the dense `w` [WIDTH, WIDTH]."""
    rng = np.random.default_rng(0)
    shapes = {**shapes, "w": (WIDTH, WIDTH)}
    return concrete({k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()})


def ids_batches(
    shape: tuple[int, ...] = IDS,
    rows: int = ROWS,
    dtype: Any = np.int32,
    more: Callable[[int], dict[str, Any]] = lambda i: {},
) -> Batches:
    def batches(i: int) -> dict[str, Any]:
        ids = zipf_ids(np.random.default_rng(i), shape, rows)
        return {"ids": np.asarray(ids, dtype), **more(i)}

    return batches


def look_plain(p: Params, b: Batch) -> jax.Array:
    return p["emb"][b["ids"]]


def objective(look: Look, p: Params, b: Batch) -> jax.Array:
    return jnp.mean(jnp.tanh(look(p, b) @ p["w"]) ** 2)


def table_case(
    look: Look = look_plain,
    *,
    params: dict[str, jax.Array] | None = None,
    tx: optax.GradientTransformation | None = None,
    batches: Batches | None = None,
    penalty: Callable[[Params, Batch], Any] = lambda p, b: 0.0,
    report: Callable[[Updated], dict[str, Any]] = _loss,
    tables: tuple[str, ...] = ("emb",),
) -> Case:
    """A step around a lookup. `look` finds the step counter in the batch, as `step`."""
    initial = make_params(emb=(ROWS, WIDTH)) if params is None else params
    chosen = clipped_adagrad() if tx is None else tx

    def step(state: Tree, batch: Batch) -> tuple[Tree, Tree]:
        inputs = {**batch, "step": state["step"]}

        def loss_fn(p: Params) -> jax.Array:
            return objective(look, p, inputs) + penalty(p, inputs)

        old = state["params"]
        loss, grads = jax.value_and_grad(loss_fn)(old)
        updates, opt = chosen.update(grads, state["opt"], old)
        new = optax.apply_updates(old, updates)
        metrics = report(Updated(old, new, grads, updates, loss))
        return {"params": new, "opt": opt, "step": state["step"] + 1}, metrics

    state = {"params": initial, "opt": chosen.init(initial), "step": counter()}
    paths = tuple(f"params/{name}" for name in tables)
    return Case(step, concrete(state), batches or ids_batches(), paths)
