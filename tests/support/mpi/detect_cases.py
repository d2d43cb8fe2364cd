"""What every rank runs in `test_worlds.py`: the cluster of all ranks' devices, on one machine and as if on several."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar
import autopar.calibration
from autopar.backends.devices import Devices
from autopar.backends.host.segmented import SegmentedProgram
from autopar.ir.cluster import Link
from autopar.launch.cluster_file import COLLECTIVES, format_toml
from autopar.measure import cluster
from autopar.measure.cluster import Cluster
from autopar.measure.figures import cache_file, write_cache
from autopar.mpi.machines import exchange
from benchmarks.hosts import table, timed
from tests.support.explained import explained
from tests.support.rates import RATES

RANK, RANKS, COUNT = jax.process_index(), jax.process_count(), jax.device_count()
EACH = COUNT // RANKS
cluster._CPU_BYTES = (1 << 8, 1 << 14)
cluster._CPU_LENGTH, cluster._CPU_WALKED = 64, 1 << 16
cluster._RANK_BYTES = cluster._REDUCED_BYTES = cluster._BESIDE_BYTES = (1 << 10, 1 << 16)
cluster._TARGET_S = 0.001
autopar.calibration.rates_of = lambda *_, **__: RATES


def same_everywhere(found: Cluster) -> None:
    all_ = Devices.of(None).processes.gather(repr(found).encode(), "clusters")
    assert len(set(all_)) == 1, all_


def check_one_machine() -> None:
    found = autopar.calibrate(again=True)
    assert (found.machines, found.devices) == (1, COUNT)
    assert set(found.measured) == set(COLLECTIVES)
    assert all(set(levels) == {"inside"} for levels in found.measured.values())
    same_everywhere(found)
    again = Cluster.detect()
    assert again.measured == found.measured and again.between.source.startswith("assumed")
    same_everywhere(again)


def keep_calibration(fast: str, slow: Link, but: Collection[str] = ()) -> None:
    """Keep one in which a collective is fast, and the others slow. Collective."""
    found = autopar.calibrate(again=True)
    links = {name: Link(1e-6, 1e9) if name == fast else slow for name in found.measured if name not in but}
    kept = dataclasses.replace(found, measured={name: {"inside": link} for name, link in links.items()})
    write_cache(cache_file(Devices.of(None), "cluster-{}.toml"), format_toml(kept.as_dict()))
    cluster.reductions_here.cache_clear()


def check_sums_go_in_rings_where_these_are_faster() -> None:
    """By what is kept of a calibration, the first rank's."""
    keep_calibration("ring_all_reduce", Link(1e-3, 1e9))

    def step(params: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((p["emb"][batch["ids"]] @ p["w"]) ** 2))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    params = {"emb": jnp.ones((50, 4)), "w": jnp.ones((4, 2048)) / 64}
    batch = {"ids": np.arange(8 * COUNT, dtype=np.int32) % 50}
    planned = autopar.parallelize(step, strategy=("ps", "hosts"), donate=False)
    assert "sums of 4.0 KiB or more are made in rings" in explained(planned, params, batch)
    new, loss = planned(params, batch)
    assert exchange().rings_from == 4096
    wanted, wanted_loss = jax.jit(step)(params, batch)
    np.testing.assert_allclose(new["w"], wanted["w"], rtol=1e-5)
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-5)
    made = exchange()._rings[False]
    least = 2 * (RANKS - 1) / RANKS * new["w"].nbytes
    assert 0.99 * least < made.sent_bytes < 1.01 * least  # the loss is in it


def check_gradients_are_added_up_while_others_are_computed() -> None:
    """Where calibration found it faster. Results are the same, and no sum waits for the rest of the backward pass."""
    keep_calibration("beside_all_reduce", Link(1e-2, 1e9), but=["ring_all_reduce"])
    names = [f"layer {k}" for k in range(5)]

    def step(params: Any, batch: Any) -> Any:
        def loss(p: Any) -> Any:
            x = p["emb"][batch["ids"]]
            for name in names:
                x = jnp.tanh(x @ p[name])
            return (x**2).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    keys = jax.random.split(jax.random.key(0), len(names) + 1)
    params = {name: jax.random.normal(k, (32, 32)) / 6 for name, k in zip(names, keys, strict=False)}
    params["emb"] = jax.random.normal(keys[-1], (50, 32))
    planned = autopar.parallelize(step, strategy={"emb": ("ps", "hosts")}, donate=False)
    batches = [{"ids": np.arange(k, k + 8 * COUNT, dtype=np.int32) % 50} for k in range(3)]
    assert "gradients are summed in buckets of 4.0 KiB or more" in explained(planned, params, batches[0])
    theirs, plain = params, jax.jit(step)
    begun, later = [], threading.Event()
    reduce, wait = exchange().reduce, SegmentedProgram._await_thread

    def watched(arrays: Any, *options: Any, beside: bool = False) -> Any:
        assert beside == (threading.current_thread() is not threading.main_thread())
        if beside:
            begun.append(sum(a.nbytes for a in arrays))
            assert later.wait(60), "a sum that is awaited before the rest is computed"
        return reduce(arrays, *options, beside=beside)

    def awaiting(self: SegmentedProgram, state: Any) -> None:
        if state.beside:
            later.set()
        wait(self, state)
        later.clear()

    exchange().reduce, SegmentedProgram._await_thread = watched, awaiting
    try:
        for batch in batches:
            params, value = planned(params, batch)
            theirs, their_value = plain(theirs, batch)
            np.testing.assert_allclose(value, their_value, rtol=1e-5)
    finally:
        exchange().reduce, SegmentedProgram._await_thread = reduce, wait
    for name in (*names, "emb"):
        np.testing.assert_allclose(np.asarray(params[name]), theirs[name], rtol=1e-5, atol=1e-7)
    size = params["layer 0"].nbytes
    assert begun == len(batches) * [size + 4, *[size] * 4], begun  # the loss goes with the last layer; then the rows
    with timed(planned.latest.runner) as times:  # stages of which the plan, made before the ranks met, says nothing
        planned(params, batches[0])
        times.finish(60.0)
    assert sum("beside" in line for line in table([times.seconds])) == len(names)


def check_several_machines() -> None:
    """Each rank as on a machine of its own: its devices are inside, the ranks between."""
    cluster.machine_name = lambda: f"machine {RANK}"
    found = autopar.calibrate(again=True)
    assert (found.machines, found.devices) == (RANKS, EACH)
    levels = {"inside", "between"} if EACH > 1 else {"between"}
    assert all(set(found.measured[c]) == levels for c in ("all_reduce", "all_gather", "all_to_all"))
    between_ranks = ("mpi_all_reduce", "mpi_all_to_all", "ring_all_reduce", "beside_all_reduce")
    assert all(set(found.measured[c]) == {"between"} for c in between_ranks)
    assert found.between == found.measured["all_reduce"]["between"]
    same_everywhere(found)
