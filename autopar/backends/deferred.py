"""Replays deferred rows on a device: rows that a step or an evaluation reads, and some lagging rows between steps.

A row's *stamp* is the step of the update log up to which it was updated. Rows are sorted by stamp and replayed in
groups, so that an old row delays few others. While steps fill the newer part of the update log (`ir.deferred`),
`catch_up_some` brings rows up to the end of the older part; then `rotate` makes the newer part the older one.

Scale-only rows (`ir.deferred.ScaleOnly`) wait longer, at no cost. The factors of a full part are kept as a *segment*,
one number for each leaf. Such a row's stamp is ~s (negative), where s is the first segment that it hasn't been
multiplied by. Rows that have waited for many segments are multiplied between steps, so that old segments can be
dropped. Only if a step breaks the assumptions of scale-only rows are all rows brought up to date at once (`flush`).

Invariants: stamps of rows that aren't scale-only are at most `now`, and at least K when the newer part is full; those
of scale-only rows then name its segment or one of the last (`Replay.waiting`). Records from `now` on, and segments from
`segment` on, are never read. The product of all segments' factors is finite.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from autopar.analysis.scale_only import RowUpdate, factors, fading_numbers
from autopar.backends.indices import along, set_rows
from autopar.backends.segments import Entries, Suffixes, beside, close, multiplied, scales
from autopar.ir.deferred import Replay
from autopar.ir.program import Block
from autopar.jax_types import Array, Leaf

#: A group has this many elements of a leaf, or this many rows if that is more. In small groups less waits for the
#: oldest row; large groups need fewer loops.
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

    Operands are the leaves of each table, then the stamps of each.
    """

    replay: Replay
    body: Block  #: The untouched update.
    update: Callable[..., Sequence[Array]]  #: Runs the body on arrays.

    def flush_axes(self, tables: Sequence[bool]) -> tuple[list[int | None], tuple[int | None, ...]]:
        """Returns the axes along which a flush's operands and results are sharded.

        `tables`: whether each table's rows are sharded.
        """
        p = self.replay
        rows = [[axis if is_sharded else None for axis in p.axes] for is_sharded in tables]
        stamps = [0 if is_sharded else None for is_sharded in tables]
        entries = 2 + len(p.records) + len(p.segments)
        changed = (axis for axes in rows for axis in axes[: p.changed])
        return [*itertools.chain(*rows), *stamps, *[None] * entries], (*changed, *stamps, None, None)

    # --- what a step does ---

    def catch_up_tables(self, rows: Sequence[Array], stamps: Sequence[Array], entries: Entries) -> tuple[Array, ...]:
        """Returns the changed leaves of several tables' rows after `now` steps."""
        tables = DeferredTables(self.replay, rows, stamps)
        return tuple(itertools.chain(*tables.apply(lambda some, stamped: self.catch_up(some, stamped, entries))))

    def catch_up(self, rows: Sequence[Array], stamps: Array, entries: Entries) -> tuple[Array, ...]:
        """Returns the changed leaves of rows ([U, ...] of each leaf, changed ones first) after `now` steps."""
        changed, read = self._parts([jnp.moveaxis(x, axis, 0) for x, axis in zip(rows, self.replay.axes, strict=True)])
        changed, begin = self._scaled(changed, stamps, entries)
        moved = self._replay_all(changed, read, begin, entries.now, entries.records)
        return tuple(jnp.moveaxis(x, 0, axis) for x, axis in zip(moved, self.replay.axes, strict=False))

    def _replay_all(
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
            new = self._replay_group(mine, first, now, records, suffixes)
            return tuple(x.at[some].set(v, mode="drop") for x, v in zip(changed, new, strict=True))

        return jax.lax.fori_loop(0, -(-waiting // group_rows), group, tuple(changed))

    def record(
        self, now: Array, records: Sequence[Array], values: Sequence[Array], exceeded: Array | None = None
    ) -> list[Array]:
        """Returns the update log's records with one step more; without it if it `exceeded` a capacity, as it then runs
        again."""
        p = self.replay
        recorded = list(map(jnp.asarray, values))
        later: list[Array] = []
        if p.scale_only is not None:
            update = RowUpdate(self.body, p.changed, p.read)
            *rates, holds = factors(update, p.scale_only, recorded, jnp)
            if p.fading is not None:
                numbers = fading_numbers(update, p.scale_only, p.fading, recorded, jnp)
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

    def calls(self, elements: int) -> int:
        """Returns the number of calls of `catch_up_some` that visit all rows: one a step, or fewer for few rows.

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
        done = DeferredTables(self.replay, leaves, stamps).update_in_blocks(chosen, _FLUSH_ELEMENTS, caught_up)
        return (*done, jnp.full_like(entries.now, self.replay.part), jnp.zeros_like(entries.segment))

    def rotate(self, stamps: Sequence[Array], entries: Entries) -> tuple[Array, ...]:
        """Makes the newer, full part the older one; returns a flag, stamps, now, segment and segments.

        The flag says that a flush is needed instead, because scale-only rows can't wait any longer. `UpdateLog` moves
        the records.
        """
        p = self.replay
        needs_flush, dropped, segment, segments = close(p, entries)
        moved = [jnp.where(x < 0, x + dropped, x - p.part) for x in stamps]
        return (needs_flush, *moved, jnp.full_like(entries.now, p.part), segment, *segments)

    def catch_up_some(
        self,
        leaves: Sequence[Array],
        stamps: Sequence[Array],
        entries: Entries,
        which: Array,
        ids: Sequence[Array],
        calls: int,
    ) -> tuple[Array, ...]:
        """Brings some rows up to `now`; returns changed leaves and stamps.

        These are rows that an evaluation reads, or a fraction of all rows that lag behind the older part: one program
        for both, since a replay takes long to compile.

        Args:
          leaves, stamps: As in `flush`.
          entries: The update log; to catch up with the older part, the log as it was when that was closed (`now` is K).
          which: int32[]. Below 0: brings rows `ids` up to date. Else rows which, which + calls, which + 2 calls, ... if
            they lag.
          ids: Row indices of each table, int32[], sorted and distinct; those out of range are ignored.
          calls: Number of calls that together visit all rows.
        """
        is_read = which < 0

        def chosen(stamps: Array, ids: Array) -> tuple[Array, Array]:
            extent = stamps.shape[0]
            each = which + calls * jax.lax.iota(jnp.int32, -(-extent // calls))
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
        return DeferredTables(self.replay, leaves, stamps).update_in_blocks(rows, _SOME_ELEMENTS, caught_up)

    def caught_up(self, rows: Sequence[Array], stamps: Array, entries: Entries) -> tuple[Array, ...]:
        """Returns the changed leaves of rows after `now` steps, and their new stamps."""
        new, p = self.catch_up(rows, stamps, entries), self.replay
        return *new, jnp.where(entries.now == p.part, self.stamps(new, entries.segment), entries.now)

    def lags(self, stamps: Leaf, segment: Leaf) -> Leaf:
        """Returns bool[rows]: rows that are to be brought up to the end of the older part."""
        waits, p = stamps < 0, self.replay
        return (~waits & (stamps < p.part)) | (waits & (~stamps < segment - p.waiting))

    def stamps(self, changed: Sequence[Array], segment: Array | int = 0) -> Array:
        """Returns int32[rows], the stamps of rows that are up to date when the newer part begins, as this segment."""
        scale_only, extent = self.replay.scale_only, changed[0].shape[self.replay.axes[0]]
        if scale_only is None:
            return jnp.full((extent,), self.replay.part, jnp.int32)
        is_scale_only = jnp.ones((extent,), bool)
        for k, leaf in enumerate(changed):
            others = tuple(d for d in range(leaf.ndim) if d != self.replay.axes[k])
            if k in scale_only.zero:
                is_scale_only &= jnp.all(leaf == 0, axis=others)
            else:
                holds = jnp.isfinite(leaf)
                holds = holds & (leaf >= 0) if k in scale_only.not_negative else holds
                is_scale_only &= jnp.all(holds, axis=others)
        return jnp.where(is_scale_only, ~jnp.asarray(segment, jnp.int32), self.replay.part).astype(jnp.int32)

    # --- scale-only rows ---

    def _scaled(self, changed: Sequence[Array], stamps: Array, entries: Entries) -> tuple[list[Array], Array]:
        """Brings scale-only rows up to date. Also returns the step from which on each row is to be replayed; `now` if
        none."""
        if self.replay.scale_only is None:
            return list(changed), stamps
        whole, before_newer, hold = scales(self.replay, entries)
        chosen = [jnp.where(hold, all_, before) for all_, before in zip(whole, before_newer, strict=True)]
        begin = jnp.where(stamps < 0, jnp.where(hold, entries.now, self.replay.part), stamps)
        return multiplied(self.replay, changed, stamps, chosen), begin

    # --- rows that are replayed ---

    def _replay_group(
        self, rows: Sequence[Array], begin: Array, now: Array | int, records: Sequence[Array], suffixes: Suffixes | None
    ) -> list[Array]:
        """Replays steps on a group's rows [B, ...], each from its own `begin` on, until it has caught up or faded."""
        p = self.replay
        values = records[: len(p.values)]
        changed, read = self._parts(rows)

        def update_row(*row_and_values: Array) -> tuple[Array, ...]:
            n = len(p.leaves)
            alone = [jnp.expand_dims(x, axis) for x, axis in zip(row_and_values[:n], p.axes, strict=True)]
            new = self.update(*alone, *row_and_values[n:])
            return tuple(jnp.squeeze(jnp.asarray(x), axis) for x, axis in zip(new, p.axes, strict=False))

        # Inner loops run along the last axis: that of the rows, if a row is narrow.
        axis = -1 if row_elements(changed, begin.size) < _NARROW else 0
        update_rows = jax.vmap(update_row, in_axes=(*(axis,) * len(rows), *(None,) * len(values)), out_axes=axis)
        fixed = [jnp.moveaxis(x, 0, axis) for x in read]

        def step(begin: Array, until: Array, k: Array, changed: Sequence[Array]) -> Sequence[Array]:
            recorded = [jax.lax.dynamic_index_in_dim(v, k, 0, keepdims=False) for v in values]
            moves = (begin <= k) & (k < until)
            return [
                jnp.where(moves if axis else beside(moves, old), x.astype(old.dtype), old)
                for x, old in zip(update_rows(*changed, *fixed, *recorded), changed, strict=True)
            ]

        def steps(begin: Array, k: Array, until: Array, changed: Sequence[Array]) -> Sequence[Array]:
            def some(state: tuple[Array, Sequence[Array]]) -> tuple[Array, Sequence[Array]]:
                k, changed = state
                for ahead in range(_UNROLLED):
                    changed = step(begin, until, k + ahead, changed)
                return k + _UNROLLED, changed

            placed = [jnp.moveaxis(x, 0, axis) for x in changed]
            done = jax.lax.while_loop(lambda state: state[0] < until, some, (k, placed))[1]
            return [jnp.moveaxis(x, axis, 0) for x in done]

        # The loop runs from the group's earliest step on; each row changes from its own.
        start = jnp.minimum(jnp.min(begin), now)
        if suffixes is None:
            return list(steps(begin, start, now, changed))
        usual = suffixes.ends(changed, jnp.minimum(begin, suffixes.holds.size - 1))

        def stride(state: tuple[Array, Array, tuple[Array, ...]]) -> tuple[Array, Array, tuple[Array, ...]]:
            k, begin, changed = state
            faded = suffixes.faded(changed, usual, k) & (begin <= k)

            def scaled(changed: tuple[Array, ...]) -> tuple[Array, ...]:
                done = suffixes.without_fading(changed, k)
                return tuple(jnp.where(beside(faded, x), new, x) for x, new in zip(changed, done, strict=True))

            changed = jax.lax.cond(jnp.any(faded), scaled, lambda changed: changed, changed)
            begin = jnp.where(faded, now, begin)
            until = jnp.minimum(k + _STRIDE, now)
            return until, begin, tuple(steps(begin, k, until, changed))

        def goes_on(state: tuple[Array, Array, tuple[Array, ...]]) -> Array:
            return (state[0] < now) & jnp.any(state[1] < now)

        return list(jax.lax.while_loop(goes_on, stride, (start, begin, tuple(changed)))[2])

    def _parts(self, leaves: Sequence[Array]) -> tuple[Sequence[Array], Sequence[Array]]:
        return leaves[: self.replay.changed], leaves[self.replay.changed :]


# --- walks over the rows of tables that share an update log ---


#: Some rows of a table, of each leaf, and their stamps.
Rows = tuple[Sequence[Array], Array]
#: Maps rows and stamps to new rows of the changed leaves, and perhaps new stamps.
CaughtUp = Callable[[Sequence[Array], Array], Sequence[Array]]


@dataclass(frozen=True, slots=True, eq=False)
class DeferredTables:
    """Tables with the same replay."""

    replay: Replay
    leaves: Sequence[Array]  #: For each table its changed leaves, then those that are only read.
    stamps: Sequence[Array]  #: For each table.

    @property
    def tables(self) -> list[Rows]:
        return list(zip(_cut(self.leaves, len(self.replay.leaves)), self.stamps, strict=True))

    def apply(self, caught_up: CaughtUp) -> list[Sequence[Array]]:
        """Applies a function to the concatenated rows of all tables; returns its results by table."""
        if len(self.stamps) == 1:
            return [caught_up(self.leaves, self.stamps[0])]
        columns = zip(*(leaves for leaves, _ in self.tables), strict=True)
        rows = [jnp.concatenate(parts, axis) for parts, axis in zip(columns, self.replay.axes, strict=True)]
        new = caught_up(rows, jnp.concatenate(self.stamps))
        axes = (*self.replay.axes[: self.replay.changed], 0)
        ends = np.cumsum([stamps.shape[0] for stamps in self.stamps]).tolist()
        return [
            [jax.lax.slice_in_dim(x, start, end, axis=axis) for x, axis in zip(new, axes, strict=False)]
            for start, end in itertools.pairwise([0, *ends])
        ]

    def update_rows(self, rows: Sequence[Array], caught_up: CaughtUp) -> tuple[Array, ...]:
        """Applies a function to some rows of each table; returns all changed leaves and stamps.

        `rows`: row indices of each table, int32[], sorted.
        """
        taken: list[Array] = []
        for (leaves, _), some in zip(self.tables, rows, strict=True):
            pairs = zip(leaves, self.replay.axes, strict=True)
            taken += [x.at[along(axis, some)].get(mode="clip") for x, axis in pairs]
        pairs = zip(self.stamps, rows, strict=True)
        stamped = [stamps.at[some].get(mode="fill", fill_value=NEVER) for stamps, some in pairs]
        new = DeferredTables(self.replay, taken, stamped).apply(caught_up)
        changed: list[Array] = []
        for (leaves, _), (*after, _), some in zip(self.tables, new, rows, strict=True):
            triples = zip(leaves, after, self.replay.axes, strict=False)
            changed += [set_rows(leaf, x, some, axis) for leaf, x, axis in triples]
        ends = (set_rows(x, end, some, 0) for x, (*_, end), some in zip(self.stamps, new, rows, strict=True))
        return *changed, *ends

    def update_in_blocks(
        self, chosen: Sequence[tuple[Array, Array | int]], elements: int, caught_up: CaughtUp
    ) -> tuple[Array, ...]:
        """Applies a function to some rows of each table, a block at a time; returns changed leaves and stamps.

        `chosen`: for each table row indices, int32[], and the number of the first ones that count. `elements`: elements
        of a leaf in a block, over all tables.
        """
        n, m = self.replay.changed, len(self.replay.leaves)
        counts = [numbers.shape[0] for numbers, _ in chosen]
        rows = max(len(counts), elements // row_elements(self.leaves[:n], self.stamps[0].shape[0]))
        blocks = max(1, -(-sum(counts) // rows))
        sizes = [-(-count // blocks) for count in counts]
        padded = [
            jnp.pad(numbers, (0, blocks * size - numbers.shape[0]), constant_values=stamps.shape[0])
            for (numbers, _), size, stamps in zip(chosen, sizes, self.stamps, strict=True)
        ]
        read = [leaves[n:] for leaves in _cut(self.leaves, m)]

        def update_block(k: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
            some = [jax.lax.dynamic_slice_in_dim(x, k * size, size) for x, size in zip(padded, sizes, strict=True)]
            changed, stamps = state[: -len(counts)], state[-len(counts) :]
            leaves = [x for pair in zip(_cut(changed, n), read, strict=True) for part in pair for x in part]
            return DeferredTables(self.replay, leaves, stamps).update_rows(some, caught_up)

        turns = [-(-many // max(1, size)) for (_, many), size in zip(chosen, sizes, strict=True)]
        most = functools.reduce(jnp.maximum, turns, jnp.zeros((), jnp.int32))
        changed = (x for leaves, _ in self.tables for x in leaves[:n])
        return jax.lax.fori_loop(0, most, update_block, (*changed, *self.stamps))


def row_elements(leaves: Sequence[Array], rows: int) -> int:
    """Returns the number of elements in a row of the widest leaf."""
    return max(1, max(leaf.size // max(1, rows) for leaf in leaves))


def _cut(items: Sequence[Array], size: int) -> list[Sequence[Array]]:
    return [items[k : k + size] for k in range(0, len(items), size)]
