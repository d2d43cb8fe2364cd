"""Row-space operations that need no more than the backend, their parameters and their operands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from autopar.backends.indices import flat_ids
from autopar.backends.protocol import RowBackend

Array = Any


def _row_ids(backend: RowBackend, p: Mapping[str, Any], index: Array) -> Array:
    return flat_ids(p, index)


def _row_range(backend: RowBackend, p: Mapping[str, Any]) -> Array:
    return jnp.arange(p["start"], p["stop"], p["stride"], dtype=jnp.int32)


def _route(backend: RowBackend, p: Mapping[str, Any], *ids: Array) -> Any:
    return backend.route(ids, p)


def _pull(backend: RowBackend, p: Mapping[str, Any], leaf: Array, route: Any) -> Array:
    return backend.pull(jnp.asarray(leaf), route, p["axis"], p["state"])


def _padding(backend: RowBackend, p: Mapping[str, Any], rows: Array, route: Any) -> Array:
    return backend.padding(jnp.asarray(rows), p["axis"])


def _fetch(backend: RowBackend, p: Mapping[str, Any], rows: Array, route: Any) -> Array:
    return backend.fetch(rows, route, p["axis"])


def _lookup(backend: RowBackend, p: Mapping[str, Any], fetched: Array, route: Any, index: Array) -> Array:
    return backend.lookup(p, fetched, route, jnp.asarray(index))


def _lookup_ids(backend: RowBackend, p: Mapping[str, Any], fetched: Array, route: Any, ids: Array) -> Array:
    return backend.lookup_ids(fetched, route, ids, p["axis"])


def _push_ids(backend: RowBackend, p: Mapping[str, Any], base: Array, route: Any, ids: Array, new: Array) -> Array:
    return backend.push_ids(base, route, ids, new, p["axis"])


def _deliver(backend: RowBackend, p: Mapping[str, Any], sums: Array, route: Any, base: Array | None = None) -> Array:
    return backend.deliver(sums, route, p["axis"], base)


def _plus(backend: RowBackend, p: Mapping[str, Any], a: Array, b: Array) -> Array:
    return a + b


def _row_iota(backend: RowBackend, p: Mapping[str, Any], route: Any) -> Array:
    numbers = backend.row_numbers(route, p["extent"])
    shape = [1] * len(p["shape"])
    shape[p["axis"]] = numbers.shape[0]
    return jnp.broadcast_to(numbers.reshape(shape), p["shape"]).astype(p["dtype"])


def _numbered(backend: RowBackend, p: Mapping[str, Any], numbers: Array) -> Array:
    """Rows' numbers along an axis, as an iota."""
    shape = [1] * len(p["shape"])
    shape[p["axis"]] = numbers.shape[0]
    return jnp.broadcast_to(numbers.reshape(shape), p["shape"]).astype(p["dtype"])


def _only_rows(backend: RowBackend, p: Mapping[str, Any], value: Array, numbers: Array) -> Array:
    """Another value where there is no row (its number is -1). `factor` elements along the axis are of one row."""
    shape = [1] * value.ndim
    shape[p["axis"]] = value.shape[p["axis"]]
    there = jnp.repeat(numbers >= 0, p["factor"], total_repeat_length=value.shape[p["axis"]]).reshape(shape)
    return jnp.where(there, value, jnp.asarray(p["fill"], value.dtype))


def _full(backend: RowBackend, p: Mapping[str, Any], value: Array) -> Array:
    return jnp.full(p["shape"], value, p["dtype"])


def _densify(backend: RowBackend, p: Mapping[str, Any], rows: Array, route: Any) -> Array:
    return backend.densify(rows, route, p["axis"], p["extent"])


def _fill(backend: RowBackend, p: Mapping[str, Any], leaf: Array, rows: Array, route: Any, *unless: Array) -> Array:
    """All rows what the padding row is, in place, unless one of some conditions holds: a loop of at most one round."""
    wanted = ~jnp.any(jnp.stack(unless))
    return jax.lax.fori_loop(0, jnp.where(wanted, 1, 0), lambda _, leaf: backend.fill(leaf, rows, p["axis"]), leaf)


def _commit(backend: RowBackend, p: Mapping[str, Any], leaf: Array, rows: Array, route: Any, *rest: Array) -> Array:
    guard, first = (rest[0], rest[1:]) if p.get("guarded") else (None, rest)
    if first:
        rows, *_ = jax.lax.optimization_barrier((rows, *first))
    return backend.commit(leaf, rows, route, p["axis"], guard)


def _exceeded(backend: RowBackend, p: Mapping[str, Any], route: Any) -> Array:
    return backend.exceeded(route)


def _next(backend: RowBackend, p: Mapping[str, Any], count: Array) -> Array:
    return count + 1


def _any(backend: RowBackend, p: Mapping[str, Any], *flags: Array) -> Array:
    return jnp.any(jnp.stack(flags))


def _select(backend: RowBackend, p: Mapping[str, Any], which: Array, new: Array, old: Array) -> Array:
    return jnp.where(which, old, new)


#: Operation -> what carries it out: (backend, the equation's parameters, operands) -> its result.
ROW_OPS: Mapping[str, Callable[..., Any]] = {
    "ap.row_ids": _row_ids,
    "ap.row_range": _row_range,
    "ap.row_iota": _row_iota,
    "ap.route": _route,
    "ap.pull": _pull,
    "ap.fetch": _fetch,
    "ap.padding": _padding,
    "ap.lookup": _lookup,
    "ap.lookup_ids": _lookup_ids,
    "ap.push_ids": _push_ids,
    "ap.deliver": _deliver,
    "ap.plus": _plus,
    "ap.densify": _densify,
    "ap.fill": _fill,
    "ap.commit": _commit,
    "ap.exceeded": _exceeded,
    "ap.any": _any,
    "ap.next": _next,
    "ap.select": _select,
    "ap.numbered": _numbered,
    "ap.only_rows": _only_rows,
    "ap.full": _full,
}
