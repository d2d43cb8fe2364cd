"""An nnx model, its step, and what its objects hold."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

ROWS = 5000


class Model(nnx.Module):
    def __init__(self, seed: int = 0) -> None:
        rngs = nnx.Rngs(seed)
        self.emb = nnx.Embed(ROWS, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)
        self.out = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        return self.out(self.drop(self.norm(self.emb(ids))))[..., 0]


def batches(count: int = 3) -> list[dict[str, jax.Array]]:
    rng = np.random.default_rng(0)
    return [
        {"ids": jnp.asarray(rng.integers(0, ROWS, 8)), "y": jnp.asarray(rng.normal(size=8), jnp.float32)}
        for _ in range(count)
    ]


def loss_of(model: Any, batch: Any) -> jax.Array:
    return jnp.mean((model(batch["ids"]) - batch["y"]) ** 2)


def train_step(model: Any, optimizer: Any, metrics: Any, batch: Any) -> jax.Array:
    loss, grads = nnx.value_and_grad(loss_of)(model, batch)
    optimizer.update(model, grads)
    metrics.update(values=loss)
    return loss


def objects(tx: Any, model: Any = None) -> tuple[Any, Any, Any]:
    model = Model() if model is None else model
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param), nnx.metrics.Average()


def arrays(*nodes: Any) -> dict[str, np.ndarray]:
    """Values of objects by path."""
    found = {}
    for k, node in enumerate(nodes):
        for path, leaf in nnx.to_flat_state(nnx.state(node)):
            raw = leaf.get_raw_value()
            raw = jax.random.key_data(raw) if jnp.issubdtype(raw.dtype, jax.dtypes.prng_key) else raw
            found["/".join(map(str, (k, *path)))] = np.asarray(raw)
    return found


def check_same(mine: Any, plain: Any) -> None:
    a, b = arrays(*mine), arrays(*plain)
    assert a.keys() == b.keys()
    for path in b:
        np.testing.assert_allclose(a[path], b[path], rtol=2e-5, atol=2e-6, err_msg=path)
