"""The sections of a `cluster.toml` that say what its machines can do, in SI units: bytes, seconds, a second.

name = "ours"
machines = 8                 # only where no [[host]] tables name them
devices = 6                  # of each machine; the same
host_bytes = 256e9           # memory of a machine's host
host_bytes_s = 150e9         # from and to that memory, together; may be left out
host_source = "data sheet"   # where the two come from

[device]
name = "TITAN Xp"
memory_bytes = 12e9
flops_s = 12.15e12           # of matrix products
memory_bytes_s = 547.7e9     # from and to its memory, together
source = "data sheet"        # where the figures come from; in every section, may be left out

[link.inside]                # between the devices of a machine: of one device, each way
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
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from autopar.launch.toml_file import TomlTable

SECTIONS = ("device", "link", "measured")
LEVELS = ("inside", "between")
LINKS = (*LEVELS, "host")
#: What `measured` may name: collectives on the devices, and between ranks MPI's, in rings, and beside programs.
DEVICE_COLLECTIVES = ("all_reduce", "all_gather", "all_to_all")
RANK_COLLECTIVES = ("mpi_all_reduce", "mpi_all_to_all", "ring_all_reduce", "beside_all_reduce")
COLLECTIVES = DEVICE_COLLECTIVES + RANK_COLLECTIVES

_Check = tuple[Callable[[Any], bool], str]


def is_whole(value: Any, least: int) -> bool:
    """Whether a value is a whole number, at least so large."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)


_TEXT: _Check = (lambda v: isinstance(v, str), "a text")
_COUNT: _Check = (lambda v: is_whole(v, 1), "a whole number, 1 or more")
_POSITIVE: _Check = (lambda v: _is_number(v) and v > 0, "a number larger than 0")
_LATENCY: _Check = (lambda v: _is_number(v) and 0 <= v < math.inf, "a number of seconds, 0 or more")

#: At the top of the file, beside [[host]] tables.
TOP: Mapping[str, _Check] = {
    "name": _TEXT,
    "machines": _COUNT,
    "devices": _COUNT,
    "host_bytes": _POSITIVE,
    "host_bytes_s": _POSITIVE,
    "host_source": _TEXT,
}
_DEVICE: Mapping[str, _Check] = {
    "name": _TEXT,
    "memory_bytes": _POSITIVE,
    "flops_s": _POSITIVE,
    "memory_bytes_s": _POSITIVE,
    "source": _TEXT,
}
_LINK: Mapping[str, _Check] = {"latency_s": _LATENCY, "bytes_s": _POSITIVE, "source": _TEXT}


def read_hardware(top: TomlTable) -> dict[str, Any]:
    """What a file says of its machines, checked: the keys and sections above that are there, as nested mappings. The
    LaunchError for a key that isn't known, is missing or has a wrong value names its line."""
    hardware: dict[str, Any] = {k: top.values[k] for k in TOP if k in top.values}
    for key, value in hardware.items():
        _check(top, key, value, TOP[key])
    if "device" in top.values:
        hardware["device"] = _section(top.table("device"), _DEVICE)
    if "link" in top.values:
        hardware["link"] = _levels(top.table("link"), LINKS)
    if "measured" in top.values:
        measured = top.table("measured")
        _check_keys(measured, COLLECTIVES, "in [measured]")
        hardware["measured"] = {name: _levels(measured.table(name)) for name in measured.values}
    return hardware


def _levels(table: TomlTable, known: tuple[str, ...] = LEVELS) -> dict[str, Any]:
    _check_keys(table, known, f"in [{table.name}]")
    return {level: _section(table.table(level), _LINK) for level in table.values}


def _section(table: TomlTable, checks: Mapping[str, _Check]) -> dict[str, Any]:
    """A section, of which all but `source` is needed."""
    _check_keys(table, tuple(checks), f"in [{table.name}]")
    missing = [key for key in checks if key != "source" and key not in table.values]
    if missing:
        table.fail(None, f"[{table.name}] lacks {', '.join(missing)}")
    for key, value in table.values.items():
        _check(table, key, value, checks[key])
    return dict(table.values)


def _check_keys(table: TomlTable, known: tuple[str, ...], of: str) -> None:
    for key in table.values:
        if key not in known:
            table.fail(key, f"there is no {key!r} {of}; there are {', '.join(known)}")


def _check(table: TomlTable, key: str, value: Any, check: _Check) -> None:
    is_right, what = check
    if not is_right(value):
        table.fail(key, f"{key} is {what}, not {value!r}")
