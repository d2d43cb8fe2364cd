"""How much memory a device has."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax

from autopar.backends.devices import Devices


@functools.cache
def memory_of(devices: Devices) -> int | None:
    """Bytes of the smallest of the devices' memories, of all processes together; None where they have none.

    Collective at its first call: all processes must plan by the same.
    """
    own = device_memory([d for d in devices.mesh.devices.flat if d.process_index == jax.process_index()])
    all_ = devices.processes.gather(str(own or "").encode(), "memory of the devices")
    return min((int(x) for x in all_ if x), default=None)


def device_memory(devices: Sequence[Any]) -> int | None:
    """Bytes of the smallest of some devices' memories that this process can ask; None where a device has no memory of
    its own (a CPU)."""
    found = []
    for device in devices:
        stats = device.memory_stats() if device.platform != "cpu" else None
        if stats and "bytes_limit" in stats:
            found.append(int(stats["bytes_limit"]))
    return min(found, default=None)
