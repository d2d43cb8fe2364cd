"""Turns a Program into a Python function on flat arrays, to be traced by `jax.jit`.

Equations run in the program's order (no recursion: a step may have 10,000), each under its own JAX context and with its
source line. Results are checked against the program's types: a mismatch is a bug.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar import jax_compat
from autopar.backends.deferred import Deferred
from autopar.backends.devices import Mapped, OwnPart, reduce_over
from autopar.backends.indices import ROW_OPS, cut, in_range
from autopar.backends.layouts import own_rows, own_whole
from autopar.backends.microbatches import Microbatch, run_microbatches
from autopar.backends.row_backend import Others, RowBackend
from autopar.backends.segments import Entries
from autopar.backends.single import ReplicatedRows, SingleDevice
from autopar.ir.operations import PREFIX, plain_name, split
from autopar.ir.program import ArrayType, Atom, Block, Equation, Literal, Program, Var, family_of
from autopar.ir.trace import block_of
from autopar.jax_types import Array, Leaf, Params, Pytree, ValueType

#: Operations over the devices of the tensor axis.
_TENSOR = f"{PREFIX}tensor_"


def emit(
    block: Block,
    backends: Mapping[int, RowBackend] = {},
    devices: OwnPart | None = None,
    microbatch: Microbatch | None = None,
) -> Callable[..., list[Array]]:
    """Compiles a block into a function from its inputs to its outputs.

    `backends`: backends by family; by default `SingleDevice`, or `ReplicatedRows` in `shard_map`. `devices`: the
    devices over which values are spread, if any are. `microbatch`: the microbatch that this is the program of.
    """
    emitter = _Emitter(backends, devices, microbatch)

    def run(*inputs: Array) -> list[Array]:
        return emitter.block(block, inputs)

    return run


def deferred_of(equation: Equation) -> Deferred:
    """Returns the replay of an update log's equation, whose body is the untouched update."""
    (body,) = equation.bodies
    return Deferred(equation.params["replay"], body, emit(body))


