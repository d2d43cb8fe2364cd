"""Decisions: what is lifted and how each parameter's gradient travels. The Program holds the facts.

Patterns over parameter paths: a pattern that matches a node covers its leaves; `*` stays within a segment, `**`
crosses segments; the first match wins.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal as Choice

from autopar.ir.layout import RowLayout

#: Methods that run a table's step on its touched rows.
ROW_METHODS = ("ps", "allgather", "allreduce_rows")
METHODS = ("auto", "allreduce", *ROW_METHODS)
Sparse = Choice["exact", "lazy", "off"]
Strategy = str | Mapping[str, str]
#: "pjit": one global program, partitioned by XLA. "pmap": each device's own program, with explicit reductions.
Emit = Choice["pjit", "pmap"]


@dataclass(frozen=True, slots=True)
class FamilyPlan:
    """A lifted family.

    Attributes:
      family: Its id in `Program.rows`.
      rows: Static bound on the rows a step touches, one padding row included.
      ids: Number of ids a step looks up, duplicates included.
      method: How its rows travel ("ps" on one device, where nothing travels).
      lazy: Only touched rows move, whatever the optimizer says.
      asked: Rows that all devices together ask for, where these travel by themselves ("ps", "allgather"); else None.
      capacity: The most rows that one device asks another one for; else None.
      layout: How the rows are spread; else None.
      imbalance: Of the example, the rows that a device asks one owner for at most over the average, if measured.
      tight: Whether `capacity` was measured, so that a batch may exceed it: then the step is run by the fallback.
    """

    family: int
    rows: int
    ids: int
    method: str
    lazy: bool
    asked: int | None = None
    capacity: int | None = None
    layout: RowLayout | None = None
    tight: bool = False
    imbalance: float | None = None


@dataclass(frozen=True, slots=True)
class ParameterPlan:
    """What was decided for one table, and why.

    Attributes:
      sent: On several devices, method -> bytes that each device would send in a step for the table's family.
      seconds: Method -> the time that its exchanges and updates were predicted to take, where that was asked.
    """

    path: str
    lifted: bool
    method: str
    reason: str
    remedy: str = ""
    line: str = ""
    sent: Mapping[str, int] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Plan:
    """The decisions for one step at one set of shapes.

    Attributes:
      families: The tables that are lifted, with their slots.
      parameters: Every table, lifted or not, with the reason.
      sparse: "exact", "lazy" or "off".
      devices: N, over which batches are spread.
      placements: For each input of the program the axis along which it is spread over the devices; None: each device
        holds all of it.
      layouts: Input -> (layout, row axis) of those that are stored otherwise than as they are.
      fallback: The families once more with the capacity that no batch exceeds, if some are tight.
      shares: Dense leaves that are spread and gathered for use -> the axis.
      emit: Whether XLA partitions one program over the devices, or each device's own is written.
    """

    families: tuple[FamilyPlan, ...]
    parameters: tuple[ParameterPlan, ...]
    sparse: Sparse
    devices: int = 1
    placements: tuple[int | None, ...] = ()
    layouts: Mapping[int, tuple[RowLayout, int]] = field(default_factory=dict)
    fallback: tuple[FamilyPlan, ...] = ()
    shares: Mapping[int, int] = field(default_factory=dict)
    emit: Emit = "pjit"

    @property
    def rewrites(self) -> bool:
        """Whether the step is run otherwise than as JAX traced it."""
        return self.lifts or bool(self.shares) or self.emit == "pmap"

    @property
    def lifts(self) -> bool:
        """Whether anything is lifted."""
        return bool(self.families)

    def without_limits(self) -> Plan:
        """The fallback's plan."""
        return dataclasses.replace(self, families=self.fallback, fallback=())

    def family(self, family: int) -> FamilyPlan | None:
        """The plan of a family, None if it stays dense."""
        return next((f for f in self.families if f.family == family), None)


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    parts = re.split(r"(\*\*|\*)", pattern.strip("/"))
    text = "".join({"**": ".*", "*": "[^/]*"}.get(p, re.escape(p)) for p in parts)
    text = text.replace("/.*/", "/(?:.*/)?")
    return re.compile(f"{text}(?:/.*)?")


def matches(pattern: str, path: str) -> bool:
    """Whether a pattern covers a path: `matches("params/item*", "params/item_emb/embedding")`."""
    return _compiled(pattern).fullmatch(path) is not None
