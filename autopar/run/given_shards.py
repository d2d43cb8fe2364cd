"""A state that comes in shards stays in shards, though by time alone a plan would have it whole on every device."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from autopar import jax_compat
from autopar.backends.devices import Devices
from autopar.compile import Compiled
from autopar.cost.units import format_bytes
from autopar.errors import SlowPlanWarning, warn
from autopar.ir.layout import even_axis
from autopar.ir.options import Options
from autopar.ir.program import Input
from autopar.ir.strategy import asked_of
from autopar.tables.kinds import spread_as


def shards_given(inputs: Sequence[Input], leaves: Sequence[Any]) -> dict[str, str]:
    """Says which leaves of the state come in shards: the same on all processes that run a step."""
    pairs = zip(inputs, leaves, strict=True)
    specs = [f"{x.path} {leaf.sharding.spec}" for x, leaf in pairs if x.role == "state" and _is_in_shards(leaf)]
    return {"the state's shards": ", ".join(specs)}


def made_whole(compiled: Compiled, devices: Devices | None, leaves: Sequence[Any]) -> dict[str, int | None]:
    """Finds leaves of the state that come in shards, and that a plan has whole on every device.

    Returns:
      Path -> the axis along which the devices can divide the leaf; None if they can't, or if others than those of the
      data axis have its shards.
    """
    bound, inputs = compiled.bound, compiled.analysed.inputs
    if devices is None or bound.on_hosts or bound.plan.sync is not None:
        return {}
    whole = [
        k
        for k, (input_, leaf) in enumerate(zip(inputs, leaves, strict=True))
        if input_.role == "state" and bound.place(k) == (None, None) and k not in bound.uneven and _is_in_shards(leaf)
    ]
    return {inputs[k].path: _axis(leaves[k], devices) for k in whole}


def _is_in_shards(leaf: Any) -> bool:
    if not isinstance(leaf, jax.Array) or jax_compat.is_tracer(leaf) or jax_compat.is_key(leaf.dtype):
        return False
    return isinstance(leaf.sharding, NamedSharding) and not leaf.is_fully_replicated


def _axis(leaf: jax.Array, devices: Devices) -> int | None:
    along = spread_as(leaf)
    axis = 0 if along is None else along[1]
    is_along_data = along is not None and leaf.sharding.is_equivalent_to(devices.sharding(axis), leaf.ndim)
    if not is_along_data and devices.count != devices.mesh.size:
        return None
    return even_axis(leaf.shape, axis, devices.count)


def in_shards(options: Options, whole: Mapping[str, int | None]) -> Options:
    """Returns the options by which leaves stay in shards that the user's strategy leaves to autopar."""
    axes = {path: axis for path, axis in whole.items() if axis is not None and _is_open(options, path)}
    if not axes or options.hosts:
        return options
    rest = options.strategy if isinstance(options.strategy, Mapping) else {"**": options.strategy}
    return dataclasses.replace(options, strategy={**dict.fromkeys(axes, "ps"), **rest}, spread_axes=axes)


def _is_open(options: Options, path: str) -> bool:
    return options.plan is None and asked_of(options.strategy, path).method == "auto"


def shard_notes(options: Options) -> list[str]:
    """Says which leaves stay in shards because they came so."""
    paths = [*options.spread_axes]
    others = f", and {len(paths) - 3} others" if len(paths) > 3 else ""
    return [f"In shards, as they came: {', '.join(paths[:3])}{others}."] if paths else []


def warn_of_whole_leaves(compiled: Compiled, devices: Devices | None, options: Options, leaves: Sequence[Any]) -> None:
    """Warn of leaves that come in shards and are whole on every device, where the user didn't say so."""
    whole = made_whole(compiled, devices, leaves)
    paths = [path for path in whole if options.plan is not None or _is_open(options, path)]
    paths.sort(key=lambda path: (len(path), path))  # parameters before their slots
    if not paths:
        return
    assert devices is not None, "one device has no shards"
    given = {input_.path: leaf for input_, leaf in zip(compiled.analysed.inputs, leaves, strict=True)}
    others = f" (and {len(paths) - 1} other leaves)" if len(paths) > 1 else ""
    warn(
        f"{compiled.analysed.name}: {paths[0]}{others} came in shards, {given[paths[0]].sharding.spec}, and after the "
        f"step each of {devices.mesh.size} devices has all of it, {format_bytes(sum(given[p].nbytes for p in paths))} "
        f"each. What the {devices.count} devices of the data axis can divide stays in shards; products can be divided "
        "over another axis of the mesh, strategy='tensor' (docs/devices.md)",
        SlowPlanWarning,
    )