class _Emitter:
    def __init__(
        self, backends: Mapping[int, RowBackend], devices: OwnPart | None, microbatch: Microbatch | None
    ) -> None:
        self._backends = backends
        self._devices = devices
        self._microbatch = microbatch
        # For families without a backend: each device has all rows, and routes are made of all devices' ids.
        self._whole = ReplicatedRows(devices) if isinstance(devices, Mapped) else SingleDevice()

    def _backend(self, equation: Equation) -> RowBackend:
        family = family_of(equation)
        return self._whole if family is None else self._backends.get(family, self._whole)

    def block(self, block: Block, inputs: Sequence[Array]) -> list[Array]:
        env: dict[Var, Array] = dict(zip(block.inputs, inputs, strict=True))

        def read(atom: Atom) -> Array:
            return atom.value if isinstance(atom, Literal) else env[atom]

        for equation in block.equations:
            operands = [read(a) for a in equation.inputs]
            with jax_compat.equation_context(equation.context, equation.info), _named(equation):
                results = self._equation(equation, operands)
            for var, value in zip(equation.outputs, results, strict=True):
                _check(equation, var, value)
                env[var] = value
        return [read(a) for a in block.outputs]

    def _equation(self, equation: Equation, operands: list[Array]) -> Sequence[Array]:
        if equation.op in ROW_OPS:
            return [ROW_OPS[equation.op](equation.params, *operands)]
        if equation.op in REWRITTEN:
            return REWRITTEN[equation.op](equation.params, *operands)
        # Operations of ours, then control flow whose bodies a pass has changed; the rest is bound as it was traced.
        op, devices = self._on_axis(equation.op)
        if op in _ON_DEVICES:
            assert devices is not None, "one device has everything"
            params = dict(equation.params)
            devices = devices.by_ranks if params.pop("ranks", False) else devices
            return [_ON_DEVICES[op](devices, params, jnp.asarray(operands[0]))]
        if equation.op in _OF_MICROBATCH:
            assert self._microbatch is not None, "in the program of a microbatch"
            return [_OF_MICROBATCH[equation.op](self._microbatch, equation.params, jnp.asarray(operands[0]))]
        method = _METHODS.get(op)
        if method is None and equation.bodies and equation.original is None:
            method = _CONTROL_FLOW[equation.op]
        if method is not None:
            return method(self, equation, operands)
        if equation.op.startswith(PREFIX):
            run = getattr(self._backend(equation), plain_name(equation.op))
            results = run({**equation.params, "primitive": equation.primitive}, *operands)
            return results if isinstance(results, tuple) else [results]
        params = equation.original if equation.original is not None else equation.params
        if equation.op == "dot_general" and self._devices is not None and self._devices.is_on_cpus:
            operands = _as_wide_as(params, operands)
        return jax_compat.bind(equation.primitive, operands, params)

    def _on_axis(self, op: str) -> tuple[str, OwnPart | None]:
        """Returns an operation's name without its axis, and the devices of that axis, data or tensor."""
        if not op.startswith(_TENSOR):
            return op, self._devices
        assert self._devices is not None and self._devices.tensor_axis is not None, "products are divided"
        return f"{PREFIX}{op.removeprefix(_TENSOR)}", Mapped(self._devices.mesh, self._devices.tensor_axis)

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

        return while_loop(
            lambda state: self.block(condition, [*outside, *state])[0], step, tuple(map(jnp.asarray, start))
        )

    def _shard_map(self, equation: Equation, operands: list[Array]) -> Sequence[Array]:
        return shard_map_whole(equation.params, self.block, list(map(jnp.asarray, operands)))

    # --- where values are ---

    def _scaled(self, equation: Equation, operands: list[Array]) -> Sequence[Array]:
        as_it_is, sums_first = (lambda *xs, b=b: self.block(b, xs) for b in equation.bodies)
        by = jnp.asarray(operands[equation.params["by"]])
        is_safe = jnp.all(jnp.isfinite(by) & (by != 0)) if equation.params["divides"] else jnp.all(jnp.isfinite(by))
        return jax.lax.cond(is_safe, as_it_is, sums_first, *map(jnp.asarray, operands))

    def _first(self, equation: Equation, operands: list[Array]) -> Sequence[Array]:
        """Runs the body on the first device alone; the others return zeros, which change no sum.

        Along the mesh's other axes all devices get the first one's results.
        """
        _, devices = self._on_axis(equation.op)
        assert devices is not None, "in the program of one device"
        mesh, axes = devices.mesh, devices.examples
        others = tuple(name for name in mesh.axis_names if name not in axes and mesh.shape[name] > 1)

        def zeros(*_: Array) -> tuple[Array, ...]:
            return tuple(jnp.full(v.shape, -0.0).astype(v.dtype) for v in equation.outputs)

        def run(*operands: Array) -> tuple[Array, ...]:
            return tuple(map(jnp.asarray, self.block(equation.bodies[0], operands)))

        is_first = functools.reduce(operator.and_, (jax.lax.axis_index(name) == 0 for name in (*axes, *others)))
        results = jax.lax.cond(is_first, run, zeros, *map(jnp.asarray, operands))
        return [reduce_over("or" if x.dtype == bool else "sum", x, others) if others else x for x in results]

    def _lookup_part(self, equation: Equation, operands: list[Array]) -> Sequence[Array]:
        """Looks up rows by their global numbers: those of this device; zeros for others.

        For numbers that are out of range the first device returns the fill value.
        """
        _, devices = self._on_axis(equation.op)
        assert devices is not None, "in the program of one device"
        params, (part, index) = dict(equation.params), operands
        axis, size = params.pop("axis"), params.pop("size")
        numbers, position = params["dimension_numbers"], devices.position()
        at = numbers.start_index_map.index(axis)
        row = in_range(index[..., at], size, params["mode"] != jax.lax.GatherScatterMode.FILL_OR_DROP)
        first, own = position * part.shape[axis], part.shape[axis]
        is_own, is_none = (row >= first) & (row < first + own) & (row < size), row >= size
        params |= {"indices_are_sorted": False, "unique_indices": False}
        local = jnp.where(is_own, row - first, jnp.where(is_none, own, 0))
        index = index.astype(jnp.int32) if index.dtype.itemsize < 4 else index
        index = index.at[..., at].set(local.astype(index.dtype))
        (taken,) = jax_compat.bind(equation.primitive, [part, index], params)
        is_taken = jnp.expand_dims(is_own | (is_none & (position == 0)), numbers.offset_dims)
        return [jnp.where(is_taken, taken, jnp.zeros((), taken.dtype))]

    # --- microbatches ---

    def _microbatches(self, equation: Equation, operands: list[Array]) -> Sequence[Array]:
        (body,) = equation.bodies

        def gradient(microbatch: Microbatch, parts: Sequence[Array]) -> Sequence[Array]:
            return _Emitter(self._backends, self._devices, microbatch).block(body, parts)

        unrolled = _is_slow_in_loops(body, self._devices)
        return run_microbatches(equation.params, gradient, operands, unrolled=unrolled)

    # --- row space ---

    def _sweep(self, equation: Equation, operands: list[Array]) -> Sequence[Array]:
        p, body = equation.params, equation.bodies[0]
        needed, *operands = operands
        leaves, others = operands[: len(p["axes"])], operands[len(p["axes"]) :]
        backend = self._backend(equation)
        return backend.sweep(p, lambda route, leaves: self.block(body, [route, *leaves, *others]), leaves, needed)

    def _catch_up(self, equation: Equation, operands: list[Array]) -> Sequence[Array]:
        deferred = deferred_of(equation)
        replay, tables = deferred.replay, len(equation.params["families"])
        n = len(replay.leaves) * tables
        entries = Entries.of(replay, operands[n + tables :])
        return deferred.catch_up_tables(operands[:n], operands[n : n + tables], entries)

    def _flush(self, equation: Equation, operands: list[Array]) -> Sequence[Array]:
        """Returns its operands: a separate program flushes the log (`backends.update_log.UpdateLog.make_room`).

        Flushes are rare, and would be half of what XLA compiles.
        """
        replay = deferred_of(equation).replay
        leaves, rest = operands[: len(replay.leaves)], operands[len(replay.leaves) :]
        return [*leaves[: replay.changed], *rest[:3], *rest[3 + len(replay.records) :]]

    def _record(self, equation: Equation, operands: list[Array]) -> Sequence[Array]:
        deferred = deferred_of(equation)
        n, m = len(deferred.replay.records), len(deferred.replay.values)
        now, records, values, guard = operands[0], operands[1 : 1 + n], operands[1 + n :][:m], operands[1 + n + m :]
        return deferred.record(now, records, values, *guard)

    def _reduce_rows(self, equation: Equation, operands: list[Array]) -> Sequence[Array]:
        p, (rows, route, *more) = equation.params, operands
        others = None
        if equation.bodies:  # untouched rows may matter
            body, (needed, *read) = equation.bodies[0], more
            others = Others(needed, lambda route: self.block(body, [route, *read])[0], p["rows"])
        is_part = equation.op == "ap.reduce_part"
        result = self._backend(equation).reduce_rows(p, rows, route, *more[:1], others=others, part=is_part)
        return [result.astype(p["dtype"])]

    def _changes(self, equation: Equation, operands: list[Array]) -> Sequence[Array]:
        """Returns whether untouched rows change."""
        p = equation.params
        backend = self._backend(equation)
        named = split(equation.op, p, operands)
        needed = jnp.zeros((), bool)
        for a, b, axis in zip(named["old"], named["new"], p["axes"], strict=True):
            needed = needed | jnp.any(backend.last_rows(a, axis) != backend.last_rows(b, axis))
        for value, (known, axis) in zip(named["constant"], p["constants"], strict=True):
            needed = needed | ~jnp.all(_is(backend.last_rows(value, axis), known))
        # A predicate on the padding row may differ from that on other rows.
        for value in (*named["frontier"], *named["finite"]):
            if jnp.issubdtype(jnp.asarray(value).dtype, np.inexact):
                needed = needed | ~jnp.all(jnp.isfinite(value))
        for value in named["nonzero"]:
            needed = needed | jnp.any(value == 0)
        for value in named["first"]:
            needed = needed | _almost_never(value)
        for exceeded in named["guard"]:
            needed = needed & ~exceeded
        return [needed]


