"""The cluster that is here: its machines and devices, what they can do, and what exchanges between them take.

Exchanges are measured by level, as `cost.collectives` has them: inside of all machines at once; then between machines,
by all their devices at once, each with those of its own number.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from jax.sharding import AxisType, Mesh

from autopar.backends.devices import Devices
from autopar.cost.cluster import NAMED, Cluster, Device, Link
from autopar.cost.fit import fit_collective
from autopar.errors import ArgumentsError, AutoparError
from autopar.launch.toml_file import format_toml
from autopar.measure.calibrate import cache_file, write_file
from autopar.measure.loops import collective_points, product_seconds, undisturbed, walk_seconds
from autopar.measure.memory import memory_of
from autopar.measure.ranks import measure_ranks
from autopar.mpi.limits import cores, machine_name, total_bytes
from autopar.mpi.world import world

_logger = logging.getLogger("autopar")

#: Length of matrices, and bytes that are walked over on each device, or by all CPU devices together: more than caches
#: hold.
_CPU_LENGTH, _CPU_WALKED = 384, 1 << 26
_LENGTH, _WALKED = 4096, 1 << 28
_RUNS = 3
#: Of the result of a collective on one device, in bytes.
_CPU_BYTES = (1 << 10, 1 << 13, 1 << 16, 1 << 19, 1 << 22)
_BYTES = (*_CPU_BYTES, 1 << 25)


def detect(mesh: Mesh | None = None) -> Cluster:
    """As `Cluster.detect` says."""
    devices, machines = _devices_here(mesh)
    return _of_first(devices, _with_links(_without_links(devices, machines), _kept(devices, machines)))


def calibrate(mesh: Mesh | None = None) -> Cluster:
    """Measure how long exchanges take on the devices here, and between the ranks of an MPI job. Collective.

    Each collective that plans use gets its latency and bandwidth, on each level of links, by least squares over several
    sizes; how well they explain what was measured is in the links' `source`. They are kept in the user's cache, where
    `Cluster.detect` finds them. Takes some ten seconds; nothing else should run on the machines meanwhile.

    Args:
      mesh: The devices; all if left out.

    Returns:
      The cluster, with `measured`. Of levels that have one participant only nothing can be measured: they have links
      that are assumed, and say so.

    Raises:
      ArgumentsError: the machines have different numbers of devices.

    Example:
      >>> import autopar
      >>> cluster = autopar.calibrate()
      >>> cluster.machines, cluster.device.memory_bytes_s > 0
      (1, True)
    """
    devices, machines = _devices_here(mesh)
    cluster = _without_links(devices, machines)
    grid = devices.mesh.devices.reshape(cluster.machines, cluster.devices)
    measured = {**measure_links(grid), **measure_ranks(world())}
    cluster = _of_first(devices, _with_links(cluster, measured))
    file = cache_file(devices, "cluster-{}.toml")
    _logger.info("%s: links are measured, and kept in %s", cluster, file)
    if devices.processes.rank == 0:
        write_file(file, format_toml(cluster.as_dict()))
    return cluster


def measure_links(grid: np.ndarray) -> dict[str, dict[str, Link]]:
    """Collective -> level -> its link; nothing where there is one participant only.

    Args:
      grid: `[machines, devices]` of JAX's devices.
    """
    mesh = Mesh(grid, ("machine", "device"), axis_types=(AxisType.Auto,) * 2)
    sizes = _CPU_BYTES if grid.flat[0].platform == "cpu" else _BYTES
    found: dict[str, dict[str, Link]] = {}
    for collective in ("all_reduce", "all_gather", "all_to_all"):
        for level, axis, sharing in (("inside", "device", 1), ("between", "machine", grid.shape[1])):
            devices = Devices(mesh, axis)
            if devices.count > 1:
                parts = 1 if collective == "all_reduce" else devices.count  # of the result
                timed = undisturbed(collective_points(devices, collective, sizes))
                points = [(size / parts, s) for size, s in timed]
                link = fit_collective(collective, devices.count, points, sharing)
                found.setdefault(collective, {})[level] = link
    return found


def arrange(machines: Sequence[str]) -> list[list[int]]:
    """Numbers of the devices of each machine, machines in the order of their first ones.

    Args:
      machines: By device, its machine.

    Raises:
      ArgumentsError: they have different numbers of devices.
    """
    groups: dict[str, list[int]] = {}
    for k, machine in enumerate(machines):
        groups.setdefault(machine, []).append(k)
    counts = [len(group) for group in groups.values()]
    if len(set(counts)) > 1:
        raise ArgumentsError(
            f"a cluster's machines are alike; those here have {', '.join(map(str, counts))} devices. Give a mesh "
            "with as many devices of each"
        )
    return list(groups.values())


def _devices_here(mesh: Mesh | None) -> tuple[Devices, int]:
    """All devices of a mesh along one axis, machine by machine; and how many machines they are on."""
    if mesh is not None and not isinstance(mesh, Mesh):
        raise ArgumentsError(f"mesh is a {type(mesh).__name__}; make one with jax.make_mesh")
    devices = Devices.of(mesh)
    names = devices.processes.gather(machine_name().encode(), "machines of the devices")
    by_process = dict(zip(devices.processes.members, names, strict=True))
    flat = list(devices.mesh.devices.flat)
    groups = arrange([by_process[d.process_index].decode() for d in flat])
    line = np.array([flat[k] for group in groups for k in group])
    return Devices(Mesh(line, ("data",), axis_types=(AxisType.Auto,)), "data"), len(groups)


def _without_links(devices: Devices, machines: int) -> Cluster:
    """The cluster with links that are assumed."""
    each = devices.count // machines
    first = devices.mesh.devices.flat[0]
    is_cpu = first.platform == "cpu"
    memory, host = memory_of(devices), total_bytes()
    whence = "a share of the host's" if memory is None else "what JAX may take"
    length, size = (_CPU_LENGTH, _CPU_WALKED // each) if is_cpu else (_LENGTH, _WALKED)
    device = Device(
        name=f"CPU of {cores()} cores" if is_cpu else first.device_kind,
        memory_bytes=host // each if memory is None else memory,
        flops_s=2 * length**3 / product_seconds(devices, length, _RUNS),
        memory_bytes_s=2 * size / walk_seconds(devices, size, _RUNS),
        source=f"memory: {whence}; flops_s (float32) and memory_bytes_s: measured here, with all devices at work",
    )
    inside, between = assumed_links(first.platform, first.device_kind)
    there = alike(first.platform, first.device_kind)
    bytes_s, to_host = there.host_bytes_s, _assumed(there.to_host)
    source = f"host_bytes: asked for; host_bytes_s: assumed, as in {there.name}"
    if is_cpu:
        source = "host_bytes: asked for; host_bytes_s: the devices' memory_bytes_s together"
        bytes_s = each * device.memory_bytes_s
        to_host = Link(0.0, device.memory_bytes_s / 2, "the device is the host: a copy, at the measured memory_bytes_s")
    return Cluster("here", machines, each, device, inside, between, host, bytes_s, to_host, source)


def assumed_links(platform: str, kind: str) -> tuple[Link, Link]:
    """Inside and between, where nothing was measured: those of known devices, else a copy in memory or PCIe; Ethernet.

    Args:
      platform, kind: Of the devices, as JAX calls them.
    """
    return _assumed(alike(platform, kind).inside), _assumed(NAMED["hosts-10gbe"].between)


def alike(platform: str, kind: str) -> Cluster:
    """The known cluster of such devices, else one of CPUs, or of GPUs on PCIe."""
    known = (c for c in NAMED.values() if c.device.name.removesuffix(" SXM") in kind and "PCIe" not in kind)
    return next(known, NAMED["hosts-10gbe" if platform == "cpu" else "parallax-8x6"])


def _assumed(link: Link) -> Link:
    return replace(link, source=f"assumed: {link.source.removeprefix('assumed: ')}")


def _with_links(cluster: Cluster, measured: Mapping[str, Mapping[str, Link]]) -> Cluster:
    """With links that were measured; those of all_reduce for what isn't measured by itself."""
    return replace(cluster, measured=measured, **measured.get("all_reduce", {}))


def _kept(devices: Devices, machines: int) -> Mapping[str, Mapping[str, Link]]:
    """What `calibrate` has kept of these devices; nothing if it hasn't."""
    try:
        kept = Cluster.load(cache_file(devices, "cluster-{}.toml"))
    except AutoparError:
        return {}
    return kept.measured if (kept.machines, kept.count) == (machines, devices.count) else {}


def _of_first(devices: Devices, cluster: Cluster) -> Cluster:
    """What the first process has found: all plan by the same figures."""
    all_ = devices.processes.gather(json.dumps(cluster.as_dict()).encode(), "what the devices can do")
    return Cluster.of_dict(json.loads(all_[0]))
