"""Combines collectives that a device's program could run at the same point into one message.

On a CPU each collective is a meeting of all devices, which costs more than the few rows that it moves; XLA combines
only AllReduces there, and by gloo not even these (`backends.gloo`). Collectives meet in rounds: one is in a round
after the last one whose results it needs. What is gathered in a round, and what is sent from each device to each other,
is put into one array, as bits, so the bytes stay the same. Large arrays stay alone: meeting is the least of their cost,
and gathered weights would all be in memory at once, and twice.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar import jax_compat
from autopar.backends.gloo import direct_all_gather, direct_all_reduce
from autopar.ir.figures import SHARED_BYTES
from autopar.jax_types import Array, Dtype, Leaf, Pytree

Eqn = Any
Fun = Callable[..., Pytree]
#: Collectives that only move elements, which are combined here; and the one that adds up, where XLA doesn't combine it.
_MOVE, _SUM = ("all_gather", "all_to_all"), "psum"
_MEET = frozenset({*_MOVE, "psum", "pmax", "pmin", "ppermute", "reduce_scatter", "psum_invariant"})


def combined(fun: Fun, *, direct: bool = False) -> Fun:
    """Returns a function like `fun`, the program of one device in `shard_map`, with as few collectives as possible.

    `fun`: a function of arrays, and trees of such. `direct`: small sums share a message, too, and travel with what
    is gathered as `backends.gloo` says.
    """

    def run(*operands: Pytree) -> Pytree:
        flat, _ = jax.tree.flatten(operands)
        traced = jax_compat.trace(fun, operands, {})
        jaxpr, consts = jax_compat.open_jaxpr(traced.jaxpr)
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *map(jnp.asarray, flat)), strict=True))

        def read(atom: object) -> Array:
            return jax_compat.literal_value(atom) if isinstance(atom, jax_compat.JaxLiteral) else env[atom]

        for kind, together in schedule(jaxpr.eqns, direct=direct):
            first, inputs = together[0], [[read(a) for a in e.invars] for e in together]
            with jax_compat.equation_context(first.ctx, first.source_info):
                if len(together) > 1 or (direct and kind is not None):
                    exchange = _sum if first.primitive.name == _SUM else _move
                    results = [[x] for x in exchange(together, [x for (x,) in inputs], direct=direct)]
                else:
                    results = [jax_compat.bind(first.primitive, inputs[0], first.params)]
            for equation, values in zip(together, results, strict=True):
                env.update(zip(equation.outvars, values, strict=True))
        return jax.tree.unflatten(traced.out_tree, [read(a) for a in jaxpr.outvars])

    return run


def schedule(equations: Sequence[Eqn], *, direct: bool = False) -> Iterator[tuple[Hashable, Sequence[Eqn]]]:
    """Yields JAX's equations, with their kind, in an order in which they can run, round by round; several together
    become one collective. One whose results aren't needed yet waits for others of its kind."""
    meets = [_meets(e) for e in equations]
    kinds = [_kind(e, direct) if meet else None for e, meet in zip(equations, meets, strict=True)]
    first = list(_earliest(equations, meets, lambda k, round: round))
    last = _latest(equations, meets, first)
    # Rounds that have such a collective in any case.
    held = {(kinds[k], first[k]) for k in range(len(equations)) if first[k] == last[k]}

    def round_of(k: int, round: int) -> int:
        if kinds[k] is None:
            return round
        round = next((r for r in range(round, last[k] + 1) if (kinds[k], r) in held), round)
        held.add((kinds[k], round))
        return round

    rounds: dict[int, list[Eqn]] = collections.defaultdict(list)
    meetings: dict[int, dict[Hashable, tuple[Hashable, list[Eqn]]]] = collections.defaultdict(dict)
    for k, round in enumerate(_earliest(equations, meets, round_of)):
        if meets[k]:
            meetings[round].setdefault(kinds[k] or k, (kinds[k], []))[1].append(equations[k])
        else:
            rounds[round].append(equations[k])
    for round in range(max((*rounds, *meetings), default=-1) + 1):
        yield from ((None, [equation]) for equation in rounds[round])
        yield from meetings[round].values()


