"""Each way to write an interaction of features is a device's own work, as slices are: nothing more is sent."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.ir.program import known
from autopar.planning.verify import compare_runs
from tests.support.interactions import FORMS, REWRITTEN, make_batch, make_params, slices, step_of
from tests.support.meshes import mesh_of


def planned(*forms: Any) -> Any:
    return autopar.parallelize(step_of(forms), strategy={"t*": "ps"}, mesh=mesh_of(4), donate=False)


@functools.cache
def facts(form: Any, size: int) -> Any:
    """Returns tables of the plan, what is exchanged of the examples, and what is reduced."""
    compiled = planned(form).planned_for(make_params(), make_batch(size)).compiled
    local = known(compiled.program.local)
    assert local.examples_meet is None, local.examples_meet
    tables = [(t.path, t.method, t.lifted, t.reason, t.sizes) for t in compiled.plan.tables]
    return tables, local.gathered, [r.op for r in local.reductions]


@pytest.mark.parametrize("size", [8, 6])
@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_planned_as_slices_are(name: str, size: int) -> None:
    assert facts(FORMS[name], size) == facts(slices, size)


@pytest.mark.parametrize("size", [8, 6])
def test_forms_send_what_slices_send(size: int) -> None:
    """And compute what the plain step computes."""
    given = make_params(), make_batch(size)
    mine = planned(*REWRITTEN)
    found = compare_runs(mine.planned_for(*given), [jax.tree.leaves((given[0], make_batch(size, k))) for k in range(2)])
    assert found.ok, str(found)
    check, expected = autopar.check(mine, *given), autopar.check(planned(slices), *given)
    assert check.ok and expected.ok, f"{check}\n{expected}"
    assert [(r.collective, r.what, r.planned, r.compiled) for r in check.rows] == [
        (r.collective, r.what, r.planned, r.compiled) for r in expected.rows
    ]


def test_bags_of_any_length() -> None:
    """Segments come with the batch: rows go to the devices of their ids, and nothing but sums of bags is exchanged."""
    rows, width, bags, ids = 400, 4, 8, 40

    def step(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            pooled = jax.ops.segment_sum(params["t"][batch["ids"]], batch["bag"], bags)
            return ((jnp.tanh(pooled).sum(1) - batch["y"]) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    rng = np.random.default_rng(0)
    params = {"t": jnp.asarray(rng.normal(size=(rows, width)), jnp.float32)}
    bag = np.sort(rng.integers(0, bags + 1, ids)).astype(np.int32)  # the last ones are in no bag
    batch = {"ids": rng.integers(0, rows, ids).astype(np.int32), "bag": bag, "y": rng.normal(size=bags)}
    mine = autopar.parallelize(step, strategy={"t": "ps"}, mesh=mesh_of(4), donate=False)
    compiled = mine.planned_for(params, batch).compiled
    (table,), local = compiled.plan.tables, known(compiled.program.local)
    assert table.lifted and table.method == "ps"
    assert [g.nbytes for g in local.gathered] == [4 * bags * width]
    assert [r.type.shape for r in local.reductions if r.type.shape[:1] == (bags,)] == [(bags, width)]
    assert autopar.verify(mine, params, batch, steps=2).ok
