"""Converts arrays to and from a `RowLayout`; no device holds more than a few times its shard.

There are three forms: a table's V rows as they are, *even shards* (padded, in their own order), and rows as they are
stored (perhaps cyclically). One all_to_all in `shard_map` converts even and cyclic shards, another one rows and
columns. XLA's partitioner, left to itself, brings the whole table to each device for either.

Inside a compiled program V needn't be a multiple of the devices, since XLA pads. Its inputs and outputs must have equal
shards: `ordinary` then spreads an array along another axis, or replicates it if there is none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from autopar.analysis.rules import resized
from autopar.backends.devices import Devices
from autopar.backends.global_arrays import is_global, jit_on, place_array
from autopar.backends.indices import with_size
from autopar.ir.layout import RowLayout, even_axis
from autopar.jax_types import Array, Index, Leaf

#: Bytes that every device gets at a time while a table is read.
_PART = 1 << 26


# --- in a compiled program ---


def store(rows: Array, layout: RowLayout, axis: int, devices: Devices) -> Array:
    """Returns rows as they are stored, [..., V, ...] -> [..., N shard, ...]; spare ones are copies of the last row."""
    return arrange(even_shards(rows, layout, axis, devices), layout, axis, devices)


def own_rows(rows: Array, layout: RowLayout, axis: int, devices: Devices) -> Array:
    """Returns a device's stored shard of rows that every device has: [..., V, ...] -> [..., shard, ...]."""
    return jnp.take(rows, jnp.minimum(layout.row(_numbers(layout, devices)), layout.extent - 1), axis)


def even_shards(rows: Array, layout: RowLayout, axis: int, devices: Devices) -> Array:
    """Spreads rows in their own order, [..., V, ...] -> [..., N shard, ...]; spare ones are zeros."""
    return devices.constrain(with_size(devices.constrain(rows, axis), axis, layout.stored), axis)


def arrange(shards: Array, layout: RowLayout, axis: int, devices: Devices) -> Array:
    def run(rows: Array, last: Array) -> Array:
        rows, last = jnp.moveaxis(rows, axis, 0), jnp.moveaxis(last, axis, 0)
        number = _numbers(layout, devices).reshape(-1, *[1] * (rows.ndim - 1))
        return jnp.moveaxis(_to_cyclic(jnp.where(number < layout.extent, rows, last), layout, devices), 0, axis)

    last = jax.lax.slice_in_dim(shards, layout.extent - 1, layout.extent, axis=axis)
    return devices.local(run, (axis, None), axis, shards, devices.constrain(last, None))


def own_whole(stored: Array, layout: RowLayout, axis: int, devices: Devices) -> Array:
    """Returns, in `shard_map`, a device's even shard of the rows, from its stored one."""
    return jnp.moveaxis(_from_cyclic(jnp.moveaxis(stored, axis, 0), layout, devices), 0, axis)


def whole(stored: Array, layout: RowLayout, axis: int, devices: Devices) -> Array:
    """Returns the rows in their own order, without the spare ones, spread along the row axis."""
    rows = devices.local(lambda rows: own_whole(rows, layout, axis, devices), (axis,), axis, stored)
    return devices.constrain(jax.lax.slice_in_dim(rows, 0, layout.extent, axis=axis), axis)


def _numbers(layout: RowLayout, devices: Devices) -> Array:
    """Returns, in `shard_map`, the rows that this device's even shard holds; `extent` or more for spare ones."""
    return devices.position() * layout.shard_rows + jnp.arange(layout.shard_rows, dtype=jnp.int32)


