"""Momentum in bfloat16 that is rounded at random, as people write it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax


def momentum_rounded_at_random(rate: float, decay: float = 0.9) -> optax.GradientTransformation:
    """Returns SGD whose momentum is rounded up or down by chance, so that it is right on average."""

    def init(params: Any) -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.bfloat16), params), jnp.zeros((), jnp.int32)

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        momentum, count = state
        leaves, tree = jax.tree.flatten(grads)
        keys = jax.tree.unflatten(tree, jax.random.split(jax.random.fold_in(jax.random.key(3), count), len(leaves)))
        whole = jax.tree.map(lambda m, g: decay * m.astype(jnp.float32) + g, momentum, grads)
        return jax.tree.map(lambda m: -rate * m, whole), (jax.tree.map(_rounded, whole, keys), count + 1)

    return optax.GradientTransformation(init, update)


def _rounded(x: jax.Array, key: jax.Array) -> jax.Array:
    drawn = jax.random.bits(key, x.shape, jnp.uint32) & 0xFFFF
    bits = (jax.lax.bitcast_convert_type(x, jnp.uint32) + drawn) & ~jnp.uint32(0xFFFF)
    return jax.lax.bitcast_convert_type(bits, jnp.float32).astype(jnp.bfloat16)
