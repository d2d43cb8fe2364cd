"""word2vec: skip-gram with negative samples (Mikolov et al., 2013), on the words of corpus.py.

    python examples/word2vec.py --devices 4
    mpirun -n 2 python examples/word2vec.py

The two tables have a row for each word, of which a step touches a few per cent. At the end the nearest neighbours of
some words are printed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from corpus import Corpus, load_corpus
from flax.training.train_state import TrainState
from rich.progress import track

import autopar

Batch = dict[str, Any]


class SkipGram(nn.Module):
    """Scores pairs of words: a row of one table for the word, a row of the other one for its context."""

    vocab: int
    dim: int

    @nn.compact
    def __call__(self, words: jax.Array, contexts: jax.Array) -> jax.Array:
        """[batch] and [batch, contexts] ids -> [batch, contexts] logits."""
        words = nn.Embed(self.vocab, self.dim, name="words")(words)
        contexts = nn.Embed(self.vocab, self.dim, name="contexts", embedding_init=nn.initializers.zeros)(contexts)
        return jnp.einsum("bd,bcd->bc", words, contexts)


@autopar.parallelize
def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
    def loss_fn(params: Any) -> jax.Array:
        logits = state.apply_fn({"params": params}, batch["words"], batch["contexts"])
        return optax.sigmoid_binary_cross_entropy(logits, batch["labels"]).sum()  # each pair moves its own rows

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss / len(batch["words"])}


def skip_grams(corpus: Corpus, args: argparse.Namespace) -> Iterator[Batch]:
    """Endless batches: words, and for each one word from its window and `--negatives` random ones."""
    rng = np.random.default_rng(args.seed)
    counts = np.bincount(corpus.train, minlength=len(corpus.words))
    # Frequent words are skipped more often (with t = 1e-4), and drawn less often as negatives than they occur.
    kept = np.minimum(1, np.sqrt(1e-4 * len(corpus.train) / np.maximum(counts, 1)))
    text = corpus.train[rng.random(len(corpus.train)) < kept[corpus.train]]
    cumulative = np.cumsum(counts**0.75)
    labels = np.zeros((args.batch, 1 + args.negatives), np.float32)
    labels[:, 0] = 1
    while True:
        places = rng.integers(args.window, len(text) - args.window, args.batch)
        offsets = rng.integers(1, args.window, args.batch, endpoint=True) * rng.choice([-1, 1], args.batch)
        draws = rng.random((args.batch, args.negatives)) * cumulative[-1]
        negatives = np.searchsorted(cumulative, draws, side="right").astype(np.int32)
        contexts = np.concatenate([text[places + offsets, None], negatives], axis=1)
        yield {"words": text[places], "contexts": contexts, "labels": labels}


@autopar.parallelize(batch_axis={"**": None})
def nearest(params: Any, words: jax.Array) -> jax.Array:
    """[words] ids -> [words, 7] ids of the rows with the largest cosines, each word's own first."""
    table = params["words"]["embedding"]
    table /= jnp.linalg.norm(table, axis=1, keepdims=True)
    return jax.lax.top_k(table[words] @ table.T, 7)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, help="a text file or a folder of them (default: Python's own source)")
    parser.add_argument("--vocab", type=int, help="the most frequent N words (default: all seen at least twice)")
    parser.add_argument("--words", nargs="+", help="print the neighbours of these (default: some frequent ones)")
    parser.add_argument("--dim", type=int, default=64, help="width of the tables (default %(default)s)")
    parser.add_argument("--window", type=int, default=5, help="words to either side (default %(default)s)")
    parser.add_argument("--negatives", type=int, default=5, help="for each pair (default %(default)s)")
    parser.add_argument("--batch", type=int, default=4096, help="pairs in a batch (default %(default)s)")
    parser.add_argument("--steps", type=int, default=1000, help="default %(default)s")
    parser.add_argument("--learning-rate", type=float, default=0.1, help="of Adagrad (default %(default)s)")
    parser.add_argument("--devices", type=int, help="CPU devices of each process (default: 1)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.devices:
        jax.config.update("jax_num_cpu_devices", args.devices)
    say = print if jax.process_index() == 0 else lambda _: None  # under mpirun, one process prints

    corpus = load_corpus(args.corpus, args.vocab)
    batches, example = autopar.shard(skip_grams(corpus, args)), next(skip_grams(corpus, args))
    model = SkipGram(len(corpus.words), args.dim)
    tx = optax.adagrad(args.learning_rate)

    def make_state(key: jax.Array) -> TrainState:
        params = model.init(key, example["words"], example["contexts"])["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    state = autopar.init(make_state, jax.random.key(args.seed), step=train_step, batch=example)
    say(autopar.explain(train_step, state, example))
    bar = track(islice(batches, args.steps), "training", args.steps, disable=say is not print)
    for done, batch in enumerate(bar, 1):
        state, metrics = train_step(state, batch)
        if done % max(1, args.steps // 10) == 0:
            say(f"step {done:>6}   loss {metrics['loss']:.3f}")

    words = args.words or corpus.words[20:400:40]
    ids = np.asarray([corpus.words.index(word) for word in words])
    for word, *neighbours in np.asarray(nearest(state.params, ids)):
        say(f"{corpus.words[word]:>16}: {', '.join(corpus.words[k] for k in neighbours)}")


if __name__ == "__main__":
    main()