def _as_wide_as(product: Params, operands: list[Array]) -> list[Array]:
    """Returns operands of a product with a float32 result in float32: XLA on CPUs widens not all of 16 bits itself."""
    result = product["preferred_element_type"]
    is_wide = result is not None and jax_compat.is_float(result) and jax_compat.sum_dtype(result) == result
    if not is_wide or jax_compat.names_algorithm(product["precision"]):
        return operands
    return [x if jax_compat.sum_dtype(x.dtype) == x.dtype else jnp.asarray(x, result) for x in operands]


def _is(value: Array, known: Leaf) -> Array:
    """Compares elementwise; NaN equals NaN."""
    return jnp.isnan(value) if known != known else value == jnp.asarray(known, value.dtype)


def _gathered(devices: OwnPart, value: Array, axis: int, size: int | None = None) -> Array:
    """Returns all of a spread value; its axis is cut to `size` if it was padded."""
    value = devices.gathered(value, axis)
    return value if size is None else cut(value, axis, size)


#: Operations on placement: functions of (the devices, parameters, a value of one device).
_ON_DEVICES: Mapping[str, Callable[[Any, Mapping[str, Any], Array], Array]] = {
    "ap.replicate": lambda devices, p, value: _gathered(devices, value, **p),
    "ap.reduce": lambda devices, p, value: devices.reduce(value, p["op"]),
    "ap.reduce_shards": lambda devices, p, value: devices.reduce_scatter(value, p["axis"]),
    "ap.reduce_rank": lambda devices, p, value: devices.reduce_rank(value, p["op"]),
    "ap.once_rank": lambda devices, p, value: devices.once_a_rank(value),
    "ap.shard": lambda devices, p, value: (devices.padded_share if "size" in p else devices.share)(value, **p),
    "ap.only_examples": lambda devices, p, value: devices.only_examples(value, **p),
    "ap.once": lambda devices, p, value: devices.once(value),
    "ap.store": lambda devices, p, rows: own_rows(rows, **p, devices=devices),
    "ap.whole": lambda devices, p, stored: own_whole(stored, **p, devices=devices),
}
#: Operations of a microbatch on a value that all microbatches share.
_OF_MICROBATCH: Mapping[str, Callable[[Microbatch, Mapping[str, Any], Array], Array]] = {
    "ap.microbatch_shard": lambda microbatch, p, value: microbatch.share(value, p["axis"]),
    "ap.microbatch_once": lambda microbatch, p, value: microbatch.once(value),
}
#: Operations that need more than their operands and parameters.
_METHODS: Mapping[str, Callable[[_Emitter, Equation, list[Array]], Sequence[Array]]] = {
    "ap.sweep": _Emitter._sweep,
    "ap.catch_up": _Emitter._catch_up,
    "ap.record": _Emitter._record,
    "ap.flush": _Emitter._flush,
    "ap.scaled": _Emitter._scaled,
    "ap.changes": _Emitter._changes,
    "ap.first": _Emitter._first,
    "ap.lookup_part": _Emitter._lookup_part,
    "ap.reduce_rows": _Emitter._reduce_rows,
    "ap.reduce_part": _Emitter._reduce_rows,
    "ap.microbatches": _Emitter._microbatches,
    "shard_map": _Emitter._shard_map,
}
#: Control flow whose bodies were rewritten.
_CONTROL_FLOW: Mapping[str, Callable[[_Emitter, Equation, list[Array]], Sequence[Array]]] = {
    "scan": _Emitter._scan,
    "remat": _Emitter._remat,
    "cond": _Emitter._cond,
    "while": _Emitter._while_loop,
}


