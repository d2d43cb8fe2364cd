"""Operations of ours that need their parameters and operands only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

from autopar.backends.indices import flat_ids

Array = Any


def numbered(p: Mapping[str, Any], numbers: Array) -> Array:
    """Rows' numbers along an axis, as an iota."""
    shape = [1] * len(p["shape"])
    shape[p["axis"]] = numbers.shape[0]
    return jnp.broadcast_to(numbers.reshape(shape), p["shape"]).astype(p["dtype"])


def _only_rows(p: Mapping[str, Any], value: Array, numbers: Array) -> Array:
    """Another value where there is no row (its number is -1). `factor` elements along the axis are of one row."""
    shape = [1] * value.ndim
    shape[p["axis"]] = value.shape[p["axis"]]
    there = jnp.repeat(numbers >= 0, p["factor"], total_repeat_length=value.shape[p["axis"]]).reshape(shape)
    return jnp.where(there, value, jnp.asarray(p["fill"], value.dtype))


#: Operation -> what carries it out: (the equation's parameters, operands) -> its result.
ROW_OPS: Mapping[str, Callable[..., Any]] = {
    "ap.row_ids": flat_ids,
    "ap.row_range": lambda p: jnp.arange(p["start"], p["stop"], p["stride"], dtype=jnp.int32),
    "ap.plus": lambda p, a, b: a + b,
    "ap.exceeded": lambda p, load: load > p["capacity"],
    "ap.any": lambda p, *flags: jnp.any(jnp.stack(flags)),
    "ap.next": lambda p, count: count + 1,
    "ap.select": lambda p, which, new, old: jnp.where(which, old, new),
    "ap.numbered": numbered,
    "ap.only_rows": _only_rows,
    "ap.full": lambda p, value: jnp.full(p["shape"], value, p["dtype"]),
}
