"""`resize`: gives a state's tables more rows, or fewer.

Rows are distributed cyclically over devices and ranks (row r is on r mod N), so that each row stays where it is: only
tables in even shards of adjacent rows exchange any.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from autopar import jax_compat
from autopar.backends.devices import Devices
from autopar.backends.global_arrays import local, place_array
from autopar.backends.host.storage import HostRows
from autopar.backends.indices import with_size
from autopar.backends.layouts import ordinary, placed, with_extent
from autopar.errors import StateError, donated
from autopar.interrupts import uninterrupted
from autopar.ir.layout import RowLayout
from autopar.ir.paths import path_name
from autopar.jax_types import Leaf, Pytree
from autopar.run.buffers import with_own_buffers
from autopar.state.files.manifest import LeafRecord
from autopar.tables.host import HostHome, HostTable
from autopar.tables.kinds import current, home_of, is_table
from autopar.tables.leaf import ArrayHome, Home, NumpyHome, TableLeaf, Whole
from autopar.tables.pending import drain
from autopar.tables.replica import Replica
from autopar.tables.served import ServedLeaf
from autopar.tables.sharded import RowsHome, Table


@uninterrupted
def resize(state: Pytree, fresh: Leaf) -> Pytree:
    """Gives a state as many rows as a fresh one has: its own rows, then those of `fresh`.

    If a leaf's shape differs from that in `fresh` along one axis, the state's rows are kept, as far as there is room,
    and followed by those of `fresh`; it is stored where the leaf of `fresh` is. So a new row's slots begin as the
    optimizer's own `init` makes them. All other leaves stay the state's. The next step computes what plain JAX would
    with arrays that are cut, or concatenated, in the same way.

    If tables are divided over several processes, or ranks, all of them call it.

    Args:
      state: A state, which is left as it is, with deferred rows brought up to date and minibatches on their way
        finished.
      fresh: A state of the new size from `autopar.init`, with the same paths. It is given up: its tables are updated in
        place.

    Returns:
      The leaves in the structure of `fresh`, including its static parts (a Flax module with its number of rows, say).

    Raises:
      StateError: a leaf is in one of the two alone; a resized one differs in dtype, or in shape along several axes;
        vectors would change their meaning; or there are replicas, or leaves that servers keep: average them first.
      DonatedStateError: the state was given to a step.

    Example:
      >>> import jax, jax.numpy as jnp, autopar
      >>> @autopar.parallelize
      ... def step(table, ids):
      ...     return table - 0.1 * jax.grad(lambda t: (t[ids] ** 2).sum())(table), ids.sum()
      >>> ids = jnp.array([3, 5])
      >>> table, _ = step(jnp.ones((100, 8)), ids)
      >>> table = autopar.resize(table, jnp.zeros((120, 8)))
      >>> table.shape, float(table[99, 0]), float(table[119, 0])
      ((120, 8), 1.0, 0.0)
    """
    old, (new, tree) = _by_path(drain(state), "state")[0], _by_path(drain(fresh), "fresh")
    _check_same_paths(old, new)
    axes = {path: _checked_axis(path, old[path], leaf) for path, leaf in new.items()}
    _check_sizes({p: (old[p].shape[a], new[p].shape[a], new[p].ndim) for p, a in axes.items() if a is not None})
    own = with_own_buffers(list(new.values()), [k for k, axis in enumerate(axes.values()) if axis is not None])
    # All leaves are read before any is updated in place: they may share an update log.
    pairs = [
        (old[p], None) if axes[p] is None else (current(old[p]), current(x)) for p, x in zip(axes, own, strict=True)
    ]
    leaves = [
        mine if axis is None else _resized(path, mine, theirs, axis)
        for (path, axis), (mine, theirs) in zip(axes.items(), pairs, strict=True)
    ]
    return jax.tree.unflatten(tree, leaves)


def resized_axis(old: Sequence[int], new: Sequence[int]) -> int | None:
    """Returns the one axis along which two shapes differ; None if there is no such axis, or several."""
    if len(old) != len(new):
        return None
    differing = [axis for axis, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]
    return differing[0] if len(differing) == 1 else None


def home_before(leaf: Leaf, shape: Sequence[int]) -> Home:
    """Returns where to restore an array of `shape` before it is resized to `leaf`'s: `leaf`'s home, for as many
    rows."""
    leaf, axis = current(leaf), resized_axis(shape, np.shape(leaf))
    if axis is None:
        return home_of(leaf)
    if isinstance(leaf, (HostTable, Table)):
        layout = leaf.layout if axis != leaf.axis else replace(leaf.layout, extent=shape[axis])
        return replace(leaf.home, layout=layout)
    if isinstance(leaf, jax.Array):
        devices = _devices_along(leaf, axis)
        if devices is None:
            return home_of(leaf)
        return RowsHome(RowLayout(shape[axis], devices.count, cyclic=True), axis, devices.sharding(axis))
    return NumpyHome()


def _by_path(tree: Pytree, name: str) -> tuple[dict[str, Pytree], Pytree]:
    """Returns leaves by their paths, and the structure."""
    pairs, structure = jax.tree_util.tree_flatten_with_path(tree)
    leaves = {path_name(path): leaf for path, leaf in pairs}
    if len(leaves) < len(pairs):
        raise StateError(f"{name} has several leaves with one path, among {sorted(leaves)[:5]}: rename one")
    for path, leaf in leaves.items():
        if isinstance(leaf, (Replica, ServedLeaf)):
            raise StateError(
                f"{path or name} is an autopar.{type(leaf).__name__}, of which each client, or a server, has its own: "
                "resize autopar.average(state)"
            )
        if (isinstance(leaf, jax.Array) or is_table(leaf)) and leaf.is_deleted():
            raise donated(path or name)
    return leaves, structure


def _check_same_paths(old: Mapping[str, Leaf], new: Mapping[str, Leaf]) -> None:
    for mine, theirs, name, other in ((old, new, "state", "fresh"), (new, old, "fresh", "state")):
        alone = next((path for path in mine if path not in theirs), None)
        if alone is not None:
            raise StateError(
                f"{name} has a leaf {alone or 'alone'}, which {other} has not: both are made by the same function, of "
                "different numbers of rows"
            )


def _checked_axis(path: str, old: Leaf, new: Leaf) -> int | None:
    """Returns the axis along which a leaf is resized; None: it keeps its shape."""
    a, b = (getattr(leaf, "shape", ()) for leaf in (old, new))
    if a == b:
        return None
    axis = resized_axis(a, b)
    if axis is None:
        raise StateError(
            f"{path or 'state'} has the shape {list(a)} in state and {list(b)} in fresh: resize changes the size of "
            "one axis"
        )
    if old.dtype != new.dtype:
        raise StateError(
            f"{path or 'state'} is of {old.dtype} in state, and of {new.dtype} in fresh: resize casts none"
        )
    if not isinstance(new, (TableLeaf, jax.Array, np.ndarray)):
        raise StateError(
            f"{path or 'fresh'} of fresh is a {type(new).__name__}, which has no rows: give a state, as autopar.init "
            "makes it"
        )
    return axis


def _check_sizes(resized: Mapping[str, tuple[int, int, int]]) -> None:
    """Checks that no vector changes its meaning. `resized`: path -> (size before, size after, number of axes).

    Adafactor keeps a mean by rows and one by columns, and tells them apart by the table's larger axis. If a table of 5
    x 8 gets 12 rows, one of its vectors would grow from 5 to 8 numbers and the other from 8 to 12.
    """
    tables = {(before, after) for before, after, axes in resized.values() if axes > 1}
    vectors = {(before, after): path for path, (before, after, axes) in resized.items() if axes == 1}
    for (before, width), path in vectors.items():
        after = next((b for a, b in tables if a == before and b != width and (width, b) in vectors), None)
        if after is not None:
            raise StateError(
                f"{path} and {vectors[width, after]} exchange their meaning, as Adafactor's means by rows and by "
                f"columns do where a table of {before} rows and {width} columns gets {after} rows. Resize the table "
                "alone, and begin with new slots"
            )


def _resized(path: str, old: Leaf, new: Leaf, axis: int) -> Leaf:
    kept = min(old.shape[axis], new.shape[axis])
    old = _brought(path, old, home_before(new, old.shape))
    if isinstance(new, HostTable):
        return _on_host(old, new, axis, kept)
    if isinstance(new, Table):
        rows = old.stored
        if axis == new.axis:
            devices = Devices.of_array(rows, axis)
            rows = with_extent(rows, old.layout, new.layout.extent, axis, devices)
        return Table(
            _overwritten(rows, new.stored, axis, kept, new.layout if axis == new.axis else None), *new.stored_as
        )
    if isinstance(old, Table):
        devices, extent = Devices.of_array(old.stored, axis), new.shape[axis]
        rows = with_extent(old.stored, old.layout, extent, axis, devices)
        rows = ordinary(rows, replace(old.layout, extent=extent), axis, devices)
        return _overwritten(place_array(rows, new.sharding), new, axis, kept)
    if isinstance(new, jax.Array) and jax_compat.is_key(new.dtype):
        data = _overwritten(*map(jax.random.key_data, (old, new)), axis, kept)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(new))
    if isinstance(new, jax.Array):
        return _overwritten(old, new, axis, kept)
    parts = [np.take(old, np.arange(kept), axis), np.take(np.asarray(new), np.arange(kept, new.shape[axis]), axis)]
    record = LeafRecord(path, "", "rows", "jax", new.shape, str(new.dtype))
    return home_of(new).made(Whole(np.concatenate(parts, axis)), record)


def _brought(path: str, leaf: Leaf, home: Home) -> Leaf:
    """Brings a leaf to a home, unless it is there."""
    if is_table(leaf):
        if leaf.home == home:
            return leaf
        leaf = leaf.read()
    if isinstance(home, HostHome):
        return HostTable(HostRows.of(local(leaf), home.axis, home.layout, home.rank, path))
    if isinstance(home, RowsHome):
        devices = Devices(home.sharding.mesh, home.sharding.spec[home.axis])
        return Table(placed(leaf, home.layout, home.axis, devices), home.layout, home.axis)
    if isinstance(home, ArrayHome):
        return jnp.asarray(leaf) if home.sharding is None else place_array(leaf, home.sharding)
    return np.asarray(local(leaf))


def _devices_along(array: jax.Array, axis: int) -> Devices | None:
    sharding = array.sharding
    if sharding.shard_shape(array.shape)[axis] == array.shape[axis]:
        return None
    return Devices.of_array(array, axis)


def _on_host(old: HostTable, new: HostTable, axis: int, kept: int) -> HostTable:
    """Fills a table in host memory with this rank's rows of another one."""
    new.storage.without_log()  # its stamps belong to the rows that are overwritten
    rows, others = new.storage.rows, old.storage.rows
    if axis == new.axis:
        count = int(replace(new.layout, extent=kept).rows_on(np.asarray(new.storage.rank)))
        rows[:count] = others[:count]
    else:
        part = (slice(None),) * (axis + 1 if axis < new.axis else axis) + (slice(kept),)
        rows[part] = others[part]
    return new.handed_on()


@functools.partial(jax.jit, static_argnames=("axis", "kept", "layout"), donate_argnums=1)
def _overwritten(old: jax.Array, new: jax.Array, axis: int, kept: int, layout: RowLayout | None = None) -> jax.Array:
    """Overwrites `new`, in place, with `old` up to `kept` along an axis. `layout`: the order of rows along it."""
    size = new.shape[axis]
    if old.shape[axis] != size:  # along an axis that isn't spread
        old = with_size(old, axis, size)
    indices = jax.lax.broadcasted_iota(jnp.int32, new.shape, axis)
    return jnp.where((indices if layout is None else layout.row(indices)) < kept, old, new)