def _named(equation: Equation) -> contextlib.AbstractContextManager[object]:
    if not equation.op.startswith(PREFIX):
        return contextlib.nullcontext()
    return jax.named_scope(f"autopar.{plain_name(equation.op)}")


def _almost_never(value: Array) -> Array:
    """Returns a condition on a value that almost never holds, so that what depends on it waits for the value.

    XLA copies a table that is overwritten in place before its last read, and on CPUs it drops optimization barriers
    before it decides on copies. A sweep that runs without need changes nothing, so it can wait in this way.
    """
    value = jnp.asarray(value)
    if jnp.issubdtype(value.dtype, np.inexact):
        return jnp.any(jnp.isnan(value))
    if jnp.issubdtype(value.dtype, jnp.integer):
        return jnp.any(value == jnp.iinfo(value.dtype).min)
    return jnp.zeros((), bool)  # no value of a bool is rare: XLA may copy


def _check(equation: Equation, var: Var, value: Array) -> None:
    if isinstance(var.type, ArrayType):
        shape, dtype = np.shape(value), getattr(value, "dtype", None)
        same = shape == var.type.shape and (dtype is None or dtype == var.type.dtype)
        assert same, f"{equation.op} ({equation.where}) gave {dtype}{list(shape)}, planned was {var.type}"


