"""Tables in the memory of one process that a step reads whole, against `jax.jit`. Several ranks: tests/mpi."""

from __future__ import annotations

import ast
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.passes import reduce_tables
from tests.support.explained import explained
from tests.support.host_reads import HOSTS, REDUCED, REFUSED, D, V, all_forms, batch, start, step_of


def compared(step: Any, mine: Any, batches: Any, rtol: float = 1e-5) -> Any:
    """A planned step, each call of which agreed with the plain one."""
    planned, theirs = autopar.parallelize(step, strategy=HOSTS), jax.tree.map(jnp.copy, mine)
    for given in batches:
        mine, told = planned(mine, given)
        theirs, wanted = jax.jit(step)(theirs, given)
        found = jax.tree_util.tree_leaves_with_path((autopar.materialize(mine), told))
        for (path, a), b in zip(found, jax.tree.leaves((theirs, wanted)), strict=True):
            close = {"rtol": rtol, "atol": 1e-5, "err_msg": str(path)}
            np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), **close)
    assert "sparse, ps on hosts" in explained(planned)
    return planned


def test_reductions(monkeypatch: pytest.MonkeyPatch) -> None:
    """By blocks, of which the last one isn't full."""
    monkeypatch.setattr(reduce_tables, "_BLOCK_ELEMENTS", 10 * D)
    planned = compared(step_of(all_forms), start(), [batch(0), batch(1)])
    told = explained(planned)
    assert "on hosts each rank reads the rows that it owns, all of them in every step" in told
    assert "reduce_table" in told and "read whole: " in told


def test_rows_that_are_not_finite() -> None:
    """All rows of the new table are NaN then, those that no batch touched, too."""
    forms = {k: REDUCED[k] for k in ("norm of the new table", "predicates", "extrema", "vdot")}
    step = step_of(lambda *given: [form(*given) for form in forms.values()])
    compared(step, start(), [batch(0), batch(1, np.inf), batch(2)])


def test_narrow_floats() -> None:
    step = step_of(lambda g, t, n: (t.mean(0), n.max(), n.var(), jnp.linalg.norm(n.astype(jnp.float32))))
    compared(step, start(jnp.bfloat16), [batch(0), batch(1)], rtol=2e-2)


def test_slots_and_tables_by_columns() -> None:
    """Norms of the parameters, old and new, and of the optimizer's slots; the rows of one table are its columns."""
    tx = optax.chain(optax.clip_by_global_norm(0.01), optax.adagrad(0.1))

    def step(state: Any, given: Any) -> Any:
        def loss(p: Any) -> jax.Array:
            return ((p["a"][given["ids"]] @ p["w"]) ** 2).mean() + (p["b"][:, given["ids"]] ** 2).mean()

        value, grads = jax.value_and_grad(loss)(state["p"])
        updates, slots = tx.update(grads, state["o"], state["p"])
        new = optax.apply_updates(state["p"], updates)
        trees = {"p": state["p"], "new": new, "grads": grads, "o": state["o"], "slots": slots}
        return {"p": new, "o": slots}, (value, {k: optax.tree.norm(tree) for k, tree in trees.items()})

    shapes = {"a": (V, D), "b": (3, V + 4), "w": (D, 2)}
    params = {k: jnp.asarray(np.random.default_rng(1).normal(size=s), jnp.float32) for k, s in shapes.items()}
    compared(step, {"p": params, "o": tx.init(params)}, [batch(0), batch(1)])


def test_a_slot_that_is_replaced() -> None:
    """Its old rows are read before the new ones are written into them; counters are integers."""

    def step(state: Any, given: Any) -> Any:
        grad = jax.grad(lambda t: (t[given["ids"]] ** 2).mean())(state["t"])
        count = state["count"].at[given["ids"].ravel()].add(1)
        changed = grad - state["last"]
        told = (changed**2).sum(), changed.max(0), count.sum(), count.max(), (count > 0).mean(), state["count"].min()
        return {"t": state["t"] - 0.1 * grad, "last": grad, "count": count}, told

    state = {**start(), "last": jnp.ones((V, D)), "count": jnp.zeros((V,), jnp.int32)}
    compared(step, state, [batch(0), batch(1), batch(2)])


def test_two_tables_of_one_family() -> None:
    def step(state: Any, given: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda s: ((s["a"][given["ids"]] * s["b"][given["ids"]]) ** 2).mean())(state)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, state, grads)
        return new, (loss, jnp.vdot(state["a"], state["b"]), jnp.vdot(new["a"], new["b"]), new["a"].T @ new["b"])

    compared(step, {"a": start()["t"], "b": 1 + start()["t"]}, [batch(0), batch(1)])


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    """When planning, with the line, the table and what to do."""
    form, told = REFUSED[name]
    planned = autopar.parallelize(step_of(form), strategy={"t": HOSTS})
    with pytest.raises(autopar.StrategyError, match=rf"read at once, of t: .*{told}.*host_reads\.py:\d+\)\. \w+ .*or "):
        autopar.explain(planned, start(), batch(0))


