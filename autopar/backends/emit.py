"""Program -> a Python function on flat arrays, to be traced by `jax.jit`.

Equations run in the program's order (no recursion: a step may have 10,000), each under its own JAX context and with
its source line. What comes out is checked against the program's types: a plan that is not what was emitted is a bug.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar import jax_compat
from autopar.backends.protocol import RowBackend
from autopar.ir.program import ArrayType, Atom, Block, Equation, Literal, Var

Array = Any


def emit(block: Block, backend: RowBackend) -> Callable[..., list[Array]]:
    """A function of the block's inputs that returns its outputs."""
    emitter = _Emitter(backend)

    def run(*inputs: Array) -> list[Array]:
        return emitter.block(block, inputs)

    return run


class _Emitter:
    def __init__(self, backend: RowBackend) -> None:
        self._backend = backend

    def block(self, block: Block, inputs: Sequence[Array]) -> list[Array]:
        env: dict[Var, Array] = dict(zip(block.inputs, inputs, strict=True))

        def read(atom: Atom) -> Array:
            return atom.value if isinstance(atom, Literal) else env[atom]

        for equation in block.equations:
            operands = [read(a) for a in equation.inputs]
            with jax_compat.equation_context(equation.context, equation.info):
                results = self._equation(equation, operands)
            for var, value in zip(equation.outputs, results, strict=True):
                _check(equation, var, value)
                env[var] = value
        return [read(a) for a in block.outputs]

    def _equation(self, equation: Equation, operands: list[Array]) -> Sequence[Array]:
        if equation.op in _ROW_OPS:
            return [_ROW_OPS[equation.op](self._backend, equation.params, *operands)]
        if equation.op in ("push", "sweep"):
            return getattr(self, "_" + equation.op)(equation, operands)
        if equation.bodies and equation.original is None:
            return getattr(self, "_" + {"while": "while_loop"}.get(equation.op, equation.op))(equation, operands)
        params = equation.original if equation.original is not None else equation.params
        return jax_compat.bind(equation.primitive, operands, params)

    # --- control flow whose bodies were rewritten ---

    def _scan(self, equation: Equation, operands: list[Array]) -> Sequence[Array]:
        p, body = equation.params, equation.bodies[0]
        consts, carry = p["num_consts"], p["num_carry"]

        def step(state: tuple, xs: tuple) -> tuple[tuple, tuple]:
            results = self.block(body, [*operands[:consts], *state, *xs])
            kept = tuple(_like(r, s) for r, s in zip(results[:carry], state, strict=True))
            return kept, tuple(jnp.asarray(r) for r in results[carry:])

        start = tuple(_typed(x, a.type) for x, a in zip(operands[consts : consts + carry], body.outputs, strict=False))
        state, stacked = jax.lax.scan(
            step, start, tuple(operands[consts + carry :]), length=p["length"], reverse=p["reverse"], unroll=p["unroll"]
        )
        return [*state, *stacked]

    def _remat(self, equation: Equation, operands: list[Array]) -> Sequence[Array]:
        def body(*inputs: Array) -> list[Array]:
            return self.block(equation.bodies[0], inputs)

        p = equation.params
        return jax.checkpoint(body, prevent_cse=p["prevent_cse"], policy=p["policy"])(*operands)

    def _cond(self, equation: Equation, operands: list[Array]) -> Sequence[Array]:
        branches = [lambda *xs, b=b: tuple(map(jnp.asarray, self.block(b, xs))) for b in equation.bodies]
        return jax.lax.switch(operands[0].astype(jnp.int32), branches, *operands[1:])

    def _while_loop(self, equation: Equation, operands: list[Array]) -> Sequence[Array]:
        condition, body = equation.bodies
        n, m = equation.params["cond_nconsts"], equation.params["body_nconsts"]
        outside, inside, start = operands[:n], operands[n : n + m], operands[n + m :]

        def step(state: tuple) -> tuple:
            return tuple(_like(r, s) for r, s in zip(self.block(body, [*inside, *state]), state, strict=True))

        return jax.lax.while_loop(
            lambda state: self.block(condition, [*outside, *state])[0], step, tuple(map(jnp.asarray, start))
        )

    # --- row space ---

    def _push(self, equation: Equation, operands: list[Array]) -> Sequence[Array]:
        rows, route, index, updates = operands
        p = equation.params
        local = _local_index(self._backend, p, route, index, rows)
        params = {k: v for k, v in p.items() if k not in ("extent", "position", "clip", "op")}
        mode = jax.lax.GatherScatterMode.CLIP if p["clip"] else jax.lax.GatherScatterMode.FILL_OR_DROP
        params |= {"mode": mode, "indices_are_sorted": False, "unique_indices": False}
        return jax_compat.bind(equation.primitive, [rows, local, updates], params)

    def _sweep(self, equation: Equation, operands: list[Array]) -> Sequence[Array]:
        p, body = equation.params, equation.bodies[0]
        n, m = len(p["axes"]), p["frontier"]
        old, new, leaves = operands[:n], operands[n : 2 * n], operands[2 * n : 3 * n]
        frontier, first = operands[3 * n : 3 * n + m], operands[3 * n + m :]
        needed = jnp.zeros((), bool)
        for a, b, axis in zip(old, new, p["axes"], strict=True):
            last = (slice(None),) * axis + (-1,)
            needed = needed | jnp.any(a[last] != b[last])
        for value in frontier:  # a scalar that isn't finite, where a row of its own may hide what it does
            if jax_compat.is_float(jnp.asarray(value).dtype):
                needed = needed | ~jnp.all(jnp.isfinite(value))
        for value in first:
            needed = needed | _rarely(value)
        return self._backend.sweep(
            lambda route, leaves: self.block(body, [route, *leaves, *frontier]), leaves, needed, p
        )


