"""Memory and cores that this machine lets the process have.

A container has less than the machine: the limits of its cgroups count too, of version 1 and 2, at every level from
the process's own up to the root (kernel documentation: admin-guide/cgroup-v2 and cgroup-v1/memory).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path

#: What a cgroup without a limit says: "max", or a number near 2^63.
_UNLIMITED = 1 << 60

#: Version of a cgroup -> its files with the limit and with what is used, and what its statistic calls idle files.
_MEMORY_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def available_bytes(root: Path = Path("/")) -> int:
    """Returns the bytes of memory that the process can take without anything being swapped out or killed.

    `root`, here and below: where `proc` and `sys` are.
    """
    return min(memory_levels(root).values())


def total_bytes(root: Path = Path("/")) -> int:
    """Returns the bytes of memory of the machine, or of what the process is confined to, in use or not."""
    limits = [_number(folder / _MEMORY_FILES[version][0]) for version, folder in _cgroups(root, "memory")]
    return min([_machine_bytes(root, "MemTotal"), *(limit for limit in limits if limit is not None)])


def memory_levels(root: Path = Path("/")) -> dict[str, int]:
    """Returns the bytes of memory that can still be taken, by what has them: the machine, and each cgroup with a limit.

    Processes that share one see it by the same name, whatever their namespaces.
    The machine comes first.
    """
    machine = machine_name()
    levels = {machine: _machine_bytes(root, "MemAvailable")}
    for version, folder in _cgroups(root, "memory"):
        limit_file, usage_file, inactive = _MEMORY_FILES[version]
        limit, used = _number(folder / limit_file), _number(folder / usage_file)
        if limit is not None and used is not None:
            # Pages of files that nobody has used lately are given up before anything else.
            files = _statistic(folder / "memory.stat", inactive) or 0
            at = folder.stat()
            levels[f"{machine}/{at.st_dev}:{at.st_ino}"] = max(limit - max(used - files, 0), 0)
    return levels


def affinity() -> frozenset[int]:
    """Returns the numbers of the cores that the process may run on."""
    has_some = hasattr(os, "sched_getaffinity")
    return frozenset(os.sched_getaffinity(0) if has_some else range(os.cpu_count() or 1))


def cores(root: Path = Path("/"), own: Collection[int] | None = None) -> int:
    """Counts the cores that the process can run on: its `own`, or those of its affinity, cut to its cgroups' quota."""
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
    """Returns a name that is equal on all processes of a running machine, whatever their host names, and on no
    other."""
    return _text(Path("/proc/sys/kernel/random/boot_id")).strip() or os.uname().nodename


def _machine_bytes(root: Path, name: str) -> int:
    kib = _statistic(root / "proc/meminfo", f"{name}:")
    return _UNLIMITED if kib is None else kib * 1024  # not Linux: the system itself refuses what it doesn't have


def _cgroups(root: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """Yields version and folder of each cgroup that the process is in, from its own one upwards."""
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
    """Returns the number in a file, None where there is no file or no limit in it."""
    text = _text(path).strip()
    return int(text) if text.lstrip("-").isdigit() and int(text) < _UNLIMITED else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
