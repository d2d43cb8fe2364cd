"""What share of a table's rows workers touch: by hand, by counting, and in plans."""

from __future__ import annotations

import doctest
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.measure.alpha import fit_growth

ROWS = 5000


def step(state: Any, batch: Any) -> Any:
    """Ids of the batch in one table, ids that are drawn by the state's key in another."""
    key, own = jax.random.split(state["key"])
    drawn = jax.random.randint(own, (7,), 0, 300)

    def loss_fn(p: Any) -> Any:
        return jnp.mean(p["emb"][batch["ids"]] ** 2) + jnp.mean(p["drawn"][drawn] ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    return {"params": jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads), "key": key}, loss


def shape(*sizes: int) -> Any:
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


STATE = {"params": {"emb": shape(ROWS, 4), "drawn": shape(300, 4)}, "key": jax.random.key(3)}


def zipf_ids(workers: int, examples: int, seed: int = 0) -> np.ndarray:
    p = np.arange(1.0, ROWS + 1) ** -1.1
    draws = np.random.default_rng(seed).choice(ROWS, (workers, examples, 5), p=p / p.sum())
    return draws.astype(np.int32)


def distinct(ids: np.ndarray) -> int:
    return len(set(ids.ravel().tolist()))


def test_rows_are_counted() -> None:
    """Alone, by machines of 3 and all 8 workers, and the growth's points, counted by sets."""
    ids = zipf_ids(8, 16)
    found = autopar.measure_alpha(autopar.parallelize(step), ({"ids": i} for i in ids), state=STATE, per_machine=3)
    emb = found.table("params/emb")
    counted = {n: np.mean([distinct(ids[k : k + n]) for k in range(0, 9 - n, n)]) for n in (1, 2, 3, 4, 8)}
    assert (emb.worker, emb.machine, emb.union) == (counted[1], counted[3], counted[8])
    assert emb.growth.points == tuple((n, counted[n]) for n in (1, 2, 4, 8))
    assert (emb.growth.ids, emb.workers, emb.share) == (80, 8, counted[8] / ROWS)
    assert emb.growth == fit_growth(ROWS, 80, emb.growth.points)
    assert emb.alpha_at(48) * ROWS == pytest.approx(emb.rows_at(48))
    # All workers of a step draw by the same key.
    own = jax.random.randint(jax.random.split(STATE["key"])[1], (7,), 0, 300)
    drawn = found.table("params/drawn")
    assert (drawn.worker, drawn.union) == (distinct(np.asarray(own)),) * 2 and drawn.rows_at(100) == pytest.approx(
        drawn.worker
    )


def test_growth_holds_for_workers_that_were_held_out() -> None:
    ids = zipf_ids(48, 16, seed=1)
    found = autopar.measure_alpha(autopar.parallelize(step), [{"ids": i} for i in ids[:8]], state=STATE, per_machine=48)
    emb = found.table("params/emb")
    assert emb.rows_at(48) == pytest.approx(distinct(ids), rel=0.1)
    assert emb.machine == emb.rows_at(48), "not measured, so predicted"


def test_shares_of_a_batch_are_workers() -> None:
    ids = zipf_ids(8, 16)
    planned = autopar.parallelize(step)
    by_worker = autopar.measure_alpha(planned, [{"ids": i} for i in ids], state=STATE)
    whole = [(STATE, {"ids": i.reshape(64, 5)}) for i in (ids[:4], ids[4:])]
    assert autopar.measure_alpha(planned, whole, workers=4).table("params/emb") == by_worker.table("params/emb")
    assert planned.latest is None, "the step is left alone"


def test_batches_of_several_sizes() -> None:
    ids = [zipf_ids(1, n, seed=n)[0] for n in (4, 8, 6)]
    found = autopar.measure_alpha(autopar.parallelize(step), [{"ids": i} for i in ids], state=STATE)
    emb = found.table("params/emb")
    assert emb.growth.ids == 5 * 6 and emb.worker == np.mean([distinct(i) for i in ids])
    assert emb.union == len({int(x) for i in ids for x in i.ravel()})


