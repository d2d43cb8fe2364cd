"""Steps on devices that aren't here: what a step computes, its time by part, and what becomes of it on more devices."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.analysis.work import count_work
from autopar.cost.exchange import HOSTED, DenseLoad, host_terms, step_parts, total
from autopar.cost.rates import FREE, NO_TIME, Curve, HostRates, RowRate, planned_host_rates
from autopar.cost.simulate import (
    TableLoad,
    Workload,
    busiest,
    crossing,
    expected_maximum,
    host_sizes_at,
    scaling,
    simulate_step,
    sizes_at,
)
from autopar.ir.cluster import Device, Link
from autopar.ir.figures import Sizes, bucket_size
from autopar.measure.cluster import Cluster
from autopar.planning.plan import workload
from tests.support.explained import explained

#: 1 GFLOP/s, half of which is reached; 1 GB/s of memory; links of 1 GB/s and 0.1 GB/s that take 1 ms a message.
CLUSTER = Cluster("chalk", 8, 4, Device("chalk", 1e9, 1e9, 1e9), Link(1e-3, 1e9), Link(1e-3, 1e8), 1e9)
LOAD = TableLoad("emb", Sizes.alone(100_000, 256, 512, 1000), lambda n: 100_000 * (1 - np.exp(-n * 900 / 100_000)))


def planned(devices: int, step: Any, *args: Any, **options: Any) -> autopar.Plan:
    return autopar.plan(autopar.parallelize(step, **options), *args, cluster=CLUSTER.of(devices, 1))


def test_products_are_counted() -> None:
    """Two operations a product; those of the batch are shared; loops count by their trips."""

    def step(state: Any, batch: Any) -> Any:
        def loss_fn(p: Any) -> jax.Array:
            h = batch["x"] @ p["w"]  # 8 x 3 x 5
            h, _ = jax.lax.scan(lambda h, _: (h @ p["u"], None), h, None, length=7)  # 7 of 8 x 5 x 5
            return jnp.mean(h**2) + jnp.sum(p["u"] @ p["u"])  # 5 x 5 x 5

        loss, grads = jax.value_and_grad(loss_fn)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss

    state = {"w": jnp.ones((3, 5)), "u": jnp.ones((5, 5))}
    work = planned(2, step, state, {"x": jnp.ones((8, 3))}).work
    # Forward; backward, for parameters; backward, for h, which isn't needed of x.
    assert work.examples == 2 * (2 * 8 * 3 * 5 + 3 * 7 * 8 * 5 * 5)
    assert work.parameters == 2 * 3 * 5 * 5 * 5
    assert work.on(2) == work.examples / 2 + work.parameters
    # Gradients of w, and of u after the loop; the loss.
    assert work.sums == ((4, 1), (4 * 3 * 5, 1), (4 * 5 * 5, 1))
    # A device's own program adds up its own gradients first.
    mapped = planned(2, step, state, {"x": jnp.ones((8, 3))}).work
    assert mapped.sums == ((4, 1), (4 * 3 * 5, 1), (4 * 5 * 5, 1)) and mapped.on(2) == work.on(2)


def test_a_convolution_is_counted() -> None:
    def step(kernel: Any, x: Any) -> Any:
        def loss_fn(k: Any) -> jax.Array:
            return jnp.mean(jax.lax.conv_general_dilated(x, k, (1, 1), "VALID") ** 2)

        return kernel - jax.grad(loss_fn)(kernel), ()

    entry = autopar.parallelize(step).planned_for(jnp.ones((4, 3, 2, 2)), jnp.ones((8, 3, 6, 6)))
    forward = 2 * (8 * 4 * 5 * 5) * (3 * 2 * 2)
    assert count_work(entry.compiled.analysed).on(1) == 2 * forward  # the output's, and the kernel's gradient


def test_the_parts_of_a_step_by_hand() -> None:
    rates = dataclasses.replace(
        NO_TIME,
        all_reduce=Curve(((0.0, 1.0), (100.0, 3.0))),
        gather=RowRate(0.1, 0.01),
        walk=Curve(((0.0, 0.0), (1000.0, 10.0))),
        update=Curve(((0.0, 0.0), (1000.0, 20.0))),
        all_to_all=FREE,
        fixed={"ps": 0.5},
        call_s=0.25,
        flop_s=1e-3,
    )
    sizes, load = Sizes(2, 100, 8, 16, 5, 4, 9, 3, 6), DenseLoad(2000.0, ((20, 2), (10, 1)), (200, 100), 40.0)
    parts = step_parts(rates, load, [("ps", sizes)], 2)
    found = {part: sum(t.seconds for t in terms) for part, terms in parts.items()}
    assert found["call"] == 0.25 + 0.5
    assert found["model"] == 2.0 + 0.4
    assert found["lookups"] == pytest.approx(5 * (0.1 + 8 * 0.01))
    # Owners look 6 rows of 8 bytes up, a device picks 4, pulls and commits 6 of 16, and walks twice over these 6.
    assert found["tables"] == pytest.approx((6 + 4) * 0.18 + 6 * 0.26 + 2 * 6 * 24 * 0.02)
    assert found["dense gradients"] == 2.0
    assert found["dense updates"] == pytest.approx(3 * 300 * 0.02)
    assert total(parts) == pytest.approx(sum(found.values()))
    # Measured in whole steps: sums of 1.4, 1.4 and 1.2 s one by one; each leaf half of what a parameter of its size
    # and its slot take without the sum of its gradient.
    whole = dataclasses.replace(rates, dense=Curve(((0.0, 2.0), (200.0, 22.0))), moved_byte_s=0.5)
    found = {part: sum(t.seconds for t in terms) for part, terms in step_parts(whole, load, [], 2).items()}
    assert found["model"] == 2.0 + 20.0
    assert found["dense gradients"] == pytest.approx(1.4 + 1.4 + 1.2)
    assert found["dense updates"] == pytest.approx((22 - 5) / 2 + (12 - 3) / 2)


def test_hosts_by_hand() -> None:
    """Two ranks: a third of the rows that one asks for is the other's shard of two."""
    host = dataclasses.replace(
        NO_TIME,
        all_to_all=Curve(((0.0, 1.0), (100.0, 3.0))),
        all_reduce=Curve(((0.0, 2.0), (100.0, 4.0))),
        gather=RowRate(0.1, 0.01),
        scatter=RowRate(0.2, 0.02),
        route=Curve(((0.0, 0.0), (10.0, 1.0))),
        walk=Curve(((0.0, 0.0), (1000.0, 10.0))),
    )
    rates, sizes = HostRates(host, Curve(((0.0, 0.5), (100.0, 1.5)))), Sizes(2, 100, 8, 16, 5, 4, 9, 0, 6)
    found = {term.name: (term.seconds, term.sent) for term in host_terms(sizes, rates)}
    assert found == {
        "route ids": (0.5, 0),
        "send ids": (pytest.approx(1 + 0.02 * 4 * 4), 4 * 4 // 2),
        "look up at owners": (pytest.approx(6 * 0.18), 0),
        "send rows": (pytest.approx(1 + 0.02 * 4 * 8), 4 * 8 // 2),
        "copy rows to the device": (pytest.approx(0.5 + 0.01 * 4 * 8), 0),
        "copy gradients to the host": (pytest.approx(0.5 + 0.01 * 4 * 8), 0),
        "send gradients": (pytest.approx(1 + 0.02 * 4 * 8), 4 * 8 // 2),
        "add gradients at owners": (pytest.approx(6 * 0.36), 0),
        "pull and commit rows": (pytest.approx(6 * (0.26 + 0.52)), 0),
        "update rows": (pytest.approx(0.01 * 2 * 6 * 24), 0),
    }
    dense = DenseLoad(0.0, ((50, 1),), (), by_mpi=True)
    parts = step_parts(NO_TIME, dense, [(HOSTED, sizes)], 2, rates)
    assert parts["tables"] == host_terms(sizes, rates)
    # There and back.
    assert sum(t.seconds for t in parts["dense gradients"]) == pytest.approx(2 * 1.0 + 3.0)
    alone = step_parts(NO_TIME, dense, [(HOSTED, sizes)], 1, rates)
    assert [t.name for t in alone["dense gradients"]] == ["reduce dense gradients"]


def test_rates_of_hosts_by_hand() -> None:
    """32 ranks on 8 machines; those of a machine share its memory. What was measured of MPI goes before links."""
    cluster = dataclasses.replace(
        CLUSTER,
        host_bytes_s=4e9,
        to_host=Link(1e-3, 1e8),
        measured={"mpi_all_reduce": {"between": Link(2e-3, 1e8)}, "all_reduce": {"between": Link(9.0, 1.0)}},
    )
    rates = planned_host_rates(cluster)
    assert rates.copy(1e6) == pytest.approx(1e-3 + 1e6 / 1e8)
    assert rates.host.walk(1e6) == pytest.approx(1e6 / 1e9)
    # Inside of a machine at half of a rank's 1 GB/s of memory: each byte is written and read.
    inside = 2 * 3 * (1e-3 + 0.25e6 / 5e8)
    assert rates.host.all_reduce(1e6) == pytest.approx(inside + 2 * 7 * (2e-3 + 1e6 / 8 / 1e8))
    # To each of 32 others 1000 bytes: from a machine's four devices to 28.
    assert rates.host.all_to_all(32e3) == pytest.approx(28 * 1e-3 + 4 * 28 * 1000 / 1e8)


def test_tables_on_hosts_are_simulated_there() -> None:
    """Their memory is the hosts'; the busiest owner is waited for."""
    hosted = dataclasses.replace(LOAD, hosted=True)
    work = Workload(DenseLoad(5e7, ((1_000_000, 1),), (1_000_000,), by_mpi=True), (hosted,))
    found = simulate_step(work, CLUSTER)
    rows = math.ceil(LOAD.rows(1))
    sizes = dataclasses.replace(host_sizes_at(hosted, 32), crossing=crossing(LOAD.rows, CLUSTER.devices))
    assert (found.methods, sizes.requested) == ({"emb": HOSTED}, rows) and found.fits
    assert sizes.owned == math.ceil(rows + expected_maximum(32) * math.sqrt(rows))
    assert found.parts["tables"] == host_terms(sizes, planned_host_rates(CLUSTER))
    assert simulate_step(work, CLUSTER, methods="ps").methods == {"emb": "ps"}
    assert simulate_step(Workload(work.dense, (LOAD,)), CLUSTER, methods=HOSTED).parts == found.parts
    # 51 MB of the table, on 8 machines; where the devices are the host it has 4 MB of other state as well.
    small = dataclasses.replace(CLUSTER, device=Device("chalk", 2e6, 1e9, 1e9))
    assert not simulate_step(work, dataclasses.replace(small, host_bytes=51.2e6 / 8 / 0.7 - 9)).fits
    assert simulate_step(work, dataclasses.replace(small, host_bytes=51.2e6 / 8 / 0.7 + 9)).fits
    for memory, fits in ((3.7e6, False), (3.8e6, True)):  # of 4 devices, all of their host's
        device = Device("chalk", memory, 1e9, 1e9)
        assert simulate_step(work, dataclasses.replace(CLUSTER, device=device, host_bytes=4 * memory)).fits == fits


def test_dense_gradients_go_as_tables_do() -> None:
    """By MPI with tables on hosts, if the plan has them there and says so, or if they are put there."""

    def names(work: Workload, **options: Any) -> list[str]:
        return [term.name for term in simulate_step(work, CLUSTER, **options).parts["dense gradients"]]

    hosted, dense = dataclasses.replace(LOAD, hosted=True), DenseLoad(5e7, ((1_000_000, 1),), (1_000_000,))
    by_mpi = dataclasses.replace(dense, by_mpi=True)
    both = ["copy dense gradients to the host and back", "reduce dense gradients"]
    assert names(Workload(by_mpi, (hosted,))) == names(Workload(dense, (LOAD,)), methods=HOSTED) == both
    assert names(Workload(by_mpi, (hosted,)), methods="ps") == names(Workload(dense, (hosted,))) == both[1:]


def test_a_plan_with_tables_on_hosts() -> None:
    """A rank for each device: who reduces, what a step takes, and what the alternatives would."""

    def step(state: Any, batch: Any) -> Any:
        def loss_fn(p: Any) -> jax.Array:
            return jnp.mean((p["emb"][batch["ids"]] @ p["w"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss

    ids = (np.random.default_rng(0).zipf(1.2, (32 * 64, 8)).clip(max=50_000) - 1).astype(np.int32)
    given = ({"emb": jnp.zeros((50_000, 16)), "w": jnp.eye(16)}, {"ids": ids})
    parallel = autopar.parallelize(step, strategy={"emb": ("ps", "hosts")})
    made = autopar.plan(parallel, *given, cluster=CLUSTER)
    (table,) = made.tables
    assert (table.where, table.taken, made.reduction_backend) == ("hosts", HOSTED, "mpi")
    requested = [np.unique(part) for part in np.split(ids, 32)]
    assert table.sizes is not None and table.sizes.requested == max(map(len, requested))
    loads = np.bincount(np.concatenate(requested) % 32)
    assert table.sizes.owned == loads.max()
    assert set(table.terms) == {HOSTED, "ps", "allgather", "allreduce_rows", "allreduce"}
    assert made.parts["tables"] == table.terms[HOSTED] and table.seconds[HOSTED] > 0
    for method in ("ps", "allgather", "allreduce_rows", "allreduce"):
        (other,) = autopar.plan(autopar.parallelize(step, strategy=method), *given, cluster=CLUSTER).tables
        assert other.terms[method] == table.terms[method], method
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), given)
    (unknown,) = autopar.plan(parallel, *shapes, cluster=CLUSTER).tables
    (other,) = autopar.plan(autopar.parallelize(step, strategy="ps"), *shapes, cluster=CLUSTER).tables
    assert other.terms["ps"] == unknown.terms["ps"]
    assert autopar.why(made, "emb", "ps").ratio == pytest.approx(table.seconds["ps"] / table.seconds[HOSTED])
    text = explained(parallel, *given, cluster=CLUSTER)
    assert "Tables on hosts take 390.6 KiB of 953.7 MiB on each host." in text
    owners = "Owners: each of 32 ranks has 1562 to 1563 rows of tables"
    busiest = f"the busiest one {loads.max() / loads.mean():.2f} times as many as the average."
    assert f"{owners}, and is asked for {loads.min()} to {loads.max()} in this batch: {busiest}" in text
    assert f"{owners}. " in explained(parallel, *shapes, cluster=CLUSTER)
    tight = explained(parallel, *given, cluster=dataclasses.replace(CLUSTER, host_bytes=1e5))
    assert "Tables on hosts take 390.6 KiB of 97.7 KiB on each host: 322.3 KiB more than fit." in tight
    assert "32 ranks" in text and f"A step is predicted to take {1e3 * made.seconds:.2f} ms" in text
    (there,) = autopar.simulate(made, devices=(32,)).times
    assert there.methods == {"emb": HOSTED} and there.seconds == pytest.approx(made.seconds, rel=0.1)


@pytest.mark.parametrize(("devices", "rows"), [(4, 2500), (48, 300), (1000, 1000), (200, 40_000), (2, 20_000_000)])
def test_the_busiest_message(devices: int, rows: int) -> None:
    """Against draws of Poisson's loads."""
    rng = np.random.default_rng(devices)
    drawn = np.mean([rng.poisson(rows / devices, devices**2).max() for _ in range(20)])
    assert abs(busiest(rows, devices) - drawn) <= max(1.0, 0.03 * drawn)


@pytest.mark.parametrize("count", [1, 2, 10, 1000])
def test_the_slowest_of_some(count: int) -> None:
    drawn = np.random.default_rng(0).normal(size=(4000, count)).max(1).mean()
    assert expected_maximum(count) == pytest.approx(drawn, abs=0.05)


def test_sizes_are_those_that_are_planned() -> None:
    """A step that is planned for 16 devices, and its sizes as they are simulated from its plan for 4."""

    def step(state: Any, batch: Any) -> Any:
        loss, g = jax.value_and_grad(lambda t: jnp.mean(t[batch["ids"]] ** 2))(state)
        return state - 0.1 * g, loss

    rng = np.random.default_rng(0)

    def at(devices: int) -> autopar.Plan:
        ids = (rng.zipf(1.2, (devices * 64, 8)).clip(max=50_000) - 1).astype(np.int32)
        return planned(devices, step, jnp.zeros((50_000, 16)), {"ids": ids})

    wanted, (load,) = at(16).tables[0].sizes, workload(at(4)).tables
    found = sizes_at(load, 16)
    assert wanted is not None
    exact = ("devices", "extent", "row_bytes", "family_bytes", "ids", "requested", "routed", "checks", "spread")
    assert [getattr(found, name) for name in exact] == [getattr(wanted, name) for name in exact]
    assert found.capacity == pytest.approx(wanted.capacity, rel=0.2)
    assert found.owned == pytest.approx(wanted.owned, rel=0.2)


def test_what_is_hidden_and_what_is_waited_for() -> None:
    work = Workload(DenseLoad(5e7, ((1_000_000, 1),), (1_000_000,)), (LOAD,))
    plain = simulate_step(work, CLUSTER)
    model = sum(plain.by_part()[part] for part in ("model", "lookups"))
    dense = plain.by_part()["dense gradients"]
    assert model == pytest.approx(0.1, rel=0.05)
    assert dense == pytest.approx(2 * 3 * (1e-3 + 0.25e6 / 1e9) + 2 * 7 * (1e-3 + 1e6 / 8 / 1e8))
    hidden = simulate_step(work, CLUSTER, overlap=1.0)
    assert hidden.hidden_s == pytest.approx(min(dense, 2 / 3 * model))
    assert plain.seconds - hidden.seconds == pytest.approx(hidden.hidden_s)
    late = simulate_step(work, CLUSTER, variation=0.1)
    assert late.seconds - plain.seconds == pytest.approx(0.1 * model * expected_maximum(32))


def test_methods_change_with_the_devices_and_are_the_fastest() -> None:
    work = Workload(DenseLoad(1e6, ((1000, 1),), (1000,)), (LOAD,))
    counts = (1, 2, 8, 64, 1024, 10_000)
    times = scaling(work, CLUSTER, counts)
    assert [t.devices for t in times] == list(counts)
    for count, time in zip(counts, times, strict=True):
        others = [scaling(work, CLUSTER, [count], methods=m)[0] for m in ("ps", "allgather", "allreduce")]
        assert all(time.seconds <= other.seconds + 1e-12 for other in others)
    assert times[-1].methods["emb"] == "allreduce"  # 10,000 devices touch the whole table


def test_the_devices_memory_limits_methods() -> None:
    """Of 1 GB 700 MB are for the state: a table of 1,024 MB fits two devices, and is never on all of them."""
    work = Workload(
        DenseLoad(1e6, ((1000, 1),), (1000,)),
        (TableLoad("emb", Sizes.alone(2_000_000, 256, 512, 10), lambda n: 10.0 * n),),
    )
    times = scaling(work, CLUSTER, (1, 2, 64))
    assert [t.fits for t in times] == [False, True, True]
    assert {t.methods["emb"] for t in times} == {"ps"}
    named = simulate_step(work, CLUSTER, methods="allgather")
    assert named.methods["emb"] == "allgather" and not named.fits


def test_simulate_prints_what_a_user_asks() -> None:
    def step(state: Any, batch: Any) -> Any:
        loss, g = jax.value_and_grad(lambda t: jnp.mean(t[batch["ids"]] ** 2))(state)
        return state - 0.1 * g, loss

    args = jnp.zeros((50_000, 16)), {"ids": jnp.arange(256).reshape(32, 8)}
    made = planned(4, step, *args)
    found = autopar.simulate(made, devices=(1, 4, 1000), variation=0.05)
    text = repr(found)
    assert "step on chalk (chalk), simulated" in text and "speed-up" in text
    assert found.speedups[0] == 1.0 and found.speedups[1] == pytest.approx(
        4 * found.times[0].seconds / found.times[1].seconds
    )
    with pytest.raises(autopar.ArgumentsError, match="give growing numbers of devices"):
        autopar.simulate(made, devices=(4, 2))
    with pytest.raises(autopar.ArgumentsError, match=r"overlap is in \[0, 1\]"):
        autopar.simulate(made, overlap=2)
    alone = autopar.plan(autopar.parallelize(step), *args)
    with pytest.raises(autopar.ArgumentsError, match="needs to know the devices"):
        autopar.simulate(alone)
    with pytest.raises(autopar.ArgumentsError, match="is of one device"):
        autopar.simulate(alone, cluster=CLUSTER)


@pytest.mark.parametrize("slots", [1, 8])
def test_one_accelerator_with_a_table_in_host_memory(slots: int) -> None:
    """By hand: rows travel over the bus with their slots, there and back, and the device computes the rest."""

    def step(state: Any, ids: Any) -> Any:
        loss, g = jax.value_and_grad(lambda p: jnp.mean((p["emb"][ids] @ p["w"]) ** 2))(state["params"])
        sums = state["sums"] + (g["emb"] ** 2).reshape(20_000, slots, -1).mean(-1)
        scaled = g["emb"] / jnp.sqrt(1e-6 + jnp.repeat(sums, 8 // slots, axis=1))
        params = {"emb": state["params"]["emb"] - 0.1 * scaled, "w": state["params"]["w"] - 0.1 * g["w"]}
        return {"params": params, "sums": sums}, loss

    shape = jax.ShapeDtypeStruct
    params = {"emb": shape((20_000, 8), "float32"), "w": shape((8, 64), "float32")}
    state, ids = {"params": params, "sums": shape((20_000, slots), "float32")}, np.arange(600, dtype=np.int32) % 450
    machine = dataclasses.replace(CLUSTER, host_bytes_s=2e8, to_host=Link(1e-4, 1e7, "a bus"), host_source="a host")
    hosted = autopar.parallelize(step, strategy={"params/emb": ("ps", "hosts")})
    made = autopar.plan(hosted, state, ids, cluster=machine.of(1, 1))
    found = autopar.simulate(made)
    (time,) = found.times
    assert (time.devices, time.methods, time.fits) == (1, {"params/emb": HOSTED}, True)
    row, terms = 4 * (8 + slots), {t.name: t.seconds for part in time.parts.values() for t in part}
    assert terms["copy rows and slots to the device"] == pytest.approx(1e-4 + 450 * row / 1e7)
    assert terms["copy rows and slots to the host"] == terms["copy rows and slots to the device"]
    assert terms["look up in host memory"] == pytest.approx(2 * 450 * (64 + row) / 2e8)
    assert terms["update rows"] == pytest.approx(2 * 450 * (32 + row) / 1e9)
    once = bucket_size(450, 600)  # products run once for each distinct row
    assert terms["products"] == pytest.approx(3 * 2 * once * 8 * 64 / 0.5e9, rel=0.01)
    assert not any(term.sent for part in time.parts.values() for term in part)
    assert time.seconds == pytest.approx(sum(terms.values())) and 0 < time.bound_s < time.seconds
    assert made.parts == time.parts and autopar.simulate(made, cluster=machine, devices=1).times == found.times
    text = str(found)
    assert "bus: a bus; " not in text and "bus: a bus. " in text and "host memory: a host; " in text
    assert "products: at 50% of that rate, assumed" in text
    said = explained(hosted, state, ids, cluster=machine.of(1, 1))
    assert f"A step is predicted to take {1e3 * time.seconds:.2f} ms" in said and "bus: a bus. " in said
    slow = dataclasses.replace(machine, host_bytes=1e5)
    assert "(the state doesn't fit)" in str(autopar.simulate(made, cluster=slow))
    with pytest.raises(autopar.ArgumentsError, match="is of one device, .* for one: plan.*cluster.of"):
        autopar.simulate(made, devices=[1, 2])
    with pytest.raises(autopar.ArgumentsError, match="are of several devices, and the plan of step is of one"):
        autopar.simulate(made, methods="ps")
    on_device = autopar.plan(autopar.parallelize(step, strategy="ps"), state, ids, cluster=machine.of(1, 1))
    assert autopar.simulate(on_device).times[0].methods == {"params/emb": "ps"}
    assert on_device.work.moved_bytes > 0, "values of the batch count as they do beside a table in host memory"
    assert 0 < sum(t.seconds for t in on_device.parts["tables"]) < sum(t.seconds for t in made.parts["tables"])


def test_methods_that_are_asked_for() -> None:
    """By the names of strategies, too; what there isn't is named."""

    def step(table: Any, ids: Any) -> Any:
        loss, g = jax.value_and_grad(lambda t: jnp.mean(t[ids] ** 2))(table)
        return table - 0.1 * g, loss

    shapes = jax.ShapeDtypeStruct((50_000, 16), "float32"), jax.ShapeDtypeStruct((64,), "int32")
    made = planned(4, step, *shapes)
    (path,) = [t.path for t in made.tables]
    for given in (HOSTED, ("ps", "hosts"), {path: ("ps", "hosts")}):
        assert autopar.simulate(made, devices=8, methods=given).times[0].methods == {path: HOSTED}
    for options, told in (
        ({"methods": "psx"}, "there is no 'psx'; there are 'auto', "),
        ({"methods": {path: ["ps"]}}, "there is no ['ps']"),
        ({"methods": {"params/x": "ps"}}, f"no table 'params/x' goes by its rows; there are {path}"),
        ({"variation": float("nan")}, "variation 0 or more"),
        ({"devices": (1.5, 48)}, "give growing numbers of devices"),
        ({"cluster": "dgx-h100"}, "cluster is a str; give a Cluster"),
    ):
        with pytest.raises(autopar.ArgumentsError, match=re.escape(told)):
            autopar.simulate(made, **options)
    with pytest.raises(autopar.ArgumentsError, match="cluster is a str"):
        autopar.plan(autopar.parallelize(step), *shapes, cluster="dgx-h100")


def test_tables_on_devices_beside_tables_on_hosts() -> None:
    """Each goes as it is told; what is dense is reduced with all that is."""

    def step(state: Any, batch: Any) -> Any:
        loss, g = jax.value_and_grad(lambda p: sum(jnp.mean(p[k][batch[k]] ** 2) for k in "abc"))(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, g), loss

    state = {k: jax.ShapeDtypeStruct((50_000, 16), "float32") for k in "abc"}
    batch = {k: np.arange(4 * 64, dtype=np.int32) * 7 for k in "abc"}
    strategy = {"a": ("ps", "hosts"), "b": "ps", "c": "allreduce"}
    made = planned(4, step, state, batch, strategy=strategy)
    assert [(t.taken, t.sizes is None) for t in made.tables] == [(HOSTED, False), ("ps", False), ("allreduce", True)]
    reduced = sum(t.sent for t in made.parts["dense gradients"])
    assert reduced == pytest.approx(2 * 3 / 4 * 50_000 * 64, rel=0.01)
    names = [t.name for t in made.parts["tables"]]
    assert "copy rows to the device" in names and "pick rows" in names


@pytest.mark.parametrize("hosted", [False, True])
def test_owners_add_up_bags_while_that_sends_fewer_bytes(hosted: bool) -> None:
    """20 bags of 50 ids a device. A sum of each travels from each owner, so that many owners send more than rows do."""
    bags = {"bags": 20, "bag_ids": 1000, "bag_id_bytes": 4, "bag_count_bytes": 4}
    pooled = dataclasses.replace(LOAD, sizes=dataclasses.replace(LOAD.sizes, **bags), hosted=hosted)
    work = Workload(DenseLoad(5e7, ((1_000_000, 1),), (1_000_000,), by_mpi=hosted), (pooled,))
    few, many = (
        simulate_step(work, CLUSTER.of(*shape), methods={"emb": HOSTED if hosted else "ps"})
        for shape in ((4, 1), (64, 4))
    )
    terms = {t.name: t.sent for t in few.parts["tables"]}
    room = 1000 if hosted else 4 * busiest(1000, 4)
    assert terms["send bags"] == 3 * (room + 4 * 20) * 4 // 4
    assert terms["send sums"] == 3 * 4 * 20 * 256 // 4
    assert "send rows" not in terms
    names = {t.name for t in many.parts["tables"]}
    assert "send rows" in names and "send sums" not in names


@pytest.mark.parametrize("own", [0, 30])
def test_bags_by_segments_are_those_of_all_ranks(own: int) -> None:
    """Each rank is told how many ids of all bags are its own, and gets sums of those that have ids of another. `own`:
    bags beside them that are a rank's own, of which there are as many for any number of ranks."""
    bags = {"bags": 80 + own, "bags_of_all": 80, "bags_filled": 21 + own, "bag_ids": 1000, "devices": 4}
    each = {"bag_id_bytes": 2, "bag_count_bytes": 1}
    pooled = dataclasses.replace(LOAD, sizes=dataclasses.replace(LOAD.sizes, **bags, **each), hosted=True)
    for ranks in (4, 8):
        sizes, count = host_sizes_at(pooled, ranks), 20 * ranks + own
        assert (sizes.bags, sizes.bag_sums, sizes.bag_bytes) == (count, (21 + own) * ranks, 2000 + ranks * count)


def test_what_is_switched_off_costs_what_it_sends() -> None:
    """What ranks of a machine want alike crosses once, by node leaders; sums go to the first rank and back."""
    hosted = dataclasses.replace(LOAD, hosted=True, rows=lambda n: 900.0)  # all ranks want the same rows
    cluster = CLUSTER.of(4, 2)
    work = Workload(DenseLoad(5e7, ((1_000_000, 1),), (1_000_000,), by_mpi=True), (hosted,))
    by_first = dataclasses.replace(
        work, tables=(dataclasses.replace(hosted, sizes=dataclasses.replace(hosted.sizes, by_first=True)),)
    )
    together, alone, first = (
        {t.name: t for t in simulate_step(w, cluster).parts["tables"]}
        for w in (work, dataclasses.replace(work, by_leaders=False), by_first)
    )
    for name in ("send ids", "send rows", "send gradients"):
        assert together[name].sent == alone[name].sent // 2 and together[name].seconds < alone[name].seconds
    rows = host_sizes_at(hosted, 8).owned
    assert first["and back"].sent == 7 * rows * 256 and set(first) - set(together) == {
        "sums to the first rank",
        "and back",
    }
    one = {t.name: t.sent for t in simulate_step(work, CLUSTER.of(1, 8)).parts["tables"]}
    assert one["send rows"] == alone["send rows"].sent
