"""`read_cluster`: the machines of a job, from a `cluster.toml` or from a resource file of Parallax's.

    name = "ours"
    machines = 8                 # only where no [[host]] tables name them
    devices = 6                  # of each machine; the same
    host_bytes = 256e9           # memory of a machine's host
    host_bytes_s = 150e9         # from and to that memory, together; may be left out
    host_source = "data sheet"   # where the two come from

    [[host]]                     # once for each machine, in the order of their ranks
    name = "node1"               # its name, or its address
    address = "10.0.0.1"         # where it is reached, if its name doesn't lead there
    processes = 2                # ranks on it; 1 if left out
    devices = 8                  # its CPU devices, shared out equally among its processes; or, for accelerators,
                                 # their numbers: [0, 1, 2, 3]. One a process if left out

    [device]                     # `ir.cluster.Device`
    name = "TITAN Xp"
    memory_bytes = 12e9
    flops_s = 12.15e12           # of matrix products
    memory_bytes_s = 547.7e9     # from and to its memory, together
    source = "data sheet"        # where the figures come from; in every section, may be left out

    [link.inside]                # `ir.cluster.Link` between the devices of a machine: of one device, each way
    latency_s = 10e-6
    bytes_s = 12e9

    [link.between]               # between machines: of one machine, each way
    latency_s = 5e-6
    bytes_s = 12.5e9

    [link.host]                  # between a device and its host's memory; may be left out
    latency_s = 10e-6
    bytes_s = 12e9

    [measured.all_reduce.inside] # the same for one collective, as `autopar.calibrate` finds it
    latency_s = 12e-6
    bytes_s = 10.1e9

Units are SI's: bytes, seconds, a second. What isn't [[host]] is for planning.

A resource file (Parallax, section 4) has one line a machine, `address: device ids`. There it means a server on the
machine and a worker a device; here one process that drives them all.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autopar.errors import LaunchError
from autopar.ir.cluster import Device, Link
from autopar.ir.typed_json import MalformedError, from_json
from autopar.jax_types import Json

#: Names in `measured`: collectives on devices; and between ranks by MPI, in rings, and beside programs.
DEVICE_COLLECTIVES = ("all_reduce", "all_gather", "all_to_all")
RANK_COLLECTIVES = ("mpi_all_reduce", "mpi_all_to_all", "ring_all_reduce", "beside_all_reduce")
COLLECTIVES = DEVICE_COLLECTIVES + RANK_COLLECTIVES


@dataclass(frozen=True)
class Host:
    """A machine."""

    name: str
    address: str  #: Its address, for mpirun.
    processes: int  #: Number of ranks on it.
    devices: int  #: CPU devices of each rank.
    accelerators: tuple[tuple[int, ...], ...]  #: Numbers of each rank's accelerators; () if the file gives none.
    where: str  #: Its file and line, or table, for messages.


@dataclass(frozen=True)
class HostFile:
    """The machines of a job, in the order of their ranks; none if the file only has their number, for planning.
    `hardware` is the rest of the file, without [[host]] tables."""

    hosts: tuple[Host, ...]
    hardware: Mapping[str, Any] = field(default_factory=dict)

    @property
    def processes(self) -> int:
        return sum(host.processes for host in self.hosts)


@dataclass(frozen=True)
class _HostTable:
    """A [[host]] table. Its checks raise ValueErrors, to which `from_json` adds where."""

    name: str = ""
    address: str = ""
    processes: int = 1
    devices: Any = None

    def __post_init__(self) -> None:
        if not self.name and not self.address:
            raise ValueError("a host needs a name, or an address")
        if self.processes < 1:
            raise ValueError(f"processes is a number of ranks, 1 or more, not {self.processes}")
        ids, count = self.ids, len(self.ids) or self.devices or self.processes
        if not _is_whole(count, 1) or self.devices in (0, []) or not all(_is_whole(i, 0) for i in ids):
            raise ValueError(
                f"devices is their number, 1 or more, or a list of accelerators' numbers, not {self.devices!r}"
            )
        if len(set(ids)) < len(ids):
            raise ValueError(f"devices names one twice: {ids}")
        if count % self.processes:
            raise ValueError(f"{count} devices can't be shared out equally among {self.processes} processes")

    @property
    def ids(self) -> list[Any]:
        return self.devices if isinstance(self.devices, list) else []

    def host(self, where: str) -> Host:
        ids, each = self.ids, (len(self.ids) or self.devices or self.processes) // self.processes
        return Host(
            name=self.name or self.address,
            address=self.address or self.name,
            processes=self.processes,
            devices=each,
            accelerators=tuple(tuple(ids[i * each : (i + 1) * each]) for i in range(self.processes)) if ids else (),
            where=where,
        )


@dataclass(frozen=True)
class _Levels:
    inside: Link | None = None
    between: Link | None = None


@dataclass(frozen=True)
class _Links(_Levels):
    host: Link | None = None


@dataclass(frozen=True)
class _File:
    """The schema of a `cluster.toml`."""

    name: str = ""
    machines: int | None = None
    devices: int | None = None
    host_bytes: float | None = None
    host_bytes_s: float | None = None
    host_source: str = ""
    host: tuple[_HostTable, ...] = ()
    device: Device | None = None
    link: _Links | None = None
    measured: Mapping[str, _Levels] = field(default_factory=dict)

    def __post_init__(self) -> None:
        counts = {"machines": self.machines, "devices": self.devices}
        for key, value in {**counts, "host_bytes": self.host_bytes, "host_bytes_s": self.host_bytes_s}.items():
            if value is not None and not value > 0:
                raise ValueError(f"{key} is more than 0, not {value}")
        for name in self.measured:
            if name not in COLLECTIVES:
                raise ValueError(f"there is no measured.{name}; there are {', '.join(COLLECTIVES)}")
        given = [key for key, value in counts.items() if value is not None]
        if self.host and given:
            raise ValueError(f"{given[0]} is for files without [[host]] tables; this one has {len(self.host)}")
        if len(given) == 1 and not self.host:
            raise ValueError("machines and devices (of each machine) are given together")


def read_cluster(path: str | Path, *, named: bool = True) -> HostFile:
    """Returns the machines in a file: TOML if its name says so, else Parallax's format.

    `named`: whether the file has to name them; their number is enough for planning. Raises LaunchError if the file is
    missing or wrong; the message says where.
    """
    if not isinstance(path, (str, Path)):
        raise LaunchError(f"{path!r} is no path of a cluster file: give a string or a pathlib.Path")
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise LaunchError(f"{path}: the cluster file can't be read: {reason}") from error
    hosts, hardware = _read_toml(path, text) if path.suffix == ".toml" else (_read_resources(path, text), {})
    seen: dict[str, Host] = {}
    for host in hosts:
        if host.address in seen:
            raise LaunchError(f"{host.where}: {host.address} is there already, {seen[host.address].where}")
        seen[host.address] = host
    if named and not hosts:
        raise LaunchError(f"{path}: it has no [[host]] tables, one for each machine")
    return HostFile(tuple(hosts), hardware)


def _read_toml(path: Path, text: str) -> tuple[list[Host], dict[str, Any]]:
    try:
        parsed = tomllib.loads(text)
        read = from_json(_File, parsed, "file")
    except tomllib.TOMLDecodeError as error:
        raise LaunchError(f"{path}: {error}") from error
    except MalformedError as error:
        raise LaunchError(f"{path}: {str(error).removeprefix('file: ').replace('file.', '', 1)}") from error
    hosts = [table.host(f"{path}: host[{n}]") for n, table in enumerate(read.host)]
    return hosts, {key: value for key, value in parsed.items() if key != "host"}


def _read_resources(path: Path, text: str) -> list[Host]:
    hosts = []
    for number, line in enumerate(text.splitlines(), 1):
        content = line.split("#", 1)[0].strip()
        if not content:
            continue
        address, colon, rest = content.rpartition(":")
        ids = [part.strip() for part in rest.split(",")]
        if not colon or not address.strip() or not all(part.isdecimal() for part in ids):
            raise LaunchError(f"{path}:{number}: {content!r} is not of the form `address: device ids` (10.0.0.1: 0,1)")
        numbers = tuple(int(part) for part in ids)
        if len(set(numbers)) < len(numbers):
            raise LaunchError(f"{path}:{number}: a device is named twice")
        hosts.append(Host(address.strip(), address.strip(), 1, len(numbers), (numbers,), f"{path}:{number}"))
    if not hosts:
        raise LaunchError(f"{path}: it has no lines `address: device ids`, one for each machine")
    return hosts


def format_toml(values: Mapping[str, Json], name: str = "") -> str:
    """Returns the text of nested mappings of texts and finite or infinite numbers; read again it is the same.

    Keys are made of letters, digits and underscores. Empty tables are left out. `name`: of the table that they are.
    """
    plain = [f"{k} = {_format_value(v)}\n" for k, v in values.items() if not isinstance(v, Mapping)]
    inner = [format_toml(v, f"{name}.{k}" if name else k) for k, v in values.items() if isinstance(v, Mapping)]
    head = f"[{name}]\n" if name and plain else ""
    return "\n".join(filter(None, [head + "".join(plain), *inner]))


def _format_value(value: str | int | float) -> str:
    # JSON's escapes are TOML's; of what TOML wants escaped, JSON leaves only "delete".
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f") if isinstance(value, str) else repr(value)


def _is_whole(value: object, least: int) -> bool:
    return type(value) is int and value >= least
