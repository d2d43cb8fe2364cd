"""Arrays in and out of a `RowLayout`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from autopar.ir.layout import RowLayout

Array = Any


def restored(stored: Array, layout: RowLayout, axis: int) -> Array:
    """The rows in their own order, without the spare ones."""
    if not layout.dealt:
        return jax.lax.slice_in_dim(stored, 0, layout.extent, axis=axis)
    # Share k holds the rows k, k + N, ...: taken column by column they are in order.
    split = stored.reshape(*stored.shape[:axis], layout.devices, layout.share, *stored.shape[axis + 1 :])
    rows = jnp.swapaxes(split, axis, axis + 1).reshape(stored.shape)
    return jax.lax.slice_in_dim(rows, 0, layout.extent, axis=axis)


def arranged(rows: Array, layout: RowLayout, axis: int) -> Array:
    """Rows as they are stored; spare ones are copies of the last row."""
    spare = layout.stored - layout.extent
    widths = [(0, spare if d == axis else 0) for d in range(rows.ndim)]
    padded = jnp.pad(rows, widths, mode="edge") if spare else rows
    if not layout.dealt:
        return padded
    split = padded.reshape(*rows.shape[:axis], layout.share, layout.devices, *rows.shape[axis + 1 :])
    return jnp.swapaxes(split, axis, axis + 1).reshape(padded.shape)
