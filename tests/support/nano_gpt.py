"""A small GPT in Flax, in the manner of nanoGPT: a product for queries, keys and values, tied words, decay by mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state

WORDS, BLOCK, WIDTH, HEADS, EXAMPLES = 65, 16, 16, 4, 8


class TrainState(train_state.TrainState):
    """With the key of the dropout masks."""

    key: Any


class Attention(nn.Module):
    """Causal, of several heads."""

    dropout: float

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        examples, length, width = x.shape
        qkv = nn.Dense(3 * width, param_dtype=x.dtype, name="c_attn")(x)
        heads = (examples, length, HEADS, width // HEADS)
        q, k, v = (part.reshape(heads).transpose(0, 2, 1, 3) for part in jnp.split(qkv, 3, -1))
        scores = q @ k.swapaxes(-2, -1) / heads[-1] ** 0.5
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
        weights = nn.Dropout(self.dropout, deterministic=not train)(jax.nn.softmax(scores))
        y = (weights @ v).transpose(0, 2, 1, 3).reshape(x.shape)
        y = nn.Dense(width, param_dtype=x.dtype, name="c_proj")(y)
        return nn.Dropout(self.dropout, deterministic=not train)(y)


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm and beside a residual."""

    dropout: float

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = x + Attention(self.dropout)(nn.LayerNorm(param_dtype=x.dtype)(x), train)
        y = nn.Dense(4 * x.shape[-1], param_dtype=x.dtype, name="c_fc")(nn.LayerNorm(param_dtype=x.dtype)(x))
        y = nn.Dense(x.shape[-1], param_dtype=x.dtype, name="c_proj")(nn.gelu(y))
        return x + nn.Dropout(self.dropout, deterministic=not train)(y)


class GPT(nn.Module):
    """Words -> logits, by the words' own embeddings."""

    layers: int
    dropout: float = 0.0

    @nn.compact
    def __call__(self, words: jax.Array, train: bool = False) -> jax.Array:
        dtype = jax.dtypes.canonicalize_dtype(float)
        embed = nn.Embed(WORDS, WIDTH, param_dtype=dtype, name="wte")
        places = nn.Embed(BLOCK, WIDTH, param_dtype=dtype, name="wpe")(jnp.arange(words.shape[1])[None])
        x = nn.Dropout(self.dropout, deterministic=not train)(embed(words) + places)
        for k in range(self.layers):
            x = Block(self.dropout, name=f"h_{k}")(x, train)
        return embed.attend(nn.LayerNorm(param_dtype=dtype, name="ln_f")(x))


def nano_gpt(layers: int = 4, dropout: float = 0.1) -> tuple[Callable[..., Any], Callable[[], Any]]:
    """A train step, and what makes its state."""
    model = GPT(layers, dropout)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10, 1e-3)

    def decayed(params: Any) -> Any:
        return jax.tree.map(lambda p: p.ndim >= 2, params)

    tx = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=0.1, mask=decayed)
    )

    def step(state: Any, batch: Any) -> Any:
        key = jax.random.fold_in(state.key, state.step)

        def loss_of(params: Any) -> jax.Array:
            logits = state.apply_fn({"params": params}, batch["x"], train=True, rngs={"dropout": key})
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

        loss, grads = jax.value_and_grad(loss_of)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    def make() -> Any:
        params = model.init(jax.random.key(0), jnp.zeros((1, BLOCK), int))["params"]
        state = TrainState.create(apply_fn=model.apply, params=params, tx=tx, key=jax.random.key(1))
        return state.replace(step=jnp.zeros((), int))

    return step, make


def batch(seed: int) -> dict[str, np.ndarray]:
    """Characters, and those that follow."""
    words = np.random.default_rng(seed).integers(0, WORDS, (EXAMPLES, BLOCK + 1))
    return {"x": words[:, :-1], "y": words[:, 1:]}