#: Table, gradient, new table -> the new value of a slot that can't be on hosts.
SLOTS: dict[str, Any] = {
    "last gradient": lambda t, g, n: g,
    "previous table": lambda t, g, n: t,
    "the new table again": lambda t, g, n: n,
    "sums of rows, as Adafactor's": lambda t, g, n: jnp.broadcast_to((g**2).sum(1)[:, None], g.shape),
}


@pytest.mark.parametrize("name", SLOTS)
def test_slots_that_need_all_rows(name: str) -> None:
    """Nobody can reduce an optimizer's state: the error says how to leave its table on the devices, which works."""

    def step(state: Any, given: Any) -> Any:
        def loss_of(params: Any) -> jax.Array:
            return ((params["a"][given["ids"]] * params["b"][given["ids"]]) ** 2).mean()

        params, slots = state
        loss, grads = jax.value_and_grad(loss_of)(params)
        new = {k: params[k] - 0.1 * grads[k] for k in params}
        return (new, {k: SLOTS[name](params[k], grads[k], new[k]) for k in slots}), loss

    tables = {"a": start()["t"], "b": 1 + start()["t"]}
    state = tables, jax.tree.map(jnp.zeros_like, tables)
    remedy = "leave 0/a and 0/b on the devices, with all slots: strategy=(.*)$"
    told = rf"of 0/.: the new value of 1/a needs them \(.*test_host_reads\.py:\d+\)\. {remedy}"
    with pytest.raises(autopar.StrategyError, match=f"(?i){told}") as refused:
        autopar.explain(autopar.parallelize(step, strategy=HOSTS), state, batch(0))
    assert "Reduce them" not in str(refused.value)
    strategy = ast.literal_eval(str(refused.value).rpartition("strategy=")[2])
    planned = autopar.parallelize(step, strategy=strategy, donate=False)
    pairs = zip(jax.tree.leaves(planned(state, batch(0))), jax.tree.leaves(jax.jit(step)(state, batch(0))), strict=True)
    for mine, theirs in pairs:
        np.testing.assert_allclose(np.asarray(mine), np.asarray(theirs), rtol=1e-5, atol=1e-6)


def test_deferred_tables_that_are_read_whole() -> None:
    """Their untouched rows aren't up to date: that is said when planning."""
    tx = optax.adam(0.1)

    def step(state: Any, given: Any) -> Any:
        loss, grad = jax.value_and_grad(lambda t: (t[given["ids"]] ** 2).mean())(state["t"])
        updates, slots = tx.update(grad, state["o"])
        return {"t": optax.apply_updates(state["t"], updates), "o": slots}, (loss, jnp.linalg.norm(state["t"]))

    state = {**start(), "o": tx.init(start()["t"])}
    with pytest.raises(autopar.StrategyError, match=r"t can't be on hosts: .*test_host_reads\.py:\d+"):
        autopar.explain(autopar.parallelize(step, strategy={"t": HOSTS}), state, batch(0))


def keyed(state: Any, given: Any) -> Any:
    """Each row has a key of its own, drawn anew where it is looked up."""
    ids = given["ids"][:, 0]
    loss, grad = jax.value_and_grad(lambda t: (t[ids] ** 2).mean())(state["t"])
    noise = jax.vmap(jax.random.normal)(state["k"][ids]).sum()
    new = state["k"].at[ids].set(jax.random.split(jax.random.key(0), ids.size))
    return {"t": state["t"] - 0.1 * grad, "k": new}, (loss, noise)


def test_typed_keys() -> None:
    """They can't be in NumPy's memory: an error where hosts are asked for by name; else they stay on the devices."""
    state = {**start(), "k": jax.random.split(jax.random.key(1), V)}
    named = autopar.parallelize(keyed, strategy={"k": HOSTS})
    told = r"k can't be on hosts: k holds typed PRNG keys \(.*test_host_reads\.py:\d+\).*jax\.random\.key_data"
    with pytest.raises(autopar.StrategyError, match=told):
        named(state, batch(0))
    planned, theirs = autopar.parallelize(keyed, strategy=HOSTS), jax.tree.map(jnp.copy, state)
    for i in range(2):
        state, (_, mine) = planned(state, batch(i))
        theirs, (_, wanted) = jax.jit(keyed)(theirs, batch(i))
        np.testing.assert_allclose(mine, wanted, rtol=1e-5)
    assert isinstance(state["t"], autopar.HostTable) and isinstance(state["k"], jax.Array)
    np.testing.assert_array_equal(*(jax.random.key_data(s["k"]) for s in (state, theirs)))
    assert re.search(r"k: dense: k holds typed PRNG keys", explained(planned))
