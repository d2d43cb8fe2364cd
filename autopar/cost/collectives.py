"""How long exchanges take in a cluster: latency and bandwidth, on two levels of links (DESIGN 6).

Each function gives the seconds until all devices have their results. Inside a machine devices exchange with each other,
between machines each with those of its own number in the others, so that a machine's interfaces are shared by all of
its devices. N = m machines of d devices.
"""

from __future__ import annotations

from autopar.cost.cluster import Cluster


def all_reduce_s(cluster: Cluster, size: float) -> float:
    """A sum of `size` bytes that every device gets.

    Rings (Patarasuk and Yuan, 2009): scattered sums inside, sums of the d parts between machines, gathered inside.
    """
    m, d = cluster.machines, cluster.devices
    inside = cluster.inside(2 * (d - 1) * size / d, 2 * (d - 1))
    return inside + cluster.between(2 * (m - 1) * size / m, 2 * (m - 1))


def all_gather_s(cluster: Cluster, size: float) -> float:
    """`size` bytes of each device that every device gets: Parallax's AllGatherv, (N - 1) * size received by each."""
    m, d = cluster.machines, cluster.devices
    between = cluster.between((m - 1) * d * size, m - 1)
    return between + cluster.inside((d - 1) * m * size, d - 1)


def all_to_all_s(cluster: Cluster, size: float) -> float:
    """`size` bytes from each device to each other one."""
    m, d = cluster.machines, cluster.devices
    between = cluster.between((m - 1) * d * d * size, (m - 1) * d)
    return max(between, cluster.inside((d - 1) * size, d - 1))
