"""How much memory a device has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def device_memory(devices: Sequence[Any]) -> int | None:
    """Bytes of the smallest of some devices' memories that this process can ask; None where a device has no memory of
    its own (a CPU)."""
    found = []
    for device in devices:
        stats = device.memory_stats() if device.platform != "cpu" else None
        if stats and "bytes_limit" in stats:
            found.append(int(stats["bytes_limit"]))
    return min(found, default=None)
