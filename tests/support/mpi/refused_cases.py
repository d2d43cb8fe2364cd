"""What can't be on hosts, or beside tables there, and what is said then; run with `host_cases.py`."""

from __future__ import annotations

from typing import Any

import autopar  # first: it makes the ranks JAX's processes

# isort: split
import jax
import jax.numpy as jnp
import numpy as np

from autopar.tables.host import HostTable
from tests.support.host_reads import HOSTS

RANKS = jax.process_count()


def check_what_cannot_be() -> None:
    """Tables that can't be lifted can't be on hosts: the message says so."""

    def tied(table: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        def loss(t: jax.Array) -> jax.Array:
            return jax.nn.logsumexp(t[ids] @ t.T, -1).sum()

        value, grad = jax.value_and_grad(loss)(table)
        return table - 0.1 * grad, value

    def two(state: Any, ids: jax.Array) -> Any:
        grads = jax.grad(lambda s: (s["a"][ids] * s["b"][ids // 2]).sum() + jnp.sum(s.get("w", 0.0) ** 2))(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads)

    ids, table = np.arange(24, dtype=np.int32), jnp.ones((40, 3))
    tables = {"a": jnp.ones((400, 3)), "b": jnp.ones((41, 3))}
    wanted = jax.jit(two)(tables, ids)
    left = autopar.parallelize(two, strategy={"a": HOSTS})(jax.tree.map(jnp.copy, tables), ids)  # "b" is left to "auto"
    assert isinstance(left["a"], HostTable)
    np.testing.assert_allclose(np.asarray(left["b"]), wanted["b"], rtol=1e-6)
    if RANKS > 1:
        try:
            autopar.parallelize(two, strategy={"a": HOSTS, "b": "ps"})(tables, ids)
        except autopar.StrategyError as error:
            assert "b can't be trained with 'ps' on devices beside tables on the hosts" in str(error), str(error)
        else:
            raise AssertionError("a table by its rows on devices is taken beside one on hosts")
        try:
            autopar.parallelize(two, strategy={"a": HOSTS, "b": "allreduce", "w": "ps"})({**tables, "w": table}, ids)
        except autopar.StrategyError as error:
            assert "w can't be in shards on devices ('ps') beside tables" in str(error), str(error)
        else:
            raise AssertionError("weights in shards on devices are taken beside a table on hosts")
    for strategy, told in (
        ({"table": HOSTS}, "table can't be on hosts: reduce_max over all rows"),
        ({"table": ("allgather", "hosts")}, "tables on hosts are trained by 'ps' only"),
        ({"tabel": HOSTS}, "'tabel' matches no parameter"),
    ):
        try:
            autopar.parallelize(tied, strategy=strategy)(table, ids)
        except autopar.StrategyError as error:
            assert told in str(error), str(error)
        else:
            raise AssertionError(f"{strategy} is taken")


def check_loops_that_cannot_be() -> None:
    """Loops and branches that exchange rows, or look them up and add to them: refused where there are other ranks."""
    ids = np.arange(24, dtype=np.int32)

    def looped(state: Any, ids: jax.Array) -> Any:
        def train(_: Any, state: Any) -> Any:
            params, _ = state
            grads = jax.grad(lambda p: (p["a"][ids] @ p["w"]).sum())(params)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), grads["w"] * params["w"]

        return jax.lax.fori_loop(0, 2, train, state)

    def added_up(state: Any, ids: jax.Array) -> Any:
        """Gradients of rows that all ranks look up, at each turn."""
        params, _ = state

        def turn(total: Any, ids: jax.Array) -> Any:
            grads = jax.grad(lambda p: ((p["a"][: len(ids)] + ids[:, None]) @ p["w"]).sum())(params)
            return jax.tree.map(jnp.add, total, grads), None

        grads, _ = jax.lax.scan(turn, jax.tree.map(jnp.zeros_like, params), jnp.stack([ids, ids]))
        return (jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), grads["w"])

    def accumulated(state: Any, ids: jax.Array) -> Any:
        """Microbatches that one rank has each."""
        params, _ = state

        def turn(total: Any, ids: jax.Array) -> Any:
            grads = jax.grad(lambda p: jnp.tanh(p["a"][ids] @ p["w"]).mean())(params)
            return jax.tree.map(jnp.add, total, grads), None

        grads, _ = jax.lax.scan(turn, jax.tree.map(jnp.zeros_like, params), ids.reshape(RANKS, -1))
        return (jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), grads["w"])

    params = {"a": jnp.ones((400, 3)), "w": jnp.ones((3, 2))}
    for step, told in (
        (looped, "rows are exchanged within a loop or branch"),
        (added_up, "rows are looked up and added to their owners' rows in one loop or branch"),
        (accumulated, "give each of them examples of every rank (x.reshape(-1, n"),
    ):
        try:
            autopar.parallelize(step, strategy={"0/a": HOSTS}, donate=False)((params, params["w"]), ids)
        except autopar.StrategyError as error:
            assert RANKS > 1 and told in str(error), str(error)
        else:
            assert RANKS == 1, f"{told}: it is taken"
