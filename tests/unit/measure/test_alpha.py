"""Ids of an example, of several tables by one program."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from autopar.measure import alpha, figures


def test_ids_of_all_tables_are_those_of_each(monkeypatch: Any) -> None:
    """Where an argument is unknown, the tables that it looks up are left out."""
    state = {name: jnp.ones((rows, 2)) for name, rows in (("a", 300), ("b", 500), ("c", 700))}

    def step(state: Any, batch: Any) -> Any:
        def loss(state: Any) -> jax.Array:
            both = (state["a"][batch["x"] + 1] ** 2).sum() + (state["b"][batch["x"] * 2] * state["b"][batch["y"]]).sum()
            return both + (state["c"][batch["z"]] ** 2).sum()

        return jax.tree.map(lambda p, g: p - 0.1 * g, state, jax.grad(loss)(state))

    x, y = (np.arange(k, k + 8, dtype=np.int32) for k in (3, 90))
    batch = {"x": x, "y": y, "z": jax.ShapeDtypeStruct((8,), jnp.int32)}
    program = autopar.parallelize(step).planned_for(state, {**batch, "z": x}).compiled.analysed
    leaves = jax.tree.leaves((state, batch))
    single = {s.family: alpha.example_ids(program, program.ids[s.family], leaves) for s in program.facts.spaces}
    calls, jit = [], jax.jit
    monkeypatch.setattr(jax, "jit", lambda fun: calls.append(fun) or jit(fun))
    found = figures.looked_up(program, leaves)
    assert len(calls) == 1 and len(found) == 2 and sum(ids is None for ids in single.values()) == 1
    for family, ids in found.items():
        known = single[family]
        assert known is not None and len(ids) == len(known) > 0, "of all its lookups"
        assert all(np.array_equal(a, b) for a, b in zip(ids, known, strict=True))
    assert figures.looked_up(program, None) == {}
