"""Scatters of one update into arrays that the devices don't divide, which XLA's partitioner gets wrong."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from tests.support.meshes import mesh_of

#: One update alone: each in a program of its own, for others steer how XLA spreads the array.
SINGLE: Mapping[str, Callable[[Any], Any]] = {
    "set": lambda x: x.at[0].set(7.0),
    "last": lambda x: x.at[-1].add(7.0),
    "multiplied": lambda x: x.at[1].multiply(2.0),
    "at most": lambda x: x.at[1].min(-3.0),
    "applied": lambda x: x.at[1].apply(jnp.exp),
    "computed": lambda x: x.at[jnp.argmax(x[:, 0])].set(7.0),
    "an array of one": lambda x: x.at[jnp.array([1])].add(7.0),
    "a slice": lambda x: x.at[1:2].set(7.0),
    "one number": lambda x: x.at[1, 2].set(7.0),
    "out of range": lambda x: x.at[jnp.sum(x > -99)].set(7.0),
    "padded": lambda x: jnp.pad(x, ((1, 0), (0, 0))).at[0].set(5.0),
    "by column": lambda x: jax.vmap(lambda column: column.at[1].set(7.0), 1, 1)(x),
    "integers": lambda x: (x * 9).astype(jnp.int32).at[0].set(-100),
}


@pytest.mark.parametrize("name", SINGLE)
def test_a_scatter_of_one_update(name: str) -> None:
    planned = autopar.parallelize(lambda batch: SINGLE[name](batch["x"]), mesh=mesh_of(4))
    for size in (8, 10):
        x = np.random.default_rng(size).normal(size=(size, 4)).astype(np.float32)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", autopar.RecompileWarning)
            found = planned({"x": x})
        np.testing.assert_allclose(found, jax.jit(SINGLE[name])(x), 1e-6)
