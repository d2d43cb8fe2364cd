"""Keeps a state in shards that comes in shards, although the fastest plan would have it whole on every device."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
from jax.sharding import NamedSharding

from autopar import jax_compat
from autopar.backends.devices import Devices
from autopar.compile import Compiled
from autopar.cost.units import format_bytes
from autopar.errors import SlowPlanWarning, warn
from autopar.ir.layout import even_axis
from autopar.ir.options import Options
from autopar.ir.plan import Plan
from autopar.ir.program import Input
from autopar.ir.strategy import TENSOR, asked_of
from autopar.jax_types import Leaf
from autopar.tables.kinds import spread_as
from autopar.ways.way import Way


class Stay(NamedTuple):
    """A way for a leaf to stay in shards: by a method, along one of its axes."""

    method: str
    axis: int


def shards_given(inputs: Sequence[Input], leaves: Sequence[Leaf]) -> dict[str, str]:
    """Returns, as text to compare between processes, the leaves of the state that come in shards."""
    pairs = zip(inputs, leaves, strict=True)
    specs = [f"{x.path} {leaf.sharding.spec}" for x, leaf in pairs if x.role == "state" and _is_in_shards(leaf)]
    return {"the state's shards": ", ".join(specs)}


def made_whole(
    compiled: Compiled, options: Options, devices: Devices | None, leaves: Sequence[Leaf]
) -> dict[str, Stay | None]:
    """Returns the leaves of the state that come in shards but are whole on every device by the plan.

    Path -> how the leaf can stay in shards; None if its shards aren't along the data or the tensor axis, or if these
    devices can't divide it evenly.
    """
    bound, inputs = compiled.bound, compiled.analysed.inputs
    if devices is None or bound.on_hosts:
        return {}
    plan, whole = bound.plan, dict[str, Stay | None]()
    by_rows = {table.path for table in plan.tables} if options.rows_travel else set[str]()
    for k, (input_, leaf) in enumerate(zip(inputs, leaves, strict=True)):
        is_whole = bound.place(k) == (None, None) and k not in bound.uneven and input_.path not in by_rows
        if input_.role == "state" and is_whole and _is_in_shards(leaf):
            whole[input_.path] = _stay(input_.path, leaf, plan, devices)
    return whole


def _stay(path: str, leaf: jax.Array, plan: Plan, devices: Devices) -> Stay | None:
    if devices.mesh.size == 1:
        return None
    groups = () if plan.tensor is None else plan.tensor.groups
    divided = next((group.axes[path] for group in groups if path in group.axes), None)
    if divided is not None and _axes(leaf) == {devices.tensor_axis}:
        return Stay(TENSOR, divided)
    axis = _axis(leaf, devices)
    return None if axis is None else Stay("ps", axis)


def _is_in_shards(leaf: Leaf) -> bool:
    if not isinstance(leaf, jax.Array) or jax_compat.is_tracer(leaf) or jax_compat.is_key(leaf.dtype):
        return False
    return isinstance(leaf.sharding, NamedSharding) and not leaf.is_fully_replicated


def _axes(leaf: jax.Array) -> set[str]:
    """Returns the mesh axes over which an array is divided."""
    assert isinstance(leaf.sharding, NamedSharding), "it is in shards"
    parts = [part if isinstance(part, tuple) else (part,) for part in leaf.sharding.spec if part is not None]
    return {name for names in parts for name in names if leaf.sharding.mesh.shape[name] > 1}


def _axis(leaf: jax.Array, devices: Devices) -> int | None:
    along = spread_as(leaf)
    axis = 0 if along is None else along[1]
    is_along_data = along is not None and leaf.sharding.is_equivalent_to(devices.sharding(axis), leaf.ndim)
    if not is_along_data and devices.count != devices.mesh.size:
        return None
    return even_axis(leaf.shape, axis, devices.count)


def in_shards(way: Way, whole: Mapping[str, Stay | None]) -> Options:
    """Returns options by which leaves stay in shards, unless the user's strategy says otherwise."""
    options = way.options
    given = {path: stay for path, stay in whole.items() if stay is not None and _is_open(options, path)}
    if not given or not way.keeps_shards:
        return options
    rest = options.strategy if isinstance(options.strategy, Mapping) else {"**": options.strategy}
    strategy = {**{path: stay.method for path, stay in given.items()}, **rest}
    return dataclasses.replace(options, strategy=strategy, spread_axes={p: stay.axis for p, stay in given.items()})


def _is_open(options: Options, path: str) -> bool:
    return options.plan is None and asked_of(options.strategy, path).method == "auto"


def _in_order(paths: Iterable[str]) -> list[str]:
    """Sorts paths: parameters come before their slots."""
    return sorted(paths, key=lambda path: (len(path), path))


def shard_notes(options: Options) -> list[str]:
    """Returns `explain`'s note on leaves that stay in shards."""
    paths = _in_order(options.spread_axes)
    others = f", and {len(paths) - 3} others" if len(paths) > 3 else ""
    return [f"In shards, as they came: {', '.join(paths[:3])}{others}."] if paths else []


def warn_of_whole_leaves(compiled: Compiled, way: Way, devices: Devices | None, leaves: Sequence[Leaf]) -> None:
    """Warns of leaves that come in shards and become whole on every device, unless the user asked for it."""
    options = way.options
    whole = made_whole(compiled, options, devices, leaves)
    paths = _in_order(path for path in whole if options.plan is not None or _is_open(options, path))
    if not paths or devices is None:
        return
    given = {input_.path: leaf for input_, leaf in zip(compiled.analysed.inputs, leaves, strict=True)}
    others = f" (and {len(paths) - 1} other leaves)" if len(paths) > 1 else ""
    size = format_bytes(sum(given[p].nbytes for p in paths))
    if not options.rows_travel:
        where = f"after the step each of {devices.mesh.size} devices has all of it, {size} each"
    else:
        where = f"servers keep all of it, {size}, which each device of a worker has in each step"
    warn(
        f"{compiled.analysed.name}: {paths[0]}{others} came in shards, {given[paths[0]].sharding.spec}, and {where}. "
        f"{_remedy(way, given[paths[0]], devices)} (docs/devices.md)",
        SlowPlanWarning,
    )


def _remedy(way: Way, leaf: jax.Array, devices: Devices) -> str:
    if not way.keeps_shards:
        return "Where clients average, sync=autopar.sync.Average(every=...), it stays in shards"
    if devices.mesh.size == 1:
        return "Clients that have several devices each keep it in shards: give fewer, clients="
    names = _axes(leaf)
    axis = next((name for name in devices.mesh.axis_names if names == {name} and name != devices.axis), None)
    if axis is None:
        return (
            f"What the {devices.count} devices of the data axis {devices.axis!r} alone have, and can divide, stays in "
            f"shards: bring it there, jax.device_put(..., NamedSharding(mesh, P({devices.axis!r})))"
        )
    asked = "" if axis == devices.tensor_axis else f"Say tensor_axis={axis!r}: w"
    return (
        f"{asked or 'W'}eights of products that the {devices.mesh.shape[axis]} devices of {axis!r} can divide stay in "
        "their shards; others can lie along the data axis"
    )