def _rarely(value: Array) -> Array:
    """A condition on a value that hardly ever holds: what waits for it waits for the value.

    XLA copies a table that is still to be read when it is overwritten in place, and on CPUs it drops optimization
    barriers before it decides. A sweep that runs without need changes nothing, so it may wait in this way.
    """
    value = jnp.asarray(value)
    if jax_compat.is_float(value.dtype):
        return jnp.any(jnp.isnan(value))
    if jnp.issubdtype(value.dtype, jnp.integer):
        return jnp.any(value == jnp.iinfo(value.dtype).min)
    return jnp.zeros((), bool)  # no value of a bool is rare: XLA may copy


def _check(equation: Equation, var: Var, value: Array) -> None:
    if isinstance(var.type, ArrayType):
        shape, dtype = np.shape(value), getattr(value, "dtype", None)
        same = shape == var.type.shape and (dtype is None or dtype == var.type.dtype)
        assert same, f"{equation.op} ({equation.where}) gave {dtype}{list(shape)}, planned was {var.type}"


def _typed(value: Array, type_: Any) -> Array:
    return jnp.asarray(value, type_.dtype) if not hasattr(value, "dtype") else value


def _like(value: Array, other: Array) -> Array:
    """A loop's carry keeps its type, JAX's weak type included."""
    value = jnp.asarray(value)
    if jax_compat.is_key(value.dtype) or jax_compat.is_weak(value) == jax_compat.is_weak(other):
        return value
    return jax.lax.convert_element_type(value, other.dtype) if not jax_compat.is_weak(other) else value


def _local_index(backend: RowBackend, p: Mapping[str, Any], route: Any, index: Array, rows: Array) -> Array:
    """Index vectors into the table as index vectors into the routed rows."""
    position, extent = p["position"], p["extent"]
    ids = _in_range(index[..., position], extent, p["clip"])
    local = backend.positions(route, ids, extent)
    if index.shape[-1] == 1:
        return local[..., None]
    return index.astype(jnp.int32).at[..., position].set(local)


def _in_range(ids: Array, extent: int, clip: bool) -> Array:
    """int32 ids; those out of range clipped, or mapped to `extent`. Compared before they are narrowed."""
    low, high = _bounds(ids.dtype, extent)
    if clip:
        return jnp.clip(ids, low, high).astype(jnp.int32)
    inside = (ids >= low) & (ids <= high)
    return jnp.where(inside, ids.astype(jnp.int32), extent)


def _bounds(dtype: Any, extent: int) -> tuple[Array, Array]:
    """0 and the last row, as far as the ids' dtype reaches."""
    return np.asarray(0, dtype), np.asarray(min(extent - 1, np.iinfo(dtype).max), dtype)


def _row_ids(backend: RowBackend, p: Mapping[str, Any], index: Array) -> Array:
    extent, count = p["extent"], p["count"]
    if p["position"] is not None:
        return _in_range(jnp.asarray(index)[..., p["position"]], extent, p["clip"]).reshape(-1)
    start = _in_range(jnp.asarray(index).reshape(-1), extent - count + 1, True)
    return (start[:, None] + jax.lax.iota(jnp.int32, count)).reshape(-1)


def _row_range(backend: RowBackend, p: Mapping[str, Any]) -> Array:
    return jnp.arange(p["start"], p["stop"], p["stride"], dtype=jnp.int32)


def _route(backend: RowBackend, p: Mapping[str, Any], *ids: Array) -> Any:
    return backend.route(ids, p["extent"], p["rows"])


def _pull(backend: RowBackend, p: Mapping[str, Any], leaf: Array, route: Any) -> Array:
    return backend.pull(jnp.asarray(leaf), route, p["axis"], p["state"])


def _lookup(backend: RowBackend, p: Mapping[str, Any], rows: Array, route: Any, index: Array) -> Array:
    local = _local_index(backend, p, route, jnp.asarray(index), rows)
    params = {k: v for k, v in p.items() if k not in ("extent", "position", "clip")}
    params["indices_are_sorted"] = False
    if p["clip"] and local.shape[-1] == 1:  # every id is a routed row
        params["mode"] = jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS
    return jax_compat.bind(jax.lax.gather_p, [rows, local], params)[0]


