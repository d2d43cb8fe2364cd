"""Steps that a module has by name, to be pickled."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import autopar


def plain(table: Any, ids: Any) -> Any:
    grads = jax.grad(lambda t: (t[ids] ** 2).sum())(table)
    return table - 0.1 * grads, ids.sum()


@autopar.parallelize(strategy="ps")
def decorated(table: Any, ids: Any) -> Any:
    return plain(table, ids)


class Trainer:
    def __init__(self, rate: float) -> None:
        self.rate = rate

    @autopar.parallelize(static_argnums=0)
    def step(self, table: Any, ids: Any) -> Any:
        return table - self.rate * jax.grad(lambda t: (t[ids] ** 2).sum())(table), ids.sum()


def start() -> tuple[Any, Any]:
    return jnp.ones((50_000, 4)), jnp.arange(4)
