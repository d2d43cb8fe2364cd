"""Bags of rows on devices: owners add up their rows by bags, and add bags' cotangents to rows (`passes.pool_bags`).

Messages have a fixed size: `slots` ids from each device to each other one, in the order of their bags, and how many ids
each bag has there. Partial sums are added in the order of the owners. Bags of a table that one device has whole are in
the messages to and from that one alone: these have room for the bags of the device that has most (`bags_of_owner`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import jax
import jax.numpy as jnp

from autopar.backends.indices import as_bits, find_own
from autopar.ir.local import BagSet, bags_of_owner
from autopar.ir.operations import split
from autopar.jax_types import Array, Params


@dataclass(frozen=True)
class _OwnIds:
    """The ids of a device in bags, flat, set by set and bag by bag."""

    lengths: Sequence[int]  #: Of each set, ids of a bag.
    ids: Array  #: int32[n]
    is_there: Array  #: bool[n]: the row is added up.
    is_kept: Array  #: bool[n]: the row gets a gradient, too.
    weights: Array | None  #: [n]


def load_of_ids(owners: Array, count: int, most: int, capacity: int) -> Array:
    """Returns a device's most ids of one of `count` owners, in rows of a capacity: above `capacity` if above `most`."""
    ids = jnp.max(jnp.sum(owners == jnp.arange(count, dtype=jnp.int32)[:, None], 1, dtype=jnp.int32))
    rows = jnp.ceil(ids.astype(jnp.float32) * (capacity / most)).astype(jnp.int32)
    return jnp.where(ids > most, jnp.maximum(rows, capacity + 1), jnp.minimum(rows, capacity))


