"""Planning for machines that aren't here: exchanges by hand, and which method wins where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.cost import Cluster, Device, Link
from autopar.cost.collectives import all_gather_s, all_reduce_s, all_to_all_s
from autopar.cost.planned_rates import planned_rates

DEVICE = Device("of chalk", 1e9, 1e12, 100e9)
#: 3 machines of 2 devices; 10 bytes a second inside of a machine, 4 between them, messages take 1 and 2 seconds.
SMALL = Cluster("small", 3, 2, DEVICE, Link(1.0, 10.0), Link(2.0, 4.0), 1e9)


def test_exchanges_by_hand() -> None:
    # inside: 2 messages of 60 / 2; between: 4 of 60 / 3
    assert all_reduce_s(SMALL, 60) == pytest.approx((2 + 60 / 10) + (4 * 2 + 80 / 4))
    # between: what 2 devices of each of 2 other machines have; inside: what the fellow has gathered of 3 machines
    assert all_gather_s(SMALL, 5) == pytest.approx((2 * 2 + 4 * 5 / 4) + (1 + 3 * 5 / 10))
    # between: 2 devices, to 4 others each
    assert all_to_all_s(SMALL, 5) == pytest.approx(max(4 * 2 + 8 * 5 / 4, 1 + 5 / 10))


@pytest.mark.parametrize("cost", [all_reduce_s, all_gather_s, all_to_all_s])
def test_one_device_exchanges_nothing(cost: Any) -> None:
    assert cost(SMALL.of(1, 1), 1e9) == 0


def test_rates_are_those_of_the_exchanges() -> None:
    rates = planned_rates(SMALL)
    for size in (6.0, 6e6, 6e9):
        assert rates.all_reduce(size) == pytest.approx(all_reduce_s(SMALL, size))
        assert rates.all_gather(size) == pytest.approx(all_gather_s(SMALL, size / 6))
        assert rates.all_to_all(size) == pytest.approx(all_to_all_s(SMALL, size / 6))
    assert rates.walk(100e9) == pytest.approx(1.0)


def test_named_clusters() -> None:
    cluster = Cluster.named("parallax-8x6")
    assert (cluster.machines, cluster.devices, cluster.count) == (8, 6, 48)
    assert cluster.between.bytes_s == 100e9 / 8
    assert all(part.source for part in (cluster.device, cluster.inside, cluster.between))
    with pytest.raises(autopar.ArgumentsError, match="no cluster is called 'dgx-1'; there are parallax-8x6, "):
        Cluster.named("dgx-1")
    with pytest.raises(autopar.ArgumentsError, match="0 machines of 6 devices"):
        cluster.of(0)


def test_machines_from_a_file(tmp_path: Path) -> None:
    like = Cluster.named("parallax-8x6")
    file = tmp_path / "resources"
    file.write_text("10.0.0.1: 0,1,2\n10.0.0.2: 0,1,2\n")
    found = Cluster.load(file, like)
    assert (found.machines, found.devices, found.name, found.between) == (2, 3, "resources", like.between)
    file.write_text("10.0.0.1: 0,1,2\n10.0.0.2: 0\n")
    with pytest.raises(autopar.ArgumentsError, match="are alike; devices: 10.0.0.1 3, 10.0.0.2 1"):
        Cluster.load(file, like)


TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adagrad(0.1))


def step(state: Any, batch: Any) -> Any:
    loss, grads = jax.value_and_grad(lambda p: jnp.mean((p["emb"][batch["ids"]] @ p["w"]) ** 2))(state["params"])
    updates, opt = TX.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss


def arguments(rows: int, examples: int) -> Any:
    shape = jax.ShapeDtypeStruct
    params = {"emb": shape((rows, 64), jnp.float32), "w": shape((64, 64), jnp.float32)}
    ids = (np.random.default_rng(0).zipf(1.3, (examples, 20)).clip(max=rows) - 1).astype(np.int32)
    return {"params": params, "opt": jax.eval_shape(TX.init, params)}, {"ids": ids}


@pytest.mark.parametrize(("rows", "method"), [(1_000_000, "ps"), (100, "allreduce")])
def test_large_tables_are_served_and_small_ones_reduced(rows: int, method: str) -> None:
    """Parallax's choice, on its cluster, which has more devices than there are here."""
    cluster = Cluster.named("parallax-8x6")
    planned = autopar.parallelize(step)
    plan = planned.elsewhere(cluster).entry(*arguments(rows, 48 * 128)).compiled.plan
    assert plan.devices == 48 and [p.method for p in plan.parameters] == [method]
    seconds = plan.parameters[0].seconds
    assert min(seconds, key=lambda m: seconds[m]) == method
    told = str(autopar.explain(planned, *arguments(rows, 48 * 128), cluster=cluster))
    assert "Plan of step (48 devices)" in told and "Planned for parallax-8x6: 8 x 6 TITAN Xp" in told
    assert planned.latest is None, "nothing is planned here"


@pytest.mark.parametrize(("rows", "said"), [(1_000_000, "on each device."), (2_000_000_000, "more than fit beside")])
def test_whether_the_state_fits_is_told(rows: int, said: str) -> None:
    told = autopar.explain(autopar.parallelize(step), *arguments(rows, 48), cluster=Cluster.named("parallax-8x6"))
    assert "The state takes " in told.told[0] and said in told.told[0]


def test_a_cluster_needs_arguments() -> None:
    with pytest.raises(autopar.ArgumentsError, match="takes a step's arguments as well"):
        planned = autopar.parallelize(step)
        planned.latest = object()  # type: ignore[assignment]
        autopar.explain(planned, cluster=SMALL)
