"""Memory and cores that this machine allows the process.

A container has less than the machine: the limits of its cgroups count too, of version 1 and 2, at every level from the
process's own up to the root (kernel documentation: admin-guide/cgroup-v2 and cgroup-v1/memory).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path

#: Numbers from here on mean that a cgroup has no limit (it is "max", or near 2^63).
_UNLIMITED = 1 << 60

#: Version of a cgroup -> its files with the limit and the usage, and the name of idle files in its statistic.
_MEMORY_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def available_bytes(root: Path = Path("/")) -> int:
    """Returns the bytes of memory that the process can take without swapping or being killed. `root`, here and below:
    the folder with `proc` and `sys`."""
    return min(memory_levels(root).values())


def total_bytes(root: Path = Path("/")) -> int:
    """Returns the bytes of memory, free or not, of the machine or of the process's cgroup."""
    limits = [_number(folder / _MEMORY_FILES[version][0]) for version, folder in _cgroups(root, "memory")]
    return min([_machine_bytes(root, "MemTotal"), *(limit for limit in limits if limit is not None)])


def memory_levels(root: Path = Path("/")) -> dict[str, int]:
    """Returns the free bytes of memory of the machine (first), and of each cgroup with a limit.

    Processes that share a cgroup see it by the same name, whatever their namespaces.
    """
    machine = machine_name()
    levels = {machine: _machine_bytes(root, "MemAvailable")}
    for version, folder in _cgroups(root, "memory"):
        limit_file, usage_file, inactive = _MEMORY_FILES[version]
        limit, used = _number(folder / limit_file), _number(folder / usage_file)
        if limit is not None and used is not None:
            # The kernel gives up idle files' pages before anything else.
            files = _statistic(folder / "memory.stat", inactive) or 0
            at = folder.stat()
            levels[f"{machine}/{at.st_dev}:{at.st_ino}"] = max(limit - max(used - files, 0), 0)
    return levels


def affinity() -> frozenset[int]:
    has_some = hasattr(os, "sched_getaffinity")
    return frozenset(os.sched_getaffinity(0) if has_some else range(os.cpu_count() or 1))


def cores(root: Path = Path("/"), own: Collection[int] | None = None) -> int:
    """Returns the number of cores that the process can run on: `own` ones, by default its affinity, up to its cgroups'
    quota."""
    count = len(affinity() if own is None else own)
    for version, folder in _cgroups(root, "cpu"):
        if version == 2:
            words = _text(folder / "cpu.max").split()
            quota, period = (int(w) if w.isdigit() else None for w in [*words, "", ""][:2])
        else:
            quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if quota is not None and quota > 0 and period:
            count = min(count, max(round(quota / period), 1))
    return count


def machine_name() -> str:
    """Returns a name that all processes of a running machine share, whatever their host names, and no other machine
    has."""
    return _text(Path("/proc/sys/kernel/random/boot_id")).strip() or os.uname().nodename


def _machine_bytes(root: Path, name: str) -> int:
    kib = _statistic(root / "proc/meminfo", f"{name}:")
    return _UNLIMITED if kib is None else kib * 1024  # other systems than Linux refuse memory that they don't have


def _cgroups(root: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """Yields version and folder of each of the process's cgroups, from its own upwards."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, names, path = line.split(":", 2)
        if number == "0":
            version, mounts = 2, [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"]
        elif controller in names.split(","):
            version, mounts = 1, [root / "sys/fs/cgroup" / names, root / "sys/fs/cgroup" / controller]
        else:
            continue
        relative = Path(path.lstrip("/"))
        for mount in mounts:
            # In a container the path may be the host's, which isn't mounted: the mount itself is then the container's.
            for level in (relative, *relative.parents):
                if (mount / level).is_dir():
                    yield version, mount / level


def _statistic(path: Path, name: str) -> int | None:
    lines = (line.split() for line in _text(path).splitlines())
    return next((int(words[1]) for words in lines if words[:1] == [name]), None)


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.lstrip("-").isdigit() and int(text) < _UNLIMITED else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