def ask(params: Params, operands: Sequence[Array], stored: Array, rows: Array, shard_rows: int, axis: str) -> tuple:
    """Tells owners which of their rows are in this device's bags. Arguments: `params` and `operands` of `ap.ask_bags`.

    Args:
      stored: int32[n], storage indices of the bags' ids (`bag_ids`).
      rows: int32[U], sorted: the owner's rows that all devices ask for.
      shard_rows: An owner's rows.

    Returns:
      What an owner heard, int32[N slots] each: the position of an id's row among `rows`, U for none; the same if the
      row gets a gradient, else U; its bag among those of all devices, one past the last for none. And weights, if any.
    """
    own, count, slots = _own_ids(params, operands), jax.lax.axis_size(axis), params["slots"]
    owner = jnp.where(own.is_there, stored // shard_rows, count)
    is_of = (owner == jnp.arange(count, dtype=jnp.int32)[:, None]).astype(jnp.int32)
    position = jnp.sum(is_of * jnp.cumsum(is_of, 1), 0, dtype=jnp.int32) - 1
    slot = jnp.where(own.is_there & (position < slots), owner * slots + position, count * slots)

    def to_slots(values: Array) -> Array:
        sent = jnp.zeros((count * slots,), values.dtype).at[slot].set(values, mode="drop")
        return sent.reshape(count, slots)

    number = stored - owner * shard_rows
    sizes = (math.prod(one.shape) * n for one, n in zip(params["sets"], own.lengths, strict=True))
    starts = [*accumulate(sizes, initial=0)]
    counts = [
        is_of[:, start:end].reshape(count, -1, n).sum(2, dtype=jnp.int32)
        for start, end, n in zip(starts, starts[1:], own.lengths, strict=False)
    ]
    asked = jnp.concatenate(
        [to_slots(jnp.where(own.is_kept, number, ~number)), _by_owner(params["sets"], counts, count)], 1
    )
    heard = jax.lax.all_to_all(asked, axis, 0, 0)
    numbers, bag_ends = heard[:, :slots], jnp.cumsum(heard[:, slots:], 1)
    in_order = jnp.arange(slots, dtype=jnp.int32)
    bags = jax.vmap(lambda ends: jnp.searchsorted(ends, in_order, side="right"))(bag_ends).astype(jnp.int32)
    is_bag, most = bags < bag_ends.shape[1], rows.shape[0]
    of_all = bags + bag_ends.shape[1] * jnp.arange(count, dtype=jnp.int32)[:, None]
    at = find_own(rows, jnp.where(numbers < 0, ~numbers, numbers).reshape(-1)).reshape(count, slots)
    at = jnp.where(is_bag, at, most)
    found = at, jnp.where(numbers < 0, most, at), jnp.where(is_bag, of_all, bag_ends.size)
    weights = () if own.weights is None else (jax.lax.all_to_all(to_slots(own.weights), axis, 0, 0),)
    return tuple(x.reshape(-1) for x in (*found, *weights))


def add_up(sets: Sequence[BagSet], rows: Array, entries: Sequence[Array], axis: str) -> tuple[Array, ...]:
    """Returns the sums of each set of this device's bags. `rows`: [U, ...], the owner's. `entries`: of `ask`."""
    at, _, bags, *weights = entries
    count, row = jax.lax.axis_size(axis), rows.shape[1:]
    number = bags_of_owner(sets, count)
    taken = _weighted(rows.at[at].get(mode="fill", fill_value=0), weights)
    sums = jnp.zeros((count * number, *row), rows.dtype).at[bags].add(taken, mode="drop")
    parts = as_bits(lambda x: jax.lax.all_to_all(x, axis, 0, 0), sums.reshape(count, number, *row))
    if not _has_owners(sets):
        parts = parts.sum(0, keepdims=True)
    results, starts = list[Array](), [0] * count
    for one in sets:
        size, of = math.prod(one.shape), range(len(parts)) if one.owner is None else (one.owner,)
        total = functools.reduce(jnp.add, [parts[k, starts[k] : starts[k] + size] for k in of])
        results.append(total.reshape(*one.shape, *row))
        starts = [start + size if k in of else start for k, start in enumerate(starts)]
    return tuple(results)


def to_rows(
    sets: Sequence[BagSet], cotangents: Sequence[Array], entries: Sequence[Array], rows: int, axis: str
) -> Array:
    """Returns the gradients of an owner's rows, [rows, ...]. `cotangents`: of each set of this device's bags."""
    _, into, bags, *weights = entries
    flat = [x.reshape(-1, *x.shape[len(one.shape) :]) for x, one in zip(cotangents, sets, strict=True)]
    if _has_owners(sets):
        sent = _by_owner(sets, [x[None] for x in flat], jax.lax.axis_size(axis))
        values = as_bits(lambda x: jax.lax.all_to_all(x, axis, 0, 0), sent).reshape(-1, *sent.shape[2:])
    else:
        values = as_bits(lambda x: jax.lax.all_gather(x, axis, tiled=True), jnp.concatenate(flat))
    taken = _weighted(values.at[bags].get(mode="fill", fill_value=0), weights)
    return jnp.zeros((rows, *values.shape[1:]), values.dtype).at[into].add(taken, mode="drop")


def _has_owners(sets: Sequence[BagSet]) -> bool:
    return any(one.owner is not None for one in sets)


def _by_owner(sets: Sequence[BagSet], values: Sequence[Array], count: int) -> Array:
    """Returns values of bags as messages to owners, [count, `bags_of_owner`, ...], in the order of the sets. `values`:
    of each set [count or 1, bags, ...], by owner."""
    if not _has_owners(sets):
        return jnp.concatenate(values, 1)
    number, messages = bags_of_owner(sets, count), list[Array]()
    for owner in range(count):
        own = [x[owner % len(x)] for one, x in zip(sets, values, strict=True) if one.owner in (None, owner)]
        message = jnp.concatenate([values[0][0, :0], *own])
        messages.append(jnp.pad(message, [(0, number - len(message)), *[(0, 0)] * (message.ndim - 1)]))
    return jnp.stack(messages)


def bag_ids(params: Params, operands: Sequence[Array]) -> Array:
    """Returns the ids of all sets of bags, int32[n]; `params`, `operands`: of `ap.ask_bags`."""
    return _own_ids(params, operands).ids


def _own_ids(params: Params, operands: Sequence[Array]) -> _OwnIds:
    named = split("ap.ask_bags", params, operands)
    kept, given = iter(named["kept"]), iter(named["bags"])
    parts, weights = list[tuple[Array, Array, Array]](), list[Array | None]()
    for one in params["sets"]:
        ids = next(given)
        is_there = next(given) if one.is_masked else jnp.ones(ids.shape, bool)
        weights.append(next(given) if one.is_weighted else None)
        parts.append((ids, is_there, next(kept) if one.is_kept else is_there))
    ids, is_there, is_kept = (jnp.concatenate([x.reshape(-1) for x in each]) for each in zip(*parts, strict=True))
    dtype, joined = next((w.dtype for w in weights if w is not None), None), None
    if dtype is not None:
        each = [jnp.ones(like.shape, dtype) if w is None else w for w, (like, *_) in zip(weights, parts, strict=True)]
        joined = jnp.concatenate([w.reshape(-1) for w in each])
    return _OwnIds([each.shape[1] for each, *_ in parts], ids, is_there, is_kept, joined)


def _weighted(values: Array, weights: Sequence[Array]) -> Array:
    return values * weights[0].reshape(-1, *[1] * (values.ndim - 1)) if weights else values
