"""`DeferredTable`: a leaf of the state whose untouched rows wait for steps to be replayed (`ir.deferred`).

The leaves of a family (a table, its optimizer slots) share a `Journal`: what steps wrote down, and the leaves as they
are stored, some rows lagging behind. Reading any of them brings all rows up to date first, once: a stale row can't be
read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.backends.emit import deferred_of
from autopar.errors import DonatedStateError
from autopar.ir.printer import format_block
from autopar.ir.program import Equation
from autopar.table_leaf import TableLeaf


class Journaling:
    """What a planned step knows of a family's journals: how to begin one, and how to flush it early."""

    def __init__(self, flush: Equation) -> None:
        """
        Args:
          flush: The equation of the planned step that flushes the family's journal.
        """
        deferred = deferred_of(flush)
        self.replay = deferred.replay
        self._signature = [str(deferred.replay), *format_block(deferred.body)]
        n, read = self.replay.changed, self.replay.read

        def run(*operands: Any) -> tuple[Any, ...]:
            leaves, (stamps, now, *records) = operands[: n + read], operands[n + read :]
            return deferred.flush(leaves, stamps, now, records, due=True)

        self.flush = jax.jit(run, donate_argnums=(*range(n), n + read))
        self._stamps = jax.jit(lambda *changed: deferred.stamps(changed))

    def begin(self, leaves: Sequence[jax.Array]) -> list[jax.Array]:
        """An empty journal for leaves that are up to date: stamps, now, records."""
        stamps = self._stamps(*leaves[: self.replay.changed])
        records = [jnp.zeros((self.replay.length, *t.shape), t.dtype) for t in self.replay.records]
        return [stamps, jnp.zeros((), jnp.int32), *records]

    def continues(self, other: Journaling) -> bool:
        """Whether a journal of another plan is one of this one's, too."""
        return self is other or self._signature == other._signature


@dataclass(eq=False)
class Journal:
    """A family's leaves, some rows lagging behind, and what they missed.

    Attributes:
      leaves: Changed ones, then those that are only read.
      entries: stamps, now, records.
    """

    journaling: Journaling
    leaves: list[jax.Array]
    entries: list[jax.Array]
    is_settled: bool = False

    def settled(self, k: int) -> jax.Array:
        """A leaf with all rows up to date. The journal is empty then, and goes on with the next step."""
        if self.is_deleted():
            raise DonatedStateError(
                "the rows were given to a later step, which updated them in place: read the state that it returned, or "
                "keep old states with parallelize(step, donate=False)"
            )
        if not self.is_settled:
            changed = self.journaling.replay.changed
            *leaves, stamps, now = self.journaling.flush(*self.leaves, *self.entries)
            self.leaves[:changed] = leaves
            self.entries[:2] = [stamps, now]
            self.is_settled = True
        return self.leaves[k]

    def is_deleted(self) -> bool:
        """Whether a step got them, and updated them in place."""
        return self.leaves[0].is_deleted()


@dataclass(frozen=True, eq=False, repr=False)
class DeferredTable(TableLeaf):
    """Rows that move in every step, of which those that no batch touched are moved when they are read.

    A leaf of the state like an array: `jax.tree` maps over it, and a step made by `parallelize` takes and returns it.
    Reading it (`np.asarray`, `jnp.asarray`, indexing) gives the true rows. Other JAX functions refuse it:
    `autopar.materialize(state)` makes ordinary arrays.

    Attributes:
      journal: Shared by the table and its slots.
      place: Which of the journal's leaves it is.
    """

    journal: Journal
    place: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The table's own shape, [..., V, ...]."""
        return self.journal.leaves[self.place].shape

    @property
    def dtype(self) -> Any:
        """The rows' dtype."""
        return self.journal.leaves[self.place].dtype

    def is_deleted(self) -> bool:
        """Whether the rows were given to a step, which updated them in place."""
        return self.journal.is_deleted()

    def materialize(self) -> jax.Array:
        """The table as an ordinary array, a copy."""
        return jnp.copy(self.journal.settled(self.place))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        found = np.asarray(self.journal.settled(self.place))
        return np.array(found, dtype or found.dtype)

    def __getitem__(self, index: Any) -> jax.Array:
        leaf = self.journal.settled(self.place)
        found = leaf[index]
        return jnp.copy(found) if found is leaf else found  # later steps update the leaf in place

    def __repr__(self) -> str:
        shape = ",".join(map(str, self.shape))
        return (
            f"autopar.DeferredTable({self.dtype}[{shape}], rows brought up to date when they are read; "
            "for other JAX functions: autopar.materialize(state))"
        )


def common_journal(leaves: Sequence[Any], journaling: Journaling) -> Journal | None:
    """The journal that a step can go on with: its leaves are these, and it is kept in the same way."""
    first = leaves[0]
    if not isinstance(first, DeferredTable) or first.is_deleted() or not journaling.continues(first.journal.journaling):
        return None
    journal = first.journal
    for k, leaf in enumerate(leaves):
        if k < journaling.replay.changed:
            same = isinstance(leaf, DeferredTable) and leaf.journal is journal and leaf.place == k
        else:
            same = leaf is journal.leaves[k]
        if not same:
            return None
    return journal
