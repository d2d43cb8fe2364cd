"""Combines collectives that a device's program could run at the same point into one message.

On a CPU each collective is a meeting of all devices, which costs more than the few rows that it moves; XLA combines
only AllReduces there. Collectives meet in rounds: one is in the round after the last one whose results it needs. What
is gathered in a round, and what is sent from each device to each other, is put into one array, as bits, so the bytes
stay the same. Large arrays stay alone: meeting is the least of their cost, and gathered weights would all be in memory
at once, and twice.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar import jax_compat
from autopar.jax_types import Array, Dtype, Leaf

Eqn = Any
Fun = Callable[..., Sequence[Array]]
#: Collectives that only move elements, which are combined here.
_MOVE = ("all_gather", "all_to_all")
#: Most bytes that a device receives in a collective that shares a message.
_LARGEST = 1 << 20
_MEET = frozenset({*_MOVE, "psum", "pmax", "pmin", "ppermute", "reduce_scatter", "psum_invariant"})


def combined(fun: Fun) -> Fun:
    """Returns a function like `fun`, the program of one device in `shard_map`, with as few collectives as possible."""

    def run(*operands: Array) -> Sequence[Array]:
        operands = tuple(map(jnp.asarray, operands))
        jaxpr, consts = jax_compat.open_jaxpr(jax_compat.trace(fun, operands, {}).jaxpr)
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *operands), strict=True))

        def read(atom: Any) -> Array:
            return jax_compat.literal_value(atom) if isinstance(atom, jax_compat.JaxLiteral) else env[atom]

        for together in schedule(jaxpr.eqns):
            first, inputs = together[0], [[read(a) for a in e.invars] for e in together]
            with jax_compat.equation_context(first.ctx, first.source_info):
                if len(together) > 1:
                    results = [[x] for x in _exchange(together, [x for (x,) in inputs])]
                else:
                    results = [jax_compat.bind(first.primitive, inputs[0], first.params)]
            for equation, values in zip(together, results, strict=True):
                env.update(zip(equation.outvars, values, strict=True))
        return tuple(read(a) for a in jaxpr.outvars)

    return run


def schedule(equations: Sequence[Eqn]) -> Iterator[Sequence[Eqn]]:
    """Yields JAX's equations in an order in which they can run, round by round; several together become one
    collective."""
    known: dict[Leaf, int] = {}  # variable -> number of rounds before it
    rounds: dict[int, list[Eqn]] = collections.defaultdict(list)
    meetings: dict[int, dict[Hashable, list[Eqn]]] = collections.defaultdict(dict)
    effects = 0  # they stay in their order
    for k, equation in enumerate(equations):
        start = max((known.get(a, 0) for a in equation.invars if not isinstance(a, jax_compat.JaxLiteral)), default=0)
        is_seen, meets = jax_compat.has_effect(equation), _meets(equation)
        start = max(start, effects) if is_seen else start
        if meets:
            meetings[start].setdefault(_kind(equation) or k, []).append(equation)
        else:
            rounds[start].append(equation)
        known.update(dict.fromkeys(equation.outvars, start + meets))
        effects = start + meets if is_seen else effects
    for k in range(max((*rounds, *meetings), default=-1) + 1):
        yield from ([equation] for equation in rounds[k])
        yield from meetings[k].values()


def _meets(equation: Eqn) -> bool:
    """Returns whether devices meet in an equation, or in a body of it."""
    if equation.primitive.name in _MEET:
        return True
    values = (x for v in equation.params.values() for x in (v if isinstance(v, (tuple, list)) else (v,)))
    bodies = (jax_compat.open_jaxpr(x)[0] for x in values if jax_compat.is_jaxpr(x))
    return any(_meets(e) for body in bodies for e in body.eqns)


def _kind(equation: Eqn) -> Hashable:
    """Returns a key that collectives of one message share; None for a message of its own."""
    name, params = equation.primitive.name, equation.params
    if name not in _MOVE or params["axis_index_groups"] is not None:
        return None
    if name == "all_to_all" and (params["split_axis"], params["concat_axis"]) != (0, 0):
        return None
    (made,) = equation.outvars
    if made.aval.size * made.aval.dtype.itemsize > _LARGEST:
        return None
    return name, str(params["axis_name"]), _bits(made.aval.dtype)


def _bits(dtype: Dtype) -> Leaf:
    """Returns the dtype in which elements travel, an integer of their size if there is one."""
    if not jnp.issubdtype(dtype, np.integer) and not jax_compat.is_float(dtype):
        return dtype
    return np.dtype(f"uint{8 * np.dtype(dtype).itemsize}")


def _exchange(equations: Sequence[Eqn], values: Sequence[Array]) -> list[Array]:
    """Runs collectives of one kind as one: a row for each device, in which their parts are side by side."""
    first = equations[0]
    axis, bits, to_each = first.params["axis_name"], _bits(values[0].dtype), first.primitive.name == "all_to_all"
    count = jax.lax.axis_size(axis)
    shares = count if to_each else 1
    rows = [_as(x, bits).reshape(shares, x.size // shares) for x in values]
    sent = jnp.concatenate(rows, axis=1)
    got = jax.lax.all_to_all(sent, axis, 0, 0) if to_each else jax.lax.all_gather(sent[0], axis)
    pieces = jnp.split(got, np.cumsum([row.shape[1] for row in rows])[:-1], axis=1)
    return [_result(e, _as(piece, x.dtype), x) for e, piece, x in zip(equations, pieces, values, strict=True)]


def _result(equation: Eqn, received: Array, sent: Array) -> Array:
    """Returns a collective's result from the parts of all devices, [N, ...]."""
    if equation.primitive.name == "all_to_all":
        return received.reshape(sent.shape)
    along = equation.params["all_gather_dimension"]
    stacked = jnp.moveaxis(received.reshape(received.shape[0], *sent.shape), 0, along)
    return stacked.reshape(equation.outvars[0].aval.shape)


def _as(value: Array, dtype: Dtype) -> Array:
    return value if value.dtype == dtype else jax.lax.bitcast_convert_type(value, dtype)
