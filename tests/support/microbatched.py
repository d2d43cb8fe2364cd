"""Steps whose microbatches and stages are compared with the plain step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import autopar

#: Examples and pieces of each; features; words; layers.
EXAMPLES, PIECES, WIDTH, WORDS, LAYERS = 24, 5, 8, 30, 4

Step = Callable[[Any, Any], tuple[Any, Any]]


def batch(seed: int, examples: int = EXAMPLES) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    shape = (examples, PIECES)
    return {
        "ids": random.integers(0, WORDS, shape),
        "labels": random.integers(0, WORDS, shape),
        "mask": (random.random(shape) < 0.7) * 1.0,
    }


def language_model(
    tx: optax.GradientTransformation,
    *,
    tied: bool = False,
    dropout: float = 0.0,
    remat: bool = False,
    stacked: bool = False,
    sampled: bool = False,
) -> tuple[Step, Callable[[], Any]]:
    """A residual network over words with a masked mean, and metrics of several shapes; and what makes its state.
    `stacked`: a scan goes through its layers. `sampled`: labels are told from other words, by their embeddings."""

    def layer(weights: Any, x: jax.Array, key: jax.Array) -> jax.Array:
        h = jnp.tanh(x @ weights["w"] + weights["b"])
        if dropout:
            h = jnp.where(jax.random.bernoulli(key, 1 - dropout, h.shape), h / (1 - dropout), 0)
        return x + h

    def loss_of(params: Any, given: Any, key: jax.Array) -> tuple[jax.Array, Any]:
        x = params["words"][given["ids"]]
        run = jax.checkpoint(layer) if remat else layer
        if stacked:
            layers = (params["layers"], jnp.arange(LAYERS))
            x, _ = jax.lax.scan(lambda x, xs: (run(xs[0], x, jax.random.fold_in(key, xs[1])), None), x, layers)
        for k in () if stacked else range(LAYERS):
            x = run(params["layers"][k], x, jax.random.fold_in(key, k))
        if sampled:
            words = jnp.stack([given["labels"], given["ids"], given["labels"][:, ::-1]], -1)
            logits, labels = jnp.einsum("bpd,bpkd->bpk", x, params["words"][words]), jnp.zeros_like(given["labels"])
        else:
            logits, labels = x @ (params["words"].T if tied else params["out"]), given["labels"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels) * given["mask"]
        metrics = {"each": losses.sum(-1), "worst": losses.max(), "hits": jnp.sum(logits.argmax(-1) == labels)}
        return losses.sum() / given["mask"].sum(), metrics

    def step(state: Any, given: Any) -> tuple[Any, Any]:
        (loss, metrics), grads = jax.value_and_grad(loss_of, has_aux=True)(state["params"], given, state["key"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        new = {"params": params, "opt": opt, "key": jax.random.fold_in(state["key"], 1)}
        return new, {"loss": loss, "norm": jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads))), **metrics}

    def make() -> Any:
        keys = jax.random.split(jax.random.key(0), LAYERS + 2)
        scale = WIDTH**-0.5
        layers = [
            {"w": scale * jax.random.normal(k, (WIDTH, WIDTH), float), "b": jnp.zeros(WIDTH, float)}
            for k in keys[:LAYERS]
        ]
        layers = jax.tree.map(lambda *xs: jnp.stack(xs), *layers) if stacked else layers
        params = {"words": jax.random.normal(keys[-1], (WORDS, WIDTH), float), "layers": layers}
        if not tied and not sampled:
            params["out"] = scale * jax.random.normal(keys[-2], (WIDTH, WORDS), float)
        return {"params": params, "opt": tx.init(params), "key": jax.random.key(1)}

    return step, make


def stages_of(count: int) -> list[list[str]]:
    """Patterns of as many stages of `language_model`, of equal numbers of layers. Stages cut by measured times may be
    others each time, and round otherwise."""
    layers = [f"params/layers/{k}" for k in range(LAYERS)]
    each = [layers[k * LAYERS // count : (k + 1) * LAYERS // count] for k in range(count)]
    return [["params/words", *each[0]], *each[1:-1], [*each[-1], "params/out"]]


def difference(planned: Any, step: Step, make: Callable[[], Any], steps: int = 3) -> float:
    """The largest difference of all results of some steps from the plain step's, in float64."""
    ours, theirs = make(), make()
    worst = 0.0
    for k in range(steps):
        ours, metrics = planned(ours, batch(k))
        theirs, expected = jax.jit(step)(theirs, batch(k))
        pairs = zip(jax.tree.leaves((ours, metrics)), jax.tree.leaves((theirs, expected)), strict=True)
        for a, b in pairs:
            worst = max(worst, float(np.max(np.abs(numbers(a) - numbers(b)))))
    return worst


def numbers(leaf: Any) -> np.ndarray:
    """A leaf in float64; of a random key its data."""
    leaf = autopar.materialize(leaf)
    is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf).astype(np.float64)
