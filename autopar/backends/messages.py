"""Sends small arrays between CPUs of several processes directly.

Their collectives go by gloo, whose AllGathers and AllReduces are rings: N - 1 and 2 (N - 1) messages after each other,
each of which wakes two threads; and an AllReduce of several arrays, as XLA combines them, is a ring for each. Only its
all_to_all sends to all at once. So what is gathered is sent to all, and of a sum each device adds up a part, in the
devices' order, and sends it to all: one and two messages after each other, with the bytes of the rings. Sums of few
bytes (a loss) are sent whole, and added up by all.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from autopar.jax_types import Array

Axis = str | tuple[str, ...]
#: Most bytes of a sum that each device sends whole: a second message costs more.
_WHOLE = 1 << 10

#: What a name of a compiled all-to-all says it stands for: a collective, the arrays in it, whether a sum goes whole.
NAMED = re.compile(r"autopar\.sends/(?P<op>all-reduce|all-gather)/(?P<arrays>[^/\"]*)(?P<whole>/whole)?/")


def by_gloo(mesh: Mesh) -> bool:
    """Returns whether the devices of a mesh meet by gloo: CPUs of several processes."""
    devices = mesh.devices.flat
    return devices[0].platform == "cpu" and len({device.process_index for device in devices}) > 1


def sent_to_all(value: Array, axis: Axis, parts: Sequence[Array] = ()) -> Array:
    """Returns the values of all devices, [N, ...]. `parts`: the arrays in `value`, if there are several."""
    with _named("all-gather", parts or (value,), jax.lax.axis_size(axis)):
        return _to_all(value, axis)


def added_up(value: Array, axis: Axis, parts: Sequence[Array] = ()) -> Array:
    """Returns the sum of all devices' values, flat ones, with the same bits on all of them. `parts`: as for
    `sent_to_all`."""
    count = jax.lax.axis_size(axis)
    if value.nbytes <= _WHOLE:
        with _named("all-reduce", parts or (value,), end="/whole"):
            return functools.reduce(jnp.add, _to_all(value, axis))
    with _named("all-reduce", parts or (value,)):
        shares = jnp.pad(value, (0, -value.size % count)).reshape(count, -1)
        own = functools.reduce(jnp.add, jax.lax.all_to_all(shares, axis, 0, 0))  # -0.0 stays, unlike by jnp.sum
    with _named("all-reduce", ()):
        return _to_all(own, axis).reshape(-1)[: value.size]


def _to_all(value: Array, axis: Axis) -> Array:
    return jax.lax.all_to_all(jnp.broadcast_to(value, (jax.lax.axis_size(axis), *value.shape)), axis, 0, 0)


def _named(op: str, parts: Sequence[Array], times: int = 1, end: str = "") -> contextlib.AbstractContextManager[Any]:
    """Names a message for `autopar.check`, as XLA would write the result of its collective on one device."""
    arrays = (("pred" if x.dtype == np.bool_ else "u8", times * x.size * x.dtype.itemsize) for x in parts)
    return jax.named_scope(f"autopar.sends/{op}/{''.join(f'{dtype}[{size}]' for dtype, size in arrays)}{end}")
