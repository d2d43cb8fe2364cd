"""Language models: an LSTM and a transformer block with sampled softmax, and one with a tied softmax."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

from tests.zoo.case import Case, Tree, concrete, counter, initial_variables, zipf_ids


def _log_uniform(key: jax.Array, shape: tuple[int, ...], rows: int) -> jax.Array:
    """Candidate ids by the log-uniform distribution, the usual one for words sorted by frequency."""
    u = jax.random.uniform(key, shape, jnp.float32)
    return jnp.clip(jnp.floor(jnp.exp(u * np.log(rows + 1.0))).astype(jnp.int32) - 1, 0, rows - 1)


class _SampledSoftmax(nn.Module):
    """Sampled softmax with accidental hits removed; its tables are `table` [V, D] and `bias` [V]."""

    rows: int
    width: int

    @nn.compact
    def __call__(self, hidden: jax.Array, targets: jax.Array, negatives: jax.Array) -> tuple[jax.Array, jax.Array]:
        normal = nn.initializers.normal(0.5)
        table = self.param("table", normal, (self.rows, self.width), jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (self.rows,), jnp.float32)

        def log_expected(ids: jax.Array) -> jax.Array:
            ranks = ids.astype(jnp.float32)
            return jnp.log(jnp.log1p(1 / (ranks + 1)) / np.log(self.rows + 1.0))

        true = jnp.sum(hidden * table[targets], -1) + bias[targets] - log_expected(targets)
        sampled = hidden @ table[negatives].T + bias[negatives] - log_expected(negatives)
        sampled = jnp.where(negatives == targets[..., None], -1e9, sampled)
        logits = jnp.concatenate([true[..., None], sampled], -1)
        loss = -jnp.mean(jax.nn.log_softmax(logits)[..., 0])
        return loss, jnp.sum(jnp.argmax(logits, -1) == 0)


class _LstmLm(nn.Module):
    rows: int
    width: int

    @nn.compact
    def __call__(self, tokens: jax.Array, targets: jax.Array, negatives: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = nn.Embed(self.rows, self.width, name="emb")(tokens)
        x = nn.RNN(nn.OptimizedLSTMCell(6), name="lstm")(x)
        x = nn.Dense(self.width, name="proj")(x)
        return _SampledSoftmax(self.rows, self.width, name="softmax")(x, targets, negatives)


def lstm_lm(tx: optax.GradientTransformation, rows: int = 97) -> Case:
    """LSTM language model, sampled softmax; TrainState, dict batch with the negatives in it."""
    module = _LstmLm(rows, 4)

    def batches(i: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(i)
        text = zipf_ids(rng, (4, 6), rows)
        return {
            "tokens": text[:, :-1],
            "targets": text[:, 1:],
            "negatives": rng.integers(0, rows, (8,), np.int32),
        }

    variables = initial_variables(module, *batches(0).values())
    state = TrainState.create(apply_fn=module.apply, params=variables["params"], tx=tx)

    def step(state: TrainState, batch: Tree) -> tuple[TrainState, Tree]:
        def loss_fn(params: Tree) -> tuple[jax.Array, jax.Array]:
            return state.apply_fn({"params": params}, **batch)

        (loss, correct), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads), "correct": correct}
        return state.apply_gradients(grads=grads), metrics

    tables = ("params/emb/embedding", "params/softmax/bias", "params/softmax/table")
    return Case(step, concrete(state), batches, tables)


class _Transformer(nn.Module):
    """One block over `tokens` [B, T]; `tied` reuses the embedding as the whole softmax's matrix."""

    rows: int
    width: int
    tied: bool

    @nn.compact
    def __call__(
        self, tokens: jax.Array, targets: jax.Array, negatives: jax.Array, train: bool = False
    ) -> tuple[jax.Array, jax.Array]:
        embed = nn.Embed(self.rows, self.width, name="tok_emb")
        position = self.param("position", nn.initializers.normal(0.3), (tokens.shape[1], self.width), jnp.float32)
        x = embed(tokens) + position
        attend = nn.MultiHeadDotProductAttention(2, use_bias=False, name="attention")
        x = x + attend(nn.LayerNorm(use_bias=False)(x), mask=nn.make_causal_mask(tokens))
        y = nn.gelu(nn.Dense(2 * self.width)(nn.LayerNorm(use_bias=False)(x)))
        x = x + nn.Dropout(0.1, deterministic=not train)(nn.Dense(self.width)(y))
        if not self.tied:
            return _SampledSoftmax(self.rows, self.width, name="softmax")(x, targets, negatives)
        logits = embed.attend(x)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return losses.mean(), jnp.sum(jnp.argmax(logits, -1) == targets)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Text:
    """A batch of text as a registered dataclass: `tokens` and `targets`, both int32 [B, T]."""

    tokens: Any
    targets: Any


def _text(i: int, rows: int) -> Text:
    ids = zipf_ids(np.random.default_rng(i), (4, 6), rows)
    return Text(ids[:, :-1], ids[:, 1:])


class _KeyedState(TrainState):
    key: jax.Array


def transformer_sampled(tx: optax.GradientTransformation, rows: int = 83) -> Case:
    """Transformer block, untied sampled softmax: the state's key makes dropout and negatives."""
    module = _Transformer(rows, 4, tied=False)
    text = _text(0, rows)
    variables = initial_variables(module, text.tokens, text.targets, np.zeros((8,), np.int32))
    state = _KeyedState.create(apply_fn=module.apply, params=variables["params"], tx=tx, key=jax.random.key(7))

    def step(state: _KeyedState, batch: Text) -> tuple[_KeyedState, Tree]:
        key, dropout_key, sample_key = jax.random.split(state.key, 3)
        negatives = _log_uniform(sample_key, (8,), rows)

        def loss_fn(params: Tree) -> tuple[jax.Array, jax.Array]:
            return state.apply_fn(
                {"params": params},
                batch.tokens,
                batch.targets,
                negatives,
                train=True,
                rngs={"dropout": dropout_key},
            )

        (loss, correct), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads), "correct": correct}
        return state.apply_gradients(grads=grads, key=key), metrics

    tables = ("params/softmax/bias", "params/softmax/table", "params/tok_emb/embedding")
    return Case(step, concrete(state), lambda i: _text(i, rows), tables)


class Trained(NamedTuple):
    """A state as a NamedTuple."""

    params: Tree
    opt_state: Tree
    step: jax.Array


def transformer_tied(tx: optax.GradientTransformation, rows: int = 59) -> Case:
    """The same block with a tied full softmax, which mixes all rows: nothing may be lifted.

    The batch is a tuple (text, key); the state a NamedTuple.
    """
    module = _Transformer(rows, 4, tied=True)
    text = _text(0, rows)
    params = initial_variables(module, text.tokens, text.targets, np.zeros((8,), np.int32))["params"]

    def batches(i: int) -> tuple[Text, jax.Array]:
        return _text(i, rows), jax.random.key(i)

    def step(state: Trained, batch: tuple[Text, jax.Array]) -> tuple[Trained, Tree]:
        text, key = batch

        def loss_fn(params: Tree) -> tuple[jax.Array, jax.Array]:
            inputs = (text.tokens, text.targets, text.tokens[0])
            rngs = {"dropout": jax.random.fold_in(key, state.step)}
            losses: Any = module.apply({"params": params}, *inputs, train=True, rngs=rngs)
            return losses

        (loss, correct), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {"loss": loss, "perplexity": jnp.exp(loss), "correct": correct}
        return Trained(params, opt_state, state.step + 1), metrics

    return Case(step, concrete(Trained(params, tx.init(params), counter())), batches, ())
