"""Replays deferred rows on a device, before they are read, and some lagging ones between steps.

A row's *stamp* is the step of the update log up to which it has moved. Rows are replayed in groups of about the same
stamp, so that an old row doesn't make others wait. While steps fill the newer part of the update log (`ir.deferred`),
`catch_up_some` brings rows up to the end of the older part; then `turn` makes the newer part the older one.

Scale-only rows (`ir.deferred.ScaleOnly`) wait on, at no cost: the factors of a full part are kept as a *segment*, a
number for each leaf, and the stamp of such a row is the inverted number of the segment from which on it is to be
multiplied. Rows that have waited for many segments are multiplied between steps, to make room for segments. Only when a
step breaks what scale-only rows rest on are all rows brought up to date at once (`flush`).

Invariants: stamps of rows that aren't scale-only are at most `now`; when the newer part is full they are at least K,
and those of scale-only rows name its segment or one of the last (`Replay.waiting`); records from `now` on, and segments
from `segment` on, are never read; the scales of all segments together are finite.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.analysis.scale_only import factors, fading_numbers
from autopar.backends.indices import along, set_rows
from autopar.backends.segments import Entries, Suffixes, beside, close, multiplied, scales
from autopar.ir.deferred import Replay
from autopar.ir.program import Block
from autopar.jax_types import Array, Leaf

#: A group has this many elements of a leaf, or this many rows if that is more. All rows of a group wait for its oldest
#: one, which speaks for small groups; each group's loop costs something, which speaks for large ones.
_GROUP_ELEMENTS, _GROUP_ROWS = 1 << 11, 8
#: Rows with fewer elements are replayed with the rows along the last axis.
_NARROW = 32
#: Elements of a leaf that a flush takes at a time; that are taken between steps; and the least of either.
_FLUSH_ELEMENTS, _SOME_ELEMENTS, _LEAST_ELEMENTS = 1 << 19, 1 << 15, 1 << 13
#: Replayed steps between two checks whether rows have faded.
_STRIDE = 16
#: Steps that a loop replays at a time: elements stay in registers in between, at the price of longer programs.
_UNROLLED = 2
#: A stamp that no row has.
NEVER = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True, eq=False)
class Deferred:
    """The replay of one family, or of several *tables* that share an update log.

    Operands are the leaves of each table, then the stamps of each. `update` runs the body on arrays, in the leaves'
    axes.
    """

    replay: Replay
    body: Block
    update: Callable[..., Sequence[Array]]

    def spread(self, tables: Sequence[bool]) -> tuple[list[int | None], tuple[int | None, ...]]:
        """Returns the axes along which a flush's operands and results are spread, for tables whose rows are spread
        or not."""
        p = self.replay
        rows = [[axis if is_spread else None for axis in p.axes] for is_spread in tables]
        stamps = [0 if is_spread else None for is_spread in tables]
        entries = 2 + len(p.records) + len(p.segments)
        changed = (axis for axes in rows for axis in axes[: p.changed])
        return [*itertools.chain(*rows), *stamps, *[None] * entries], (*changed, *stamps, None, None)

    # --- what a step does ---

    def catch_up_tables(self, rows: Sequence[Array], stamps: Sequence[Array], entries: Entries) -> tuple[Array, ...]:
        """Returns the changed leaves of several tables' rows after `now` steps."""
        tables = DeferredTables(self.replay, rows, stamps)
        return tuple(itertools.chain(*tables.together(lambda some, stamped: self.catch_up(some, stamped, entries))))

    def catch_up(self, rows: Sequence[Array], stamps: Array, entries: Entries) -> tuple[Array, ...]:
        """Returns the changed leaves of rows ([U, ...] of each leaf, changed ones first) after `now` steps."""
        changed, read = self._parts([jnp.moveaxis(x, axis, 0) for x, axis in zip(rows, self.replay.axes, strict=True)])
        changed, begin = self._scaled(changed, stamps, entries)
        moved = self._moved(changed, read, begin, entries.now, entries.records)
        return tuple(jnp.moveaxis(x, 0, axis) for x, axis in zip(moved, self.replay.axes, strict=False))

    def _moved(
        self, changed: Sequence[Array], read: Sequence[Array], begin: Array, now: Array | int, records: Sequence[Array]
    ) -> Sequence[Array]:
        """Replays steps on rows [U, ...], each from its own `begin` int32[U] to `now`; returns changed leaves."""
        count = begin.shape[0]
        group_rows = max(1, min(count, max(_GROUP_ROWS, _GROUP_ELEMENTS // row_elements(changed, count))))
        order = jnp.argsort(begin)
        groups = -(-count // group_rows)
        order = jnp.concatenate([order, jnp.full((groups * group_rows - count,), count, order.dtype)])
        suffixes = None if self.replay.fading is None else self._suffixes(records)
        waiting = jnp.sum(begin < now, dtype=jnp.int32)

        def group(k: Array, changed: tuple[Array, ...]) -> tuple[Array, ...]:
            some = jax.lax.dynamic_slice_in_dim(order, k * group_rows, group_rows)
            first = begin.at[some].get(mode="fill", fill_value=NEVER)
            mine = [x.at[some].get(mode="clip") for x in (*changed, *read)]
            new = self._replayed(mine, first, now, records, suffixes)
            return tuple(x.at[some].set(v, mode="drop") for x, v in zip(changed, new, strict=True))

        return jax.lax.fori_loop(0, -(-waiting // group_rows), group, tuple(changed))

    def record(
        self, now: Array, records: Sequence[Array], values: Sequence[Array], exceeded: Array | None = None
    ) -> list[Array]:
        """Returns the update log's records with one step more, unless it `exceeded` a capacity and will be done
        again."""
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

    def times(self, elements: int) -> int:
        """Returns how many calls of `catch_up_some` fill the newer part: one a step, but fewer for few rows.

        `elements`: of the largest leaf, on one device.
        """
        return max(1, min(self.replay.part, elements // _LEAST_ELEMENTS))

    def flush(self, leaves: Sequence[Array], stamps: Sequence[Array], entries: Entries) -> tuple[Array, ...]:
        """Brings all rows up to date; returns changed leaves, stamps, now and segment of an empty update log.

        Works in place if the leaves are donated.
        """

        def caught_up(mine: Sequence[Array], stamped: Array) -> Sequence[Array]:
            new = self.catch_up(mine, stamped, entries)
            return *new, self.stamps(new)

        extents = [x.shape[0] for x in stamps]
        chosen = [(jax.lax.iota(jnp.int32, extent), extent) for extent in extents]
        done = DeferredTables(self.replay, leaves, stamps).visited(chosen, _FLUSH_ELEMENTS, caught_up)
        return (*done, jnp.full_like(entries.now, self.replay.part), jnp.zeros_like(entries.segment))

    def turn(self, stamps: Sequence[Array], entries: Entries) -> tuple[Array, ...]:
        """Makes the newer, full part the older one; returns a flag, stamps, now, segment and segments.

        The flag says that a flush is needed instead, because scale-only rows can't wait any longer. `UpdateLog` moves
        the records.
        """
        p = self.replay
        takes_all, dropped, segment, segments = close(p, entries)
        moved = [jnp.where(x < 0, x + dropped, x - p.part) for x in stamps]
        return (takes_all, *moved, jnp.full_like(entries.now, p.part), segment, *segments)

    def catch_up_some(
        self,
        leaves: Sequence[Array],
        stamps: Sequence[Array],
        entries: Entries,
        which: Array,
        ids: Sequence[Array],
        times: int,
    ) -> tuple[Array, ...]:
        """Brings some rows up to `now`: rows that are read, or that the older part moves. Returns changed leaves and
        stamps.

        One program does both, since the replay takes long to compile.

        Args:
          leaves, stamps: As in `flush`.
          entries: The update log; for the older part, the log as it was when that was closed: `now` is K.
          which: int32[]. Below 0: rows of `ids` are brought up to date. Else row `which` (below `times`) and each
            `times`-th from there on, if they lag.
          ids: Row indices of each table, int32[], sorted and distinct; out of range is no row.
          times: Number of calls that together visit all rows.
        """
        is_read = which < 0

        def chosen(stamps: Array, ids: Array) -> tuple[Array, Array]:
            extent = stamps.shape[0]
            each = which + times * jax.lax.iota(jnp.int32, -(-extent // times))
            size = max(each.size, ids.size)
            each, ids = (jnp.pad(x, (0, size - x.size), constant_values=extent) for x in (each, ids))
            numbered = jnp.where(is_read, ids, each)
            stamped = stamps.at[numbered].get(mode="fill", fill_value=NEVER)
            lags = jnp.where(is_read, stamped < entries.now, self.lags(stamped, entries.segment))
            positions = jnp.cumsum(lags, dtype=jnp.int32) - 1
            compact = jnp.full_like(numbered, extent)
            compact = compact.at[jnp.where(lags, positions, size)].set(numbered, mode="drop")
            return compact, positions[-1] + 1

        rows = list(map(chosen, stamps, ids))
        caught_up = functools.partial(self.caught_up, entries=entries)
        return DeferredTables(self.replay, leaves, stamps).visited(rows, _SOME_ELEMENTS, caught_up)

    def caught_up(self, rows: Sequence[Array], stamps: Array, entries: Entries) -> tuple[Array, ...]:
        """Returns the changed leaves of rows after `now` steps, and their new stamps."""
        new, p = self.catch_up(rows, stamps, entries), self.replay
        return *new, jnp.where(entries.now == p.part, self.stamps(new, entries.segment), entries.now)

    def lags(self, stamps: Any, segment: Any) -> Leaf:
        """Returns bool[rows]: which rows must be brought up to the end of the older part in time."""
        waits, p = stamps < 0, self.replay
        return (~waits & (stamps < p.part)) | (waits & (~stamps < segment - p.waiting))

    def stamps(self, changed: Sequence[Array], segment: Array | int = 0) -> Array:
        """Returns int32[rows], stamps of rows that have moved up to the beginning of the newer part, of this
        segment."""
        scale_only, extent = self.replay.scale_only, changed[0].shape[self.replay.axes[0]]
        if scale_only is None:
            return jnp.full((extent,), self.replay.part, jnp.int32)
        good = jnp.ones((extent,), bool)
        for k, leaf in enumerate(changed):
            others = tuple(d for d in range(leaf.ndim) if d != self.replay.axes[k])
            if k in scale_only.zero:
                good &= jnp.all(leaf == 0, axis=others)
            else:
                holds = jnp.isfinite(leaf)
                holds = holds & (leaf >= 0) if k in scale_only.not_negative else holds
                good &= jnp.all(holds, axis=others)
        return jnp.where(good, ~jnp.asarray(segment, jnp.int32), self.replay.part).astype(jnp.int32)

    # --- scale-only rows ---

    def _scaled(self, changed: Sequence[Array], stamps: Array, entries: Entries) -> tuple[list[Array], Array]:
        """Brings scale-only rows up to date; also returns the step from which each row is replayed (`now`: none)."""
        if self.replay.scale_only is None:
            return list(changed), stamps
        whole, before_newer, hold = scales(self.replay, entries)
        chosen = [jnp.where(hold, all_, before) for all_, before in zip(whole, before_newer, strict=True)]
        begin = jnp.where(stamps < 0, jnp.where(hold, entries.now, self.replay.part), stamps)
        return multiplied(self.replay, changed, stamps, chosen), begin

    # --- rows that are replayed ---

    def _replayed(
        self, rows: Sequence[Array], begin: Array, now: Array | int, records: Sequence[Array], suffixes: Suffixes | None
    ) -> list[Array]:
        """Replays the untouched update on rows [B, ...], each from its own step on, until it has caught up or faded."""
        p = self.replay
        values = records[: len(p.values)]
        changed, read = self._parts(rows)

        def one(*row_and_values: Array) -> tuple[Array, ...]:
            n = len(p.leaves)
            alone = [jnp.expand_dims(x, axis) for x, axis in zip(row_and_values[:n], p.axes, strict=True)]
            new = self.update(*alone, *row_and_values[n:])
            return tuple(jnp.squeeze(jnp.asarray(x), axis) for x, axis in zip(new, p.axes, strict=False))

        # Inner loops run along the last axis: that of the rows, if a row is narrow.
        at = -1 if row_elements(changed, begin.size) < _NARROW else 0
        every = jax.vmap(one, in_axes=(*(at,) * len(rows), *(None,) * len(values)), out_axes=at)
        still = [jnp.moveaxis(x, 0, at) for x in read]

        def step(begin: Array, until: Array, k: Array, changed: Sequence[Array]) -> Sequence[Array]:
            recorded = [jax.lax.dynamic_index_in_dim(v, k, 0, keepdims=False) for v in values]
            moves = (begin <= k) & (k < until)
            return [
                jnp.where(moves if at else beside(moves, old), x.astype(old.dtype), old)
                for x, old in zip(every(*changed, *still, *recorded), changed, strict=True)
            ]

        def steps(begin: Array, k: Array, until: Array, changed: Sequence[Array]) -> Sequence[Array]:
            def some(state: tuple[Array, Sequence[Array]]) -> tuple[Array, Sequence[Array]]:
                k, changed = state
                for ahead in range(_UNROLLED):
                    changed = step(begin, until, k + ahead, changed)
                return k + _UNROLLED, changed

            placed = [jnp.moveaxis(x, 0, at) for x in changed]
            done = jax.lax.while_loop(lambda state: state[0] < until, some, (k, placed))[1]
            return [jnp.moveaxis(x, at, 0) for x in done]

        # All rows of a group are computed from its earliest step on; a row moves from its own.
        start = jnp.minimum(jnp.min(begin), now)
        if suffixes is None:
            return list(steps(begin, start, now, changed))
        usual = suffixes.ends(changed, jnp.minimum(begin, suffixes.holds.size - 1))

        def round_(state: tuple[Array, Array, tuple[Array, ...]]) -> tuple[Array, Array, tuple[Array, ...]]:
            k, begin, changed = state
            gone = suffixes.faded(changed, usual, k) & (begin <= k)

            def scaled(changed: tuple[Array, ...]) -> tuple[Array, ...]:
                done = suffixes.without_fading(changed, k)
                return tuple(jnp.where(beside(gone, x), new, x) for x, new in zip(changed, done, strict=True))

            changed = jax.lax.cond(jnp.any(gone), scaled, lambda changed: changed, changed)
            begin = jnp.where(gone, now, begin)
            until = jnp.minimum(k + _STRIDE, now)
            return until, begin, tuple(steps(begin, k, until, changed))

        def goes_on(state: tuple[Array, Array, tuple[Array, ...]]) -> Array:
            return (state[0] < now) & jnp.any(state[1] < now)

        return list(jax.lax.while_loop(goes_on, round_, (start, begin, tuple(changed)))[2])

    def _parts(self, leaves: Sequence[Array]) -> tuple[Sequence[Array], Sequence[Array]]:
        return leaves[: self.replay.changed], leaves[self.replay.changed :]


# --- walks over the rows of tables that share an update log ---


#: Some rows of a table, of each leaf, and their stamps.
Rows = tuple[Sequence[Array], Array]
#: Maps rows and stamps to new rows of the changed leaves, and perhaps new stamps.
CaughtUp = Callable[[Sequence[Array], Array], Sequence[Array]]


@dataclass(frozen=True, slots=True, eq=False)
class DeferredTables:
    """Tables of one form."""

    replay: Replay  #: The replay of each.
    leaves: Sequence[Array]  #: For each table its changed leaves, then those that are only read.
    stamps: Sequence[Array]

    @property
    def each(self) -> list[Rows]:
        """The leaves and stamps, table by table."""
        return list(zip(_cut(self.leaves, len(self.replay.leaves)), self.stamps, strict=True))

    def together(self, caught_up: CaughtUp) -> list[Sequence[Array]]:
        """Applies a function to all rows, concatenated; returns its results table by table."""
        if len(self.stamps) == 1:
            return [caught_up(self.leaves, self.stamps[0])]
        columns = zip(*(leaves for leaves, _ in self.each), strict=True)
        rows = [jnp.concatenate(parts, axis) for parts, axis in zip(columns, self.replay.axes, strict=True)]
        new = caught_up(rows, jnp.concatenate(self.stamps))
        axes = (*self.replay.axes[: self.replay.changed], 0)
        ends = np.cumsum([stamps.shape[0] for stamps in self.stamps]).tolist()
        return [
            [jax.lax.slice_in_dim(x, start, end, axis=axis) for x, axis in zip(new, axes, strict=False)]
            for start, end in itertools.pairwise([0, *ends])
        ]

    def replaced(self, rows: Sequence[Array], caught_up: CaughtUp) -> tuple[Array, ...]:
        """Replaces rows of each table (indices int32[], sorted) by `caught_up` ones; returns changed leaves and
        stamps."""
        taken: list[Array] = []
        for (leaves, _), some in zip(self.each, rows, strict=True):
            pairs = zip(leaves, self.replay.axes, strict=True)
            taken += [x.at[along(axis, some)].get(mode="clip") for x, axis in pairs]
        pairs = zip(self.stamps, rows, strict=True)
        stamped = [stamps.at[some].get(mode="fill", fill_value=NEVER) for stamps, some in pairs]
        new = DeferredTables(self.replay, taken, stamped).together(caught_up)
        changed: list[Array] = []
        for (leaves, _), (*after, _), some in zip(self.each, new, rows, strict=True):
            triples = zip(leaves, after, self.replay.axes, strict=False)
            changed += [set_rows(leaf, x, some, axis) for leaf, x, axis in triples]
        ends = (set_rows(x, end, some, 0) for x, (*_, end), some in zip(self.stamps, new, rows, strict=True))
        return *changed, *ends

    def visited(
        self, chosen: Sequence[tuple[Array, Array | int]], elements: int, caught_up: CaughtUp
    ) -> tuple[Array, ...]:
        """Replaces rows by `caught_up` ones, some at a time; returns changed leaves and stamps.

        `chosen`: for each table row indices, int32[], and how many of them, from the first on, are replaced.
        `elements`: elements of a leaf that are taken at a time, over all tables.
        """
        n, m = self.replay.changed, len(self.replay.leaves)
        counts = [numbers.shape[0] for numbers, _ in chosen]
        rows = max(len(counts), elements // row_elements(self.leaves[:n], self.stamps[0].shape[0]))
        rounds = max(1, -(-sum(counts) // rows))
        sizes = [-(-count // rounds) for count in counts]
        padded = [
            jnp.pad(numbers, (0, rounds * size - numbers.shape[0]), constant_values=stamps.shape[0])
            for (numbers, _), size, stamps in zip(chosen, sizes, self.stamps, strict=True)
        ]
        read = [leaves[n:] for leaves in _cut(self.leaves, m)]

        def round_(k: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
            some = [jax.lax.dynamic_slice_in_dim(x, k * size, size) for x, size in zip(padded, sizes, strict=True)]
            changed, stamps = state[: -len(counts)], state[-len(counts) :]
            leaves = [x for pair in zip(_cut(changed, n), read, strict=True) for part in pair for x in part]
            return DeferredTables(self.replay, leaves, stamps).replaced(some, caught_up)

        turns = [-(-many // max(1, size)) for (_, many), size in zip(chosen, sizes, strict=True)]
        most = functools.reduce(jnp.maximum, turns, jnp.zeros((), jnp.int32))
        changed = (x for leaves, _ in self.each for x in leaves[:n])
        return jax.lax.fori_loop(0, most, round_, (*changed, *self.stamps))


def row_elements(leaves: Sequence[Array], rows: int) -> int:
    """Counts the elements of a row of the widest leaf."""
    return max(1, max(leaf.size // max(1, rows) for leaf in leaves))


def _cut(items: Sequence[Array], size: int) -> list[Sequence[Array]]:
    return [items[k : k + size] for k in range(0, len(items), size)]
