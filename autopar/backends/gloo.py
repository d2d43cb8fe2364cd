"""AllGathers and AllReduces of small arrays by gloo's all_to_all, between CPUs of several processes.

gloo's own are rings: N - 1 and 2 (N - 1) messages one after the other, each of which wakes two threads; an AllReduce of
several arrays, as XLA combines them, is a ring for each. Only gloo's all_to_all sends to all at once. So an AllGather
here sends to all (one message), and in an AllReduce each device adds up its share, in the devices' order, and sends
that to all (two messages), with the bytes of the rings. Every device gets all of a small sum (a loss), and adds it up.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from autopar.jax_types import Array

Axis = str | tuple[str, ...]
#: Most bytes of an operand that each device sends whole to all: a second message costs more.
_WHOLE = 1 << 10

#: The name of a compiled all_to_all: the collective that it stands for, its arrays, whether operands are sent whole.
NAMED = re.compile(r"autopar\.sends/(?P<op>all-reduce|all-gather)/(?P<arrays>[^/\"]*)(?P<whole>/whole)?/")


def uses_gloo(mesh: Mesh) -> bool:
    """Returns whether collectives of a mesh use gloo: its devices are CPUs of several processes."""
    devices = mesh.devices.flat
    return devices[0].platform == "cpu" and len({device.process_index for device in devices}) > 1


def direct_all_gather(value: Array, axis: Axis, parts: Sequence[Array] = ()) -> Array:
    """Returns the values of all devices, [N, ...]. `parts`: the arrays in `value`, if there are several."""
    with _named("all-gather", parts or (value,), jax.lax.axis_size(axis)):
        return _send_to_all(value, axis)


def direct_all_reduce(value: Array, axis: Axis, parts: Sequence[Array] = ()) -> Array:
    """Returns the sum of all devices' values (flat), equal to the bit on all. `parts`: as for `direct_all_gather`."""
    count = jax.lax.axis_size(axis)
    if value.nbytes <= _WHOLE:
        with _named("all-reduce", parts or (value,), end="/whole"):
            return functools.reduce(jnp.add, _send_to_all(value, axis))
    with _named("all-reduce", parts or (value,)):
        shares = jnp.pad(value, (0, -value.size % count)).reshape(count, -1)
        own = functools.reduce(jnp.add, jax.lax.all_to_all(shares, axis, 0, 0))  # -0.0 stays, unlike by jnp.sum
    with _named("all-reduce", ()):
        return _send_to_all(own, axis).reshape(-1)[: value.size]


def _send_to_all(value: Array, axis: Axis) -> Array:
    return jax.lax.all_to_all(jnp.broadcast_to(value, (jax.lax.axis_size(axis), *value.shape)), axis, 0, 0)


def _named(op: str, parts: Sequence[Array], times: int = 1, end: str = "") -> contextlib.AbstractContextManager[object]:
    """Names a message for `autopar.check`, as XLA would write the result of its collective on one device."""
    arrays = (("pred" if x.dtype == np.bool_ else "u8", times * x.size * x.dtype.itemsize) for x in parts)
    return jax.named_scope(f"autopar.sends/{op}/{''.join(f'{dtype}[{size}]' for dtype, size in arrays)}{end}")
