"""A small GPT on words with memories of bigrams and trigrams beside it, after Engram (arXiv 2601.07372).

    python examples/ngram_memory.py                              the tables on this machine's device
    python examples/ngram_memory.py --memory hosts --compare     in host memory; timed beside plain JAX
    mpirun -n 2 python examples/ngram_memory.py --memory hosts   each process has half of the rows

The last two and three words are hashed, several times, to rows of a table each; what these rows say is gated by what
the model knows so far, and added to it. A step touches some per cent of the rows, and AdamW moves all of them: autopar
trains the rows that are touched, and gives the numbers of plain JAX. A model without memories is trained beside it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from compare import Form, compare
from corpus import Batch, held_out_windows, load_corpus, windows
from flax.training.train_state import TrainState
from transformer import Block

import autopar

STRATEGIES: dict[str, Any] = {"devices": "auto", "hosts": {"params/memory*": ("ps", "hosts")}}
PRIMES = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)  # for the word itself, the one before it, and the one before that


def hashed(ids: jax.Array, words: int, heads: int, rows: int) -> jax.Array:
    """[batch, length] ids -> [batch, length, heads] row numbers, by each word and the `words` - 1 before it."""
    seeds = jnp.arange(1, 2 * heads, 2, dtype=jnp.uint32)  # odd, so that no bit of a product is lost
    mixed = jnp.zeros((*ids.shape, heads), jnp.uint32)
    for back, prime in enumerate(PRIMES[:words]):
        before = jnp.pad(ids, ((0, 0), (back, 0)))[:, : ids.shape[1]].astype(jnp.uint32)
        mixed = (mixed ^ (before[..., None] + 1) * (seeds * jnp.uint32(prime))) * jnp.uint32(0x27D4EB2F)
        mixed ^= mixed >> 15
    return (mixed % rows).astype(jnp.int32)


class GPT(nn.Module):
    """[batch, length] ids -> [batch, length, vocab] logits of the words that follow."""

    vocab: int
    layers: int
    dim: int
    rows: int  # of each memory; 0: no memories
    width: int
    heads: int  # rows of each memory for a word

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        positions = self.param("positions", nn.initializers.normal(0.02), (ids.shape[1], self.dim))
        x = nn.Embed(self.vocab, self.dim)(ids) + positions
        for layer in range(self.layers):
            if layer == 1 and self.rows:  # behind one layer, so that the gates know something of the text
                x = x + self.remembered(ids, x)
            x = Block(4)(x)
        return nn.Dense(self.vocab)(nn.LayerNorm()(x))

    def remembered(self, ids: jax.Array, x: jax.Array) -> jax.Array:
        """What the rows of each word's bigram and trigram say, as far as the gates let it through: the shape of x."""
        found = []
        for words in (2, 3):
            table = self.param(f"memory_{words}", nn.initializers.normal(0.02), (self.rows, self.width))
            found.append(table[hashed(ids, words, self.heads, self.rows)].reshape(*ids.shape, -1))
        rows = nn.LayerNorm()(jnp.concatenate(found, -1))
        keys, values = nn.LayerNorm()(nn.Dense(self.dim)(rows)), nn.Dense(self.dim)(rows)
        return values * nn.sigmoid((nn.LayerNorm()(x) * keys).sum(-1, keepdims=True) / self.dim**0.5)


def loss_of(state: TrainState, batch: Batch) -> jax.Array:
    logits = state.apply_fn({"params": state.params}, batch["inputs"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
    """An ordinary step for one device. Nothing in it is written for autopar."""
    loss, grads = jax.value_and_grad(lambda params: loss_of(state.replace(params=params), batch))(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss, "grad_norm": optax.tree.norm(grads)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, help="a text file or a folder of them (default: Python's own source)")
    parser.add_argument("--memory", choices=("off", *STRATEGIES), default="devices", help="where the memories are")
    parser.add_argument("--compare", action="store_true", help="time the step with memories beside plain JAX")
    numbers = {"vocab": 4096, "layers": 4, "dim": 128, "rows": 200_000, "width": 64, "heads": 4}
    for name, default in {**numbers, "batch": 16, "length": 32, "steps": 400, "devices": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="default %(default)s")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", args.devices)
    say = print if jax.process_index() == 0 else lambda _: None  # under mpirun, one process prints

    corpus = load_corpus(args.corpus, args.vocab)
    evaluated = held_out_windows(corpus, tokens=8192, length=args.length)
    held_out = {k: x[: len(x) - len(x) % jax.device_count()] for k, x in evaluated.items()}  # which all devices share
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(2e-3, b2=0.95, weight_decay=0.01))

    def data() -> Iterator[Batch]:
        rng = np.random.default_rng(0)
        while True:
            yield windows(corpus.train, rng.integers(len(corpus.train) - args.length, size=args.batch), args.length)

    example = next(data())

    def maker(rows: int) -> Callable[[], TrainState]:
        model = GPT(len(corpus.words), args.layers, args.dim, rows, args.width, args.heads)

        def make_state() -> TrainState:
            params = jax.jit(model.init)(jax.random.key(0), held_out["inputs"])["params"]
            return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

        return make_state

    def train(memory: str) -> float:
        """Trains a model with memories, or without, and returns its last held-out loss."""
        step = autopar.parallelize(train_step, strategy=STRATEGIES.get(memory, "auto"))
        evaluate = autopar.parallelize(loss_of)
        make_state = maker(0 if memory == "off" else args.rows)
        state = autopar.init(make_state, step=step, batch=example)
        for leaf in autopar.explain(step, state, example).rows:
            if leaf.path.startswith("params/memory") and leaf.alpha:
                say(f"{leaf.path}: {leaf.action}; a batch touches {leaf.alpha.share:.2%} of the rows; {leaf.reason}")
        for done, batch in enumerate(islice(autopar.shard(data(), step=step), args.steps), start=1):
            state, metrics = step(state, batch)
            if done % max(1, args.steps // 5) == 0:
                say(f"step {done:>6}   loss {metrics['loss']:.3f}   held out {evaluate(state, held_out):.3f}")
        size, found = sum(x.size for x in jax.tree.leaves(state.params)), float(evaluate(state, held_out))
        say(f"memory {memory}: {size:,} parameters, held-out loss {found:.3f}\n")
        if args.compare and memory != "off":
            del state
            own = Form(step, lambda: autopar.init(make_state, step=step, batch=example))
            forms = {"plain jax.jit": Form(jax.jit(train_step, donate_argnums=0), make_state), "autopar": own}
            say(f"{compare(forms, data(), turns=6)}\n")
        return found

    losses = {memory: train(memory) for memory in dict.fromkeys(("off", args.memory))}
    say(f"held-out loss after {args.steps} steps: " + ", ".join(f"memory {at} {x:.3f}" for at, x in losses.items()))


if __name__ == "__main__":
    main()
