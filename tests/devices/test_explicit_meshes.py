"""Steps under a mesh with Explicit axes, which `jax.make_mesh` makes, and within `jax.set_mesh`: plain lookups work."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from tests.support.row_steps import ids_in, make_state, same, step

ROWS = 40


def explicit(*sizes: int) -> Mesh:
    names = ("data", "model")[: len(sizes)]
    kinds = (AxisType.Explicit,) * len(sizes)
    return jax.make_mesh(sizes, names, axis_types=kinds, devices=jax.devices()[: int(np.prod(sizes))])


def placed(tree: Any, mesh: Mesh, spec: Any) -> Any:
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, spec(x))), tree)


def by_rows(leaf: Any) -> P:
    return P("data") if np.ndim(leaf) and leaf.shape[0] == ROWS else P()


def replicated(leaf: Any) -> P:
    return P()


def examples(leaf: Any) -> P:
    return P("data")


@pytest.mark.parametrize(
    ("sizes", "spec", "within"),
    [
        ((1,), replicated, True),
        ((4,), None, True),
        ((4,), by_rows, True),
        ((2, 2), replicated, True),
        ((2, 2), by_rows, False),
    ],
)
def test_lookups_work_unchanged(sizes: tuple[int, ...], spec: Any, within: bool) -> None:
    """The numbers are the plain step's, and what the step returns can be computed with within `set_mesh`."""
    mesh = explicit(*sizes)
    planned = autopar.parallelize(step, strategy="ps", mesh=mesh)
    state = make_state(ROWS) if spec is None else placed(make_state(ROWS), mesh, spec)
    theirs = make_state(ROWS)
    with jax.set_mesh(mesh) if within else contextlib.nullcontext():
        for k in range(2):
            state, metrics = planned(state, placed(ids_in(k, ROWS), mesh, examples))
        mine = jax.tree.map(lambda x: 2 * x, (autopar.materialize(state), metrics))
    for k in range(2):
        theirs, plain = jax.jit(step)(theirs, ids_in(k, ROWS))
    same(mine, jax.tree.map(lambda x: 2 * x, (theirs, plain)))
    assert planned.plan is not None and [p.path for p in planned.plan.parameters if p.lifted] == ["params/emb"]


def test_what_there_is_to_do_with_a_deferred_table() -> None:
    """It is read by rows and as a whole, and verified, within `set_mesh`; a step that says where values are is told."""
    tx = optax.adam(0.1)

    def train(state: Any, batch: Any) -> Any:
        loss, g = jax.value_and_grad(lambda p: jnp.mean(p[batch["ids"]] ** 2))(state["t"])
        updates, opt = tx.update(g, state["opt"], state["t"])
        return {"t": optax.apply_updates(state["t"], updates), "opt": opt}, loss

    mesh, table = explicit(4), jnp.arange(6000.0).reshape(2000, 3)
    batch = placed(ids_in(0, ROWS), mesh, examples)
    with jax.set_mesh(mesh):
        planned = autopar.parallelize(train, strategy="ps", donate=False, mesh=mesh)
        state, _ = planned({"t": table, "opt": tx.init(table)}, batch)
        assert isinstance(state["t"], autopar.DeferredTable)
        read = [state["t"][np.arange(ROWS)], np.asarray(0 + state["t"])[:ROWS], np.asarray(state["t"])[:ROWS]]
        assert autopar.verify(planned, state, batch).ok
        moved = autopar.parallelize(lambda t, b: (t + jax.sharding.reshard(b["ids"], P()).sum(), 0.0), mesh=mesh)
        with pytest.raises(ValueError, match="mesh") as raised:
            moved(table, batch)
    assert "Leave reshard and out_sharding= out of the step" in raised.value.__notes__[-1]
    want, _ = jax.jit(train)({"t": table, "opt": tx.init(table)}, ids_in(0, ROWS))
    for rows in read:
        np.testing.assert_allclose(np.asarray(rows), np.asarray(want["t"])[:ROWS], rtol=1e-5)
