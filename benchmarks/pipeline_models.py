"""Models whose layers are cut into stages: each a loss of parameters and a batch, its parameters and its batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

#: Parameters and a batch -> the loss.
Loss = Callable[[Any, Any], jax.Array]
#: A loss, its parameters by a key, its batch.
Model = tuple[Loss, Callable[[jax.Array], Any], Any]

TX = optax.adam(1e-3)


def perceptron(layers: int = 8, width: int = 512, examples: int = 4096) -> Model:
    """A deep one: tanh(x @ w)."""

    def loss(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean((x - batch["y"]) ** 2)

    def make(key: jax.Array) -> Any:
        return [jax.random.normal(k, (width, width)) / width**0.5 for k in jax.random.split(key, layers)]

    random = np.random.default_rng(0)
    return loss, make, {name: random.standard_normal((examples, width), np.float32) for name in "xy"}


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

    return loss, make, _text(examples, length, words)


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

    return loss, make, _text(examples, length, words)


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
    return loss, make, {"x": images, "labels": random.integers(0, 10, examples, np.int32)}


MODELS: dict[str, Callable[..., Model]] = {
    "perceptron": perceptron,
    "LSTM": lstm,
    "transformer": transformer,
    "CNN": cnn,
}


def step_of(loss_of: Loss) -> Callable[[Any, Any], Any]:
    """The train step of a loss, by Adam."""

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
