"""Deferred rows on a device (all of a table's, or its share of them): replay what they missed, before they are read, or
of all rows when the journal is full.

A row's *stamp* is the step of the journal up to which it has moved; of a settled row (`ir.deferred.Settled`) it is
held inverted, so that it is negative. Rows are replayed in groups of about the same stamp, each until it is up to date:
an old row doesn't make the others wait. Settled rows are multiplied once. A flush leaves all stamps at zero.

Invariants: stamps are at most `now`; entries of the journal from `now` on are never read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.backends.indices import along, set_rows
from autopar.ir.deferred import Replay
from autopar.ir.program import Block
from autopar.ir.settling import factors

Array = Any

#: Rows of a group when some rows are brought up to date, and elements of a group in a flush.
_GROUP_ROWS = 32
_FLUSH_ELEMENTS = 1 << 19
#: Rows whose scales are applied at a time.
_BLOCK_ELEMENTS = 1 << 20
_NEVER = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True, eq=False)
class Deferred:
    """The replay of one family. `phi` runs the body on arrays; rows come as the leaves have them."""

    replay: Replay
    body: Block
    phi: Callable[..., Sequence[Array]]

    # --- what a step does ---

    def spread(self, entries: int, along: bool) -> tuple[list[int | None], tuple[int | None, ...]]:
        """Along which axis the operands of a catch-up or flush, and its results, are spread over devices, if they are.

        Args:
          entries: How many arrays of the journal there are beside stamps and `now`.
          along: Whether rows are spread.
        """
        rows = [axis if along else None for axis in self.replay.axes]
        stamps = 0 if along else None
        return [*rows, stamps, None, *[None] * entries], (*rows[: self.replay.changed], stamps, None)

    def catch_up(self, rows: Sequence[Array], stamps: Array, now: Array, records: Sequence[Array]) -> tuple[Array, ...]:
        """The rows ([U, ...] of each leaf, changed ones first) as they are after `now` steps; of the changed leaves."""
        front = [jnp.moveaxis(x, axis, 0) for x, axis in zip(rows, self.replay.axes, strict=True)]
        changed, read = self._parts(front)
        changed, begin = self._scaled(changed, stamps, now, records)
        count = stamps.shape[0]
        order = jnp.argsort(begin)
        groups = -(-count // _GROUP_ROWS)
        order = jnp.concatenate([order, jnp.full((groups * _GROUP_ROWS - count,), count, order.dtype)])
        waiting = jnp.sum(begin < now, dtype=jnp.int32)

        def group(k: Array, changed: tuple[Array, ...]) -> tuple[Array, ...]:
            some = jax.lax.dynamic_slice_in_dim(order, k * _GROUP_ROWS, _GROUP_ROWS)
            first = begin.at[some].get(mode="fill", fill_value=_NEVER)
            mine = [x.at[some].get(mode="clip") for x in (*changed, *read)]
            new = self._replayed(mine, first, now, records)
            return tuple(x.at[some].set(v, mode="drop") for x, v in zip(changed, new, strict=True))

        changed = jax.lax.fori_loop(0, -(-waiting // _GROUP_ROWS), group, tuple(changed))
        return tuple(jnp.moveaxis(x, 0, axis) for x, axis in zip(changed, self.replay.axes, strict=False))

    def record(self, now: Array, records: Sequence[Array], values: Sequence[Array]) -> list[Array]:
        """The journal with one step more."""
        p = self.replay
        found = list(map(jnp.asarray, values))
        if p.settled is not None:
            found += factors(self.body, p.changed, p.read, p.settled, found, jnp)
        pairs = zip(records, found, strict=True)
        return [jax.lax.dynamic_update_index_in_dim(old, new.astype(old.dtype), now, 0) for old, new in pairs]

    def flush(
        self, leaves: Sequence[Array], stamps: Array, now: Array, records: Sequence[Array], *, due: Array | bool
    ) -> tuple[Array, ...]:
        """Changed leaves, stamps and `now` after all rows were brought up to date, if that is `due`; else as they are.

        In place where the leaves are donated: a loop of no round leaves them alone.
        """
        changed, read = self._parts(leaves)

        def once(_: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
            *changed, stamps, now = state
            changed, begin = self._scaled_whole(changed, stamps, now, records)
            changed = self._replayed_whole(changed, read, begin, now, records)
            return (*changed, self.stamps(changed), jnp.zeros_like(now))

        rounds = jnp.where(due, 1, 0)
        return jax.lax.fori_loop(0, rounds, once, (*changed, stamps, now))

    def stamps(self, changed: Sequence[Array]) -> Array:
        """int32[V]: stamps of rows that are all up to date with an empty journal."""
        settled, extent = self.replay.settled, changed[0].shape[self.replay.axes[0]]
        if settled is None:
            return jnp.zeros((extent,), jnp.int32)
        good = jnp.ones((extent,), bool)
        for k, leaf in enumerate(changed):
            others = tuple(d for d in range(leaf.ndim) if d != self.replay.axes[k])
            if k in settled.zero:
                good &= jnp.all(leaf == 0, axis=others)
            else:
                holds = jnp.isfinite(leaf)
                holds = holds & (leaf >= 0) if k in settled.not_negative else holds
                good &= jnp.all(holds, axis=others)
        return jnp.where(good, -1, 0).astype(jnp.int32)

    # --- settled rows ---

    def _scales(self, now: Array, records: Sequence[Array]) -> tuple[list[Array], Array]:
        """For each scaled leaf [K + 1], what a row with that stamp is to be multiplied by; and whether they hold.

        Where factors are near one it is the logarithm of that, a sum: a product would round each of them.
        """
        p = self.replay
        assert p.settled is not None, "there are settled rows"
        *rates, holds = records[len(p.values) :]
        done = jax.lax.iota(jnp.int32, p.length) < now
        hold = jnp.all(jnp.where(done, holds, True))
        scales = []
        for rate, near_one in zip(rates, p.settled.near_one, strict=True):
            if near_one:
                by = jax.lax.cumsum(jnp.where(done, jnp.log1p(rate), 0), reverse=True)
                hold &= jnp.all(jnp.isfinite(jnp.exp(by)))
            else:
                by = jax.lax.cumprod(jnp.where(done, rate, 1), reverse=True)
                hold &= jnp.all(jnp.isfinite(by))  # zero times a product that overflows isn't zero
            scales.append(jnp.concatenate([by, jnp.full((1,), 0 if near_one else 1, by.dtype)]))
        return scales, hold

    def _scaled(
        self, changed: Sequence[Array], stamps: Array, now: Array, records: Sequence[Array]
    ) -> tuple[list[Array], Array]:
        """Settled rows up to date; and from which step on each row is to be replayed (`now`: not at all)."""
        changed = list(changed)
        begin = jnp.where(stamps < 0, ~stamps, stamps)
        settled = self.replay.settled
        if settled is None:
            return changed, begin
        scales, hold = self._scales(now, records)
        scale_now = (stamps < 0) & hold
        for k, scale, near_one in zip(settled.scaled, scales, settled.near_one, strict=True):
            by = jnp.where(scale_now, scale.at[begin].get(mode="clip"), 0 if near_one else 1)
            changed[k] = _times(changed[k], by, 0, near_one)
        return changed, jnp.where(scale_now, now, begin)

    def _scaled_whole(
        self, leaves: Sequence[Array], stamps: Array, now: Array, records: Sequence[Array]
    ) -> tuple[list[Array], Array]:
        """The same of all rows, block by block; a leaf that isn't scaled at all is left alone."""
        leaves = list(leaves)
        begin = jnp.where(stamps < 0, ~stamps, stamps)
        settled = self.replay.settled
        if settled is None:
            return leaves, begin
        scales, hold = self._scales(now, records)
        scale_now = (stamps < 0) & hold
        for k, scale, near_one in zip(settled.scaled, scales, settled.near_one, strict=True):
            by = jnp.where(scale_now, scale.at[begin].get(mode="clip"), 0 if near_one else 1)
            leaves[k] = _times_in_place(leaves[k], by, self.replay.axes[k], near_one)
        return leaves, jnp.where(scale_now, now, begin)

    # --- rows that are replayed ---

    def _replayed_whole(
        self, changed: Sequence[Array], read: Sequence[Array], begin: Array, now: Array, records: Sequence[Array]
    ) -> tuple[Array, ...]:
        """All rows that lag behind, gathered by their stamps."""
        p, extent = self.replay, begin.shape[0]
        row_elements = max(1, max(leaf.size // extent for leaf in changed))
        size = int(min(extent, max(1, _FLUSH_ELEMENTS // row_elements)))
        lag = begin < now
        order = jnp.argsort(jnp.where(lag, begin, _NEVER)).astype(jnp.int32)
        rounds = -(-extent // size)
        order = jnp.concatenate([order, jnp.full((rounds * size - extent,), extent, jnp.int32)])
        waiting = jnp.sum(lag, dtype=jnp.int32)
        numbers = jax.lax.iota(jnp.int32, size)

        def group(k: Array, changed: tuple[Array, ...]) -> tuple[Array, ...]:
            some = jax.lax.dynamic_slice_in_dim(order, k * size, size)
            some = jnp.sort(jnp.where(k * size + numbers < waiting, some, extent))
            first = begin.at[some].get(mode="fill", fill_value=_NEVER)
            pairs = zip((*changed, *read), p.axes, strict=True)
            mine = [jnp.moveaxis(x.at[along(axis, some)].get(mode="clip"), axis, 0) for x, axis in pairs]
            new = self._replayed(mine, first, now, records)
            triples = zip(changed, new, p.axes, strict=False)
            return tuple(set_rows(leaf, jnp.moveaxis(rows, 0, axis), some, axis) for leaf, rows, axis in triples)

        return jax.lax.fori_loop(0, -(-waiting // size), group, tuple(changed))

    def _replayed(self, rows: Sequence[Array], begin: Array, now: Array, records: Sequence[Array]) -> list[Array]:
        """Rows [B, ...] with phi replayed from each one's step on."""
        p = self.replay
        values = records[: len(p.values)]
        changed, read = self._parts(rows)

        def one(*row_and_values: Array) -> tuple[Array, ...]:
            n = p.changed + p.read
            alone = [jnp.expand_dims(x, axis) for x, axis in zip(row_and_values[:n], p.axes, strict=True)]
            new = self.phi(*alone, *row_and_values[n:])
            return tuple(jnp.squeeze(jnp.asarray(x), axis) for x, axis in zip(new, p.axes, strict=False))

        every = jax.vmap(one, in_axes=(*(0,) * len(rows), *(None,) * len(values)))

        def step(state: tuple[Array, tuple[Array, ...]]) -> tuple[Array, tuple[Array, ...]]:
            k, changed = state
            at = [jax.lax.dynamic_index_in_dim(v, k, 0, keepdims=False) for v in values]
            new = every(*changed, *read, *at)
            moves = begin <= k
            return k + 1, tuple(
                jnp.where(_beside(moves, old), x.astype(old.dtype), old) for x, old in zip(new, changed, strict=True)
            )

        start = jnp.minimum(jnp.min(begin), now)
        _, done = jax.lax.while_loop(lambda state: state[0] < now, step, (start, tuple(changed)))
        return list(done)

    def _parts(self, leaves: Sequence[Array]) -> tuple[Sequence[Array], Sequence[Array]]:
        return leaves[: self.replay.changed], leaves[self.replay.changed :]


def _beside(flags: Array, rows: Array) -> Array:
    """Flags [B] in the shape of rows [B, ...]."""
    return flags.reshape(flags.shape[0], *(1,) * (rows.ndim - 1))


def _times(leaf: Array, by: Array, axis: int, near_one: bool) -> Array:
    """Rows times `by`, or times e^by, where that is near one without rounding it."""
    shape = [1] * leaf.ndim
    shape[axis] = by.shape[0]
    by = by.reshape(shape).astype(leaf.dtype)
    if not near_one:
        return leaf * by
    return jnp.where(by < -0.5, leaf * jnp.exp(by), leaf + leaf * jnp.expm1(by))


def _times_in_place(leaf: Array, by: Array, axis: int, near_one: bool) -> Array:
    """The same block by block; not at all where every row would be multiplied by one."""
    extent = leaf.shape[axis]
    size = min(extent, max(1, _BLOCK_ELEMENTS // max(1, leaf.size // extent)))
    numbers = jax.lax.iota(jnp.int32, size)
    nothing = 0 if near_one else 1

    def block(k: Array, leaf: Array) -> Array:
        start = jnp.minimum(k * size, extent - size)  # the last block reaches back over rows that are done
        some = jax.lax.dynamic_slice_in_dim(leaf, start, size, axis)
        mine = jax.lax.dynamic_slice_in_dim(by, start, size)
        mine = jnp.where(start + numbers >= k * size, mine, nothing)
        return jax.lax.dynamic_update_slice_in_dim(leaf, _times(some, mine, axis, near_one), start, axis)

    rounds = jnp.where(jnp.any(by != nothing), -(-extent // size), 0)
    return jax.lax.fori_loop(0, rounds, block, leaf)