def _parts(shard_rows: int, count: int) -> tuple[Array, Array]:
    """Returns a grid of devices and of the rows that one of them sends to one other, at most."""
    return jnp.arange(count, dtype=jnp.int32)[:, None], jnp.arange(-(-shard_rows // count), dtype=jnp.int32)[None]


def _to_cyclic(rows: Array, layout: RowLayout, devices: Devices) -> Array:
    """Exchanges, in `shard_map`, even shards [shard, ...] for cyclic ones: rows k, k + N, ... on device k."""
    if not layout.cyclic:
        return rows
    count, shard_rows = layout.devices, layout.shard_rows
    me = devices.position()
    other, nth = _parts(shard_rows, count)
    sent = rows.at[(other - me * shard_rows) % count + nth * count].get(mode="clip")
    got = jax.lax.all_to_all(sent, devices.axis, 0, 0)
    mine = jnp.arange(shard_rows, dtype=jnp.int32) * count + me
    return got[mine // shard_rows, mine % shard_rows // count]


def _from_cyclic(rows: Array, layout: RowLayout, devices: Devices) -> Array:
    """Exchanges, in `shard_map`, cyclic shards for even ones."""
    if not layout.cyclic:
        return rows
    count, shard_rows = layout.devices, layout.shard_rows
    me = devices.position()
    other, nth = _parts(shard_rows, count)
    first = other * shard_rows
    sent = rows.at[(first + (me - first) % count) // count + nth].get(mode="clip")
    got = jax.lax.all_to_all(sent, devices.axis, 0, 0)
    return got[_numbers(layout, devices) % count, jnp.arange(shard_rows, dtype=jnp.int32) // count]


# --- between programs ---


def ordinary(stored: Array, layout: RowLayout, axis: int, devices: Devices) -> Array:
    """Returns the table as an ordinary array, [..., V, ...], spread along `even_axis`."""
    return _to_ordinary(layout, axis, devices, resized(stored.shape, axis, layout.extent))(stored)


@functools.cache
def _to_ordinary(layout: RowLayout, axis: int, devices: Devices, shape: tuple[int, ...]) -> Callable[[Array], Array]:
    to = even_axis(shape, axis, devices.count)

    def run(stored: Array) -> Array:
        if to == axis:
            return whole(stored, layout, axis, devices)
        return devices.local(turn, (axis,), to, stored)

    def turn(rows: Array) -> Array:
        if to is None:
            rows = jax.lax.all_gather(rows, devices.axis, axis=axis, tiled=True)
        else:
            rows = jax.lax.all_to_all(rows, devices.axis, to, axis, tiled=True)
        return _restored(rows, layout, axis)

    return jit_on(devices.mesh, run, out_shardings=devices.sharding(to))


@functools.cache
def arranger(layout: RowLayout, axis: int, devices: Devices) -> Callable[[Array], jax.Array]:
    """Compiles `arrange` as a program of its own, in place."""
    run = functools.partial(arrange, layout=layout, axis=axis, devices=devices)
    return jit_on(devices.mesh, run, out_shardings=devices.sharding(axis), donate_argnums=0)


def with_extent(stored: Array, layout: RowLayout, extent: int, axis: int, devices: Devices) -> jax.Array:
    """Cuts cyclically stored rows, or pads them with zeros, to `extent`; each stays where it is."""
    return _to_extent(replace(layout, extent=extent).shard_rows, axis, devices)(stored)


@functools.cache
def _to_extent(shard_rows: int, axis: int, devices: Devices) -> Callable[[Array], jax.Array]:
    resize = functools.partial(with_size, axis=axis, size=shard_rows)
    on_shards = functools.partial(devices.local, resize, (axis,), axis)
    return jit_on(devices.mesh, on_shards, out_shardings=devices.sharding(axis))


def placed(rows: Array, layout: RowLayout, axis: int, devices: Devices) -> jax.Array:
    """Stores a table from an array anywhere; a NumPy array, or one on other devices, is taken shard by shard.

    Across processes it is collective for global arrays; of an array that all processes have, each takes its own shards.
    """
    if is_global(rows):
        rows = place_array(rows, devices.sharding(even_axis(rows.shape, axis, devices.count)))
    if isinstance(rows, jax.Array):
        for along in (axis, *(d for d in range(rows.ndim) if d != axis), None):
            if rows.sharding.is_equivalent_to(devices.sharding(along), rows.ndim):
                return _from_ordinary(layout, axis, devices, along)(rows)
    shape = resized(rows.shape, axis, layout.stored)
    dtype = jax.dtypes.canonicalize_dtype(rows.dtype)

    def shard_rows(index: Index) -> Leaf:
        indices = np.arange(layout.stored)[index[axis]]
        wanted = np.minimum(layout.row(indices), layout.extent - 1)
        if isinstance(rows, jax.Array):
            return _take(rows, wanted, axis)
        return np.take(np.asarray(rows), wanted, axis).astype(dtype, copy=False)

    return jax.make_array_from_callback(shape, devices.sharding(axis), shard_rows)


_take = jax.jit(lambda rows, wanted, axis: jnp.take(rows, wanted, axis), static_argnums=2)


@functools.cache
def _from_ordinary(layout: RowLayout, axis: int, devices: Devices, along: int | None) -> Callable[[Array], Array]:
    def run(rows: Array) -> Array:
        if along == axis:
            return store(rows, layout, axis, devices)
        own = functools.partial(own_rows, layout=layout, axis=axis, devices=devices)
        return devices.local(own if along is None else turn, (along,), axis, rows)

    def turn(rows: Array) -> Array:
        return jax.lax.all_to_all(_arranged(rows, layout, axis), devices.axis, axis, along, tiled=True)

    return jit_on(devices.mesh, run, out_shardings=devices.sharding(axis))


def on_host(stored: jax.Array, layout: RowLayout, axis: int) -> np.ndarray:
    """Returns the table as a NumPy array, joined from the devices' shards; collective if processes share them."""
    table = np.empty(resized(stored.shape, axis, layout.extent), stored.dtype)
    rows = np.moveaxis(table, axis, 0)
    for indices, part in _parts_on_host(stored, layout, axis):
        number = layout.row(indices)
        kept = number < layout.extent
        rows[number[kept]] = np.moveaxis(part, axis, 0)[kept]
    return table


def _parts_on_host(stored: jax.Array, layout: RowLayout, axis: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields (storage indices, their rows) until all is read."""
    if not is_global(stored):
        for shard in stored.addressable_shards:
            if shard.replica_id == 0:
                yield np.arange(layout.stored)[shard.index[axis]], np.asarray(shard.data)
        return
    # Some rows of each shard at a time, so that no device has the whole table.
    devices = Devices.of_array(stored, axis)
    size = max(1, min(layout.shard_rows, layout.stored * _PART // max(1, stored.nbytes) // layout.devices))
    first = np.arange(layout.devices)[:, None] * layout.shard_rows
    for start in range(0, layout.shard_rows, size):
        start = min(start, layout.shard_rows - size)
        part = _some_of_each(axis, size, devices)(stored, start)
        yield (first + start + np.arange(size)).reshape(-1), np.asarray(part.addressable_data(0))


@functools.cache
def _some_of_each(axis: int, size: int, devices: Devices) -> Callable[[Array, int], jax.Array]:
    """Compiles a program that gives every device `size` rows of each shard, from an index on."""

    def some(rows: Array, start: Array) -> Array:
        return jax.lax.all_gather(
            jax.lax.dynamic_slice_in_dim(rows, start, size, axis), devices.axis, axis=axis, tiled=True
        )

    return jit_on(devices.mesh, functools.partial(devices.local, some, (axis, None), None))


# --- all rows on one device, of some of the columns ---


def _restored(stored: Array, layout: RowLayout, axis: int) -> Array:
    if layout.cyclic:  # shard k holds rows k, k + N, ...: column by column they are in order
        split = stored.reshape(*stored.shape[:axis], layout.devices, layout.shard_rows, *stored.shape[axis + 1 :])
        stored = jnp.swapaxes(split, axis, axis + 1).reshape(stored.shape)
    return jax.lax.slice_in_dim(stored, 0, layout.extent, axis=axis)


def _arranged(rows: Array, layout: RowLayout, axis: int) -> Array:
    widths = [(0, (layout.stored - layout.extent) * (d == axis)) for d in range(rows.ndim)]
    padded = jnp.pad(rows, widths, mode="edge")
    if not layout.cyclic:
        return padded
    split = padded.reshape(*rows.shape[:axis], layout.shard_rows, layout.devices, *rows.shape[axis + 1 :])
    return jnp.swapaxes(split, axis, axis + 1).reshape(padded.shape)
