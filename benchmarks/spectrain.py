"""SpecTrain's figure 8, table 1 and figure 11 in small: what asynchronous pipelines do to training.

Four kinds of model, trained by momentum SGD as the paper's. The data is made (noisy patterns, words that follow rules),
since the paper's isn't at hand.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import autopar
from benchmarks.models import lstm_layer

STAGES, SEEDS, STEPS, EXAMPLES = 4, 5, 400, 128
SCHEDULES = ("async", "stash", "spectrain")
MOMENTUM = 0.9
#: Minibatches whose results count at the end.
LAST = 40

Array = Any


@dataclass(frozen=True)
class Task:
    """Something to learn.

    Attributes:
      make: A key -> parameters.
      logits: Parameters, inputs -> logits.
      draw: A random generator, how many -> inputs and labels.
      rate: Of momentum SGD.
    """

    make: Callable[[Array], Any]
    logits: Callable[[Any, Array], Array]
    draw: Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]]
    rate: float


def _dense(key: Array, inputs: int, outputs: int, gain: float = 1.0) -> Array:
    return gain * jax.random.normal(key, (inputs, outputs)) / inputs**0.5


def _images(side: int, channels: int, classes: int) -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    """Noisy pictures of one of some patterns each, shifted."""
    patterns = np.random.default_rng(1).standard_normal((classes, side, side, channels)).astype(np.float32)

    def draw(random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        labels = random.integers(0, classes, count)
        shifts = random.integers(0, 3, (count, 2))
        shown = np.stack([np.roll(patterns[k], tuple(s), (0, 1)) for k, s in zip(labels, shifts, strict=True)])
        return shown + 1.2 * random.standard_normal(shown.shape).astype(np.float32), labels

    return draw


def _sentences(words: int, length: int) -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    """Texts with good and bad words, some of which a word ahead turns around: which are more?"""

    def draw(random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        ids = random.integers(0, words, (count, length))
        value = np.where(ids % 3 == 0, 1, np.where(ids % 3 == 1, -1, 0))
        turned = np.pad(ids[:, :-1] % 5 == 0, ((0, 0), (1, 0)))
        return ids, (np.where(turned, -value, value).sum(1) > 0).astype(np.int64)

    return draw


def fully_connected(width: int = 128, layers: int = 16, side: int = 6, classes: int = 10) -> Task:
    """SNN: layers of SELUs."""

    def make(key: Array) -> Any:
        first, last, *keys = jax.random.split(key, layers + 2)
        hidden = [_dense(k, width, width) for k in keys]
        return {"first": _dense(first, 3 * side**2, width), "hidden": hidden, "last": _dense(last, width, classes)}

    def logits(params: Any, x: Array) -> Array:
        x = jax.nn.selu(x.reshape(x.shape[0], -1) @ params["first"])
        for w in params["hidden"]:
            x = jax.nn.selu(x @ w)
        return x @ params["last"]

    return Task(make, logits, _images(side, 3, classes), 2e-3)


def wide_layers(width: int = 1024, side: int = 6, classes: int = 10) -> Task:
    """Dense layers of 2.2 million weights, 9 MB, to be sent around."""
    inputs = side * side

    def make(key: Array) -> Any:
        a, b, c, d = jax.random.split(key, 4)
        layers = [_dense(a, inputs, width, 1.4), _dense(b, width, width, 1.4), _dense(c, width, width, 1.4)]
        return {"layers": layers, "out": _dense(d, width, classes)}

    def logits(params: Any, x: Array) -> Array:
        h = x.reshape(len(x), -1)
        for weight in params["layers"]:
            h = jax.nn.relu(h @ weight)
        return h @ params["out"]

    return Task(make, logits, _images(side, 1, classes), 0.02)


def cnn(channels: int = 16, layers: int = 6, side: int = 8, classes: int = 10) -> Task:
    """VGG: convolutions, and a layer at the end."""

    def make(key: Array) -> Any:
        last, *keys = jax.random.split(key, layers + 1)
        sizes = [3, *[channels] * layers]
        kernels = [
            jax.random.normal(k, (3, 3, a, b)) * (2 / (9 * a)) ** 0.5
            for k, a, b in zip(keys, sizes, sizes[1:], strict=False)
        ]
        return {"kernels": kernels, "last": _dense(last, side**2 * channels, classes)}

    def logits(params: Any, x: Array) -> Array:
        for kernel in params["kernels"]:
            axes = ("NHWC", "HWIO", "NHWC")
            x = jax.nn.relu(jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=axes))
        return x.reshape(x.shape[0], -1) @ params["last"]

    return Task(make, logits, _images(side, 3, classes), 2e-3)


def residual_lstm(width: int = 48, layers: int = 4, words: int = 60, length: int = 12) -> Task:
    """LSTM layers, each added to what it is given."""

    def make(key: Array) -> Any:
        first, last, *keys = jax.random.split(key, 2 + 2 * layers)
        pairs = zip(keys[::2], keys[1::2], strict=True)
        cells = [
            {"w": _dense(a, width, 4 * width), "u": _dense(b, width, 4 * width), "b": jnp.zeros(4 * width)}
            for a, b in pairs
        ]
        return {"words": jax.random.normal(first, (words, width)), "cells": cells, "last": _dense(last, width, 2)}

    def logits(params: Any, ids: Array) -> Array:
        x = params["words"][ids]
        for cell in params["cells"]:
            x = x + lstm_layer(cell, x)
        return x.mean(1) @ params["last"]

    return Task(make, logits, _sentences(words, length), 2e-2)


def transformer(width: int = 48, layers: int = 4, words: int = 60, length: int = 12, heads: int = 4) -> Task:
    """Blocks of attention and an MLP."""

    def norm(x: Array) -> Array:
        x = x - x.mean(-1, keepdims=True)
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)

    def attend(params: Any, x: Array) -> Array:
        b, n, d = x.shape
        q, k, v = (y.reshape(b, n, heads, d // heads) for y in jnp.split(x @ params["qkv"], 3, -1))
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / (d // heads) ** 0.5)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(b, n, d) @ params["o"]

    def make(key: Array) -> Any:
        first, places, last, *keys = jax.random.split(key, layers + 3)
        blocks = []
        for key in keys:
            a, b, c, d = jax.random.split(key, 4)
            block = {"qkv": _dense(a, width, 3 * width), "o": _dense(b, width, width)}
            blocks.append(block | {"up": _dense(c, width, 2 * width), "down": _dense(d, 2 * width, width)})
        words_, spots = jax.random.normal(first, (words, width)), jax.random.normal(places, (length, width))
        return {"words": words_, "places": spots, "blocks": blocks, "last": _dense(last, width, 2)}

    def logits(params: Any, ids: Array) -> Array:
        x = params["words"][ids] + params["places"]
        for p in params["blocks"]:
            x = x + attend(p, norm(x))
            x = x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"]
        return norm(x).mean(1) @ params["last"]

    return Task(make, logits, _sentences(words, length), 2e-2)


TASKS = {
    "fully connected": fully_connected,
    "CNN": cnn,
    "residual LSTM": residual_lstm,
    "transformer": transformer,
}


def step_of(task: Task) -> tuple[Callable[..., Any], Callable[[int], Any]]:
    """A train step by momentum SGD, and what makes its state by a seed."""
    tx = optax.sgd(task.rate, momentum=MOMENTUM)

    def step(state: Any, batch: Any) -> Any:
        params, opt = state

        def loss_of(params: Any) -> Any:
            logits = task.logits(params, batch["x"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
            return losses.mean(), jnp.mean(logits.argmax(-1) == batch["y"])

        (loss, hits), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        updates, opt = tx.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), {"loss": loss, "accuracy": hits}

    def make(seed: int) -> Any:
        params = task.make(jax.random.key(seed))
        return params, tx.init(params)

    return step, make


def batches(task: Task, seed: int, count: int) -> Iterator[dict[str, np.ndarray]]:
    """Minibatches that no two seeds share."""
    random = np.random.default_rng(seed + 1000)
    for _ in range(count):
        x, y = task.draw(random, EXAMPLES)
        yield {"x": x, "y": y}


def train(task: Task, schedule: str, seeds: int = SEEDS, steps: int = STEPS) -> Iterator[tuple[list[float], float]]:
    """For each seed the losses of all minibatches, and the accuracy on new examples at the end."""
    step, make = step_of(task)
    if schedule == "plain":
        planned: Any = jax.jit(step, donate_argnums=0)
    else:
        planned = autopar.parallelize(step, pipeline=autopar.Pipeline(STAGES, schedule))
    hits = jax.jit(lambda params, batch: jnp.mean(task.logits(params, batch["x"]).argmax(-1) == batch["y"]))
    for seed in range(seeds):
        losses, params = [], None
        for state, _, metrics in autopar.train_batches(planned, make(seed), batches(task, seed, steps)):
            losses.append(metrics["loss"])
            params = state[0]
        params = autopar.materialize(params)
        tested = [float(hits(params, batch)) for batch in batches(task, 10_000, 16)]
        yield [float(loss) for loss in losses], statistics.mean(tested)


def spectrain() -> None:
    """Table 1 by the plain step (what data parallelism computes) and three asynchronous schedules, in four stages.

    Runs in a process of its own: JAX fixes the number of devices at its start.
    """
    subprocess.run([sys.executable, "-m", "benchmarks.spectrain"], check=True)


def main(*names: str) -> None:
    """The loss at the end of training, and the accuracy on new examples, of each method; `names`: of these models."""
    jax.config.update("jax_num_cpu_devices", STAGES)
    for name, of in ((name, TASKS[name]) for name in names or TASKS):
        print(f"{name}: loss of the last {LAST} minibatches, accuracy; mean and deviation of {SEEDS} seeds", flush=True)
        for schedule in ("plain", *SCHEDULES):
            found = list(train(of(), schedule))
            ends = [statistics.mean(losses[-LAST:]) for losses, _ in found]
            tested = [100 * accuracy for _, accuracy in found]
            print(
                f"  {schedule:10s} {statistics.mean(ends):.4f} +- {statistics.stdev(ends):.4f}   "
                f"{statistics.mean(tested):.2f}% +- {statistics.stdev(tested):.2f}",
                flush=True,
            )


def prediction_errors(task: Task, ahead: int, steps: int = STEPS, seed: int = 0) -> list[tuple[float, float]]:
    """Returns of each step the RMSE of weights as they were `ahead` steps before, and of those predicted then."""
    step, make = step_of(task)
    run, state = jax.jit(step), make(seed)
    weights = [state[0]]
    for batch in batches(task, seed, steps):
        state, _ = run(state, batch)
        weights.append(state[0])

    @jax.jit
    def errors(before: Any, then: Any, now: Any) -> tuple[Array, Array]:
        def rmse(guess: Any) -> Array:
            pairs = zip(jax.tree.leaves(guess), jax.tree.leaves(now), strict=True)
            squares = [jnp.sum((a - b) ** 2) for a, b in pairs]
            return jnp.sqrt(sum(squares) / sum(leaf.size for leaf in jax.tree.leaves(now)))

        predicted = jax.tree.map(lambda w, last: w + ahead * (w - last), then, before)
        return rmse(then), rmse(predicted)

    each = (errors(weights[t - 1], weights[t], weights[t + ahead]) for t in range(1, steps + 1 - ahead))
    return [(float(stale), float(predicted)) for stale, predicted in each]


def prediction() -> None:
    """Figure 8: how far weights that are s updates old are from those that they stand for, and how far predicted ones.

    Medians over a training, for s = 1, 2, 3.
    """
    for name, of in TASKS.items():
        for ahead in (1, 2, 3):
            stale, predicted = zip(*prediction_errors(of(), ahead), strict=True)
            lower = sum(b < a for a, b in zip(stale, predicted, strict=True)) / len(stale)
            print(
                f"{name:16s} s = {ahead}: stale {statistics.median(stale):.2e}, predicted "
                f"{statistics.median(predicted):.2e}; lower in {lower:.0%} of the steps",
                flush=True,
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
