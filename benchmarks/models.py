"""Models that benchmarks train: what people begin with (`FIRST_WEEK`), and some whose layers `pipelines` cuts into
stages."""

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


#: In sizes that a laptop trains.
FIRST_WEEK: dict[str, Callable[[], Model]] = {
    "language model": language_model,
    "two-tower": two_tower,
    "DLRM": dlrm,
    "word2vec": word2vec,
    "GPT": gpt,
}

# --- layers that are cut into stages; every batch is the same ---

TX = optax.adam(1e-3)


def perceptron(layers: int = 8, width: int = 512, examples: int = 4096) -> Model:
    """Layers tanh(x @ w), each batch the same."""

    def loss(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean((x - batch["y"]) ** 2)

    def make(key: jax.Array) -> Any:
        return [jax.random.normal(k, (width, width)) / width**0.5 for k in jax.random.split(key, layers)]

    random = np.random.default_rng(0)
    data = {name: random.standard_normal((examples, width), np.float32) for name in "xy"}
    return Model(make, loss, lambda k: data)


def lstm_layer(params: Any, x: jax.Array) -> jax.Array:
    """An LSTM over the second axis, [B, T, W] -> [B, T, W]; `w`, `b` of its inputs, `u` of its state."""

    def turn(state: Any, inputs: jax.Array) -> tuple[Any, jax.Array]:
        h, c = state
        i, f, g, o = jnp.split(inputs + h @ params["u"], 4, -1)
        c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zeros = jnp.zeros_like(x[:, 0])
    _, hs = jax.lax.scan(turn, (zeros, zeros), jnp.moveaxis(x @ params["w"] + params["b"], 1, 0))
    return jnp.moveaxis(hs, 0, 1)


def lstm(layers: int = 4, width: int = 256, examples: int = 256, length: int = 16, words: int = 2000) -> Model:
    """A language model of LSTM layers, one scan over the words each."""

    def loss(params: Any, batch: Any) -> jax.Array:
        x = params["words"][batch["ids"]]
        for layer in params["layers"]:
            x = lstm_layer(layer, x)
        return _cross_entropy(x @ params["out"], batch["labels"])

    def make(key: jax.Array) -> Any:
        first, last, *keys = jax.random.split(key, 2 + 2 * layers)
        shape = (width, 4 * width)
        return {
            "words": jax.random.normal(first, (words, width)),
            "layers": [
                {"w": _scaled(a, shape), "u": _scaled(b, shape), "b": jnp.zeros(4 * width)}
                for a, b in zip(keys[::2], keys[1::2], strict=True)
            ],
            "out": _scaled(last, (width, words)),
        }

    data = _text(examples, length, words)
    return Model(make, loss, lambda k: data)


def transformer(layers: int = 6, width: int = 256, examples: int = 32, length: int = 64, words: int = 2000) -> Model:
    """A causal language model: attention of 4 heads, an MLP of 4 times the width, layer norms first."""
    heads = 4

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        x = x - x.mean(-1, keepdims=True)
        return scale * x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)

    def attend(params: Any, x: jax.Array) -> jax.Array:
        b, n, d = x.shape
        q, k, v = (y.reshape(b, n, heads, d // heads) for y in jnp.split(x @ params["qkv"], 3, -1))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (d // heads) ** 0.5
        scores = jnp.where(jnp.tril(jnp.ones((n, n), bool)), scores, -1e9)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(b, n, d) @ params["o"]

    def loss(params: Any, batch: Any) -> jax.Array:
        x = params["words"][batch["ids"]] + params["places"]
        for p in params["layers"]:
            x = x + attend(p, norm(x, p["norm1"]))
            x = x + jax.nn.gelu(norm(x, p["norm2"]) @ p["up"]) @ p["down"]
        return _cross_entropy(norm(x, params["norm"]) @ params["out"], batch["labels"])

    def make(key: jax.Array) -> Any:
        first, second, last, *keys = jax.random.split(key, 3 + layers)

        def layer(key: jax.Array) -> Any:
            a, b, c, d = jax.random.split(key, 4)
            shapes = {"qkv": (a, 3), "o": (b, 1), "up": (c, 4)}
            products = {name: _scaled(k, (width, n * width)) for name, (k, n) in shapes.items()}
            norms = {"norm1": jnp.ones(width), "norm2": jnp.ones(width)}
            return {**products, "down": _scaled(d, (4 * width, width)), **norms}

        return {
            "words": jax.random.normal(first, (words, width)),
            "places": 0.02 * jax.random.normal(second, (length, width)),
            "layers": [layer(k) for k in keys],
            "norm": jnp.ones(width),
            "out": _scaled(last, (width, words)),
        }

    data = _text(examples, length, words)
    return Model(make, loss, lambda k: data)


def cnn(layers: int = 6, channels: int = 24, examples: int = 128, side: int = 16) -> Model:
    """Convolutions of 3 x 3, and a product at the end."""

    def loss(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        for kernel in params["layers"]:
            x = jax.nn.relu(
                jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            )
        return _cross_entropy(x.mean((1, 2)) @ params["out"], batch["labels"])

    def make(key: jax.Array) -> Any:
        last, *keys = jax.random.split(key, 1 + layers)
        sizes = [3, *[channels] * layers]
        kernels = [
            jax.random.normal(k, (3, 3, a, b)) * (2 / 9 / a) ** 0.5
            for k, a, b in zip(keys, sizes[:-1], sizes[1:], strict=True)
        ]
        return {"layers": kernels, "out": _scaled(last, (channels, 10))}

    random = np.random.default_rng(0)
    images = random.standard_normal((examples, side, side, 3), np.float32)
    data = {"x": images, "labels": random.integers(0, 10, examples, np.int32)}
    return Model(make, loss, lambda k: data)


PIPELINES: dict[str, Callable[..., Model]] = {
    "perceptron": perceptron,
    "LSTM": lstm,
    "transformer": transformer,
    "CNN": cnn,
}


def step_of(loss_of: Callable[[Any, Any], jax.Array]) -> Callable[[Any, Any], Any]:
    """Makes the train step of a loss, by Adam."""

    def step(state: Any, batch: Any) -> Any:
        params, opt = state
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        updates, opt = TX.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), loss

    return step


def _scaled(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(key, shape) / shape[0] ** 0.5


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _text(examples: int, length: int, words: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {name: random.integers(0, words, (examples, length), np.int32) for name in ("ids", "labels")}
