"""Defines the reductions that passes and backends know by name ("sum", "max", ...).

A name is the `op` of our reducing equations (`ap.reduce`, `ap.reduce_rows`, `ap.reduce_table`, ...) and of MPI's
reductions. JAX's primitive of the same meaning has the prefix `reduce_` (`REDUCTION_PRIMITIVES`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from autopar import jax_compat
from autopar.jax_types import Array, Dtype


@dataclass(frozen=True, slots=True)
class Reducer:
    """A reduction, and how partial results are joined."""

    joined: str  #: The function of NumPy and of `jax.numpy` that joins two results. NaN stays NaN.
    reduce: Callable[[Array, tuple[int, ...]], Array]  #: Reduces an array over axes, in its own dtype.
    neutral: Callable[[np.dtype], np.ndarray]  #: Returns the neutral element of a dtype, as an array without axes.
    repeated: Callable[[Array, Array], Array] = lambda value, _: value  #: Joins a result with itself, `count` times.
    #: JAX's collective over axes of a mesh; one other than `psum` may lose a NaN.
    collective: Callable[[Array, str | tuple[str, ...]], Array] | None = None

    def join(self, a: Array, b: Array) -> Array:
        """Joins two results, in NumPy if both are NumPy's."""
        module = np if isinstance(a, np.ndarray | np.generic) and isinstance(b, np.ndarray | np.generic) else jnp
        return getattr(module, self.joined)(a, b)


def _limit(kind: np.dtype, *, largest: bool) -> np.ndarray:
    """Returns the largest or the smallest number of a dtype, an infinity if it has one."""
    if kind == np.bool_:
        return np.asarray(largest)
    if jax_compat.is_float(kind):
        limit = np.asarray(np.inf if largest else -np.inf, kind)
        return limit if np.isinf(limit) else np.asarray(getattr(jnp.finfo(kind), "max" if largest else "min"), kind)
    limits = jnp.iinfo(kind)
    return np.asarray(limits.max if largest else limits.min, kind)


def _ones(kind: np.dtype) -> np.ndarray:
    is_signed = kind != np.bool_ and jnp.iinfo(kind).min < 0
    return np.asarray(-1, kind) if is_signed else _limit(kind, largest=True)


REDUCERS: Mapping[str, Reducer] = {
    "sum": Reducer(
        joined="add",
        reduce=lambda x, axes: jnp.sum(x, axes, dtype=x.dtype),
        neutral=lambda kind: np.zeros((), kind),
        repeated=lambda value, count: jnp.where(value == 0, value, value * count.astype(value.dtype)),
        collective=jax.lax.psum,
    ),
    "prod": Reducer(
        joined="multiply",
        reduce=lambda x, axes: jnp.prod(x, axes, dtype=x.dtype),
        neutral=lambda kind: np.ones((), kind),
        repeated=lambda value, count: value ** count.astype(value.dtype),
    ),
    "max": Reducer("maximum", jnp.max, lambda kind: _limit(kind, largest=False), collective=jax.lax.pmax),
    "min": Reducer("minimum", jnp.min, lambda kind: _limit(kind, largest=True), collective=jax.lax.pmin),
    "and": Reducer("bitwise_and", jax.lax.reduce_and, _ones),
    "or": Reducer("bitwise_or", jax.lax.reduce_or, lambda kind: np.zeros((), kind)),
}

#: JAX's primitive -> the reduction's name.
REDUCTION_PRIMITIVES: Mapping[str, str] = {f"reduce_{name}": name for name in REDUCERS}


def neutral(name: str, dtype: Dtype) -> np.ndarray:
    return REDUCERS[name].neutral(np.dtype(dtype))
