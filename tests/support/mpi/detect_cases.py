"""What every rank runs in `test_worlds.py`: the cluster of all ranks' devices, on one machine and as if on several."""

from __future__ import annotations

import jax

import autopar
from autopar.backends.devices import Devices
from autopar.measure import cluster, links
from autopar.measure.cluster import Cluster

RANK, RANKS, COUNT = jax.process_index(), jax.process_count(), jax.device_count()
EACH = COUNT // RANKS
links._CPU_BYTES = (1 << 8, 1 << 14)
cluster._CPU_LENGTH, cluster._CPU_WALKED = 64, 1 << 16
links._RANK_BYTES, links._TARGET_S = (1 << 10, 1 << 16), 0.001


def same_everywhere(found: Cluster) -> None:
    all_ = Devices.of(None).processes.gather(repr(found).encode(), "clusters")
    assert len(set(all_)) == 1, all_


def check_one_machine() -> None:
    found = autopar.calibrate()
    assert (found.machines, found.devices) == (1, COUNT)
    assert set(found.measured) == {"all_reduce", "all_gather", "all_to_all", "mpi_all_reduce", "mpi_all_to_all"}
    assert all(set(levels) == {"inside"} for levels in found.measured.values())
    same_everywhere(found)
    again = Cluster.detect()
    assert again.measured == found.measured and again.between.source.startswith("assumed")
    same_everywhere(again)


def check_several_machines() -> None:
    """Each rank as on a machine of its own: its devices are inside, the ranks between."""
    for module in (cluster, links):
        module.machine_name = lambda: f"machine {RANK}"
    found = autopar.calibrate()
    assert (found.machines, found.devices) == (RANKS, EACH)
    levels = {"inside", "between"} if EACH > 1 else {"between"}
    assert all(set(found.measured[c]) == levels for c in ("all_reduce", "all_gather", "all_to_all"))
    assert all(set(found.measured[c]) == {"between"} for c in ("mpi_all_reduce", "mpi_all_to_all"))
    assert found.between == found.measured["all_reduce"]["between"]
    same_everywhere(found)
