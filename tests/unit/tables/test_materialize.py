"""`materialize` returns arrays of its own: later steps leave them alone, and they may be donated elsewhere."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.tables.leaf import TableLeaf
from tests.support.interrupting import Loop, lookup_step

CASES = {
    "lifted": (optax.sgd(0.1, momentum=0.9), "lazy", "ps"),
    "deferred": (optax.adam(1e-2), "exact", "ps"),
    "dense": (optax.adam(1e-2), "off", "allreduce"),
    "hosts": (optax.adagrad(0.1), "exact", ("ps", "hosts")),
    "deferred on hosts": (optax.adam(1e-2), "exact", ("ps", "hosts")),
}


@functools.cache
def _case(name: str) -> tuple[Any, Any]:
    tx, sparse, strategy = CASES[name]
    make, step = lookup_step(tx)
    return make, autopar.parallelize(step, sparse=sparse, strategy=strategy)


def trained(name: str) -> Loop:
    make, planned = _case(name)
    loop = Loop(planned, make())
    loop.run(3)
    return loop


@pytest.mark.parametrize("name", CASES)
def test_a_copy_outlives_the_state(name: str) -> None:
    loop = trained(name)
    best = autopar.materialize(loop.state)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(best))
    kept = jax.tree.map(lambda x: np.array(x, copy=True), best)
    loop.run(5)
    jax.tree.map(np.testing.assert_array_equal, best, kept)


@pytest.mark.parametrize("name", CASES)
def test_a_copy_can_be_donated_elsewhere(name: str) -> None:
    loop, twin = trained(name), trained(name)
    copy = autopar.materialize(loop.state)
    scaled = jax.jit(lambda s: jax.tree.map(lambda x: x * 2, s), donate_argnums=0)(copy)
    assert copy["params"]["w"].is_deleted() and copy["params"]["emb"].is_deleted()
    del copy, scaled
    mine, theirs = loop.run(6), twin.run(6)
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["lifted", "deferred"])
def test_without_a_copy_arrays_are_the_states_own(name: str) -> None:
    loop = trained(name)
    read = autopar.materialize(loop.state, copy=False)
    assert read["params"]["w"] is loop.state["params"]["w"]
    np.testing.assert_array_equal(read["params"]["emb"], np.asarray(loop.state["params"]["emb"]))
    loop.run(4)
    assert read["params"]["w"].is_deleted() and read["params"]["emb"].is_deleted()


def test_leaves_of_every_kind() -> None:
    host = np.arange(3.0)
    tree = {
        "host": host,
        "key": jax.random.key(1),
        "keys": jax.random.split(jax.random.key(1), 3),
        "weak": jnp.asarray(1.0) * 1,
        "one": 1.5,
        "none": None,
        "number": np.float32(2),
        "empty": jnp.zeros((0, 3)),
    }
    tree["twice"] = tree["weak"]
    copy = autopar.materialize(tree)
    assert copy["host"] is not host and isinstance(copy["host"], np.ndarray)
    host[:] = 7
    assert copy["host"][2] == 2 and copy["one"] == 1.5 and copy["none"] is None
    assert jnp.array_equal(jax.random.key_data(copy["keys"]), jax.random.key_data(tree["keys"]))
    assert copy["weak"].weak_type == tree["weak"].weak_type
    arrays = [x for x in jax.tree.leaves((tree, copy)) if isinstance(x, jax.Array)]
    pointers = [x.unsafe_buffer_pointer() for x in arrays if x.size and x is not tree["twice"]]
    assert len(set(pointers)) == len(pointers)
    assert jax.eval_shape(lambda t: autopar.materialize(t), {"a": jnp.ones(3)})["a"].shape == (3,)


@pytest.mark.parametrize("name", ["deferred", "hosts"])
def test_tables_are_compared_by_elements(name: str) -> None:
    """As arrays are, whichever stands on the left; a set or a mapping of tables goes by which they are."""
    table = next(x for x in jax.tree.leaves(trained(name).state) if isinstance(x, TableLeaf))
    array = np.asarray(table)
    assert np.all(table == array) and np.all(array == table)
    assert not np.any(table != array) and not np.any(array != table)
    assert not np.any(table == array + 1) and {table: 1}[table] == 1


def test_a_state_that_is_gone_is_named() -> None:
    loop = trained("deferred")
    old: Any = loop.state
    loop.run(4)
    for tree, told in (
        ({"w": old["params"]["w"]}, r"\['w'\] was given to a step"),
        (old["params"]["emb"], "given to a later step"),
    ):
        with pytest.raises(autopar.errors.DonatedStateError, match=told):
            autopar.materialize(tree)
