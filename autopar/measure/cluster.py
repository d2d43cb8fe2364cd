"""Describes a cluster: machines, devices, their speed, and the links between them.

It is found here, known by name, or kept in a file in the sections that `launch/cluster_file.py` describes.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from autopar.backends.devices import Devices
from autopar.cost.collectives import Reductions, fit_collective, reductions
from autopar.errors import ArgumentsError, AutoparError
from autopar.ir.cluster import PCIE, ClusterSpec, Device, Link
from autopar.jax_types import Comm, Json, Pytree
from autopar.launch.cluster_file import DEVICE_COLLECTIVES, RANK_COLLECTIVES, format_toml, read_cluster
from autopar.launch.group import Group, MpiGroup, everyone
from autopar.measure.figures import cache_file, measuring, memory_of, write_cache
from autopar.measure.loops import Budget, collective_points, product_seconds, undisturbed, walk_seconds
from autopar.mpi.exchange import Exchange
from autopar.mpi.limits import cores, machine_name, total_bytes

#: Side of matrices, and bytes (more than caches hold) of a memory pass on each device, or on all CPU devices together.
_CPU_LENGTH, _CPU_WALKED = 384, 1 << 26
_LENGTH, _WALKED = 4096, 1 << 28
_RUNS = 3
_GIB = 1 << 30
_FILE = "cluster-{}.toml"


@dataclass(frozen=True, slots=True, eq=False)
class Cluster(ClusterSpec):
    """A number of equal machines with some devices each: those here, known by name, or described in a file.

    Attributes: see `ClusterSpec`.
    """

    @staticmethod
    def named(name: str) -> Cluster:
        """Returns a cluster that is known by name.

        Raises:
          ArgumentsError: there is none of that name.
        """
        if name not in NAMED:
            raise ArgumentsError(f"no cluster is called {name!r}; there are {', '.join(NAMED)}")
        return NAMED[name]

    @staticmethod
    def detect(mesh: Any = None) -> Cluster:
        """Describes the machines and devices here, of all processes, in about two seconds. Collective.

        Memory sizes are asked for, floating-point operations and memory bandwidth are measured. Links are those that
        `autopar.calibrate` has found on these devices, else assumed; each `source` says which. Of hosts of GPUs only
        the memory's size is found.

        Args:
          mesh: A `jax.sharding.Mesh`, whose devices are described; all devices if left out.

        Raises:
          ArgumentsError: the machines have different numbers of devices.
        """
        devices, machines = _devices_here(mesh)
        kept = _kept(devices, machines)
        return _of_first(devices, _with_links(_without_links(devices, machines), {} if kept is None else kept.measured))

    @staticmethod
    def load(path: str | Path, like: Cluster | None = None) -> Cluster:
        """Loads a cluster from a file (`cluster.toml`, or Parallax's resource file, which has no figures).

        Args:
          path: The file. Its machines are its [[host]] tables, or their number is given.
          like: Has the sections that the file lacks.

        Raises:
          LaunchError: the file is missing or wrong.
          ArgumentsError: its machines have different numbers of devices; it lacks sections, and there is no `like`.
        """
        read = read_cluster(path, named=False)
        counts = [h.processes * h.devices for h in read.hosts]
        if len(set(counts)) > 1:
            shown = ", ".join(f"{h.name} {count}" for h, count in zip(read.hosts, counts, strict=True))
            raise ArgumentsError(f"{path}: the machines of a cluster that is planned for are alike; devices: {shown}")
        fields = dict(read.hardware)
        if counts:
            fields.update(machines=len(counts), devices=counts[0])
        return Cluster.of_dict({"name": Path(path).name, **fields}, like, str(path))

    @staticmethod
    def of_dict(values: Mapping[str, Json], like: Cluster | None = None, where: str = "a cluster") -> Cluster:
        """Makes a cluster of the mappings that `as_dict` returns.

        Args:
          values: Nested mappings, as the sections of a `cluster.toml`.
          like: Has missing sections.
          where: The source of `values` in errors.

        Raises:
          ArgumentsError: something is missing, and there is no `like`.
        """
        links = values.get("link", {})
        missing = [] if "device" in values else ["[device]"]
        missing += [f"[link.{level}]" for level in ("inside", "between") if level not in links]
        missing += [key for key in ("name", "host_bytes", "machines", "devices") if key not in values]
        if missing and like is None:
            raise ArgumentsError(
                f"{where} lacks {', '.join(missing)}. Write them there, or give a cluster that has them: like=..."
            )
        old = {} if like is None else like.as_dict()
        merged = {**old, **values, "link": {**old.get("link", {}), **links}}
        if {"inside", "between"} & set(links) and "measured" not in values:
            merged["measured"] = {}  # it was measured on other links
        keys = ("name", "machines", "devices", "host_bytes", "host_bytes_s", "host_source")
        fields: dict[str, Any] = {key: merged[key] for key in keys if key in merged}
        for name, level in (("inside", "inside"), ("between", "between"), ("to_host", "host")):
            if level in merged["link"]:
                fields[name] = Link(**merged["link"][level])
        measured = {
            collective: {level: Link(**link) for level, link in levels.items()}
            for collective, levels in merged.get("measured", {}).items()
        }
        return Cluster(**fields, device=Device(**merged["device"]), measured=measured)

    def save(self, path: str | Path) -> None:
        """Writes a `cluster.toml`, which `load` reads. An existing file is overwritten.

        Raises:
          ArgumentsError: its name doesn't end in .toml, by which `load` knows it, or it can't be written.
        """
        if Path(path).suffix != ".toml":
            raise ArgumentsError(f"{path}: the name of a cluster's file ends in .toml")
        try:
            Path(path).write_text(format_toml(self.as_dict()), encoding="utf-8")
        except OSError as error:
            raise ArgumentsError(f"{path}: the cluster can't be written: {error.strerror}") from error


def measure_cluster(mesh: Mesh | None, budget: Budget, *, again: bool) -> Cluster:
    """Describes the cluster here, with kept links, or links that are measured now and kept. Collective.

    `mesh`: the devices; all if left out. `budget`: time for measuring the links. `again`: Kept links are measured
    again. Raises ArgumentsError if the machines have different numbers of devices.
    """
    devices, _ = _devices_here(mesh)
    cluster = Cluster.detect(mesh)
    if not missing_links(cluster) and not again:
        return cluster
    grid = devices.mesh.devices.reshape(cluster.machines, cluster.devices)
    file = cache_file(devices, _FILE)
    shown = devices.processes.rank == 0
    with measuring("the links between devices", "for plans", 2, file, shown=shown) as advance:
        advance("between devices")
        measured = measure_links(grid, budget)
        advance("between ranks")
        measured |= measure_ranks(everyone(), budget)
    cluster = _of_first(devices, _with_links(cluster, {**cluster.measured, **measured}))
    if devices.processes.rank == 0:
        write_cache(file, format_toml(cluster.as_dict()))
    return cluster


def missing_links(cluster: ClusterSpec) -> list[str]:
    """Names the collectives of the devices, and of MPI's ranks, that weren't measured. Collective."""
    ranks = everyone()
    names = DEVICE_COLLECTIVES if cluster.count > 1 else ()
    names += RANK_COLLECTIVES if ranks.several and isinstance(ranks, MpiGroup) else ()
    return [name for name in names if name not in cluster.measured]


@functools.cache
def reductions_here() -> Reductions:
    """Returns how the ranks of this job add up, by the first one's calibration, if it has one. Collective."""
    try:
        kept = _kept(*_devices_here(None))
    except ArgumentsError:  # machines that differ aren't calibrated
        kept = None
    own = Reductions() if kept is None else reductions(kept)
    return Reductions(*everyone().first(own, "what calibration found of reductions"))


def require_cluster(cluster: Any) -> ClusterSpec:
    """Returns a cluster; raises an ArgumentsError for anything else."""
    if not isinstance(cluster, ClusterSpec):
        raise ArgumentsError(
            f"cluster is a {type(cluster).__name__}; give a Cluster: autopar.Cluster.named('dgx-h100')"
        )
    return cluster


def arrange_machines(machines: Sequence[str]) -> list[list[int]]:
    """Groups device numbers by machine, in the order of the machines' first devices. `machines`: the machine of each
    device. Raises ArgumentsError if the machines have different numbers of devices."""
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
    """Returns a mesh's devices along one axis, machine by machine, and the number of machines."""
    if mesh is not None and not isinstance(mesh, Mesh):
        raise ArgumentsError(f"mesh is a {type(mesh).__name__}; make one with jax.make_mesh")
    devices = Devices.of(mesh)
    names = devices.processes.values(machine_name(), "machines of the devices")
    by_process = dict(zip(devices.processes.members, names, strict=True))
    flat = list(devices.mesh.devices.flat)
    groups = arrange_machines([by_process[d.process_index] for d in flat])
    line = np.array([flat[k] for group in groups for k in group])
    return Devices(Mesh(line, ("data",), axis_types=(AxisType.Auto,)), "data"), len(groups)


def _without_links(devices: Devices, machines: int) -> Cluster:
    """Describes the cluster, with assumed links."""
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
    there = are_alike(first.platform, first.device_kind)
    bytes_s, to_host = there.host_bytes_s, _assumed(there.to_host)
    source = f"host_bytes: asked for; host_bytes_s: assumed, as in {there.name}"
    if is_cpu:
        source = "host_bytes: asked for; host_bytes_s: the devices' memory_bytes_s together"
        bytes_s = each * device.memory_bytes_s
        to_host = Link(0.0, device.memory_bytes_s / 2, "the device is the host: a copy, at the measured memory_bytes_s")
    return Cluster("here", machines, each, device, inside, between, host, bytes_s, to_host, source)


def assumed_links(platform: str, kind: str) -> tuple[Link, Link]:
    """Returns the assumed links inside and between machines for devices of a `platform` and `kind`, as JAX calls them.

    Inside: that of known devices, else a copy in memory or PCIe. Between: Ethernet.
    """
    return _assumed(are_alike(platform, kind).inside), _assumed(NAMED["hosts-10gbe"].between)


def are_alike(platform: str, kind: str) -> Cluster:
    """Returns the known cluster of such devices, else one of CPUs, or of GPUs on PCIe."""
    known = (c for c in NAMED.values() if c.device.name.removesuffix(" SXM") in kind and "PCIe" not in kind)
    return next(known, NAMED["hosts-10gbe" if platform == "cpu" else "parallax-8x6"])


def _assumed(link: Link) -> Link:
    return replace(link, source=f"assumed: {link.source.removeprefix('assumed: ')}")


def _with_links(cluster: Cluster, measured: Mapping[str, Mapping[str, Link]]) -> Cluster:
    # The links of all_reduce hold for collectives that weren't measured.
    return replace(cluster, measured=measured, **measured.get("all_reduce", {}))


def _kept(devices: Devices, machines: int) -> Cluster | None:
    try:
        kept = Cluster.load(cache_file(devices, _FILE))
    except AutoparError:
        return None
    return kept if (kept.machines, kept.count) == (machines, devices.count) else None


def _of_first(devices: Devices, cluster: Cluster) -> Cluster:
    return Cluster.of_dict(devices.processes.first(cluster.as_dict(), "what the devices can do"))


_TITAN_XP = Device("TITAN Xp", 12e9, 12.15e12, 547.7e9, "NVIDIA's data sheet: 12 GB, 547.7 GB/s, 12.15 TFLOPS FP32")
_H100 = Device("H100 SXM", 80e9, 494.7e12, 3.35e12, "NVIDIA's data sheet: 80 GB, 3.35 TB/s, 494.7 TFLOPS TF32, dense")
_H200 = Device("H200 SXM", 141e9, 494.7e12, 4.8e12, "NVIDIA's data sheet: 141 GB, 4.8 TB/s, 494.7 TFLOPS TF32, dense")
_NVLINK = Link(2e-6, 450e9, "NVLink 4: 900 GB/s a GPU, both ways together; latency: assumed")
_NICS = Link(5e-6, 400e9, "8 x ConnectX-7 of 400 Gb/s a machine; latency: assumed")

_DGX_HOST: Any = {
    "host_source": "NVIDIA's data sheet: 2 TB, two Xeon 8480C; 8 channels of DDR5-4800 each: 307.2 GB/s",
    "host_bytes_s": 2 * 307.2e9,
    "to_host": Link(5e-6, 55e9, "PCIe 5.0 x16: 63 GB/s less protocol; latency: assumed"),
}

#: Clusters by name.
NAMED: Mapping[str, Cluster] = {
    "parallax-8x6": Cluster(
        "parallax-8x6",
        8,
        6,
        _TITAN_XP,
        PCIE,
        Link(5e-6, 12.5e9, "Parallax, section 7.1: ConnectX-4, 100 Gb/s InfiniBand; latency: assumed"),
        256 * _GIB,
        host_bytes_s=2 * 76.8e9,
        host_source="Parallax, section 7.1: 256 GB, two Xeon E5-2695 (v4, assumed: 76.8 GB/s each, Intel's data sheet)",
    ),
    "dgx-h100": Cluster("dgx-h100", 1, 8, _H100, _NVLINK, _NICS, 2e12, **_DGX_HOST),
    "dgx-h200": Cluster("dgx-h200", 1, 8, _H200, _NVLINK, _NICS, 2e12, **_DGX_HOST),
    "hosts-10gbe": Cluster(
        "hosts-10gbe",
        4,
        1,
        Device("16 CPU cores", 64 * _GIB, 1e12, 40e9, "assumed: AVX2 cores, two channels of DDR4"),
        Link(20e-6, 10e9, "assumed: a copy in memory"),
        Link(50e-6, 1.25e9, "10 Gb/s Ethernet; latency: assumed"),
        64 * _GIB,
        host_bytes_s=40e9,
        host_source="assumed, as the device's",
        to_host=Link(0.0, 20e9, "the device is the host: a copy in its memory"),
    ),
}


# --- exchanges between devices, and between ranks, on the two levels of links that `cost.collectives` has ---
#
# Inside of all machines at once; then between machines, by all their devices (or ranks) at once, each with those of its
# own number in the others.
#: Bytes of a collective's result on one device; number of bytes that takes as long as a compilation.
_CPU_BYTES = (1 << 10, 1 << 13, 1 << 16, 1 << 19, 1 << 22)
_BYTES = (*_CPU_BYTES, 1 << 25)
_WEIGHED = 1 << 22
#: Bytes that ranks reduce, or that one sends to another.
_RANK_BYTES = (1 << 10, 1 << 13, 1 << 16, 1 << 19, 1 << 21)
_REDUCED_BYTES = (*_RANK_BYTES, 1 << 24)
#: Bytes that they reduce while their devices compute; side of the matrices that are multiplied meanwhile.
_BESIDE_BYTES = (1 << 16, 1 << 19, 1 << 21)
_BESIDE_LENGTH = 384
#: Elements of a row; seconds of a round.
_WIDTH = 64
_TARGET_S = 0.02
#: Factor by which a program takes longer than the sum beside it; least measurable seconds.
_LONGER, _LEAST_S = 2, 1e-6


def measure_links(grid: np.ndarray, budget: Budget, sizes: Sequence[int] = ()) -> dict[str, dict[str, Link]]:
    """Measures links by collective and level. `grid`: devices, `[machines, devices]`; `sizes`: bytes of messages.

    There are none with one participant, or without time for two sizes.
    """
    mesh = Mesh(grid, ("machine", "device"), axis_types=(AxisType.Auto,) * 2)
    sizes = sizes or (_CPU_BYTES if grid.flat[0].platform == "cpu" else _BYTES)
    levels = {"inside": (Devices(mesh, "device"), 1), "between": (Devices(mesh, "machine"), grid.shape[1])}
    timed: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for size, collective, level in itertools.product(_ends_first(sizes), DEVICE_COLLECTIVES, levels):
        devices, _ = levels[level]
        if devices.count > 1:
            measure = functools.partial(collective_points, devices, collective, (size,))
            timed.setdefault((collective, level), []).extend(budget.run(1 + size / _WEIGHED, measure) or [])
    links: dict[str, dict[str, Link]] = {}
    for (collective, level), points in timed.items():
        if len(points) > 1:
            devices, sharing = levels[level]
            parts = 1 if collective == "all_reduce" else devices.count
            sent = [(size / parts, s) for size, s in undisturbed(sorted(points))]
            links.setdefault(collective, {})[level] = fit_collective(collective, devices.count, sent, sharing)
    return links


def _ends_first(sizes: Sequence[int]) -> list[int]:
    # The least and the largest size say most.
    return [sizes[0], sizes[-1], *sizes[1:-1]]


def measure_ranks(group: Group, budget: Budget) -> dict[str, dict[str, Link]]:
    """Measures links between ranks by collective and level. Collective.

    There are none with one rank, without MPI, or without time for two sizes; none between machines with different
    numbers of ranks.
    """
    links: dict[str, dict[str, Link]] = {}
    if not group.several or not isinstance(group, MpiGroup):
        return links
    names = group.values(machine_name(), "machines")
    number = names[: group.rank].count(names[group.rank])
    are_alike = len({names.count(name) for name in names}) == 1
    levels = [("inside", names[group.rank], 1)]
    levels += [("between", number, names.count(names[0]))] if are_alike else []
    for level, colour, sharing in levels:
        with group.split(colour) as part:
            if part.several:
                exchange = Exchange(part.rank, part.size, part.comm)
                for collective, points in _points(exchange, part, budget).items():
                    if len(points) > 1:
                        _, traffic = collective.split("_", 1)
                        link = fit_collective(traffic, part.size, undisturbed(sorted(points)), sharing)
                        links.setdefault(collective, {})[level] = link
    return links


def _points(exchange: Exchange, part: MpiGroup, budget: Budget) -> dict[str, list[tuple[float, float]]]:
    """Measures (bytes, seconds) of exchanges between ranks.

    These are sums, by MPI and in rings; the time that sums add to a program beside them; and rows from each rank to
    each other one.
    """
    points: dict[str, list[tuple[float, float]]] = {}
    reduced = functools.partial(_reduced_s, exchange, part.comm, jax.jit(_products))
    sent = functools.partial(_sent_s, exchange, part.comm)
    for measure, sizes, weight in ((reduced, _REDUCED_BYTES, 3), (sent, _RANK_BYTES, 1)):
        for size in _ends_first(sizes):
            seconds = budget.run(weight, functools.partial(measure, size), part)
            for name, taken in (seconds or {}).items():
                points.setdefault(name, []).append((float(size), taken))
    return points


def _reduced_s(exchange: Exchange, comm: Comm, compute: Callable[..., jax.Array], size: int) -> dict[str, float]:
    """Measures the seconds of sums of `size` bytes. `compute`: multiplies a matrix a number of times."""
    array = np.ones(size // 4, np.float32)
    memory = np.empty(exchange.packed_bytes([array]), np.uint8)

    def reduce(beside: bool = False) -> None:
        exchange.reduce([array], memory=memory, beside=beside)

    ways, seconds = {"mpi_all_reduce": None, "ring_all_reduce": 0}, {}
    for name, exchange.rings_from in ways.items():
        seconds[name] = _seconds(comm, reduce)
    if size in _BESIDE_BYTES:
        faster = min(seconds, key=seconds.__getitem__)
        exchange.rings_from = ways[faster]
        matrix = jax.device_put(np.ones((_BESIDE_LENGTH, _BESIDE_LENGTH), np.float32), jax.local_devices()[0])
        product_s = _seconds(comm, lambda: compute(matrix, 8).block_until_ready()) / 8
        program = functools.partial(compute, matrix, math.ceil(_LONGER * seconds[faster] / product_s))
        seconds["beside_all_reduce"] = _added_seconds(comm, program, reduce)
    return seconds


def _sent_s(exchange: Exchange, comm: Comm, size: int) -> dict[str, float]:
    """Measures the seconds of `size` bytes of rows from each rank to each other one."""
    count = size // 4 // _WIDTH
    requested = exchange.ask(np.arange(exchange.size * count), count)  # all rows of all
    rows, out = np.ones((count, _WIDTH), np.float32), np.empty((exchange.size * count, _WIDTH), np.float32)
    return {"mpi_all_to_all": _seconds(comm, lambda: exchange.fetch(requested, rows, out))}


def _products(x: jax.Array, count: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, count, lambda _, y: (x @ y) * (1 / _BESIDE_LENGTH), x)


def _added_seconds(comm: Comm, program: Callable[[], jax.Array], run: Callable[[bool], None]) -> float:
    """Measures the seconds that a run beside a program adds to the program's."""

    def both() -> None:
        result = program()
        run(True)
        result.block_until_ready()

    return max(_seconds(comm, both) - _seconds(comm, lambda: program().block_until_ready()), _LEAST_S)


def _seconds(comm: Comm, run: Callable[[], Pytree]) -> float:
    """Measures the seconds of one run on the slowest rank, in the fastest of some rounds."""

    def turns(count: int) -> float:
        comm.Barrier()
        start = time.perf_counter()
        for _ in range(count):
            run()
        return max(comm.allgather((time.perf_counter() - start) / count))

    count = max(1, min(1000, int(_TARGET_S / max(turns(3), 1e-7))))
    return min(turns(count) for _ in range(5))
