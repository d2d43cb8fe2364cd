"""Describes machines, devices, memories and links for the cost model.

Bandwidths are those of one direction; `source` says whether figures were measured or come from data sheets. All
machines are alike. `autopar.Cluster` (`measure/cluster.py`) measures this machine, knows some by name, or reads a file.
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
    return int(STATE_SHARE * memory)


#: Between the devices of a machine, or between machines.
Level = Literal["inside", "between"]


@dataclass(frozen=True, slots=True)
class Link:
    """A link of latency `latency_s` before the first byte arrives, and bandwidth."""

    latency_s: float
    #: Bytes a second, each way at once: of a device's link, or of a machine's network interfaces together.
    bytes_s: float
    source: str = ""  #: Origin of the figures.

    def __post_init__(self) -> None:
        if not 0 <= self.latency_s < math.inf or not self.bytes_s > 0:
            raise ArgumentsError(f"a link of {self.latency_s} s and {self.bytes_s} bytes a second: 0 or more, and more")

    def __call__(self, size: float, messages: float = 1) -> float:
        """Returns seconds for `size` bytes in `messages` messages, one after the other."""
        return messages * self.latency_s + size / self.bytes_s


#: The default link between devices and their host.
PCIE = Link(10e-6, 12e9, "PCIe 3.0 x16: 15.75 GB/s less protocol; latency: assumed")


@dataclass(frozen=True, slots=True)
class Device:
    """A device that computes."""

    name: str
    memory_bytes: float
    flops_s: float  #: Floating-point operations a second in matrix products of the dtype that models train in.
    memory_bytes_s: float  #: Bytes a second from and to its memory, together.
    source: str = ""  #: Origin of the figures.

    def __post_init__(self) -> None:
        if not all(x > 0 for x in (self.memory_bytes, self.flops_s, self.memory_bytes_s)):
            raise ArgumentsError(f"{self.name}: memory_bytes, flops_s and memory_bytes_s are more than 0")


@dataclass(frozen=True, slots=True, eq=False)
class ClusterSpec:
    """A number of equal machines, each with `devices` devices."""

    name: str
    machines: int
    devices: int
    device: Device
    inside: Link  #: The link of one device to the others of its machine.
    between: Link  #: The link of one machine to the others.
    host_bytes: float  #: Bytes of a machine's host memory.
    host_bytes_s: float = 50e9  #: Bytes a second from and to that memory, together, all cores at work.
    to_host: Link = PCIE  #: The link of one device to its host's memory.
    host_source: str = ""
    #: Collective -> level ("inside", "between") -> the link that `autopar.calibrate` measured for it, which replaces
    #: `inside` or `between`; its latency is per message.
    measured: Mapping[str, Mapping[str, Link]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not all(isinstance(n, int) and n >= 1 for n in (self.machines, self.devices)):
            raise ArgumentsError(
                f"a cluster of {self.machines} machines of {self.devices} devices: whole numbers, 1 at least of each"
            )

    def __eq__(self, other: object) -> bool:
        """Compares the machines, whatever class they are of: a plan's file has no `autopar.Cluster`."""
        return isinstance(other, ClusterSpec) and self.as_dict() == other.as_dict()

    def __hash__(self) -> int:
        return hash((self.name, self.machines, self.devices, self.device))

    @property
    def count(self) -> int:
        """The number N of all devices."""
        return self.machines * self.devices

    @property
    def devices_are_hosts(self) -> bool:
        """Devices share out their host's memory, as CPUs do."""
        return math.isclose(self.devices * self.device.memory_bytes, self.host_bytes, rel_tol=0.01)

    def link(self, level: Level, collective: str) -> Link:
        """Returns a collective's link on a level: the measured one, else the level's."""
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
