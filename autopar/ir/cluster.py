"""`ClusterSpec`: machines, devices, memories and links, as the cost model sees them.

Figures are of one direction and of what can be had in practice or on paper, as their `source` says. Machines are alike.
`autopar.Cluster` (`measure/cluster.py`) is one that is found here, known by name, or read from a file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Literal, Self

from autopar.errors import ArgumentsError
from autopar.jax_types import Json

#: The part of a device's memory that states may take; the rest is for batches, activations and gradients.
STATE_SHARE = 0.7


def state_budget(memory: float) -> int:
    """Returns the bytes that the state may take of a device's memory."""
    return int(STATE_SHARE * memory)


#: Between the devices of a machine, or between machines.
Level = Literal["inside", "between"]


@dataclass(frozen=True, slots=True)
class Link:
    """A connection of devices.

    Attributes:
      latency_s: Seconds before the first byte arrives.
      bytes_s: Bytes a second, each way at once: of a device's link, or of a machine's network interfaces together.
      source: Where the figures come from.
    """

    latency_s: float
    bytes_s: float
    source: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.latency_s < math.inf or not self.bytes_s > 0:
            raise ArgumentsError(f"a link of {self.latency_s} s and {self.bytes_s} bytes a second: 0 or more, and more")

    def __call__(self, size: float, messages: float = 1) -> float:
        """Returns seconds for so many bytes in so many messages, one after the other."""
        return messages * self.latency_s + size / self.bytes_s


#: What connects devices with their host where nothing else is said.
PCIE = Link(10e-6, 12e9, "PCIe 3.0 x16: 15.75 GB/s less protocol; latency: assumed")


@dataclass(frozen=True, slots=True)
class Device:
    """A device that computes.

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


@dataclass(frozen=True, slots=True, eq=False)
class ClusterSpec:
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
    measured: Mapping[str, Mapping[str, Link]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not all(isinstance(n, int) and n >= 1 for n in (self.machines, self.devices)):
            raise ArgumentsError(
                f"a cluster of {self.machines} machines of {self.devices} devices: whole numbers, 1 at least of each"
            )

    def __eq__(self, other: object) -> bool:
        """Returns whether it has the same machines, whatever it was made from: a plan's file has no
        `autopar.Cluster`."""
        return isinstance(other, ClusterSpec) and self.as_dict() == other.as_dict()

    def __hash__(self) -> int:
        return hash((self.name, self.machines, self.devices, self.device))

    @property
    def count(self) -> int:
        """N: all devices."""
        return self.machines * self.devices

    @property
    def devices_are_hosts(self) -> bool:
        """Returns whether devices have their memory from the host: CPUs, which share it out."""
        return math.isclose(self.devices * self.device.memory_bytes, self.host_bytes, rel_tol=0.01)

    def link(self, level: Level, collective: str) -> Link:
        """Returns what a collective has on a level of links: what was measured of it, else what all have."""
        general = self.inside if level == "inside" else self.between
        return self.measured.get(collective, {}).get(level, general)

    def __str__(self) -> str:
        return f"{self.name}: {self.machines} x {self.devices} {self.device.name}"

    def as_dict(self) -> dict[str, Json]:
        """Returns nested mappings of texts and numbers, as the sections of a `cluster.toml`."""
        fields = asdict(self)
        levels = {"inside": fields.pop("inside"), "between": fields.pop("between"), "host": fields.pop("to_host")}
        sections = {"device": fields.pop("device"), "link": levels, "measured": fields.pop("measured")}
        return {**fields, **sections}

    def of(self, machines: int, devices: int | None = None, name: str | None = None) -> Self:
        """Returns a cluster of another number of the same machines."""
        devices = self.devices if devices is None else devices
        return replace(self, name=self.name if name is None else name, machines=machines, devices=devices)
