"""Functions whose partitioning is tested."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def start_of(x: jax.Array) -> jax.Array:
    """A 6 that is computed: one that is known is folded into the program."""
    return (6.5 + 0.1 * jnp.tanh(x.ravel()[0])).astype(jnp.int32)


def convolution(dims: str = "HW", **options: Any) -> Callable[..., jax.Array]:
    """Of a batch of images with channels last."""
    numbers = (f"N{dims}C", f"{dims}IO", f"N{dims}C")
    given = {"window_strides": (1,) * len(dims), "padding": [(1, 1)] * len(dims), **options}
    return lambda x, w: lax.conv_general_dilated(x, w, dimension_numbers=numbers, **given)


def window(reduce: Any, start: float, sizes: Sequence[int], strides: Sequence[int], padding: Any) -> Callable[..., Any]:
    return lambda x: lax.reduce_window(x, start, reduce, sizes, strides, padding)
