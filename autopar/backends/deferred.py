"""Deferred rows on a device (all of a table's, or its shard of them): replay what they missed before they are read, and
those that lag behind when the update log is full.

A row's *stamp* is the step of the update log up to which it has moved. Rows are replayed in groups of about the same
stamp, each until it is up to date: an old row doesn't make the others wait. A full update log is flushed: all its rows
are replayed, and it begins anew.

Scale-only rows (`ir.deferred.ScaleOnly`) wait on, at no cost: what a full update log multiplies them by is kept as a
*segment*, a number for each leaf, and the stamp of such a row is the inverted number of the segment from which on it is
to be multiplied. Only when there is no room for segments, or a step breaks what scale-only rows rest on, a flush takes
all rows.

Invariants: stamps of rows that aren't scale-only are at most `now`; records from `now` on, and segments from `segment`
on, are never read; the scales of all segments together are finite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.analysis.fading import fading_numbers
from autopar.analysis.scale_only import factors
from autopar.backends.fading import Suffixes, beside, times
from autopar.backends.indices import along, set_rows, sorted_unique
from autopar.ir.deferred import Replay
from autopar.ir.program import Block

Array = Any

#: Elements of a leaf in a group of rows, and rows at least: all wait for the slowest, but loops cost something as well.
_GROUP_ELEMENTS, _GROUP_ROWS = 1 << 12, 8
#: Elements of a leaf that a flush takes at a time.
_FLUSH_ELEMENTS = 1 << 19
#: Steps that rows are replayed between two looks at whether they have faded.
_STRIDE = 16
_NEVER = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True)
class Entries:
    """An update log, but for the stamps.

    Attributes:
      now: int32[], how many steps it holds.
      segment: int32[], how many update logs were closed before.
      records: [K, ...] each, what the steps wrote down.
      segments: [M] each, what the closed update logs multiply scale-only rows by, leaf by leaf (logarithms where near
        one).
    """

    now: Array
    segment: Array
    records: Sequence[Array]
    segments: Sequence[Array]

    @staticmethod
    def of(replay: Replay, flat: Sequence[Array]) -> Entries:
        """From flat arrays."""
        n = len(replay.records)
        return Entries(flat[0], flat[1], flat[2 : 2 + n], flat[2 + n :])


@dataclass(frozen=True, slots=True, eq=False)
class Deferred:
    """The replay of one family. `update` runs the body on arrays; rows come as the leaves have them."""

    replay: Replay
    body: Block
    update: Callable[..., Sequence[Array]]

    def spread(self, along: bool) -> tuple[list[int | None], tuple[int | None, ...]]:
        """Along which axis the operands of a flush, and its results, are spread over devices, if rows are."""
        p = self.replay
        rows = [axis if along else None for axis in p.axes]
        stamps = 0 if along else None
        entries = 2 + len(p.records) + len(p.segments)
        return [*rows, stamps, *[None] * entries], (*rows[: p.changed], stamps, None, None, *[None] * len(p.segments))

    # --- what a step does ---

    def catch_up(self, rows: Sequence[Array], stamps: Array, entries: Entries) -> tuple[Array, ...]:
        """The rows ([U, ...] of each leaf, changed ones first) as they are after `now` steps; of the changed leaves."""
        front = [jnp.moveaxis(x, axis, 0) for x, axis in zip(rows, self.replay.axes, strict=True)]
        changed, read = self._parts(front)
        changed, begin = self._scaled(changed, stamps, entries)
        count, now = stamps.shape[0], entries.now
        group_rows = min(count, max(_GROUP_ROWS, _GROUP_ELEMENTS // _row_elements(changed, count)))
        order = jnp.argsort(begin)
        groups = -(-count // group_rows)
        order = jnp.concatenate([order, jnp.full((groups * group_rows - count,), count, order.dtype)])
        suffixes = None if self.replay.fading is None else self._suffixes(entries.records)
        waiting = jnp.sum(begin < now, dtype=jnp.int32)

        def group(k: Array, changed: tuple[Array, ...]) -> tuple[Array, ...]:
            some = jax.lax.dynamic_slice_in_dim(order, k * group_rows, group_rows)
            first = begin.at[some].get(mode="fill", fill_value=_NEVER)
            mine = [x.at[some].get(mode="clip") for x in (*changed, *read)]
            new = self._replayed(mine, first, entries, suffixes)
            return tuple(x.at[some].set(v, mode="drop") for x, v in zip(changed, new, strict=True))

        changed = jax.lax.fori_loop(0, -(-waiting // group_rows), group, tuple(changed))
        return tuple(jnp.moveaxis(x, 0, axis) for x, axis in zip(changed, self.replay.axes, strict=False))

    def record(
        self, now: Array, records: Sequence[Array], values: Sequence[Array], exceeded: Array | None = None
    ) -> list[Array]:
        """The update log's records with one step more; those of earlier steps stay if it is to be done again."""
        p = self.replay
        recorded = list(map(jnp.asarray, values))
        later: list[Array] = []
        if p.scale_only is not None:
            *rates, holds = factors(self.body, p.changed, p.read, p.scale_only, recorded, jnp)
            if p.fading is not None:
                numbers = fading_numbers(self.body, p.changed, p.read, p.scale_only, p.fading, recorded, jnp)
                later = self._suffixes(records).and_then(now, rates, holds, numbers)
                if exceeded is not None:
                    later = [jnp.where(exceeded, x, y) for x, y in zip(records[-len(later) :], later, strict=True)]
            recorded += [*rates, holds]
        pairs = zip(records, recorded, strict=False)
        written = [jax.lax.dynamic_update_index_in_dim(old, new.astype(old.dtype), now, 0) for old, new in pairs]
        return [*written, *(new.astype(old.dtype) for old, new in zip(records[len(recorded) :], later, strict=True))]

    def _suffixes(self, records: Sequence[Array]) -> Suffixes:
        p = self.replay
        return Suffixes.of(p, records[len(p.values) + len(p.scale_only.scaled if p.scale_only else ()) + 1 :])

    def flush(
        self, leaves: Sequence[Array], stamps: Array, entries: Entries, *, full: Array | bool
    ) -> tuple[Array, ...]:
        """Changed leaves, stamps, now, segment and segments after rows were brought up to date (`full`: scale-only
        ones, too). In place where the leaves are donated."""
        changed, read = self._parts(leaves)
        extent = stamps.shape[0]
        size = min(extent, max(1, _FLUSH_ELEMENTS // _row_elements(changed, extent)))
        takes_all, segment, segments = self.close(entries)
        takes_all = takes_all | full
        segment = jnp.where(takes_all, 0, segment)
        taken = (stamps >= 0) | takes_all
        places = jnp.cumsum(taken, dtype=jnp.int32) - 1
        numbered = jax.lax.iota(jnp.int32, extent)
        chosen = jnp.full((extent + -extent % size,), extent, jnp.int32)
        chosen = chosen.at[jnp.where(taken, places, chosen.shape[0])].set(numbered, mode="drop")
        count = places[-1] + 1

        def group(k: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
            *changed, stamps = state
            some = jax.lax.dynamic_slice_in_dim(chosen, k * size, size)
            pairs = zip((*changed, *read), self.replay.axes, strict=True)
            mine = [x.at[along(axis, some)].get(mode="clip") for x, axis in pairs]
            stamped = stamps.at[some].get(mode="fill", fill_value=_NEVER)
            new = self.catch_up(mine, stamped, entries)
            triples = zip(changed, new, self.replay.axes, strict=False)
            changed = [set_rows(leaf, rows, some, axis) for leaf, rows, axis in triples]
            return (*changed, set_rows(stamps, self.stamps(new, segment), some, 0))

        done = jax.lax.fori_loop(0, -(-count // size), group, (*changed, stamps))
        return (*done, jnp.zeros_like(entries.now), segment, *segments)

    def catch_up_in_place(
        self, leaves: Sequence[Array], stamps: Array, entries: Entries, ids: Array
    ) -> tuple[Array, ...]:
        """Changed leaves and stamps with some rows up to date. `ids`: flat int32, out of range is no row."""
        changed, read = self._parts(leaves)
        extent = stamps.shape[0]
        rows = sorted_unique(jnp.where(ids < extent, ids, extent), ids.shape[0], extent)
        pairs = zip((*changed, *read), self.replay.axes, strict=True)
        mine = [x.at[along(axis, rows)].get(mode="clip") for x, axis in pairs]
        new = self.catch_up(mine, stamps.at[rows].get(mode="fill", fill_value=_NEVER), entries)
        triples = zip(changed, new, self.replay.axes, strict=False)
        caught = [set_rows(leaf, some, rows, axis) for leaf, some, axis in triples]
        return (*caught, set_rows(stamps, jnp.full(rows.shape, entries.now), rows, 0))

    def close(self, entries: Entries) -> tuple[Array, Array, list[Array]]:
        """Whether scale-only rows can't wait any longer, the next segment's number, and the segments with this one."""
        p = self.replay
        if p.scale_only is None:
            return jnp.zeros((), bool), jnp.zeros((), jnp.int32), []
        tables, _, hold = self._scales(entries)
        segments = []
        for scales, by in zip(entries.segments, tables, strict=True):
            own = by[jnp.minimum(entries.segment, scales.shape[0] - 1)]  # from this segment on: this update log alone
            segments.append(jax.lax.dynamic_update_index_in_dim(scales, own, entries.segment, 0))
        last = entries.segment + 1 >= entries.segments[0].shape[0] if p.segments else jnp.zeros((), bool)
        return ~hold | last, entries.segment + 1, segments

    def stamps(self, changed: Sequence[Array], segment: Array | int = 0) -> Array:
        """int32[rows]: stamps of rows that are all up to date, at the beginning of a segment."""
        scale_only, extent = self.replay.scale_only, changed[0].shape[self.replay.axes[0]]
        if scale_only is None:
            return jnp.zeros((extent,), jnp.int32)
        good = jnp.ones((extent,), bool)
        for k, leaf in enumerate(changed):
            others = tuple(d for d in range(leaf.ndim) if d != self.replay.axes[k])
            if k in scale_only.zero:
                good &= jnp.all(leaf == 0, axis=others)
            else:
                holds = jnp.isfinite(leaf)
                holds = holds & (leaf >= 0) if k in scale_only.not_negative else holds
                good &= jnp.all(holds, axis=others)
        return jnp.where(good, ~jnp.asarray(segment, jnp.int32), 0).astype(jnp.int32)

    # --- scale-only rows ---

    def _scales(self, entries: Entries) -> tuple[list[Array], list[Array], Array]:
        """For each scaled leaf [M], by segment, what a row that has waited since then is to be multiplied by.

        Logarithms where factors are near one, and sums of them: a product would round each factor.

        Returns:
          With this update log's steps, without them, and whether the first may be used.
        """
        p, segment = self.replay, entries.segment
        assert p.scale_only is not None, "there are scale-only rows"
        *rates, holds = entries.records[len(p.values) :][: len(p.scale_only.scaled) + 1]
        done = jax.lax.iota(jnp.int32, p.length) < entries.now
        hold = jnp.all(jnp.where(done, holds, True))
        closed, whole = [], []
        for rate, scales, near_one in zip(rates, entries.segments, p.scale_only.near_one, strict=True):
            past = jax.lax.iota(jnp.int32, scales.shape[0]) < segment
            if near_one:
                before = jax.lax.cumsum(jnp.where(past, scales, 0), reverse=True)
                by = before + jnp.sum(jnp.where(done, jnp.log1p(rate), 0))
                hold &= jnp.all(jnp.isfinite(jnp.exp(by)))
            else:
                before = jax.lax.cumprod(jnp.where(past, scales, 1), reverse=True)
                by = before * jnp.prod(jnp.where(done, rate, 1))
                hold &= jnp.all(jnp.isfinite(by))  # zero times a product that overflows isn't zero
            closed.append(before)
            whole.append(by)
        return whole, closed, hold

    def _scaled(self, changed: Sequence[Array], stamps: Array, entries: Entries) -> tuple[list[Array], Array]:
        """Scale-only rows up to date; and from which step on each row is to be replayed (`now`: not at all)."""
        changed = list(changed)
        scale_only = self.replay.scale_only
        if scale_only is None:
            return changed, stamps
        whole, closed, hold = self._scales(entries)
        waits = stamps < 0
        since = jnp.where(waits, ~stamps, 0)
        for k, all_, before, near_one in zip(scale_only.scaled, whole, closed, scale_only.near_one, strict=True):
            by = jnp.where(hold, all_, before).at[since].get(mode="clip")
            changed[k] = jnp.where(beside(waits, changed[k]), times(changed[k], by, near_one), changed[k])
        return changed, jnp.where(waits, jnp.where(hold, entries.now, 0), stamps)

    # --- rows that are replayed ---

    def _replayed(
        self, rows: Sequence[Array], begin: Array, entries: Entries, suffixes: Suffixes | None
    ) -> list[Array]:
        """Rows [B, ...] with the untouched update replayed from each one's step on, until it has caught up or faded."""
        p, now = self.replay, entries.now
        values = entries.records[: len(p.values)]
        changed, read = self._parts(rows)

        def one(*row_and_values: Array) -> tuple[Array, ...]:
            n = len(p.leaves)
            alone = [jnp.expand_dims(x, axis) for x, axis in zip(row_and_values[:n], p.axes, strict=True)]
            new = self.update(*alone, *row_and_values[n:])
            return tuple(jnp.squeeze(jnp.asarray(x), axis) for x, axis in zip(new, p.axes, strict=False))

        every = jax.vmap(one, in_axes=(*(0,) * len(rows), *(None,) * len(values)))

        def step(begin: Array, state: tuple[Array, tuple[Array, ...]]) -> tuple[Array, tuple[Array, ...]]:
            k, changed = state
            at = [jax.lax.dynamic_index_in_dim(v, k, 0, keepdims=False) for v in values]
            new = every(*changed, *read, *at)
            moves = begin <= k
            return k + 1, tuple(
                jnp.where(beside(moves, old), x.astype(old.dtype), old) for x, old in zip(new, changed, strict=True)
            )

        def steps(begin: Array, k: Array, until: Array, changed: tuple[Array, ...]) -> tuple[Array, ...]:
            return jax.lax.while_loop(lambda state: state[0] < until, partial(step, begin), (k, changed))[1]

        start = jnp.minimum(jnp.min(begin), now)
        if suffixes is None:
            return list(steps(begin, start, now, tuple(changed)))
        usual = suffixes.ends(changed, jnp.minimum(begin, p.length - 1))

        def round_(state: tuple[Array, Array, tuple[Array, ...]]) -> tuple[Array, Array, tuple[Array, ...]]:
            k, begin, changed = state
            gone = suffixes.faded(changed, usual, k) & (begin <= k)

            def scaled(changed: tuple[Array, ...]) -> tuple[Array, ...]:
                done = suffixes.without_fading(changed, k)
                return tuple(jnp.where(beside(gone, x), new, x) for x, new in zip(changed, done, strict=True))

            changed = jax.lax.cond(jnp.any(gone), scaled, lambda changed: changed, changed)
            begin = jnp.where(gone, now, begin)
            until = jnp.minimum(k + _STRIDE, now)
            return until, begin, steps(begin, k, until, changed)

        def goes_on(state: tuple[Array, Array, tuple[Array, ...]]) -> Array:
            return (state[0] < now) & jnp.any(state[1] < now)

        return list(jax.lax.while_loop(goes_on, round_, (start, begin, tuple(changed)))[2])

    def _parts(self, leaves: Sequence[Array]) -> tuple[Sequence[Array], Sequence[Array]]:
        return leaves[: self.replay.changed], leaves[self.replay.changed :]


def _row_elements(leaves: Sequence[Array], rows: int) -> int:
    """Elements of a row of the widest leaf."""
    return max(1, max(leaf.size // max(1, rows) for leaf in leaves))
