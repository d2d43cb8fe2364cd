"""`Cluster`: machines, devices, memories and links, as the cost model sees them.

Figures are of one direction and of what can be had in practice or on paper, as their `source` says. Machines are alike.
A cluster can be kept in a file, in the sections that `hardware` describes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from autopar.errors import ArgumentsError
from autopar.launch.cluster_file import read_cluster
from autopar.launch.toml_file import format_toml

_GIB = 1 << 30
#: Between the devices of a machine, or between machines.
Level = Literal["inside", "between"]


@dataclass(frozen=True, slots=True)
class Link:
    """What connects devices.

    Attributes:
      latency_s: Seconds before the first byte arrives.
      bytes_s: Bytes a second, each way at once: of a device's link, or of a machine's network interfaces together.
      source: Where the figures come from.
    """

    latency_s: float
    bytes_s: float
    source: str = ""

    def __post_init__(self) -> None:
        if not self.latency_s >= 0 or not self.bytes_s > 0:
            raise ArgumentsError(f"a link of {self.latency_s} s and {self.bytes_s} bytes a second: 0 or more, and more")

    def __call__(self, size: float, messages: float = 1) -> float:
        """Seconds for so many bytes in so many messages, one after the other."""
        return messages * self.latency_s + size / self.bytes_s


#: What connects devices with their host where nothing else is said.
PCIE = Link(10e-6, 12e9, "PCIe 3.0 x16: 15.75 GB/s less protocol; latency: assumed")


@dataclass(frozen=True, slots=True)
class Device:
    """What computes.

    Attributes:
      name: For people.
      memory_bytes: Its memory.
      flops_s: Floating-point operations a second in matrix products of the type that models train in.
      memory_bytes_s: Bytes a second from and to its memory, together.
      source: Where the figures come from.
    """

    name: str
    memory_bytes: float
    flops_s: float
    memory_bytes_s: float
    source: str = ""

    def __post_init__(self) -> None:
        if not all(x > 0 for x in (self.memory_bytes, self.flops_s, self.memory_bytes_s)):
            raise ArgumentsError(f"{self.name}: memory_bytes, flops_s and memory_bytes_s are more than 0")


@dataclass(frozen=True, slots=True)
class Cluster:
    """Machines that are alike, each with some devices.

    Attributes:
      name: For people.
      machines, devices: How many machines; how many devices each has.
      device: Each of them.
      inside: Between the devices of a machine, of one device.
      between: Between machines, of one machine.
      host_bytes: Memory of a machine's host.
      host_bytes_s: Bytes a second from and to that memory, together, all cores at work.
      to_host: Between a device and the memory of its host, of one device.
      host_source: Where the hosts' figures come from.
      measured: Collective -> level ("inside", "between") -> its own link, as `autopar.calibrate` finds it: latency of
        each of its messages and bandwidth, to be taken in place of `inside` and `between`.
    """

    name: str
    machines: int
    devices: int
    device: Device
    inside: Link
    between: Link
    host_bytes: float
    host_bytes_s: float = 50e9
    to_host: Link = PCIE
    host_source: str = ""
    measured: Mapping[str, Mapping[str, Link]] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not all(isinstance(n, int) and n >= 1 for n in (self.machines, self.devices)):
            raise ArgumentsError(
                f"a cluster of {self.machines} machines of {self.devices} devices: whole numbers, 1 at least of each"
            )

    @property
    def count(self) -> int:
        """N: all devices."""
        return self.machines * self.devices

    @property
    def devices_are_hosts(self) -> bool:
        """Whether devices have their memory from the host: CPUs, which share it out."""
        return math.isclose(self.devices * self.device.memory_bytes, self.host_bytes, rel_tol=0.01)

    def link(self, level: Level, collective: str) -> Link:
        """What a collective has on a level of links: what was measured of it, else what all have."""
        general = self.inside if level == "inside" else self.between
        return self.measured.get(collective, {}).get(level, general)

    def __str__(self) -> str:
        return f"{self.name}: {self.machines} x {self.devices} {self.device.name}"

    @staticmethod
    def named(name: str) -> Cluster:
        """A cluster that is known by name.

        Raises:
          ArgumentsError: there is none of that name.
        """
        if name not in NAMED:
            raise ArgumentsError(f"no cluster is called {name!r}; there are {', '.join(NAMED)}")
        return NAMED[name]

    @staticmethod
    def detect(mesh: Any = None) -> Cluster:
        """The machines and devices that are here, all processes' together. Takes about two seconds. Collective.

        Memories are asked for, floating-point operations and memory bandwidth are measured, links are those that
        `autopar.calibrate` has found on these devices, else assumed; each part's `source` says which. Of the hosts of
        GPUs nothing but the memory's size is measured.

        Args:
          mesh: A `jax.sharding.Mesh`, of whose devices it is made; all devices if left out.

        Raises:
          ArgumentsError: the machines have different numbers of devices.
        """
        from autopar.measure.detect import detect  # above this in the layers, and imported by those who measure

        return detect(mesh)

    @staticmethod
    def load(path: str | Path, like: Cluster | None = None) -> Cluster:
        """The cluster in a file (`cluster.toml`, or Parallax's resource file, which has no figures).

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
        found = dict(read.hardware)
        if counts:
            found.update(machines=len(counts), devices=counts[0])
        return Cluster.of_dict({"name": Path(path).name, **found}, like, str(path))

    @staticmethod
    def of_dict(given: Mapping[str, Any], like: Cluster | None = None, where: str = "a cluster") -> Cluster:
        """The reverse of `as_dict`.

        Args:
          given: Nested mappings, as the sections of a `cluster.toml`.
          like: Has what is missing.
          where: Whose error it is.

        Raises:
          ArgumentsError: something is missing, and there is no `like`.
        """
        links = given.get("link", {})
        missing = [] if "device" in given else ["[device]"]
        missing += [f"[link.{level}]" for level in ("inside", "between") if level not in links]
        missing += [key for key in ("name", "host_bytes", "machines", "devices") if key not in given]
        if missing and like is None:
            raise ArgumentsError(
                f"{where} lacks {', '.join(missing)}. Write them there, or give a cluster that has them: like=..."
            )
        old = {} if like is None else like.as_dict()
        found = {**old, **given, "link": {**old.get("link", {}), **links}}
        if {"inside", "between"} & set(links) and "measured" not in given:
            found["measured"] = {}  # of other links
        optional: dict[str, Any] = {k: found[k] for k in ("host_bytes_s", "host_source") if k in found}
        optional |= {"to_host": Link(**found["link"]["host"])} if "host" in found["link"] else {}
        return Cluster(
            name=found["name"],
            machines=found["machines"],
            devices=found["devices"],
            device=Device(**found["device"]),
            inside=Link(**found["link"]["inside"]),
            between=Link(**found["link"]["between"]),
            host_bytes=found["host_bytes"],
            measured={
                collective: {level: Link(**link) for level, link in levels.items()}
                for collective, levels in found.get("measured", {}).items()
            },
            **optional,
        )

    def as_dict(self) -> dict[str, Any]:
        """Nested mappings of texts and numbers, as the sections of a `cluster.toml`."""
        found = asdict(self)
        levels = {"inside": found.pop("inside"), "between": found.pop("between"), "host": found.pop("to_host")}
        keys = ("name", "machines", "devices", "host_bytes", "host_bytes_s", "host_source")
        return {**{k: found[k] for k in keys}, "device": found["device"], "link": levels, "measured": found["measured"]}

    def save(self, path: str | Path) -> None:
        """Write a `cluster.toml` from which `load` makes this cluster again. What is there is overwritten.

        Raises:
          ArgumentsError: its name doesn't end in .toml, by which `load` knows it, or it can't be written.
        """
        if Path(path).suffix != ".toml":
            raise ArgumentsError(f"{path}: the name of a cluster's file ends in .toml")
        try:
            Path(path).write_text(format_toml(self.as_dict()), encoding="utf-8")
        except OSError as error:
            raise ArgumentsError(f"{path}: the cluster can't be written: {error.strerror}") from error

    def of(self, machines: int, devices: int | None = None, name: str | None = None) -> Cluster:
        """Another number of the same machines."""
        devices = self.devices if devices is None else devices
        return replace(self, name=self.name if name is None else name, machines=machines, devices=devices)


def require_cluster(given: Any) -> Cluster:
    """What was given as a cluster, if it is one.

    Raises:
      ArgumentsError: it isn't.
    """
    if not isinstance(given, Cluster):
        raise ArgumentsError(f"cluster is a {type(given).__name__}; give a Cluster: autopar.Cluster.named('dgx-h100')")
    return given


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
