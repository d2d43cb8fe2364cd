"""The tree of predictions: its sums are the plan's, and nothing is predicted to be faster than bandwidths allow."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.cost.exchange import step_terms, with_bounds
from autopar.cost.rates import FREE, Curve, bound_rates, planned_rates
from autopar.cost.stage_time import pipeline_seconds
from autopar.ir.cluster import Device, Link
from autopar.ir.figures import Sizes, Term, format_bytes, wire_bytes
from autopar.ir.strategy import HOSTED, OPTIMIZATIONS
from autopar.measure.cluster import Cluster
from autopar.planning.predictions import Prediction, predict, predict_method

#: 1 GFLOP/s, half of which is reached; 1 GB/s of memory; links of 0.1 GB/s that take 1 ms a message.
CLUSTER = Cluster("chalk", 4, 1, Device("chalk", 1e9, 1e9, 1e9), Link(1e-3, 1e9), Link(1e-3, 1e8), 1e9)
SIZES = Sizes(4, 1000, 40, 80, 50, 40, 200, 20, 80, checks=True)


def step(state: Any, batch: Any) -> Any:
    def loss_fn(p: Any) -> jax.Array:
        return jnp.mean((p["items"][batch] @ p["w"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss


def planned(distinct: int = 701, **options: Any) -> autopar.Plan:
    state = {"items": jax.ShapeDtypeStruct((20_000, 32), "float32"), "w": jax.ShapeDtypeStruct((32, 32), "float32")}
    batch = np.arange(4 * 256, dtype=np.int32) % distinct
    cluster = None if "sync" in options else CLUSTER
    return autopar.plan(autopar.parallelize(step, **options), state, batch, cluster=cluster)


def layers(params: Any, x: Any) -> Any:
    def loss(p: Any) -> Any:
        y = x
        for w in p:
            y = jnp.tanh(y @ w)
        return jnp.mean(y**2)

    value, g = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, g), value


@pytest.mark.parametrize("op", ["all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute"])
def test_bytes_of_collectives_by_hand(op: str) -> None:
    found = {n: wire_bytes(op, n, 60) for n in (2, 3, 4)}
    by_hand = {
        "all-reduce": {2: 60, 3: 80, 4: 90},
        "all-gather": {2: 30, 3: 40, 4: 45},
        "all-to-all": {2: 30, 3: 40, 4: 45},
        "reduce-scatter": {2: 60, 3: 120, 4: 180},
        "collective-permute": {2: 60, 3: 60, 4: 60},
    }
    assert found == by_hand[op] and wire_bytes(op, 1, 60) == 60 * (op == "collective-permute")


@pytest.mark.parametrize(
    "curve",
    [
        Curve(((10.0, 5.0),)),
        Curve(((10.0, 5.0), (100.0, 20.0))),
        Curve(((1.0, 5.0), (10.0, 3.0), (1000.0, 400.0), (2000.0, 300.0))),
        Curve(((0.0, 1.0), (10.0, 2.0), (20.0, 30.0))),
        FREE,
    ],
)
def test_a_bound_is_nowhere_above_its_curve(curve: Curve) -> None:
    bound, sizes = curve.bound, [*np.geomspace(0.5, 1e5, 300), *(size for size, _ in curve.points)]
    assert bound(0) == 0 and all(bound(size) <= curve(size) * (1 + 1e-12) for size in sizes)
    ratios = [curve(size) / bound(size) for size in sizes if bound(size)]
    assert curve == FREE or min(ratios) == pytest.approx(1)


def test_bounds_are_bytes_over_bandwidth() -> None:
    terms = step_terms(planned_rates(CLUSTER), SIZES)
    bounded = with_bounds(terms, step_terms(bound_rates(CLUSTER), SIZES))
    assert bounded == terms, "bounds stand beside what is predicted, and change nothing of it"
    for method, own in bounded.items():
        for term in own:
            assert term.bound_s is not None and 0 <= term.bound_s <= term.seconds * (1 + 1e-6), (method, term)
            if term.collective:
                assert term.bound_s == pytest.approx(term.sent / CLUSTER.between.bytes_s, rel=1e-3), (method, term)
    (reduced,) = [term for term in bounded["allreduce"] if term.collective]
    assert reduced.sent == 2 * 3 * 1000 * 40 // 4


def test_the_tree_of_a_step_on_devices() -> None:
    made = planned(strategy="ps")
    tree = predict(made)
    assert tree.name == "step" and tree.source == "figures of chalk"
    assert [part.name for part in tree.parts] == list(made.parts)
    assert tree.seconds == pytest.approx(made.seconds) and tree.bound_s is not None and tree.seconds is not None
    assert 0 < tree.bound_s < tree.seconds and tree.sent == sum(term.sent for term in tree.terms) > 0
    (table,) = made.families
    assert made.parts["tables"] == table.terms["ps"] and set(table.bounds) == set(table.terms)
    told = str(autopar.why(made, "items", "allreduce"))
    assert f"(at least {1e3 * table.bounds['allreduce']:.3f})" in told
    simulated = autopar.simulate(made, devices=[4]).times[0]
    assert 0 < simulated.bound_s < simulated.seconds and "at least" in str(autopar.simulate(made))


@pytest.mark.parametrize("strategy", ["ps", "allgather", {"items": ("ps", "hosts")}])
def test_tables_and_why_have_the_same_sizes(strategy: Any) -> None:
    """Of a batch that has rows twice, so that a rank's messages are shorter than a device's."""
    (table,) = planned(distinct=100, strategy=strategy).families
    assert len(table.sent) > 2 and table.sizes is not None and table.sizes.on_devices().requested == 256
    for method, sent in table.sent.items():
        found = predict_method(table, method)
        assert found is not None and found.sent == sent > 0, method
    assert table.sent["allgather"] > 0.9 * 3 * 256 * 32 * 4


def test_a_file_has_no_bounds(tmp_path: Any) -> None:
    made = planned(strategy="ps")
    made.save(tmp_path / "plan.json")
    again = autopar.Plan.load(tmp_path / "plan.json")
    assert again == made and "bound" not in (tmp_path / "plan.json").read_text()
    tree = predict(again)
    assert (tree.seconds, tree.sent, tree.bound_s) == (predict(made).seconds, predict(made).sent, None)
    assert "at least" not in str(autopar.why(again, "items", "allreduce"))


def narrow(state: Any, batch: Any) -> Any:
    def loss_fn(p: Any) -> jax.Array:
        return jnp.mean((p["items"][batch][..., :8] @ p["w"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    return jax.tree.map(lambda p, g: p - 0.1 * g / jnp.maximum(norm, 1.0), state, grads), loss


@pytest.mark.parametrize("on", [(), ("border",), ("hybrid", "local", "owner"), OPTIMIZATIONS])
def test_why_and_reports_have_what_optimize_leaves_out(on: tuple[str, ...], tmp_path: Path) -> None:
    """And what that costs each table, in the bytes that exchanges have."""
    state = {"items": jax.ShapeDtypeStruct((20_000, 32), "float32"), "w": jax.ShapeDtypeStruct((8, 32), "float32")}
    batch, cluster = np.arange(4 * 256, dtype=np.int32) % 701, CLUSTER.of(2, 2)
    hosted = autopar.parallelize(narrow, strategy={"items": ("ps", "hosts")}, optimize=on)
    made = autopar.plan(hosted, state, batch, cluster=cluster)
    items, found = made.table("items"), autopar.why(made, "items", "allgather")
    off = [name for name in OPTIMIZATIONS if name not in on]
    assert list(found.left_out) == off and str(found).count("optimize= leaves out ") == len(off)
    back = [term.sent for term in items.terms[HOSTED] if term.name == "and back"]
    expected = {
        "hybrid": "",
        "local": r"of its rows that cross machines \d+% wouldn't",
        "owner": f"sums of its gradients go by way of the first rank, which sends {format_bytes(sum(back))} more",
        "border": r"with it slice \(.*\) runs at the rows' owners, who send 32 B a row in place of 128 B; .* pad .*",
        "prefetch": "its rows are fetched in the step that needs them; .*",
        "once": "what depends on its rows alone is computed for each lookup; .*",
    }
    for name, cost in found.left_out.items():
        assert re.fullmatch(expected[name], cost), (name, cost)
        assert f"optimize= leaves out {name!r}: {cost or 'nothing is at stake for this table'}" in str(found)
    assert bool(back) is ("owner" not in on)
    if "hybrid" in off:
        cost, weight = autopar.why(made, "w", "allreduce").left_out["hybrid"], made.table("w")
        pulled, reduced = (sum(t.sent for t in weight.terms[method]) for method in (HOSTED, "allreduce"))
        assert cost.startswith(f"{format_bytes(pulled)} are sent for it in place of {format_bytes(reduced)}")
    page = autopar.report(made)
    assert ("optimisations" in page.tables) is bool(off)
    assert (f"optimize= is {made.optimize!r}" in "".join(page.notes)) is bool(off)
    assert all(f"<td>{name}</td>" in page._repr_html_() for name in off)
    made.save(tmp_path / "plan.json")
    again = autopar.why(autopar.Plan.load(tmp_path / "plan.json"), "items", "allgather").left_out
    asked = {"border": "explain(step, ...) says what it would do"} if "border" in off else {}
    assert again == {**found.left_out, **asked}, "a file doesn't have what would move"


def test_the_tree_of_stages() -> None:
    params = [jax.ShapeDtypeStruct((512, 512), "float32")] * 4
    staged = autopar.parallelize(layers, pipeline=autopar.Pipeline(stages="auto", microbatches=8))
    made = autopar.plan(staged, params, jax.ShapeDtypeStruct((64, 512), "float32"), cluster=CLUSTER)
    assert made.pipeline is not None
    tree = predict(made)
    stages, *rest = tree.parts
    assert len(made.pipeline.stages) == made.pipeline.devices == 4
    assert isinstance(stages, Prediction) and tree.seconds == pytest.approx(pipeline_seconds(made.pipeline))
    assert [term.name for term in rest if isinstance(term, Term)] == ["slowest update", "tied weights"]
    sent = [8 * (stage.ahead_bytes + stage.back_bytes) for stage in made.pipeline.stages]
    assert [part.sent for part in stages.parts] == sent and stages.sent == max(sent) > 0
    flops = max(stage.flops for stage in made.pipeline.stages)
    assert stages.bound_s is not None and 8 * flops / 1e9 <= stages.bound_s < stages.seconds
    untimed = dataclasses.replace(
        made.pipeline, stages=tuple(dataclasses.replace(s, seconds={}) for s in made.pipeline.stages)
    )
    assert predict(dataclasses.replace(made, pipeline=untimed)).seconds is None


def test_the_tree_of_clients() -> None:
    made = planned(sync=autopar.sync.Async())
    assert made.served is not None
    tree = predict(made)
    assert tree.seconds is None and tree.source == "" and tree.sent == made.served.sent_bytes > 0
