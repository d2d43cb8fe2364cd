"""nnx objects on several devices: their Variables hold Tables between steps, and reading them gives the true rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import autopar
from autopar.integrations import nnx as anx
from tests.support.explained import explained
from tests.support.meshes import mesh_of
from tests.support.nnx_steps import batches, check_same, objects, train_step


@pytest.mark.parametrize("method", ["ps", "allgather"])
def test_objects_have_the_values_that_nnx_jit_gives_them(method: str) -> None:
    tx = optax.adagrad(0.1)
    mine, plain = objects(tx), objects(tx)
    step = anx.parallelize(train_step, mesh=mesh_of(4), strategy={"model/emb/*": method, "**": "auto"})
    for batch in batches():
        np.testing.assert_allclose(step(*mine, batch), nnx.jit(train_step)(*plain, batch), rtol=1e-5)
    anx.materialize(*mine)
    check_same(mine, plain)


def test_tables_stay_where_they_are_and_can_be_read() -> None:
    class Odd(nnx.Module):
        def __init__(self) -> None:
            self.emb = nnx.Embed(5003, 4, rngs=nnx.Rngs(0))

        def __call__(self, ids: jax.Array) -> jax.Array:
            return jnp.sum(self.emb(ids), -1)

    tx = optax.adagrad(0.1)
    mine, plain = objects(tx, Odd()), objects(tx, Odd())
    step = anx.parallelize(train_step, mesh=mesh_of(4), strategy={"model/emb/*": "ps", "**": "auto"})
    evaluate = anx.parallelize(lambda model, batch: model(batch["ids"]), mesh=mesh_of(4))
    for batch in batches():
        step(*mine, batch)
        nnx.jit(train_step)(*plain, batch)
        table: Any = mine[0].emb.embedding.get_raw_value()
        assert isinstance(table, autopar.Table)
        np.testing.assert_allclose(evaluate(mine[0], batch), plain[0](batch["ids"]), rtol=1e-5)
        assert mine[0].emb.embedding.get_raw_value() is table
        np.testing.assert_allclose(mine[0](batch["ids"]), plain[0](batch["ids"]), rtol=1e-5)
    assert "ps" in explained(evaluate)
