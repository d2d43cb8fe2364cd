"""A parameter server in the memory of the hosts, one server a machine, as Parallax has it (sections 4.1, 5.3, 6).

Each function gives the seconds of a step for one parameter of `size` bytes (of a sparse one: of the rows that a worker
touches), in a cluster of m machines with d workers each. Every server owns 1 / m of it.
"""

from __future__ import annotations

from autopar.ir.cluster import ClusterSpec, Link


def transfer_s(cluster: ClusterSpec, size: float, link: Link) -> float:
    """Every worker reads the parameter from its servers, or sends them its gradient: at a machine's interface.

    Of the other machines' m - 1 servers' shards d copies come in, as many as the own server sends out.
    """
    m = cluster.machines
    return link(cluster.devices * (m - 1) / m * size) if m > 1 else 0.0


def accumulate_s(pushes: int, size: float, byte_s: float) -> float:
    """Gradients of a sparse parameter are added up one after the other; each time all that is there is written anew.

    So TensorFlow's accumulators of sparse gradients do: the k-th of them costs k times the first.

    Args:
      pushes: How many there are.
      size: Bytes of one, on the server that adds them up.
      byte_s: Seconds a byte.
    """
    return pushes * (pushes + 1) / 2 * size * byte_s


def aggregate_s(cluster: ClusterSpec, size: float, byte_s: float, *, local: bool) -> float:
    """The sum of all workers' gradients of a sparse parameter.

    Args:
      size: Bytes of the rows that a worker touches.
      byte_s: Seconds a byte that a server writes.
      local: Whether each machine adds up its workers' gradients first (section 5.3.2): a server gets one of each
        machine then, d times as long where workers touch other rows.
    """
    m, d = cluster.machines, cluster.devices
    if not local:
        return accumulate_s(m * d, size / m, byte_s)
    return accumulate_s(d, size, byte_s) + accumulate_s(m, d * size / m, byte_s)
