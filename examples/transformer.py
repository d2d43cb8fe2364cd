"""The demo in stages, `make demo ARGS="--pipeline 4"`: a transformer on the demo's corpus, each stage on a device.

An ordinary Flax model and Optax step for one device; nothing in it is written for stages. The demo prints the stages
that autopar finds, trains, and at the end times the plain step beside the pipeline, whose numbers must agree, unless it
is asynchronous (`--schedule spectrain`): then they are another function's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from compare import Form, compare
from corpus import Batch, CorpusError, batches, held_out_windows, load_corpus
from flax.training.train_state import TrainState
from progress import Screen

import autopar

VOCABULARY = 4_000  # the most frequent words, unless --vocab says otherwise
LAYERS, HEADS = 8, 4
MICROBATCHES = 8
ASYNCHRONOUS = ("async", "stash", "spectrain")  # minibatches follow one another without a flush
SCHEDULES = ("1f1b", "gpipe", "zero-bubble", *ASYNCHRONOUS)
RATE, CLIP_NORM = 1e-3, 1.0
REPORT_EVERY = 10  # steps
TURNS = 3  # of each form, in the comparison at the end


class Block(nn.Module):
    """Causal attention and an MLP, each behind a layer norm."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nn.make_causal_mask(x[..., 0])
        x = x + nn.MultiHeadDotProductAttention(self.heads)(nn.LayerNorm()(x), mask=mask)
        h = nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x)))
        return x + nn.Dense(x.shape[-1])(h)


class Transformer(nn.Module):
    """A word-level language model whose softmax has the embedding's weights."""

    vocab: int
    dim: int
    layers: int = LAYERS

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        embedding = nn.Embed(self.vocab, self.dim)
        places = self.param("places", nn.initializers.normal(0.02), (ids.shape[1], self.dim))
        x = embedding(ids) + places
        for _ in range(self.layers):
            x = Block(HEADS)(x)
        return embedding.attend(nn.LayerNorm()(x))


def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
    """An ordinary step."""

    def loss_of(params: Any) -> jax.Array:
        logits = state.apply_fn({"params": params}, batch["inputs"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    loss, grads = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss, "grad_norm": optax.tree.norm(grads)}


def run(parser: argparse.ArgumentParser, args: argparse.Namespace, screen: Screen) -> None:
    """Trains in `args.pipeline` stages, and compares the pipeline with the plain step."""
    try:
        corpus = load_corpus(args.corpus, args.vocab or VOCABULARY)
        windows = held_out_windows(corpus, tokens=4096, length=args.length)
        data = _without_negatives(batches(corpus, batch=args.batch, length=args.length, negatives=1, seed=args.seed))
    except CorpusError as error:
        parser.error(str(error))
    model = Transformer(len(corpus.words), args.dim)
    tx = optax.chain(optax.clip_by_global_norm(CLIP_NORM), optax.adam(args.learning_rate or RATE))

    def make_state() -> TrainState:
        params = jax.jit(model.init)(jax.random.key(args.seed), jnp.zeros((1, args.length), jnp.int32))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    asynchronous = args.schedule in ASYNCHRONOUS
    count = None if asynchronous else MICROBATCHES
    pipeline = autopar.Pipeline(stages=args.pipeline, schedule=args.schedule, microbatches=count)
    step = autopar.parallelize(train_step, pipeline=pipeline)
    state = make_state()
    screen.print(autopar.explain(step, state, next(data)))
    screen.print()
    held_out = _perplexity(model, windows)
    screen.print(f"held-out perplexity before training: {held_out(state.params):,.0f}")
    with screen.training(args.steps) as update:
        start, words = time.perf_counter(), 0
        for done, batch in enumerate(islice(data, args.steps), 1):
            state, metrics = step(state, batch)
            words += batch["inputs"].size
            if done <= 2:  # it compiles, for the state as it is made and as it comes back
                jax.block_until_ready(metrics)
                start, words = time.perf_counter(), 0
            elif metrics is not None and (done % REPORT_EVERY == 0 or done == args.steps):
                loss = float(metrics["loss"])  # waits for the step
                update(done, words / (time.perf_counter() - start), loss)
    state = autopar.drain(state)  # of a schedule without a flush, minibatches are on their way
    screen.print(f"held-out perplexity after {args.steps:,} steps: {held_out(state.params):,.0f}")
    del state
    screen.print()
    screen.print("timing the plain train step on one device beside the pipeline ...")
    forms = {
        "plain jax.jit": Form(jax.jit(train_step, donate_argnums=0), make_state),
        f"{args.pipeline} stages, {args.schedule}": Form(step, make_state, asynchronous=asynchronous),
    }
    screen.print(compare(forms, data, TURNS))


def _without_negatives(data: Iterator[Batch]) -> Iterator[Batch]:
    """A full softmax needs none."""
    return ({name: batch[name] for name in ("inputs", "targets")} for batch in data)


def _perplexity(model: Transformer, windows: Batch) -> Callable[[Any], float]:
    """Of parameters on whichever devices."""
    losses = jax.jit(
        lambda params, batch: optax.softmax_cross_entropy_with_integer_labels(
            model.apply({"params": params}, batch["inputs"]), batch["targets"]
        ).mean()
    )

    def perplexity(params: Any) -> float:
        return float(np.exp(losses(jax.device_put(params, jax.devices()[0]), windows)))

    return perplexity
