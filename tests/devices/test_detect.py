"""The cluster that is here: what is found, and what calibration keeps."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import autopar
from autopar.backends.devices import Devices
from autopar.ir.cluster import Link
from autopar.measure import cluster as measured_cluster
from autopar.measure.cluster import Cluster
from autopar.measure.figures import cache_file
from autopar.measure.loops import Budget, collective_points, undisturbed
from autopar.mpi.limits import total_bytes
from tests.support.meshes import mesh_of

#: (size of the mesh's axis) -> what its links would take; see `pretend`.
INSIDE, BETWEEN = Link(1e-6, 10e9), Link(5e-6, 2e9)


def budget() -> Budget:
    return Budget(60.0, Devices.of(None).processes)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small sizes."""
    monkeypatch.setattr(measured_cluster, "_CPU_BYTES", (1 << 8, 1 << 12))
    monkeypatch.setattr(measured_cluster, "_CPU_LENGTH", 64)
    monkeypatch.setattr(measured_cluster, "_CPU_WALKED", 1 << 16)


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch, quick: None) -> None:
    """Times by hand of a machine's 2 devices, and of 4 machines, of which both devices share a link.

    A ring's AllReduce of b bytes among n: 2 (n - 1) messages of b / n. Of a result of b bytes, of which each one has an
    n-th, n - 1 messages of b / n for the others.
    """

    def points(devices: Devices, collective: str, sizes: Any) -> list[tuple[float, float]]:
        link, sharing = (INSIDE, 1) if devices.axis == "device" else (BETWEEN, 2)
        n = devices.count
        rounds = (2 if collective == "all_reduce" else 1) * (n - 1)
        return [(b, rounds * link.latency_s + sharing * rounds * b / n / link.bytes_s) for b in sizes]

    monkeypatch.setattr(measured_cluster, "collective_points", points)


@pytest.mark.parametrize("devices", [1, 4, 6])
def test_what_is_here(devices: int, quick: None) -> None:
    found = Cluster.detect(mesh_of(devices))
    assert (found.machines, found.devices, found.host_bytes) == (1, devices, total_bytes())
    assert found.device.memory_bytes == found.host_bytes // devices
    assert found.device.flops_s > 0 and found.device.memory_bytes_s > 0
    assert "measured here" in found.device.source and "a share of the host's" in found.device.source
    assert found.inside.source.startswith("assumed: ") and found.between.source.startswith("assumed: ")
    assert not found.measured


@pytest.mark.parametrize(
    ("platform", "kind", "said"),
    [
        ("cpu", "cpu", "assumed: a copy in memory"),
        ("gpu", "NVIDIA H200", "assumed: NVLink 4"),
        ("gpu", "NVIDIA H100 80GB HBM3", "assumed: NVLink 4"),
        ("gpu", "NVIDIA H100 PCIe", "assumed: PCIe 3.0"),
        ("gpu", "Tesla P100-PCIE-16GB", "assumed: PCIe 3.0"),
    ],
)
def test_what_is_assumed(platform: str, kind: str, said: str) -> None:
    inside, between = measured_cluster.assumed_links(platform, kind)
    assert inside.source.startswith(said) and between.source.startswith("assumed: 10 Gb/s Ethernet")


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "all_to_all"])
def test_a_collective_is_timed_by_its_results_size(collective: str) -> None:
    """4 devices; the step keeps its shape, and takes what it is given: a size in bytes of the result on one of them."""
    seen = []

    def one_step(devices: Devices, step: Any, start: Any) -> float:
        out = jax.jit(lambda x: devices.local(step, [0], 0, x))(start)
        seen.append((start.nbytes, out.shape == start.shape))
        np.testing.assert_allclose(out, 2.0 if collective == "all_gather" else 1.0)
        return 1.0

    found = collective_points(Devices.of(mesh_of(4)), collective, (1024, 4096), one_step)
    assert found == [(1024.0, 1.0), (4096.0, 1.0)]
    whole = 1 if collective == "all_gather" else 4  # all of the result is given by all together, or by each
    assert seen == [(1024 * whole, True), (4096 * whole, True)]


def test_links_of_both_levels_are_found(pretend: None) -> None:
    """What times by hand are made of comes out again, for each collective on each level."""
    found = measured_cluster.measure_links(np.array(jax.devices()[:8]).reshape(4, 2), budget())
    assert set(found) == {"all_reduce", "all_gather", "all_to_all"}
    for levels in found.values():
        for level, expected in (("inside", INSIDE), ("between", BETWEEN)):
            assert levels[level].latency_s == pytest.approx(expected.latency_s)
            assert levels[level].bytes_s == pytest.approx(expected.bytes_s)
    alone = measured_cluster.measure_links(np.array(jax.devices()[:3]).reshape(3, 1), budget())
    assert all(set(levels) == {"between"} for levels in alone.values())


def test_calibration_is_kept(pretend: None) -> None:
    mesh = mesh_of(2)
    found = autopar.calibrate(mesh)
    assert set(found.measured) == {"all_reduce", "all_gather", "all_to_all"} and found.inside.source.startswith("measu")
    assert found.inside == found.measured["all_reduce"]["inside"] and found.between.source.startswith("assumed")
    again = Cluster.detect(mesh)
    assert (again.measured, again.inside) == (found.measured, found.inside)
    assert not Cluster.detect(mesh_of(4)).measured, "those of other devices aren't taken"
    devices = Devices.of(mesh)
    file = cache_file(devices, "cluster-{}.toml")
    assert Cluster.load(file) == found
    found.of(2, 1).save(file)
    assert not Cluster.detect(mesh).measured, "of other machines"
    file.write_text("broken")
    assert not Cluster.detect(mesh).measured


def test_what_was_disturbed() -> None:
    assert undisturbed([(1, 5.0), (2, 3.0), (3, 4.0), (4, 9.0)]) == [(1, 3.0), (2, 3.0), (3, 4.0), (4, 9.0)]


def test_machines_are_told_apart() -> None:
    assert measured_cluster.arrange_machines(["b", "a", "b", "a"]) == [[0, 2], [1, 3]]
    with pytest.raises(autopar.ArgumentsError, match="are alike; those here have 2, 1 devices"):
        measured_cluster.arrange_machines(["a", "a", "b"])


@pytest.mark.measures
def test_measured_links_make_sense() -> None:
    """Whatever a busy machine measures is a time."""
    sizes, pair = (1 << 10, 1 << 16, 1 << 22), np.array(jax.devices()[:2]).reshape(1, 2)
    found = measured_cluster.measure_links(pair, budget(), sizes)
    assert all(link.latency_s >= 0 and link.bytes_s > 0 for (link,) in map(dict.values, found.values()))
    assert Cluster.detect(mesh_of(1)).device.flops_s > 0