def _lookup_ids(backend: RowBackend, p: Mapping[str, Any], rows: Array, route: Any, ids: Array) -> Array:
    index = (slice(None),) * p["axis"] + (_positions(backend, route, ids, rows, p["axis"]),)
    return rows.at[index].get(mode="clip")


def _push_ids(backend: RowBackend, p: Mapping[str, Any], rows: Array, route: Any, ids: Array, new: Array) -> Array:
    index = (slice(None),) * p["axis"] + (_positions(backend, route, ids, rows, p["axis"]),)
    return rows.at[index].set(new, mode="drop")


def _positions(backend: RowBackend, route: Any, ids: Array, rows: Array, axis: int) -> Array:
    return backend.positions(route, ids, np.iinfo(np.int32).max)


def _row_iota(backend: RowBackend, p: Mapping[str, Any], route: Any) -> Array:
    numbers = backend.row_numbers(route)
    shape = [1] * len(p["shape"])
    shape[p["axis"]] = numbers.shape[0]
    return jnp.broadcast_to(numbers.reshape(shape), p["shape"]).astype(p["dtype"])


def _full(backend: RowBackend, p: Mapping[str, Any], value: Array) -> Array:
    return jnp.full(p["shape"], value, p["dtype"])


def _densify(backend: RowBackend, p: Mapping[str, Any], rows: Array, route: Any) -> Array:
    return backend.densify(rows, route, p["axis"], p["extent"])


def _commit(backend: RowBackend, p: Mapping[str, Any], leaf: Array, rows: Array, route: Any, *first: Array) -> Array:
    if first:
        rows, *_ = jax.lax.optimization_barrier((rows, *first))
    return backend.commit(leaf, rows, route, p["axis"])


_FINISH: Mapping[str, Callable[[Array, Array, Array], Array]] = {
    "reduce_max": lambda part, other, count: jnp.maximum(part, other),
    "reduce_min": lambda part, other, count: jnp.minimum(part, other),
    "reduce_and": lambda part, other, count: part & other,
    "reduce_or": lambda part, other, count: part | other,
    # The count may overflow a small float, and zeros need none.
    "reduce_sum": lambda part, other, count: part + jnp.where(other == 0, other, other * count.astype(part.dtype)),
    "reduce_prod": lambda part, other, count: part * other ** count.astype(part.dtype),
}


def _neutral(op: str, dtype: Any) -> Any:
    if np.dtype(dtype) == np.bool_:
        return op in ("reduce_and", "reduce_min")
    if op in ("reduce_sum", "reduce_or"):
        return 0
    if op in ("reduce_prod", "reduce_and"):
        return 1 if op == "reduce_prod" else -1
    limits = jnp.finfo(dtype) if jax_compat.is_float(dtype) else jnp.iinfo(dtype)
    if jax_compat.is_float(dtype):
        return -jnp.inf if op == "reduce_max" else jnp.inf
    return limits.min if op == "reduce_max" else limits.max


def _reduce_rows(backend: RowBackend, p: Mapping[str, Any], rows: Array, route: Any) -> Array:
    """Reduce the routed rows; then fold in the others, which all are what the padding row is."""
    op, axes, axis, extent = p["op"], p["axes"], p["axis"], p["extent"]
    reduce = _REDUCE[op]
    shape = [1] * rows.ndim
    shape[axis] = rows.shape[axis]
    real = backend.is_row(route, extent)
    part = reduce(jnp.where(real.reshape(shape), rows, jnp.asarray(_neutral(op, rows.dtype), rows.dtype)), axes)
    padding = jax.lax.slice_in_dim(rows, rows.shape[axis] - 1, rows.shape[axis], axis=axis)
    other = reduce(padding, axes)
    untouched = extent - jnp.sum(real, dtype=jnp.int32)
    return jnp.where(untouched > 0, _FINISH[op](part, other, untouched), part).astype(p["dtype"])


_REDUCE: Mapping[str, Callable[[Array, Any], Array]] = {
    "reduce_sum": lambda x, axes: jnp.sum(x, axes, dtype=x.dtype),
    "reduce_prod": lambda x, axes: jnp.prod(x, axes, dtype=x.dtype),
    "reduce_max": jnp.max,
    "reduce_min": jnp.min,
    "reduce_and": jax.lax.reduce_and,
    "reduce_or": jax.lax.reduce_or,
}

_ROW_OPS: Mapping[str, Callable[..., Any]] = {
    "row_ids": _row_ids,
    "row_range": _row_range,
    "row_iota": _row_iota,
    "route": _route,
    "pull": _pull,
    "lookup": _lookup,
    "lookup_ids": _lookup_ids,
    "push_ids": _push_ids,
    "reduce_rows": _reduce_rows,
    "densify": _densify,
    "commit": _commit,
    "full": _full,
}
