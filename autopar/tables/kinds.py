"""Leaves of a state that can't be ordinary arrays, of whatever kind, and what makes ordinary arrays of them."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.sharding import NamedSharding

from autopar import explicit_meshes, jax_compat
from autopar.backends.global_arrays import is_global, whole_everywhere
from autopar.errors import donated
from autopar.ir.layout import RowLayout
from autopar.ir.stacked import StackIndex
from autopar.jax_types import Device, Leaf, Pytree
from autopar.tables.leaf import ArrayHome, Home, NumpyHome, PlacedLeaf, TableLeaf, copied, current
from autopar.tables.pending import drain
from autopar.tables.sharded import TablePart


def is_table(leaf: Leaf) -> bool:
    """Returns whether a leaf is a table, for `jax.tree` functions."""
    return isinstance(leaf, TableLeaf)


def layout_of(leaf: Leaf) -> tuple[RowLayout, int] | None:
    """Returns layout and row axis of a table that has one, None of anything else."""
    return leaf.stored_as if is_table(leaf) else None


def stack_index_of(leaf: Leaf) -> StackIndex | None:
    """Returns where a table lies in a stack of tables, None of anything else."""
    return leaf.where if isinstance(leaf, TablePart) else None


def spread_as(leaf: Leaf) -> tuple[RowLayout, int] | None:
    """Returns how an array is spread along one of its axes, as a table's rows are; None of anything else."""
    is_array = isinstance(leaf, jax.Array) and not isinstance(leaf, jax_compat.Tracer)
    sharding = leaf.sharding if is_array else None
    if not isinstance(sharding, NamedSharding):
        return None
    sizes = zip(leaf.shape, sharding.shard_shape(leaf.shape), strict=True)
    counts = [size // own if own else 1 for size, own in sizes]
    spread = [axis for axis, count in enumerate(counts) if count > 1]
    if len(spread) != 1:
        return None
    return RowLayout(leaf.shape[spread[0]], counts[spread[0]], cyclic=False), spread[0]


def home_of(leaf: Leaf) -> Home:
    """Returns where a leaf of a template is: a table, an array, or a shape with a sharding."""
    leaf = leaf if isinstance(leaf, TablePart) else current(leaf)
    if isinstance(leaf, PlacedLeaf | TablePart):
        return leaf.home
    if isinstance(leaf, jax.Array):
        return ArrayHome(leaf.sharding if leaf.committed else None)
    return ArrayHome(leaf.sharding) if isinstance(leaf, jax.ShapeDtypeStruct) else NumpyHome()


@explicit_meshes.outside_mesh
def materialize(tree: Pytree, *, copy: bool = True) -> Pytree:
    """Replaces tables in the tree by ordinary arrays: for evaluation, for saving, for other processes.

    What it returns is its own: steps that update the state in place leave it alone, and it may be donated to another
    `jax.jit` while the state goes on. Copies stay where the originals are, spread over the same devices; but for those
    of a pipeline's state, of which each stage's devices have a part. They are brought together on one device. Leaves
    that are spread over several processes are brought to every device, as dense parameters are, so that NumPy reads
    them on every process: collectively, and each device takes the whole of them.

    Args:
      tree: A state, or a part of one. Collective where leaves are spread over several processes.
      copy: Whether leaves that are ordinary arrays already are copied. False: they are the state's own, and so may be a
        table's array on one device, which saves memory where the result is read at once: the next step with the state
        deletes them. What is spread over several processes stays so, for JAX's own functions and Orbax.

    Raises:
      DonatedStateError: a leaf was given to a step, which updated it in place.
    """

    tree = drain(tree)
    device = _gathering_device(jax.tree.leaves(tree))

    def ordinary(path: tuple[object, ...], leaf: Leaf) -> Leaf:
        if isinstance(leaf, TableLeaf):
            return whole_everywhere(leaf.materialize()) if copy else leaf.read()
        if isinstance(leaf, jax.Array) and not jax_compat.is_tracer(leaf) and leaf.is_deleted():
            raise donated(jax.tree_util.keystr(path) or "this array")
        if device is not None and _is_placed(leaf) and leaf.devices() != {device}:
            there = jax.device_put(leaf, device)
            return copied(there) if copy and device in leaf.devices() else there  # of several devices it takes a shard
        if copy and is_global(leaf) and not leaf.is_fully_replicated:
            return whole_everywhere(leaf)
        return copied(leaf) if copy else leaf

    return jax.tree_util.tree_map_with_path(ordinary, tree)


def _gathering_device(leaves: Sequence[Leaf]) -> Device | None:
    """Returns a device for arrays of one tree that no `jax.jit` takes as they are: none of their shardings is over the
    devices of all others. None: it takes them."""
    device_sets = {frozenset(leaf.devices()) for leaf in leaves if _is_placed(leaf)}
    every = frozenset().union(*device_sets)
    return None if every in device_sets or not every else min(every, key=lambda device: device.id)


def _is_placed(leaf: Leaf) -> bool:
    is_array = isinstance(leaf, jax.Array) and not jax_compat.is_tracer(leaf) and not leaf.is_deleted()
    return is_array and leaf.committed and leaf.is_fully_addressable
