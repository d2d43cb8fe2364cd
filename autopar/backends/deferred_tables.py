"""`DeferredTables`: the leaves and stamps of tables that share an update log, and walks over their rows.

Rows of all tables are brought up to date together, one table's behind the other's: that is one program, and one loop,
for however many tables.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from autopar.backends.indices import along, set_rows
from autopar.ir.deferred import Replay
from autopar.jax_types import Array

#: Some rows of a table, of each leaf, and their stamps.
Rows = tuple[Sequence[Array], Array]
#: Rows and stamps -> new rows of the changed leaves, and perhaps new stamps.
CaughtUp = Callable[[Sequence[Array], Array], Sequence[Array]]
#: The stamp of no row.
NEVER = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True, eq=False)
class DeferredTables:
    """Holds tables of one form.

    Attributes:
      replay: That of any of them.
      leaves: Of each table changed ones, then those that are only read.
      stamps: Of each table.
    """

    replay: Replay
    leaves: Sequence[Array]
    stamps: Sequence[Array]

    @property
    def each(self) -> list[Rows]:
        """Returns leaves and stamps, table by table."""
        return list(zip(_cut(self.leaves, len(self.replay.leaves)), self.stamps, strict=True))

    def together(self, caught_up: CaughtUp) -> list[Sequence[Array]]:
        """Returns, table by table, what a function makes of all rows, one table's behind the other's."""
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
        """Replaces some rows of each table by what a function makes of them and their stamps.

        Args:
          rows: Of each table numbers of rows, int32[], sorted.
          caught_up: Makes new rows and stamps.

        Returns:
          Changed leaves and stamps.
        """
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
        """Replaces rows, some at a time; returns changed leaves and stamps.

        Args:
          chosen: Of each table numbers of rows, int32[], and how many of them, from the first on, are to be replaced.
          elements: How many elements of a leaf are taken at a time, of all tables together.
          caught_up: Makes new rows and stamps.
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
