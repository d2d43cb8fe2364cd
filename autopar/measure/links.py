"""Times exchanges between devices, on the two levels of links that `cost.collectives` has.

Inside of all machines at once; then between machines, by all their devices at once, each with those of its own number.
"""

from __future__ import annotations

import numpy as np
from jax.sharding import AxisType, Mesh

from autopar.backends.devices import Devices
from autopar.cost.fit import fit_collective
from autopar.ir.cluster import Link
from autopar.measure.loops import collective_points, undisturbed

#: Of the result of a collective on one device, in bytes.
_CPU_BYTES = (1 << 10, 1 << 13, 1 << 16, 1 << 19, 1 << 22)
_BYTES = (*_CPU_BYTES, 1 << 25)


def measure_links(grid: np.ndarray) -> dict[str, dict[str, Link]]:
    """Collective -> level -> its link; nothing where there is one participant only.

    Args:
      grid: `[machines, devices]` of JAX's devices.
    """
    mesh = Mesh(grid, ("machine", "device"), axis_types=(AxisType.Auto,) * 2)
    sizes = _CPU_BYTES if grid.flat[0].platform == "cpu" else _BYTES
    found: dict[str, dict[str, Link]] = {}
    for collective in ("all_reduce", "all_gather", "all_to_all"):
        for level, axis, sharing in (("inside", "device", 1), ("between", "machine", grid.shape[1])):
            devices = Devices(mesh, axis)
            if devices.count > 1:
                parts = 1 if collective == "all_reduce" else devices.count  # of the result
                timed = undisturbed(collective_points(devices, collective, sizes))
                points = [(size / parts, s) for size, s in timed]
                link = fit_collective(collective, devices.count, points, sharing)
                found.setdefault(collective, {})[level] = link
    return found
