"""Meshes of the first few devices."""

from __future__ import annotations

import jax
from jax.sharding import AxisType, Mesh


def mesh_of(devices: int) -> Mesh:
    return jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
