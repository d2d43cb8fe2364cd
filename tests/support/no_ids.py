"""Steps whose batches have no ids: each kind of lookup in a table of its own, all in one step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from tests.zoo.lookups import _OUT_OF_RANGE_LOOKS, LOOKS
from tests.zoo.single import IDS, ROWS, Batch, make_params

#: Kinds that differ in what is emitted.
_KINDS = (
    "plain",
    "computed_ids",
    "take_along_axis",
    "element_gather",
    "vmapped",
    "transposed",
    "checkpoint",
    "scan",
    "scan_of_checkpoint",
    "cond",
    "one_hot_matmul",
    "one_hot_einsum",
    "one_hot_checkpoint",
    "get_fill",
    "take_wrap",
)
_EACH = {name: {**LOOKS, **_OUT_OF_RANGE_LOOKS}[name] for name in _KINDS}
#: No examples; examples without ids; one axis alone.
SHAPES = ((0, 5), (IDS[0], 0), (0,))


def _step(state: Any, batch: Batch) -> Any:
    def loss_of(state: Any) -> Any:
        looked = {name: _EACH[name](p, batch) for name, p in state.items()}
        return sum(jnp.sum(jnp.tanh(h @ state[name]["w"]) ** 2) for name, h in looked.items()), looked

    (loss, looked), grads = jax.value_and_grad(loss_of, has_aux=True)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), (loss, looked)


def difference(shape: tuple[int, ...], **options: Any) -> float:
    """The largest difference of what a planned step returns for ids of this shape from the plain step's."""
    batch = {"ids": np.zeros(shape, np.int32)}
    fits = {name for name in _EACH if _has_shapes(name, batch)}
    state = {name: make_params(emb=(ROWS, 4)) for name in fits}
    ours = autopar.parallelize(_step, donate=False, **options)(state, batch)
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(jax.jit(_step)(state, batch)), strict=True)
    return max(float(np.max(np.abs(np.asarray(autopar.materialize(a)) - b), initial=0)) for a, b in pairs)


def _has_shapes(name: str, batch: Batch) -> bool:
    """Whether a kind of lookup takes ids of this shape in plain JAX."""
    try:
        jax.eval_shape(_step, {name: make_params(emb=(ROWS, 4))}, batch)
    except (TypeError, ValueError):
        return False
    return True