def _typed(value: Array, type_: ValueType) -> Array:
    return jnp.asarray(value, type_.dtype) if not hasattr(value, "dtype") else value


def _like(value: Array, other: Array) -> Array:
    """Returns a loop's carry with its first type, weak or not."""
    value = jnp.asarray(value)
    if jax_compat.is_key(value.dtype) or jax_compat.is_weak(value) == jax_compat.is_weak(other):
        return value
    return jax.lax.convert_element_type(value, other.dtype) if not jax_compat.is_weak(other) else value


def _is_slow_in_loops(body: Block, devices: OwnPart | None) -> bool:
    """Returns whether XLA runs the body some ten times slower inside a loop, as it does convolutions on CPUs."""
    platform = jax.default_backend() if devices is None else devices.mesh.devices.flat[0].platform
    return platform == "cpu" and any(e.op == "conv_general_dilated" for e in body.walk())


# --- a step's own shard_maps and sharding constraints ---
#
# A `shard_map` becomes a program of whole arrays. It maps a function over its mesh's axes, and collectives name these:
# `jax.vmap` over the same axes computes the same from arrays [devices, shard], where a collective is a reduction, a
# permutation or a copy along an axis. So lookups in it are followed, and the devices divide it like any other part of a
# step, whatever mesh it was written for.
#
# A sharding constraint computes nothing, and is left out.

#: Mesh axes along each dimension of an array.
_Dims = Sequence[tuple[str, ...]]


def shard_map_whole(
    params: Params, run: Callable[[Block, Sequence[jax.Array]], Sequence[jax.Array]], operands: Sequence[Leaf]
) -> list[jax.Array]:
    """Evaluates a `shard_map` equation with `params` on whole arrays. `run` evaluates a block."""
    body = block_of(params["jaxpr"])
    sizes = {name: n for name, n in params["mesh"].shape.items() if name in params["newly_manual_axes"]}
    before = [_dims(spec, x, sizes) for spec, x in zip(params["in_specs"], operands, strict=True)]
    after = [_dims(spec, x, sizes) for spec, x in zip(params["out_specs"], body.outputs, strict=True)]
    used = [{name for names in dims for name in names} for dims in before]
    shards = [_split(x, dims, sizes) for x, dims in zip(operands, before, strict=True)]
    results, along = _map_over(lambda *own: run(body, own), list(sizes.items()), used)(*shards)
    return [_join(x, dims, sizes, there) for x, dims, there in zip(results, after, along, strict=True)]


def _dims(spec: Any, value: Leaf, sizes: Mapping[str, int]) -> _Dims:
    entries = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in spec]
    entries += [()] * (len(value.shape) - len(entries))
    return [tuple(name for name in entry if name in sizes) for entry in entries]


