"""AllReduce between ranks, by MPI or in rings: what each takes, by hand, and from which size on rings are taken."""

from __future__ import annotations

import dataclasses

import pytest

from autopar.cost.collectives import bucket_bytes, host_all_reduce_s, rings_from
from autopar.ir.cluster import Device, Link
from autopar.measure.cluster import Cluster

#: Two machines with a rank each.
TWO = Cluster("chalk", 2, 1, Device("chalk", 1e9, 1e9, 1e9), Link(0.0, 1e9), Link(5e-4, 1e8), 1e9, host_bytes_s=3e9)


def measured(**links: Link) -> Cluster:
    return dataclasses.replace(TWO, measured={name: {"between": link} for name, link in links.items()})


def test_latency_bytes_and_additions() -> None:
    """2 (p - 1) messages, 2 (p - 1)/p of the bytes sent, (p - 1)/p of them added: two reads and a write of each."""
    assert host_all_reduce_s(TWO, 1e6) == pytest.approx(2 * 5e-4 + 1e6 / 1e8 + 0.5e6 * 3 / 3e9)


def test_rings_are_taken_from_where_they_are_faster() -> None:
    mpi, rings = Link(1e-3, 1e8), Link(3e-3, 2e8)  # 2 ms + s / 1e8 and 6 ms + s / 2e8: the same at 800,000 bytes
    both = measured(mpi_all_reduce=mpi, ring_all_reduce=rings)
    assert rings_from(both) == 1 << 20
    assert host_all_reduce_s(both, 1e5) == pytest.approx(2e-3 + 1e5 / 1e8)
    assert host_all_reduce_s(both, 4e6) == pytest.approx(6e-3 + 4e6 / 2e8)
    assert rings_from(measured(mpi_all_reduce=rings, ring_all_reduce=mpi)) is None  # faster for small ones alone
    assert rings_from(measured(mpi_all_reduce=mpi)) is None and rings_from(TWO) is None
    assert rings_from(measured(mpi_all_reduce=mpi, ring_all_reduce=Link(1e-4, 2e8))) == 1 << 12


def test_gradients_are_summed_beside_others_from_where_that_hides_more_than_a_cut_takes() -> None:
    """Of 2 ms + s / 1e8, all but 0.2 ms + s / 1e9: 2 ms more than nothing from some 22,000 bytes on."""
    mpi = Link(1e-3, 1e8)
    assert bucket_bytes(measured(mpi_all_reduce=mpi, beside_all_reduce=Link(1e-4, 1e9))) == 1 << 15
    assert bucket_bytes(measured(mpi_all_reduce=mpi, beside_all_reduce=mpi)) is None  # nothing is hidden
    assert bucket_bytes(measured(mpi_all_reduce=mpi)) is None and bucket_bytes(TWO) is None
