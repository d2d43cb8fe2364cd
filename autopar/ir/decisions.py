"""What a plan that was made before decides about a step, by the paths of its parameters: what `choose` is to follow."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.ir.plan import Method, Where


@dataclass(frozen=True, slots=True)
class TableDecision:
    """What is decided about a table that is looked up by rows.

    Attributes:
      path, shape, dtype: Of the table.
      axis: Of its rows.
      slots: Paths of the leaves whose rows go with the table's; other tables of the family among them.
      ids: Ids that a step looks up, over all devices, duplicates included.
      method, where, lifted: How its gradient travels; where its rows are; whether the touched rows alone are updated.
      reason, remedy, line: Why; what would change it; where it is looked up.
      refused: Whether it can't be lifted at all.
      capacity, tight: By "ps", the rows that a device asks another one for at most; whether that was measured.
      dealt: Whether its rows are dealt out over the devices, rather than in shares of adjacent rows.
      journal: Steps that untouched rows wait for at most; 0 where no step moves them.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    axis: int
    slots: tuple[str, ...]
    ids: int
    method: str
    where: Where
    lifted: bool
    reason: str = ""
    remedy: str = ""
    line: str = ""
    refused: bool = False
    capacity: int | None = None
    tight: bool = False
    dealt: bool = False
    journal: int = 0


@dataclass(frozen=True, slots=True)
class Decisions:
    """Those about a whole step.

    Attributes:
      source: Where they come from, in words.
      devices: N, for which they were made.
      tables: Every table that is looked up by rows.
      shared: Paths of the dense leaves that are kept in shares.
    """

    source: str
    devices: int
    tables: tuple[TableDecision, ...]
    shared: tuple[str, ...] = ()

    @property
    def strategy(self) -> Mapping[str, Method]:
        """The method of each path. Longer paths come first: a path covers those that begin with it."""
        methods: dict[str, Method] = dict.fromkeys(self.shared, "ps")
        for table in self.tables:
            methods[table.path] = (table.method, "hosts") if table.where == "hosts" else table.method
        return {path: methods[path] for path in sorted(methods, key=lambda path: (-path.count("/"), path))}

    @property
    def digest(self) -> str:
        """The same for equal decisions, on every process."""
        limits = [(t.path, t.lifted, t.ids, t.capacity, t.tight, t.dealt, t.journal) for t in self.tables]
        about = (self.devices, self.strategy, limits)
        return hashlib.blake2b(repr(about).encode(), digest_size=8).hexdigest()

    def of(self, path: str) -> TableDecision:
        """What is decided about a table, which must be known."""
        return next(t for t in self.tables if t.path == path)
