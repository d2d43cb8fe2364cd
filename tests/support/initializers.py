"""Initializers by name, and whether a state made share by share has their bits."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import autopar
from tests.support.meshes import mesh_of


def bits(mine: Any, theirs: Any) -> None:
    assert jax.tree.structure(mine) == jax.tree.structure(theirs)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), mine, theirs)


INITIALIZERS = {
    "truncated": nn.initializers.truncated_normal(0.1),
    "fan": nn.initializers.variance_scaling(1.0, "fan_in", "normal", out_axis=0),
    "glorot": nn.initializers.glorot_uniform(),
    "bfloat16": nn.initializers.normal(1.0, dtype=jnp.bfloat16),
    "zero first row": lambda key, shape: jax.random.normal(key, shape).at[0].set(0.0),
    "by row": lambda key, shape: jax.vmap(lambda k: jax.random.normal(k, shape[1:]))(jax.random.split(key, shape[0])),
}


def check_initializer(kind: str) -> None:
    """Called by `test_whole.py`, with XLA's defaults: others round an initializer with zeros in it otherwise."""

    def sgd(table: Any, ids: Any) -> Any:
        return table - jax.grad(lambda t: jnp.sum(t[ids].astype(jnp.float32) ** 2))(table), jnp.sum(ids)

    def make(key: Any) -> Any:
        return INITIALIZERS[kind](key, (101, 5))

    planned = autopar.parallelize(sgd, strategy="ps", mesh=mesh_of(4))
    table = autopar.init(make, jax.random.key(1), step=planned, batch=np.arange(8))
    assert isinstance(table, autopar.Table) and table.layout.cyclic
    bits(table, jax.jit(make)(jax.random.key(1)))
