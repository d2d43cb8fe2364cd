"""The models of `first_week`: what people begin with, in sizes that a laptop trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

Params, Batch = dict[str, Any], dict[str, np.ndarray]


class Model(NamedTuple):
    """A model as pure functions.

    Attributes:
      init: Makes the parameters from a key.
      loss: Of parameters and a batch, a mean over its examples.
      batch: Makes the k-th batch.
    """

    init: Callable[[jax.Array], Params]
    loss: Callable[[Params, Batch], jax.Array]
    batch: Callable[[int], Batch]


def _table(key: jax.Array, rows: int, width: int) -> jax.Array:
    return jax.random.normal(key, (rows, width)) * 0.05


def _layers(key: jax.Array, *widths: int) -> list[dict[str, jax.Array]]:
    keys = jax.random.split(key, len(widths) - 1)
    sizes = zip(keys, widths, widths[1:], strict=False)
    return [{"w": jax.random.normal(k, (a, b)) * a**-0.5, "b": jnp.zeros(b)} for k, a, b in sizes]


def _mlp(layers: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
    for layer in layers[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ layers[-1]["w"] + layers[-1]["b"]


def _ids(random: np.random.Generator, rows: int, *shape: int) -> np.ndarray:
    """Zipf ids, frequent ones all over the table."""
    return (random.zipf(1.2, shape) * 7919 % rows).astype(np.int32)


def two_tower() -> Model:
    """Users and items, softmax over the items of the batch."""
    users, items, width, size = 300_000, 100_000, 16, 256

    def init(key: jax.Array) -> Params:
        a, b, c, d = jax.random.split(key, 4)
        return {
            "user": {"table": _table(a, users, width), "mlp": _layers(c, width, 64, 32)},
            "item": {"table": _table(b, items, width), "mlp": _layers(d, width, 64, 32)},
        }

    def loss(params: Params, batch: Batch) -> jax.Array:
        u, i = (_mlp(params[k]["mlp"], params[k]["table"][batch[k]]) for k in ("user", "item"))
        labels = jnp.arange(u.shape[0])
        return optax.softmax_cross_entropy_with_integer_labels(u @ i.T, labels).mean()

    def batch(k: int) -> Batch:
        random = np.random.default_rng(k)
        return {"user": _ids(random, users, size), "item": _ids(random, items, size)}

    return Model(init, loss, batch)


def dlrm() -> Model:
    """26 categories and 13 numbers, products of all pairs."""
    rows, width, size = [1000 * (k + 1) for k in range(26)], 16, 128
    upper, lower = np.triu_indices(27, 1)

    def init(key: jax.Array) -> Params:
        *keys, bottom, top = jax.random.split(key, 28)
        tables = {f"{k:02}": _table(keys[k], n, width) for k, n in enumerate(rows)}
        return {
            "tables": tables,
            "bottom": _layers(bottom, 13, 64, width),
            "top": _layers(top, len(upper) + width, 64, 1),
        }

    def loss(params: Params, batch: Batch) -> jax.Array:
        x = _mlp(params["bottom"], batch["numbers"])
        looked_up = [params["tables"][f"{k:02}"][batch["categories"][:, k]] for k in range(26)]
        every = jnp.stack([x, *looked_up], 1)
        products = (every @ every.swapaxes(1, 2))[:, upper, lower]
        logits = _mlp(params["top"], jnp.concatenate([x, products], 1))[:, 0]
        return optax.sigmoid_binary_cross_entropy(logits, batch["label"]).mean()

    def batch(k: int) -> Batch:
        random = np.random.default_rng(k)
        categories = np.stack([_ids(random, n, size) for n in rows], 1)
        numbers = random.normal(size=(size, 13)).astype(np.float32)
        return {"numbers": numbers, "categories": categories, "label": (numbers[:, 0] > 0).astype(np.float32)}

    return Model(init, loss, batch)


def word2vec() -> Model:
    """Skip-gram, five negatives."""
    words, width, size = 100_000, 64, 512

    def init(key: jax.Array) -> Params:
        a, b = jax.random.split(key)
        return {"words": _table(a, words, width), "contexts": _table(b, words, width)}

    def loss(params: Params, batch: Batch) -> jax.Array:
        logits = jnp.einsum("bd,bcd->bc", params["words"][batch["word"]], params["contexts"][batch["context"]])
        labels = jnp.zeros_like(logits).at[:, 0].set(1)
        return optax.sigmoid_binary_cross_entropy(logits, labels).sum(1).mean()

    def batch(k: int) -> Batch:
        random = np.random.default_rng(k)
        return {"word": _ids(random, words, size), "context": _ids(random, words, size, 6)}

    return Model(init, loss, batch)


def language_model() -> Model:
    """A GRU over 50,000 words, a sampled softmax with as many negatives as words."""
    words, width, size, length = 50_000, 64, 32, 16

    def init(key: jax.Array) -> Params:
        a, b, c, d = jax.random.split(key, 4)
        cell = {"x": _layers(c, width, 3 * width), "h": _layers(d, width, 3 * width)}
        return {"in": _table(a, words, width), "out": _table(b, words, width), "cell": cell}

    def loss(params: Params, batch: Batch) -> jax.Array:
        inputs = _mlp(params["cell"]["x"], params["in"][batch["words"][:, :-1]])

        def turn(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            (xr, xz, xn), (hr, hz, hn) = jnp.split(x, 3, -1), jnp.split(_mlp(params["cell"]["h"], h), 3, -1)
            z = jax.nn.sigmoid(xz + hz)
            h = z * h + (1 - z) * jnp.tanh(xn + jax.nn.sigmoid(xr + hr) * hn)
            return h, h

        _, states = jax.lax.scan(turn, jnp.zeros((inputs.shape[0], width)), inputs.swapaxes(0, 1))
        states = states.swapaxes(0, 1)
        right = (states * params["out"][batch["words"][:, 1:]]).sum(-1, keepdims=True)
        wrong = jnp.einsum("bld,bnd->bln", states, params["out"][batch["negatives"]])
        return -jax.nn.log_softmax(jnp.concatenate([right, wrong], -1))[..., 0].mean()

    def batch(k: int) -> Batch:
        random = np.random.default_rng(k)
        return {"words": _ids(random, words, size, length + 1), "negatives": _ids(random, words, size, length)}

    return Model(init, loss, batch)


def gpt() -> Model:
    """Two layers of four heads over 2,000 tokens with the full softmax: nothing in it is sparse."""
    tokens, width, heads, size, length = 2000, 64, 4, 16, 32

    def init(key: jax.Array) -> Params:
        a, b, c, *keys = jax.random.split(key, 11)
        layers = [
            {
                "qkv": _layers(keys[4 * k], width, 3 * width),
                "out": _layers(keys[4 * k + 1], width, width),
                "mlp": _layers(keys[4 * k + 2], width, 4 * width, width),
            }
            for k in range(2)
        ]
        return {
            "tokens": _table(a, tokens, width),
            "places": _table(b, length, width),
            "layers": layers,
            "head": _layers(c, width, tokens),
        }

    def loss(params: Params, batch: Batch) -> jax.Array:
        x = params["tokens"][batch["tokens"][:, :-1]] + params["places"]
        for layer in params["layers"]:
            q, k, v = jnp.split(_mlp(layer["qkv"], _normalized(x)).reshape(*x.shape[:2], heads, -1), 3, -1)
            x += _mlp(layer["out"], jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))
            x += _mlp(layer["mlp"], _normalized(x))
        logits = _mlp(params["head"], _normalized(x))
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:]).mean()

    def batch(k: int) -> Batch:
        return {"tokens": _ids(np.random.default_rng(k), tokens, size, length + 1)}

    return Model(init, loss, batch)


def _normalized(x: jax.Array) -> jax.Array:
    return jax.nn.standardize(x)


MODELS: dict[str, Callable[[], Model]] = {
    "language model": language_model,
    "two-tower": two_tower,
    "DLRM": dlrm,
    "word2vec": word2vec,
    "GPT": gpt,
}