def _earliest(equations: Sequence[Eqn], meets: Sequence[bool], round_of: Callable[[int, int], int]) -> Iterator[int]:
    """Yields the number of rounds before each equation. `round_of`: returns it for an equation's index and the least
    possible one."""
    known: dict[Leaf, int] = {}  # variable -> number of rounds before it
    effects = 0  # they stay in their order
    for k, equation in enumerate(equations):
        round = max((known.get(a, 0) for a in _read(equation)), default=0)
        is_seen = jax_compat.has_effect(equation)
        round = round_of(k, max(round, effects) if is_seen else round)
        known.update(dict.fromkeys(equation.outvars, round + meets[k]))
        effects = round + meets[k] if is_seen else effects
        yield round


def _latest(equations: Sequence[Eqn], meets: Sequence[bool], first: Sequence[int]) -> list[int]:
    """Returns the most rounds before each equation that add none to the program; effects stay where they are."""
    count = max((round + meet for round, meet in zip(first, meets, strict=True)), default=0)
    needed: dict[Leaf, int] = {}
    last = list(first)
    for k in reversed(range(len(equations))):
        if not jax_compat.has_effect(equations[k]):
            last[k] = min((needed.get(v, count) for v in equations[k].outvars), default=count) - meets[k]
        needed.update({a: min(needed.get(a, count), last[k]) for a in _read(equations[k])})
    return last


def _read(equation: Eqn) -> Iterator[Any]:
    return (a for a in equation.invars if not isinstance(a, jax_compat.JaxLiteral))


def _meets(equation: Eqn) -> bool:
    if equation.primitive.name in _MEET:
        return True
    values = (x for v in equation.params.values() for x in (v if isinstance(v, (tuple, list)) else (v,)))
    bodies = (jax_compat.open_jaxpr(x)[0] for x in values if jax_compat.is_jaxpr(x))
    return any(_meets(e) for body in bodies for e in body.eqns)


def _kind(equation: Eqn, direct: bool) -> Hashable:
    """Returns a key that collectives of one message share; None for a message of its own."""
    name, params = equation.primitive.name, equation.params
    if name not in (*_MOVE, *(_SUM,) * direct) or params["axis_index_groups"] is not None:
        return None
    if name == "all_to_all" and (params["split_axis"], params["concat_axis"]) != (0, 0):
        return None
    (made,) = equation.outvars
    if made.aval.size * made.aval.dtype.itemsize > SHARED_BYTES:
        return None
    if name == _SUM:
        return name, str(params["axes"]), made.aval.dtype
    return name, str(params["axis_name"]), _bits(made.aval.dtype)


def _bits(dtype: Dtype) -> Leaf:
    """Returns the dtype in which elements travel, an integer of their size if there is one."""
    if not jnp.issubdtype(dtype, np.integer) and not jax_compat.is_float(dtype):
        return dtype
    return np.dtype(f"uint{8 * np.dtype(dtype).itemsize}")


def _sum(equations: Sequence[Eqn], values: Sequence[Array], *, direct: bool) -> list[Array]:
    """Adds up values of one dtype over the devices, as one."""
    assert direct, "XLA combines sums by itself otherwise"
    flat = jnp.concatenate([x.reshape(-1) for x in values])
    whole = direct_all_reduce(flat, equations[0].params["axes"], values)
    pieces = jnp.split(whole, np.cumsum([x.size for x in values])[:-1])
    return [piece.reshape(x.shape) for piece, x in zip(pieces, values, strict=True)]


def _move(equations: Sequence[Eqn], values: Sequence[Array], *, direct: bool) -> list[Array]:
    """Runs collectives of one kind that move elements as one: a row for each device, in which their parts are side by
    side."""
    first = equations[0]
    axis, bits, to_each = first.params["axis_name"], _bits(values[0].dtype), first.primitive.name == "all_to_all"
    shares = jax.lax.axis_size(axis) if to_each else 1
    rows = [_as(x, bits).reshape(shares, x.size // shares) for x in values]
    sent = jnp.concatenate(rows, axis=1)
    if to_each:
        got = jax.lax.all_to_all(sent, axis, 0, 0)
    else:
        got = direct_all_gather(sent[0], axis, values) if direct else jax.lax.all_gather(sent[0], axis)
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
