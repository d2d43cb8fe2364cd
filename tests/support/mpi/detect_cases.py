"""What every rank runs in `test_worlds.py`: the cluster of all ranks' devices, on one machine and as if on several."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from autopar.backends.devices import Devices
from autopar.cost import Link
from autopar.launch.hardware import COLLECTIVES
from autopar.launch.toml_file import format_toml
from autopar.measure import cluster, links
from autopar.measure.calibrate import cache_file, write_cache
from autopar.measure.cluster import Cluster
from autopar.mpi.machines import exchange
from tests.support.explained import explained

RANK, RANKS, COUNT = jax.process_index(), jax.process_count(), jax.device_count()
EACH = COUNT // RANKS
links._CPU_BYTES = (1 << 8, 1 << 14)
cluster._CPU_LENGTH, cluster._CPU_WALKED = 64, 1 << 16
links._RANK_BYTES = links._REDUCED_BYTES = (1 << 10, 1 << 16)
links._TARGET_S = 0.001


def same_everywhere(found: Cluster) -> None:
    all_ = Devices.of(None).processes.gather(repr(found).encode(), "clusters")
    assert len(set(all_)) == 1, all_


def check_one_machine() -> None:
    found = autopar.calibrate()
    assert (found.machines, found.devices) == (1, COUNT)
    assert set(found.measured) == set(COLLECTIVES)
    assert all(set(levels) == {"inside"} for levels in found.measured.values())
    same_everywhere(found)
    again = Cluster.detect()
    assert again.measured == found.measured and again.between.source.startswith("assumed")
    same_everywhere(again)


def check_sums_go_in_rings_where_these_are_faster() -> None:
    """By what is kept of a calibration, the first rank's."""
    found = autopar.calibrate()
    links = {name: Link(1e-6 if name == "ring_all_reduce" else 1e-3, 1e9) for name in found.measured}
    slower = dataclasses.replace(found, measured={name: {"inside": link} for name, link in links.items()})
    write_cache(cache_file(Devices.of(None), "cluster-{}.toml"), format_toml(slower.as_dict()))

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
    made = exchange()._rings
    least = 2 * (RANKS - 1) / RANKS * new["w"].nbytes
    assert made is not None and 0.99 * least < made.sent_bytes < 1.01 * least  # the loss is in it


def check_several_machines() -> None:
    """Each rank as on a machine of its own: its devices are inside, the ranks between."""
    for module in (cluster, links):
        module.machine_name = lambda: f"machine {RANK}"
    found = autopar.calibrate()
    assert (found.machines, found.devices) == (RANKS, EACH)
    levels = {"inside", "between"} if EACH > 1 else {"between"}
    assert all(set(found.measured[c]) == levels for c in ("all_reduce", "all_gather", "all_to_all"))
    between_ranks = ("mpi_all_reduce", "mpi_all_to_all", "ring_all_reduce")
    assert all(set(found.measured[c]) == {"between"} for c in between_ranks)
    assert found.between == found.measured["all_reduce"]["between"]
    same_everywhere(found)
