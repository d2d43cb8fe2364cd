"""What a plan that was made before decides about a step, by the paths of its parameters: what `choose` is to follow."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.ir.plan import Method, TablePlan


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
    tables: tuple[TablePlan, ...]
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

    def of(self, path: str) -> TablePlan:
        """What is decided about a table, which must be known."""
        return next(t for t in self.tables if t.path == path)
