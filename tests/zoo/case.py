"""What a test case is, and what all the zoo's steps are built from.

Everything is float32 (also under x64), every leaf of a state is a concrete `jax.Array`, and unless a
case says otherwise no two leaves share a buffer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

Tree = Any
Step = Callable[[Tree, Tree], tuple[Tree, Tree]]


@dataclass(frozen=True)
class Case:
    """A train step with what is needed to run it, and the tables that it has.

    Attributes:
      step: `(state, batch) -> (state, metrics)`, not jitted.
      state: the initial state, concrete.
      batches: the i-th batch, the same at every call; ids are int32 and Zipf-distributed.
      tables: the `key_path`s within `state` of the parameters in question (see `Model`, `Variant`).
    """

    step: Step
    state: Tree
    batches: Callable[[int], Tree]
    tables: tuple[str, ...]


def key_path(path: tuple[Any, ...]) -> str:
    """A pytree path as text, `params/emb/embedding`: names, dict keys and sequence indices."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def zipf_ids(rng: np.random.Generator, shape: tuple[int, ...], rows: int) -> np.ndarray:
    """int32 ids in [0, rows), a few of them very frequent, as words are."""
    return (np.minimum(rng.zipf(1.3, size=shape), rows) - 1).astype(np.int32)


def concrete(tree: Tree) -> Tree:
    """The tree with each leaf a jax.Array of its own buffer and of a strong dtype."""

    def leaf(x: Any) -> jax.Array:
        x = jnp.asarray(x)
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return x if is_key else jnp.array(x, dtype=x.dtype)

    return jax.tree.map(leaf, tree)


def initial_variables(module: nn.Module, *inputs: np.ndarray) -> Tree:
    """Variables of a module, drawn by NumPy: nothing to compile, and the same with every JAX."""
    rng = np.random.default_rng(0)

    def leaf(path: tuple[Any, ...], shape: jax.ShapeDtypeStruct) -> np.ndarray:
        name = path[-1].key
        if name in ("scale", "mean", "var"):
            return np.full(shape.shape, name != "mean", shape.dtype)
        spread = {"kernel": np.prod(shape.shape[:-1]) ** -0.5, "bias": 0.1}.get(name, 0.5)
        return rng.normal(0, spread, shape.shape).astype(shape.dtype)

    shapes = jax.eval_shape(module.init, jax.random.key(0), *inputs)
    return concrete(jax.tree_util.tree_map_with_path(leaf, shapes))


def counter() -> jax.Array:
    return jnp.zeros((), jnp.int32)