def _split(x: jax.Array, dims: _Dims, sizes: Mapping[str, int]) -> jax.Array:
    """Splits an array into shards: [*mesh axes over which it is sharded, in the mesh's order, *shard]."""
    shape, names = [], []
    for size, along in zip(x.shape, dims, strict=True):
        shape += [*(sizes[name] for name in along), size // math.prod(sizes[name] for name in along)]
        names += [*along, None]
    order = [names.index(name) for name in sizes if name in names]
    return jnp.transpose(x.reshape(shape), (*order, *(k for k, name in enumerate(names) if name is None)))


def _join(x: jax.Array, dims: _Dims, sizes: Mapping[str, int], there: Sequence[str]) -> jax.Array:
    """Joins shards, whose leading axes are the mesh axes `there`, into the whole array; takes the first of replicas."""
    used = {name for along in dims for name in along}
    x = x[tuple(slice(None) if name in used else 0 for name in there)]
    missing = [name for name in sizes if name in used and name not in there]
    x = jnp.broadcast_to(x, (*(sizes[name] for name in missing), *x.shape))
    front = [*missing, *(name for name in there if name in used)]
    order, shape = [], []
    for k, along in enumerate(dims):
        order += [*(front.index(name) for name in along), len(front) + k]
        shape.append(x.shape[len(front) + k] * math.prod(sizes[name] for name in along))
    return jnp.transpose(x, order).reshape(shape)


def _map_over(
    run: Callable[..., Sequence[Pytree]], axes: Sequence[tuple[str, int]], used: Sequence[set[str]]
) -> Callable[..., tuple[Sequence[jax.Array], Sequence[Sequence[str]]]]:
    """Maps a function over mesh axes, the first one outermost; also returns the mesh axes that lead each result.

    `used`: for each operand the mesh axes that lead it.
    """
    if not axes:
        return lambda *shards: (results := run(*shards), [()] * len(results))
    (name, size), *rest = axes
    inner: list[Sequence[str]] = []

    def of_one(*shards: jax.Array) -> Sequence[jax.Array]:
        results, inner[:] = _map_over(run, rest, used)(*shards)
        return results

    def of_all(*shards: jax.Array) -> tuple[Sequence[jax.Array], Sequence[Sequence[str]]]:
        axes = [0 if name in own else None for own in used]
        results, along = jax_compat.vmap_inferred(of_one, axes, name, size)(*shards)
        results = [x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in zip(results, along, strict=True)]
        return results, [[name, *i] if axis is not None else i for i, axis in zip(inner, along, strict=True)]

    return of_all


def _names(names: Any) -> tuple[str, ...]:
    return tuple(names) if isinstance(names, (tuple, list)) else (names,)


def _scatter(params: Params, x: jax.Array) -> list[jax.Array]:
    axis, tiled, groups = params["scatter_dimension"], params["tiled"], params["axis_index_groups"]
    for name in _names(params["axis_name"]):
        x = jax.lax.psum_scatter(x, name, scatter_dimension=axis, axis_index_groups=groups, tiled=tiled)
    return [x]


def _gather(params: Params, x: jax.Array) -> list[jax.Array]:
    axis, tiled, groups = params["all_gather_dimension"], params["tiled"], params.get("axis_index_groups")
    for name in reversed(_names(params["axis_name"])):
        x, tiled = jax.lax.all_gather(x, name, axis=axis, axis_index_groups=groups, tiled=tiled), True
    return [x]


#: Replacements of sharding constraints, and of collectives in a `shard_map`'s body: those that its check of replication
#: inserts, and those over several axes, as `jax.vmap` takes one at a time.
REWRITTEN: Mapping[str, Callable[[Mapping[str, Any], jax.Array], list[jax.Array]]] = {
    "psum_invariant": lambda p, x: [jax.lax.psum(x, p["axes"])],
    "all_gather": _gather,
    "all_gather_invariant": _gather,
    "reduce_scatter": _scatter,
    **dict.fromkeys(("pvary", "sharding_constraint"), lambda p, x: [x]),
}


# --- while loops, under vmap as well ---


def while_loop(condition: Callable[[Any], Array], turn: Callable[[Any], Any], start: Leaf) -> Pytree:
    """Runs `lax.while_loop` with a condition that may have axes, as under `vmap`.

    They lead every carry; each element says whether that example's loop goes on.
    """

    def body(state: Pytree) -> Pytree:
        going, new = jnp.asarray(condition(state)), turn(state)
        if not going.shape:
            return new

        def chosen(old: Array, new: Array) -> Array:
            which = jax.lax.broadcast_in_dim(going, jnp.shape(new), range(going.ndim))
            return jax.lax.select_n(which, old, new)

        return jax.tree.map(chosen, state, new)

    return jax.lax.while_loop(lambda state: jnp.any(condition(state)), body, start)


# --- the order of a step's results, for donation ---
#
# JAX pairs donated buffers with results of the same shape and dtype, in order. Where a result takes the buffer of
# another leaf's old value, XLA copies both: whole tables in every step. So new states are returned first, in the order
# of their inputs.


def donation_order(new: Mapping[int, int], count: int) -> tuple[int, ...]:
    """Returns an order of `count` results in which each new state takes its old value's buffer.

    `new`: donated input -> the result that is its new value; each result at most once.
    """
    first = [new[k] for k in sorted(new)]
    return (*first, *sorted(set(range(count)) - set(first)))


def has_unread_states(program: Program) -> bool:
    """Returns whether the step doesn't read a state's old value at all (the last gradient, say).

    JAX drops unread arguments before it pairs buffers, so such a state needs `jit(keep_unused=True)`.
    """
    read = {a for e in program.block.equations for a in e.inputs} | set(program.block.outputs)
    return any(program.block.inputs[k] not in read for k in program.new_states)
