"""The language model of the Parallax paper (section 6.1, after Jozefowicz et al. 2016), in small, with Flax linen.

Words are looked up in an embedding table, read by an LSTM, projected back to the embedding's width, and compared with
the rows of a softmax table of its own, plus a bias table. Training scores the true word against a few sampled ones
(sampled softmax, Jean et al. 2015), so that a step touches a few thousand rows of each table; the perplexity is that
of the full softmax. Nothing here knows autopar.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

EVALUATION_CHUNK = 128  # words whose logits over the whole vocabulary are in memory at once


class LanguageModel(nn.Module):
    """A word-level LSTM language model with three tables of `vocab` rows: embedding, softmax and bias."""

    vocab: int
    dim: int
    hidden: int

    def setup(self) -> None:
        self.embedding = nn.Embed(self.vocab, self.dim)
        self.lstm = nn.RNN(nn.OptimizedLSTMCell(self.hidden))
        self.projection = nn.Dense(self.dim)
        self.softmax = nn.Embed(self.vocab, self.dim)
        self.bias = nn.Embed(self.vocab, 1, embedding_init=nn.initializers.zeros)

    def read(self, inputs: jax.Array) -> jax.Array:
        """[batch, length] ids -> [batch, length, dim], each from the words up to there."""
        return self.projection(self.lstm(self.embedding(inputs)))

    def __call__(self, inputs: jax.Array, targets: jax.Array, negatives: jax.Array) -> jax.Array:
        """The mean sampled-softmax loss.

        A sampled word's logit is lowered by the log of how often it is expected among the samples. The loss then
        estimates that of the full softmax, and the common words, sampled most, aren't pushed down for it.
        """
        states = self.read(inputs)
        true = jnp.sum(states * self.softmax(targets), axis=-1) + self.bias(targets)[..., 0]
        true -= log_expected_count(targets, self.vocab, len(negatives))
        sampled = jnp.einsum("btd,nd->btn", states, self.softmax(negatives)) + self.bias(negatives)[..., 0]
        sampled -= log_expected_count(negatives, self.vocab, len(negatives))
        sampled = jnp.where(negatives == targets[..., None], -jnp.inf, sampled)  # no word is its own negative
        logits = jnp.concatenate([true[..., None], sampled], axis=-1)
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - true)

    def log_likelihood(self, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        """[batch, length] log P(target | the words before), over the whole vocabulary."""
        logits = self.softmax.attend(self.read(inputs)) + self.bias.embedding[:, 0]
        return jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]


def log_expected_count(ids: jax.Array, vocab: int, samples: int) -> jax.Array:
    """log of how often each id is expected among `samples` draws of `corpus.log_uniform`."""
    probability = jnp.log1p(1 / (ids + 1)) / jnp.log(vocab + 1)
    return jnp.log(samples * probability)


def perplexity_of(model: LanguageModel) -> Callable[[Any, dict[str, np.ndarray]], float]:
    """The function (params, windows) -> perplexity under the full softmax, computed a few windows at a time."""

    @jax.jit
    def log_likelihood(params: Any, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        return cast(jax.Array, model.apply({"params": params}, inputs, targets, method=model.log_likelihood))

    def perplexity(params: Any, windows: dict[str, np.ndarray]) -> float:
        inputs, targets = windows["inputs"], windows["targets"]
        size = max(1, EVALUATION_CHUNK // inputs.shape[1])
        cuts = range(size, len(inputs), size)
        chunks = zip(np.split(inputs, cuts), np.split(targets, cuts), strict=True)
        total = sum(float(jnp.sum(log_likelihood(params, x, y))) for x, y in chunks)
        return float(np.exp(-total / targets.size))

    return perplexity
