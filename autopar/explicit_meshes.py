"""Meshes with Explicit axes, as `jax.make_mesh` makes them: their arrays, and code within `jax.set_mesh`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from autopar import jax_compat
from autopar.jax_types import Leaf

_P = ParamSpec("_P")
_T = TypeVar("_T")


def outside_mesh(call: Callable[_P, _T]) -> Callable[_P, _T]:
    """Runs a function outside of the user's `jax.set_mesh`, if that mesh has Explicit axes.

    There JAX refuses lookups whose sharding it can't tell. Returned arrays are on the user's mesh, as JAX takes no
    others within it.
    """

    @functools.wraps(call)
    def outside(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        mesh = jax_compat.set_mesh_here()
        if mesh.empty or AxisType.Explicit not in mesh.axis_types:
            return call(*args, **kwargs)
        try:
            if jax_compat.is_tracing():
                return call(*args, **kwargs)
            with jax.set_mesh(None):
                return jax.tree.map(lambda x: _on_mesh(x, mesh), call(*args, **kwargs))
        except (AssertionError, RuntimeError, TypeError, ValueError) as error:
            if "mesh" in str(error) or "shard" in str(error):
                error.add_note(
                    "autopar says itself where values are, and runs outside of jax.set_mesh(...) with Explicit axes. "
                    "Leave reshard and out_sharding= out of the step, and call a planned step as it is, not within "
                    "another jax.jit"
                )
            raise

    return outside


def _on_mesh(leaf: Leaf, mesh: jax.sharding.Mesh) -> Leaf:
    """Returns an array on a mesh over the same devices, without a copy, if that mesh can express its sharding."""
    old = leaf.sharding if isinstance(leaf, jax.Array) else None
    if not isinstance(old, NamedSharding):
        return leaf
    spec = PartitionSpec() if old.is_fully_replicated else old.spec
    if len(old.mesh.axis_names) == 1:  # it is over all devices, as are all axes of the other mesh together
        spec = PartitionSpec(*(None if entry is None else mesh.axis_names for entry in spec))
    elif spec and old.mesh.axis_names != mesh.axis_names:
        return leaf
    new = NamedSharding(mesh, spec, memory_kind=old.memory_kind)
    return jax.device_put(leaf, new) if new.is_equivalent_to(old, leaf.ndim) else leaf


def is_explicit(leaf: Leaf) -> bool:
    """Says whether a leaf is an array on a mesh with Explicit axes."""
    sharding = leaf.sharding if type(leaf) is jax_compat.ConcreteArray else None
    return isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types


def on_auto_mesh(leaf: Leaf) -> Leaf:
    """Returns an array of a mesh with Explicit axes on the same mesh with Auto axes; anything else, and a deleted
    array, as it is."""
    if not is_explicit(leaf) or leaf.is_deleted():
        return leaf
    old = leaf.sharding
    return jax.device_put(leaf, NamedSharding(_auto_mesh(old.mesh), old.spec, memory_kind=old.memory_kind))


@functools.cache
def _auto_mesh(mesh: jax.sharding.Mesh) -> Any:
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
