"""Says what clients of a plan send each other, or servers, and what that takes: what is simulated of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from autopar.cost.client_times import ClientLoad, Pairs, Served, ServerLoad
from autopar.cost.collectives import all_reduce_s
from autopar.errors import ArgumentsError
from autopar.ir.balance import center_shares
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import Plan
from autopar.ir.ring import Ring
from autopar.ir.sync_plan import ServedPlan, ServerPlan, SyncPlan
from autopar.planning.plan import goes_by_rows, untouched_bytes

#: What servers keep, and what is pulled of it and pushed to it: the sizes of a `ServerPlan`.
_BYTES = ("leaf_bytes", "pull_bytes", "push_bytes")


def served_of(plan: Plan, cluster: ClusterSpec, load: ClientLoad, wanted: int | None) -> Served | None:
    """Says how clients ask servers, or passive clients of a ring; None where they ask nobody.

    Args:
      plan: Theirs.
      cluster: What connects them.
      load: How many there are, and what they do.
      wanted: How many servers there are to be; None: as the plan says.

    Raises:
      ArgumentsError: more servers than processes.
    """
    if plan.served is not None:
        return _pulling(plan, plan.served, cluster, load, wanted)
    assert plan.sync is not None, "clients train"
    if plan.sync.servers:
        return _exchanging(plan, plan.sync, cluster, load, wanted)
    if plan.sync.partners == "neighbors" and load.count > 1:
        return _neighbors(plan, plan.sync, cluster, load)
    return None


def sent_bytes(plan: Plan, clients: int) -> float:
    """Returns the bytes that each of so many clients sends in a step, on average: to servers what it pushes."""
    if plan.served is not None:
        return sum(server.push_bytes for server in plan.served.servers)
    assert plan.sync is not None, "clients train"
    if plan.sync.partners in ("center", "neighbors"):  # tables go whole
        size = sum(_weight_bytes(plan, plan.sync))
    else:
        size = round(sum(_sent_bytes(plan, plan.sync, clients * plan.sync.every)))
    return dataclasses.replace(plan.sync, clients=clients, mean_bytes=size).sent_bytes


def means_s(plan: Plan, sync: SyncPlan, cluster: ClusterSpec, load: ClientLoad) -> Sequence[float]:
    """Returns the seconds of each fragment's mean over all clients, of as many as there are in `load`."""
    each = max(1, cluster.devices // plan.devices)  # clients of a machine
    ends = dataclasses.replace(cluster, machines=math.ceil(load.count / each), devices=min(each, load.count))
    copies = min(plan.devices, cluster.devices)  # of a sum, which share a machine's interfaces
    sent = _sent_bytes(plan, sync, load.count * sync.every)
    return [all_reduce_s(ends, size, copies=copies) if load.count > 1 else 0.0 for size in sent]


def pairs_of(plan: Plan, sync: SyncPlan, cluster: ClusterSpec, load: ClientLoad) -> Pairs:
    """Says how clients average with a neighbour behind each step: of tables by rows those that any client has ever
    touched, at most."""

    def sent(step: int) -> float:
        return sum(_sent_bytes(plan, sync, load.count * step))

    return Pairs(Ring(load.count), cluster, plan.devices, sent_bytes=sent)


def _sent_bytes(plan: Plan, sync: SyncPlan, minibatches: int) -> list[float]:
    """Returns the bytes of each fragment that are averaged: of tables whose other rows no step moves those rows alone
    that so many minibatches have touched, at most."""
    rest = {
        table.path: untouched_bytes(table, minibatches)
        for table in plan.tables
        if (table.path in sync.by_rows if sync.clients > 1 else goes_by_rows(table))
    }
    pairs = zip(sync.fragments, sync.fragment_bytes, strict=True)
    return [size - sum(rest.get(path, 0.0) for path in fragment) for fragment, size in pairs]


def _pulling(plan: Plan, served: ServedPlan, cluster: ClusterSpec, load: ClientLoad, wanted: int | None) -> Served:
    """Says how workers pull and push: what the plan's servers keep, or an equal part of it, if there are others."""
    sums = {name: sum(getattr(s, name) for s in served.servers) for name in _BYTES}
    total = dataclasses.replace(served.servers[0], leaves=(), pieces={}, **sums)
    touched = [_touched_bytes(plan, served, server) for server in served.servers]
    leaves = sum(len(server.leaves) for server in served.servers)
    count = _servers(wanted, len(served.servers), served.clients, load.count, load.count * plan.devices, leaves)
    servers, memory_s = served.servers, 1 / cluster.device.memory_bytes_s
    if count != len(servers):
        servers = [dataclasses.replace(total, **{name: getattr(total, name) // count for name in _BYTES})] * count
        touched = [sum(touched) / count] * count
    return Served(
        servers=[
            ServerLoad(
                device=n,
                pull_bytes=server.pull_bytes,
                push_bytes=server.push_bytes,
                read_s=cluster.to_host(server.pull_bytes),
                update_s=cluster.to_host(server.push_bytes) + (2 * touched[n] + server.push_bytes) * memory_s,
            )
            for n, server in enumerate(servers)
        ],
        cluster=cluster,
        devices=range(0, load.count * plan.devices, plan.devices),
        bound=served.staleness,
        receive_s=cluster.to_host(total.pull_bytes),
        send_s=cluster.to_host(total.push_bytes),
    )


def _exchanging(plan: Plan, sync: SyncPlan, cluster: ClusterSpec, load: ClientLoad, wanted: int | None) -> Served:
    """Says how workers exchange weights with a centre, of which servers keep what they would keep."""
    weights, processes = _weight_bytes(plan, sync), load.count * plan.devices
    count = _servers(wanted, sync.servers, sync.clients, load.count, processes, processes)
    parts = [sum(span.nbytes for span in share) for share in center_shares(weights, count)]
    served = _beside(plan, cluster, load, sum(weights), dict(enumerate(parts)))
    return dataclasses.replace(served, every=sync.every)


def _neighbors(plan: Plan, sync: SyncPlan, cluster: ClusterSpec, load: ClientLoad) -> Served:
    """Says how active clients exchange weights with passive ones, from whose first processes these answer; of tables by
    rows those that all clients have touched in as many steps as it takes these to go round, at most."""
    ring = Ring(load.count)
    size = int(sum(_sent_bytes(plan, sync, load.count * ring.rounds)))
    served = _beside(plan, cluster, load, size, {c * plan.devices: size for c in ring.passives})
    return dataclasses.replace(served, ring=ring)


def _weight_bytes(plan: Plan, sync: SyncPlan) -> list[int]:
    sizes = {leaf.path: leaf.nbytes for leaf in plan.dense} | {table.path: table.nbytes for table in plan.tables}
    return [sizes[path] for fragment in sync.fragments for path in fragment]


def _beside(plan: Plan, cluster: ClusterSpec, load: ClientLoad, size: int, parts: Mapping[int, int]) -> Served:
    """Says how clients exchange weights beside a step.

    Args:
      plan, cluster, load: As of `served_of`.
      size: Bytes of a client's weights.
      parts: Device of each that answers -> bytes of what it keeps.
    """
    memory_s = 1 / cluster.device.memory_bytes_s

    def update_s(part: int) -> float:
        """Predicts what reads the weights of both, and writes those that are kept and the moves."""
        return 2 * cluster.to_host(part) + 4 * part * memory_s

    return Served(
        servers=[ServerLoad(device, part, part, update_s=update_s(part)) for device, part in parts.items()],
        cluster=cluster,
        devices=range(0, load.count * plan.devices, plan.devices),
        receive_s=cluster.to_host(size) + 3 * size * memory_s,
        send_s=cluster.to_host(size),
    )


def _servers(wanted: int | None, planned: int, clients: int, count: int, processes: int, leaves: int) -> int:
    """Returns how many servers there are.

    Args:
      wanted: As of `served_of`.
      planned, clients: Servers and clients of the plan.
      count, processes: Clients and processes that are simulated.
      leaves: That servers keep: a server has one at least.

    Raises:
      ArgumentsError: more than processes.
    """
    if wanted is not None and wanted > processes:
        raise ArgumentsError(f"servers={wanted} of {processes} processes: give as many at most")
    found = wanted or (planned if planned < clients else planned * count // clients)
    return max(1, min(found, processes, leaves))


def _touched_bytes(plan: Plan, served: ServedPlan, server: ServerPlan) -> float:
    """Returns the bytes of what a push updates on a server: all of it, but of tables by rows those rows alone."""
    touched = float(server.leaf_bytes)
    for table in plan.tables:
        if table.path in served.by_rows:
            touched -= untouched_bytes(table, 1) * sum(map(server.part_of, (table.path, *table.slots)))
    return touched