def test_what_is_printed() -> None:
    ids = np.arange(4 * 10, dtype=np.int32).reshape(4, 2, 5)
    found = autopar.measure_alpha(autopar.parallelize(step), [{"ids": i} for i in ids % 20], state=STATE, per_machine=2)
    title, head, *lines = str(found).splitlines()
    assert title.startswith("alpha of step") and "a machine of 2" in head and "all 4" in head
    line = next(line for line in lines if "params/emb" in line)
    assert line.split()[1:8] == ["5000", "10", "(0.20%)", "20", "(0.40%)", "20", "(0.40%)"]
    with pytest.raises(autopar.ArgumentsError, match="'emb' wasn't measured; .* params/drawn, params/emb"):
        found.table("emb")


@pytest.mark.parametrize(
    ("batches", "options", "told"),
    [
        ([{"ids": zipf_ids(1, 4)[0]}], {"state": STATE}, "two workers at least, .* not of 1: give more batches"),
        ([], {"state": STATE}, "not of 0"),
        ([{"ids": zipf_ids(1, 4)[0]}], {}, "a tuple of all of the step's arguments; number 0 is a dict"),
        ([{"ids": zipf_ids(1, 4)[0]}], {"state": STATE, "workers": 0}, "workers=0, per_machine=1: one at least"),
        ([{"ids": zipf_ids(1, 4)[0]}], {"state": STATE, "workers": 3}, "batch 0 .* isn't spread over 3 workers"),
        (
            [{"ids": zipf_ids(1, 4)[0]}, {"ids": jax.ShapeDtypeStruct((4, 5), jnp.int32)}],
            {"state": STATE},
            "batch 1 of measure_alpha: the ids of params/emb aren't known",
        ),
        (
            [{"ids": zipf_ids(1, 4)[0]}] * 2,
            {"state": {**STATE, "key": jax.eval_shape(lambda: jax.random.key(0))}},
            "the ids of params/drawn aren't known: .* .state= as well",
        ),
    ],
)
def test_what_cannot_be_measured(batches: Any, options: Any, told: str) -> None:
    with pytest.raises(autopar.ArgumentsError, match=told):
        autopar.measure_alpha(autopar.parallelize(step), batches, **options)


def test_plans_know_what_more_workers_touch() -> None:
    """A plan for 48 devices of which 8 workers' batches are here: as measured on all 48, nearly."""
    ids, planned = zipf_ids(48, 16, seed=1), autopar.parallelize(step)
    cluster = autopar.Cluster.named("parallax-8x6")
    alphas = autopar.measure_alpha(planned, [{"ids": i} for i in ids[:8]], state=STATE)
    shapes = {"ids": jax.ShapeDtypeStruct((48 * 16, 5), jnp.int32)}
    table = autopar.plan(planned, STATE, shapes, cluster=cluster, alphas=alphas).table("params/emb")
    assert table.growth == alphas.table("params/emb").growth and table.alpha is not None
    assert table.alpha.rows == round(table.growth.rows(48))
    whole = autopar.plan(planned, STATE, {"ids": ids.reshape(-1, 5)}, cluster=cluster).table("params/emb")
    assert whole.alpha is not None and whole.growth is not None
    assert table.alpha.rows == pytest.approx(whole.alpha.rows, rel=0.1)
    assert [n for n, _ in whole.growth.points] == [1, 2, 4, 8, 16, 32, 48] and whole.growth.points[-1][1] == distinct(
        ids
    )
    bound = autopar.plan(planned, STATE, shapes, cluster=cluster).table("params/emb")
    assert bound.growth is None and bound.alpha is not None and not bound.alpha.measured


def test_a_device_of_the_plan_may_have_other_ids_than_a_worker() -> None:
    planned, cluster = autopar.parallelize(step), autopar.Cluster.named("parallax-8x6")
    alphas = autopar.measure_alpha(planned, [{"ids": i} for i in zipf_ids(8, 16)], state=STATE)
    shapes = {"ids": jax.ShapeDtypeStruct((48 * 4, 5), jnp.int32)}  # a quarter of a worker's examples
    table = autopar.plan(planned, STATE, shapes, cluster=cluster, alphas=alphas).table("params/emb")
    assert table.growth is not None and table.growth.ids == 20
    assert table.growth.rows(48) == pytest.approx(alphas.table("params/emb").rows_at(12))


def test_docstring_examples() -> None:
    for name in ("autopar.planning.alpha", "autopar.measure.alpha"):
        found = doctest.testmod(importlib.import_module(name))
        assert found.attempted >= 1 and found.failed == 0
