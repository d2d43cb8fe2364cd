"""`read_cluster`: the machines of a job, from a `cluster.toml` or from a resource file of Parallax's.

    [[host]]
    name = "node1"        # its name, or its address
    address = "10.0.0.1"  # where it is reached, if its name doesn't lead there
    processes = 2         # ranks on it; 1 if left out
    devices = 8           # its CPU devices, shared out equally among its processes; or, for accelerators, their
                          # numbers: [0, 1, 2, 3]. One a process if left out

The same file may say what the machines can do, for planning (`hardware.py`).

A resource file (Parallax, section 4) has one line a machine, `address: device ids`. There it means a server on the
machine and a worker a device; here one process that drives them all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autopar.errors import LaunchError
from autopar.launch.hardware import SECTIONS, TOP, is_whole, read_hardware
from autopar.launch.toml_file import TomlTable, parse_toml

_KEYS = ("name", "address", "processes", "devices")


@dataclass(frozen=True)
class Host:
    """A machine.

    Attributes:
      address: Where it is reached: what mpirun gets.
      processes: Ranks on it.
      devices: CPU devices of each rank.
      accelerators: The accelerators' numbers of each rank; empty where the file gives none.
      where: The file and line that it comes from.
    """

    name: str
    address: str
    processes: int
    devices: int
    accelerators: tuple[tuple[int, ...], ...]
    where: str


@dataclass(frozen=True)
class HostFile:
    """The machines of a job, in the order of their ranks.

    Attributes:
      hosts: The machines; none in a file that only says how many there are, for planning.
      hardware: What the file says of them (`hardware.read_hardware`).
    """

    hosts: tuple[Host, ...]
    hardware: Mapping[str, Any] = field(default_factory=dict)

    @property
    def processes(self) -> int:
        return sum(host.processes for host in self.hosts)


def read_cluster(path: str | Path, *, named: bool = True) -> HostFile:
    """The machines in a file: TOML if its name ends so, else Parallax's format.

    Args:
      named: Whether it has to name them: to plan for them, their number is enough.

    Raises:
      LaunchError: the file is missing or wrong; the message has its line.
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
    top = parse_toml(path, text)
    for key in top.values:
        if key not in (*TOP, *SECTIONS, "host"):
            known = ", ".join((*TOP, *(f"[{section}]" for section in SECTIONS)))
            top.fail(key, f"there is no {key!r} in a cluster file; there are [[host]], {known}")
    hardware = read_hardware(top)
    tables = top.tables("host")
    counts = [key for key in ("machines", "devices") if key in hardware]
    if tables and counts:
        top.fail(counts[0], f"{counts[0]} is for files without [[host]] tables; this one has {len(tables)}")
    if not tables and len(counts) == 1:
        top.fail(counts[0], "machines and devices (of each machine) are given together")
    return [_host(table) for table in tables], hardware


def _host(table: TomlTable) -> Host:
    for key in table.values:
        if key not in _KEYS:
            placed = " (it is written above all tables)" if key in TOP else ""
            table.fail(key, f"there is no {key!r} of a host{placed}; there are {', '.join(_KEYS)}")
    for key in ("name", "address"):
        if not isinstance(table.values.get(key, ""), str) or table.values.get(key) == "":
            table.fail(key, f"{key} is a text, not {table.values[key]!r}")
    name = table.values.get("name") or table.values.get("address")
    if name is None:
        table.fail(None, "a host needs a name, or an address")
    processes = table.values.get("processes", 1)
    if not is_whole(processes, 1):
        table.fail("processes", f"processes is a number of ranks, 1 or more, not {processes!r}")
    devices = table.values.get("devices", processes)
    ids = devices if isinstance(devices, list) else []
    if not is_whole(devices, 1) and not (ids and all(is_whole(i, 0) for i in ids)):
        table.fail(
            "devices", f"devices is their number, 1 or more, or a list of accelerators' numbers, not {devices!r}"
        )
    if len(set(ids)) < len(ids):
        table.fail("devices", f"devices names one twice: {ids}")
    count = len(ids) or devices
    if count % processes:
        table.fail("devices", f"{count} devices can't be shared out equally among {processes} processes")
    each = count // processes
    return Host(
        name=name,
        address=table.values.get("address", name),
        processes=processes,
        devices=each,
        accelerators=tuple(tuple(ids[i * each : (i + 1) * each]) for i in range(processes)) if ids else (),
        where=table.where(),
    )


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
